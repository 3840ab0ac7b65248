"""Quantising: nearest codes, the better scale, the same result in pieces, and nothing that is not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantization_error import Restore, plain_int4, plain_mxfp4

from tritonmoe.checkpoint.quantization import EXPERT_FORMATS, quantize
from tritonmoe_kernels.quantized import MXFP4_VALUES, QuantizedMatrix, WeightFormat, dequantize

FORMATS = {
    **EXPERT_FORMATS,
    "int4-zeros": WeightFormat("int4", 32, scale_dtype=torch.bfloat16, has_zeros=True),
    "int4-float16": WeightFormat("int4", 128, scale_dtype=torch.float16),
}
EVERY = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())


def noise(*shape: int, seed: int = 0, size: float = 0.02) -> torch.Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same(left: QuantizedMatrix, right: QuantizedMatrix) -> None:
    """In every bit."""
    for a, b in zip(left[1:], right[1:], strict=True):
        assert a is b is None or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def spread(groups: torch.Tensor, form: WeightFormat, shape: torch.Size) -> torch.Tensor:
    """What the group of each value has."""
    each_row = groups.repeat_interleave(form.group_rows, -2)[..., : shape[-2], :]
    return each_row.repeat_interleave(form.group, -1)[..., : shape[-1]]


def all_levels(matrix: QuantizedMatrix) -> torch.Tensor:
    """Everything that each value could have been with the scale of its group, [rows, columns, codes]."""
    form = matrix.format
    if form.name == "mxfp4":
        levels = torch.tensor(MXFP4_VALUES)
        scales = torch.exp2(matrix.scales.double() - 127).float()
    else:
        levels = {
            "int4": torch.arange(16.0),
            "int8": torch.arange(-127.0, 128.0),
            "fp8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0),
        }[form.name]
        scales = matrix.scales.float()
    if form.name == "int4":
        zeros = torch.full_like(scales, 8) if matrix.zeros is None else matrix.zeros
        levels = levels - spread(zeros, form, matrix.shape)[..., None]
    return levels * spread(scales, form, matrix.shape)[..., None]


MATRICES = {
    "rows": st.integers(1, 5),
    "columns": st.integers(1, 80).map(lambda n: 2 * n),
    "seed": st.integers(0, 1 << 30),
    "exponent": st.integers(-70, 60),
    "unevenness": st.sampled_from([0.0, 1.0, 4.0]),
}


@EVERY
@given(**MATRICES)
@settings(max_examples=30, deadline=None)
def test_every_value_becomes_the_nearest_code(
    form: WeightFormat, rows: int, columns: int, seed: int, exponent: int, unevenness: float
) -> None:
    """Which is an error of half a step at most, but for the values that are clipped; and what was found is kept."""
    size = 2.0 ** (exponent % 4 if form.scale_dtype == torch.float16 else exponent)
    values = noise(rows, columns, seed=seed, size=size)
    values *= torch.exp(unevenness * noise(rows, columns, seed=seed + 1, size=1.0))
    if form.scale_dtype == torch.float16:
        values.clamp_(-1000, 1000)
    matrix = quantize(values, form)
    restored, levels = dequantize(matrix), all_levels(matrix)
    nearest = (levels - values[..., None]).abs().amin(-1)
    assert torch.equal((restored - values).abs(), nearest)
    clipped_to = torch.maximum(levels.amax(-1), -levels.amin(-1))
    assert (values.abs() <= clipped_to * (1.01 if form.bits == 8 else 4 / 3)).all()
    if not form.has_zeros:
        assert_same(quantize(restored, form), matrix)


@pytest.mark.parametrize("form", EXPERT_FORMATS.values(), ids=EXPERT_FORMATS.keys())
def test_what_the_format_can_hold_is_kept_exactly(form: WeightFormat) -> None:
    """Random codes under scales that vary, with the last code in every group."""
    matrix = quantize(noise(256, 288), form)
    codes = torch.randint(0, 256, matrix.codes.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    if form.bits == 8:  # neither -128 nor NaN is a code of ours
        codes[(codes == 128) | ((codes & 127) == 127)] = 0
    codes[..., :: form.group * form.bits // 8] = {"int4": 0x80, "fp8": 0x7E, "int8": 0x7F, "mxfp4": 0x7F}[form.name]
    values = dequantize(QuantizedMatrix(form, codes.view(form.code_dtype), matrix.scales))
    assert torch.equal(dequantize(quantize(values, form)), values)


@pytest.mark.parametrize(("name", "usual", "gain"), [("mxfp4", plain_mxfp4, 0.02), ("int4", plain_int4, 0.11)])
def test_the_choice_of_scales_pays(name: str, usual: Restore, gain: float) -> None:
    """Against the usual scales, in the root-mean-square error of normally distributed values."""
    form, values = EXPERT_FORMATS[name], noise(64, 1024)
    error = (dequantize(quantize(values, form)) - values).norm()
    assert error < (1 - gain) * (usual(values, form) - values).norm()


@EVERY
@pytest.mark.parametrize("pieces", [[128, 128, 44], [256, 44], [300]])
def test_pieces_of_a_matrix_are_the_pieces_of_its_result(
    form: WeightFormat, pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a [2, rows, columns] tensor, of a view, and for every size of the inner chunks."""
    values = noise(2, 300, 352).bfloat16()
    whole = quantize(values, form)
    monkeypatch.setattr("tritonmoe.checkpoint.quantization.CHUNK_ELEMENTS", 1000)
    for i in range(2):
        split = [quantize(part, form) for part in values[i].split(pieces)]
        joined = [None if part[0] is None else torch.cat(part) for part in zip(*(q[1:] for q in split), strict=True)]
        expected = [None if part is None else part[i] for part in whole[1:]]
        assert_same(QuantizedMatrix(form, *joined), QuantizedMatrix(form, *expected))
    assert_same(quantize(values.mT.contiguous().mT, form), whole)


@EVERY
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -(2.0**96), 2.0**96])
def test_extreme_groups(form: WeightFormat, value: float) -> None:
    """Zeros stay zero; magnitudes at the ends of float32 stay finite where the scale's dtype has the range."""
    values = torch.full((3, 64), value)
    if form.scale_dtype == torch.float16 and abs(value) > 1:
        values *= 2.0**-96
    restored = dequantize(quantize(values, form))
    assert ((restored - values).abs() <= 0.05 * values.abs() + 1e-40).all()


@EVERY
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(form: WeightFormat, value: float) -> None:
    values = noise(3, 64)
    values[1, 40] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize(values, form)


@EVERY
def test_no_rows(form: WeightFormat) -> None:
    assert quantize(torch.empty(0, 64), form).shape == (0, 64)


def test_odd_columns_of_four_bits() -> None:
    with pytest.raises(ValueError, match="even number of columns"):
        quantize(noise(2, 33), EXPERT_FORMATS["int4"])
    assert quantize(noise(2, 33), EXPERT_FORMATS["int8"]).shape == (2, 33)
