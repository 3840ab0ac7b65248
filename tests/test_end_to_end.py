"""Kernels and decoder together: logits, tokens and caches against the references', and experts run from slots.

The models are tiny and random. Between them they have every kind of layer that the decoder can run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernel_testing import DEVICE, DTYPES, KERNEL_MARKS, ON_GPU, TOLERANCE, assert_close, generator, poisoned, randn

from tritonmoe.model.decoder import Decoder
from tritonmoe.model.kv_cache import KVCache
from tritonmoe.model.moe import routing_rule
from tritonmoe.model.operations import REFERENCES, Operations, kernels
from tritonmoe.model.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec, RopeSpec, RouterSpec, YarnSpec
from tritonmoe.model.weights import ModelWeights, allocate, iter_tensors
from tritonmoe_kernels import attention, expert_gemm, linear
from tritonmoe_kernels.launch_table import launch_config
from tritonmoe_kernels.references import expert_gemm_ref, route_topk_ref, speculate_ref
from tritonmoe_kernels.routing import MAX_DECODE_TOKENS, NormRouterOutput, Routing, SpeculateOutput
from tritonmoe_kernels.speculate import speculate

pytestmark = [*KERNEL_MARKS, pytest.mark.usefixtures("few_programs")]

PROMPT_LENGTH = 6  # three rows of it are more tokens than the decode forms take, one row is fewer
NUM_STEPS = 4
CAPACITY = 13  # more than prompt and steps: what is not used must stay untouched
# Errors add up over layers and steps. Measured under the interpreter, in tolerances of a single kernel: 0.2 and 2.4.
FACTOR = {torch.float32: 2.0, torch.float16: 6.0, torch.bfloat16: 6.0}
# Batch and dtype. One row streams its projections and takes the decode forms throughout; three do neither in a prefill.
CASES = [pytest.param(batch, dtype, id=f"{batch}-{dtype}") for dtype in DTYPES for batch in (1, 3)]
if not ON_GPU:  # half of them: the interpreter takes seconds for each
    CASES = [case for case in CASES if case.values in ((1, torch.float16), (3, torch.float32))]


def qwen3_like() -> ModelSpec:
    attention = AttentionSpec(2, 1, 16, RopeSpec(10000.0, 16), scale=0.25, qk_norm="head")
    layer = LayerSpec(attention, MoeSpec(6, 2, 24, RouterSpec("softmax", renormalize=True)))
    return ModelSpec(
        "qwen3_like", 50, 40, (layer, layer), 1e-6, tied_head=False, max_position=64, checkpoint_dtype=None
    )


def gpt_oss_like() -> ModelSpec:
    """Sinks, a window shorter than the prompt, YaRN, biases everywhere, a clamp that many values reach."""
    yarn = YarnSpec(8.0, 16, beta_fast=32.0, beta_slow=1.0, truncate=False, attention_factor=1.2)
    attention = AttentionSpec(
        4, 2, 8, RopeSpec(10000.0, 8, yarn=yarn), scale=0.35, qkv_bias=True, output_bias=True, window=5, sinks=True
    )
    router = RouterSpec("topk_softmax", renormalize=False, logit_bias=True)
    moe = MoeSpec(5, 3, 16, router, "swiglu_clamped", expert_bias=True, swiglu_limit=0.7, swiglu_alpha=1.702)
    layers = (LayerSpec(attention, moe), LayerSpec(replace(attention, window=None), moe))
    return ModelSpec("gpt_oss_like", 37, 48, layers, 1e-5, tied_head=False, max_position=64, checkpoint_dtype=None)


def shared_like() -> ModelSpec:
    """A dense layer, then layers with a gated shared expert, routed with a selection bias; every multiplier."""
    rope = RopeSpec(10000.0, 8, interleaved=True)
    attention = AttentionSpec(2, 2, 12, rope, scale=0.3, qk_norm="full", clip_qkv=1.0)
    router = RouterSpec("sigmoid", renormalize=True, selection_bias=True, renorm_epsilon=1e-20, scale=2.5)
    moe = MoeSpec(6, 2, 20, router, shared_size=12, shared_gate=True)
    layers = (LayerSpec(attention, None, dense_size=28), LayerSpec(attention, moe), LayerSpec(attention, moe))
    return ModelSpec(
        "shared_like", 41, 36, layers, 1e-6, True, 64, None,
        embedding_multiplier=3.0, residual_multiplier=0.6, logits_divisor=2.0,
    )  # fmt: skip


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for a program, however small: there the tensors are cut into few tiles."""
    if ON_GPU:
        return

    def few(*args) -> dict[str, Any]:
        config = dict(launch_config(*args))
        return config | {name: value for name, value in {"block_n": 32, "programs": 4}.items() if name in config}

    for module in (attention, expert_gemm, linear):
        monkeypatch.setattr(module, "launch_config", few)


SPECS = {spec.model_type: spec for spec in (qwen3_like(), gpt_oss_like(), shared_like())}


def noise_weights(spec: ModelSpec, dtype: torch.dtype) -> ModelWeights:
    """Seeded noise in every tensor, norms around one: a decoder that forgot one of them would not pass."""
    weights = allocate(spec, DEVICE, dtype)
    for seed, tensor in enumerate(iter_tensors(weights)):
        scale = 1.5 * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.2
        tensor.copy_(randn(*tensor.shape, scale=scale, seed=100 + seed))
    norms = [weights.final_norm]
    for layer in weights.layers:
        norms += [layer.input_norm, layer.post_norm, layer.attention.q_norm, layer.attention.k_norm]
    for norm in norms:
        if norm is not None:
            norm += 1.0
    return weights


def make_prompt(spec: ModelSpec, batch: int) -> torch.Tensor:
    return torch.randint(spec.vocab_size, (batch, PROMPT_LENGTH), generator=generator(batch)).to(DEVICE)


def make_cache(spec: ModelSpec, batch: int, dtype: torch.dtype) -> KVCache:
    """Full of NaN, so that an entry which is read before it was written shows."""
    cache = KVCache.allocate(spec, batch, CAPACITY, DEVICE, dtype)
    for tensor in cache.keys + cache.values:
        tensor.fill_(float("nan"))
    return cache


@dataclass
class Run:
    """A prompt and `NUM_STEPS` tokens after it."""

    cache: KVCache
    prompt_cache: KVCache  # as it was after the prompt
    logits: list[torch.Tensor]  # [B, V] after the prompt and after each token
    tokens: list[torch.Tensor]  # [B], the greedy choice from each of these
    routed: list[tuple[int, torch.Tensor]]  # what `on_route` was told, layer by layer


def copy_of(cache: KVCache) -> KVCache:
    return KVCache(*(tuple(tensor.clone() for tensor in tensors) for tensors in (cache.keys, cache.values)))


def run(decoder: Decoder, prompt: torch.Tensor, fed: Run | None = None) -> Run:
    """Prefill, then decode: its own greedy tokens, or those of another run."""
    cache, routed = make_cache(decoder.spec, len(prompt), decoder.dtype), []
    decoder.hooks.on_route = lambda layer_id, topk_ids: routed.append((layer_id, topk_ids))
    logits = [decoder.prefill(prompt, 0, cache)]
    result = Run(cache, copy_of(cache), logits, [logits[0].argmax(-1)], routed)
    decode(decoder, result, result if fed is None else fed)
    return result


def decode(decoder: Decoder, result: Run, fed: Run) -> None:
    """The steps after the prompt."""
    for step in range(NUM_STEPS):
        positions = torch.full_like(fed.tokens[step], PROMPT_LENGTH + step)
        result.logits.append(decoder.decode(fed.tokens[step], positions, result.cache))
        result.tokens.append(result.logits[-1].argmax(-1))


class Routings:
    """Router logits and choices of one run, for another one to follow.

    In 16 bits experts whose scores are almost equal change places with the last rounding, and all that comes after is
    another model. So the references compare their router logits with the kernels', then choose by the kernels'.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def recorded(self, ops: Operations) -> Operations:
        def norm_router(*args) -> NormRouterOutput:
            out = ops.norm_router(*args)
            self._seen.append((out.logits, out.topk_ids))
            return out

        def route_topk(logits: torch.Tensor, *args) -> tuple[torch.Tensor, torch.Tensor]:
            topk_ids, topk_weights = ops.route_topk(logits, *args)
            self._seen.append((logits, topk_ids))
            return topk_ids, topk_weights

        return ops._replace(norm_router=norm_router, route_topk=route_topk)

    def followed(self, dtype: torch.dtype) -> Operations:
        """The references, by these choices."""
        seen = iter(self._seen)

        def norm_router(*args) -> NormRouterOutput:
            out = REFERENCES.norm_router(*args)
            topk_ids, topk_weights = route_topk(out.logits, args[4], args[9])
            return out._replace(topk_ids=topk_ids, topk_weights=topk_weights)

        def route_topk(logits: torch.Tensor, rule: Routing, selection_bias: torch.Tensor | None):
            theirs, chosen = next(seen)
            assert_close(theirs.to(dtype), logits.to(dtype), FACTOR[dtype])
            topk_ids, topk_weights = route_topk_ref(theirs, rule, selection_bias)
            assert torch.equal(topk_ids, chosen)
            return topk_ids, topk_weights

        return REFERENCES._replace(norm_router=norm_router, route_topk=route_topk)


@functools.cache
def run_on_kernels(name: str, batch: int, dtype: torch.dtype) -> tuple[ModelWeights, Run, Routings]:
    """Made once for both tests: under the interpreter each takes seconds."""
    weights, routings = noise_weights(SPECS[name], dtype), Routings()
    decoder = Decoder(SPECS[name], weights, routings.recorded(kernels()))
    return weights, run(decoder, make_prompt(SPECS[name], batch)), routings


@pytest.mark.parametrize(("batch", "dtype"), CASES)
@pytest.mark.parametrize("name", SPECS)
def test_kernels_equal_references(name: str, batch: int, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    weights, actual, routings = run_on_kernels(name, batch, dtype)
    is_exact = dtype == torch.float32
    reference = Decoder(spec, weights, REFERENCES if is_exact else routings.followed(dtype))
    expected = run(reference, make_prompt(spec, batch), fed=actual)
    routers = [layer_id for layer_id, layer in enumerate(spec.layers) if layer.moe is not None]
    assert [layer_id for layer_id, _ in actual.routed] == (1 + NUM_STEPS) * routers
    for (_, ours), (_, theirs) in zip(actual.routed, expected.routed, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs, tokens in zip(actual.logits, expected.logits, actual.tokens, strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours.to(dtype), theirs.to(dtype), FACTOR[dtype])
        # The same token, unless rounding to 16 bits could have put another one first.
        slack = 0.0 if is_exact else 2 * FACTOR[dtype] * TOLERANCE[dtype][0] * theirs.abs().max()
        assert (theirs.gather(1, tokens[:, None])[:, 0] >= theirs.amax(-1) - slack).all()
    for ours, theirs in zip(cached(actual), cached(expected), strict=True):
        assert_close(ours, theirs, FACTOR[dtype])


def cached(result: Run) -> list[torch.Tensor]:
    """Keys and values of all positions that were used, after a check that the rest is as it was."""
    used, tensors = PROMPT_LENGTH + NUM_STEPS, result.cache.keys + result.cache.values
    assert all(tensor[:, :, used:].isnan().all() for tensor in tensors)
    return [tensor[:, :, :used] for tensor in tensors]


class Offloaded:
    """Operations that predict the last layer's experts from the layer before, and run them from slots of a pool.

    In each step one routed expert is not there at first: the others run, then it is fetched and runs, into one buffer.
    """

    def __init__(self, ops: Operations, spec: ModelSpec, weights: ModelWeights) -> None:
        self.num_speculated = self.num_fetched = 0
        self._ops, self._spec = ops, spec
        before, self._next = spec.layers[-2].moe, weights.layers[-1]
        assert before is not None
        assert self._next.moe is not None
        self._router_before = weights.layers[-2].moe.router
        self._experts = self._next.moe.experts
        self._defaults = randn(before.num_experts, spec.hidden_size, dtype=weights.embedding.dtype, seed=1)
        # Not the router's: on a GPU both launches may run at once.
        self._counter = torch.zeros(MAX_DECODE_TOKENS, dtype=torch.int32, device=DEVICE)

    def operations(self) -> Operations:
        return self._ops._replace(norm_router=self._norm_router, expert_gemm=self._expert_gemm)

    def _norm_router(
        self, residual: torch.Tensor, delta: torch.Tensor, norm: torch.Tensor, router: torch.Tensor, *rest
    ):
        routed = self._ops.norm_router(residual, delta, norm, router, *rest)
        if router is self._router_before:
            self._speculate(routed)
        return routed

    def _speculate(self, routed: NormRouterOutput) -> None:
        spec, moe = self._spec.layers[-1].moe, self._next.moe
        routing = routing_rule(spec.num_experts_per_tok, spec.router)
        count = spec.num_experts_per_tok + 1
        given = (routed.residual, self._defaults, routed.topk_ids, routed.topk_weights, self._next.post_norm)
        given += (moe.router, routing, count, self._counter, self._spec.norm_epsilon, self._spec.residual_multiplier)
        biases = {"router_bias": moe.router_bias, "selection_bias": moe.selection_bias}
        tokens, experts = routed.logits.shape[0], len(moe.router)
        out = SpeculateOutput(
            poisoned(tokens, experts, dtype=torch.float32),
            poisoned(tokens, count, dtype=torch.int32),
            poisoned(*routed.residual.shape, dtype=routed.residual.dtype),
        )
        speculate(*given, **biases, out=out)
        expected = speculate_ref(*given, **biases)
        dtype = routed.residual.dtype
        assert_close(out.q, expected.q)
        assert_close(out.logits.to(dtype), expected.logits.to(dtype))
        chosen, _ = route_topk_ref(out.logits, replace(routing, top_k=count), moe.selection_bias)
        assert torch.equal(out.ids, chosen)
        if dtype == torch.float32:  # in 16 bits the order of almost equal ones is the kernel's own
            assert torch.equal(out.ids, expected.ids)
        assert not self._counter.any()
        self.num_speculated += 1

    def _expert_gemm(self, x: torch.Tensor, slot_ids: torch.Tensor, gate_up: torch.Tensor, *rest, **options):
        at_once = self._ops.expert_gemm(x, slot_ids, gate_up, *rest, **options)
        if gate_up is not self._experts.gate_up:
            return at_once
        down, gate_up_bias, down_bias, *activation = rest[:6]
        num_experts = len(gate_up)
        order = torch.randperm(num_experts + 1, generator=generator(self.num_fetched)).to(DEVICE, torch.int32)
        slot_of, spare = order[:num_experts], order[num_experts]
        parts = [part for part in vars(self._experts).values() if part is not None]
        pool = record_views(parts, num_experts + 1)
        missing = slot_ids[self.num_fetched % len(x), self.num_fetched % slot_ids.shape[1]]
        for slots, part in zip(pool, parts, strict=True):
            slots[slot_of.long()] = part
            slots[slot_of[missing]] = float("nan")
        is_missing = slot_ids == missing
        slots = slot_of[slot_ids.long()]
        out = poisoned(*slot_ids.shape, x.shape[1], dtype=x.dtype)
        weights = (*pool, None, None)[:4]
        self._ops.expert_gemm(x, slots.masked_fill(is_missing, -1), *weights, *activation, out)
        assert torch.equal(out.isnan().all(-1), is_missing)
        for buffer, part in zip(pool, parts, strict=True):
            buffer[spare] = part[missing]
        slots = torch.full_like(slots, -1).masked_fill(is_missing, int(spare))
        self._ops.expert_gemm(x, slots, *weights, *activation, out)
        assert torch.equal(out, at_once)
        assert_close(out, expert_gemm_ref(x, slot_ids, gate_up, down, gate_up_bias, down_bias, *activation))
        self.num_fetched += 1
        return out


def record_views(parts: list[torch.Tensor], num_slots: int) -> list[torch.Tensor]:
    """For each part [E, …] a view [num_slots, …] into one pool whose records hold an expert each; full of NaN.

    Parts begin at multiples of 16 elements: how wide loads may be decides the order of sums on a GPU.
    """
    sizes = [part[0].numel() for part in parts]
    assert not any(size % 16 for size in sizes)
    pool = poisoned(num_slots, sum(sizes), dtype=parts[0].dtype)
    fields = pool.split(sizes, dim=1)
    return [field.unflatten(1, part.shape[1:]) for field, part in zip(fields, parts, strict=True)]


@pytest.mark.parametrize(("batch", "dtype"), CASES)
@pytest.mark.parametrize("name", SPECS)
def test_speculation_and_a_missing_slot(name: str, batch: int, dtype: torch.dtype) -> None:
    """Neither changes a bit of what follows."""
    spec = SPECS[name]
    weights, plain, _ = run_on_kernels(name, batch, dtype)
    offloaded = Offloaded(kernels(), spec, weights)
    actual = replace(plain, cache=copy_of(plain.prompt_cache), logits=plain.logits[:1], tokens=plain.tokens[:1])
    decode(Decoder(spec, weights, offloaded.operations()), actual, fed=actual)
    assert (offloaded.num_speculated, offloaded.num_fetched) == (NUM_STEPS, NUM_STEPS)
    for ours, theirs in zip(actual.logits + actual.tokens, plain.logits + plain.tokens, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(cached(actual), cached(plain), strict=True):
        assert torch.equal(ours, theirs)
