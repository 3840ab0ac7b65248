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
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in _named(weights):
        if name.endswith("norm"):
            tensor.fill_(1.0)
        elif name.endswith(("bias", "sinks")):
            tensor.zero_()
        else:
            tensor.normal_(0.0, SCALE, generator=generator)
            if tensor.dtype != dtype:
                tensor.copy_(tensor.to(dtype))
    return weights


def _named(node: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree of weight dataclasses and lists, each with the name of its field."""
    if isinstance(node, torch.Tensor):
        yield name, node
    elif isinstance(node, list):
        for child in node:
            yield from _named(child, name)
    elif hasattr(node, "__dict__"):
        for field, child in vars(node).items():
            yield from _named(child, field)
