"""From matrices of floating-point values to codes and scales.

The values that share a scale are rounded to the nearest codes, ties to even, under a few candidate scales; the one with
the smallest squared error is kept, the first of equals. The first candidate, and the others where there are any:

    mxfp4  the power of two that makes the largest magnitude 4 to 8, of which 6 is left (the rule of the OCP
           specification); twice that, which clips nothing
    int4   makes the value of largest magnitude -8, so that the scale has its sign and all 16 codes are of use; some
           that clip it. With zero points, the range from the least to the greatest value, and parts of it
    int8   makes the largest magnitude 127
    fp8    makes the largest magnitude 448, the greatest finite E4M3, as published checkpoints do

docs/quantization.md has the errors of these rules and of the usual ones. Scales have 8 significant bits even where they
are float32: their product with any code is then exact in float32, and dequantised values quantise to the same codes and
scales (without zero points).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from tritonmoe_kernels.quantized import INT4_MIDDLE, MXFP4, QuantizedMatrix, WeightFormat

# By the name of the option. Which groups and scales is by measured error for each bit: docs/quantization.md.
EXPERT_FORMATS: dict[str, WeightFormat] = {
    "fp8": WeightFormat("fp8", group=128, group_rows=128, scale_dtype=torch.float32),
    "int8": WeightFormat("int8", group=128, scale_dtype=torch.bfloat16),
    "mxfp4": MXFP4,
    "int4": WeightFormat("int4", group=32, scale_dtype=torch.bfloat16),
}

CHUNK_ELEMENTS = 1 << 17  # in float32: the temporaries of a chunk stay in a core's second cache
INT4_SHARES = (1.0, 0.92, 0.85, 0.78)  # of the largest magnitude, or of the range, that is not clipped
E4M3_MAX = 448.0
E2M1_MAX = 6.0
FLOAT32_EXPONENT = 0x7F800000

Scale = tuple[torch.Tensor, torch.Tensor | float]  # float32 scales [R, G, 1] and what they make of a zero (int4)


def quantize(matrix: torch.Tensor, form: WeightFormat) -> QuantizedMatrix:
    """`matrix` [..., rows, columns] of a floating dtype in `form`, where it lies.

    A matrix in pieces of whole multiples of `form.group_rows` rows gives the pieces of its result. Raises ValueError
    for values that are not finite, and for an odd number of columns where a code has 4 bits.
    """
    *leading, rows, columns = matrix.shape
    parts = {
        name: torch.empty((*leading, *shape), dtype=dtype, device=matrix.device)
        for name, (shape, dtype) in form.shapes(rows, columns).items()
    }
    step = max(1, CHUNK_ELEMENTS // max(1, columns * form.group_rows)) * form.group_rows
    flat = {name: part.flatten(end_dim=-3) if leading else part[None] for name, part in parts.items()}
    for i, values in enumerate(matrix.reshape(math.prod(leading), rows, columns)):
        for first in range(0, rows, step):
            for name, piece in _quantize_rows(values[first : first + step].float(), form).items():
                start = first if name == "codes" else first // form.group_rows
                flat[name][i, start : start + len(piece)] = piece
    return QuantizedMatrix(form, parts["codes"], parts["scales"], parts.get("zeros"))


def _quantize_rows(values: torch.Tensor, form: WeightFormat) -> dict[str, torch.Tensor]:
    """The parts of float32 `values` [rows, columns]."""
    groups = _grouped(values, form)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)  # 4x as fast as aminmax
    if not bool((low.isfinite() & high.isfinite()).all()):
        raise ValueError("values that are not finite cannot be quantised")
    scale, zero = _best(groups, _candidates(low, high, form), form)
    levels = _levels(groups, scale, zero, form)
    codes = levels + zero if form.name == "int4" else _e2m1_codes(levels) if form.name == "mxfp4" else levels
    codes = _ungrouped(codes.to(form.code_dtype), form)[: len(values), : values.shape[1]]
    parts = {
        "codes": pack_codes(codes.contiguous()) if form.bits == 4 else codes,
        "scales": (scale.view(torch.int32) >> 23 if form.name == "mxfp4" else scale).squeeze(-1),
    }
    return {**parts, "zeros": zero.squeeze(-1)} if isinstance(zero, torch.Tensor) else parts


def _grouped(values: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """[rows, columns] as [groups of rows, groups of columns, values of one group], filled up with zeros."""
    rows, columns = values.shape
    values = pad(values, (0, -columns % form.group, 0, -rows % form.group_rows))
    tiles = values.view(values.shape[0] // form.group_rows, form.group_rows, -1, form.group)
    return tiles.transpose(1, 2).flatten(-2)


def _ungrouped(groups: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    tiles = groups.unflatten(-1, (form.group_rows, form.group)).transpose(1, 2)
    return tiles.flatten(-2).flatten(end_dim=1)


def _candidates(low: torch.Tensor, high: torch.Tensor, form: WeightFormat) -> Iterator[Scale]:
    """From the least and greatest value of each group [R, G, 1]."""
    largest = torch.maximum(high, -low)
    if form.name == "mxfp4":
        exponents = (largest.frexp().exponent + 124).clamp_min(0)  # of E8M0; largest is below 2^(exponent - 124)
        for code in (exponents, exponents + 1):
            yield (code << 23).clamp_min(1 << 22).view(torch.float32), 0.0  # 2^-127, code 0, is subnormal
    elif form.has_zeros:
        low, high = low.clamp_max(0), high.clamp_min(0)
        for share in INT4_SHARES:
            scale = _rounded(high * (share / 15) - low * (share / 15), form)
            yield scale, (low * -share / _divisor(scale)).round().clamp(0, 15)
    elif form.name == "int4":
        extreme = torch.where(high > -low, high, low)
        yield from ((_rounded(extreme * (share / -INT4_MIDDLE), form), float(INT4_MIDDLE)) for share in INT4_SHARES)
    else:
        yield _rounded(largest / (E4M3_MAX if form.name == "fp8" else 127.0), form), 0.0


def _rounded(scale: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """To 8 significant bits that the format's dtype can hold."""
    return scale.bfloat16().to(form.scale_dtype).float()


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """Of a group that is all zero, or too small for its dtype, whose codes then are zero."""
    return torch.where(scale == 0, 1.0, scale)


def _best(groups: torch.Tensor, candidates: Iterator[Scale], form: WeightFormat) -> Scale:
    """For each group the candidate with the smallest squared error."""
    best, *others = candidates
    if not others:
        return best

    def error(candidate: Scale) -> torch.Tensor:
        levels = _levels(groups, *candidate, form)
        return levels.mul_(candidate[0]).sub_(groups).square_().sum(-1, keepdim=True)

    least = error(best)
    for other in others:
        found = error(other)
        better = found < least
        least = torch.where(better, found, least)
        scale = torch.where(better, other[0], best[0])
        zero = torch.where(better, other[1], best[1]) if isinstance(other[1], torch.Tensor) else other[1]
        best = scale, zero
    return best


def _levels(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | float, form: WeightFormat) -> torch.Tensor:
    """The representable values nearest to `groups`, divided by the scale; for fp8 before the rounding of its cast."""
    scaled = groups / _divisor(scale)
    if form.name == "fp8":
        return scaled.clamp_(-E4M3_MAX, E4M3_MAX)
    if form.name == "mxfp4":
        return _round_to_e2m1(scaled)
    if form.name == "int8":
        return scaled.round_().clamp_(-127, 127)
    if isinstance(zero, torch.Tensor):
        return torch.minimum(torch.maximum(scaled.round_(), -zero), 15 - zero)
    return scaled.round_().clamp_(-zero, 15 - zero)


def _round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """In place, to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with their signs: the step is half the power of two
    below the magnitude, and 0.5 at least. Adding 1.5 · 2^23 steps leaves float32 no finer bits than whole steps."""
    values.clamp_(-E2M1_MAX, E2M1_MAX)
    power = (values.view(torch.int32) & FLOAT32_EXPONENT).view(torch.float32)
    shift = power.clamp_min_(1.0).mul_(1.5 * 2**22)
    return values.add_(shift).sub_(shift)


def _e2m1_codes(levels: torch.Tensor) -> torch.Tensor:
    """Codes of E2M1 values: twice the magnitude is 0, 1, 2, 3, 4, 6, 8 or 12 for the codes 0 … 7; 8 is the sign."""
    doubled = (levels.abs() * 2).to(torch.uint8)
    above = [(doubled >= bound).view(torch.uint8) for bound in (6, 8, 12)]
    return doubled - above[0] - above[1] - 3 * above[2] + 8 * (levels < 0).view(torch.uint8)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes to a byte, uint8 [rows, columns] -> [rows, columns / 2], the first in the low half."""
    pairs = codes.view(torch.int16)  # the second code of a pair lies 8 bits above the first
    return (pairs | pairs >> 4).to(torch.uint8)
