"""The bytes that a decode step cannot avoid reading, from the spec alone, and the rate at which memory gives them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from tritonmoe.model.matrices import parts
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import PLAIN, Storage, allocate, iter_tensors

COPY_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}  # of each of two buffers; far beyond the caches of either
COPIES = 10


def expected_distinct(spec: ModelSpec, batch: int) -> list[float]:
    """Distinct experts per MoE layer that `batch` tokens touch if each draws its K of E uniformly, on average."""
    moes = spec.moe_layers.values()
    return [moe.num_experts * (1 - (1 - moe.num_experts_per_tok / moe.num_experts) ** batch) for moe in moes]


def weight_bytes_per_step(
    spec: ModelSpec,
    dtype: torch.dtype,
    batch: int,
    distinct: Sequence[float] | None = None,
    storage: Storage = PLAIN,
) -> int:
    """Bytes of weights, as the engine stores them, that one decode step of `batch` rows reads once each.

    `distinct` is the number of different experts used in each MoE layer; without it, that of uniform routing.
    """
    weights = allocate(spec, torch.device("meta"), dtype, storage=storage)
    used = iter(expected_distinct(spec, batch) if distinct is None else distinct)
    total = float(sum(tensor.nbytes for tensor in [*parts(weights.head), weights.final_norm]))
    total += batch * weights.embedding.nbytes / spec.vocab_size
    for layer, layer_weights in zip(spec.layers, weights.layers, strict=True):
        total += sum(tensor.nbytes for tensor in iter_tensors(layer_weights))
        if layer.moe is not None and layer_weights.moe is not None:
            experts = sum(tensor.nbytes for tensor in iter_tensors(layer_weights.moe.experts))
            total -= experts * (1 - next(used) / layer.moe.num_experts)
    return round(total)


def kv_bytes_per_step(spec: ModelSpec, dtype: torch.dtype, batch: int, length: float) -> int:
    """Bytes of keys and values that one decode step reads where each row sees `length` positions, its own included;
    a sliding layer reads no more than its window."""
    positions = sum(
        2 * layer.attention.kv_size * min(length, layer.attention.window or length) for layer in spec.layers
    )
    return round(batch * positions * dtype.itemsize)


def memory_rate(device: torch.device) -> float:
    """Bytes per second of a large copy within `device`, read plus write: the best of three tries."""
    size = COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def copies() -> None:
        for _ in range(COPIES):
            target.copy_(source)

    copies()
    return 2 * size * COPIES / min(_seconds(copies, device) for _ in range(3))


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
