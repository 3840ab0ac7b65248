"""Default vectors: what each expert puts out on average, measured once per model and kept in a file beside it.

With them a quasi-hidden state is made (arXiv 2603.19289), and left-out experts can be filled in.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from tritonmoe.checkpoint.model_file import read_tensors, write_tensors
from tritonmoe.errors import InputError
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ModelWeights

FORMAT = "tritonmoe default vectors, version 1"
REMEDY = "make the file anew with tools/calibrate.py"


@dataclass(frozen=True)
class DefaultVectors:
    """The mean output of every expert of a model, with the number of outputs that it is the mean of.

    The first dimension runs over the layers that have routed experts, in their order. An expert that was never chosen
    (count 0) has the mean of the other vectors of its layer, each weighing the same however often it was chosen.
    """

    vectors: torch.Tensor  # [L_moe, E, H] float32
    counts: torch.Tensor  # [L_moe, E] int64

    def __post_init__(self) -> None:
        assert self.vectors.dtype == torch.float32
        assert self.counts.dtype == torch.int64
        assert self.vectors.shape[:2] == self.counts.shape

    @classmethod
    def from_sums(cls, sums: torch.Tensor, counts: torch.Tensor) -> DefaultVectors:
        """From sums of outputs [L_moe, E, H] float64 and how many each is of, [L_moe, E] int64.

        ValueError where a layer was never run, so that nothing is known of any of its experts.
        """
        seen = counts > 0
        if not seen.any(dim=1).all():
            raise ValueError("default vectors need at least one token in every layer")
        means = sums.double() / counts.clamp_min(1)[..., None]
        means = means.masked_fill(~seen[..., None], 0.0)
        fallback = means.sum(dim=1) / seen.sum(dim=1)[:, None]
        return cls(torch.where(seen[..., None], means, fallback[:, None]).float(), counts)

    def by_layer(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """[layers, E, H] on `device`, indexed by the position in `spec.layers`; zero for layers without experts."""
        found = torch.zeros(len(spec.layers), *self.vectors.shape[1:], dtype=dtype, device=device)
        found[list(spec.moe_layers)] = self.vectors.to(device, dtype)
        return found

    @property
    def identity(self) -> str:
        """ "sha256:…" over the vectors, for what was trained on states made with them."""
        return f"sha256:{hashlib.sha256(self.vectors.cpu().contiguous().numpy().data).hexdigest()}"

    def save(self, path: Path, model: str, corpus: str) -> None:
        """Write a safetensors file for the model of this `model_identity`; `corpus` says what text they are from.

        InputError where it cannot be written.
        """
        tensors = {"vectors": self.vectors, "counts": self.counts}
        write_tensors(path, tensors, {"format": FORMAT, "model": model, "corpus": corpus})


def load_default_vectors(path: Path, spec: ModelSpec, weights: ModelWeights) -> DefaultVectors:
    """Read the file that `DefaultVectors.save` wrote for the model of this spec and these weights.

    Raises InputError, one line, for a file that cannot be read, is of another kind, shape or model, or is not finite.
    """
    shape = vector_shape(spec)
    expected = {"vectors": (shape, torch.float32), "counts": (shape[:2], torch.int64)}
    found, metadata = read_tensors(path, FORMAT, "default vectors", tuple(expected), lambda _: expected, REMEDY)
    if metadata.get("model") != model_identity(spec, weights):
        raise InputError(f"{path}: the default vectors of another model (its routers differ); {REMEDY}")
    return DefaultVectors(found["vectors"], found["counts"])


def model_identity(spec: ModelSpec, weights: ModelWeights) -> str:
    """ "sha256:…" over what makes experts and routing the same: the kind and sizes of the model and the bytes of all
    routers, with their biases. Routers are kept in float32, so it does not depend on --dtype or the device."""
    layers = [
        None if moe is None else [moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size, moe.activation]
        for moe in (layer.moe for layer in spec.layers)
    ]
    facts = {"model_type": spec.model_type, "hidden_size": spec.hidden_size, "layers": layers}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for layer_id in spec.moe_layers:
        moe = weights.layers[layer_id].moe
        assert moe is not None
        for tensor in (moe.router, moe.router_bias, moe.selection_bias):
            if tensor is not None:
                digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return f"sha256:{digest.hexdigest()}"


def vector_shape(spec: ModelSpec) -> tuple[int, int, int]:
    """[L_moe, E, H] of the model's default vectors; InputError where layers differ in experts or none has any."""
    found = {layer.moe.num_experts for layer in spec.layers if layer.moe is not None}
    if len(found) != 1:
        counts = " and ".join(map(str, sorted(found))) or "no"
        raise InputError(f"default vectors need as many experts in every layer; this model has {counts} experts")
    return len(spec.moe_layers), found.pop(), spec.hidden_size
