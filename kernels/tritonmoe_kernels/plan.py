"""Decide on the device which experts are fetched into which slots: for a layer's routing, and ahead of it.

Floor of both: some hundred integers, so latency alone. One program; a read from L2 takes about 0.3 us on an H200, and
what was routed is one read and a few hundred instructions of a single warp away from its slots: 1 to 2 us.

Schedule of `plan_demand`: the critical path is short because all else is done while the router still runs. Nothing
changes the planner's state between the router's start and this kernel's end but `landed`, so the slots of all of the
layer's experts, whether they are resident, the guesses and the next victims are read before the wait, and what was
routed is then looked up in registers. A copy that lands after its look counts as missing: it is awaited with the rest.
What only some layers need, letting guesses go and fetching, is behind a branch. Ids are compared all with all, 32
columns at a time; with few ids one warp does it, so that nothing waits at a barrier. (With all reads after the wait and
no branches it was three reads that depended on each other and 1,250 instructions: 6 us.)

Victims come from a queue that was sorted before. Filling it reads the state of all slots, about 200 KB for 6,144: one
pass to rank the slots that may go, about log2(S / F) + 2 passes over the ranks to find a bound with F to 2F of them
below, one to collect those, and comparisons of all 2F with each other. `plan_prefetch`, beside the critical path, fills
it whenever what is left might not serve the next layer. What it lists is late by its own time, so it makes three reads
that depend on each other before it writes the list, and looks at the queue again only if what those saw will not do.

`copy_epoch` is the one thing written here that a fetch kernel of another branch reads meanwhile. Plain stores do: such
a kernel looks in order to stop early, and one that sees the old epoch copies on to a slot that nobody reads. What it
publishes then is not the slot's `copy_epoch`, which alone makes a slot resident. Such a slot counts as used at the tick
that cancelled its copy: it is given to no other before the next tick, whose plan comes after that fetch kernel's end,
and until then may be written to. In the other direction, `landed` of the layer's own slots is read with an
acquire: an epoch that is seen here was published after the record was stored, and what reads it is a later launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonmoe_kernels import planner_state
from tritonmoe_kernels.dependent_launch import await_inputs, launch_options, release_dependents
from tritonmoe_kernels.planner_state import Counter, Header, PlannerState, check_demand, check_prefetch
from tritonmoe_kernels.tiles import next_power_of_2

WINDOW = 32  # queue entries looked at together, and ids compared with all others at a time
NARROW, WIDE = 32, 128  # ids or guesses up to which one warp, or four, plan a layer's demand
PREFETCH_WARPS = 4  # off the critical path, and it is this kernel that refills the queue
STATES_PER_THREAD = 4  # slots whose state is read at a time; six numbers each
RANKS_PER_THREAD = 2  # read at a time in a pass over the ranks
COMPARISONS_PER_THREAD = 8  # of the ranks found with each other, at a time

NEVER = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # the rank of a slot that must not be given away
FREE = tl.constexpr(planner_state.FREE)
REFUTED = tl.constexpr(planner_state.REFUTED)
FORETOLD = tl.constexpr(planner_state.FORETOLD)
HALF_LIFE = tl.constexpr(planner_state.HALF_LIFE)
LISTED = tl.constexpr(planner_state.LISTED)
SLOT_BITS = tl.constexpr(planner_state.SLOT_BITS)
SLOT_MASK = tl.constexpr((1 << planner_state.SLOT_BITS) - 1)
MASS_SCALE = tl.constexpr(1 / planner_state.MASS_UNIT)

# What is known of an expert in one number: its slot, above these.
IS_RESIDENT, IS_FORETOLD, FLAG_BITS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(2)

TICK = tl.constexpr(int(Header.TICK))
QUEUE_HEAD = tl.constexpr(int(Header.QUEUE_HEAD))
QUEUE_END = tl.constexpr(int(Header.QUEUE_END))
ERROR = tl.constexpr(int(Header.ERROR))
STEP = tl.constexpr(int(Header.STEP))
CANCELLED_AT = tl.constexpr(int(Header.CANCELLED_AT))
CANCELLED_LAYER = tl.constexpr(int(Header.CANCELLED_LAYER))
CANCELLED_COUNT = tl.constexpr(int(Header.CANCELLED_COUNT))

NUM_COUNTERS = tl.constexpr(len(Counter))
NUM_PLANNED = tl.constexpr(int(Counter.DEMAND_BYTES))  # the columns that the planner may write
ROUTED = tl.constexpr(int(Counter.ROUTED))
HITS = tl.constexpr(int(Counter.HITS))
LATE = tl.constexpr(int(Counter.LATE))
DEMAND = tl.constexpr(int(Counter.DEMAND))
PREFETCHED = tl.constexpr(int(Counter.PREFETCHED))
PREFETCHED_USED = tl.constexpr(int(Counter.PREFETCHED_USED))
PREFETCHED_WASTED = tl.constexpr(int(Counter.PREFETCHED_WASTED))
CANCELLED = tl.constexpr(int(Counter.CANCELLED))
LEFT_OUT = tl.constexpr(int(Counter.LEFT_OUT))
LEFT_OUT_MASS = tl.constexpr(int(Counter.LEFT_OUT_MASS))


@triton.jit
def count(flags):
    """How many of `flags` [n] are set, int32."""
    return tl.sum(flags.to(tl.int32), axis=0)


@triton.jit
def number(flags):
    """How many of `flags` [n] are set before each, int32 [n]."""
    ones = flags.to(tl.int32)
    return tl.cumsum(ones, axis=0) - ones


@triton.jit
def count_four(first, second, third, fourth):
    """`count` of four tensors in one reduction; at most 2^15 - 1 each."""
    packed = first.to(tl.int64) | (second.to(tl.int64) << 16)
    packed |= (third.to(tl.int64) << 32) | (fourth.to(tl.int64) << 48)
    total = tl.sum(packed, axis=0)
    mask = 0xFFFF
    return (
        (total & mask).to(tl.int32),
        ((total >> 16) & mask).to(tl.int32),
        ((total >> 32) & mask).to(tl.int32),
        ((total >> 48) & mask).to(tl.int32),
    )


@triton.jit
def table_row(state, table_ptr, layer, table_steps, L: tl.constexpr, PAIRS: tl.constexpr):
    """Where the ids of this step and layer are in a table [steps, L, PAIRS]."""
    step = tl.load(state.header + STEP) % table_steps
    return table_ptr + (step * L + layer) * PAIRS


@triton.jit
def look(landed_ptrs, mask, SEM: tl.constexpr):
    """Epochs that a fetch kernel may write at any time, the same for every thread.

    A load would be done once by every warp, or once more in another layout, and the copies of a value could differ; of
    an atomic addition there is one, whose result is handed round. It adds nothing, so it takes nothing back either.
    """
    return tl.atomic_add(landed_ptrs, 0, mask=mask, sem=SEM, scope="gpu")


@triton.jit
def look_up(table, ids, exists):
    """Of each id the entry of a table [experts]; -1 where it is no expert's."""
    return tl.where(exists, tl.gather(table, tl.where(exists, ids, 0), 0), -1)


@triton.jit
def read_queue(state, position, end, WINDOW: tl.constexpr):
    """The entries from `position` on: (slots, their scores when queued, whether there is an entry), each [WINDOW]."""
    places = position + tl.arange(0, WINDOW)
    exists = places < end
    slots = tl.load(state.queue_slot + places, mask=exists, other=0)
    scores = tl.load(state.queue_score + places, mask=exists, other=0)
    return slots, scores, exists


@triton.jit
def read_owners(state, slots, scores, exists, tick):
    """(keys, guesses, whether a slot may go if its guess allows it) of slots that had these scores when queued."""
    keys = tl.load(state.key_of + slots, mask=exists, other=-1)
    score = tl.load(state.score + slots, mask=exists, other=0)
    used_at = tl.load(state.used_at + slots, mask=exists, other=0)
    guesses = tl.load(state.guess + slots, mask=exists, other=0)
    copy_epoch = tl.load(state.copy_epoch + slots, mask=exists, other=0)
    # Of these no fetch kernel changes meanwhile: what is in flight is pinned, or was used at this tick.
    landed = tl.load(state.landed + slots, mask=exists, other=0)
    may_go = exists & (score == scores) & (used_at < tick) & ((keys < 0) | (landed == copy_epoch))
    return keys, guesses, may_go


@triton.jit
def take(state, slots, keys, may_go, ranks, taken, wanted, head, end, epoch, used_at, guess, WINDOW: tl.constexpr):
    """Give the queue's entries that may go to the ranks from `taken` up to `wanted`, and unmap who had them.

    Returns (the slot of each rank or -1, ranks served so far, the queue's head).
    """
    order = taken + number(may_go)
    is_taken = may_go & (order < wanted)
    tl.debug_barrier()  # every warp must have read the slots' state before one changes it
    tl.store(state.slot_of + keys, -1, mask=is_taken & (keys >= 0))
    tl.store(state.copy_epoch + slots, epoch, mask=is_taken)
    tl.store(state.used_at + slots, used_at, mask=is_taken)
    tl.store(state.guess + slots, guess, mask=is_taken)
    is_own = (ranks[:, None] == order[None, :]) & is_taken[None, :]
    own = tl.max(tl.where(is_own, slots[None, :], -1), axis=1)
    taken += count(is_taken)
    passed = tl.max(tl.where(is_taken, tl.arange(0, WINDOW) + 1, 0), axis=0)
    return own, taken, tl.where(taken >= wanted, head + passed, tl.minimum(head + WINDOW, end))


@triton.jit
def refill(
    state, tick, num_slots, F: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr
):
    """Queue the F slots of least (score, slot) that may go, from position F on, and return the queue's end.

    What the launch stored before must be visible to all of its threads.
    """
    lanes = tl.arange(0, BLOCK_S)
    rank_lanes = tl.arange(0, BLOCK_R)
    ranks_ptr = state.scratch
    found_ptr = state.scratch + num_slots
    counts = tl.zeros([BLOCK_S], tl.int32)
    least = tl.full([BLOCK_S], NEVER, tl.int64)
    most = tl.full([BLOCK_S], -NEVER, tl.int64)
    for start in range(0, num_slots, BLOCK_S):
        slots = start + lanes
        exists = slots < num_slots
        score = tl.load(state.score + slots, mask=exists, other=0)
        _, guesses, may_go = read_owners(state, slots, score, exists, tick)
        may_go = may_go & (guesses == 0)
        ranks = tl.where(may_go, (score << SLOT_BITS) | slots, NEVER)  # unique
        tl.store(ranks_ptr + slots, ranks, mask=exists)
        counts += may_go.to(tl.int32)
        least = tl.minimum(least, ranks)
        most = tl.maximum(most, tl.where(may_go, ranks, -NEVER))
    tl.debug_barrier()
    # Fewer than F ranks are up to `low`, at least F (or all there are) up to `high`.
    low = tl.min(least, axis=0) - 1
    high = tl.max(most, axis=0)
    num_found = tl.sum(counts, axis=0)
    while num_found > 2 * F:
        middle = (low + high) >> 1
        below_counts = tl.zeros([BLOCK_R], tl.int32)
        for start in range(0, num_slots, BLOCK_R):
            slots = start + rank_lanes
            ranks = tl.load(ranks_ptr + slots, mask=slots < num_slots, other=NEVER)
            below_counts += (ranks <= middle).to(tl.int32)
        below = tl.sum(below_counts, axis=0)
        if below < F:
            low = middle
        else:
            high = middle
            num_found = below
    placed = 0
    for start in range(0, num_slots, BLOCK_R):
        slots = start + rank_lanes
        ranks = tl.load(ranks_ptr + slots, mask=slots < num_slots, other=NEVER)
        is_found = ranks <= high
        tl.store(found_ptr + placed + number(is_found), ranks, mask=is_found)
        placed += count(is_found)
    tl.debug_barrier()
    # A rank's place is how many are below it. tl.sort of 256 to 4096 ranks took 10 to 40 s to compile.
    lanes = tl.arange(0, 2 * F)
    ranks = tl.load(found_ptr + lanes, mask=lanes < num_found, other=NEVER)
    num_below = tl.zeros([2 * F, COLUMNS], tl.int32)
    for start in range(0, num_found, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        others = tl.load(found_ptr + columns, mask=columns < num_found, other=NEVER)
        num_below += (others[None, :] < ranks[:, None]).to(tl.int32)
    places = tl.sum(num_below, axis=1)
    is_queued = (lanes < num_found) & (places < F)
    tl.store(state.queue_slot + F + places, (ranks & SLOT_MASK).to(tl.int32), mask=is_queued)
    tl.store(state.queue_score + F + places, ranks >> SLOT_BITS, mask=is_queued)
    return F + tl.minimum(num_found, F).to(tl.int64)


@triton.jit
def take_all(
    state,
    slots,
    keys,
    may_go,
    ranks,
    wanted_of_these,
    wanted,
    head,
    end,
    tick,
    epoch,
    used_at,
    guess,
    num_slots,
    F: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Serve the ranks [n] up to `wanted`, with one refill if the queue ends before.

    First from entries that were read before, [WINDOW], if they are still the queue's front: `wanted_of_these` is 0 if
    not. Returns (the slot of each rank or -1, ranks served, the queue's head and end, refills).
    """
    own, taken, head = take(
        state, slots, keys, may_go, ranks, 0, wanted_of_these, head, end, epoch, used_at, guess, WINDOW
    )
    refills = 0
    while (taken < wanted) & ((head < end) | (refills == 0)):
        tl.debug_barrier()  # what other warps stored in a slot's state or in the queue must be seen
        if head < end:
            slots, scores, exists = read_queue(state, head, end, WINDOW)
            keys, guesses, may_go = read_owners(state, slots, scores, exists, tick)
            may_go = may_go & (guesses == 0)
            new, taken, head = take(
                state, slots, keys, may_go, ranks, taken, wanted, head, end, epoch, used_at, guess, WINDOW
            )
            own = tl.maximum(own, new)
        else:
            end = refill(state, tick, num_slots, F, BLOCK_S, BLOCK_R, COLUMNS)
            head = tl.full((), F, tl.int64)
            refills += 1
    return own, taken, head, end, refills


@triton.jit
def mass_share(weights_ptr, pairs, exists, K: tl.constexpr):
    """(gate weight, gate mass of its token) of each pair; the sum in order of k, as the reference has it."""
    total = tl.zeros(pairs.shape, tl.float32)
    for k in tl.static_range(K):
        total += tl.load(weights_ptr + pairs // K * K + k, mask=exists, other=0.0)
    return tl.load(weights_ptr + pairs, mask=exists, other=0.0), total


@triton.jit
def put_first(state, slots, score: tl.constexpr, is_chosen, head):
    """Put slots [n] of this score in front of the queue, the last one first, as far as there is room; the new head."""
    places = head - 1 - number(is_chosen)
    has_room = is_chosen & (places >= 0)
    tl.store(state.queue_slot + places, slots, mask=has_room)
    tl.store(state.queue_score + places, tl.full(places.shape, score, tl.int64), mask=has_room)
    return head - count(has_room)


@triton.jit
def let_go(state, slots, keys, is_unused, is_settled, head, tick):
    """Records that were prefetched in vain go to the front of the queue; copies are cancelled.

    Returns (copies cancelled, records wasted, the queue's head).
    """
    is_cancelled = is_unused & ~is_settled
    is_wasted = is_unused & is_settled
    tl.store(state.score + slots, tl.where(is_cancelled, FREE, REFUTED).to(tl.int64), mask=is_unused)
    tl.store(state.slot_of + keys, -1, mask=is_cancelled)
    tl.store(state.key_of + slots, -1, mask=is_cancelled)
    tl.store(state.copy_epoch + slots, 0, mask=is_cancelled)  # the fetch kernel drops the rest of the copy
    tl.store(state.used_at + slots, tick, mask=is_cancelled)  # and the slot goes at the next tick
    return count(is_cancelled), count(is_wasted), put_first(state, slots, REFUTED, is_wasted, head)


@triton.jit
def count_uses(state, keys, is_used, uses, uses_period, tick, L: tl.constexpr):
    """Count a use of each key, given its count and when that was right; returns the lfu scores."""
    period = (tick // (HALF_LIFE * L)).to(tl.int32)
    uses = (uses >> tl.minimum(period - uses_period, 31)) + 1
    tl.store(state.uses + keys, uses, mask=is_used)
    tl.store(state.uses_period + keys, period, mask=is_used)
    return tick + L * uses.to(tl.int64)


@triton.jit
def add_to(counts, COLUMN: tl.constexpr, amount):
    """Add an amount to one column of a row of counters."""
    return counts + tl.where(tl.arange(0, counts.shape[0]) == COLUMN, amount, 0)


@triton.jit(do_not_specialize=["layer", "table_steps", "num_slots"])
def _plan_demand_kernel(
    state,  # PlannerState
    topk_ids_ptr,  # [PAIRS] = [T, K]
    topk_weights_ptr,  # [PAIRS], or None where nothing may be left out
    table_ptr,  # [table_steps, L, PAIRS] or None
    hit_ids_ptr,  # [PAIRS]
    miss_ids_ptr,  # [PAIRS]
    layer,
    table_steps,
    num_slots,
    miss_tolerance,
    L: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    PAIRS: tl.constexpr,
    DEMAND_STRIDE: tl.constexpr,
    GUESS_STRIDE: tl.constexpr,
    F: tl.constexpr,
    IS_LFU: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    CHUNK: tl.constexpr = BLOCK_P if BLOCK_P < WINDOW else WINDOW
    pairs = tl.arange(0, BLOCK_P)
    guess = tl.arange(0, BLOCK_G)
    experts = tl.arange(0, BLOCK_E)
    columns = tl.arange(0, 16)
    layer = layer.to(tl.int64)
    first_key = layer * E

    # While the router runs: the state, which nothing has changed since before the router began. First where things are.
    tick = tl.load(state.header + TICK) + 1
    head = tl.load(state.header + QUEUE_HEAD)
    end = tl.load(state.header + QUEUE_END)
    num_guesses = tl.load(state.num_guesses + layer)
    guess_slots = tl.load(state.guesses + layer * GUESS_STRIDE + guess, mask=guess < GUESS_STRIDE, other=0)
    expert_slots = tl.load(state.slot_of + first_key + experts, mask=experts < E, other=-1)
    counters_ptr = state.counters + layer * NUM_COUNTERS + columns
    counts = tl.load(counters_ptr, mask=columns < NUM_PLANNED, other=0)
    ids_ptr = topk_ids_ptr
    if table_ptr is not None:
        ids_ptr = table_row(state, table_ptr, layer, table_steps, L, PAIRS)

    # Then what the guesses are, the next victims, and of every expert of the layer whether it is resident.
    is_guess = guess < num_guesses
    guess_keys = tl.load(state.key_of + guess_slots, mask=is_guess, other=-1)
    guess_score = tl.load(state.score + guess_slots, mask=is_guess, other=0)
    guess_epoch = tl.load(state.copy_epoch + guess_slots, mask=is_guess, other=0)
    next_slots, next_scores, is_next = read_queue(state, head, end, WINDOW)
    next_keys, next_guesses, may_go = read_owners(state, next_slots, next_scores, is_next, tick)
    # This layer's guesses are no reason to keep a slot any more.
    may_go = may_go & ((next_guesses == 0) | ((next_keys >= first_key) & (next_keys < first_key + E)))
    has_slot = expert_slots >= 0
    copy_epoch = tl.load(state.copy_epoch + expert_slots, mask=has_slot, other=0)
    score = tl.load(state.score + expert_slots, mask=has_slot, other=0)
    guess_landed = look(state.landed + guess_slots, is_guess, "relaxed")
    landed = look(state.landed + expert_slots, has_slot, "acquire")  # last: what follows an acquire waits for it
    is_settled = guess_landed == guess_epoch
    flags = IS_RESIDENT * (landed == copy_epoch).to(tl.int32) + IS_FORETOLD * (score == FORETOLD).to(tl.int32)
    table = tl.where(has_slot, (expert_slots << FLAG_BITS) | flags, -1)
    await_inputs(PDL)
    release_dependents(PDL)

    # Compare ids with ids and guesses.
    ids = tl.load(ids_ptr + pairs, mask=pairs < PAIRS, other=-1)
    exists = (ids >= 0) & (ids < E)
    keys = first_key + ids
    if IS_LFU:
        uses = tl.load(state.uses + keys, mask=exists, other=0)
        uses_period = tl.load(state.uses_period + keys, mask=exists, other=0)
    entry = look_up(table, ids, exists)
    first_at = tl.full([BLOCK_P], BLOCK_P, tl.int32)
    is_right = tl.zeros([BLOCK_G], tl.int32)
    is_kept = tl.full([BLOCK_P], 1, tl.int32)
    if topk_weights_ptr is not None:
        is_kept = tl.zeros([BLOCK_P], tl.int32)
    for start in range(0, BLOCK_P, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other_ids = tl.load(ids_ptr + others, mask=others < PAIRS, other=-1)
        is_same = ids[:, None] == other_ids[None, :]
        first_at = tl.minimum(first_at, tl.min(tl.where(is_same, others[None, :], BLOCK_P), axis=1))
        is_routed = (guess_keys - first_key)[:, None] == other_ids[None, :]
        is_right = tl.maximum(is_right, tl.max(is_routed.to(tl.int32), axis=1))
        if topk_weights_ptr is not None:
            weight, total = mass_share(topk_weights_ptr, others, others < PAIRS, K)
            is_heavy = is_same & (weight >= miss_tolerance * total)[None, :]
            is_kept = tl.maximum(is_kept, tl.max(is_heavy.to(tl.int32), axis=1))
    is_first = exists & (first_at == pairs)
    slots = entry >> FLAG_BITS  # -1 stays -1
    is_mapped = entry >= 0
    is_hit = is_mapped & ((entry & IS_RESIDENT) != 0)
    is_missing = exists & ~is_mapped & (is_kept > 0)
    is_new = is_missing & is_first
    is_used = is_mapped & is_first
    is_foretold = is_used & ((entry & IS_FORETOLD) != 0)
    num_mapped, num_hits, num_foretold, wanted = count_four(is_used, is_hit & is_first, is_foretold, is_new)

    # What is there is used now; what was foretold wrongly is let go. All that was read above is read by every warp.
    tl.debug_barrier()
    tl.store(state.guess + guess_slots, 0, mask=is_guess)
    tl.store(state.num_guesses + layer, 0)
    tl.store(state.used_at + slots, tick, mask=is_used)
    is_unused = is_guess & (is_right == 0) & (guess_score == FORETOLD)
    num_cancelled = tl.full((), 0, tl.int32)
    num_wasted = tl.full((), 0, tl.int32)
    new_head = head
    if tl.max(is_unused.to(tl.int32), axis=0) > 0:
        num_cancelled, num_wasted, new_head = let_go(state, guess_slots, guess_keys, is_unused, is_settled, head, tick)

    # The rest is fetched, in order of first appearance. The state of the next victims was read before the stores above:
    # routed ids are a reason to keep a slot.
    all_slots = slots
    taken = tl.full((), 0, tl.int32)
    if wanted > 0:
        ranks = tl.where(is_missing, tl.gather(number(is_new), tl.minimum(first_at, BLOCK_P - 1), 0), -1)
        is_needed = tl.max(((slots[:, None] == next_slots[None, :]) & is_mapped[:, None]).to(tl.int32), axis=0) > 0
        may_go = may_go & ~is_needed
        epoch = 2 * tick
        wanted_now = tl.where(new_head == head, wanted, 0)  # else the front of the queue is another
        new_slots, taken, new_head, end, _ = take_all(
            state,
            next_slots,
            next_keys,
            may_go,
            ranks,
            wanted_now,
            wanted,
            new_head,
            end,
            tick,
            epoch,
            tick,
            0,
            num_slots,
            F,
            WINDOW,
            BLOCK_S,
            BLOCK_R,
            COLUMNS,
        )
        is_placed = is_new & (new_slots >= 0)
        entries = layer * DEMAND_STRIDE + ranks
        tl.store(state.slot_of + keys, new_slots, mask=is_placed)
        tl.store(state.key_of + new_slots, keys.to(tl.int32), mask=is_placed)
        tl.store(state.demand_key + entries, keys.to(tl.int32), mask=is_placed)
        tl.store(state.demand_slot + entries, new_slots, mask=is_placed)
        tl.store(state.demand_epoch + entries, epoch, mask=is_placed)
        tl.store(state.demand_arrivals + entries, 0, mask=is_placed)
        all_slots = tl.maximum(slots, new_slots)
        if taken < wanted:
            tl.store(state.header + ERROR, 1)
    tl.store(state.demand_ready + layer, 0)
    tl.store(state.demand_closing + layer, 0)
    tl.store(state.num_demand + layer, taken)
    is_used = is_first & (all_slots >= 0)
    if IS_LFU:
        new_score = count_uses(state, keys, is_used, uses, uses_period, tick, L)
        tl.store(state.score + all_slots, new_score, mask=is_used)
    else:
        tl.store(state.score + all_slots, tick, mask=is_used)
    tl.store(hit_ids_ptr + pairs, tl.where(is_hit, slots, -1), mask=pairs < PAIRS)
    tl.store(miss_ids_ptr + pairs, tl.where(is_hit, -1, all_slots), mask=pairs < PAIRS)

    tl.store(state.header + TICK, tick)
    tl.store(state.header + QUEUE_HEAD, new_head)
    tl.store(state.header + QUEUE_END, end)
    if num_cancelled > 0:
        tl.store(state.header + CANCELLED_AT, tick)
        tl.store(state.header + CANCELLED_LAYER, layer)
        tl.store(state.header + CANCELLED_COUNT, num_guesses)
    counts = add_to(counts, ROUTED, num_mapped + taken)
    counts = add_to(counts, HITS, num_hits)
    counts = add_to(counts, LATE, num_mapped - num_hits)
    counts = add_to(counts, DEMAND, taken)
    counts = add_to(counts, PREFETCHED_USED, num_foretold)
    counts = add_to(counts, PREFETCHED_WASTED, num_wasted)
    counts = add_to(counts, CANCELLED, num_cancelled)
    if topk_weights_ptr is not None:
        is_left = exists & ~is_mapped & (is_kept == 0)
        weight, total = mass_share(topk_weights_ptr, pairs, is_left, K)
        share = tl.div_rn(weight, tl.where(total > 0.0, total, 1.0))
        mass = tl.where(is_left, (share * MASS_SCALE).to(tl.int64), 0)
        counts = add_to(counts, LEFT_OUT, count(is_left))
        counts = add_to(counts, LEFT_OUT_MASS, tl.sum(mass, axis=0))
    tl.store(counters_ptr, counts, mask=columns < NUM_PLANNED)


def plan_demand(
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
    """Give every routed expert of a layer a slot, and list the copies that this takes, in one program.

    topk_ids [T, K] int32; an id that is no expert's is passed over. Written, [T, K] int32 each: `hit_ids`, slots that
    are resident now; `miss_ids`, slots to be computed with once the layer's fetches are complete, those in flight
    included. -1 elsewhere. The layer's guesses end; its demand list is new.

    With a `miss_tolerance` above 0, an expert that has no slot and of which every token's gate weight (topk_weights
    [T, K] float32) is below that share of the token's sum is left out. `routing_table` [steps, L, T, K] int32 takes the
    place of topk_ids, by header's STEP modulo steps. If slots do not suffice, header's ERROR becomes 1.
    """
    outputs = hit_ids, miss_ids
    check_demand(state, layer, topk_ids, topk_weights, outputs, miss_tolerance, eviction, routing_table)
    num_layers, num_experts = state.slot_of.shape
    block_p, block_g = _block(topk_ids.numel()), _block(state.guesses.shape[1])
    widest = max(block_p, block_g)
    num_warps = 1 if widest <= NARROW else 4 if widest <= WIDE else 8
    _plan_demand_kernel[(1,)](
        state,
        topk_ids,
        topk_weights if miss_tolerance > 0.0 else None,
        routing_table,
        *outputs,
        layer,
        1 if routing_table is None else len(routing_table),
        len(state.key_of),
        float(miss_tolerance),
        L=num_layers,
        E=num_experts,
        K=topk_ids.shape[1],
        PAIRS=topk_ids.numel(),
        DEMAND_STRIDE=state.demand_key.shape[1],
        GUESS_STRIDE=state.guesses.shape[1],
        F=state.queue_capacity,
        IS_LFU=eviction == "lfu",
        BLOCK_P=block_p,
        BLOCK_G=block_g,
        BLOCK_E=_table_size(num_experts, num_warps),
        **_refill_tiles(state.queue_capacity, num_warps),
        WINDOW=WINDOW,
        num_warps=num_warps,
        **launch_options(topk_ids.device),
    )


@triton.jit(do_not_specialize=["layer", "distance", "num_routed", "table_steps", "num_slots"])
def _plan_prefetch_kernel(
    state,  # PlannerState
    ids_ptr,  # [T, M]
    table_ptr,  # [table_steps, L, T, M] or None
    layer,
    distance,
    num_routed,
    table_steps,
    num_slots,
    L: tl.constexpr,
    E: tl.constexpr,
    T: tl.constexpr,
    M: tl.constexpr,
    GUESS_STRIDE: tl.constexpr,
    F: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    PAIRS: tl.constexpr = T * M
    CHUNK: tl.constexpr = BLOCK_P if BLOCK_P < WINDOW else WINDOW
    pairs = tl.arange(0, BLOCK_P)
    layers = tl.arange(0, BLOCK_L)
    experts = tl.arange(0, BLOCK_E)
    layer = layer.to(tl.int64)
    await_inputs(PDL)
    release_dependents(PDL)

    if table_ptr is not None:
        ids_ptr = table_row(state, table_ptr, layer, table_steps, L, PAIRS)
    # Three reads, one behind the other: where things are, then what the next victims were, then what they are. Best
    # first: every token's best guess, then every token's second.
    ids = tl.load(ids_ptr + pairs % T * M + pairs // T, mask=pairs < PAIRS, other=-1)
    tick = tl.load(state.header + TICK)
    head = tl.load(state.header + QUEUE_HEAD)
    end = tl.load(state.header + QUEUE_END)
    expert_slots = tl.load(state.slot_of + layer * E + experts, mask=experts < E, other=-1)
    limit = tl.load(state.limit + layer)
    num_guesses = tl.load(state.num_guesses + layer)
    num_pinned = tl.sum(tl.load(state.num_guesses + layers, mask=layers < L, other=0), axis=0)
    prefetched_ptr = state.counters + layer * NUM_COUNTERS + PREFETCHED
    prefetched = tl.load(prefetched_ptr)
    target = tick + distance
    next_slots, next_scores, is_next = read_queue(state, head, end, WINDOW)
    has_guess = tl.load(state.guess + expert_slots, mask=expert_slots >= 0, other=0) != 0
    next_keys, next_guesses, may_go = read_owners(state, next_slots, next_scores, is_next, tick)

    exists = (ids >= 0) & (ids < E)
    keys = layer * E + ids
    table = tl.where(expert_slots >= 0, (expert_slots << 1) | has_guess.to(tl.int32), -1)
    entry = look_up(table, ids, exists)
    is_mapped = entry >= 0
    slots = entry >> 1  # -1 stays -1
    first_at = tl.full([BLOCK_P], BLOCK_P, tl.int32)
    for start in range(0, BLOCK_P, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other_ids = tl.load(ids_ptr + others % T * M + others // T, mask=others < PAIRS, other=-1)
        is_same = ids[:, None] == other_ids[None, :]
        first_at = tl.minimum(first_at, tl.min(tl.where(is_same, others[None, :], BLOCK_P), axis=1))
    is_first = exists & (first_at == pairs)

    # What is there stays, before anything makes room for the rest. All that was read above is read by every warp.
    tl.debug_barrier()
    room = tl.maximum(tl.minimum(num_slots - num_routed - num_pinned, GUESS_STRIDE - num_guesses), 0)
    is_unpinned = is_first & is_mapped & ((entry & 1) == 0)
    places = number(is_unpinned)
    is_pinned = is_unpinned & (places < room)
    num_kept = count(is_pinned)
    guesses_ptr = state.guesses + layer * GUESS_STRIDE + num_guesses
    tl.store(state.guess + slots, target, mask=is_pinned)
    tl.store(guesses_ptr + places, slots, mask=is_pinned)
    is_kept = tl.max(((slots[:, None] == next_slots[None, :]) & is_pinned[:, None]).to(tl.int32), axis=0) > 0
    may_go = may_go & (next_guesses == 0) & ~is_kept

    is_new = is_first & ~is_mapped
    ranks = tl.where(is_new, number(is_new), -1)
    wanted = tl.minimum(tl.minimum(count(is_new), room - num_kept), tl.maximum(limit, 0))
    epoch = 2 * target + 1
    new_slots, taken, new_head, end, refills = take_all(
        state,
        next_slots,
        next_keys,
        may_go,
        ranks,
        wanted,
        wanted,
        head,
        end,
        tick,
        epoch,
        0,
        target,
        num_slots,
        F,
        WINDOW,
        BLOCK_S,
        BLOCK_R,
        COLUMNS,
    )
    is_placed = new_slots >= 0
    entries = layer * GUESS_STRIDE + ranks
    tl.store(state.slot_of + keys, new_slots, mask=is_placed)
    tl.store(state.key_of + new_slots, keys.to(tl.int32), mask=is_placed)
    tl.store(state.score + new_slots, FORETOLD, mask=is_placed)
    tl.store(guesses_ptr + num_kept + ranks, new_slots, mask=is_placed)
    tl.store(state.prefetch_key + entries, keys.to(tl.int32), mask=is_placed)
    tl.store(state.prefetch_slot + entries, new_slots, mask=is_placed)
    tl.store(state.prefetch_epoch + entries, epoch, mask=is_placed)
    tl.store(state.prefetch_arrivals + entries, 0, mask=is_placed)
    tl.store(state.prefetch_ready + layer, 0)
    tl.store(state.prefetch_closing + layer, 0)
    tl.store(state.num_prefetch + layer, taken)
    # Its fetch may have begun, and waits for this alone.
    tl.debug_barrier()
    tl.atomic_xchg(state.prefetch_listed + layer, LISTED, sem="release", scope="gpu")
    tl.store(state.num_guesses + layer, num_guesses + num_kept + taken)
    tl.store(prefetched_ptr, prefetched + taken)

    # The queue must serve the next layer's routing and guesses without a refill on the critical path. Mostly what is
    # left of the entries that were read above does.
    enough = num_routed + PAIRS
    found = count(may_go & (head + tl.arange(0, WINDOW) >= new_head))
    position = tl.maximum(new_head, head + WINDOW)
    if (found < enough) & (refills == 0):
        tl.debug_barrier()
        while (position < end) & (found < enough):
            queued, scores, is_queued = read_queue(state, position, end, WINDOW)
            _, pins, is_free = read_owners(state, queued, scores, is_queued, tick)
            found += count(is_free & (pins == 0))
            position += WINDOW
        if found < enough:
            end = refill(state, tick, num_slots, F, BLOCK_S, BLOCK_R, COLUMNS)
            new_head = tl.full((), F, tl.int64)
    tl.store(state.header + QUEUE_END, end)
    # Slots whose copies were cancelled at this tick go first at the next.
    if tl.load(state.header + CANCELLED_AT) == tick:
        num_listed = tl.load(state.header + CANCELLED_COUNT)
        guess = tl.arange(0, BLOCK_G)
        is_listed = guess < num_listed
        row_ptr = state.guesses + tl.load(state.header + CANCELLED_LAYER) * GUESS_STRIDE
        listed = tl.load(row_ptr + guess, mask=is_listed, other=0)
        epochs = tl.load(state.copy_epoch + listed, mask=is_listed, other=1)
        new_head = put_first(state, listed, FREE, epochs == 0, new_head)
        tl.store(state.header + CANCELLED_AT, 0)
    tl.store(state.header + QUEUE_HEAD, new_head)


def plan_prefetch(
    state: PlannerState,
    layer: int,
    ids: torch.Tensor,
    distance: int,
    num_routed: int,
    routing_table: torch.Tensor | None = None,
) -> None:
    """Pin what a later layer is expected to want and list what to copy ahead of it, in one program.

    ids [T, M] int32, each token's best first. `distance`: ticks from the last `plan_demand` to the layer's own, 1 for
    the next layer with experts. What is mapped is pinned first. Then slots are taken for the rest, none that was used
    at the last tick, up to the layer's `limit`, and while all layers' guesses leave `num_routed` slots (T · K) over.
    The layer's prefetch list is new: call it once for a layer and step, and when the previous list has been copied.
    `routing_table` [steps, L, T, M] int32 takes the place of ids, by header's STEP modulo steps.

    prefetch_listed of the layer is LISTED once the list is written, for a fetch that begins beside this launch.
    """
    check_prefetch(state, layer, ids, distance, num_routed, routing_table)
    num_layers, num_experts = state.slot_of.shape
    _plan_prefetch_kernel[(1,)](
        state,
        ids,
        routing_table,
        layer,
        distance,
        num_routed,
        1 if routing_table is None else len(routing_table),
        len(state.key_of),
        L=num_layers,
        E=num_experts,
        T=ids.shape[0],
        M=ids.shape[1],
        GUESS_STRIDE=state.guesses.shape[1],
        F=state.queue_capacity,
        BLOCK_P=_block(ids.numel()),
        BLOCK_G=_block(state.guesses.shape[1]),
        BLOCK_L=next_power_of_2(num_layers),
        BLOCK_E=_table_size(num_experts, PREFETCH_WARPS),
        **_refill_tiles(state.queue_capacity, PREFETCH_WARPS),
        WINDOW=WINDOW,
        num_warps=PREFETCH_WARPS,
        **launch_options(ids.device),
    )


def _block(count: int) -> int:
    """Lanes for so many ids."""
    return max(8, next_power_of_2(count))


def _table_size(num_experts: int, num_warps: int) -> int:
    """Entries of a table of experts: one for each thread at least, so that no expert's state is read twice."""
    return max(32 * num_warps, next_power_of_2(num_experts))


def _refill_tiles(capacity: int, num_warps: int) -> dict[str, int]:
    """What `refill` handles at a time."""
    threads = 32 * num_warps
    return {
        "BLOCK_S": STATES_PER_THREAD * threads,
        "BLOCK_R": RANKS_PER_THREAD * threads,
        "COLUMNS": max(1, COMPARISONS_PER_THREAD * threads // (2 * capacity)),
    }
