"""Weights of the size and scale of a real model's, made on the device: for time, not for text."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tritonmoe.memory import require_memory
from tritonmoe.spec import ModelSpec
from tritonmoe.weights import ModelWeights, allocate, weight_bytes

SCALE = 0.02  # `initializer_range` of nearly every published model


def random_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int = 0) -> ModelWeights:
    """Matrices from N(0, SCALE²), norms 1, biases and sinks 0.

    Every value is representable in `dtype`, also where the engine keeps float32, as it is in a checkpoint of that
    type: a copy of the weights in `dtype` is then the same model.
    """
    remedy = "another --device or a smaller model"
    require_memory(weight_bytes(spec, dtype), device, f"the weights in {str(dtype).removeprefix('torch.')}", remedy)
    weights = allocate(spec, device, dtype)
    fill(weights, dtype, seed)
    return weights


def fill(weights: ModelWeights, dtype: torch.dtype, seed: int, with_experts: bool = True) -> None:
    """Fill allocated weights as `random_weights` says, the routed experts only on request."""
    device = weights.embedding.device
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in _named(weights, with_experts):
        if name.endswith("norm"):
            tensor.fill_(1.0)
        elif name.endswith(("bias", "sinks")):
            tensor.zero_()
        else:
            tensor.normal_(0.0, SCALE, generator=generator)
            if tensor.dtype != dtype:
                tensor.copy_(tensor.to(dtype))


def _named(node: object, with_experts: bool, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree of weight dataclasses and lists, each with the name of its field."""
    if isinstance(node, torch.Tensor):
        yield name, node
    elif isinstance(node, list):
        for child in node:
            yield from _named(child, with_experts, name)
    elif hasattr(node, "__dict__"):
        for field, child in vars(node).items():
            if with_experts or field != "experts":
                yield from _named(child, with_experts, field)
