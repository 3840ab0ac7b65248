"""MXFP4 rows times one vector in bfloat16 on tensor cores: the decode forms where the launch table has `"dot": true`.

`weight_tiles.products` makes a float32 of each code and multiplies it by x, 4.8 instructions a weight. Here two codes
at a time become bfloat16 numbers, and their products are the tensor cores' work. Counted in the assembler's code
(sm_90, triton 3.6 and 3.9, a step of the loop with all that is around the weights), instructions a weight by rows of a
tile and warps: 2.7 at 128 and 4, 2.8 at 64 and 4, 2.9 at 32 and 1; 2.1 of them make the numbers. On an H200 4 experts
of 2880 x 2880 take 22.8 us where 27.8 were, 8 of 768 x 2048 10.4 where 11.9 were (docs/log.md).

The tile. A row of a step has BLOCK_K columns in parts of 128, and what is multiplied is [rows · parts, 128] by
[128, parts]: column p of the second factor is x of part p. Of the result [rows · parts, width] the number of a row's
part p in column p is wanted, the others are by-products: tensor cores have at least 8 columns, or 16, and there is one
x. So a step is as wide as one likes, with few rows.

Order of columns. Tensor cores take the first factor from registers, a thread having two neighbours of every 8 columns.
A thread loads 16 bytes, 32 codes. As sums do not mind the order of columns, those codes are said to lie where the
thread has to have them, and x is brought into that order; no weight moves between threads:

    column 32·chunk + 8·word + 4·half + place  ->  32·word + 8·place + 2·chunk + half

Codes. A nibble `seem` times 2^6 + 2^12, masked, has its sign in bit 15 and the rest in bits 8 to 6: E2M1 · 2^-126 in
bfloat16, zero and the subnormal 0.5 as well. The codes at a place and half a word on are the two halves of one
register. Times 2^(scale - 1) that is the weight, and exact: E2M1 has two significant bits, and 2^-128, the least there
is, is a subnormal number of bfloat16. 2^(scale - 1) is a bfloat16 up to scale 128, weights of 1 to 12. Of a tile that
has larger scales (or 255, not a number) all is done a second time, multiplied by 2^(scale - 128) on top of 2^127;
so the usual tile pays one comparison for 32 weights. Neither way rounds anything but the sum, in the tensor cores'
float32. What belongs to one row decides nothing about the bits of another: both ways make the same numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonmoe_kernels import launch_table
from tritonmoe_kernels.dependent_launch import await_inputs, release_dependents
from tritonmoe_kernels.tiles import cdiv, next_power_of_2
from tritonmoe_kernels.weight_tiles import Layout, fetch_weights, load_columns

PART = 128  # columns: four threads' loads
MOST_COLUMNS = 8 * PART
PART_COLUMNS = tl.constexpr(PART)
LARGEST_SCALE = tl.constexpr(128)


class Dot(NamedTuple):
    """What is compiled in: the products' dtype, warps, and how many columns they have; a step's parts use the first."""

    dtype: str  # bfloat16 on NVIDIA's GPUs; float32 interpreted, without assembler
    warps: int
    width: int
    ahead: int  # steps under way behind the one that is multiplied


def dot_columns(columns: int, wanted: int) -> int:
    """Columns of a step: `wanted`, but no more than there are; whole parts, 8 at most."""
    return max(PART, min(wanted, next_power_of_2(columns), MOST_COLUMNS))


def dot_form(layout: Layout, x: torch.Tensor, launch: dict[str, Any], columns: int) -> Dot | None:
    """How a launch with `"dot": true` multiplies rows of so many columns; None where tensor cores are not asked for or
    cannot do it."""
    if not launch.get("dot") or layout.name != "mxfp4" or x.dtype != torch.bfloat16:
        return None
    architecture = launch_table.architecture(x.device)
    dtype = "float32" if architecture == "cpu" else "bfloat16" if architecture.startswith("sm_") else None
    warps = launch["num_warps"]
    if dtype is None:
        return None
    steps = cdiv(columns, dot_columns(columns, launch["block_k"]))
    # Four warps multiply together on sm_90, and triton 3.6 lets them do it from 16 columns on.
    return Dot(dtype, warps, 16 if warps >= 4 else 8, min(launch.get("ahead", 1), steps))


@triton.jit
def rows_times_x(
    parts, strides, slot, first, rows, x_ptr, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    DOT: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A slot's rows first + rows times x, in float32: [rows]. Asks for weights before it waits for x."""
    queue = _first_steps(parts, strides, slot, first, rows, LAYOUT, COLUMNS, BLOCK_K, DOT, EVICT)
    await_inputs(PDL)
    release_dependents(PDL)
    sums, largest = _accumulate(
        queue, parts, strides, slot, first, rows, x_ptr, LAYOUT, COLUMNS, BLOCK_K, DOT, EVICT, False
    )
    if largest > LARGEST_SCALE:
        queue = _first_steps(parts, strides, slot, first, rows, LAYOUT, COLUMNS, BLOCK_K, DOT, EVICT)
        sums, largest = _accumulate(
            queue, parts, strides, slot, first, rows, x_ptr, LAYOUT, COLUMNS, BLOCK_K, DOT, EVICT, True
        )
    return sums


@triton.jit
def _first_steps(
    parts, strides, slot, first, rows, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    DOT: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Words and scales of the first steps, in turn, in one tuple."""
    AHEAD: tl.constexpr = DOT.ahead
    queue = fetch_weights(parts, strides, slot, first, rows, 0, LAYOUT, COLUMNS, BLOCK_K, EVICT)
    for step in tl.static_range(1, AHEAD):
        queue = queue + fetch_weights(
            parts, strides, slot, first, rows, step * BLOCK_K, LAYOUT, COLUMNS, BLOCK_K, EVICT
        )
    return queue


@triton.jit
def _accumulate(
    queue, parts, strides, slot, first, rows, x_ptr, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, DOT: tl.constexpr, EVICT: tl.constexpr, ANY_SCALE: tl.constexpr,
):  # fmt: skip
    """From the words and scales of the first steps on: sums [rows], and the largest scale there was.

    A step's weights are asked for when the one so many steps before it is multiplied.
    """
    STEPS: tl.constexpr = (COLUMNS + BLOCK_K - 1) // BLOCK_K
    AHEAD: tl.constexpr = DOT.ahead
    PARTS: tl.constexpr = BLOCK_K // PART_COLUMNS
    ROWS: tl.constexpr = rows.shape[0]
    WIDTH: tl.constexpr = DOT.width
    sums = tl.zeros([ROWS * PARTS, WIDTH], dtype=tl.float32)
    largest = queue[1]
    x = _load_x(x_ptr, 0, COLUMNS, BLOCK_K, DOT)
    for step in tl.range(0, STEPS - AHEAD, loop_unroll_factor=max(AHEAD, 2)):
        fetched = fetch_weights(
            parts, strides, slot, first, rows, (step + AHEAD) * BLOCK_K, LAYOUT, COLUMNS, BLOCK_K, EVICT
        )
        next_x = _load_x(x_ptr, (step + 1) * BLOCK_K, COLUMNS, BLOCK_K, DOT)
        sums = _add_products(sums, queue[0], queue[1], x, DOT, ANY_SCALE)
        largest = tl.maximum(largest, queue[1])
        queue = queue[2:] + fetched
        x = next_x
    for step in tl.static_range(STEPS - AHEAD, STEPS):
        words, scales, next_x = queue[0], queue[1], x
        queue = queue[2:]
        if step + 1 < STEPS:
            next_x = _load_x(x_ptr, (step + 1) * BLOCK_K, COLUMNS, BLOCK_K, DOT)
        sums = _add_products(sums, words, scales, x, DOT, ANY_SCALE)
        largest = tl.maximum(largest, scales)
        x = next_x
    part = tl.arange(0, PARTS)[None, :, None]
    own = part == tl.arange(0, WIDTH)[None, None, :]
    sums = _swap_rows(sums, DOT, True).reshape(ROWS, PARTS, WIDTH)
    sums = tl.sum(tl.where(own, sums, 0.0), axis=2)
    return tl.sum(sums, axis=1), tl.max(largest.reshape(ROWS * PARTS * 4).to(tl.int32), axis=0)


@triton.jit
def _load_x(x_ptr, start, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr):
    """x of a step by parts, [width, 128]; where there are fewer parts they come again."""
    WIDTH: tl.constexpr = DOT.width
    part = tl.arange(0, WIDTH) % (BLOCK_K // PART_COLUMNS)
    columns = start + part[:, None] * PART_COLUMNS + tl.arange(0, PART_COLUMNS)[None, :]
    return load_columns(x_ptr + columns, columns, COLUMNS, BLOCK_K, "")


@triton.jit
def _add_products(sums, words, scales, x, DOT: tl.constexpr, ANY_SCALE: tl.constexpr):
    """Words [4, rows, chunks] and scales [rows, chunks] of a step times its x, added to sums [rows · parts, width]."""
    WIDTH: tl.constexpr = DOT.width
    x = x.reshape(WIDTH, 4, 4, 2, 4)  # part, chunk, word, half, place
    x = tl.permute(x, (2, 4, 1, 3, 0)).reshape(PART_COLUMNS, WIDTH)
    tile = _tile(words, scales, DOT, ANY_SCALE)
    if DOT.dtype == "bfloat16":  # no instruction, but the compiler does not look behind it for an order of its own
        tile = tl.inline_asm_elementwise("", "=h,0", [tile], tl.bfloat16, False, 1)
    return tl.dot(tile, x.to(tile.dtype), sums, input_precision="ieee")


@triton.jit
def _tile(words, scales, DOT: tl.constexpr, ANY_SCALE: tl.constexpr):
    """The weights [rows · parts, 128], columns in the order of the tensor cores."""
    CHUNKS: tl.constexpr = scales.shape[0] * scales.shape[1]
    words = tl.permute(words, (1, 2, 0)).reshape(CHUNKS // 4, 16)
    words = _swap_rows(words, DOT, False).reshape(CHUNKS // 4, 4, 4)  # row and part, chunk, word
    scales = _swap_rows(scales.reshape(CHUNKS // 4, 4), DOT, False).reshape(CHUNKS // 4, 4, 1).to(tl.uint32)
    if ANY_SCALE:
        factor = tl.minimum(scales, LARGEST_SCALE) * 0x00800080 + 0x3F003F00
        above = tl.maximum(scales, LARGEST_SCALE) * 0x00800080 - 0x00800080
        above = tl.broadcast_to(tl.where(scales == 255, 0x7FC07FC0, above), words.shape)
    else:
        factor = scales * 0x00800080 + 0x3F003F00
        above = None
    factor = tl.broadcast_to(factor, words.shape)
    high = words >> 8
    place0 = _pair((words & 0x000F000F) * 0x1040, factor, above, DOT)
    place1 = _pair((words & 0x00F000F0) * 0x104, factor, above, DOT)
    place2 = _pair((high & 0x000F000F) * 0x1040, factor, above, DOT)
    place3 = _pair((high & 0x00F000F0) * 0x104, factor, above, DOT)
    tile = tl.join(tl.join(place0, place2), tl.join(place1, place3))  # …, half, place // 2, place % 2
    return tl.permute(tile, (0, 2, 4, 5, 1, 3)).reshape(CHUNKS // 4, PART_COLUMNS)


@triton.jit
def _swap_rows(tile, DOT: tl.constexpr, BACK: tl.constexpr):
    """[rows · parts, n] in another order of rows, or back, so that each warp's are those that it has loaded.

    Loads deal 8 rows to each warp in turn, tensor cores 16.
    """
    GROUPS: tl.constexpr = tile.shape[0] // (16 * DOT.warps)
    if GROUPS > 0:
        if BACK:
            swapped = tile.reshape(GROUPS, DOT.warps, 2, 8, tile.shape[1])
        else:
            swapped = tile.reshape(GROUPS, 2, DOT.warps, 8, tile.shape[1])
        tile = tl.permute(swapped, (0, 2, 1, 3, 4)).reshape(tile.shape[0], tile.shape[1])
    return tile


@triton.jit
def _pair(spread, factor, above, DOT: tl.constexpr):
    """Two weights [..., 2] of a register with nibbles at bits 6 and 12 of its halves."""
    codes = spread & 0x81C081C0
    # 0x80008000 is minus zero twice, which leaves the product as it is; sm_80 has no multiplication of this width.
    if DOT.dtype == "bfloat16":
        if above is not None:
            codes = tl.inline_asm_elementwise(
                "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [codes, factor, 0x80008000], tl.uint32, True, 1
            )
            factor = above
        low, high = tl.inline_asm_elementwise(
            "{.reg .b32 t; fma.rn.bf16x2 t, $2, $3, $4; mov.b32 {$0, $1}, t;}", "=h,=h,r,r,r",
            [codes, factor, 0x80008000], (tl.bfloat16, tl.bfloat16), True, 1,
        )  # fmt: skip
        pair = tl.join(low, high)
    else:
        pair = _halves(codes) * _halves(factor)
        if above is not None:
            pair *= _halves(above)
    return pair


@triton.jit
def _halves(register):
    """The two bfloat16 numbers of each register in float32: [..., 2]."""
    return tl.join(register << 16, register & 0xFFFF0000).to(tl.float32, bitcast=True)
