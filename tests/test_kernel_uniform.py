"""`uniform` against its reference and against the engine's function of one seed and one position: equal bits."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_testing import DEVICE, KERNEL_MARKS, poisoned

from tritonmoe.generation import sampling
from tritonmoe_kernels.uniform import uniform, uniform_ref

pytestmark = KERNEL_MARKS

SEEDS = [0, 1, 7, 123456789, 2**31 - 1, 2**31, 2**32 - 1, 2**32, (5 << 32) + 17, 2**62 + 3, 2**63 - 1]
POSITIONS = [0, 1, 2, 4095, 2**16, 2**24 + 1, 2**31 - 1, 2**31]


def int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def assert_equal_bits(seeds: list[int], positions: list[int]) -> None:
    out = poisoned(len(seeds), dtype=torch.float32)
    assert uniform(int64(seeds), int64(positions), out) is out
    expected = [sampling.uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    assert out.tolist() == expected
    assert uniform_ref(int64(seeds), int64(positions)).tolist() == expected


def test_edges() -> None:
    pairs = [(seed, position) for seed in SEEDS for position in POSITIONS]
    assert_equal_bits(*map(list, zip(*pairs, strict=True)))


@pytest.mark.parametrize("batch", [0, 1, 7, 33, 300])
def test_any_batch(batch: int) -> None:
    chance = random.Random(batch)
    seeds = [chance.randrange(2**63) for _ in range(batch)]
    assert_equal_bits(seeds, [chance.randrange(2**31 + 1) for _ in range(batch)])


def test_known_answer() -> None:
    """Random123's first word of Philox-4x32-10 for zero key and counter."""
    for function in (uniform, uniform_ref):
        assert function(int64([0]), int64([0])).item() == pytest.approx(0x6627E8D5 * 2.0**-31, rel=1e-7)


REFUSED = {
    "seeds is torch.int32": {"seeds": int64([0, 0]).int()},
    "seeds has shape": {"seeds": int64([0, 0])[:, None]},
    "positions has shape": {"positions": int64([0, 0, 0])},
    "positions is torch.int32": {"positions": int64([0, 0]).int()},
    "positions is not contiguous": {"positions": int64([0, 0, 0, 0])[::2]},
    "out is torch.float64": {"out": int64([0, 0]).double()},
    "out has shape": {"out": int64([0]).float()},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    given = {"seeds": int64([0, 0]), "positions": int64([0, 0])} | REFUSED[message]
    for function in (uniform, uniform_ref):
        with pytest.raises(ValueError, match=message):
            function(**given)
