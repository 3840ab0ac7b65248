"""What `plan_demand` and `plan_prefetch` decide, one expert after the other, over lists: the contract in plain loops.

Equal inputs give equal tensors, all of the state but its scratch included. They wait for the device.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tritonmoe_kernels.planner_state import (
    FORETOLD,
    FREE,
    HALF_LIFE,
    LISTED,
    MASS_UNIT,
    REFUTED,
    Counter,
    Header,
    PlannerState,
    check_demand,
    check_prefetch,
)


class _Planner:
    """The state as lists, and what both calls do with it."""

    def __init__(self, state: PlannerState) -> None:
        self.state = state
        self.s = SimpleNamespace(**{name: tensor.tolist() for name, tensor in state._asdict().items()})
        self.num_layers, self.num_experts = state.slot_of.shape
        self.num_slots = len(state.key_of)
        self.has_refilled = False

    def save(self) -> None:
        """Write the lists back."""
        for name, tensor in self.state._asdict().items():
            tensor.copy_(torch.tensor(getattr(self.s, name), dtype=tensor.dtype))

    def distinct(self, ids: list[int]) -> list[int]:
        """The experts among ids, in order of first appearance."""
        return [expert for expert in dict.fromkeys(ids) if 0 <= expert < self.num_experts]

    def slot(self, layer: int, expert: int) -> int:
        return self.s.slot_of[layer][expert]

    def is_resident(self, slot: int) -> bool:
        return self.s.key_of[slot] >= 0 and self.s.landed[slot] == self.s.copy_epoch[slot]

    def may_go(self, slot: int) -> bool:
        """Not foretold, not used at this tick, and not in flight."""
        s = self.s
        is_free = s.key_of[slot] < 0
        return s.guess[slot] == 0 and s.used_at[slot] < s.header[Header.TICK] and (is_free or self.is_resident(slot))

    def is_valid(self, place: int) -> bool:
        """Whether the queue's entry at `place` may be taken."""
        slot = self.s.queue_slot[place]
        return self.s.score[slot] == self.s.queue_score[place] and self.may_go(slot)

    def unmap(self, slot: int) -> None:
        key = self.s.key_of[slot]
        if key >= 0:
            self.s.slot_of[key // self.num_experts][key % self.num_experts] = -1
        self.s.key_of[slot] = -1

    def refill(self) -> None:
        """Queue the slots that may go, the least score first, the lowest slot where scores are equal."""
        s, capacity = self.s, self.state.queue_capacity
        best = sorted((s.score[slot], slot) for slot in range(self.num_slots) if self.may_go(slot))[:capacity]
        for place, (score, slot) in enumerate(best, start=capacity):
            s.queue_slot[place] = slot
            s.queue_score[place] = score
        s.header[Header.QUEUE_HEAD] = capacity
        s.header[Header.QUEUE_END] = capacity + len(best)
        self.has_refilled = True

    def push(self, slot: int) -> None:
        """Put a slot in front of the queue, if there is room."""
        place = self.s.header[Header.QUEUE_HEAD] - 1
        if place >= 0:
            self.s.queue_slot[place] = slot
            self.s.queue_score[place] = self.s.score[slot]
            self.s.header[Header.QUEUE_HEAD] = place

    def take(self, layer: int, expert: int, epoch: int) -> int:
        """Map the expert to the first slot of the queue that may go, for a copy; -1 if there is none."""
        s = self.s
        while True:
            if s.header[Header.QUEUE_HEAD] >= s.header[Header.QUEUE_END]:
                if self.has_refilled:
                    return -1
                self.refill()
                continue
            place = s.header[Header.QUEUE_HEAD]
            s.header[Header.QUEUE_HEAD] += 1
            if self.is_valid(place):
                slot = s.queue_slot[place]
                self.unmap(slot)
                s.slot_of[layer][expert] = slot
                s.key_of[slot] = layer * self.num_experts + expert
                s.copy_epoch[slot] = epoch
                s.used_at[slot] = 0
                return slot

    def use(self, slot: int, eviction: str) -> None:
        """The slot's expert is used at this tick."""
        s, tick = self.s, self.s.header[Header.TICK]
        s.used_at[slot] = s.score[slot] = tick
        if eviction == "lfu":
            layer, expert = divmod(s.key_of[slot], self.num_experts)
            period = tick // (HALF_LIFE * self.num_layers)
            uses = (s.uses[layer][expert] >> min(31, period - s.uses_period[layer][expert])) + 1
            s.uses[layer][expert] = uses
            s.uses_period[layer][expert] = period
            s.score[slot] = tick + self.num_layers * uses

    def end_guesses(self, layer: int, routed: list[int]) -> None:
        """The layer's routing is known: unpin its guesses, and let go what was prefetched in vain."""
        s, counters = self.s, self.s.counters[layer]
        for slot in s.guesses[layer][: s.num_guesses[layer]]:
            s.guess[slot] = 0
            if s.key_of[slot] % self.num_experts in routed or s.score[slot] != FORETOLD:
                continue
            if self.is_resident(slot):
                counters[Counter.PREFETCHED_WASTED] += 1
                s.score[slot] = REFUTED
                self.push(slot)
            else:
                counters[Counter.CANCELLED] += 1
                self.unmap(slot)
                s.score[slot] = FREE
                s.copy_epoch[slot] = 0
                s.used_at[slot] = s.header[Header.TICK]  # something may still be written there
                s.header[Header.CANCELLED_AT] = s.header[Header.TICK]
                s.header[Header.CANCELLED_LAYER], s.header[Header.CANCELLED_COUNT] = layer, s.num_guesses[layer]
        s.num_guesses[layer] = 0

    def queue_cancelled(self) -> None:
        """Slots whose copies were cancelled at this tick go first at the next."""
        s = self.s
        if s.header[Header.CANCELLED_AT] == s.header[Header.TICK]:
            for slot in s.guesses[s.header[Header.CANCELLED_LAYER]][: s.header[Header.CANCELLED_COUNT]]:
                if s.copy_epoch[slot] == 0:
                    self.push(slot)
            s.header[Header.CANCELLED_AT] = 0


def plan_demand_ref(
    state: PlannerState,
    layer: int,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    hit_ids: torch.Tensor,
    miss_ids: torch.Tensor,
    miss_tolerance: float = 0.0,
    eviction: str = "lru",
    routing_table: torch.Tensor | None = None,
) -> None:
    """What `plan_demand` does."""
    outputs = hit_ids, miss_ids
    check_demand(state, layer, topk_ids, topk_weights, outputs, miss_tolerance, eviction, routing_table)
    planner = _Planner(state)
    s, counters = planner.s, planner.s.counters[layer]
    s.header[Header.TICK] += 1
    tick = s.header[Header.TICK]
    ids = _ids(s, layer, topk_ids, routing_table).flatten().tolist()
    routed = planner.distinct(ids)
    planner.end_guesses(layer, routed)

    hits, misses, missing = {}, {}, []
    for expert in routed:
        slot = planner.slot(layer, expert)
        if slot < 0:
            missing.append(expert)
            continue
        is_hit = planner.is_resident(slot)
        (hits if is_hit else misses)[expert] = slot
        counters[Counter.HITS if is_hit else Counter.LATE] += 1
        counters[Counter.PREFETCHED_USED] += s.score[slot] == FORETOLD
        planner.use(slot, eviction)

    if topk_weights is not None and miss_tolerance > 0.0:
        weights = topk_weights.cpu()
        mass = torch.zeros_like(weights[:, 0])
        for k in range(weights.shape[1]):
            mass += weights[:, k]
        bound = (torch.tensor(miss_tolerance, dtype=torch.float32) * mass)[:, None]
        is_heavy = (weights >= bound).flatten().tolist()
        share = weights / torch.where(mass > 0, mass, 1.0)[:, None]
        units = (share / MASS_UNIT).long().flatten().tolist()
        heavy = {expert for expert, is_kept in zip(ids, is_heavy, strict=True) if is_kept}
        left_out = [expert for expert in missing if expert not in heavy]
        missing = [expert for expert in missing if expert in heavy]
        counters[Counter.LEFT_OUT] += sum(expert in left_out for expert in ids)
        counters[Counter.LEFT_OUT_MASS] += sum(n for expert, n in zip(ids, units, strict=True) if expert in left_out)

    s.num_demand[layer] = s.demand_ready[layer] = s.demand_closing[layer] = 0
    for expert in missing:
        slot = planner.take(layer, expert, 2 * tick)
        if slot < 0:
            s.header[Header.ERROR] = 1
            break
        misses[expert] = slot
        planner.use(slot, eviction)
        entry = s.num_demand[layer]
        s.demand_key[layer][entry] = s.key_of[slot]
        s.demand_slot[layer][entry] = slot
        s.demand_epoch[layer][entry] = 2 * tick
        s.demand_arrivals[layer][entry] = 0
        s.num_demand[layer] += 1
    counters[Counter.DEMAND] += s.num_demand[layer]
    counters[Counter.ROUTED] += len(hits) + len(misses)
    planner.save()
    for out, slots in zip(outputs, (hits, misses), strict=True):
        out.copy_(torch.tensor([slots.get(expert, -1) for expert in ids]).view_as(out))


def plan_prefetch_ref(
    state: PlannerState,
    layer: int,
    ids: torch.Tensor,
    distance: int,
    num_routed: int,
    routing_table: torch.Tensor | None = None,
) -> None:
    """What `plan_prefetch` does."""
    check_prefetch(state, layer, ids, distance, num_routed, routing_table)
    planner = _Planner(state)
    s = planner.s
    target = s.header[Header.TICK] + distance
    experts = planner.distinct(_ids(s, layer, ids, routing_table).T.flatten().tolist())
    room = min(planner.num_slots - num_routed - sum(s.num_guesses), len(s.guesses[layer]) - s.num_guesses[layer])

    def pin(slot: int) -> None:
        nonlocal room
        s.guess[slot] = target
        s.guesses[layer][s.num_guesses[layer]] = slot
        s.num_guesses[layer] += 1
        room -= 1

    missing = [expert for expert in experts if planner.slot(layer, expert) < 0]
    for expert in experts:  # what is mapped first, that it does not make room for the rest
        slot = planner.slot(layer, expert)
        if slot >= 0 and s.guess[slot] == 0 and room > 0:
            pin(slot)

    s.num_prefetch[layer] = s.prefetch_ready[layer] = s.prefetch_closing[layer] = 0
    for expert in missing:
        entry = s.num_prefetch[layer]
        slot = planner.take(layer, expert, 2 * target + 1) if room > 0 and entry < s.limit[layer] else -1
        if slot < 0:
            break
        s.score[slot] = FORETOLD
        pin(slot)
        s.prefetch_key[layer][entry] = s.key_of[slot]
        s.prefetch_slot[layer][entry] = slot
        s.prefetch_epoch[layer][entry] = 2 * target + 1
        s.prefetch_arrivals[layer][entry] = 0
        s.num_prefetch[layer] += 1
    s.prefetch_listed[layer] = LISTED
    s.counters[layer][Counter.PREFETCHED] += s.num_prefetch[layer]

    queue = range(s.header[Header.QUEUE_HEAD], s.header[Header.QUEUE_END])
    if sum(map(planner.is_valid, queue)) < num_routed + ids.numel() and not planner.has_refilled:
        planner.refill()
    planner.queue_cancelled()
    planner.save()


def _ids(s: SimpleNamespace, layer: int, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """The ids themselves, or those of the table for this step."""
    return ids if table is None else table[s.header[Header.STEP] % len(table), layer]
