"""Weights of the size and scale of a real model's, made on the device: for time, not for text."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tritonmoe.memory import require_memory
from tritonmoe.model.expert_store import ExpertStore, RecordLayout
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import PLAIN, ModelWeights, Storage, allocate, weight_bytes
from tritonmoe.placement.storage import name_of, resolve_storage
from tritonmoe_kernels.quantized import INT4_MIDDLE, Matrix, QuantizedMatrix

SCALE = 0.02  # `initializer_range` of nearly every published model
# The root mean square of a format's random codes, about.
CODE_SIZES = {"mxfp4": 2.5, "int4": 4.6, "int8": 73.0, "fp8": 100.0}


def random_storage(expert_dtype: str, dense_dtype: str, spec: ModelSpec, dtype: torch.dtype) -> Storage:
    """What options of those names ask for; nothing is published, so that the name of it stands for `dtype`."""
    return resolve_storage(expert_dtype, dense_dtype, spec, dtype, PLAIN)[0]


def random_weights(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    storage: Storage = PLAIN,
    store: ExpertStore | None = None,
) -> ModelWeights:
    """Matrices from N(0, SCALE²), norms 1, biases and sinks 0; in fewer bits, random codes of about that size. Experts
    are those of a filled `store` if there is one.

    Every value is representable in `dtype`, also where the engine keeps float32, as it is in a checkpoint of that
    type: a copy of the weights in `dtype` is then the same model.
    """
    what = f"the weights in {name_of(storage, dtype)}"
    needed = weight_bytes(spec, dtype, store is None, storage)
    require_memory(needed, device, what, "another --device or a smaller model")
    weights = allocate(spec, device, dtype, store, storage)
    fill(weights, dtype, seed, with_experts=store is None)
    return weights


def fill(weights: ModelWeights, dtype: torch.dtype, seed: int, with_experts: bool = True) -> None:
    """Fill allocated weights as `random_weights` says, the routed experts only on request."""
    device = weights.embedding.device
    generator = torch.Generator(device).manual_seed(seed)
    for name, matrix in _named(weights, with_experts):
        fill_part(name, matrix, generator)
        if isinstance(matrix, torch.Tensor) and matrix.dtype != dtype:
            matrix.copy_(matrix.to(dtype))


def random_records(layout: RecordLayout, count: int, device: torch.device) -> torch.Tensor:
    """Experts as in a store, [count, num_bytes]."""
    records = torch.zeros(count, layout.num_bytes, dtype=torch.uint8, device=device)
    fill_records(layout, records)
    return records


def fill_records(layout: RecordLayout, records: torch.Tensor) -> None:
    """Random experts into slots [S, num_bytes]."""
    generator = torch.Generator(records.device).manual_seed(0)
    for name, matrix in _named(layout.views(records), True):
        fill_part(name, matrix, generator)


def fill_part(name: str, matrix: Matrix, generator: torch.Generator) -> None:
    """Fill what is called so in the weights."""
    if isinstance(matrix, QuantizedMatrix):
        _fill_codes(matrix, generator)
    elif name.endswith("norm"):
        matrix.fill_(1.0)
    elif name.endswith(("bias", "sinks")):
        matrix.zero_()
    else:
        matrix.normal_(0.0, SCALE, generator=generator)


def _fill_codes(matrix: QuantizedMatrix, generator: torch.Generator) -> None:
    """Codes of all values that are finite, under one scale."""
    form, step = matrix.format, SCALE / CODE_SIZES[matrix.format.name]
    if form.name == "int8":
        matrix.codes.random_(-127, 128, generator=generator)
    else:
        codes = matrix.codes.view(torch.uint8).random_(0, 256, generator=generator)
        if form.name == "fp8":
            codes.bitwise_and_(0xFE)  # NaN is odd
    matrix.scales.fill_(127 + round(math.log2(step)) if form.name == "mxfp4" else step)
    if matrix.zeros is not None:
        matrix.zeros.fill_(INT4_MIDDLE)


def _named(node: object, with_experts: bool, name: str = "") -> Iterator[tuple[str, Matrix]]:
    """The matrices and vectors of a tree of weight dataclasses and lists, each with the name of its field."""
    if isinstance(node, Matrix):
        yield name, node
    elif isinstance(node, list):
        for child in node:
            yield from _named(child, with_experts, name)
    elif hasattr(node, "__dict__"):
        for field, child in vars(node).items():
            if with_experts or field != "experts":
                yield from _named(child, with_experts, field)
