"""Whether this machine computes and moves what it should: each kernel beside its reference, and a short generation with
experts in host memory beside the resident one."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tritonmoe.checkpoint.architectures import load_spec
from tritonmoe.checkpoint.loading import load_weights
from tritonmoe.engine import Engine, embedded_folder
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.expert_store import ExpertStore
from tritonmoe.model.kv_cache import KVCache
from tritonmoe.model.operations import REFERENCES, Operations
from tritonmoe.offload.experts import OffloadedExperts
from tritonmoe.offload.policy import resolve
from tritonmoe.placement.loader import Placement, make_predictor
from tritonmoe.prediction.estimator import NO_VECTORS, Estimator
from tritonmoe_kernels.references import route_topk_ref

# Largest error relative to the largest value written, by dtype of the result.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
# The same of float32 results of 16-bit values, which a kernel keeps in float32 and a reference rounds once on the way:
# measured on an H200 in bfloat16, 3.0e-3 (logits of `linear`).
TOLERANCE_OF_ROUNDED = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
PROMPT_TOKENS = 24  # more than the decode forms take, so that those of prefill run, too
STEPS = 3
PROMPT = "Once upon a time"
# Arguments that are not compared: scratch means nothing after a call, and other slots may be filled during it.
LEFT_OUT = {"counter", "workspace", "hidden", "gate_up", "down", "gate_up_bias", "down_bias"}
WITHOUT_OUT = {"norm_router", "speculate", "estimate"}  # whose references return what they make
ESTIMATOR_WIDTH = 32
SLOTS = 16  # few: all of them are copied for every call


class Twins:
    """Operations that run twice, here and by reference on copies of their arguments on the host, and are compared."""

    def __init__(self, tested: Operations, dtype: torch.dtype) -> None:
        """`dtype` is the model's."""
        self._tolerance = TOLERANCE | {torch.float32: TOLERANCE_OF_ROUNDED.get(dtype, TOLERANCE[torch.float32])}
        self.calls: Counter[str] = Counter()
        self.errors: dict[str, float] = dict.fromkeys(Operations._fields, 0.0)  # the largest, in tolerances
        self.problems: dict[str, str] = {}
        self.operations = Operations(
            **{name: self._twin(name, getattr(tested, name), getattr(REFERENCES, name)) for name in Operations._fields}
        )

    def _twin(self, name: str, tested: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(reference)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            given = signature.bind(*arguments, **options).arguments
            before = _on_host({argument: value for argument, value in given.items() if argument not in LEFT_OUT})
            copies = _on_host(given)
            result = tested(*arguments, **options)
            expected = reference(**copies)
            if name in ("norm_router", "speculate"):
                expected = _chosen_by(_on_host(result), expected, copies)
            if name in WITHOUT_OUT:
                given.pop("out", None)
            if all(result is not value for value in given.values()):
                self._compare(name, "result", None, _on_host(result), expected)
            for argument, value in given.items():
                if argument not in LEFT_OUT:
                    self._compare(name, argument, before[argument], _on_host(value), copies[argument])
            return result

        return call

    def _compare(self, name: str, what: str, before: Any, actual: Any, expected: Any) -> None:
        """Compare trees of tensors where either call wrote."""
        if actual is None:  # an output that only the reference makes unasked
            return
        if isinstance(expected, torch.Tensor):
            written = torch.ones_like(expected, dtype=torch.bool)
            if before is not None:
                written = (_bits(actual) != _bits(before)) | (_bits(expected) != _bits(before))
            error = _error(actual[written], expected[written], self._tolerance)
            self.errors[name] = max(self.errors[name], error)
            if not error <= 1.0:
                self.problems.setdefault(name, f"{name}: {what} is {error:.3g} times the tolerance off its reference")
        elif fields := getattr(expected, "_fields", None):
            for part in fields:
                if part != "scratch":
                    parts = (None if tree is None else getattr(tree, part) for tree in (before, actual, expected))
                    self._compare(name, f"{what}.{part}", *parts)
        elif isinstance(expected, tuple | list):
            for i, value in enumerate(expected):
                self._compare(name, f"{what}[{i}]", None if before is None else before[i], actual[i], value)


def compare_kernels(folder: Path, device: torch.device, dtype: torch.dtype, tested: Operations) -> Twins:
    """A few steps of the model in `folder`, its experts in host memory, in which every operation runs twice."""
    spec, twins = load_spec(folder), Twins(tested, dtype)
    store = ExpertStore.allocate(spec, dtype)
    weights = load_weights(folder, spec, device, dtype, store=store)
    policy = resolve("exact", predictor="estimator")
    estimator = Estimator.initial(spec, ESTIMATOR_WIDTH, ESTIMATOR_WIDTH, corrects=True, vectors=NO_VECTORS, seed=0)
    kinds = dict.fromkeys(list(spec.moe_layers)[1:], "estimator")
    predictor = make_predictor(policy, twins.operations, spec, weights, None, estimator.to(device, dtype), kinds)
    experts = OffloadedExperts(
        twins.operations, spec, weights, store, SLOTS, policy, predictor,
        plan_on_device=device.type == "cpu" or store.is_pinned,
    )  # fmt: skip
    decoder = Decoder(spec, weights, twins.operations, experts)
    try:
        for batch in (1, 2):
            cache = _few_steps(decoder, batch)
            if not twins.calls["attention_prefill"]:  # torch's stands in where it is faster
                _prefill_attention(decoder, cache)
    finally:
        experts.close()
    return twins


def _few_steps(decoder: Decoder, batch: int) -> KVCache:
    spec, device = decoder.spec, decoder.device
    cache = KVCache.allocate(spec, batch, PROMPT_TOKENS + STEPS, device, decoder.dtype)
    generator = torch.Generator().manual_seed(batch)
    prompt = torch.randint(spec.vocab_size, (batch, PROMPT_TOKENS), generator=generator).to(device)
    decoder.experts.begin()
    logits = decoder.prefill(prompt, 0, cache)
    decoder.experts.begin_decode(batch)
    for i in range(STEPS):
        positions = torch.full((batch,), PROMPT_TOKENS + i, device=device)
        logits = decoder.decode(logits.argmax(-1), positions, cache)
    return cache


def _prefill_attention(decoder: Decoder, cache: KVCache) -> None:
    spec, (batch, _, _, size) = decoder.spec.layers[0].attention, cache.keys[0].shape
    generator = torch.Generator().manual_seed(batch)
    q = torch.randn(batch, PROMPT_TOKENS, spec.num_heads, size, generator=generator)
    positions = torch.arange(PROMPT_TOKENS, device=decoder.device).expand(batch, -1).contiguous()
    q = q.to(decoder.device, decoder.dtype)
    decoder.operations.attention_prefill(q, cache.keys[0], cache.values[0], positions, spec.scale, spec.window)


def compare_transfers(device: torch.device, tokens: int = 24) -> str | None:
    """A short generation of the embedded model with few slots, which must be the resident one; why it is not."""
    params = SamplingParams(max_new_tokens=tokens)
    resident = Engine.from_pretrained(device=str(device))
    expected = resident.generate(PROMPT, params).token_ids
    for policy, slots in (("exact", "12.5%"), ("on-demand", "4")):
        placement = Placement(policy=policy, expert_slots=slots)
        engine = Engine.from_pretrained(device=str(device), placement=placement, max_context=256, check="slots:8")
        try:
            found = engine.generate(PROMPT, params).token_ids
        finally:
            engine.close()
        if found != expected:
            at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
            return f"--policy {policy} with {slots} slots: token {at} is not that of the resident run"
    return None


def nano_kernels(device: torch.device, tested: Operations) -> Twins:
    """`compare_kernels` with the embedded model, in the type in which it runs on the device."""
    return compare_kernels(embedded_folder(), device, torch.bfloat16, tested)


def _on_host(tree: Any) -> Any:
    """A copy of all tensors on the CPU, each by itself, in the same tree."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone()  # waits for what was launched
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(_on_host, tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map(_on_host, tree))
    if isinstance(tree, dict):
        return {name: _on_host(value) for name, value in tree.items()}
    return tree


def _chosen_by(result: Any, expected: Any, given: dict[str, Any]) -> Any:
    """What the reference chooses by the tested operation's logits: of almost equal ones rounding decides."""
    rule, bias = given["routing"], given.get("selection_bias")
    if hasattr(expected, "topk_ids"):
        ids, weights = route_topk_ref(result.logits, rule, bias)
        return expected._replace(topk_ids=ids, topk_weights=weights)
    return expected._replace(ids=route_topk_ref(result.logits, replace(rule, top_k=given["count"]), bias)[0])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def _error(actual: torch.Tensor, expected: torch.Tensor, tolerance: dict[torch.dtype, float]) -> float:
    """The largest, in tolerances; of integers, infinite where any differs."""
    if torch.equal(_bits(actual), _bits(expected)):
        return 0.0
    if not expected.dtype.is_floating_point:
        return float("inf")
    scale = expected.double().abs().max().clamp(min=1e-30)
    error = ((actual.double() - expected.double()).abs().max() / scale).nan_to_num(torch.inf)
    return float(error) / tolerance[expected.dtype]
