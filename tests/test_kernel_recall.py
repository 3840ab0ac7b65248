"""`count_recall` against its reference, to the bit."""

from __future__ import annotations

import pytest
import torch
from kernel_testing import DEVICE, KERNEL_MARKS, generator

from tritonmoe_kernels.recall import count_recall
from tritonmoe_kernels.references import count_recall_ref

pytestmark = KERNEL_MARKS


@pytest.mark.parametrize(("tokens", "top_k", "foretold"), [(1, 1, 1), (1, 8, 10), (4, 2, 3), (16, 8, 8)])
def test_equals_reference(tokens: int, top_k: int, foretold: int) -> None:
    random = generator(tokens)
    counts, expected = (torch.full((5,), 7, dtype=torch.int64, device=DEVICE) for _ in range(2))
    for step in range(3):
        order = torch.rand(2, tokens, 32, generator=random).argsort(-1).int()
        guesses, ids = order[0, :, :foretold].contiguous().to(DEVICE), order[1, :, :top_k].contiguous().to(DEVICE)
        if step == 2:
            guesses[0] = -1
        weights = torch.rand(tokens, top_k, generator=random).to(DEVICE)
        count_recall(guesses, ids, weights, counts)
        count_recall_ref(guesses, ids, weights, expected)
    assert counts.equal(expected)
    assert counts[0] == 7 + (3 * tokens - 1) * foretold
    assert counts[2] == 7 + (3 * tokens - 1) * top_k
    assert 7 <= counts[1] <= counts[2]


def test_everything_foretold() -> None:
    ids = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=DEVICE)
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]], device=DEVICE)
    counts = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    count_recall(ids.flip(1).contiguous(), ids, weights, counts)
    assert counts.tolist() == [4, 4, 4, 2 << 30, 2 << 30]
