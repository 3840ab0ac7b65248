"""Routing made to measure: a wanted slot hit rate under the engine's LRU, and guesses of a given recall.

Steps come in two parts. The first ones sweep over all experts until the slots are full, then settle; those after them
are what is timed, and the hit rate, the recall and the misses are theirs. Each id is reused with probability `reuse`:
drawn from the experts that its layer used last, else from all. `reuse` is found by bisection over the simulated cache.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SETTLE_STEPS = 12  # after the slots are full, until reuse alone says what is in them
RECENT_SHARE = 0.75  # of a layer's part of the slots: what is reused is nearly always there
TRIALS = 12  # of the bisection
CLOSE = 0.002  # of the wanted hit rate, where the bisection ends
SEED = 0


class Shape(NamedTuple):
    """A model's layers with experts, their experts, and how many ids each of T tokens has."""

    layers: int
    experts: int
    tokens: int
    top_k: int


class Simulation(NamedTuple):
    """What an LRU cache does with a routing, fetching nothing ahead; distinct experts of a step and layer."""

    is_resident: np.ndarray  # [steps, L, T, K] bool: of each id, before its layer fetches
    routed: np.ndarray  # [steps, L]
    misses: np.ndarray  # [steps, L]


@dataclass(frozen=True)
class SyntheticRouting:
    """Ids for every step, of which the first `warm_steps` only prepare the slots."""

    routed: np.ndarray  # [steps, L, T, K] int32
    foretold: list[np.ndarray]  # the same, best first, as guessed one layer ahead, two layers ahead …
    warm_steps: int
    reuse: float
    simulation: Simulation

    @property
    def misses(self) -> np.ndarray:
        """Experts that the cache must fetch without prediction, [timed steps, L]."""
        return self.simulation.misses[self.warm_steps :]

    @property
    def hit_rate(self) -> float:
        """Resident when asked for / asked for, without prediction."""
        return 1.0 - float(self.misses.sum() / self.simulation.routed[self.warm_steps :].sum())

    @property
    def recall(self) -> list[float | None]:
        """Of the routed ids that are not resident without prediction, the share that is foretold: by layers ahead."""
        is_missing = ~self.simulation.is_resident[self.warm_steps :]
        if not is_missing.any():
            return [None] * len(self.foretold)
        routed = self.routed[self.warm_steps :, ..., :, None]
        is_right = [(routed == ids[self.warm_steps :, ..., None, :]).any(-1) for ids in self.foretold]
        return [float(found[is_missing].mean()) for found in is_right]


@functools.cache
def make_routing(
    shape: Shape, num_slots: int, steps: int, hit_rate: float | None, recalls: tuple[float, ...], seed: int = SEED
) -> SyntheticRouting:
    """Routing of `steps` timed steps; `hit_rate` None: without reuse; `recalls` of guesses one layer ahead, two layers
    ahead … Equal arguments give the same ids, not to be changed."""
    warm = _fill_steps(shape, num_slots) + SETTLE_STEPS
    draws = _Draws(shape, warm + steps, seed)
    reuse, routed, simulation = 0.0, *_simulated(draws, 0.0, num_slots)
    if hit_rate is not None:
        low, high = 0.0, 1.0
        for _ in range(TRIALS):
            middle = (low + high) / 2
            ids, found = _simulated(draws, middle, num_slots)
            rate = _rate(found, warm)
            if abs(rate - hit_rate) <= abs(_rate(simulation, warm) - hit_rate):
                reuse, routed, simulation = middle, ids, found
            if abs(rate - hit_rate) <= CLOSE:
                break
            low, high = (middle, high) if rate < hit_rate else (low, middle)
    foretold = [_foretell(draws, routed, simulation.is_resident, recall, warm) for recall in recalls]
    return SyntheticRouting(routed, foretold, warm, reuse, simulation)


def simulate(routed: np.ndarray, num_slots: int, num_experts: int) -> Simulation:
    """The engine's LRU on ids [steps, L, T, K], from empty slots: one tick a layer; of the slots that the tick does not
    use, the one that was used longest ago is taken, the lowest where several are."""
    steps, num_layers, tokens, top_k = routed.shape
    by_age: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))  # the next to take first
    slot_of: dict[int, int] = {}
    key_of: dict[int, int] = {}
    is_resident = np.zeros((steps, num_layers, tokens * top_k), dtype=bool)
    num_routed = np.zeros((steps, num_layers), dtype=np.int64)
    misses = np.zeros((steps, num_layers), dtype=np.int64)
    rows = routed.reshape(steps, num_layers, tokens * top_k).tolist()
    for step in range(steps):
        for layer in range(num_layers):
            keys = [layer * num_experts + expert for expert in rows[step][layer]]
            is_resident[step, layer] = [key in slot_of for key in keys]
            distinct = list(dict.fromkeys(keys))
            used = [slot_of[key] for key in distinct if key in slot_of]
            for slot in used:
                del by_age[slot]
            missing = [key for key in distinct if key not in slot_of]
            assert len(missing) <= len(by_age), "a layer needs more slots than there are"
            for key in missing:
                slot = by_age.popitem(last=False)[0]
                if slot in key_of:
                    del slot_of[key_of[slot]]
                slot_of[key], key_of[slot] = slot, key
                used.append(slot)
            by_age.update(dict.fromkeys(sorted(used)))
            num_routed[step, layer], misses[step, layer] = len(distinct), len(missing)
    return Simulation(is_resident.reshape(routed.shape), num_routed, misses)


def _fill_steps(shape: Shape, num_slots: int) -> int:
    """Steps that sweep over the experts until as many as there are slots were used."""
    per_step = min(shape.experts, shape.tokens * shape.top_k)
    share = min(shape.experts, -(-num_slots // shape.layers))  # of a layer
    return -(-share // per_step)


class _Draws:
    """Every random number that routings of one shape need, whatever the reuse: so that they differ little between two
    values of it."""

    def __init__(self, shape: Shape, steps: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.shape, self.steps = shape, steps
        self.sweep = np.argsort(random.random((shape.layers, shape.experts)), axis=-1)  # [L, E]
        self.order = random.random((steps, shape.layers, shape.tokens, shape.experts), dtype=np.float32)
        self.is_reused = random.random((steps, shape.layers, shape.tokens, shape.top_k))
        self.is_wrong = random.random((steps, shape.layers, shape.tokens, shape.top_k))
        self.place = random.random((steps, shape.layers, shape.tokens, shape.top_k))


def _simulated(draws: _Draws, reuse: float, num_slots: int) -> tuple[np.ndarray, Simulation]:
    routed = _route(draws, reuse, num_slots)
    return routed, simulate(routed, num_slots, draws.shape.experts)


def _rate(simulation: Simulation, warm: int) -> float:
    return 1.0 - float(simulation.misses[warm:].sum() / simulation.routed[warm:].sum())


def _route(draws: _Draws, reuse: float, num_slots: int) -> np.ndarray:
    """Ids [steps, L, T, K] int32, those of a token distinct."""
    (num_layers, num_experts, tokens, top_k), steps = draws.shape, draws.steps
    num_recent = max(1, min(num_experts, round(RECENT_SHARE * num_slots / num_layers)))
    fill_steps = _fill_steps(draws.shape, num_slots)
    last_use = np.full((num_layers, num_experts), -1.0)
    found = np.empty((steps, num_layers, tokens, top_k), dtype=np.int32)
    for step in range(steps):
        if step < fill_steps:
            places = step * tokens * top_k + np.arange(tokens * top_k)
            ids = draws.sweep[:, places % num_experts].reshape(num_layers, tokens, top_k)
        else:
            latest = np.argsort(-last_use, axis=-1)[:, :num_recent]
            is_recent = np.zeros((num_layers, num_experts), dtype=bool)
            np.put_along_axis(is_recent, latest, True, axis=-1)
            is_recent &= last_use >= 0
            # From 0 up to 1: anyone's place in the draw. The reused ones come first, as many as are to be.
            order = draws.order[step]  # [L, T, E]
            num_reused = (draws.is_reused[step] < reuse).sum(-1, keepdims=True)  # [L, T, 1]
            rank = np.argsort(np.argsort(np.where(is_recent[:, None], order, 2.0), axis=-1), axis=-1)
            is_chosen = (rank < num_reused) & is_recent[:, None]
            ids = np.argsort(np.where(is_chosen, order - 1.0, order), axis=-1)[..., :top_k]
        found[step] = ids
        # The order of a token's ids says which was used last, where a step used several.
        uses = step + np.arange(tokens * top_k) / (tokens * top_k)
        flat = ids.reshape(num_layers, -1)
        last_use[np.arange(num_layers)[:, None], flat] = uses
    return found


def _foretell(draws: _Draws, routed: np.ndarray, is_resident: np.ndarray, recall: float, warm: int) -> np.ndarray:
    """As many ids as are routed, in any order. Resident ones are all right; of the others the share `recall`, before
    step `warm` and from there on; a lower share is wrong where a higher one is, and elsewhere. In place of the rest
    there are experts that are neither routed nor were used lately: each costs a fetch."""
    foretold = routed.copy()
    last_use = _last_uses(routed, draws.shape.experts)
    for step, layer, token, k in [
        *_wrong(draws, is_resident, recall, slice(0, warm)),
        *_wrong(draws, is_resident, recall, slice(warm, None)),
    ]:
        is_free = np.ones(draws.shape.experts, dtype=bool)
        is_free[routed[step, layer].ravel()] = False
        is_free[foretold[step, layer].ravel()] = False
        candidates = np.flatnonzero(is_free)
        if len(candidates):
            oldest = candidates[np.argsort(last_use[step, layer, candidates], kind="stable")]
            half = oldest[: max(1, len(oldest) // 2)]
            foretold[step, layer, token, k] = half[int(draws.is_wrong[step, layer, token, k] * 1e6) % len(half)]
    return np.take_along_axis(foretold, np.argsort(draws.place, axis=-1), axis=-1)


def _wrong(draws: _Draws, is_resident: np.ndarray, recall: float, part: slice) -> list[list[int]]:
    """(step, layer, token, k) of the routed ids of these steps that are not foretold, exactly so many."""
    is_missing = ~is_resident[part]
    missing = np.argwhere(is_missing)
    missing[:, 0] += part.start
    by_chance = np.argsort(draws.is_wrong[part][is_missing])
    return missing[by_chance[round(recall * len(missing)) :]].tolist()


def _last_uses(routed: np.ndarray, num_experts: int) -> np.ndarray:
    """The step of each expert's last use before every step, -1 if there was none: [steps, L, E] int32."""
    steps, num_layers = routed.shape[:2]
    last = np.full((num_layers, num_experts), -1, dtype=np.int32)
    found = np.empty((steps, num_layers, num_experts), dtype=np.int32)
    for step in range(steps):
        found[step] = last
        last[np.arange(num_layers)[:, None], routed[step].reshape(num_layers, -1)] = step
    return found
