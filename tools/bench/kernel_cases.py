"""What tools/bench_kernels.py times: every kernel at the sizes of published models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from tritonmoe_kernels.attention import attention_decode, attention_prefill, decode_workspace_size
from tritonmoe_kernels.estimate import estimate
from tritonmoe_kernels.estimate_reference import EstimatorWeights
from tritonmoe_kernels.expert_gemm import combine, expert_gemm
from tritonmoe_kernels.linear import linear
from tritonmoe_kernels.norm_router import NormRouterOutput, Routing, add_rms_norm, norm_router, route_topk
from tritonmoe_kernels.plan import plan_demand, plan_prefetch
from tritonmoe_kernels.planner_state import PlannerState
from tritonmoe_kernels.quantized import MXFP4, Matrix, QuantizedMatrix, WeightFormat
from tritonmoe_kernels.recall import count_recall
from tritonmoe_kernels.rope_qk import rope_qk
from tritonmoe_kernels.sort_tokens import sort_tokens
from tritonmoe_kernels.speculate import speculate

COLD_BYTES = 512 << 20
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    """Launches that each do the same work on other data; bytes, FLOPs and kernels of one of them."""

    launches: Sequence[Callable[[], object]]
    num_bytes: int
    flops: int = 0
    kernels: int = 1


def copies(num_bytes: int) -> int:
    """How many operands of this size are cold together."""
    return max(4, -(-COLD_BYTES // num_bytes))


def noise(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(0, 0.02)


def matrix(form: WeightFormat | None, *shape: int, dtype: torch.dtype) -> Matrix:
    """Noise of `dtype`, or random codes whose scales make about as much of them."""
    if form is None:
        return noise(*shape, dtype=dtype)
    parts = {}
    for name, (part_shape, part_dtype) in form.shapes(*shape[-2:]).items():
        size = (*shape[:-2], *part_shape)
        if name == "scales":
            parts[name] = torch.full(size, 120 if part_dtype == torch.uint8 else 1e-3, dtype=part_dtype, device=DEVICE)
        else:  # 0 … 118: no NaN of fp8
            most = 16 if name == "zeros" else 119
            parts[name] = torch.randint(0, most, size, dtype=torch.uint8, device=DEVICE).view(part_dtype)
    return QuantizedMatrix(form, **parts)


def stored_bytes(form: WeightFormat | None, rows: int, columns: int, dtype: torch.dtype) -> int:
    if form is None:
        return rows * columns * dtype.itemsize
    return sum(math.prod(shape) * part.itemsize for shape, part in form.shapes(rows, columns).values())


def projection(
    units: int,
    hidden: int,
    norm: bool,
    dtype: torch.dtype,
    tokens: int = 1,
    ours: bool = True,
    form: WeightFormat | None = None,
) -> Case:
    num_bytes = stored_bytes(form, units, hidden, dtype)
    weights = [matrix(form, units, hidden, dtype=dtype) for _ in range(copies(num_bytes))]
    x, out = noise(tokens, hidden, dtype=dtype), noise(tokens, units, dtype=dtype)
    norm_weight = torch.ones(hidden, device=DEVICE) if norm else None
    if ours:
        launches = [partial(linear, x, weight, None, norm_weight, 1e-6, out=out) for weight in weights]
    else:
        launches = [partial(F.linear, x, weight) for weight in weights if isinstance(weight, torch.Tensor)]
    return Case(launches, num_bytes + x.nbytes + out.nbytes, 2 * tokens * units * hidden)


def head(vocab: int, hidden: int, dtype: torch.dtype) -> Case:
    weight, x = noise(vocab, hidden, dtype=dtype), noise(1, hidden, dtype=dtype)
    out, norm_weight = noise(1, vocab, dtype=torch.float32), torch.ones(hidden, device=DEVICE)
    launch = partial(linear, x, weight, None, norm_weight, 1e-6, out=out)
    return Case([launch] * 4, weight.nbytes + out.nbytes, 2 * vocab * hidden)


def rotation(tokens: int, heads: int, kv_heads: int, size: int, norm: str, dtype: torch.dtype) -> Case:
    qkv = noise(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    keys, values = (noise(1, kv_heads, max(tokens, 64), size, dtype=dtype) for _ in range(2))
    q = noise(tokens, heads, size, dtype=dtype)
    weight = torch.ones(size, device=DEVICE) if norm == "head" else None
    positions = torch.arange(tokens, device=DEVICE)
    frequencies = torch.ones(size // 2, device=DEVICE)
    launch = partial(
        rope_qk, qkv, positions, frequencies, keys, values, heads, False, 1.0, norm, weight, weight, 1e-6,
        None, tokens, q=q,
    )  # fmt: skip
    return Case([launch] * 50, 2 * qkv.nbytes)


def decode_attention(
    length: int, heads: int, kv_heads: int, size: int, window: int | None, dtype: torch.dtype, capacity: int = 0
) -> Case:
    capacity = capacity or length
    count = min(200, copies(2 * kv_heads * capacity * size * dtype.itemsize))
    caches = [[noise(1, kv_heads, capacity, size, dtype=dtype) for _ in range(2)] for _ in range(count)]
    q = noise(1, heads, size, dtype=dtype)
    lengths = torch.tensor([length], device=DEVICE)
    sinks = torch.zeros(heads, device=DEVICE) if window else None
    out = noise(1, heads * size, dtype=dtype)
    workspace = torch.empty(decode_workspace_size(q, caches[0][0], window), device=DEVICE)
    launches = [
        partial(attention_decode, q, keys, values, lengths, size**-0.5, window, sinks, out, workspace)
        for keys, values in caches
    ]
    entries = length if window is None else min(length, window)
    return Case(launches, 2 * kv_heads * entries * size * dtype.itemsize, 4 * heads * entries * size, kernels=2)


def prefill_attention(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, ours: bool) -> Case:
    keys, values = (noise(1, kv_heads, tokens, size, dtype=dtype) for _ in range(2))
    q = noise(1, tokens, heads, size, dtype=dtype)
    positions = torch.arange(tokens, device=DEVICE)[None]
    if ours:
        launch = partial(attention_prefill, q, keys, values, positions, size**-0.5)
    else:
        swapped = q.transpose(1, 2)
        launch = partial(
            F.scaled_dot_product_attention, swapped, keys, values, is_causal=True, scale=size**-0.5, enable_gqa=True
        )
    return Case([launch] * 5, 2 * q.nbytes + 2 * keys.nbytes, 2 * heads * tokens * (tokens + 1) * size)


def routing(hidden: int, experts: int, rule: Routing, dtype: torch.dtype) -> Case:
    count = copies(experts * hidden * 4) // 4
    routers = [noise(experts, hidden, dtype=torch.float32) for _ in range(count)]
    residual, delta = noise(1, hidden, dtype=dtype), noise(1, hidden, dtype=dtype)
    out = NormRouterOutput.allocate(residual, experts, rule.top_k)
    weight, counter = torch.ones(hidden, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    launches = [
        partial(norm_router, residual, delta, weight, router, rule, counter, 1e-6, out=out) for router in routers
    ]
    return Case(launches, routers[0].nbytes + 6 * residual.nbytes)


def speculation(hidden: int, experts: int, rule: Routing, dtype: torch.dtype) -> Case:
    count = copies(experts * hidden * 4) // 4
    routers = [noise(experts, hidden, dtype=torch.float32) for _ in range(count)]
    defaults = noise(experts, hidden, dtype=dtype)
    residual = noise(1, hidden, dtype=dtype)
    ids = torch.arange(rule.top_k, device=DEVICE, dtype=torch.int32)[None]
    weight, counter = torch.ones(hidden, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    launches = [
        partial(
            speculate, residual, defaults, ids, torch.ones_like(ids, dtype=torch.float32), weight, router, rule,
            rule.top_k + 2, counter, 1e-6,
        )
        for router in routers
    ]  # fmt: skip
    return Case(launches, routers[0].nbytes + (2 + rule.top_k) * residual.nbytes)


def estimation(hidden: int, width: int, inner: int, experts: int, dtype: torch.dtype) -> Case:
    """A layer's estimate; each launch has a network of its own, though in a step all layers share one."""
    sizes = (width, hidden), (width,), (inner, width), (width, inner), (width,), (width,), (experts, width)
    num_bytes = sum(math.prod(size) for size in sizes) * dtype.itemsize
    networks = [EstimatorWeights(*(noise(*size, dtype=dtype) for size in sizes)) for _ in range(copies(num_bytes))]
    q = noise(1, hidden, dtype=dtype)
    flops = 2 * sum(math.prod(size) for size in sizes if len(size) == 2)
    return Case([partial(estimate, q, network) for network in networks], num_bytes, flops, kernels=4)


def experts(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    size: int,
    kind: str,
    dtype: torch.dtype,
    parts: str = "all",
    form: WeightFormat | None = None,
) -> Case:
    """gate_up, down and the reduction; a decode step's launches take turns over slots, prefill uses all of them."""
    record = stored_bytes(form, 2 * size, hidden, dtype) + stored_bytes(form, hidden, size, dtype)
    slots = num_experts if tokens > 1 else -(-copies(record) // top_k) * top_k
    gate_up, down = matrix(form, slots, 2 * size, hidden, dtype=dtype), matrix(form, slots, hidden, size, dtype=dtype)
    biases = (
        (noise(slots, 2 * size, dtype=dtype), noise(slots, hidden, dtype=dtype)) if "clamp" in kind else (None, None)
    )
    x, weights = noise(tokens, hidden, dtype=dtype), torch.rand(tokens, top_k, device=DEVICE)
    if tokens > 1:
        chosen = [torch.rand(tokens, slots, device=DEVICE).topk(top_k).indices.int()] * 5
    else:
        order = torch.randperm(slots, device=DEVICE, dtype=torch.int32)
        chosen = list(order.view(-1, 1, top_k))
    out, inner = noise(tokens, top_k, hidden, dtype=dtype), noise(tokens, top_k, size, dtype=dtype)
    combined = noise(tokens, hidden, dtype=dtype)

    def launch(slot_ids: torch.Tensor) -> None:
        if parts != "combine":
            expert_gemm(x, slot_ids, gate_up, down, *biases, kind, 7.0, 1.702, out, inner)
        if parts != "gemm":
            combine(out, weights, residual=x, out=combined)

    distinct = len(chosen[0].unique()) if tokens > 1 else top_k
    row, flops = hidden * dtype.itemsize, 6 * tokens * top_k * hidden * size
    products, reduction = distinct * record + tokens * (1 + top_k) * row, tokens * (2 + top_k) * row
    num_bytes = {"all": products + reduction, "gemm": products, "combine": reduction}[parts]
    kernels = {"all": 3, "gemm": 2, "combine": 1}[parts]
    return Case([partial(launch, ids) for ids in chosen], num_bytes, 0 if parts == "combine" else flops, kernels)


def sorting(tokens: int, top_k: int, num_experts: int, _dtype: torch.dtype) -> Case:
    ids = torch.rand(tokens, num_experts, device=DEVICE).topk(top_k).indices.int()
    return Case([partial(sort_tokens, ids, num_experts, 128)] * 10, 2 * ids.nbytes, kernels=2)


def norming(tokens: int, hidden: int, dtype: torch.dtype) -> Case:
    residual, delta = noise(tokens, hidden, dtype=dtype), noise(tokens, hidden, dtype=dtype)
    launch = partial(add_rms_norm, residual, delta, torch.ones(hidden, device=DEVICE), 1e-6)
    return Case([launch] * 10, 4 * residual.nbytes)


def choosing(tokens: int, num_experts: int, rule: Routing, _dtype: torch.dtype) -> Case:
    logits = torch.randn(tokens, num_experts, device=DEVICE)
    return Case([partial(route_topk, logits, rule)] * 10, logits.nbytes)


def planning(kind: str, layers: int, num_experts: int, top_k: int) -> Case:
    """A layer's plan of one token whose experts, routed or foretold, are all in slots; the layers take turns."""
    ids = torch.stack([torch.randperm(num_experts, device=DEVICE)[:top_k] for _ in range(layers)]).int()
    state = PlannerState.allocate(layers, num_experts, 2 * layers * top_k, 1, top_k, top_k, DEVICE)
    weights, slots = torch.rand(1, top_k, device=DEVICE), torch.empty(2, 1, top_k, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(layers, 5, dtype=torch.int64, device=DEVICE)
    demands = [partial(plan_demand, state, i, ids[i : i + 1], weights, *slots) for i in range(layers)]
    for demand in demands:
        demand()
    state.landed.copy_(state.copy_epoch)
    launches: dict[str, list[Callable[[], object]]] = {
        "demand": [*demands],
        "prefetch": [partial(plan_prefetch, state, i, ids[i : i + 1], 1, top_k) for i in range(layers)],
        "recall": [partial(count_recall, ids[i : i + 1], ids[i : i + 1], weights, counts[i]) for i in range(layers)],
    }
    return Case(launches[kind], 12 * top_k * 8)


QWEN3 = Routing(8, "softmax", renormalize=True)
GPT_OSS = Routing(4, "topk_softmax")

CASES: dict[str, Callable[[torch.dtype], Case]] = {
    "qwen3 decode qkv 5120x2048": lambda dtype: projection(5120, 2048, True, dtype),
    "qwen3 decode output 2048x4096": lambda dtype: projection(2048, 4096, False, dtype),
    "qwen3 decode output 2048x4096 cublas": lambda dtype: projection(2048, 4096, False, dtype, ours=False),
    "qwen3 decode qkv 5120x2048 cublas": lambda dtype: projection(5120, 2048, False, dtype, ours=False),
    "qwen3 decode head 151936x2048": lambda dtype: head(151936, 2048, dtype),
    "qwen3 decode rope_qk": lambda dtype: rotation(1, 32, 4, 128, "head", dtype),
    "qwen3 decode attention 128 of 4096": lambda dtype: decode_attention(128, 32, 4, 128, None, dtype, 4096),
    "qwen3 decode attention 1024": lambda dtype: decode_attention(1024, 32, 4, 128, None, dtype),
    "qwen3 decode attention 4096": lambda dtype: decode_attention(4096, 32, 4, 128, None, dtype),
    "qwen3 decode attention 16384": lambda dtype: decode_attention(16384, 32, 4, 128, None, dtype),
    "qwen3 decode attention 65536": lambda dtype: decode_attention(65536, 32, 4, 128, None, dtype),
    "qwen3 decode norm_router 128x2048": lambda dtype: routing(2048, 128, QWEN3, dtype),
    "qwen3 decode speculate 128x2048": lambda dtype: speculation(2048, 128, QWEN3, dtype),
    "qwen3 decode estimate 2048-1024-4096-128": lambda dtype: estimation(2048, 1024, 4096, 128, dtype),
    "qwen3 decode plan_demand 8 of 128": lambda _dtype: planning("demand", 48, 128, 8),
    "qwen3 decode plan_prefetch 8 of 128": lambda _dtype: planning("prefetch", 48, 128, 8),
    "qwen3 decode count_recall 8 of 8": lambda _dtype: planning("recall", 48, 128, 8),
    "qwen3 decode experts 8 of 768x2048": lambda dtype: experts(1, 8, 128, 2048, 768, "silu", dtype),
    "qwen3 decode experts, products only": lambda dtype: experts(1, 8, 128, 2048, 768, "silu", dtype, "gemm"),
    "qwen3 decode experts, reduction only": lambda dtype: experts(1, 8, 128, 2048, 768, "silu", dtype, "combine"),
    "gpt-oss decode qkv 5120x2880": lambda dtype: projection(5120, 2880, True, dtype),
    "gpt-oss decode output 2880x4096": lambda dtype: projection(2880, 4096, False, dtype),
    "gpt-oss decode attention window 128 of 4096": lambda dtype: decode_attention(4096, 64, 8, 64, 128, dtype),
    "gpt-oss decode attention 16384": lambda dtype: decode_attention(16384, 64, 8, 64, None, dtype),
    "gpt-oss decode norm_router 32x2880": lambda dtype: routing(2880, 32, GPT_OSS, dtype),
    "gpt-oss decode experts 4 of 2880x2880": lambda dtype: experts(1, 4, 32, 2880, 2880, "swiglu_clamped", dtype),
    "qwen3 prefill 512 experts": lambda dtype: experts(512, 8, 128, 2048, 768, "silu", dtype),
    "qwen3 prefill 2048 experts": lambda dtype: experts(2048, 8, 128, 2048, 768, "silu", dtype),
    "qwen3 prefill 4096 experts": lambda dtype: experts(4096, 8, 128, 2048, 768, "silu", dtype),
    "qwen3 prefill 4096 sort": lambda dtype: sorting(4096, 8, 128, dtype),
    "qwen3 prefill 512 sort": lambda dtype: sorting(512, 8, 128, dtype),
    "qwen3 prefill 512 add_rms_norm": lambda dtype: norming(512, 2048, dtype),
    "qwen3 prefill 512 route_topk": lambda dtype: choosing(512, 128, QWEN3, dtype),
    "qwen3 prefill 512 rope_qk": lambda dtype: rotation(512, 32, 4, 128, "head", dtype),
    "qwen3 prefill 512 attention": lambda dtype: prefill_attention(512, 32, 4, 128, dtype, True),
    "qwen3 prefill 512 attention sdpa": lambda dtype: prefill_attention(512, 32, 4, 128, dtype, False),
    "qwen3 prefill 4096 attention": lambda dtype: prefill_attention(4096, 32, 4, 128, dtype, True),
    "qwen3 prefill 4096 attention sdpa": lambda dtype: prefill_attention(4096, 32, 4, 128, dtype, False),
    "gpt-oss prefill 4096 experts": lambda dtype: experts(4096, 4, 32, 2880, 2880, "swiglu_clamped", dtype),
}

INT4 = WeightFormat("int4", 32, scale_dtype=torch.bfloat16)
INT4_ZEROS = WeightFormat("int4", 128, scale_dtype=torch.float16, has_zeros=True)
INT8 = WeightFormat("int8", 32, scale_dtype=torch.bfloat16)
FP8 = WeightFormat("fp8", 128, 128, scale_dtype=torch.float32)
FORMATS = {"mxfp4": MXFP4, "int4": INT4, "int4 zeros 128": INT4_ZEROS, "int8": INT8, "fp8": FP8}


def quantized_cases(name: str, form: WeightFormat) -> dict[str, Callable[[torch.dtype], Case]]:
    """One format's products alone, to be held against packed bytes / (0.8 x rate) + 2.5 us a launch, and in prefill."""
    qwen3, gpt_oss = (8, 128, 2048, 768, "silu"), (4, 32, 2880, 2880, "swiglu_clamped")
    cases: dict[str, Callable[[torch.dtype], Case]] = {
        f"qwen3 decode {name} 8 of 768x2048": lambda dtype: experts(1, *qwen3, dtype, "gemm", form),
        f"gpt-oss decode {name} 4 of 2880x2880": lambda dtype: experts(1, *gpt_oss, dtype, "gemm", form),
        f"qwen3 prefill 4096 {name}": lambda dtype: experts(4096, *qwen3, dtype, "all", form),
        f"gpt-oss prefill 4096 {name}": lambda dtype: experts(4096, *gpt_oss, dtype, "all", form),
    }
    if form.bits == 8:
        cases[f"qwen3 decode {name} qkv 5120x2048"] = lambda dtype: projection(5120, 2048, True, dtype, form=form)
        cases[f"qwen3 decode {name} output 2048x4096"] = lambda dtype: projection(2048, 4096, False, dtype, form=form)
    return cases


for _name, _form in FORMATS.items():
    CASES |= quantized_cases(_name, _form)
