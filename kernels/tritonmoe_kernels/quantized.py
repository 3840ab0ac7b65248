"""Matrices stored in fewer bits: codes, and a scale (and for some a zero point) for every group of them.

A matrix of C columns is stored row by row. Values of 4 bits lie two in a byte, column 2j in the low half of byte j and
column 2j + 1 in the high one, in memory as in the files of GPT-OSS. What a code is worth:

    mxfp4  E2M1[code] · 2^(scale - 127)          scale uint8 for 32 columns (OCP Microscaling Formats 1.0)
    int4   (code - zero) · scale, code 0…15      scale for `group` columns; zero 8, or stored, a byte for each scale
    int8   code · scale, code -127…127           scale for `group` columns
    fp8    E4M3[code] · scale                    scale for 128 rows by 128 columns (as DeepSeek and Qwen publish)

The last group of a row, and the last block of rows, may be short. Dequantised values are products in float32, rounded
once to the dtype asked for; a scale of 255 in mxfp4 is NaN, as the specification has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

FORMAT_NAMES = ("mxfp4", "int4", "int8", "fp8")
CODE_DTYPES = {"mxfp4": torch.uint8, "int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
INT4_MIDDLE = 8  # the zero point of int4 where none is stored
# E2M1 values by code; bit 3 is the sign (OCP Microscaling Formats specification 1.0, section 5.3.3).
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class WeightFormat:
    """How the values of a matrix are stored; `group` and `group_rows` are what one scale covers."""

    name: str  # one of FORMAT_NAMES
    group: int = 32  # columns
    group_rows: int = 1
    scale_dtype: torch.dtype = torch.uint8
    has_zeros: bool = False

    def __post_init__(self) -> None:
        if self.name not in FORMAT_NAMES:
            raise ValueError(f"format must be one of {FORMAT_NAMES}, not {self.name!r}")
        if self.has_zeros and self.name != "int4":
            raise ValueError(f"{self.name} has no zero points")
        if self.group < 2 or self.group & (self.group - 1) or self.group_rows < 1:
            raise ValueError(f"group must be a power of two from 2, not {self.group} (rows: {self.group_rows})")

    @property
    def bits(self) -> int:
        return 4 if self.name in ("mxfp4", "int4") else 8

    @property
    def code_dtype(self) -> torch.dtype:
        return CODE_DTYPES[self.name]

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
        """Shape and dtype of each part of a matrix, by field of `QuantizedMatrix`; ValueError for odd 4-bit columns."""
        if columns * self.bits % 8:
            raise ValueError(f"{self.name} needs an even number of columns, not {columns}")
        groups = (-(-rows // self.group_rows), -(-columns // self.group))
        parts = {
            "codes": ((rows, columns * self.bits // 8), self.code_dtype),
            "scales": (groups, self.scale_dtype),
        }
        return {**parts, "zeros": (groups, torch.uint8)} if self.has_zeros else parts


MXFP4 = WeightFormat("mxfp4")


class QuantizedMatrix(NamedTuple):
    """Matrices [S, rows, columns] of S slots; `codes` [S, rows, stored columns], `scales` and `zeros` [S, groups of
    rows, groups of columns]. Slots may be any stride apart; within a slot each part is contiguous."""

    format: WeightFormat
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """That of the values."""
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.format.bits))

    def __len__(self) -> int:  # as of a tensor, not of the tuple
        return len(self.codes)

    def slot(self, index: int) -> QuantizedMatrix:
        """That of one slot, S = 1."""
        parts = (part if part is None else part[index : index + 1] for part in self[1:])
        return QuantizedMatrix(self.format, *parts)


Matrix = torch.Tensor | QuantizedMatrix


def _powers_of_2(scales: torch.Tensor) -> torch.Tensor:
    """2^(scale - 127) in float32: the scale is the exponent field, but for 2^-127, a subnormal number, and NaN."""
    bits = scales.int() << 23
    bits = bits.masked_fill(scales == 0, 1 << 22).masked_fill(scales == 255, 0x7FC00000)
    return bits.view(torch.float32)


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values [S, rows, columns] in `dtype`."""
    form, codes = matrix.format, matrix.codes
    if form.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    rows, columns = codes.shape[-2:]

    def spread(groups: torch.Tensor) -> torch.Tensor:
        each_row = groups.repeat_interleave(form.group_rows, dim=-2)[..., :rows, :]
        return each_row.repeat_interleave(form.group, dim=-1)[..., :columns]

    if form.name == "mxfp4":
        table = torch.tensor(MXFP4_VALUES, dtype=torch.float32, device=codes.device)
        return (table[codes.long()] * spread(_powers_of_2(matrix.scales))).to(dtype)
    values = codes.float()
    if form.name == "int4":
        values = values - (INT4_MIDDLE if matrix.zeros is None else spread(matrix.zeros).float())
    return (values * spread(matrix.scales).float()).to(dtype)
