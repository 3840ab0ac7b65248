"""Which predictor foretells which layer, chosen by measurement and kept in a JSON file beside the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonmoe.errors import InputError
from tritonmoe.files import parse_json, read_file, write_file
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ModelWeights
from tritonmoe.prediction.default_vectors import model_identity

FORMAT = "tritonmoe hybrid choice, version 1"
REMEDY = "make the file anew with tools/calibrate.py --choose-hybrid"
MAX_BYTES = 1 << 20  # recall by layer and predictor takes some kilobytes
CHOICES = ("residual", "quasi-hidden", "estimator")  # by what they cost a step


@dataclass(frozen=True)
class HybridChoice:
    """By position in the model: what foretells each layer with experts but the first, one of `CHOICES`."""

    by_layer: dict[int, str]

    def save(self, path: Path, model: str, why: dict[str, Any]) -> None:
        """Write the file for the model of this `model_identity`; `why` says by what rule and figures.

        InputError where it cannot be written.
        """
        layers = {str(layer): name for layer, name in self.by_layer.items()}
        content = {"format": FORMAT, "model": model, "layers": layers, "why": why}
        try:
            write_file(path, (json.dumps(content, indent=1) + "\n").encode())
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def load_hybrid(path: Path, spec: ModelSpec, weights: ModelWeights) -> HybridChoice:
    """Read the file that `HybridChoice.save` wrote for this model; InputError, one line, for any other."""
    try:
        content = parse_json(read_file(path, MAX_BYTES))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise InputError(f"{path}: not JSON; {REMEDY}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{path}: not a hybrid choice; {REMEDY}")
    if content.get("model") != model_identity(spec, weights):
        raise InputError(f"{path}: the choice for another model (its routers differ); {REMEDY}")
    layers, expected = content.get("layers"), [str(layer) for layer in spec.moe_layers][1:]
    if not isinstance(layers, dict) or list(layers) != expected or any(name not in CHOICES for name in layers.values()):
        raise InputError(f"{path}: does not name a predictor for every layer but the first; {REMEDY}")
    return HybridChoice({int(layer): name for layer, name in layers.items()})
