"""The estimator: one small network that foretells the next layer's router logits, in a file that names its model.

From the quasi-hidden state of a layer, as arXiv 2603.19289 describes it: a projection down to D, a learned vector of
the layer that is foretold, a SiLU MLP over N with a skip, LayerNorm, and a head of E logits. What `corrects` says is
ours: the head's logits are added to those of that layer's own router, so that the network need not learn which expert
is which. `tools/train_estimator.py` trains it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tritonmoe.checkpoint.model_file import read_tensors, write_tensors
from tritonmoe.checkpoint.tensor_files import read_header_and_metadata
from tritonmoe.errors import CheckpointError, InputError
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ModelWeights
from tritonmoe.prediction.default_vectors import model_identity, vector_shape
from tritonmoe_kernels.estimate_reference import EstimatorWeights

FORMAT = "tritonmoe estimator, version 1"
REMEDY = "make the file anew with tools/train_estimator.py"
NO_VECTORS = "none"


@dataclass(frozen=True)
class Estimator:
    """`shared.layer` holds the vectors of all layers, [L_moe - 1, D]: of every layer with experts but the first."""

    shared: EstimatorWeights
    corrects: bool
    vectors: str  # the identity of the default vectors of its quasi-hidden states, or NO_VECTORS

    @classmethod
    def initial(cls, spec: ModelSpec, width: int, inner: int, corrects: bool, vectors: str, seed: int) -> Estimator:
        """Random weights of unit gain on the CPU, float32; the head is small, where it corrects zero.

        InputError for a model without two layers of equally many experts.
        """
        layers, experts, hidden = vector_shape(spec)
        if layers < 2:
            raise InputError("an estimator foretells the next layer's experts; this model has one layer with experts")
        generator = torch.Generator().manual_seed(seed)

        def noise(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) * gain * columns**-0.5

        shared = EstimatorWeights(
            noise(width, hidden),
            noise(layers - 1, width, 0.1 * width**0.5),
            noise(inner, width),
            noise(width, inner, 0.5),
            torch.ones(width),
            torch.zeros(width),
            noise(experts, width, 0.0 if corrects else 0.1),
        )
        return cls(shared, corrects, vectors)

    @property
    def num_parameters(self) -> int:
        return sum(part.numel() for part in self.shared)

    def of_layer(self, row: int) -> EstimatorWeights:
        """What foretells the layer with experts number `row` + 1."""
        return self.shared._replace(layer=self.shared.layer[row])

    def to(self, device: torch.device, dtype: torch.dtype) -> Estimator:
        parts = (part.to(device, dtype).contiguous() for part in self.shared)
        return Estimator(EstimatorWeights(*parts), self.corrects, self.vectors)

    def save(self, path: Path, model: str, facts: dict[str, Any]) -> None:
        """Write a safetensors file for the model of this `model_identity`; `facts` say how it was trained.

        InputError where it cannot be written.
        """
        kind = {"format": FORMAT, "model": model, "vectors": self.vectors, "corrects": json.dumps(self.corrects)}
        write_tensors(path, self.shared._asdict(), {**kind, "training": json.dumps(facts, sort_keys=True)})


def load_estimator(path: Path, spec: ModelSpec, weights: ModelWeights, vectors: str) -> Estimator:
    """Read the file that `Estimator.save` wrote for the model of this spec and these weights.

    `vectors` is the identity of the default vectors in use. Raises InputError, one line, for a file that cannot be
    read, is of another kind, shape or model, is not finite, or was trained with other default vectors.
    """
    found, metadata = read_tensors(
        path, FORMAT, "an estimator", EstimatorWeights._fields, lambda shapes: _expected(shapes, spec), REMEDY
    )
    if metadata.get("model") != model_identity(spec, weights):
        raise InputError(f"{path}: the estimator of another model (its routers differ); {REMEDY}")
    if metadata.get("vectors") != vectors:
        raise InputError(f"{path}: trained with other default vectors than are in use; {REMEDY}")
    return Estimator(EstimatorWeights(**found), metadata.get("corrects") == "true", vectors)


def estimator_bytes(path: Path, dtype: torch.dtype) -> int:
    """What the weights of a file take in `dtype`; 0 where it cannot be read, which loading will say."""
    try:
        entries, _ = read_header_and_metadata(path)
    except CheckpointError:
        return 0
    return sum(math.prod(entry.shape) for entry in entries) * dtype.itemsize


def _expected(shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What the parts must be for the model, whatever the widths."""
    layers, experts, hidden = vector_shape(spec)
    width, inner = (shapes[name][0] if shapes[name] else 0 for name in ("into", "up"))
    parts = {
        "into": (width, hidden), "layer": (layers - 1, width), "up": (inner, width), "down": (width, inner),
        "norm_weight": (width,), "norm_bias": (width,), "head": (experts, width),
    }  # fmt: skip
    return {name: (shape, torch.float32) for name, shape in parts.items()}
