"""Attention over the KV cache: one query per sequence (decode) or many (prefill), grouped heads, windows, sinks.

Decode is memory bound: 2·kv_heads·D values per cached position (4 heads of 128 in bf16: 2 KB; 33.5 MB at 16k, 7.8 us at
4.3 TB/s). All query heads of a kv head share a program, padded to the 16 rows of a matrix instruction, so each entry is
read once. The positions are cut into blocks of BLOCK_L; split s of NUM_SPLITS takes blocks s, s + NUM_SPLITS, … and
leaves its softmax partials (maximum, sum, accumulator), which a second launch merges in the order of the splits. The
number of splits depends on batch and heads only, lengths are read from device memory, so one captured
graph serves every position; dealing blocks out in turn keeps the splits even at every length, and the order of
additions the same.

Prefill is compute bound: 4·D FLOPs per head and visible (query, entry). A program takes BLOCK_M queries of one head,
walks the blocks of entries that any of them sees with a running softmax, and skips the rest (causality, window). Tiles
that see most are launched first.

Entries that a query may not see are not loaded in decode; in prefill only entries within the tile's range are. So what
lies beyond the lengths does not matter, even NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.checks import FLOATS, check_tensor
from tritonmoe_kernels.dependent_launch import (
    await_inputs,
    launch_options,
    release_dependents,
)
from tritonmoe_kernels.launch_table import launch_config
from tritonmoe_kernels.tiles import cdiv, next_power_of_2

MAX_HEAD_DIM = 256
MAX_SPLITS = 128
MERGED_DIMS = 32  # of a head by one program of the merge: more programs hide its latency
LOG2_E = tl.constexpr(1.4426950408889634)  # softmax in powers of two: exp(x) = exp2(x · log2 e)


def decode_splits(batch: int, kv_heads: int, window: int | None, launch: dict[str, int]) -> int:
    """Splits per kv head, a power of two: enough programs to fill the GPU, no more than blocks of a window.

    The cache's capacity does not matter, so that a sequence gives the same bits in a larger one.
    """
    wanted = min(MAX_SPLITS, next_power_of_2(cdiv(launch["programs"], max(1, batch * kv_heads))))
    if window is None:
        return wanted
    return min(wanted, next_power_of_2(cdiv(window, launch["block_l"]) + 1))


def decode_workspace_size(q: torch.Tensor, keys: torch.Tensor, window: int | None = None) -> int:
    """float32 values that `attention_decode` needs as workspace for these shapes."""
    batch, heads, head_dim = q.shape
    launch = launch_config("attention_decode", q.dtype, (_block_d(head_dim),), batch, q.device)
    return batch * heads * decode_splits(batch, keys.shape[1], window, launch) * (head_dim + 2)


def _block_d(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


@triton.jit
def _entry_tile(row_ptrs, dims, mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D] from rows of HEAD_DIM values; zero where a row is masked and beyond HEAD_DIM."""
    if HEAD_DIM == BLOCK_D:
        tile = tl.load(row_ptrs[:, None] + dims[None, :], mask=mask[:, None], other=0.0)
    else:
        tile = tl.load(row_ptrs[:, None] + dims[None, :], mask=mask[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def _softmax_step(scores, value_tile, top, total, acc):
    """Fold a block into the running softmax: scores [M, L] in powers of two, -inf where a row does not see an entry."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet: avoid -inf - -inf
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(value_tile.dtype), value_tile, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _attention_decode_kernel(
    acc_ptr,  # [B, heads, NUM_SPLITS, HEAD_DIM] float32
    stats_ptr,  # [B, heads, 2, NUM_SPLITS] float32: maximum, sum
    q_ptr,  # [B, heads, HEAD_DIM]
    keys_ptr,  # [B, kv_heads, capacity, HEAD_DIM]
    values_ptr,
    lengths_ptr,  # [B]
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_vb,
    stride_vh,
    stride_vl,
    capacity,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + batch), capacity).to(tl.int32)  # not written by the launch before
    first = 0  # entry that is visible
    if WINDOW is not None:
        first = tl.maximum(length - WINDOW, 0)
    first_block = first // BLOCK_L
    # The split's first block that is visible: the next one equal to it modulo NUM_SPLITS.
    begin = first_block + (split + NUM_SPLITS - first_block % NUM_SPLITS) % NUM_SPLITS
    group = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    is_head = group < GROUP
    keys_ptr += batch * stride_kb + kv_head * stride_kh
    values_ptr += batch * stride_vb + kv_head * stride_vh
    await_inputs(PDL)
    release_dependents(PDL)
    q_rows = q_ptr + batch * stride_qb + (kv_head * GROUP + group) * stride_qh
    q = _entry_tile(q_rows, dims, is_head, HEAD_DIM, BLOCK_D)
    top = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    for start in range(begin * BLOCK_L, length, NUM_SPLITS * BLOCK_L):
        entries = start + tl.arange(0, BLOCK_L)
        is_visible = (entries >= first) & (entries < length)
        rows = entries.to(tl.int64)
        key_tile = _entry_tile(keys_ptr + rows * stride_kl, dims, is_visible, HEAD_DIM, BLOCK_D)
        value_tile = _entry_tile(values_ptr + rows * stride_vl, dims, is_visible, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q, key_tile.T, input_precision="ieee") * (scale * LOG2_E)
        scores = tl.where(is_visible[None, :], scores, float("-inf"))
        top, total, acc = _softmax_step(scores, value_tile, top, total, acc)
    if begin * BLOCK_L < length:  # a split without entries leaves nothing, and the merge knows
        row = (batch * tl.num_programs(1) + kv_head) * GROUP + group
        tl.store(stats_ptr + row * 2 * NUM_SPLITS + split, top, mask=is_head)
        tl.store(stats_ptr + (row * 2 + 1) * NUM_SPLITS + split, total, mask=is_head)
        acc_ptrs = acc_ptr + (row * NUM_SPLITS + split)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(acc_ptrs, acc, mask=is_head[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def _merge_splits_kernel(
    out_ptr,  # [B · heads, HEAD_DIM]
    acc_ptr,  # [B · heads, NUM_SPLITS, HEAD_DIM] float32
    stats_ptr,  # [B · heads, 2, NUM_SPLITS] float32
    sinks_ptr,  # [heads] float32 or None
    lengths_ptr,  # [B]
    capacity,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    # Which splits had a block follows from the length, so nothing waits for the maxima to be read.
    length = tl.minimum(tl.load(lengths_ptr + row // HEADS), capacity).to(tl.int32)
    first_block = 0
    if WINDOW is not None:
        first_block = tl.maximum(length - WINDOW, 0) // BLOCK_L
    turn = (splits + NUM_SPLITS - first_block % NUM_SPLITS) % NUM_SPLITS
    has_entries = turn < tl.cdiv(length, BLOCK_L) - first_block
    await_inputs(PDL)
    release_dependents(PDL)
    tops = tl.load(stats_ptr + row * 2 * NUM_SPLITS + splits, mask=has_entries, other=float("-inf"))
    sums = tl.load(stats_ptr + (row * 2 + 1) * NUM_SPLITS + splits, mask=has_entries, other=0.0)
    mask = has_entries[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(acc_ptr + (row * NUM_SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    top = tl.max(tops, axis=0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row % HEADS) * LOG2_E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)  # length 0
    weights = tl.exp2(tops - top)
    total = tl.sum(sums * weights, axis=0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - top)
    out = tl.sum(parts * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _attention_prefill_kernel(
    out_ptr,  # [B, T, heads, HEAD_DIM]
    q_ptr,  # [B, T, heads, HEAD_DIM]
    keys_ptr,  # [B, kv_heads, capacity, HEAD_DIM]
    values_ptr,
    positions_ptr,  # [B, T] int64
    sinks_ptr,  # [heads] float32 or None
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_vb,
    stride_vh,
    stride_vl,
    tokens,
    capacity,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the last queries see most: they go first
    batch = tl.program_id(2).to(tl.int64)
    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    is_query = queries < tokens
    positions = tl.load(positions_ptr + batch * tokens + queries, mask=is_query, other=-1)
    positions = tl.minimum(positions, capacity - 1).to(tl.int32)
    end = tl.max(positions, axis=0) + 1
    begin = 0
    if WINDOW is not None:
        lowest = tl.min(tl.where(is_query, positions, end), axis=0)
        begin = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_L * BLOCK_L
    q_rows = q_ptr + batch * stride_qb + queries.to(tl.int64) * stride_qt + head * stride_qh
    q = _entry_tile(q_rows, dims, is_query, HEAD_DIM, BLOCK_D)
    kv_head = (head // GROUP).to(tl.int64)
    keys_ptr += batch * stride_kb + kv_head * stride_kh
    values_ptr += batch * stride_vb + kv_head * stride_vh
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(begin, end, BLOCK_L):
        entries = start + tl.arange(0, BLOCK_L)
        is_entry = entries < end
        rows = entries.to(tl.int64)
        key_tile = _entry_tile(keys_ptr + rows * stride_kl, dims, is_entry, HEAD_DIM, BLOCK_D)
        value_tile = _entry_tile(values_ptr + rows * stride_vl, dims, is_entry, HEAD_DIM, BLOCK_D)
        is_visible = entries[None, :] <= positions[:, None]
        if WINDOW is not None:
            is_visible &= entries[None, :] > positions[:, None] - WINDOW
        scores = tl.dot(q, key_tile.T, input_precision="ieee") * (scale * LOG2_E)
        scores = tl.where(is_visible, scores, float("-inf"))
        top, total, acc = _softmax_step(scores, value_tile, top, total, acc)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head) * LOG2_E
        base = tl.maximum(top, sink)
        decay = tl.exp2(top - base)
        total = total * decay + tl.exp2(sink - base)
        acc *= decay[:, None]
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_rows = out_ptr + ((batch * tokens + queries) * HEADS + head) * HEAD_DIM
    mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_rows[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def attention_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query per sequence over the first `lengths[b]` entries of its cache (the last `window` of them).

    q [B, heads, D]; keys, values [B, kv_heads, L, D] (any strides but the last); lengths [B] int32 or int64, at most L,
    read on the device (a length of 0 gives zeros), and early, so the launch just before this one must not write them;
    sinks [heads] float32. Returns [B, heads · D]. `workspace` holds at least `decode_workspace_size` float32 values.
    """
    _check_inputs(q, keys, values, 3, window, sinks)
    batch, heads, head_dim = q.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    check_tensor("lengths", lengths, (batch,), (torch.int32, torch.int64), q.device)
    if out is None:
        out = q.new_empty(batch, heads * head_dim)
    check_tensor("out", out, (batch, heads * head_dim), (q.dtype,), q.device)
    size = decode_workspace_size(q, keys, window)
    if workspace is None:
        workspace = q.new_empty(size, dtype=torch.float32)
    if workspace.numel() < size:
        raise ValueError(f"workspace has {workspace.numel()} values, expected at least {size}")
    check_tensor("workspace", workspace, workspace.shape, (torch.float32,), q.device)
    if batch == 0:
        return out
    block_d = _block_d(head_dim)
    launch = launch_config("attention_decode", q.dtype, (block_d,), batch, q.device)
    num_splits = decode_splits(batch, kv_heads, window, launch)
    acc = workspace.view(-1)[: batch * heads * num_splits * head_dim]
    stats = workspace.view(-1)[acc.numel() : size]
    _attention_decode_kernel[(num_splits, kv_heads, batch)](
        acc,
        stats,
        q,
        keys,
        values,
        lengths,
        *q.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        capacity,
        scale,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        WINDOW=window,
        NUM_SPLITS=num_splits,
        BLOCK_G=max(16, next_power_of_2(heads // kv_heads)),
        BLOCK_L=launch["block_l"],
        BLOCK_D=block_d,
        num_warps=launch["num_warps"],
        num_stages=launch["num_stages"],
        **launch_options(q.device),
    )
    merge_d = min(block_d, MERGED_DIMS)
    _merge_splits_kernel[(batch * heads, cdiv(head_dim, merge_d))](
        out,
        acc,
        stats,
        sinks,
        lengths,
        capacity,
        HEADS=heads,
        HEAD_DIM=head_dim,
        WINDOW=window,
        NUM_SPLITS=num_splits,
        BLOCK_L=launch["block_l"],
        BLOCK_D=merge_d,
        num_warps=2,
        **launch_options(q.device),
    )
    return out


def attention_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries at `positions`, whose keys and values are in the cache: (b, t) sees entries p - window + 1 … p.

    q [B, T, heads, D]; keys, values [B, kv_heads, L, D] (any strides but the last); positions [B, T] int64, below L; a
    negative position gives zeros; sinks [heads] float32. Returns [B, T, heads · D].
    """
    _check_inputs(q, keys, values, 4, window, sinks)
    batch, tokens, heads, head_dim = q.shape
    check_tensor("positions", positions, (batch, tokens), (torch.int64,), q.device)
    if out is None:
        out = q.new_empty(batch, tokens, heads * head_dim)
    check_tensor("out", out, (batch, tokens, heads * head_dim), (q.dtype,), q.device)
    if batch == 0 or tokens == 0:
        return out
    launch = launch_config("attention_prefill", q.dtype, (_block_d(head_dim),), tokens, q.device)
    _attention_prefill_kernel[(heads, cdiv(tokens, launch["block_m"]), batch)](
        out,
        q,
        keys,
        values,
        positions,
        sinks,
        *q.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        tokens,
        keys.shape[2],
        scale,
        HEADS=heads,
        GROUP=heads // keys.shape[1],
        HEAD_DIM=head_dim,
        WINDOW=window,
        BLOCK_M=launch["block_m"],
        BLOCK_L=launch["block_l"],
        BLOCK_D=_block_d(head_dim),
        num_warps=launch["num_warps"],
        num_stages=launch["num_stages"],
    )
    return out


def _check_inputs(q, keys, values, rank, window, sinks) -> None:
    device = q.device
    if q.dim() != rank or keys.dim() != 4:
        raise ValueError(f"q of {rank} and keys of 4 axes expected, not {list(q.shape)} and {list(keys.shape)}")
    batch, heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    check_tensor("q", q, q.shape, FLOATS, device, strided=rank - 1)
    for name, tensor in (("keys", keys), ("values", values)):
        check_tensor(name, tensor, (batch, kv_heads, capacity, head_dim), (q.dtype,), device, strided=3)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} kv heads")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"heads of {head_dim} values, at most {MAX_HEAD_DIM} are supported")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, not {window}")
    if capacity == 0:
        raise ValueError("the cache has no entries")
    if sinks is not None:
        check_tensor("sinks", sinks, (heads,), (torch.float32,), device)
