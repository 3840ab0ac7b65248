"""Pairs of a token and one of its experts, sorted by slot into blocks of one slot each: what prefill products run over.

Floor: 4,096 tokens with K = 8 and 128 slots read 131 KB and write at most 197 KB, 0.1 us at 4 TB/s. Latency decides:
two launches, and a chain of reads, scans and barriers within each.

Schedule: the first launch counts the pairs of each slot, about 128 programs with a range of slots each. A program reads
all of `slot_ids` and adds to the counts of its range alone, so it can zero them itself, and counts are sums of
integers, the same in any order. A pool of 8,192 slots costs as much as 128. In the second launch program r owns the
r-th slot that occurs, so the grid is the most slots that may occur, not the pool. It finds its slot and the blocks of
lower slots in a scan of all counts, then reads `slot_ids` again, in order, and numbers its pairs with a running sum.
Unused blocks are shared out among the programs.

Prediction at the shape above, on 132 SMs at 1.7 GHz: each launch reads 128 · 131 KB = 17 MB from L2, 3 us at 5.5 TB/s,
next to 8 dependent steps a program: 400 cycles to count (a read and the additions: 1.9 us in all), 700 to place (a scan
over 8 warps, an exchange between threads, stores, some 15 barriers: 3.3 us). With 1 us for the scan of counts (1.5 for
8,192) and 1.5 us a launch: 10 us. An expert of every token adds 4,096 times to one address: 2.4 us more if L2 does one
a cycle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.checks import check_tensor
from tritonmoe_kernels.tiles import cdiv, next_power_of_2

COUNT_PROGRAMS = 128  # about one per SM: each reads all of slot_ids
BLOCK_PAIRS = 4096  # read at a time: 16 a thread, all in flight
BLOCK_SLOTS = 2048  # counts read at a time, at most
NUM_WARPS = 8


class SortedPairs(NamedTuple):
    """Pairs `t · K + k` grouped by slot, each slot's padded to whole blocks of `block_m`.

    Slots (2, 0, 2, -1, 2) with block_m = 2 become pairs (1, P, 0, 2, 4, P, …), P = 5 being padding, and
    block_slots (0, 2, 2, -1, …): a pair whose expert is absent is in no block, and unused blocks have slot -1.
    """

    pairs: torch.Tensor  # [blocks · block_m] int32
    block_slots: torch.Tensor  # [blocks] int32
    block_m: int


@triton.jit
def _count_pairs_kernel(
    counts_ptr,  # [S]
    slot_ids_ptr,  # [T · K]
    num_pairs,
    num_slots,
    SLOTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    first = tl.program_id(0) * SLOTS
    end = tl.minimum(first + SLOTS, num_slots)
    own = first + tl.arange(0, SLOTS)
    tl.store(counts_ptr + own, 0, mask=own < num_slots)
    tl.debug_barrier()  # no other program touches these counts, but another warp may add before this one has zeroed
    for start in range(0, num_pairs, BLOCK_PAIRS):
        # Called scattered, pairs are loaded one a lane, as the additions want them: threads need not exchange anything.
        pairs = tl.max_contiguous(start + tl.arange(0, BLOCK_PAIRS), 1)
        slots = tl.load(slot_ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        tl.atomic_add(counts_ptr + slots, 1, mask=(slots >= first) & (slots < end), sem="relaxed")


@triton.jit
def _find_slot(counts_ptr, rank, num_slots, BLOCK_M: tl.constexpr, BLOCK_SLOTS: tl.constexpr):
    """(slot, its pairs, blocks of lower slots, blocks of all programs' slots) of the occurring slot number `rank`.

    The count of pairs is 0 if fewer slots occur.
    """
    lanes = tl.arange(0, BLOCK_SLOTS)
    own_slot = tl.zeros([BLOCK_SLOTS], dtype=tl.int32)
    own_count = tl.zeros([BLOCK_SLOTS], dtype=tl.int32)
    lower_blocks = tl.zeros([BLOCK_SLOTS], dtype=tl.int32)
    used_blocks = tl.zeros([BLOCK_SLOTS], dtype=tl.int32)
    seen = 0
    for start in range(0, num_slots, BLOCK_SLOTS):
        slots = start + lanes
        counts = tl.load(counts_ptr + slots, mask=slots < num_slots, other=0)
        occurs = (counts > 0).to(tl.int32)
        ranks = seen + tl.cumsum(occurs, axis=0) - occurs
        blocks = (counts + BLOCK_M - 1) // BLOCK_M
        is_own = (counts > 0) & (ranks == rank)
        own_slot = tl.where(is_own, slots, own_slot)
        own_count = tl.where(is_own, counts, own_count)
        lower_blocks += tl.where(ranks < rank, blocks, 0)
        used_blocks += tl.where(ranks < tl.num_programs(0), blocks, 0)  # there is no program for slots beyond
        seen += tl.sum(occurs, axis=0)
    return (
        tl.sum(own_slot, axis=0),
        tl.sum(own_count, axis=0),
        tl.sum(lower_blocks, axis=0),
        tl.sum(used_blocks, axis=0),
    )


@triton.jit
def _place_pairs_kernel(
    pairs_ptr,  # [blocks · BLOCK_M]
    block_slots_ptr,  # [blocks]
    counts_ptr,  # [S]
    slot_ids_ptr,  # [T · K]
    num_pairs,
    num_slots,
    num_blocks,
    BLOCK_M: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    rank = tl.program_id(0)
    slot, count, first_block, used_blocks = _find_slot(counts_ptr, rank, num_slots, BLOCK_M, BLOCK_SLOTS)
    rows = tl.arange(0, BLOCK_M)
    for block in range(used_blocks + rank, num_blocks, tl.num_programs(0)):
        tl.store(block_slots_ptr + block, -1)
        tl.store(pairs_ptr + block * BLOCK_M + rows, num_pairs)
    if count == 0:
        return
    blocks = (count + BLOCK_M - 1) // BLOCK_M
    for start in range(0, blocks, BLOCK_M):
        tl.store(block_slots_ptr + first_block + start + rows, slot, mask=start + rows < blocks)
    pairs_ptr += first_block * BLOCK_M
    tl.store(pairs_ptr + count + rows, num_pairs, mask=count + rows < blocks * BLOCK_M)
    placed = 0
    lanes = tl.arange(0, BLOCK_PAIRS)
    slots = tl.load(slot_ids_ptr + lanes, mask=lanes < num_pairs, other=-1)
    for start in range(0, num_pairs, BLOCK_PAIRS):
        is_own = slots == slot
        pairs = start + lanes
        later = pairs + BLOCK_PAIRS  # asked for before the scan, whose barriers would hold the read back
        slots = tl.load(slot_ids_ptr + later, mask=later < num_pairs, other=-1)
        places = placed + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        # Wide here so that threads exchange places and not addresses to store as the compiler lays it out.
        tl.store(pairs_ptr + places.to(tl.int64), pairs, mask=is_own)
        placed += tl.sum(is_own.to(tl.int32), axis=0)


def sort_tokens(slot_ids: torch.Tensor, num_slots: int, block_m: int, num_experts: int | None = None) -> SortedPairs:
    """slot_ids [T, K] int32, any T -> pairs sorted by slot, stable within one, without waiting for the device.

    Ids that are no slot (-1 where an expert is absent) are in no block. `block_m` is a power of two. `num_experts`
    bounds the distinct slots in `slot_ids` where that is known (a layer's experts in a pool shared by all layers): the
    number of blocks is the most that bound allows, whatever the slots, and so is the time. More distinct slots than
    that is the caller's mistake: pairs of the highest are dropped, as if absent, so that `pairs` holds fewer than
    `slot_ids` has slots; nothing else is lost and nothing outside the result is written. Raises ValueError for a wrong
    argument.
    """
    distinct, num_blocks = _sizes(slot_ids, num_slots, block_m, num_experts)
    device, num_pairs = slot_ids.device, slot_ids.numel()
    pairs = torch.empty(num_blocks * block_m, dtype=torch.int32, device=device)
    block_slots = torch.empty(num_blocks, dtype=torch.int32, device=device)
    if not num_pairs:
        return SortedPairs(pairs, block_slots, block_m)
    counts = torch.empty(num_slots, dtype=torch.int32, device=device)
    range_slots = next_power_of_2(cdiv(num_slots, COUNT_PROGRAMS))
    _count_pairs_kernel[(cdiv(num_slots, range_slots),)](
        counts,
        slot_ids,
        num_pairs,
        num_slots,
        SLOTS=range_slots,
        BLOCK_PAIRS=BLOCK_PAIRS,
        num_warps=NUM_WARPS,
    )
    _place_pairs_kernel[(distinct,)](
        pairs,
        block_slots,
        counts,
        slot_ids,
        num_pairs,
        num_slots,
        num_blocks,
        BLOCK_M=block_m,
        BLOCK_SLOTS=min(BLOCK_SLOTS, next_power_of_2(num_slots)),
        BLOCK_PAIRS=BLOCK_PAIRS,
        num_warps=NUM_WARPS,
    )
    return SortedPairs(pairs, block_slots, block_m)


def sort_tokens_ref(
    slot_ids: torch.Tensor, num_slots: int, block_m: int, num_experts: int | None = None
) -> SortedPairs:
    """What `sort_tokens` computes, slot after slot; it waits for the device."""
    distinct, num_blocks = _sizes(slot_ids, num_slots, block_m, num_experts)
    flat = slot_ids.flatten()
    pairs = torch.full((num_blocks * block_m,), len(flat), dtype=torch.int32, device=slot_ids.device)
    block_slots = torch.full((num_blocks,), -1, dtype=torch.int32, device=slot_ids.device)
    block = 0
    for slot in flat[(flat >= 0) & (flat < num_slots)].unique()[:distinct].tolist():
        own = torch.nonzero(flat == slot).flatten().int()
        end = block + cdiv(len(own), block_m)
        block_slots[block:end] = slot
        pairs[block * block_m : block * block_m + len(own)] = own
        block = end
    return SortedPairs(pairs, block_slots, block_m)


def _sizes(slot_ids: torch.Tensor, num_slots: int, block_m: int, num_experts: int | None) -> tuple[int, int]:
    """(most distinct slots, most blocks): each of those slots may have one pair more than whole blocks."""
    check_tensor("slot_ids", slot_ids, (None, None), (torch.int32,), slot_ids.device)
    for name, value in (("num_slots", num_slots), ("num_experts", num_experts)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    if block_m < 1 or block_m & (block_m - 1):
        raise ValueError(f"block_m is {block_m}, expected a power of two")
    num_pairs = slot_ids.numel()
    distinct = min(num_pairs, num_slots, num_slots if num_experts is None else num_experts)
    return distinct, (num_pairs + distinct * (block_m - 1)) // block_m
