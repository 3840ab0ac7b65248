"""Tiles of weights for kernels, plain or quantised: fetched in one place, then multiplied in registers or spread out.

A quantised tile is fetched as words of 32 bits, 16 bytes a thread: a chunk of 32 codes of 4 bits, or 16 of 8. A chunk
lies in one group, so its products with x are summed before the scale is applied, once, and the sums of chunks added.
Tensors have their in-thread axes first, [word, value of the word, row, chunk]: then the layouts that triton gives to
new axes are those of the fetched words, and no weight moves between threads; x does, once a step.

Four-bit weights at 4.3 TB/s come faster than most ways of decoding them: an H200 issues 6 instructions for each, and of
shifts and logical ones 3. So no code is converted on its own. What is summed is code · x, exact but for the sum:

    mxfp4, fp8   sign, exponent and mantissa are put where float16 has them, two codes a word: the value, subnormals
                 too, times 2^-14 or 2^-8; two shifts and two logical instructions for two codes, then float32
    int4, int8   the code where it lies is a float32: its integer times 2^-149, or more by its place; one logical
                 instruction. x comes times the opposite power of two. zero · Σx is taken off the sum of a chunk

Counted in the assembler's code for sm_90, instructions of a step without x, for a weight: mxfp4 4.1, int4 2.5, fp8 4.2,
int8 2.8, of which one is the multiplication.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.checks import check_tensor
from tritonmoe_kernels.quantized import INT4_MIDDLE, Matrix
from tritonmoe_kernels.tiles import next_power_of_2

CHUNK_BYTES = 16  # a thread's load


class Parts(NamedTuple):
    """A matrix as kernels take it: `codes` are words of 32 bits, or bytes where rows are not whole words, or weights."""

    codes: Any
    scales: Any
    zeros: Any


class Layout(NamedTuple):
    """What of a format is compiled in; `chunk` columns are summed by a thread, 1 of plain weights."""

    name: str | None
    chunk: int
    group: int
    group_rows: int


class Operands(NamedTuple):
    """Arguments of a kernel for one matrix."""

    parts: Parts
    strides: Parts  # between slots, in elements of each part
    layout: Layout


def operands(matrix: Matrix) -> Operands:
    """A matrix [S, rows, columns] for a kernel; ValueError where the codes of a slot are not aligned to 4 bytes."""
    if isinstance(matrix, torch.Tensor):
        return Operands(Parts(matrix, None, None), Parts(matrix.stride(0), 0, 0), Layout(None, 1, 1, 1))
    form, codes, scales, zeros = matrix
    word = torch.int32 if codes.shape[-1] % 4 == 0 else torch.uint8
    try:
        codes = codes.view(word)
    except RuntimeError as error:
        raise ValueError(f"codes of {form.name} must begin at multiples of 4 bytes in every slot: {error}") from None
    strides = Parts(codes.stride(0), scales.stride(0), 0 if zeros is None else zeros.stride(0))
    chunk = CHUNK_BYTES * 8 // form.bits
    return Operands(Parts(codes, scales, zeros), strides, Layout(form.name, chunk, form.group, form.group_rows))


def step_columns(layout: Layout, columns: int, wanted: int) -> int:
    """Columns of a step: `wanted`, but no more than there are and no less than a chunk."""
    return max(layout.chunk, min(wanted, next_power_of_2(columns)))


def check_matrix(
    name: str, matrix: Matrix, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, strided: int = 0
) -> None:
    """As `check_tensor`, of every part; plain weights have the dtype of x."""
    if isinstance(matrix, torch.Tensor):
        check_tensor(name, matrix, shape, (dtype,), device, strided)
        return
    form = matrix.format
    least = CHUNK_BYTES * 8 // form.bits
    if form.group < least:
        raise ValueError(f"{name} has groups of {form.group} columns; kernels take {form.name} from {least}")
    for part, (part_shape, part_dtype) in form.shapes(*shape[-2:]).items():
        tensor = getattr(matrix, part)
        if tensor is None:
            raise ValueError(f"{name} has no {part}")
        check_tensor(f"{name}.{part}", tensor, (*shape[:-2], *part_shape), (part_dtype,), device, strided)


@triton.jit
def load_columns(pointers, columns, NUM_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, EVICT: tl.constexpr):
    """Values at `pointers`, zero where a column is beyond the last; `columns` has the rank of `pointers`."""
    is_whole: tl.constexpr = NUM_COLUMNS % BLOCK_K == 0
    if is_whole:
        values = tl.load(pointers, eviction_policy=EVICT)
    else:
        values = tl.load(pointers, mask=columns < NUM_COLUMNS, other=0, eviction_policy=EVICT)
    return values


@triton.jit
def _words(
    codes_ptr, first, rows, start, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Words [4, rows, chunks] of a step, little endian."""
    VALUES: tl.constexpr = CHUNK // 4
    words = start // VALUES + tl.arange(0, BLOCK_K // VALUES)
    if COLUMNS % VALUES == 0:
        STORED: tl.constexpr = COLUMNS // VALUES
        pointers = codes_ptr + first.to(tl.int64) * STORED + (rows[:, None] * STORED + words[None, :])
        tile = load_columns(pointers, words[None, :], STORED, BLOCK_K // VALUES, EVICT).to(tl.uint32, bitcast=True)
    else:
        ROW_BYTES: tl.constexpr = COLUMNS * 4 // VALUES
        tile = tl.zeros([rows.shape[0], BLOCK_K // VALUES], dtype=tl.uint32)
        for i in tl.static_range(4):
            column = words[None, :] * 4 + i
            pointers = codes_ptr + first.to(tl.int64) * ROW_BYTES + (rows[:, None] * ROW_BYTES + column)
            byte = tl.load(pointers, mask=column < ROW_BYTES, other=0)
            tile |= byte.to(tl.uint32) << (8 * i)
    return tl.permute(tile.reshape(rows.shape[0], BLOCK_K // CHUNK, 4), (2, 0, 1))


@triton.jit
def _one_each(values_ptr, index, columns, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, EVICT: tl.constexpr):
    """Scales of chunks, loaded as a vector: triton spreads that over threads as it does the chunks, and not a tile."""
    SIZE: tl.constexpr = index.shape[0] * index.shape[1]
    values = load_columns(values_ptr + index.reshape(SIZE), columns.reshape(SIZE), COLUMNS, BLOCK_K, EVICT)
    return values.reshape(index.shape[0], index.shape[1])


@triton.jit
def tile_rows(first, NUM_ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of a tile counted from its first; beyond the last of the matrix that one again, not to be stored."""
    rows = tl.arange(0, BLOCK_N)
    if NUM_ROWS % BLOCK_N != 0:
        rows = tl.minimum(rows, NUM_ROWS - 1 - first)
    return rows


@triton.jit
def fetch_weights(
    parts, strides, slot, first, rows, start, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Columns start … start + BLOCK_K of a slot's rows first + rows: the only place where weights are fetched.

    A tuple: the tile [rows, BLOCK_K], or words [4, rows, chunks], scales and zeros [rows, chunks]. What is added to the
    address of row `first` is known but for the thread, so that all loads share one address and differ in its offset.
    """
    codes_ptr = parts.codes + slot * strides.codes
    if LAYOUT.name is None:
        columns = start + tl.arange(0, BLOCK_K)
        codes_ptr += first.to(tl.int64) * COLUMNS
        pointers = codes_ptr + rows[:, None] * COLUMNS + columns[None, :]
        fetched = (load_columns(pointers, columns[None, :], COLUMNS, BLOCK_K, EVICT),)
    else:
        words = _words(codes_ptr, first, rows, start, COLUMNS, BLOCK_K, LAYOUT.chunk, EVICT)
        GROUPS: tl.constexpr = (COLUMNS + LAYOUT.group - 1) // LAYOUT.group
        columns = start + tl.arange(0, BLOCK_K // LAYOUT.chunk) * LAYOUT.chunk
        group = columns // LAYOUT.group
        if LAYOUT.group_rows == 1:
            first_group = first.to(tl.int64) * GROUPS
            groups = rows[:, None] * GROUPS + group[None, :]
        else:
            first_group = 0
            groups = ((first + rows) // LAYOUT.group_rows)[:, None] * GROUPS + group[None, :]
        columns = tl.broadcast_to(columns[None, :], groups.shape)
        scales_ptr = parts.scales + slot * strides.scales + first_group
        scales = _one_each(scales_ptr, groups, columns, COLUMNS, BLOCK_K, EVICT)
        if parts.zeros is None:
            fetched = (words, scales)
        else:
            zeros_ptr = parts.zeros + slot * strides.zeros + first_group
            fetched = (words, scales, _one_each(zeros_ptr, groups, columns, COLUMNS, BLOCK_K, EVICT))
    return fetched


@triton.jit
def step_of_x(start, LAYOUT: tl.constexpr, BLOCK_K: tl.constexpr):
    """The columns of x that `products` wants: [BLOCK_K], or [values of a chunk, chunks]."""
    if LAYOUT.name is None:
        columns = start + tl.arange(0, BLOCK_K)
    else:
        chunks = tl.arange(0, BLOCK_K // LAYOUT.chunk)
        columns = start + chunks[None, :] * LAYOUT.chunk + tl.arange(0, LAYOUT.chunk)[:, None]
    return columns


@triton.jit
def products(fetched, x, LAYOUT: tl.constexpr):
    """Weights times x in float32, to be summed over the last axis: [rows, columns], or [rows, chunks]."""
    if LAYOUT.name is None:
        result = fetched[0].to(tl.float32) * x[None, :]
    elif LAYOUT.name == "mxfp4" or LAYOUT.name == "fp8":
        values = _small_floats(fetched[0], LAYOUT)
        sums = tl.sum(_flat(values) * x[:, None, :], axis=0)
        result = sums * _small_float_unit(LAYOUT) * _scale(fetched[1], LAYOUT)
    else:
        unit, values = _integers_in_place(fetched[0], LAYOUT)
        values = _flat(values)
        sums = tl.sum(values * (x * unit)[:, None, :], axis=0) * INTEGER_UNIT
        # The same for all rows: broadcast only to lie where the sums do.
        of_zero = _zero(fetched, LAYOUT) * tl.sum(tl.broadcast_to(x[:, None, :], values.shape), axis=0)
        result = (sums - of_zero) * _scale(fetched[1], LAYOUT)
    return result


@triton.jit
def spread_out(fetched, LAYOUT: tl.constexpr, dtype: tl.constexpr):
    """Weights [rows, columns] in `dtype`, as `quantized.dequantize` makes them."""
    if LAYOUT.name is None:
        tile = fetched[0].to(dtype)
    else:
        if LAYOUT.name == "mxfp4" or LAYOUT.name == "fp8":
            values = _small_floats(fetched[0], LAYOUT) * _small_float_unit(LAYOUT)
        else:
            values = _integers(fetched[0], LAYOUT) - _zero(fetched, LAYOUT)
        values = (values * _scale(fetched[1], LAYOUT)).to(dtype)
        tile = tl.permute(values, (2, 3, 0, 1)).reshape(values.shape[2], values.shape[3] * LAYOUT.chunk)
    return tile


# 2^74: what `_integers_in_place` leaves of an integer's unit, 2^-149, when x has come times 2^75.
INTEGER_UNIT = tl.constexpr(2.0**74)


@triton.jit
def _flat(values):
    """[word, value, rows, chunks] -> [column of the chunk, rows, chunks]."""
    return values.reshape(values.shape[0] * values.shape[1], values.shape[2], values.shape[3])


@triton.jit
def _places(words, CHUNK: tl.constexpr):
    """Words with an axis for their values, and each value's number."""
    return words[:, None, :, :], tl.arange(0, CHUNK // 4)[None, :, None, None].to(tl.uint32)


@triton.jit
def _small_floats(words, LAYOUT: tl.constexpr):
    """E2M1 times 2^-14 or E4M3 times 2^-8 in float32; E4M3's two NaN count as ±480.

    Codes k and k + half of a word go into the two halves of one word: the sign to bit 15, the rest to where float16 has
    the end of its exponent and the beginning of its mantissa.
    """
    word, i = _places(words, LAYOUT.chunk)
    BITS: tl.constexpr = 128 // LAYOUT.chunk
    HALF: tl.constexpr = LAYOUT.chunk // 8
    GAP: tl.constexpr = 3 if BITS == 4 else 1  # bits of float16's exponent that the code has not
    REST: tl.constexpr = 0x0E000E00 if BITS == 4 else 0x3F803F80
    aligned = word << (16 - BITS - BITS * (i % HALF))
    pair = (aligned & 0x80008000) | ((aligned >> GAP) & REST)
    bits = (pair >> (16 * (i // HALF))).to(tl.uint16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _small_float_unit(LAYOUT: tl.constexpr):
    return 16384.0 if LAYOUT.name == "mxfp4" else 256.0


@triton.jit
def _integers_in_place(words, LAYOUT: tl.constexpr):
    """Codes, from zero on, as float32 numbers, and by what x must be multiplied: (unit [column of the chunk, 1], …).

    A code in bits b and following is the float32 code · 2^(b - 149), up to bit 23, where one of exponent 1 continues the
    subnormal ones. Higher codes are shifted down by 24 first.
    """
    word, i = _places(words, LAYOUT.chunk)
    BITS: tl.constexpr = 128 // LAYOUT.chunk
    LOW: tl.constexpr = 24 // BITS
    if LAYOUT.name == "int8":
        word = word ^ 0x80808080  # -127 … 127 as 1 … 255
    mask = ((1 << BITS) - 1) << (BITS * (i % LOW))
    values = tl.where(i < LOW, word & mask, (word >> 24) & mask).to(tl.float32, bitcast=True)
    column = tl.arange(0, LAYOUT.chunk)
    exponent = 127 + 75 - BITS * ((column % (LAYOUT.chunk // 4)) % LOW)
    return (exponent << 23).to(tl.float32, bitcast=True)[:, None], values


@triton.jit
def _integers(words, LAYOUT: tl.constexpr):
    """Codes, from zero on, in float32."""
    word, i = _places(words, LAYOUT.chunk)
    BITS: tl.constexpr = 128 // LAYOUT.chunk
    if LAYOUT.name == "int8":
        word = word ^ 0x80808080
    return ((word >> (BITS * i)) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _zero(fetched, LAYOUT: tl.constexpr):
    """What is worth nothing, by the codes that `_integers` gives."""
    if LAYOUT.name == "int8":
        zero = 128.0
    elif len(fetched) == 3:
        zero = fetched[2].to(tl.float32)
    else:
        zero = INT4_ZERO
    return zero


INT4_ZERO = tl.constexpr(float(INT4_MIDDLE))


@triton.jit
def _scale(scales, LAYOUT: tl.constexpr):
    """In float32; of mxfp4 the exponent field itself, but for 2^-127, which is subnormal, and for NaN."""
    if LAYOUT.name == "mxfp4":
        bits = tl.maximum(scales.to(tl.int32) << 23, 1 << 22)
        scale = tl.where(scales == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        scale = scales.to(tl.float32)
    return scale
