"""One random number a row, from that row's seed and position: Philox-4x32-10 as `tl.rand` computes it.

Floor: 20 bytes a row, so one launch's latency. It is a kernel so that a captured decode step can draw without the host;
in torch operations the ten rounds would be a hundred launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.checks import check_tensor
from tritonmoe_kernels.tiles import cdiv

BLOCK = 128
KEY_STEP = (0x9E3779B9, 0xBB67AE85)
MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
WORD = 0xFFFFFFFF
SCALE = 4.6566127342e-10  # just below 2^-31, so that 1 is never drawn


@triton.jit
def _uniform_kernel(
    seeds_ptr,  # [B] int64
    positions_ptr,  # [B] int64
    out_ptr,  # [B] float32
    batch,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < batch
    seeds = tl.load(seeds_ptr + rows, mask=mask, other=0)
    # A counter of 32 bits: Triton would make another generator of one with 64.
    positions = tl.load(positions_ptr + rows, mask=mask, other=0).to(tl.uint32)
    tl.store(out_ptr + rows, tl.rand(seeds, positions), mask=mask)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Numbers in [0, 1), [B] float32: row b depends on seeds[b] and positions[b] (both int64, not negative) alone.

    The 64 bits of the seed are the key, the low 32 of the position the counter.
    """
    out = _check(seeds, positions, out)
    if len(seeds):
        _uniform_kernel[(cdiv(len(seeds), BLOCK),)](seeds, positions, out, len(seeds), BLOCK=BLOCK, num_warps=4)
    return out


def uniform_ref(seeds: torch.Tensor, positions: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """What `uniform` computes, bit for bit. Products wrap in int64, which leaves all of their 64 bits right."""
    out = _check(seeds, positions, out)
    zero = torch.zeros_like(positions)
    counter = (positions & WORD, zero, zero, zero)
    key = (seeds & WORD, (seeds >> 32) & WORD)
    for _ in range(10):
        first, second = MULTIPLIER[0] * counter[0], MULTIPLIER[1] * counter[2]
        high0, low0 = (first >> 32) & WORD, first & WORD
        high1, low1 = (second >> 32) & WORD, second & WORD
        counter = (high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0)
        key = ((key[0] + KEY_STEP[0]) & WORD, (key[1] + KEY_STEP[1]) & WORD)
    word = counter[0]
    folded = torch.where(word < 1 << 31, word, WORD - word)  # tl.rand folds the sign of its int32
    return out.copy_(folded.float() * SCALE)


def _check(seeds: torch.Tensor, positions: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    check_tensor("seeds", seeds, (None,), (torch.int64,), seeds.device)
    check_tensor("positions", positions, seeds.shape, (torch.int64,), seeds.device)
    out = torch.empty_like(seeds, dtype=torch.float32) if out is None else out
    check_tensor("out", out, seeds.shape, (torch.float32,), seeds.device)
    return out
