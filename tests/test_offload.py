"""Experts in host memory give the bits of experts on the device, whatever slots, predictors and copies do."""

from __future__ import annotations

import itertools
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_architectures import parse

from tritonmoe.errors import InputError
from tritonmoe.generation.session import prefill_chunk
from tritonmoe.model.attention import Tokens, attention_block
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.expert_store import ExpertStore
from tritonmoe.model.kv_cache import KVCache
from tritonmoe.model.operations import Operations, operations
from tritonmoe.model.rope import inverse_frequencies
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ModelWeights, allocate, iter_tensors
from tritonmoe.offload.copy_engine import Copy, CopyEngine, Priority, StreamCopies, ThreadCopies, copy_engine
from tritonmoe.offload.experts import OffloadedExperts
from tritonmoe.offload.policy import RANKING_PREDICTORS, Policy, resolve
from tritonmoe.prediction.estimator import NO_VECTORS, Estimator
from tritonmoe.prediction.predictors import HostPredictor, Predictor, RouterPredictor
from tritonmoe_kernels import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []  # wherever it runs, on what is there
ON_THREADS = pytest.mark.skipif(DEVICE.type == "cuda", reason="copies by a thread are the CPU's")
QWEN3 = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}
SPECS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "dense-layer": {**QWEN3, "mlp_only_layers": [1]},
    "gpt_oss": {
        "base": {
            "model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32,
            "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8, "rope_theta": 10000.0,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": True,
            "tie_word_embeddings": False, "rope_scaling": None,
        },
    },
}  # fmt: skip
STEPS = 12
NAN_BYTE = 255  # floating-point values of such bytes are NaN
BOOKKEEPING = ("offload/experts.py", "scheduler.py", "slot_pool.py", "copy_engine.py")


def make_spec(name: str) -> ModelSpec:
    return parse(**{"max_position_embeddings": 4096, **SPECS[name]})


def noise(spec: ModelSpec, seed: int = 0) -> ModelWeights:
    """Random weights whose routers spread tokens over experts."""
    weights = allocate(spec, DEVICE, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for tensor in iter_tensors(weights):
        values = 0.25 * torch.randn(tensor.shape, generator=generator)
        tensor.copy_(values + 1.0 if tensor.ndim == 1 else values)
    return weights


def estimator(spec: ModelSpec) -> Estimator:
    return Estimator.initial(spec, 24, 40, False, NO_VECTORS, seed=3).to(DEVICE, torch.float32)


def kinds_of(policy: Policy, spec: ModelSpec) -> dict[int, str]:
    later = list(spec.moe_layers)[1:]
    if policy.predictor == "hybrid":
        return dict(zip(later, itertools.cycle(["estimator", "residual", "quasi-hidden"])))
    return dict.fromkeys(later, policy.predictor)


def predictor(policy: Policy, ops: Operations, spec: ModelSpec, weights: ModelWeights, trace: Any = None) -> Predictor:
    if policy.predictor in RANKING_PREDICTORS:
        experts = max(layer.moe.num_experts for layer in spec.layers if layer.moe)
        vectors = torch.randn(len(spec.layers), experts, spec.hidden_size, generator=torch.Generator().manual_seed(5))
        defaults = None if policy.predictor == "residual" else 0.1 * vectors.to(DEVICE)
        network, kinds = estimator(spec), kinds_of(policy, spec)
        return RouterPredictor(ops, spec, weights, policy.lookahead, policy.candidates, defaults, network, kinds)
    if policy.predictor in ("previous-token", "oracle"):
        return HostPredictor(spec, policy.lookahead, trace)
    return Predictor()


class Offloaded:
    """A decoder with experts in a store, beside the weights it was copied from."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        num_slots: int,
        policy: Policy,
        make_copies: Callable[..., CopyEngine] = copy_engine,
        trace: Any = None,
        measure: bool = False,
    ) -> None:
        ops = operations(DEVICE)
        self.store = ExpertStore.allocate(spec, torch.float32, weights.storage)
        for i, layer in enumerate(weights.layers):
            if layer.moe is not None:
                for view, tensor in zip(
                    iter_tensors(self.store.layer_weights(i)), iter_tensors(layer.moe.experts), strict=True
                ):
                    view.copy_(tensor)
        guess = predictor(policy, ops, spec, weights, trace)
        self.experts = OffloadedExperts(
            ops, spec, weights, self.store, num_slots, policy, guess, make_copies=make_copies, measure=measure
        )
        self.decoder = Decoder(spec, weights, ops, self.experts)

    def check(self) -> None:
        """Everything that was counted was moved, and nothing is pinned between steps but what is foretold."""
        self.experts.scheduler.check_integrity()
        self.experts.settle()
        moved = self.experts.counters.moved_records() + self.experts.prefill_counters.moved_records()
        assert moved == self.experts.copies.num_copies


def generate(decoder: Decoder, batch: int, prompt_length: int = 9, steps: int = STEPS) -> torch.Tensor:
    """Logits [1 + steps, B, V] of a prompt and greedy steps after it."""
    spec = decoder.spec
    cache = KVCache.allocate(spec, batch, prompt_length + steps + 1, DEVICE, torch.float32)
    generator = torch.Generator().manual_seed(batch)
    prompt = torch.randint(spec.vocab_size, (batch, prompt_length), generator=generator).to(DEVICE)
    logits = [decoder.prefill(prompt, 0, cache)]
    for i in range(steps):
        positions = torch.full((batch,), prompt_length + i, device=DEVICE)
        logits.append(decoder.decode(logits[-1].argmax(-1), positions, cache, prompt_length + i + 1))
    return torch.stack(logits)


POLICIES = {
    "on-demand": resolve("on-demand"),
    "lfu": resolve("on-demand", eviction="lfu"),
    "residual": resolve("exact", predictor="residual"),
    "quasi-hidden": resolve("exact"),
    "estimator": resolve("exact", predictor="estimator", candidates=1),
    "hybrid": resolve("hybrid-pf", execute="routed"),
    "lookahead": resolve("exact", lookahead=3, candidates=2),
    "previous-token": resolve("exact", predictor="previous-token"),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch", [1, 4])
def test_bits_of_the_resident_run(name: str, policy: str, batch: int) -> None:
    """Pools from the fewest slots to all experts; four rows want more experts at once than the small ones have."""
    spec = make_spec(name)
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), batch)
    moe = [layer.moe for layer in spec.layers if layer.moe is not None]
    everything = len(moe) * moe[0].num_experts
    for num_slots in (1, 2, 3, 5, everything // 2, everything):
        offloaded = Offloaded(spec, weights, num_slots, POLICIES[policy])
        assert torch.equal(generate(offloaded.decoder, batch), expected), f"{num_slots} slots"
        offloaded.check()
        offloaded.experts.close()


def test_a_recorded_trace_foretells_everything() -> None:
    """Replaying what was routed, every expert of a later layer is on its way before it is asked for."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    decoder, steps = Decoder(spec, weights), []

    def record(layer: int, ids: torch.Tensor) -> None:
        if len(ids) == 1:
            if layer == 0:
                steps.append([])
            steps[-1].append(ids.cpu().numpy().copy())

    decoder.hooks.on_route = record
    # A prompt of two tokens: one that wants nearly all experts would have the next layer's fetched ahead unseen.
    expected = generate(decoder, 1, prompt_length=2)
    offloaded = Offloaded(spec, weights, 8, resolve("exact", predictor="oracle"), trace=steps)
    assert torch.equal(generate(offloaded.decoder, 1, prompt_length=2), expected)
    offloaded.check()
    for layer in offloaded.experts.counters.layers[1:]:
        assert layer.recall == 1.0
        assert layer.prefetched_wasted == 0


class SlowStream(StreamCopies):
    """The same on a GPU: before each copy its slot is NaN for a while, on the stream that copies."""

    def __init__(self, slots: torch.Tensor, landed: Callable[[int, int], object]) -> None:
        super().__init__(slots, landed)
        self._random = random.Random(0)

    def _start(self, copy: Copy) -> None:
        read = self._reads.get(copy.slot)
        if read is not None:
            self._stream.wait_event(read)
        with torch.cuda.stream(self._stream):
            self._slots[copy.slot].fill_(NAN_BYTE)
            torch.cuda._sleep(self._random.choice((0, 100_000, 1_000_000)))
        super()._start(copy)


class FaultyCopies(ThreadCopies):
    """Copies that take their time, in any order; the slot holds NaN until its copy is complete."""

    def __init__(self, slots: torch.Tensor, landed: Callable[[int, int], object]) -> None:
        super().__init__(slots, landed)
        self._random = random.Random(0)
        self.poisoned = slots.fill_(NAN_BYTE)

    def _start(self, copy: Copy) -> None:
        self._slots[copy.slot].fill_(NAN_BYTE)
        super()._start(copy)

    def _copy(self, copy: Copy) -> None:
        time.sleep(self._random.choice((0.0, 0.0, 0.001)))
        super()._copy(copy)

    def pump(self) -> None:
        for queue in self._queues.values():
            shuffled = list(queue)
            self._random.shuffle(shuffled)
            queue.clear()
            queue.extend(shuffled)
        super().pump()


@pytest.mark.parametrize("policy", ["on-demand", "quasi-hidden", "lookahead"])
@pytest.mark.parametrize("num_slots", [2, 5, 9])
def test_slow_and_reordered_copies(policy: str, num_slots: int) -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), 2)
    faulty = SlowStream if DEVICE.type == "cuda" else FaultyCopies
    offloaded = Offloaded(spec, weights, num_slots, POLICIES[policy], faulty)
    assert torch.equal(generate(offloaded.decoder, 2), expected)
    offloaded.check()
    offloaded.experts.close()


@ON_THREADS
def test_a_slot_without_its_copy_shows() -> None:
    """The check on the checks: a copy engine that forgets one copy changes the result."""

    class Forgetful(ThreadCopies):
        calls = 0

        def _copy(self, copy: Copy) -> None:
            self.calls += 1
            if self.calls == 7:
                self._slots[copy.slot].fill_(NAN_BYTE)
            else:
                super()._copy(copy)

    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), 1)
    offloaded = Offloaded(spec, weights, 4, POLICIES["on-demand"], Forgetful)
    assert not torch.equal(generate(offloaded.decoder, 1), expected)


def test_without_a_cache_every_layer_fetches_its_experts() -> None:
    """k records per layer and token, the last layer included, where nothing can be reused."""
    spec = make_spec("qwen3")
    offloaded = Offloaded(spec, noise(spec), 2, POLICIES["on-demand"])
    generate(offloaded.decoder, 1, prompt_length=1, steps=5)
    for layer in offloaded.experts.counters.layers:
        assert (layer.demand, layer.hits, layer.prefetched) == (2 * 5, 0, 0)
    assert offloaded.experts.counters.tokens == 5
    assert offloaded.experts.copies.num_copies == 4 * 2 * (1 + 5)


@pytest.mark.parametrize(
    ("preset", "gate", "lookahead"),
    [
        ("router-pf", "speculated", 1),
        ("router-pf", "routed", 2),
        ("est-pf", "routed", 1),
        ("hybrid-pf", "speculated", 1),
    ],
)
def test_speculated_execution_runs_the_foretold_experts(preset: str, gate: str, lookahead: int) -> None:
    """Each layer but the first runs the experts its predecessor foretold, with the guess's or the router's weights."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    policy = resolve(preset, gate=gate, lookahead=lookahead)
    offloaded = Offloaded(spec, weights, 16, policy)
    guesses: dict[int, Any] = {}
    guess = offloaded.experts.predictor.guess

    def watch(layer: int, later: int, routed: Any) -> Any:
        guesses[later] = found = guess(layer, later, routed)
        return found

    offloaded.experts.predictor.guess = watch  # type: ignore[method-assign]
    seen: dict[int, torch.Tensor] = {}
    offloaded.decoder.hooks.on_route = seen.__setitem__
    generate(offloaded.decoder, 1, steps=1)
    for layer in (1, 2, 3):
        assert torch.equal(seen[layer], guesses[layer].ids[:, :2])
    offloaded.check()


def test_only_what_runs_next_is_fetched_as_if_it_was_asked_for() -> None:
    """Of what is foretold, where that is executed: what is foretold for the layer after the next may be wrong."""
    spec = make_spec("qwen3")
    offloaded = Offloaded(spec, noise(spec), 12, resolve("router-pf", lookahead=2))
    experts, nearest = offloaded.experts, -1
    submit, prefetch, seen = experts.copies.submit, experts._prefetch, set()

    def watch(record: torch.Tensor, slot: int, epoch: int, priority: Priority) -> None:
        if nearest >= 0:
            seen.add((int(experts.pool.key_of[slot]) // 8 - nearest, priority))
        submit(record, slot, epoch, priority)

    def watch_ahead(foretold: dict[int, Any]) -> None:
        nonlocal nearest
        nearest = min(foretold, default=-1)
        prefetch(foretold)
        nearest = -1

    experts.copies.submit, experts._prefetch = watch, watch_ahead  # type: ignore[method-assign]
    generate(offloaded.decoder, 1, prompt_length=1)
    assert seen == {(0, Priority.DEMAND), (1, Priority.PREFETCH)}
    offloaded.check()


@pytest.mark.parametrize("gate", ["speculated", "routed"])
def test_speculated_execution_in_waves(gate: str) -> None:
    """What runs is what was foretold, also where the slots do not hold a layer's experts at once."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    policy = resolve("router-pf", gate=gate)
    expected = generate(Offloaded(spec, weights, 32, policy).decoder, 3)
    for num_slots in (1, 2, 3, 5):
        offloaded = Offloaded(spec, weights, num_slots, policy)
        assert torch.equal(generate(offloaded.decoder, 3), expected), f"{num_slots} slots"
        offloaded.check()
        offloaded.experts.close()


def test_miss_tolerance_leaves_light_experts_out_and_says_so() -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    exact = generate(Decoder(spec, weights), 1)
    offloaded = Offloaded(spec, weights, 2, resolve("on-demand", miss_tolerance=0.45))
    assert not torch.equal(generate(offloaded.decoder, 1), exact)
    total = offloaded.experts.counters.total()
    assert total.left_out > 0
    assert 0 < total.left_out_mass < 0.45 * total.left_out
    offloaded.check()
    offloaded = Offloaded(spec, weights, 2, resolve("on-demand", miss_tolerance=1e-9))
    assert torch.equal(generate(offloaded.decoder, 1), exact)


def test_two_generations_with_the_pool_resized_between() -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), 1)
    offloaded = Offloaded(spec, weights, 5, POLICIES["quasi-hidden"])
    for num_slots in (None, 3, 20, 2):
        if num_slots is not None:
            offloaded.experts.resize(num_slots)
        assert torch.equal(generate(offloaded.decoder, 1), expected)
        offloaded.check()


def test_interrupted_in_the_middle_of_a_layer() -> None:
    """What was planned or under way is given up; the next generation is right."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), 1)
    offloaded = Offloaded(spec, weights, 6, POLICIES["quasi-hidden"])
    original = offloaded.experts._run_slots
    for calls in (3, 8, 15, 21):
        left = [calls]

        def interrupted(*arguments: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            original(*arguments)

        offloaded.experts._run_slots = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            generate(offloaded.decoder, 1)
        offloaded.experts._run_slots = original  # type: ignore[method-assign]
        offloaded.experts.begin()
        assert torch.equal(generate(offloaded.decoder, 1), expected)
        offloaded.check()


def test_interrupted_between_any_two_statements() -> None:
    """Ctrl-C may come anywhere in the bookkeeping, which is most of what the host does."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), 1, steps=3)
    offloaded = Offloaded(spec, weights, 6, POLICIES["quasi-hidden"])
    chance = random.Random(1)
    for _ in range(60):
        left = chance.randrange(1, 4000)

        def trace(frame: Any, event: str, _argument: Any) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.endswith(BOOKKEEPING):
                return None
            left -= event == "line"
            if left == 0:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            generate(offloaded.decoder, 1, steps=3)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        offloaded.experts.begin()
        assert torch.equal(generate(offloaded.decoder, 1, steps=3), expected)
        offloaded.check()


def test_previous_token_forgets_the_last_generation() -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    offloaded = Offloaded(spec, weights, 8, POLICIES["previous-token"])
    for batch in (2, 1, 3):
        offloaded.experts.begin()
        assert torch.equal(generate(offloaded.decoder, batch), generate(Decoder(spec, weights), batch))


def test_previous_token_of_fewer_sequences() -> None:
    """Steps of a batch may come between those of a stream."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    offloaded = Offloaded(spec, weights, 8, POLICIES["previous-token"])
    for batch in (2, 1, 3):
        assert torch.equal(generate(offloaded.decoder, batch), generate(Decoder(spec, weights), batch))


def test_slots_that_could_not_be_had_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    offloaded = Offloaded(spec, weights, 8, POLICIES["quasi-hidden"])
    make_slots = offloaded.experts._make_slots

    def none_left(num_slots: int) -> None:
        if num_slots:
            raise MemoryError
        make_slots(num_slots)

    with monkeypatch.context() as patch:
        patch.setattr(offloaded.experts, "_make_slots", none_left)
        with pytest.raises(InputError, match="not one expert slot"):
            offloaded.experts.resize(12)
    offloaded.experts.begin()
    assert torch.equal(generate(offloaded.decoder, 1), generate(Decoder(spec, weights), 1))
    assert offloaded.experts.pool.num_slots == 8


@pytest.mark.parametrize("gate", ["speculated", "routed"])
def test_measuring_changes_nothing_and_reports_agreement(gate: str) -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    plain = Offloaded(spec, weights, 8, resolve("router-pf", gate=gate))
    measured = Offloaded(spec, weights, 8, resolve("router-pf", gate=gate), measure=True)
    assert torch.equal(generate(plain.decoder, 1), generate(measured.decoder, 1))
    assert plain.experts.counters.total().recall is None
    assert all(0 < (layer.recall or 0) <= 1 for layer in measured.experts.counters.layers[1:])


def test_a_prompt_fetches_past_layers_that_lack_nothing() -> None:
    """The link has work while layers compute whose experts are all in slots."""
    spec = parse(**{**SPECS["qwen3"], "num_hidden_layers": 4})
    num_experts = spec.moe_layers[1].num_experts
    experts = Offloaded(spec, noise(spec), 4 * num_experts, POLICIES["on-demand"]).experts
    for layer in (1, 2):
        experts.pool.take(layer, range(num_experts))
    assert list(experts._prefill_ahead(0)) == list(experts._prefill_ahead(2)) == [3]
    experts.pool.take(3, range(num_experts - 1))
    assert list(experts._prefill_ahead(0)) == [3]
    experts.pool.take(3, [num_experts - 1])
    assert experts._prefill_ahead(0) == {}


def test_a_long_prompt_through_few_slots() -> None:
    """16k tokens in prefill steps of which each wants every expert of every layer."""
    spec = parse(**{**SPECS["qwen3"], "num_hidden_layers": 2, "max_position_embeddings": 32768})
    weights = noise(spec)
    length, chunk = 16_400, prefill_chunk(DEVICE)
    prompt = torch.randint(spec.vocab_size, (1, length), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    logits = []
    for decoder in (Decoder(spec, weights), Offloaded(spec, weights, 3, POLICIES["quasi-hidden"]).decoder):
        cache = KVCache.allocate(spec, 1, length, DEVICE, torch.float32)
        for start in range(0, length, chunk):
            last = decoder.prefill(prompt[:, start : start + chunk], start, cache)
        logits.append(last)
    assert torch.equal(*logits)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts host memory")
def test_memory_does_not_grow() -> None:
    spec = make_spec("qwen3")
    offloaded = Offloaded(spec, noise(spec), 5, POLICIES["quasi-hidden"])
    generate(offloaded.decoder, 1, steps=50)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    generate(offloaded.decoder, 1, steps=300)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000, f"{grown} bytes after 300 steps"


def test_speculated_execution_refuses_a_large_batch() -> None:
    spec = make_spec("qwen3")
    offloaded = Offloaded(spec, noise(spec), 32, resolve("router-pf"))
    with pytest.raises(InputError, match="at most 16 sequences"):
        generate(offloaded.decoder, 17, steps=1)


def router_pf_step(
    spec: ModelSpec, weights: ModelWeights, defaults: torch.Tensor, token: int, position: int, cache: KVCache
) -> torch.Tensor:
    """Speculate, then execute what was speculated (arXiv 2603.19289, Router-PF): logits [V] of one token."""
    x = weights.embedding[token][None]
    ids = gates = None
    for i, (layer, w) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        assert layer.moe is not None
        assert w.moe is not None
        at = torch.tensor([position], device=DEVICE)
        inv_freq = inverse_frequencies(layer.attention.rope).to(DEVICE)
        tokens = Tokens(at, at + 1, 1, None, position + 1)
        r = x + attention_block(
            operations(DEVICE), layer.attention, w.attention, x, w.input_norm, spec.norm_epsilon, inv_freq, tokens,
            cache.keys[i], cache.values[i],
        )  # fmt: skip
        normed = reference.rms_norm(r, w.post_norm, spec.norm_epsilon)
        if ids is None:
            logits = reference.router_logits(normed, w.moe.router)
            ids, gates = reference.route_topk(logits, layer.moe.num_experts_per_tok, "softmax", True)
        guess = r + sum(gate * defaults[i, e] for gate, e in zip(gates[0], ids[0], strict=True))
        y = torch.zeros_like(r)
        for gate, e in zip(gates[0], ids[0], strict=True):
            experts = w.moe.experts
            hidden = reference.activation(normed @ experts.gate_up[e].T, "silu")
            y += gate * (hidden @ experts.down[e].T)
        if i + 1 < len(spec.layers):
            later = weights.layers[i + 1]
            assert later.moe is not None
            q = reference.rms_norm(guess, later.post_norm, spec.norm_epsilon)
            logits = reference.router_logits(q, later.moe.router)
            ids, gates = reference.route_topk(logits, layer.moe.num_experts_per_tok, "softmax", True)
        x = r + y
    return (reference.rms_norm(x, weights.final_norm, spec.norm_epsilon) @ weights.head.T)[0]


def test_router_pf_equals_an_independent_reference() -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    offloaded = Offloaded(spec, weights, 8, resolve("router-pf"))
    predictor = offloaded.experts.predictor
    assert isinstance(predictor, RouterPredictor)
    assert predictor._defaults is not None
    caches = [KVCache.allocate(spec, 1, 20, DEVICE, torch.float32) for _ in range(2)]
    prompt = torch.tensor([[3, 1, 4, 1, 5]], device=DEVICE)
    for cache, decoder in zip(caches, (offloaded.decoder, Decoder(spec, weights)), strict=True):
        decoder.prefill(prompt, 0, cache)
    for position, token in enumerate((9, 2, 6, 5, 3), start=5):
        ids, at = torch.tensor([token], device=DEVICE), torch.tensor([position], device=DEVICE)
        ours = offloaded.decoder.decode(ids, at, caches[0], position + 1)[0]
        theirs = router_pf_step(spec, weights, predictor._defaults, token, position, caches[1])
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_a_thousand_steps_with_the_fewest_slots() -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), 1, steps=1000)
    offloaded = Offloaded(spec, weights, 4, POLICIES["quasi-hidden"])
    assert torch.equal(generate(offloaded.decoder, 1, steps=1000), expected)
    offloaded.check()
