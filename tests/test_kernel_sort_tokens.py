"""Pairs sorted by slot: equal to the reference bit for bit, every element written and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_testing import DEVICE, KERNEL_MARKS, ON_GPU, generator

from tritonmoe_kernels.sort_tokens import BLOCK_PAIRS, BLOCK_SLOTS, SortedPairs, sort_tokens, sort_tokens_ref

pytestmark = KERNEL_MARKS

POISON = -(2**30)
GUARD = 4096  # elements on either side of a buffer


@pytest.fixture(autouse=True)
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, int]]:
    """Results and workspace are poisoned and lie between guards: (whole buffer, size of what the launcher got)."""
    made: list[tuple[torch.Tensor, int]] = []

    def guarded(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append((torch.full((size + 2 * GUARD,), POISON, dtype=dtype, device=device), size))
        return made[-1][0][GUARD : GUARD + size]

    monkeypatch.setitem(sort_tokens.__globals__, "torch", GuardedTorch(guarded))
    return made


class GuardedTorch:
    """torch, but for `empty`."""

    def __init__(self, empty: Callable[..., torch.Tensor]) -> None:
        self.empty = empty

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def random_slots(tokens: int, top_k: int, chosen: list[int], seed: int = 0) -> torch.Tensor:
    """Any of `chosen` for every pair."""
    picks = torch.randint(len(chosen), (tokens, top_k), generator=generator(seed))
    return torch.tensor(chosen, dtype=torch.int32)[picks].to(DEVICE)


def check(slot_ids: torch.Tensor, num_slots: int, block_m: int, num_experts: int | None = None) -> SortedPairs:
    result = sort_tokens(slot_ids, num_slots, block_m, num_experts)
    expected = sort_tokens_ref(slot_ids, num_slots, block_m, num_experts)
    assert result.pairs.dtype == result.block_slots.dtype == torch.int32
    assert result.block_slots.equal(expected.block_slots)
    assert result.pairs.equal(expected.pairs)
    assert result.block_m == block_m
    return result


def assert_guards_stand(buffers: list[tuple[torch.Tensor, int]]) -> None:
    assert buffers
    for buffer, size in buffers:
        assert (buffer[:GUARD] == POISON).all()
        assert (buffer[GUARD + size :] == POISON).all()
        assert (buffer[GUARD : GUARD + size] != POISON).all()


def placed(result: SortedPairs, slot_ids: torch.Tensor) -> int:
    return int((result.pairs < slot_ids.numel()).sum())


@pytest.mark.parametrize("sort", [sort_tokens, sort_tokens_ref])
def test_example(sort: Callable[..., SortedPairs]) -> None:
    blocks = sort(torch.tensor([[2, 0, 2, -1, 2]], dtype=torch.int32, device=DEVICE), num_slots=4, block_m=2)
    assert blocks.pairs.tolist() == [1, 5, 0, 2, 4, 5, 5, 5]
    assert blocks.block_slots.tolist() == [0, 2, 2, -1]


@pytest.mark.parametrize("num_experts", [None, 5])
@pytest.mark.parametrize("sort", [sort_tokens, sort_tokens_ref])
def test_places_every_pair_once_and_in_order(sort: Callable[..., SortedPairs], num_experts: int | None) -> None:
    slot_ids = random_slots(50, 4, [-1, 3, 4, 17, 30, 31])
    blocks = sort(slot_ids, 32, 16, num_experts)
    flat, seen = slot_ids.flatten(), []
    for pairs, slot in zip(blocks.pairs.view(-1, 16), blocks.block_slots.tolist(), strict=True):
        is_pair = pairs < 200
        assert (flat[pairs[is_pair]] == slot).all()
        assert (pairs[~is_pair] == 200).all()
        assert is_pair.any() or slot == -1
        seen += pairs[is_pair].tolist()
    order = flat.long().argsort(stable=True)
    assert seen == order[flat[order] >= 0].tolist()


@pytest.mark.parametrize("block_m", [32, 128])
@pytest.mark.parametrize("tokens", [0, 1, 7, 33, 300])
@pytest.mark.parametrize(("num_slots", "chosen"), [(3, [0, 1, 2]), (10, [-1, 9, 4, 0]), (300, [299, 128, 2, -1, 127])])
def test_equals_reference(
    num_slots: int, chosen: list[int], tokens: int, block_m: int, buffers: list[tuple[torch.Tensor, int]]
) -> None:
    slot_ids = random_slots(tokens, 3, chosen, seed=tokens)
    for num_experts in (None, len(chosen)):
        check(slot_ids, num_slots, block_m, num_experts)
    assert_guards_stand(buffers)


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(seed: int, buffers: list[tuple[torch.Tensor, int]]) -> None:
    tokens, top_k, num_slots, log_block, occurring = (
        int(torch.randint(low, high, (), generator=generator(5 * seed + place)))
        for place, (low, high) in enumerate([(1, 40), (1, 9), (1, 200), (0, 6), (1, 12)])
    )
    slots = torch.randperm(num_slots, generator=generator(seed))[:occurring].tolist()
    check(random_slots(tokens, top_k, [-1, *slots], seed), num_slots, 2**log_block, len(slots))
    assert_guards_stand(buffers)


@pytest.mark.parametrize("slot", [-1, 0, 6])
@pytest.mark.parametrize("shape", [(1, 1), (8, 4), (11, 3)])  # one pair, a whole block, one more than whole blocks
def test_every_pair_in_one_slot_or_absent(
    shape: tuple[int, int], slot: int, buffers: list[tuple[torch.Tensor, int]]
) -> None:
    slot_ids = torch.full(shape, slot, dtype=torch.int32, device=DEVICE)
    for num_experts in (None, 1):
        result = check(slot_ids, 7, 32, num_experts)
        assert placed(result, slot_ids) == (slot_ids.numel() if slot >= 0 else 0)
    assert_guards_stand(buffers)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_no_pairs(shape: tuple[int, int]) -> None:
    result = check(torch.empty(shape, dtype=torch.int32, device=DEVICE), 8192, 64, 128)
    assert result.pairs.shape == result.block_slots.shape == (0,)


def test_more_pairs_and_slots_than_are_read_at_a_time(buffers: list[tuple[torch.Tensor, int]]) -> None:
    num_slots = 2 * BLOCK_SLOTS + 5
    chosen = [-1, 0, 1, BLOCK_SLOTS - 1, BLOCK_SLOTS, 2 * BLOCK_SLOTS, num_slots - 1]
    slot_ids = random_slots(BLOCK_PAIRS // 2 + 1, 2, chosen)
    check(slot_ids, num_slots, 64, len(chosen) - 1)
    assert_guards_stand(buffers)


def test_more_blocks_in_a_slot_than_rows_in_a_block() -> None:
    check(random_slots(30, 2, [1, 2]), 4, 4)


def test_ids_beyond_the_slots_are_absent(buffers: list[tuple[torch.Tensor, int]]) -> None:
    slot_ids = random_slots(20, 2, [-(2**31), -7, -1, 0, 129, 130, 131, 2**31 - 1])
    check(slot_ids, 130, 16)  # counted in ranges of two slots
    check(slot_ids, 129, 16)
    assert_guards_stand(buffers)


def test_bound_is_enough() -> None:
    worst = torch.arange(6, dtype=torch.int32, device=DEVICE).view(6, 1)  # each has one pair more than whole blocks
    assert check(worst, 6, 4).block_slots.tolist() == [0, 1, 2, 3, 4, 5]
    for num_experts in (6, 7, 100):
        assert check(worst, 8192, 4, num_experts).block_slots.tolist() == [0, 1, 2, 3, 4, 5]


def test_too_low_a_bound_drops_the_highest_slots_and_writes_nothing_outside(
    buffers: list[tuple[torch.Tensor, int]],
) -> None:
    slot_ids = torch.tensor([[5, 3, 0], [3, 1, 5], [-1, 4, 0]], dtype=torch.int32, device=DEVICE)
    result = check(slot_ids, 6, 4, num_experts=2)
    assert result.block_slots.tolist() == [0, 1, -1]
    assert result.pairs.tolist() == [2, 8, 9, 9, 4, 9, 9, 9, 9, 9, 9, 9]
    assert placed(result, slot_ids) < int((slot_ids >= 0).sum())  # which is how it shows
    check(torch.arange(200, dtype=torch.int32, device=DEVICE).view(100, 2), 200, 32, num_experts=3)
    assert_guards_stand(buffers)


def test_refusals() -> None:
    slot_ids = random_slots(4, 2, [0, 1])
    refused = [
        ((slot_ids.flatten(), 2, 32), "slot_ids has shape"),
        ((slot_ids.long(), 2, 32), "slot_ids is torch.int64"),
        ((slot_ids.T, 2, 32), "slot_ids is not contiguous"),
        ((slot_ids, 0, 32), "num_slots is 0"),
        ((slot_ids, 2, 32, 0), "num_experts is 0"),
        ((slot_ids, 2, 0), "block_m is 0"),
        ((slot_ids, 2, 48), "block_m is 48, expected a power of two"),
    ]
    for sort in (sort_tokens, sort_tokens_ref):
        for arguments, message in refused:
            with pytest.raises(ValueError, match=message):
                sort(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("block_m", [32, 64, 128])
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_slots", "num_experts"),
    [(17, 8, 128, None), (4096, 8, 128, None), (4096, 8, 8192, 128), (4096, 10, 8192, 512), (300, 4, 8191, None)],
)
def test_full_size(
    tokens: int,
    top_k: int,
    num_slots: int,
    num_experts: int | None,
    block_m: int,
    buffers: list[tuple[torch.Tensor, int]],
) -> None:
    experts = torch.randperm(num_slots, generator=generator())[: num_experts or num_slots]
    slot_ids = random_slots(tokens, top_k, experts.tolist())
    slot_ids[:, 0] = int(experts[0])  # an expert of every token
    slot_ids[1::5, 1:] = -1
    first = check(slot_ids, num_slots, block_m, num_experts)
    assert sort_tokens(slot_ids, num_slots, block_m, num_experts).pairs.equal(first.pairs)
    assert_guards_stand(buffers)


@pytest.mark.gpu
def test_captured_sort_reads_slots_from_memory() -> None:
    assert ON_GPU
    slot_ids = random_slots(300, 8, list(range(0, 8192, 64)))
    sort_tokens(slot_ids, 8192, 64, 128)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = sort_tokens(slot_ids, 8192, 64, 128)
    slot_ids.copy_(slot_ids.flip(0) + 5)
    graph.replay()
    expected = sort_tokens_ref(slot_ids, 8192, 64, 128)
    assert result.pairs.equal(expected.pairs)
    assert result.block_slots.equal(expected.block_slots)
