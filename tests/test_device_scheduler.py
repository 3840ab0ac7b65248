"""Decode steps that plan and fetch on the device give the bits of experts that are all there.

On a CPU the references stand in for the kernels, so that the whole of it is tested without a GPU.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_branch import edges
from test_offload import DEVICE, POLICIES, SPECS, STEPS, Offloaded, make_spec, noise

from tritonmoe.generation.decode_runner import DecodeRunner
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.kv_cache import KVCache
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ModelWeights
from tritonmoe.offload.device_scheduler import RoutingTables
from tritonmoe.offload.policy import Policy, minimum_slots, resolve
from tritonmoe.offload.trace import TraceRecorder, read_trace
from tritonmoe_kernels.fetch_reference import READY
from tritonmoe_kernels.planner_state import LISTED, Header, PlannerState, check_integrity

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
# Turns of about a microsecond before every chunk: longer than the launches of a layer. Records are six chunks for each
# of two programs, so that gate_up is there while down is not.
SLOW = {"delay": 1000, "programs": 2, "chunk_words": 128, "num_warps": 1}


def generate(decoder: Decoder, batch: int, steps: int = STEPS, prompt_length: int = 9) -> torch.Tensor:
    """Logits [1 + steps, B, V] of a prompt and greedy steps after it, planned on the device where that is on."""
    spec = decoder.spec
    cache = KVCache.allocate(spec, batch, prompt_length + steps + 1, DEVICE, torch.float32)
    prompt = torch.randint(spec.vocab_size, (batch, prompt_length), generator=torch.Generator().manual_seed(batch))
    decoder.experts.begin()
    logits = [decoder.prefill(prompt.to(DEVICE), 0, cache)]
    decoder.experts.begin_decode(batch)
    for i in range(steps):
        positions = torch.full((batch,), prompt_length + i, device=DEVICE)
        logits.append(decoder.decode(logits[-1].argmax(-1), positions, cache, prompt_length + i + 1))
    return torch.stack(logits)


def on_device(spec: ModelSpec, weights: ModelWeights, num_slots: int, policy: Policy, **options: Any) -> Offloaded:
    offloaded = Offloaded(spec, weights, num_slots, policy, **options)
    offloaded.store.pin()
    offloaded.experts._plan_on_device = True
    offloaded.experts._buffer.fill_(255)  # what is computed with before it has arrived shows
    return offloaded


def check(offloaded: Offloaded) -> None:
    """The planner's state is whole, and every byte that was counted was moved."""
    experts = offloaded.experts
    assert not experts.needs_host, "the host planned these steps"
    for device in experts._devices.values():
        check_integrity(device.state)
    experts.settle()
    for device in experts._devices.values():
        layers, lists = device._moe_layers, 0 if experts.policy.predictor == "none" else experts.policy.lookahead
        for words in (device.state.demand_ready, device.state.demand_closing):
            assert (words[layers] == READY).all(), "a fetch has not said that it is ready, or asked for all"
        for i, state in enumerate(device._states_ahead[:lists]):
            for words in (state.prefetch_ready, state.prefetch_closing):
                assert (words[layers[i + 1 :]] == READY).all(), "a fetch ahead has not said so"
            assert not state.prefetch_listed.any(), "a list was not fetched"
    experts.scheduler.check_integrity()
    for layer in experts.counters.layers:
        assert layer.routed == layer.hits + layer.late + layer.demand
        assert 0 <= layer.cancelled_bytes <= layer.cancelled * experts.counters.record_bytes
        assert layer.prefetched >= layer.prefetched_used + layer.prefetched_wasted + layer.cancelled


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch", [1, 4])
def test_bits_of_the_resident_run(name: str, policy: str, batch: int) -> None:
    spec = make_spec(name)
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), batch)
    everything = sum(moe.num_experts for moe in spec.moe_layers.values())
    least = minimum_slots(spec, POLICIES[policy], batch)
    for num_slots in sorted({least, least + 1, max(least, everything // 2), max(least, everything)}):
        offloaded = on_device(spec, weights, num_slots, POLICIES[policy])
        assert torch.equal(generate(offloaded.decoder, batch), expected), f"{num_slots} slots"
        check(offloaded)
        offloaded.experts.close()


class Postponed:
    """Fetches ahead that are made when the next demand is, so that they are late, or taken back before."""

    def __init__(self, fetch: Callable[..., None]) -> None:
        self._fetch = fetch
        self._waiting: list[Callable[[], None]] = []

    def __call__(self, *arguments: Any, is_speculative: bool, **options: Any) -> None:
        if is_speculative:
            self._waiting.append(functools.partial(self._fetch, *arguments, is_speculative=True, **options))
            return
        for fetch in self._waiting:
            fetch()
        self._waiting.clear()
        self._fetch(*arguments, is_speculative=False, **options)


@pytest.mark.parametrize("policy", ["on-demand", "quasi-hidden", "lookahead", "previous-token"])
@pytest.mark.parametrize("batch", [1, 4])
def test_late_and_refuted_copies(policy: str, batch: int) -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), batch)
    least = minimum_slots(spec, POLICIES[policy], batch)
    offloaded = on_device(spec, weights, least, POLICIES[policy])
    ops = offloaded.experts._ops
    slow = functools.partial(ops.fetch, **SLOW) if DEVICE.type == "cuda" else Postponed(ops.fetch)
    offloaded.experts._ops = ops._replace(fetch=slow)
    for _ in range(2):
        assert torch.equal(generate(offloaded.decoder, batch), expected)
        check(offloaded)
    total = offloaded.experts.counters.total()
    if policy == "lookahead" and batch == 1:
        assert total.late > 0
        assert total.cancelled > 0


@pytest.mark.parametrize(
    ("preset", "gate", "lookahead"),
    [("router-pf", "speculated", 1), ("router-pf", "routed", 1), ("est-pf", "speculated", 1),
     ("hybrid-pf", "routed", 1), ("router-free", "speculated", 1), ("router-pf", "speculated", 2),
     ("router-pf", "routed", 3)],
)  # fmt: skip
@pytest.mark.parametrize("batch", [1, 3])
def test_speculated_execution_is_that_of_the_host(preset: str, gate: str, lookahead: int, batch: int) -> None:
    """What is foretold further ahead is fetched and never run."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    policy = resolve(preset, gate=gate, lookahead=lookahead)
    nearest = resolve(preset, gate=gate)
    host = Offloaded(spec, weights, 32, nearest)
    host.experts._plan_on_device = False
    expected = generate(host.decoder, batch)
    for num_slots in (minimum_slots(spec, policy, batch), 32):
        offloaded = on_device(spec, weights, num_slots, policy)
        assert torch.equal(generate(offloaded.decoder, batch), expected)
        check(offloaded)
        if lookahead > 1 and num_slots < 32:  # else a prompt has brought everything
            other = on_device(spec, weights, num_slots, nearest)
            generate(other.decoder, batch)
            check(other)
            assert offloaded.experts.counters.total().prefetched > other.experts.counters.total().prefetched


@pytest.mark.parametrize("lookahead", [2, 3])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_last_tokens_experts_several_layers_ahead(lookahead: int, batch: int) -> None:
    spec = make_spec("dense-layer")
    weights = noise(spec)
    policy = resolve("exact", predictor="previous-token", lookahead=lookahead)
    expected = generate(Decoder(spec, weights), batch)
    for num_slots in (minimum_slots(spec, policy, batch), sum(m.num_experts for m in spec.moe_layers.values())):
        offloaded = on_device(spec, weights, num_slots, policy)
        assert torch.equal(generate(offloaded.decoder, batch), expected)
        check(offloaded)


def tokens(decoder: Decoder, steps: int) -> list[int]:
    """What a runner draws, its steps captured where they can be."""
    cache = KVCache.allocate(decoder.spec, 1, steps + 2, DEVICE, torch.float32)
    runner = DecodeRunner(decoder, cache, decoder.spec.vocab_size)
    decoder.experts.begin()
    runner.begin([[1]], [SamplingParams()])
    drawn = []
    for _ in range(steps):
        runner.launch()
        drawn += runner.tokens()
    return drawn


@pytest.mark.skipif(DEVICE.type != "cuda", reason="captures")
@pytest.mark.parametrize("policy", ["on-demand", "quasi-hidden", "lookahead", "tolerant", "previous-token, 2"])
def test_late_copies_of_captured_steps(policy: str) -> None:
    """Edges of the graph order what uses a record behind its fetch, however long that takes."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    others = {
        "tolerant": resolve("on-demand", miss_tolerance=1e-9),
        "previous-token, 2": resolve("exact", predictor="previous-token", lookahead=2),
    }
    chosen = (POLICIES | others)[policy]
    expected = tokens(Decoder(spec, weights), 40)
    offloaded = on_device(spec, weights, minimum_slots(spec, chosen), chosen)
    ops = offloaded.experts._ops
    offloaded.experts._ops = ops._replace(fetch=functools.partial(ops.fetch, **SLOW | {"delay": 250}))
    assert tokens(offloaded.decoder, 40) == expected
    check(offloaded)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="captures")
@pytest.mark.parametrize("policy", ["on-demand", "quasi-hidden"])
def test_few_launches_of_a_captured_step_come_behind_several(policy: str) -> None:
    """An edge that others imply keeps a launch from beginning early: guesses, demand and prefetches have one each."""
    spec, batch = make_spec("qwen3"), 1
    offloaded = on_device(spec, noise(spec), minimum_slots(spec, POLICIES[policy]), POLICIES[policy])
    decoder, layers = offloaded.decoder, len(spec.moe_layers)
    logits = generate(decoder, batch)[-1]  # compiles
    cache = KVCache.allocate(spec, batch, 32, DEVICE, torch.float32)
    ids, positions = logits.argmax(-1), torch.full((batch,), 20, device=DEVICE)
    decoder.experts.begin_decode(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        decoder.decode(ids, positions, cache, 21)
    behind = Counter(target for _, target in edges(graph))
    several = sum(count > 1 for count in behind.values())
    # The weighted sum of each layer; with guesses also the plan of what is fetched, and missing experts.
    assert layers <= several <= (layers if policy == "on-demand" else 3 * layers - 2)


@pytest.mark.parametrize("policy", ["quasi-hidden", *(["on-demand", "lookahead"] if DEVICE.type == "cuda" else [])])
def test_a_thousand_steps_with_the_fewest_slots(policy: str) -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    steps = 2000 if DEVICE.type == "cuda" else 1000
    expected = tokens(Decoder(spec, weights), steps)
    assert len(set(expected)) > 5, "the model repeats itself: this proves little"
    offloaded = on_device(spec, weights, minimum_slots(spec, POLICIES[policy]), POLICIES[policy])
    assert tokens(offloaded.decoder, steps) == expected
    offloaded.experts.report()
    assert offloaded.experts.counters.tokens == steps
    check(offloaded)


def test_without_a_cache_every_layer_fetches_its_experts() -> None:
    """k records per layer and token, the last layer included, where nothing can be reused."""
    spec = make_spec("qwen3")
    offloaded = on_device(spec, noise(spec), 2, POLICIES["on-demand"])
    generate(offloaded.decoder, 1, prompt_length=1, steps=5)
    check(offloaded)
    for layer in offloaded.experts.counters.layers:
        assert (layer.demand, layer.hits, layer.prefetched) == (2 * 5, 0, 0)
    assert offloaded.experts.counters.tokens == 5


def test_what_was_left_by_one_generation_serves_the_next() -> None:
    """Slots pass between the host's pool and the device: prefill finds what decoding fetched, and the other way."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    offloaded = on_device(spec, weights, 32, POLICIES["on-demand"])
    for batch in (1, 2, 1):
        assert torch.equal(generate(offloaded.decoder, batch), generate(Decoder(spec, weights), batch))
    check(offloaded)
    assert offloaded.experts.counters.total().demand == 0
    assert offloaded.experts.prefill_counters.total().demand == 0


def test_two_generations_with_the_pool_resized_between() -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), 1)
    offloaded = on_device(spec, weights, 5, POLICIES["quasi-hidden"])
    for num_slots in (None, 4, 20):
        if num_slots is not None:
            offloaded.experts.resize(num_slots)
        assert torch.equal(generate(offloaded.decoder, 1), expected)
        check(offloaded)


@pytest.mark.parametrize(
    ("name", "policy", "num_slots"),
    [("norm_router", "quasi-hidden", 6), ("plan_demand", "quasi-hidden", 6), ("plan_prefetch", "quasi-hidden", 6),
     ("fetch", "quasi-hidden", 6), ("expert_gemm", "quasi-hidden", 6), ("count_recall", "quasi-hidden", 6),
     ("plan_prefetch", "lookahead", 12), ("fetch", "lookahead", 12)],
)  # fmt: skip
def test_interrupted_between_launches(name: str, policy: str, num_slots: int) -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), 1)
    offloaded = on_device(spec, weights, num_slots, POLICIES[policy])
    experts, ops = offloaded.experts, offloaded.experts._ops
    for calls in (1, 2, 5, 14):
        experts._ops = ops._replace(**{name: interrupted(getattr(ops, name), calls)})
        experts._devices.clear()
        with pytest.raises(KeyboardInterrupt):
            generate(offloaded.decoder, 1)
        experts._ops = ops
        experts.settle()
        experts._devices.clear()
        assert torch.equal(generate(offloaded.decoder, 1), expected)
        check(offloaded)


def interrupted(operation: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """The operation, whose call of that number is Ctrl-C."""
    left = calls

    def run(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return operation(*arguments, **options)

    return run


def test_the_report_of_a_first_step_that_was_interrupted() -> None:
    spec = make_spec("qwen3")
    offloaded = on_device(spec, noise(spec), 6, resolve("on-demand", miss_tolerance=0.4))
    experts, ops = offloaded.experts, offloaded.experts._ops
    experts._ops = ops._replace(plan_demand=interrupted(ops.plan_demand, 3))
    experts._devices.clear()
    with pytest.raises(KeyboardInterrupt):
        generate(offloaded.decoder, 1)
    assert any("left out" in line for line in experts.report())
    assert experts.counters.tokens == 1


@pytest.mark.parametrize("layer", range(4))
def test_steps_after_one_that_was_interrupted_in_an_attention(layer: int) -> None:
    """What was fetched ahead for its later layers is nothing that the next step may wait for."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    offloaded = on_device(spec, weights, 12, POLICIES["lookahead"])
    decoder, cache = offloaded.decoder, KVCache.allocate(spec, 1, 32, DEVICE, torch.float32)
    resident, other = Decoder(spec, weights), KVCache.allocate(spec, 1, 32, DEVICE, torch.float32)
    ids, plain = torch.zeros(1, dtype=torch.int64, device=DEVICE), decoder.operations
    decoder.experts.begin()
    decoder.experts.begin_decode(1)
    for step in range(6):
        positions = torch.full((1,), step, device=DEVICE)
        if step == 3:
            decoder.operations = plain._replace(attention_decode=interrupted(plain.attention_decode, layer + 1))
            with pytest.raises(KeyboardInterrupt):
                decoder.decode(ids, positions, cache, step + 1)
            decoder.operations = plain
        decoder.experts.begin_step(1)
        logits = decoder.decode(ids, positions, cache, step + 1)
        assert torch.equal(logits, resident.decode(ids, positions, other, step + 1))
    assert not decoder.experts.needs_host
    decoder.experts.settle()


def test_a_plan_interrupted_halfway() -> None:
    """Slots have new owners already, and not yet the epoch that they wait for: nothing in them may be believed."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), 1)
    offloaded = on_device(spec, weights, 6, POLICIES["quasi-hidden"])
    experts, ops = offloaded.experts, offloaded.experts._ops

    def interrupted(state: PlannerState, layer: int, *arguments: Any) -> None:
        ops.plan_demand(state, layer, *arguments)
        count = int(state.num_demand[layer])
        if count and int(state.header[Header.TICK]) > 20:
            slots = state.demand_slot[layer, :count].long()
            state.copy_epoch[slots] = state.landed[slots]
            raise KeyboardInterrupt

    experts._ops = ops._replace(plan_demand=interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(offloaded.decoder, 1)
    experts._ops = ops
    experts._devices.clear()  # but not the one that holds the slots
    for _ in range(2):
        assert torch.equal(generate(offloaded.decoder, 1), expected)
    check(offloaded)


def test_batches_that_take_turns() -> None:
    """A sequence that pauses goes on where it was, whoever has used the slots meanwhile."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    drawn = []
    for decoder in (Decoder(spec, weights), on_device(spec, weights, 32, POLICIES["quasi-hidden"]).decoder):
        decoder.experts.begin()
        runners = []
        for batch in (1, 2, 1):
            cache = KVCache.allocate(spec, batch, 40, DEVICE, torch.float32)
            runners.append(DecodeRunner(decoder, cache, spec.vocab_size))
            runners[-1].begin([[3]] * batch, [SamplingParams()] * batch)
        drawn.append([])
        for i in range(24):
            runner = runners[i % 3]
            runner.launch()
            drawn[-1].append(runner.tokens())
            if i % 5 == 4:  # a prompt in between
                cache = KVCache.allocate(spec, 1, 9, DEVICE, torch.float32)
                decoder.prefill(torch.arange(9, device=DEVICE)[None], 0, cache)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("name", ["adopt", "resize"])
def test_interrupted_while_the_slots_change_hands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), 1)
    offloaded = on_device(spec, weights, 8, POLICIES["quasi-hidden"])
    assert torch.equal(generate(offloaded.decoder, 1), expected)

    def interrupt(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(offloaded.experts.pool), name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            offloaded.experts.settle()
    for _ in range(2):
        assert torch.equal(generate(offloaded.decoder, 1), expected)
    check(offloaded)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_slots_change_hands_across_half_lives(eviction: str) -> None:
    """What the device takes over is a state that it could have made, whatever the uses have become since."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    policy = resolve("on-demand", eviction=eviction)
    offloaded = on_device(spec, weights, 8, policy)
    for batch, steps in ((1, 31), (4, 3), (1, 33), (4, 12)):
        assert torch.equal(generate(offloaded.decoder, batch, steps), generate(Decoder(spec, weights), batch, steps))
        check(offloaded)
        offloaded.experts.begin_decode(batch)
        check_integrity(offloaded.experts._devices[batch].state)


def test_fetches_ahead_for_more_tokens_than_experts() -> None:
    """What is kept free for demand is no more than a layer has experts."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    offloaded = on_device(spec, weights, minimum_slots(spec, POLICIES["quasi-hidden"], 8), POLICIES["quasi-hidden"])
    assert torch.equal(generate(offloaded.decoder, 8), generate(Decoder(spec, weights), 8))
    check(offloaded)
    assert offloaded.experts.counters.total().prefetched > 0


def test_the_first_steps_may_run_in_inference_mode() -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    offloaded = on_device(spec, weights, 8, POLICIES["quasi-hidden"])
    with torch.inference_mode():
        first = generate(offloaded.decoder, 1)
    assert torch.equal(generate(offloaded.decoder, 1), first)


def test_a_list_that_nobody_fetched_is_forgotten() -> None:
    """As an interrupt between a plan and its fetch leaves it: the next fetch must wait for a list of its own."""
    spec = make_spec("qwen3")
    policy = POLICIES["quasi-hidden"]
    offloaded = on_device(spec, noise(spec), minimum_slots(spec, policy), policy)
    generate(offloaded.decoder, 1)
    (device,) = offloaded.experts._devices.values()
    device.state.prefetch_listed.fill_(LISTED)
    device.load(offloaded.experts.pool)
    assert not device.state.prefetch_listed.any()


@pytest.mark.parametrize("fill", ["none", "default-vector"])
def test_miss_tolerance_leaves_out_what_the_host_would(fill: str) -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    defaults = torch.randn(4, 8, spec.hidden_size, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    results, left_out = [], []
    for plan_on_device in (False, True):
        policy = resolve("on-demand", miss_tolerance=0.45, miss_fill=fill)
        offloaded = on_device(spec, weights, 2, policy)
        offloaded.experts._plan_on_device, offloaded.experts._defaults = plan_on_device, defaults
        results.append(generate(offloaded.decoder, 1))
        offloaded.experts.report()
        left_out.append(offloaded.experts.counters.total().left_out)
    assert left_out[0] == left_out[1] > 0
    assert torch.equal(*results)


@pytest.mark.parametrize("policy", ["quasi-hidden", "lookahead"])
def test_recall_is_counted_as_the_host_counts_it(policy: str) -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    recalls = []
    for plan_on_device in (False, True):
        offloaded = on_device(spec, weights, 32, POLICIES[policy])
        offloaded.experts._plan_on_device = plan_on_device
        generate(offloaded.decoder, 2)
        offloaded.experts.report()
        total = offloaded.experts.counters.total()
        recalls.append((total.speculated, total.speculated_right, total.speculated_routed))
        assert total.gate_mass_recall == pytest.approx(total.gate_mass_right / total.gate_mass)
        recalls[-1] += (round(total.gate_mass_recall or 0, 5),)
    assert recalls[0] == recalls[1]


def test_a_trace_of_steps_in_the_middle_of_a_generation(tmp_path: Path) -> None:
    """Recording takes the slots to the host's pool and gives them back."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = tokens(Decoder(spec, weights), 30)
    offloaded = on_device(spec, weights, 12, POLICIES["quasi-hidden"])
    decoder = offloaded.decoder
    runner = DecodeRunner(decoder, KVCache.allocate(spec, 1, 32, DEVICE, torch.float32), spec.vocab_size)
    decoder.experts.begin()
    runner.begin([[1]], [SamplingParams()])
    recorder, drawn = TraceRecorder(tmp_path / "t.npz"), []
    for step in range(30):
        if step == 10:
            recorder.attach(decoder)
        if step == 20:
            recorder.detach()
            recorder.save()
        runner.launch()
        drawn += runner.tokens()
        assert decoder.experts.needs_host == (10 <= step < 20)
    assert drawn == expected
    assert len(read_trace(tmp_path / "t.npz").runs) == 10 * 4
    check(offloaded)


def test_routing_tables_take_the_place_of_routers() -> None:
    """Experts of a table that repeats itself are fetched once each, whatever the routers say."""
    spec = make_spec("qwen3")
    offloaded = on_device(spec, noise(spec), 20, POLICIES["quasi-hidden"])
    ids = torch.tensor([[0, 5], [7, 1]], dtype=torch.int32, device=DEVICE)
    table = ids[:, None, None].expand(2, 4, 1, 2).contiguous()
    offloaded.experts._tables = RoutingTables(table, [table])
    generate(offloaded.decoder, 1, steps=6, prompt_length=1)
    check(offloaded)
    total = offloaded.experts.counters.total()
    assert total.routed == 6 * 4 * 2
    assert total.demand + total.prefetched <= 4 * 4
    assert total.prefetched_wasted == 0


@pytest.mark.parametrize("prefetch", ["auto", "always"])
def test_prefetching_that_only_wastes_is_stopped(prefetch: str) -> None:
    """Foretold are experts that are never routed; no more is fetched ahead than what it takes to see that."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    offloaded = on_device(spec, weights, 6, resolve("exact", prefetch=prefetch))
    steps = torch.arange(4)
    routed = torch.stack([steps % 2, steps % 2 + 2], dim=-1)[:, None, None].expand(4, 4, 1, 2)
    foretold = routed + 4
    routed, foretold = (table.int().contiguous().to(DEVICE) for table in (routed, foretold))
    offloaded.experts._tables = RoutingTables(routed, [foretold])
    cache = KVCache.allocate(spec, 1, 300, DEVICE, torch.float32)
    runner = DecodeRunner(offloaded.decoder, cache, spec.vocab_size)
    offloaded.experts.begin()
    runner.begin([[1]], [SamplingParams()])
    for _ in range(250):
        runner.launch()
        runner.tokens()
    report = offloaded.experts.report()
    check(offloaded)
    total = offloaded.experts.counters.total()
    assert total.prefetched_used == 0
    if prefetch == "always":
        assert total.prefetched >= 250 * 3
        assert "stopped" not in report[-1]
    else:
        assert total.prefetched <= 3 * (64 + 2 * 2 * 33)
        assert "stopped for layers 1, 2, 3;" in report[-1]


def test_the_host_plans_where_the_device_cannot(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), 1)
    few = on_device(spec, weights, 3, POLICIES["quasi-hidden"])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(generate(few.decoder, 1), expected)
    assert "need 4 slots, not 3" in caplog.text
    assert few.experts.needs_host
    caplog.clear()
    monkeypatch.setattr("tritonmoe.offload.experts.device_addresses", lambda store, device: "there is no way")
    unmapped = on_device(spec, weights, 32, POLICIES["quasi-hidden"])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(generate(unmapped.decoder, 1), expected)
    assert unmapped.experts.needs_host
    assert [record.getMessage() for record in caplog.records] == [
        "the host plans decode steps, which is slower: there is no way"
    ]


def test_a_slot_without_its_copy_shows() -> None:
    """The check on the checks: a list that is taken for an empty one changes the result."""
    spec = make_spec("qwen3")
    weights = noise(spec)
    expected = generate(Decoder(spec, weights), 1)
    offloaded = on_device(spec, weights, 4, POLICIES["on-demand"])
    ops, calls = offloaded.experts._ops, 0

    def forgetful(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        keys, slots, epochs, count, *others = arguments
        ops.fetch(keys, slots, epochs, torch.zeros_like(count) if calls == 7 else count, *others, **options)

    offloaded.experts._ops = ops._replace(fetch=forgetful)
    assert not torch.equal(generate(offloaded.decoder, 1), expected)
