"""The files that were made for a model to foretell its experts with: where they are, and what they give a predictor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tritonmoe.errors import InputError
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ModelWeights
from tritonmoe.prediction.default_vectors import DefaultVectors, load_default_vectors
from tritonmoe.prediction.estimator import NO_VECTORS, Estimator, load_estimator
from tritonmoe.prediction.hybrid import load_hybrid

# Beside a model's config.json.
DEFAULT_VECTORS, ESTIMATOR, HYBRID = "default-vectors.safetensors", "estimator.safetensors", "hybrid.json"


@dataclass(frozen=True)
class PredictionFiles:
    """One path for each kind of file; None: there is no such file."""

    vectors: Path | None
    estimator: Path | None
    hybrid: Path | None

    @classmethod
    def found(
        cls, folder: Path, vectors: Path | None = None, estimator: Path | None = None, hybrid: Path | None = None
    ) -> PredictionFiles:
        """Those asked for, whether they exist or not, else those beside the model in `folder`."""

        def beside(name: str) -> Path | None:
            return folder / name if (folder / name).is_file() else None

        return cls(vectors or beside(DEFAULT_VECTORS), estimator or beside(ESTIMATOR), hybrid or beside(HYBRID))

    @property
    def trained(self) -> list[str]:
        """The predictors that there is a file for."""
        return [name for name in ("estimator", "hybrid") if getattr(self, name) is not None]

    def load_vectors(self, spec: ModelSpec, weights: ModelWeights) -> DefaultVectors | None:
        """None without a file."""
        return None if self.vectors is None else load_default_vectors(self.vectors, spec, weights)

    def load_trained(
        self, predictor: str, spec: ModelSpec, weights: ModelWeights, vectors: DefaultVectors | None
    ) -> tuple[Estimator | None, dict[int, str]]:
        """The estimator where the predictor needs it, and what foretells which layer (nothing said: the router).

        InputError for a file that `hybrid` needs and that is missing, or any that is not of this model.
        """
        kinds: dict[int, str] = {}
        if predictor == "estimator":
            kinds = dict.fromkeys(list(spec.moe_layers)[1:], "estimator")
        elif predictor == "hybrid":
            assert self.hybrid is not None
            kinds = load_hybrid(self.hybrid, spec, weights).by_layer
            if vectors is None and "quasi-hidden" in kinds.values():
                raise InputError(f"{self.hybrid} needs the model's default vectors (tools/calibrate.py)")
        if "estimator" not in kinds.values():
            return None, kinds
        if self.estimator is None:
            raise InputError(f"{self.hybrid} needs the model's estimator (tools/train_estimator.py); give --estimator")
        identity = NO_VECTORS if vectors is None else vectors.identity
        return load_estimator(self.estimator, spec, weights, identity), kinds
