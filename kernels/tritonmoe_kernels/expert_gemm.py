"""Expert products over slots: gate_up + activation, down, and the weighted sum over a token's experts.

Weights are addressed by slot, and which slots is data (`slot_ids`, -1 where an expert is absent: its row of the output
is left as it was, so that hits can run before misses into one buffer). The form and its tiles depend on the number of
tokens, shapes and dtype only, and every sum has a fixed order, so a row comes out bit for bit the same whatever the
slots and whichever other experts are present.

Decode form (T <= 16): memory bound. An expert is 3·H·I weights (9.4 MB at H 2048, I 768 in bf16), so one token with
K = 8 costs 75 MB, 18 us at 4.3 TB/s, in two launches. A program has one (token, expert) pair and a few weight rows, all
of which it asks for at once, down's before gate_up has ended (dependent_launch.py); it keeps a float32 sum per row and
column and adds across threads once. Pairs run fastest over the grid: tokens that share an expert read the same rows at
about the same time, once from memory and then from L2, but each pair does read them. Quantised weights stay packed
until they are in registers (weight_tiles.py), from where MXFP4 can also go to tensor cores (mxfp4_dot.py): in MXFP4 the
same token costs 20 MB, 4.7 us, and one of GPT-OSS, K = 4 of 2880 x 2880, 53 MB, 12.3 us.

Prefill form: pairs are sorted by slot into blocks of BLOCK_M rows of one expert, padded (`sort_tokens`); two launches
of tensor-core tiles, 6·H·I FLOPs a pair (309 GFLOP for 4,096 tokens at the shape above, 0.4 ms at 0.8 PFLOP/s). Gate
and up tiles of the same units share a program, which applies the activation before it stores. Column tiles run fastest
over the grid: rows of a block are read from memory once, weights once for the few blocks of their expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.checks import FLOATS, check_tensor
from tritonmoe_kernels.dependent_launch import await_inputs, launch_options, release_dependents
from tritonmoe_kernels.fetch import READY_WORD, await_word
from tritonmoe_kernels.launch_table import launch_config
from tritonmoe_kernels.mxfp4_dot import dot_columns, dot_form, rows_times_x
from tritonmoe_kernels.quantized import Matrix, QuantizedMatrix
from tritonmoe_kernels.routing import MAX_DECODE_TOKENS
from tritonmoe_kernels.sort_tokens import sort_tokens
from tritonmoe_kernels.tiles import cdiv, next_power_of_2
from tritonmoe_kernels.weight_tiles import (
    WORD_BYTES,
    Operands,
    check_matrix,
    fetch_weights,
    load_columns,
    operands,
    products,
    spread_out,
    step_columns,
    step_of_x,
    tile_rows,
)

EARLY_WARPS = 528  # of a gate_up that runs beside a fetch, which more would slow down
KINDS = ("silu", "swiglu_clamped")
# A single token's experts are read once: they should not push out of L2 what was brought there for the next layer.
SINGLE_TOKEN_EVICTION = "evict_first"
# Tiles for tensor cores are asked for steps ahead by the kernel itself, into registers.
ONE_STAGE = {"num_stages": 1}


@triton.jit
def _activation(gate, up, limit, alpha, KIND: tl.constexpr):
    """`reference.activation` on float32 tiles; NaN stays NaN through the clamps."""
    if KIND == "silu":
        hidden = gate * tl.sigmoid(gate) * up
    else:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        hidden = (up + 1.0) * gate * tl.sigmoid(gate * alpha)
    return hidden


@triton.jit
def _present(slot_ids_ptr, num_pairs, BLOCK_PAIRS: tl.constexpr):
    """Of all pairs: each one's place among those that are there (-1 if it is not), pair and slot in one number, and how
    many are there."""
    pairs = tl.arange(0, BLOCK_PAIRS)
    # From L2: a launch that begins early has no other promise of seeing what was written since L1 was filled.
    slots = tl.load(slot_ids_ptr + pairs, mask=pairs < num_pairs, other=-1, cache_modifier=".cg")
    is_there = (slots >= 0).to(tl.int32)
    places = tl.where(slots >= 0, tl.cumsum(is_there, axis=0) - 1, -1)
    return places, (slots.to(tl.int64) << 32) | pairs, tl.sum(is_there, axis=0)


@triton.jit
def _tile_at(i, places, packed, tiles: tl.constexpr):
    """Of the i-th tile of pairs that are there, each of which has so many: (pair, slot, tile of the pair)."""
    i = tl.full((), i, tl.int32)  # an int under the interpreter
    found = tl.sum(tl.where(places == i // tiles, packed, 0), axis=0)
    return (found & 0x7FFFFFFF).to(tl.int32), found >> 32, i % tiles


@triton.jit(do_not_specialize=["num_pairs", "num_ready", "ready_stride"])
def _gate_up_decode_kernel(
    hidden_ptr,  # [T · K, INTERMEDIATE]
    x_ptr,  # [T, HIDDEN]
    slot_ids_ptr,  # [T · K]
    gate_up,  # Parts of [S, 2 · INTERMEDIATE, HIDDEN]
    bias_ptr,  # [S, 2 · INTERMEDIATE] or None
    strides_ws,
    stride_bs,
    limit,
    alpha,
    num_pairs,  # where few programs share the tiles, or None
    ready_ptr,  # [num_ready] int32 to await instead of the launch before, or None
    num_ready,
    ready_stride,
    BLOCK_PAIRS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    KIND: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    if ready_ptr is None:
        await_inputs(PDL)
        release_dependents(PDL)
    if num_pairs is None:
        pair = tl.program_id(0)
        slot = tl.load(slot_ids_ptr + pair).to(tl.int64)
        if slot >= 0:
            _gate_up_tile(
                hidden_ptr, x_ptr, pair, slot, tl.program_id(1) * BLOCK_N, gate_up, bias_ptr, strides_ws, stride_bs,
                limit, alpha, TOP_K, HIDDEN, INTERMEDIATE, KIND, LAYOUT, BLOCK_N, BLOCK_K, DOT, EVICT,
            )  # fmt: skip
    else:
        tiles: tl.constexpr = (INTERMEDIATE + BLOCK_N - 1) // BLOCK_N
        places, packed, count = _present(slot_ids_ptr, num_pairs, BLOCK_PAIRS)
        if ready_ptr is not None:
            if count > 0:
                for i in range(num_ready):  # whoever says so was on the device before this launch was
                    await_word(ready_ptr + i * ready_stride, READY_WORD)
            release_dependents(PDL)
        for i in range(tl.program_id(0), count * tiles, tl.num_programs(0)):
            pair, slot, tile = _tile_at(i, places, packed, tiles)
            _gate_up_tile(
                hidden_ptr, x_ptr, pair, slot, tile * BLOCK_N, gate_up, bias_ptr, strides_ws, stride_bs,
                limit, alpha, TOP_K, HIDDEN, INTERMEDIATE, KIND, LAYOUT, BLOCK_N, BLOCK_K, DOT, EVICT,
            )  # fmt: skip
        if ready_ptr is not None:  # as launches behind this one expect, which await no other
            await_inputs(PDL)


@triton.jit
def _gate_up_tile(
    hidden_ptr, x_ptr, pair, slot, first, gate_up, bias_ptr, strides_ws, stride_bs, limit, alpha, TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, KIND: tl.constexpr, LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DOT: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Units `first` to `first` + BLOCK_N of one pair's expert."""
    rows = tile_rows(first, INTERMEDIATE, BLOCK_N)
    row_ptr = x_ptr + (pair // TOP_K) * HIDDEN
    if DOT is None:
        gate_sums = tl.zeros([BLOCK_N, BLOCK_K // LAYOUT.chunk], dtype=tl.float32)
        up_sums = tl.zeros([BLOCK_N, BLOCK_K // LAYOUT.chunk], dtype=tl.float32)
        for start in range(0, HIDDEN, BLOCK_K):
            gate_tile = fetch_weights(gate_up, strides_ws, slot, first, rows, start, LAYOUT, HIDDEN, BLOCK_K, EVICT)
            up_tile = fetch_weights(
                gate_up, strides_ws, slot, first + INTERMEDIATE, rows, start, LAYOUT, HIDDEN, BLOCK_K, EVICT
            )
            columns = step_of_x(start, LAYOUT, BLOCK_K)
            x = load_columns(row_ptr + columns, columns, HIDDEN, BLOCK_K, "").to(tl.float32)
            gate_sums += products(gate_tile, x, strides_ws.byte, LAYOUT)
            up_sums += products(up_tile, x, strides_ws.byte, LAYOUT)
        gate = tl.sum(gate_sums, axis=1)
        up = tl.sum(up_sums, axis=1)
    else:  # one tile: the gate rows, then the up rows
        row = tl.arange(0, 2 * BLOCK_N)
        unit = row % BLOCK_N
        if INTERMEDIATE % BLOCK_N != 0:
            unit = tl.minimum(unit, INTERMEDIATE - 1 - first)
        stacked = row // BLOCK_N * INTERMEDIATE + unit
        sums = rows_times_x(
            gate_up, strides_ws, slot, first, stacked, row_ptr, LAYOUT, HIDDEN, BLOCK_K, DOT, EVICT, False
        )
        gate, up = tl.split(sums.reshape(2, BLOCK_N).T)
    if bias_ptr is not None:
        bias_ptr += slot * stride_bs + first
        gate += tl.load(bias_ptr + rows).to(tl.float32)
        up += tl.load(bias_ptr + INTERMEDIATE + rows).to(tl.float32)
    hidden = _activation(gate, up, limit, alpha, KIND)
    units = first + tl.arange(0, BLOCK_N)
    pointers = hidden_ptr + pair * INTERMEDIATE + units
    tl.store(pointers, hidden.to(hidden_ptr.dtype.element_ty), mask=units < INTERMEDIATE)


@triton.jit(do_not_specialize=["num_pairs"])
def _down_decode_kernel(
    out_ptr,  # [T · K, HIDDEN]
    hidden_ptr,  # [T · K, INTERMEDIATE]
    slot_ids_ptr,  # [T · K]
    down,  # Parts of [S, HIDDEN, INTERMEDIATE]
    bias_ptr,  # [S, HIDDEN] or None
    strides_ws,
    stride_bs,
    num_pairs,  # where few programs share the tiles, or None
    BLOCK_PAIRS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    if num_pairs is None:
        pair = tl.program_id(0)
        slot = tl.load(slot_ids_ptr + pair).to(tl.int64)  # written before the last launch, as the slot's weights
        if slot < 0:
            await_inputs(PDL)
            release_dependents(PDL)
            return
        _down_tile(
            out_ptr, hidden_ptr, pair, slot, tl.program_id(1) * BLOCK_N, down, bias_ptr, strides_ws, stride_bs, HIDDEN,
            INTERMEDIATE, LAYOUT, BLOCK_N, BLOCK_K, DOT, EVICT, PDL,
        )  # fmt: skip
    else:
        tiles: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
        places, packed, count = _present(slot_ids_ptr, num_pairs, BLOCK_PAIRS)  # written long before, as above
        await_inputs(PDL)
        release_dependents(PDL)
        for i in range(tl.program_id(0), count * tiles, tl.num_programs(0)):
            pair, slot, tile = _tile_at(i, places, packed, tiles)
            _down_tile(
                out_ptr, hidden_ptr, pair, slot, tile * BLOCK_N, down, bias_ptr, strides_ws, stride_bs,
                HIDDEN, INTERMEDIATE, LAYOUT, BLOCK_N, BLOCK_K, DOT, EVICT, False,
            )  # fmt: skip


@triton.jit
def _down_tile(
    out_ptr, hidden_ptr, pair, slot, first, down, bias_ptr, strides_ws, stride_bs, HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr, LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DOT: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows `first` to `first` + BLOCK_N of one pair's expert; asks for weights before it waits for `hidden`."""
    rows = tile_rows(first, HIDDEN, BLOCK_N)
    row_ptr = hidden_ptr + pair * INTERMEDIATE
    if DOT is None:
        tile = fetch_weights(down, strides_ws, slot, first, rows, 0, LAYOUT, INTERMEDIATE, BLOCK_K, EVICT)
        await_inputs(PDL)
        release_dependents(PDL)
        columns = step_of_x(0, LAYOUT, BLOCK_K)
        hidden = load_columns(row_ptr + columns, columns, INTERMEDIATE, BLOCK_K, "").to(tl.float32)
        sums = products(tile, hidden, strides_ws.byte, LAYOUT)
        for start in range(BLOCK_K, INTERMEDIATE, BLOCK_K):
            tile = fetch_weights(down, strides_ws, slot, first, rows, start, LAYOUT, INTERMEDIATE, BLOCK_K, EVICT)
            columns = step_of_x(start, LAYOUT, BLOCK_K)
            hidden = load_columns(row_ptr + columns, columns, INTERMEDIATE, BLOCK_K, "").to(tl.float32)
            sums += products(tile, hidden, strides_ws.byte, LAYOUT)
        out = tl.sum(sums, axis=1)
    else:
        out = rows_times_x(down, strides_ws, slot, first, rows, row_ptr, LAYOUT, INTERMEDIATE, BLOCK_K, DOT, EVICT, PDL)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + slot * stride_bs + first + rows).to(tl.float32)
    units = first + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + pair * HIDDEN + units, out.to(out_ptr.dtype.element_ty), mask=units < HIDDEN)


@triton.jit
def _gate_up_prefill_kernel(
    hidden_ptr,  # [T · K, INTERMEDIATE]
    x_ptr,  # [T, HIDDEN]
    pairs_ptr,  # [blocks · BLOCK_M]
    block_slots_ptr,  # [blocks]
    gate_up,  # Parts of [S, 2 · INTERMEDIATE, HIDDEN]
    bias_ptr,  # [S, 2 · INTERMEDIATE] or None
    num_pairs,
    strides_ws,
    stride_bs,
    limit,
    alpha,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    KIND: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    column_tiles: tl.constexpr = (INTERMEDIATE + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // column_tiles
    slot = tl.load(block_slots_ptr + block).to(tl.int64)
    if slot < 0:
        return
    pairs = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    is_pair = pairs < num_pairs
    tokens = tl.where(is_pair, pairs // TOP_K, 0).to(tl.int64)  # padding computes token 0, not stored
    first = (tl.program_id(0) % column_tiles) * BLOCK_N
    rows = tile_rows(first, INTERMEDIATE, BLOCK_N)
    row_ptrs = x_ptr + tokens[:, None] * HIDDEN
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        x = load_columns(row_ptrs + columns[None, :], columns[None, :], HIDDEN, BLOCK_K, "")
        gate_tile = fetch_weights(gate_up, strides_ws, slot, first, rows, start, LAYOUT, HIDDEN, BLOCK_K, "")
        up_tile = fetch_weights(
            gate_up, strides_ws, slot, first + INTERMEDIATE, rows, start, LAYOUT, HIDDEN, BLOCK_K, ""
        )
        gate = tl.dot(x, spread_out(gate_tile, strides_ws.byte, LAYOUT, x.dtype).T, gate, input_precision="ieee")
        up = tl.dot(x, spread_out(up_tile, strides_ws.byte, LAYOUT, x.dtype).T, up, input_precision="ieee")
    if bias_ptr is not None:
        bias_ptr += slot * stride_bs + first
        gate += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + INTERMEDIATE + rows).to(tl.float32)[None, :]
    hidden = _activation(gate, up, limit, alpha, KIND)
    units = first + tl.arange(0, BLOCK_N)
    pointers = hidden_ptr + pairs.to(tl.int64)[:, None] * INTERMEDIATE + units[None, :]
    mask = is_pair[:, None] & (units < INTERMEDIATE)[None, :]
    tl.store(pointers, hidden.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _down_prefill_kernel(
    out_ptr,  # [T · K, HIDDEN]
    hidden_ptr,  # [T · K, INTERMEDIATE]
    pairs_ptr,  # [blocks · BLOCK_M]
    block_slots_ptr,  # [blocks]
    down,  # Parts of [S, HIDDEN, INTERMEDIATE]
    bias_ptr,  # [S, HIDDEN] or None
    num_pairs,
    strides_ws,
    stride_bs,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    column_tiles: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // column_tiles
    slot = tl.load(block_slots_ptr + block).to(tl.int64)
    if slot < 0:
        return
    pairs = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    is_pair = pairs < num_pairs
    # Padding computes pair 0 (or what lies in its place), not stored.
    row_ptrs = hidden_ptr + tl.where(is_pair, pairs, 0).to(tl.int64)[:, None] * INTERMEDIATE
    first = (tl.program_id(0) % column_tiles) * BLOCK_N
    rows = tile_rows(first, HIDDEN, BLOCK_N)
    out = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, INTERMEDIATE, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        hidden = load_columns(row_ptrs + columns[None, :], columns[None, :], INTERMEDIATE, BLOCK_K, "")
        tile = fetch_weights(down, strides_ws, slot, first, rows, start, LAYOUT, INTERMEDIATE, BLOCK_K, "")
        out = tl.dot(hidden, spread_out(tile, strides_ws.byte, LAYOUT, hidden.dtype).T, out, input_precision="ieee")
    if bias_ptr is not None:
        out += tl.load(bias_ptr + slot * stride_bs + first + rows).to(tl.float32)[None, :]
    units = first + tl.arange(0, BLOCK_N)
    pointers = out_ptr + pairs.to(tl.int64)[:, None] * HIDDEN + units[None, :]
    mask = is_pair[:, None] & (units < HIDDEN)[None, :]
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _combine_kernel(
    out_ptr,  # [T, HIDDEN]
    expert_out_ptr,  # [T, TOP_K, HIDDEN]
    topk_weights_ptr,  # [T, TOP_K]
    shared_ptr,  # [T, HIDDEN] or None
    residual_ptr,  # [T, HIDDEN] or None
    multiplier,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    await_inputs(PDL)
    release_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < HIDDEN
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        part = tl.load(expert_out_ptr + pair * HIDDEN + columns, mask=mask, other=0.0).to(tl.float32)
        total += part * tl.load(topk_weights_ptr + pair)
    if shared_ptr is not None:
        total += tl.load(shared_ptr + token * HIDDEN + columns, mask=mask, other=0.0).to(tl.float32)
    total *= multiplier
    if residual_ptr is not None:
        total += tl.load(residual_ptr + token * HIDDEN + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


def expert_gemm(
    x: torch.Tensor,
    slot_ids: torch.Tensor,
    gate_up: Matrix,
    down: Matrix,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    kind: str = "silu",
    limit: float = 0.0,
    alpha: float = 0.0,
    out: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    num_experts: int | None = None,
    form: str | None = None,
    programs: int | None = None,
    ready: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run each token through the experts in its slots: [T, K, H], rows of absent experts untouched.

    x [T, H]; slot_ids [T, K] int32, -1 where absent; gate_up [S, 2I, H] (gate rows, then up rows); down [S, H, I];
    biases [S, 2I] and [S, H]. Both matrices may be quantised, in one format. Slots may be any stride apart (records of
    a pool; a multiple of 16 elements, of 64 bytes of codes, keeps loads wide), each matrix is contiguous. `out`
    [T, K, H] (zeros if not given) and the workspace `hidden` [T, K, I] may be passed in. `num_experts` as in
    `sort_tokens`. `form` is "decode" or "prefill", by default decode up to 16 tokens. `programs` is the most a launch
    of the decode form has, where few experts are expected to be present: each looks for what there is to do. By default
    it has one for each tile, thousands in all, whose start takes the device microseconds even if none has work.

    With `programs` (of which gate_up then has no more than make EARLY_WARPS together), `ready` [N] int32 may be the
    words of those `fetch` launches of the same device that bring experts of `slot_ids`, each with gate_up and its bias
    as first part. They must be what this launch depends on, and all else that it reads, slot ids and `x`, be complete
    when the demand among them begins: gate_up is computed while they still copy down.
    """
    _check_experts(x, slot_ids, gate_up, down, gate_up_bias, down_bias, kind)
    tokens, top_k = slot_ids.shape
    hidden = _buffer("hidden", hidden, x, (tokens, top_k, down.shape[2]), zero=False)
    out = _buffer("out", out, x, (tokens, top_k, x.shape[1]), zero=True)
    if form is None:
        form = "decode" if tokens <= MAX_DECODE_TOKENS else "prefill"
    if form not in ("decode", "prefill"):
        raise ValueError(f"form must be 'decode' or 'prefill', not {form!r}")
    if programs is not None and programs < 1:
        raise ValueError(f"programs is {programs}, expected at least 1")
    if ready is not None:
        if programs is None or form != "decode":
            raise ValueError("ready is for the decode form with `programs`")
        check_tensor("ready", ready, (None,), (torch.int32,), x.device, strided=1)
    if tokens == 0 or top_k == 0:
        return out
    if form == "decode":
        _gate_up_decode(x, slot_ids, gate_up, gate_up_bias, kind, limit, alpha, hidden, programs, ready)
        _down_decode(slot_ids, down, down_bias, out, hidden, programs)
    else:
        name = _format_name(gate_up)
        launch = launch_config("expert_prefill", x.dtype, tuple(gate_up.shape[1:]), tokens, x.device, name)
        blocks = sort_tokens(slot_ids, gate_up.shape[0], launch["block_m"], num_experts)
        _prefill(x, blocks, launch, gate_up, down, gate_up_bias, down_bias, kind, limit, alpha, out, hidden)
    return out


def combine(
    expert_out: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    multiplier: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`residual + multiplier · (Σ_k topk_weights[k] · expert_out[k] + shared)`, in float32, rounded once: [T, H].

    expert_out [T, K, H] with every row written; topk_weights [T, K] float32; shared, residual, out [T, H]; out may be
    the residual or the shared tensor itself.
    """
    check_tensor("expert_out", expert_out, (None, None, None), FLOATS, expert_out.device)
    tokens, top_k, hidden_size = expert_out.shape
    check_tensor("topk_weights", topk_weights, (tokens, top_k), (torch.float32,), expert_out.device)
    for name, tensor in (("shared", shared), ("residual", residual), ("out", out)):
        if tensor is not None:
            check_tensor(name, tensor, (tokens, hidden_size), (expert_out.dtype,), expert_out.device)
    if out is None:
        out = expert_out.new_empty(tokens, hidden_size)
    if tokens == 0:
        return out
    # Few tokens: many programs of one warp, 16 bytes of every part per lane; more tokens fill the device anyway.
    block_h, num_warps = (256, 1) if tokens <= MAX_DECODE_TOKENS else (1024, 4)
    _combine_kernel[(tokens, cdiv(hidden_size, block_h))](
        out,
        expert_out,
        topk_weights,
        shared,
        residual,
        multiplier,
        TOP_K=top_k,
        HIDDEN=hidden_size,
        BLOCK_H=block_h,
        num_warps=num_warps,
        **launch_options(expert_out.device),
    )
    return out


def _format_name(matrix: Matrix) -> str | None:
    return matrix.format.name if isinstance(matrix, QuantizedMatrix) else None


class _DecodeLaunch(NamedTuple):
    grid: tuple[int, ...]
    num_pairs: int | None  # where the grid's programs share the tiles
    weights: Operands
    options: dict[str, Any]  # what is compiled in, and how it is launched


def _decode_launch(
    kernel: str, x: torch.Tensor, slot_ids: torch.Tensor, matrix: Matrix, rows: int, columns: int, programs: int | None
) -> _DecodeLaunch:
    """Of a decode form whose tiles divide `rows`, over weights of `columns`."""
    tokens, num_pairs, weights = len(slot_ids), slot_ids.numel(), operands(matrix)
    launch = launch_config(kernel, x.dtype, (rows, columns), tokens, x.device, weights.layout.name)
    tiles, wanted = cdiv(rows, launch["block_n"]), launch["block_k"]
    dot = dot_form(weights.layout, x, launch, columns)
    options = {
        "BLOCK_PAIRS": 1 if programs is None else next_power_of_2(num_pairs),
        "LAYOUT": weights.layout,
        "BLOCK_N": launch["block_n"],
        "BLOCK_K": step_columns(weights.layout, columns, wanted) if dot is None else dot_columns(columns, wanted),
        "DOT": dot,
        "EVICT": SINGLE_TOKEN_EVICTION if tokens == 1 else "",
        "num_warps": launch["num_warps"],
        **({} if dot is None else ONE_STAGE),
        **launch_options(x.device),
    }
    if programs is None:
        return _DecodeLaunch((num_pairs, tiles), None, weights, options)
    return _DecodeLaunch((min(programs, num_pairs * tiles),), num_pairs, weights, options)


def _gate_up_decode(x, slot_ids, gate_up, bias, kind, limit, alpha, hidden, programs, ready) -> None:
    intermediate, hidden_size = hidden.shape[2], x.shape[1]
    launch = _decode_launch("expert_gate_up_decode", x, slot_ids, gate_up, intermediate, hidden_size, programs)
    grid = launch.grid
    if ready is not None:
        grid = (max(1, min(*grid, EARLY_WARPS // launch.options["num_warps"])),)
    _gate_up_decode_kernel[grid](
        hidden,
        x,
        slot_ids,
        launch.weights.parts,
        bias,
        launch.weights.strides,
        0 if bias is None else bias.stride(0),
        limit,
        alpha,
        launch.num_pairs,
        ready,
        0 if ready is None else len(ready),
        0 if ready is None else ready.stride(0),
        TOP_K=slot_ids.shape[1],
        HIDDEN=hidden_size,
        INTERMEDIATE=intermediate,
        KIND=kind,
        **launch.options,
    )


def _down_decode(slot_ids, down, bias, out, hidden, programs) -> None:
    hidden_size, intermediate = down.shape[1:]
    launch = _decode_launch("expert_down_decode", hidden, slot_ids, down, hidden_size, intermediate, programs)
    _down_decode_kernel[launch.grid](
        out,
        hidden,
        slot_ids,
        launch.weights.parts,
        bias,
        launch.weights.strides,
        0 if bias is None else bias.stride(0),
        launch.num_pairs,
        HIDDEN=hidden_size,
        INTERMEDIATE=intermediate,
        **launch.options,
    )


def _prefill(x, blocks, table, gate_up, down, gate_up_bias, down_bias, kind, limit, alpha, out, hidden) -> None:
    num_blocks = len(blocks.block_slots)
    num_pairs, top_k = out.shape[0] * out.shape[1], out.shape[1]
    _, hidden_size, intermediate = down.shape
    launch = table["gate_up"]
    parts, strides, layout = operands(gate_up, WORD_BYTES)
    _gate_up_prefill_kernel[(num_blocks * cdiv(intermediate, launch["block_n"]),)](
        hidden,
        x,
        blocks.pairs,
        blocks.block_slots,
        parts,
        gate_up_bias,
        num_pairs,
        strides,
        0 if gate_up_bias is None else gate_up_bias.stride(0),
        limit,
        alpha,
        TOP_K=top_k,
        HIDDEN=hidden_size,
        INTERMEDIATE=intermediate,
        KIND=kind,
        LAYOUT=layout,
        BLOCK_M=table["block_m"],
        BLOCK_N=launch["block_n"],
        BLOCK_K=launch["block_k"],
        num_warps=launch["num_warps"],
        num_stages=launch["num_stages"],
    )
    launch = table["down"]
    parts, strides, layout = operands(down, WORD_BYTES)
    _down_prefill_kernel[(num_blocks * cdiv(hidden_size, launch["block_n"]),)](
        out,
        hidden,
        blocks.pairs,
        blocks.block_slots,
        parts,
        down_bias,
        num_pairs,
        strides,
        0 if down_bias is None else down_bias.stride(0),
        HIDDEN=hidden_size,
        INTERMEDIATE=intermediate,
        LAYOUT=layout,
        BLOCK_M=table["block_m"],
        BLOCK_N=launch["block_n"],
        BLOCK_K=launch["block_k"],
        num_warps=launch["num_warps"],
        num_stages=launch["num_stages"],
    )


def _check_experts(x, slot_ids, gate_up, down, gate_up_bias, down_bias, kind) -> None:
    if x.dim() != 2 or slot_ids.dim() != 2 or len(gate_up.shape) != 3 or len(down.shape) != 3:
        shapes = [list(tensor.shape) for tensor in (x, slot_ids, gate_up, down)]
        raise ValueError(f"x [T, H], slot_ids [T, K], gate_up [S, 2I, H], down [S, H, I] expected, not {shapes}")
    slots, hidden_size, intermediate = down.shape
    check_tensor("x", x, (None, hidden_size), FLOATS, x.device)
    check_tensor("slot_ids", slot_ids, (len(x), None), (torch.int32,), x.device)
    check_matrix("gate_up", gate_up, (slots, 2 * intermediate, hidden_size), x.dtype, x.device, strided=1)
    check_matrix("down", down, (slots, hidden_size, intermediate), x.dtype, x.device, strided=1)
    if _format_name(gate_up) != _format_name(down):
        raise ValueError(f"gate_up is {_format_name(gate_up)} and down is {_format_name(down)}: one format expected")
    biases = {
        "gate_up_bias": (gate_up_bias, (slots, 2 * intermediate)),
        "down_bias": (down_bias, (slots, hidden_size)),
    }
    for name, (tensor, shape) in biases.items():
        if tensor is not None:
            check_tensor(name, tensor, shape, (x.dtype,), x.device, strided=1)
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, not {kind!r}")


def _buffer(
    name: str, tensor: torch.Tensor | None, like: torch.Tensor, shape: tuple[int, ...], zero: bool
) -> torch.Tensor:
    if tensor is None:
        return like.new_zeros(shape) if zero else like.new_empty(shape)
    check_tensor(name, tensor, shape, (like.dtype,), like.device)
    return tensor
