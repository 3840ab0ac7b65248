"""Decode steps of one sequence whose experts are those of tables, written over what the real routers have chosen."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from command_line import split_policy

from bench.measure import synchronize
from bench.random_weights import SCALE, fill_records
from bench.synthetic_routing import Shape, SyntheticRouting, make_routing
from tritonmoe.errors import InputError
from tritonmoe.generation.decode_runner import DecodeRunner
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.generation.session import allocate_cache
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.expert_store import ExpertStore, RecordLayout
from tritonmoe.model.operations import operations
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ModelWeights
from tritonmoe.offload.copy_engine import CopyEngine, copy_engine
from tritonmoe.offload.device_scheduler import RoutingTables, device_addresses
from tritonmoe.offload.experts import OffloadedExperts
from tritonmoe.offload.policy import Policy, minimum_slots, resolve
from tritonmoe.placement.loader import make_predictor
from tritonmoe.placement.memory_plan import read_slots
from tritonmoe_kernels.fetch_reference import RECORD_ALIGNMENT

EVERYTHING, MINIMUM = "everything", "minimum"
FORM = "POLICY[+OPTION=VALUE]:HITS[@BYTES][:host]"
GATHERED_RECORDS = 8  # of a list whose rate is measured
GATHERED_BYTES = 2_000_000_000  # about
GATHERS = 3
MARGIN = 16  # steps beyond the timed ones that the KV cache has room for
SEED = 0


class Model(NamedTuple):
    """What all cases share: experts in host memory, the other weights on the device."""

    spec: ModelSpec
    weights: ModelWeights
    store: ExpertStore

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def shape(self) -> Shape:
        """For one sequence."""
        moes = list(self.spec.moe_layers.values())
        return Shape(len(moes), max(m.num_experts for m in moes), 1, max(m.num_experts_per_tok for m in moes))


@dataclass(frozen=True)
class Case:
    """`hits` is the wanted hit rate, None where slots for everything or the fewest decide it. `record_bytes`: so many
    are fetched of each record, into memory that nobody reads, so that only times are right; None: all of it."""

    text: str
    policy: Policy
    hits: float | None
    slots: str  # EVERYTHING, MINIMUM or ""
    record_bytes: int | None
    is_host: bool  # also with busy cores, and the host's launches are counted

    @classmethod
    def parse(cls, text: str) -> Case:
        """InputError for what is not understood."""
        body, _, suffix = text.partition(":host")
        name, _, rest = body.partition(":")
        what, at, size = rest.partition("@")
        preset, overrides = split_policy(name)
        policy = resolve(preset, **overrides)
        if policy.is_resident or suffix or (at and not size.isdecimal()):
            raise InputError(f"--cases: {text!r} is not {FORM}, POLICY on-demand, exact or router-pf")
        record_bytes = int(size) if at else None
        if record_bytes is not None and (record_bytes < 1 or record_bytes % RECORD_ALIGNMENT):
            raise InputError(f"--cases: {text!r} has records that are no multiple of {RECORD_ALIGNMENT} bytes")
        is_named = what in (EVERYTHING, MINIMUM)
        try:
            hits = None if is_named else float(what) / 100
        except ValueError:
            hits = -1.0
        if hits is not None and not 0 < hits < 1:
            raise InputError(f"--cases: {text!r} needs a hit rate between 0 and 100, {EVERYTHING} or {MINIMUM}")
        return cls(text, policy, hits, what if is_named else "", record_bytes, body != text)

    def num_slots(self, spec: ModelSpec, share: str) -> int:
        """The slots that the case has, `share` of all experts where a hit rate is wanted."""
        total = sum(moe.num_experts for moe in spec.moe_layers.values())
        least = minimum_slots(spec, self.policy)
        wanted = {EVERYTHING: total, MINIMUM: least}.get(self.slots) or read_slots(share, total)
        if wanted < least:
            raise InputError(f"--slots {share} are {wanted}, fewer than the {least} that {self.text} needs")
        return wanted

    def routing(self, shape: Shape, num_slots: int, steps: int, recall: float, falloff: float) -> SyntheticRouting:
        """The ids to replay; `recall` of guesses one layer ahead, and of each further layer `falloff` times that of the
        one before. Guesses that are executed are what is routed, so the next layer's are right."""
        first = 1.0 if self.policy.execute == "speculated" else recall
        return make_routing(
            shape, num_slots, steps, self.hits, tuple(first * falloff**i for i in range(self.policy.lookahead))
        )


class Replay:
    """A `Stepper` of one sequence over random keys and values."""

    batch = 1

    def __init__(self, decoder: Decoder, context: int, steps: int) -> None:
        self.device = decoder.device
        cache = allocate_cache(decoder, 1, context + steps + MARGIN)
        generator = torch.Generator(decoder.device).manual_seed(SEED)
        for tensor in cache.keys + cache.values:
            tensor.normal_(generator=generator)
        vocab_size = decoder.spec.vocab_size
        self._history = torch.randint(vocab_size, (context,), generator=torch.Generator().manual_seed(SEED)).tolist()
        self._params = SamplingParams(max_new_tokens=steps + MARGIN)
        self.runner = DecodeRunner(decoder, cache, vocab_size)

    def warm_up(self) -> None:
        """Nothing: the first steps do it."""

    def prefill(self) -> torch.Tensor:
        raise NotImplementedError("keys and values are random")

    def restart(self) -> None:
        self.runner.begin([self._history], [self._params])

    def launch(self) -> None:
        self.runner.launch()

    def tokens(self) -> list[int]:
        return self.runner.tokens()

    def step_ms(self, steps: int) -> list[float]:
        """By the clock, from token to token, with as many steps launched ahead as generation has."""
        times: list[float] = []
        launched = 0
        synchronize(self.device)
        last = time.perf_counter()
        for taken in range(steps):
            while launched < min(steps, taken + 1 + self.runner.lookahead):
                self.launch()
                launched += 1
            self.tokens()
            now = time.perf_counter()
            times.append(1e3 * (now - last))
            last = now
        return times


class TableReplay(Replay):
    """Steps with experts in slots, from empty ones. Tables can be exchanged: a captured step reads them in place."""

    def __init__(
        self, model: Model, policy: Policy, num_slots: int, record_bytes: int | None, context: int, steps: int
    ) -> None:
        """`steps` are those of a table, the ones that fill the slots included."""
        spec, weights, store, device = model.spec, model.weights, model.store, model.device
        ops = operations(device)
        vectors = weights.embedding.new_zeros(len(spec.layers), model.shape.experts, spec.hidden_size)
        predictor = make_predictor(policy, ops, spec, weights, vectors.normal_(0.0, SCALE))
        self._moe_layers, shape = list(spec.moe_layers), (steps, len(spec.layers), 1, model.shape.top_k)
        table, *foretold = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(1 + policy.lookahead))
        self._tables = RoutingTables(table, foretold)
        make_copies = copy_engine
        if record_bytes is not None:
            if record_bytes > store.layout.num_bytes:
                raise InputError(f"records have {store.layout.num_bytes} bytes, fewer than {record_bytes}")
            beside = torch.empty(num_slots, record_bytes, dtype=torch.uint8, device=device)
            ops, make_copies = ops._replace(fetch=partly(ops.fetch, beside)), filled_slots(store.layout)
        self.policy, self.num_slots, self._num_launched = policy, num_slots, 0
        self.notes: list[str] = []
        self.experts = OffloadedExperts(
            ops, spec, weights, store, num_slots, policy, predictor,
            make_copies=make_copies, plan_on_device=True, tables=self._tables,
        )  # fmt: skip
        super().__init__(Decoder(spec, weights, ops, self.experts), context, steps)

    def load(self, routing: SyntheticRouting) -> None:
        """Take up other tables."""
        self._fill(self._tables.routed, routing.routed)
        for table, ids in zip(self._tables.foretold, routing.foretold, strict=True):
            self._fill(table, ids)

    def _fill(self, table: torch.Tensor, ids: np.ndarray) -> None:
        table[:, self._moe_layers] = torch.from_numpy(ids).to(self.device)

    def routed_ids(self, layer: int) -> list[int]:
        """What the last step routed in a layer."""
        assert self._num_launched > 0, "no step has run"
        return self._tables.routed[(self._num_launched - 1) % len(self._tables.routed), layer].flatten().tolist()

    def launch(self) -> None:
        super().launch()
        self._num_launched += 1

    def restart(self) -> None:
        self._num_launched = 0
        self.experts.begin()
        self.experts.scheduler.resize(self.num_slots)  # all empty, as the simulation begins
        super().restart()
        if self.experts.needs_host:
            raise InputError("the host would plan these steps: the device cannot read the experts in host memory")

    def counts(self) -> dict[str, float]:
        """The counters so far, `moved_bytes` with them; waits for the device."""
        self.notes = [note for note in self.experts.report() if "--prefetch always" in note]  # the guard's
        counters = self.experts.counters
        total = counters.total()
        moved = counters.moved_records() * counters.record_bytes + total.cancelled_bytes
        return {**asdict(total), "moved_bytes": moved}

    def close(self) -> None:
        """Before the next one is made; the store, and its pinned memory, serves that one too."""
        self.experts.copies.close()


def filled_slots(layout: RecordLayout) -> Callable[[torch.Tensor, Callable[[int, int], object]], CopyEngine]:
    """Makes copies for slots that are never fetched into: with finite weights, so that logits are finite too."""

    def make_copies(buffer: torch.Tensor, landed: Callable[[int, int], object]) -> CopyEngine:
        fill_records(layout, buffer)
        return copy_engine(buffer, landed)

    return make_copies


def partly(fetch: Callable[..., None], beside: torch.Tensor) -> Callable[..., None]:
    """A fetch of records of the size of `beside`'s rows, written there instead of into the slots."""

    def fetch_part(*arguments: Any, **options: Any) -> None:
        *lists, num_experts, record_bytes, _, copy_epoch, landed, moved = arguments
        share = options["first_bytes"] / record_bytes
        options["first_bytes"] = round(share * beside.shape[1] / RECORD_ALIGNMENT) * RECORD_ALIGNMENT
        fetch(*lists, num_experts, beside.shape[1], beside, copy_epoch, landed, moved, **options)

    return fetch_part


def gather_rate(model: Model, record_bytes: int) -> float:
    """Bytes per second at which the fetch kernel brings lists of records of this size from all over the store."""
    device, shape = model.device, model.shape
    addresses = device_addresses(model.store, device)
    if isinstance(addresses, str):
        raise InputError(f"the device cannot read the experts in host memory: {addresses}")
    ops, count = operations(device), min(GATHERED_RECORDS, shape.experts)
    launches = min(64, max(2, round(GATHERED_BYTES / (count * record_bytes))))
    random = np.random.default_rng(SEED)
    layers = random.integers(len(addresses), size=launches)
    ids = np.stack([random.permutation(shape.experts)[:count] for _ in range(launches)])
    keys = torch.from_numpy((layers[:, None] * shape.experts + ids).astype(np.int32)).to(device)
    buffer = torch.empty(2 * count, record_bytes, dtype=torch.uint8, device=device)
    slots = torch.arange(2 * count, dtype=torch.int32, device=device).view(2, count)
    epochs = torch.ones(2 * count, dtype=torch.int64, device=device)
    number = torch.full((1,), count, dtype=torch.int32, device=device)
    bases = torch.tensor(list(addresses.values()), dtype=torch.int64, device=device)
    landed, moved = torch.zeros_like(epochs), torch.zeros(1, dtype=torch.int64, device=device)
    times = []
    for _ in range(GATHERS + 1):  # the first compiles
        arrivals = torch.zeros(launches, count, dtype=torch.int32, device=device)
        synchronize(device)
        began = time.perf_counter()
        for i in range(launches):
            ops.fetch(
                keys[i], slots[i % 2], epochs[:count], number, arrivals[i], bases, shape.experts, record_bytes,
                buffer, epochs, landed, moved, is_speculative=False,
            )  # fmt: skip
        synchronize(device)
        times.append(time.perf_counter() - began)
    return launches * count * record_bytes / float(np.median(times[1:]))


def run(replay: TableReplay, routing: SyntheticRouting, steps: int) -> tuple[list[float], dict[str, float]]:
    """The timed steps' milliseconds and what was counted in them, after the steps that fill the slots."""
    replay.restart()
    for _ in range(routing.warm_steps):
        replay.launch()
        replay.tokens()
    before = replay.counts()
    times = replay.step_ms(steps)
    after = replay.counts()
    return times, {name: after[name] - before[name] for name in after}
