"""Which expert is in which slot, decided on the device: the tensors that `plan_demand` and `plan_prefetch` share.

The rules are those of the engine's slot pool, as a captured decode step can follow them without the host. One tick is
one call of `plan_demand`; the first has number 1. Everything here is written by one chain of launches but `landed`, the
arrivals, the words of lists and the two byte counters, which the fetch kernels beside that chain write.

A copy planned at tick t has epoch 2t on demand, and 2t + 1 where it was foretold for the layer whose tick t will be.
A slot is resident when it has a key and its `landed` is its `copy_epoch`. Its score says how soon it is given away:

    FREE       it has no key
    REFUTED    resident, foretold wrongly and never used
    FORETOLD   prefetched for a layer that has not run yet
    1 and up   used: lru: the tick of the last use; lfu: that tick + L · uses

`uses` counts the uses of an expert over all its stays in slots, and is halved every HALF_LIFE · L ticks: when an expert
is used, by `uses >> (period - uses_period)`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from tritonmoe_kernels.checks import check_tensor
from tritonmoe_kernels.tiles import next_power_of_2

EVICTIONS = ("lru", "lfu")
FREE, REFUTED, FORETOLD = -2, -1, 0  # scores
HALF_LIFE = 32  # steps of L ticks
NO_LIMIT = 1 << 30
LISTED = 1
MIN_QUEUE, MAX_QUEUE = 16, 512  # a refill's comparisons are the square of twice its length; more where calls need more
SLOT_BITS = 20  # slots are sorted as score · 2^20 + slot
MASS_UNIT = 2.0**-30  # shares of gate mass are summed as integers, in any order to the same bits


class Header(IntEnum):
    """Elements of `PlannerState.header`."""

    TICK = 0
    QUEUE_HEAD = 1
    QUEUE_END = 2
    ERROR = 3  # 1 once an expert that was routed could get no slot: what was computed then is wrong
    STEP = 4  # advanced by whoever replays routing tables, and by nothing here
    CANCELLED_AT = 5  # tick at which copies were cancelled, until their slots are queued: among CANCELLED_COUNT guesses
    CANCELLED_LAYER = 6  # of that layer
    CANCELLED_COUNT = 7


class Counter(IntEnum):
    """Columns of `PlannerState.counters`; distinct experts unless named otherwise. routed = hits + late + demand."""

    ROUTED = 0
    HITS = 1
    LATE = 2
    DEMAND = 3
    PREFETCHED = 4
    PREFETCHED_USED = 5
    PREFETCHED_WASTED = 6
    CANCELLED = 7
    LEFT_OUT = 8  # routed ids, counted per token
    LEFT_OUT_MASS = 9  # the sum of their shares, rounded down to units of MASS_UNIT
    DEMAND_BYTES = 10  # from here on counted by fetch kernels, at any time: the planner must not write them
    PREFETCH_BYTES = 11


class PlannerState(NamedTuple):
    """For L layers of E experts and S slots; a list holds what T tokens with K routed and M foretold ids each need."""

    header: torch.Tensor  # [8] int64, by Header
    slot_of: torch.Tensor  # [L, E] int32: a slot, or -1
    key_of: torch.Tensor  # [S] int32: layer · E + expert, or -1
    score: torch.Tensor  # [S] int64
    used_at: torch.Tensor  # [S] int64: tick that last used what is in the slot, or cancelled its copy; 0: none
    guess: torch.Tensor  # [S] int64: tick of the layer it is foretold for; until that layer has run it stays. 0: none
    copy_epoch: torch.Tensor  # [S] int64: of the last copy planned into the slot; 0: none, or it is cancelled
    landed: torch.Tensor  # [S] int64: the epoch of the last complete copy, 0 if there was none
    uses: torch.Tensor  # [L, E] int32, lfu only
    uses_period: torch.Tensor  # [L, E] int32: the half life in which `uses` was last right
    queue_slot: torch.Tensor  # [2F] int32: the next slots to give away, from header's QUEUE_HEAD to QUEUE_END,
    queue_score: torch.Tensor  # [2F] int64: each as long as it has this score
    guesses: torch.Tensor  # [L, T·M] int32: slots with a guess for the layer
    num_guesses: torch.Tensor  # [L] int32
    demand_key: torch.Tensor  # [L, T·K] int32
    demand_slot: torch.Tensor  # [L, T·K] int32
    demand_epoch: torch.Tensor  # [L, T·K] int64
    demand_arrivals: torch.Tensor  # [L, T·K] int32: zeroed for what is listed
    demand_ready: torch.Tensor  # [L] int32: zeroed with each list, as the next
    demand_closing: torch.Tensor  # [L] int32
    num_demand: torch.Tensor  # [L] int32
    prefetch_key: torch.Tensor  # [L, T·M] int32
    prefetch_slot: torch.Tensor  # [L, T·M] int32
    prefetch_epoch: torch.Tensor  # [L, T·M] int64
    prefetch_arrivals: torch.Tensor  # [L, T·M] int32: zeroed for what is listed
    prefetch_ready: torch.Tensor  # [L] int32: zeroed with each list, as the next
    prefetch_closing: torch.Tensor  # [L] int32
    prefetch_listed: torch.Tensor  # [L] int32: LISTED once a list is written, until its launch has seen that
    num_prefetch: torch.Tensor  # [L] int32
    limit: torch.Tensor  # [L] int32: the most to prefetch for the layer at once, written by the host
    counters: torch.Tensor  # [L, 12] int64, by Counter
    scratch: torch.Tensor  # [S + 2F] int64: what a refill of the queue works on

    @property
    def queue_capacity(self) -> int:
        """F: what a refill finds at most, a power of two."""
        return len(self.queue_slot) // 2

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_experts: int,
        num_slots: int,
        num_tokens: int,
        top_k: int,
        num_foretold: int,
        device: torch.device | str,
    ) -> PlannerState:
        """The state before the first tick: all slots are free.

        `num_layers` counts all layers of the model, also those without experts. `num_tokens`, `top_k` and
        `num_foretold` (ids per token, 0 without prefetching) are the most that a call will have.
        """
        for name, value, least in (
            ("num_layers", num_layers, 1),
            ("num_experts", num_experts, 1),
            ("num_slots", num_slots, 1),
            ("num_tokens", num_tokens, 1),
            ("top_k", top_k, 1),
            ("num_foretold", num_foretold, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        if num_slots > 1 << SLOT_BITS:
            raise ValueError(f"num_slots is {num_slots}, expected at most {1 << SLOT_BITS}")
        routed, foretold = num_tokens * top_k, max(1, num_tokens * num_foretold)
        capacity = min(max(MIN_QUEUE, next_power_of_2(2 * (routed + foretold))), MAX_QUEUE)
        capacity = min(max(capacity, next_power_of_2(routed + foretold)), max(MIN_QUEUE, next_power_of_2(num_slots)))

        def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        def full64(*shape: int, value: int = 0) -> torch.Tensor:
            return full(*shape, value=value, dtype=torch.int64)

        header = full64(8)
        header[Header.QUEUE_HEAD : Header.QUEUE_END + 1] = capacity
        return cls(
            header=header,
            slot_of=full(num_layers, num_experts, value=-1),
            key_of=full(num_slots, value=-1),
            score=full64(num_slots, value=FREE),
            used_at=full64(num_slots),
            guess=full64(num_slots),
            copy_epoch=full64(num_slots),
            landed=full64(num_slots),
            uses=full(num_layers, num_experts),
            uses_period=full(num_layers, num_experts),
            queue_slot=full(2 * capacity),
            queue_score=full64(2 * capacity),
            guesses=full(num_layers, foretold),
            num_guesses=full(num_layers),
            demand_key=full(num_layers, routed),
            demand_slot=full(num_layers, routed),
            demand_epoch=full64(num_layers, routed),
            demand_arrivals=full(num_layers, routed),
            demand_ready=full(num_layers),
            demand_closing=full(num_layers),
            num_demand=full(num_layers),
            prefetch_key=full(num_layers, foretold),
            prefetch_slot=full(num_layers, foretold),
            prefetch_epoch=full64(num_layers, foretold),
            prefetch_arrivals=full(num_layers, foretold),
            prefetch_ready=full(num_layers),
            prefetch_closing=full(num_layers),
            prefetch_listed=full(num_layers),
            num_prefetch=full(num_layers),
            limit=full(num_layers, value=NO_LIMIT),
            counters=full64(num_layers, len(Counter)),
            scratch=full64(num_slots + 2 * capacity),
        )


def check_demand(
    state: PlannerState,
    layer: int,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    outputs: tuple[torch.Tensor, torch.Tensor],
    miss_tolerance: float,
    eviction: str,
    routing_table: torch.Tensor | None,
) -> None:
    """Check the arguments of `plan_demand`; `outputs` are its two."""
    _check_ids("topk_ids", state, layer, topk_ids, state.demand_key.shape[1], routing_table)
    if not topk_ids.numel():
        raise ValueError("topk_ids is empty: a tick is one layer's routing")
    shape, device = topk_ids.shape, state.header.device
    for name, tensor in zip(("hit_ids", "miss_ids"), outputs, strict=True):
        check_tensor(name, tensor, shape, (torch.int32,), device)
    if topk_weights is not None:
        check_tensor("topk_weights", topk_weights, shape, (torch.float32,), device)
    elif miss_tolerance > 0.0:
        raise ValueError("miss_tolerance is above 0 without topk_weights to compare it with")
    if not 0.0 <= miss_tolerance < 1.0:
        raise ValueError(f"miss_tolerance is {miss_tolerance}, expected a share from 0 to below 1")
    if eviction not in EVICTIONS:
        raise ValueError(f"eviction is {eviction!r}, expected one of {EVICTIONS}")


def check_prefetch(
    state: PlannerState,
    layer: int,
    ids: torch.Tensor,
    distance: int,
    num_routed: int,
    routing_table: torch.Tensor | None,
) -> None:
    """Check the arguments of `plan_prefetch`."""
    _check_ids("ids", state, layer, ids, state.guesses.shape[1], routing_table)
    if not ids.numel():
        raise ValueError("ids is empty: leave the call out where nothing is foretold")
    for name, value in (("distance", distance), ("num_routed", num_routed)):
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")


def _check_ids(
    name: str, state: PlannerState, layer: int, ids: torch.Tensor, capacity: int, table: torch.Tensor | None
) -> None:
    num_layers, device = len(state.slot_of), state.header.device
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer is {layer}, expected 0 to {num_layers - 1}")
    check_tensor(name, ids, (None, None), (torch.int32,), device)
    if ids.numel() > capacity:
        raise ValueError(f"{name} has shape {list(ids.shape)}: the state was allocated for {capacity} ids")
    if table is not None:
        check_tensor("routing_table", table, (None, num_layers, *ids.shape), (torch.int32,), device)
        if not len(table):
            raise ValueError("routing_table has no step")


def check_integrity(state: PlannerState) -> None:
    """Raise an AssertionError that says what is wrong with the state between two calls, if anything is.

    It waits for the device. The distances given to `plan_prefetch` must have been right.
    """
    tensors = PlannerState(*(tensor.cpu() for tensor in state))
    tick, head, end = tensors.header[:3].tolist()
    num_layers, num_experts = tensors.slot_of.shape
    num_slots, score, used_at, guess = len(tensors.key_of), tensors.score, tensors.used_at, tensors.guess
    slot_of, key_of = tensors.slot_of.flatten(), tensors.key_of
    mapped = (slot_of >= 0).nonzero().flatten()
    slots = slot_of[mapped].long()
    assert (slots < num_slots).all(), "planner: an expert is mapped to a slot that does not exist"
    is_free, is_resident = key_of < 0, (key_of >= 0) & (tensors.landed == tensors.copy_epoch)
    is_speculative, is_pinned = tensors.copy_epoch % 2 == 1, guess != 0
    lists = [row[:n].tolist() for row, n in zip(tensors.guesses, tensors.num_guesses.tolist(), strict=True)]
    owners = [(slot, layer) for layer, row in enumerate(lists) for slot in row]
    queued = tensors.queue_slot[head:end].long()
    queued = queued[score[queued] == tensors.queue_score[head:end]]
    rules = {
        "two experts are mapped to one slot": len(slots.unique()) == len(slots),
        "a slot's owner is not mapped to it": (key_of[slots] == mapped).all(),
        "there are more or fewer owners than experts mapped": (~is_free).sum() == len(mapped),
        "a slot without an expert is not free, or a free one has an expert": ((score == FREE) == is_free).all(),
        "a free slot awaits a copy or is pinned": not (is_free & ((tensors.copy_epoch != 0) | is_pinned)).any(),
        "a score is unknown": (score >= FREE).all(),
        "a slot is used without a score, or has the score of a use and was not used": (
            is_free | ((used_at > 0) == (score > FORETOLD))
        ).all(),
        "a use lies in the future": (used_at <= tick).all(),
        "a score is not one of a use at that tick": (
            (score <= FORETOLD) | ((score >= used_at) & ((score - used_at) % num_layers == 0))
        ).all(),
        "a record is foretold and not prefetched and pinned": (
            (score != FORETOLD) | (is_speculative & is_pinned)
        ).all(),
        "a refuted record is not prefetched and resident": ((score != REFUTED) | (is_speculative & is_resident)).all(),
        "a guess is for a layer that has run": (~is_pinned | (guess > tick)).all(),
        "guesses are not what is pinned": sorted(slot for slot, _ in owners) == is_pinned.nonzero().flatten().tolist(),
        "a guess is in another layer's list": all(key_of[slot] // num_experts == layer for slot, layer in owners),
        "the queue's ends are wrong": 0 <= head <= end <= len(tensors.queue_slot),
        "a slot is in the queue twice": len(queued.unique()) == len(queued),
        "uses are negative, or of a period to come": (tensors.uses >= 0).all()
        and (tensors.uses_period <= tick // (HALF_LIFE * num_layers)).all(),
        "routed experts are not hits, late or demand": (
            tensors.counters[:, Counter.ROUTED] == tensors.counters[:, Counter.HITS : Counter.DEMAND + 1].sum(1)
        ).all(),
        "prefetched records are lost": _lost_prefetches(tensors).eq(0).all(),
    }
    for kind, counts, listed in (
        ("demand", tensors.num_demand, tensors.demand_slot),
        ("prefetch", tensors.num_prefetch, tensors.prefetch_slot),
    ):
        rows = [row[:count].tolist() for row, count in zip(listed, counts.tolist(), strict=True)]
        rules[f"a {kind} list is too long"] = (counts <= listed.shape[1]).all()
        rules[f"a slot is twice in a {kind} list"] = all(len(set(row)) == len(row) for row in rows)
    broken = [rule for rule, holds in rules.items() if not holds]
    assert not broken, "planner: " + "; ".join(broken)


def _lost_prefetches(state: PlannerState) -> torch.Tensor:
    """[L]: what was prefetched, less what became of it and what is still foretold."""
    num_layers, num_experts = state.slot_of.shape
    foretold = state.key_of[state.score == FORETOLD].long() // num_experts
    counters = state.counters
    outcome = counters[:, [Counter.PREFETCHED_USED, Counter.PREFETCHED_WASTED, Counter.CANCELLED]].sum(1)
    return counters[:, Counter.PREFETCHED] - outcome - foretold.bincount(minlength=num_layers)
