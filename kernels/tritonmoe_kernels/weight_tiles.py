"""Tiles of weights for kernels, plain or quantised: fetched in one place, then multiplied in registers or spread out.

A quantised tile is fetched as words of 32 bits, 16 bytes a thread: a chunk of 32 codes of 4 bits, or 16 of 8. A chunk
lies in one group, so its products with x are summed before the scale is applied, once, and the sums of chunks added.
Tensors have their in-thread axes first, [word, value of the word, row, chunk]: then the layouts that triton gives to
new axes are those of the fetched words, and no weight moves between threads; x does, once a step.

Four-bit weights at 4.3 TB/s come faster than most ways of decoding them: an H200 can issue 4 instructions for each, of
shifts and logical ones 2 (132 SMs of 128 and 64 lanes at 1.83 GHz). So no code is converted on its own. What is summed
is code · x, exact but for the sum:

    mxfp4, fp8   sign, exponent and mantissa are put where float16 has them, two codes a word: the value, subnormals
                 too, times 2^-14 or 2^-8; then float32
    int4, int8   the code where it lies is a float32: its integer times 2^-149, or more by its place; one logical
                 instruction. x comes times the opposite power of two. zero · Σx is taken off the sum of a chunk

Counted in the assembler's code (sm_90, triton 3.6, gate_up of 768 x 2048, mxfp4 in tiles of 4 x 2048 with 4 warps, all
that is around the weights included), instructions a weight and those of them that are shifts, logical or other integer
ones: mxfp4 4.8 and 2.1, int4 3.7 and 1.7, int8 3.5 and 1.6, fp8 5.2 and 2.4. For 8 experts of that shape gate_up is
then 3.9 us of issuing for 3.1 us of reading in mxfp4, 3.0 for 3.3 in int4, and less than reading in the others. Fewer
for mxfp4 take tensor cores: mxfp4_dot.py.
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
WORD_BYTES = 4
INT4_ZERO = tl.constexpr(float(INT4_MIDDLE))
# 2^74: what `_integer_in_place` leaves of an integer's unit, 2^-149, when x has come times 2^75.
INTEGER_UNIT = tl.constexpr(2.0**74)


class Parts(NamedTuple):
    """A matrix as kernels take it; `codes` are words of 32 bits, bytes where rows are not whole ones, or weights."""

    codes: Any
    scales: Any
    zeros: Any


class Strides(NamedTuple):
    """Between slots, in elements of each part.

    `byte` is 256, to shift by: as an argument it cannot be turned into a shift. Shifts and logical instructions have
    half the lanes that multiplications have, and most of decoding is such.
    """

    codes: int
    scales: int
    zeros: int
    byte: int = 256


class Layout(NamedTuple):
    """What of a format is compiled in: codes `per_word`, columns in a `chunk`, which has one scale; 1 if plain."""

    name: str | None
    per_word: int
    chunk: int
    group: int
    group_rows: int


class Operands(NamedTuple):
    """Arguments of a kernel for one matrix."""

    parts: Parts
    strides: Strides
    layout: Layout


def operands(matrix: Matrix, chunk_bytes: int = CHUNK_BYTES) -> Operands:
    """A matrix [S, rows, columns] for `products`, or for `spread_out` with chunks of WORD_BYTES.

    ValueError where the codes of a slot are not aligned to 4 bytes.
    """
    if isinstance(matrix, torch.Tensor):
        return Operands(Parts(matrix, None, None), Strides(matrix.stride(0), 0, 0), Layout(None, 1, 1, 1, 1))
    form, codes, scales, zeros = matrix
    word = torch.int32 if codes.shape[-1] % 4 == 0 else torch.uint8
    try:
        codes = codes.view(word)
    except RuntimeError as error:
        raise ValueError(f"codes of {form.name} must begin at multiples of 4 bytes in every slot: {error}") from None
    strides = Strides(codes.stride(0), scales.stride(0), 0 if zeros is None else zeros.stride(0))
    layout = Layout(form.name, 32 // form.bits, chunk_bytes * 8 // form.bits, form.group, form.group_rows)
    return Operands(Parts(codes, scales, zeros), strides, layout)


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
    codes_ptr, first, rows, start, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Words [words of a chunk, rows, chunks] of a step, little endian."""
    WORDS: tl.constexpr = BLOCK_K // LAYOUT.per_word
    words = start // LAYOUT.per_word + tl.arange(0, WORDS)
    if COLUMNS % LAYOUT.per_word == 0:
        STORED: tl.constexpr = COLUMNS // LAYOUT.per_word
        pointers = codes_ptr + first.to(tl.int64) * STORED + (rows[:, None] * STORED + words[None, :])
        tile = load_columns(pointers, words[None, :], STORED, WORDS, EVICT).to(tl.uint32, bitcast=True)
    else:
        ROW_BYTES: tl.constexpr = COLUMNS * 4 // LAYOUT.per_word
        tile = tl.zeros([rows.shape[0], WORDS], dtype=tl.uint32)
        for i in tl.static_range(4):
            column = words[None, :] * 4 + i
            pointers = codes_ptr + first.to(tl.int64) * ROW_BYTES + (rows[:, None] * ROW_BYTES + column)
            byte = tl.load(pointers, mask=column < ROW_BYTES, other=0)
            tile |= byte.to(tl.uint32) << (8 * i)
    words_of_chunk: tl.constexpr = LAYOUT.chunk // LAYOUT.per_word
    return tl.permute(tile.reshape(rows.shape[0], WORDS // words_of_chunk, words_of_chunk), (2, 0, 1))


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

    A tuple: the tile [rows, BLOCK_K], or words [words of a chunk, rows, chunks], scales and zeros [rows, chunks]. What
    is added to the address of row `first` is known but for the thread, so all loads share one address and differ in
    its offset.
    """
    codes_ptr = parts.codes + slot * strides.codes
    if LAYOUT.name is None:
        columns = start + tl.arange(0, BLOCK_K)
        codes_ptr += first.to(tl.int64) * COLUMNS
        pointers = codes_ptr + rows[:, None] * COLUMNS + columns[None, :]
        fetched = (load_columns(pointers, columns[None, :], COLUMNS, BLOCK_K, EVICT),)
    else:
        words = _words(codes_ptr, first, rows, start, LAYOUT, COLUMNS, BLOCK_K, EVICT)
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
def products(fetched, x, byte, LAYOUT: tl.constexpr):
    """Weights times x in float32, to be summed over the last axis: [rows, columns], or [rows, chunks]."""
    if LAYOUT.name is None:
        result = fetched[0].to(tl.float32) * x[None, :]
    else:
        words = fetched[0][:, None, :, :]
        values: tl.constexpr = LAYOUT.per_word
        place = tl.arange(0, values)[None, :, None, None].to(tl.uint32)
        if LAYOUT.name == "mxfp4" or LAYOUT.name == "fp8":
            tile = _small_float(words, place, byte.to(tl.uint32), LAYOUT)
            tile = tile.reshape(LAYOUT.chunk, words.shape[2], words.shape[3])
            sums = tl.sum(tile * x[:, None, :], axis=0) * _small_float_unit(LAYOUT)
        else:
            bits: tl.constexpr = 32 // values
            exponent = 127 + 75 - bits * (tl.arange(0, LAYOUT.chunk) % values % (24 // bits))
            unit = (exponent << 23).to(tl.float32, bitcast=True)[:, None]
            tile = _integer_in_place(words, place, LAYOUT).reshape(LAYOUT.chunk, words.shape[2], words.shape[3])
            sums = tl.sum(tile * (x * unit)[:, None, :], axis=0) * INTEGER_UNIT
            # The sum of x is the same for all rows: broadcast only to lie where the sums do.
            sums -= _zero(fetched, LAYOUT) * tl.sum(tl.broadcast_to(x[:, None, :], tile.shape), axis=0)
        result = sums * _scale(fetched[1], LAYOUT)
    return result


@triton.jit
def spread_out(fetched, byte, LAYOUT: tl.constexpr, dtype: tl.constexpr):
    """Weights [rows, columns] in `dtype`, as `quantized.dequantize` makes them; chunks are words.

    Values of a word are joined, each time by a new last axis that a thread holds, so that it has them in a row.
    """
    if LAYOUT.name is None:
        tile = fetched[0].to(dtype)
    else:
        if LAYOUT.per_word == 8:
            even = tl.join(_pair(fetched, byte, 0, LAYOUT, dtype), _pair(fetched, byte, 2, LAYOUT, dtype))
            odd = tl.join(_pair(fetched, byte, 1, LAYOUT, dtype), _pair(fetched, byte, 3, LAYOUT, dtype))
        else:
            even, odd = _pair(fetched, byte, 0, LAYOUT, dtype), _pair(fetched, byte, 1, LAYOUT, dtype)
        tile = tl.join(even, odd).reshape(even.shape[0], even.shape[1] * LAYOUT.per_word)
    return tile


@triton.jit
def _pair(fetched, byte, place: tl.constexpr, LAYOUT: tl.constexpr, dtype: tl.constexpr):
    """The weights at one place of each word and half a word on: [rows, words, 2]."""
    HALF: tl.constexpr = LAYOUT.per_word // 2
    return tl.join(
        _weight(fetched, byte, place, LAYOUT).to(dtype), _weight(fetched, byte, place + HALF, LAYOUT).to(dtype)
    )


@triton.jit
def _weight(fetched, byte, place: tl.constexpr, LAYOUT: tl.constexpr):
    """The weight at one place of each word in float32: [rows, words]."""
    words = fetched[0].reshape(fetched[0].shape[1], fetched[0].shape[2])
    if LAYOUT.name == "mxfp4" or LAYOUT.name == "fp8":
        value = _small_float(words, place, byte.to(tl.uint32), LAYOUT) * _small_float_unit(LAYOUT)
    else:
        BITS: tl.constexpr = 32 // LAYOUT.per_word
        value = ((_unsigned(words, LAYOUT) >> (BITS * place)) & ((1 << BITS) - 1)).to(tl.float32)
        value -= _zero(fetched, LAYOUT)
    return value * _scale(fetched[1], LAYOUT)


@triton.jit
def _small_float(words, place, byte, LAYOUT: tl.constexpr):
    """E2M1 times 2^-14 or E4M3 times 2^-8 in float32; E4M3's two NaN count as ±480.

    The codes at a place and half a word on go into the two halves of one word: the sign to bit 15, the rest to where
    float16 has the end of its exponent and the beginning of its mantissa. Codes in the low byte of a half are put
    together there and go up multiplied by `byte`, 256.
    """
    HALF: tl.constexpr = LAYOUT.per_word // 2
    if LAYOUT.per_word == 8:
        is_high_nibble = place % 2 == 1
        signs = tl.where(is_high_nibble, words, words << 4)
        rest = tl.where(is_high_nibble, words >> 3, words << 1)
        high = (signs & 0x80008000) | (rest & 0x0E000E00)
        low = ((signs & 0x00800080) | (rest & 0x000E000E)) * byte
    else:
        high = (words & 0x80008000) | ((words >> 1) & 0x3F803F80)
        shifted = words * byte
        low = (shifted & 0x80008000) | ((shifted >> 1) & 0x3F803F80)
    pair = tl.where(place % HALF >= HALF // 2, high, low)
    bits = (pair >> (16 * (place // HALF))).to(tl.uint16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _small_float_unit(LAYOUT: tl.constexpr):
    return 16384.0 if LAYOUT.name == "mxfp4" else 256.0


@triton.jit
def _integer_in_place(words, place, LAYOUT: tl.constexpr):
    """Codes, from zero on, as float32 numbers: code · 2^(b - 149) where the code lies at bit b.

    That holds up to bit 23, where the numbers of exponent 1 continue the subnormal ones. Higher codes are shifted down
    by 24 first. `x` is below 2^53, so that 2^75 times it is finite.
    """
    BITS: tl.constexpr = 32 // LAYOUT.per_word
    LOW_VALUES: tl.constexpr = 24 // BITS
    words = _unsigned(words, LAYOUT)
    mask = ((1 << BITS) - 1) << (BITS * (place % LOW_VALUES))
    return tl.where(place < LOW_VALUES, words & mask, (words >> 24) & mask).to(tl.float32, bitcast=True)


@triton.jit
def _unsigned(words, LAYOUT: tl.constexpr):
    """Codes from zero on: int8's -127 … 127 as 1 … 255."""
    return words ^ 0x80808080 if LAYOUT.name == "int8" else words


@triton.jit
def _zero(fetched, LAYOUT: tl.constexpr):
    """What is worth nothing, by the codes that `_unsigned` gives."""
    if LAYOUT.name == "int8":
        zero = 128.0
    elif len(fetched) == 3:
        zero = fetched[2].to(tl.float32)
    else:
        zero = INT4_ZERO
    return zero


@triton.jit
def _scale(scales, LAYOUT: tl.constexpr):
    """In float32; of mxfp4 the exponent field itself, but for 2^-127, which is subnormal, and for NaN."""
    if LAYOUT.name == "mxfp4":
        bits = tl.maximum(scales.to(tl.int32) << 23, 1 << 22)
        scale = tl.where(scales == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        scale = scales.to(tl.float32)
    return scale
