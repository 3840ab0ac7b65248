"""Matrices of weights, plain or in fewer bits: made, indexed and taken apart in the same way.

A `QuantizedMatrix` is a tuple of its parts, so the operators of a tensor mean something else on it; these functions
mean the same on both.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch

from tritonmoe.memory import empty_tensor
from tritonmoe_kernels.quantized import Matrix, QuantizedMatrix, WeightFormat, dequantize


def parts(matrix: Matrix) -> list[torch.Tensor]:
    """The tensors that hold it: codes, scales and, where stored, zero points; a plain one is its own part."""
    if isinstance(matrix, torch.Tensor):
        return [matrix]
    return [matrix.codes, matrix.scales] + ([] if matrix.zeros is None else [matrix.zeros])


def empty_matrix(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, form: WeightFormat | None = None
) -> Matrix:
    """Uninitialised values of `shape` [..., rows, columns] in `dtype`, or in `form`; see `WeightFormat.shapes`."""
    if form is None:
        return empty_tensor(shape, dtype, device)
    *leading, rows, columns = shape
    made = {
        name: empty_tensor((*leading, *part), part_dtype, device)
        for name, (part, part_dtype) in form.shapes(rows, columns).items()
    }
    return QuantizedMatrix(form, made["codes"], made["scales"], made.get("zeros"))


def select(matrix: Matrix, index: int | None) -> Matrix:
    """`matrix[index]` along its first axis; None adds one."""
    return _each(matrix, lambda part: part[index])


def row_slice(matrix: Matrix, first: int, count: int) -> Matrix:
    """`count` rows of [..., rows, columns], where no scale covers others as well: `first` begins a group of rows, and
    so does the row after them, unless it is beyond the last."""
    if isinstance(matrix, torch.Tensor):
        return matrix[..., first : first + count, :]
    size = matrix.format.group_rows
    assert first % size == 0, "a scale covers rows before these"
    assert (first + count) % size == 0 or first + count == matrix.codes.shape[-2], "a scale covers rows after these"
    groups = slice(first // size, -(-(first + count) // size))
    _, scales, *zeros = (part[..., groups, :] for part in parts(matrix))
    return QuantizedMatrix(matrix.format, matrix.codes[..., first : first + count, :], scales, *zeros)


def copy_matrix(dest: Matrix, source: Matrix) -> None:
    """Copy all parts; both are plain or of the same format."""
    for to, what in zip(parts(dest), parts(source), strict=True):
        to.copy_(what)


def floats(matrix: Matrix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Its values as a tensor of `dtype`."""
    return matrix.to(dtype) if isinstance(matrix, torch.Tensor) else dequantize(matrix, dtype)


def row_groups(form: WeightFormat, *rows: int) -> WeightFormat:
    """`form` with groups of rows that divide each of `rows`: parts of a matrix, such as gate and up, that are stored
    one behind the other share no scale."""
    return WeightFormat(form.name, form.group, gcd(form.group_rows, *rows), form.scale_dtype, form.has_zeros)


def in_format(matrix: QuantizedMatrix, form: WeightFormat) -> QuantizedMatrix | None:
    """The same codes with their scales laid out as `form` has them, or None where it cannot hold them exactly."""
    own, (rows, columns) = matrix.format, matrix.shape[-2:]
    is_same = own.group == form.group or (own.group >= columns and form.group >= columns)
    if (own.name, own.has_zeros) != (form.name, form.has_zeros) or not is_same or own.group_rows % form.group_rows:
        return None
    scales = matrix.scales.to(form.scale_dtype)
    if not torch.equal(scales.to(own.scale_dtype), matrix.scales):
        return None
    finer, groups = own.group_rows // form.group_rows, -(-rows // form.group_rows)
    spread = [part.repeat_interleave(finer, -2)[..., :groups, :] for part in (scales, *parts(matrix)[2:])]
    return QuantizedMatrix(form, matrix.codes, *spread)


def _each(matrix: Matrix, change: Callable[[torch.Tensor], torch.Tensor]) -> Matrix:
    if isinstance(matrix, torch.Tensor):
        return change(matrix)
    return QuantizedMatrix(matrix.format, *(change(part) for part in parts(matrix)))
