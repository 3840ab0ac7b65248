"""What quantised weights are worth: every code, every scale, ragged groups, and the references that use them."""

from __future__ import annotations

import pytest
import torch
from quantized_matrices import FORMATS, format_name, random_matrix

from tritonmoe_kernels import reference
from tritonmoe_kernels.quantized import MXFP4, QuantizedMatrix, WeightFormat, dequantize
from tritonmoe_kernels.references import linear_ref

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_mxfp4_is_worth_what_the_specification_says() -> None:
    """All codes under all scales, against a table written out by hand; 255 is NaN."""
    codes = (torch.arange(16) | torch.arange(16).flip(0) << 4).to(torch.uint8).repeat(256, 1, 1)  # [256, 1, 16]
    scales = torch.arange(256).to(torch.uint8).view(256, 1, 1)
    values = dequantize(QuantizedMatrix(MXFP4, codes, scales))
    signed = torch.tensor(MAGNITUDES + [-value for value in MAGNITUDES], dtype=torch.float64)
    expected = torch.stack((signed, signed.flip(0)), dim=-1).flatten()
    for scale in range(255):
        exact = expected * 2.0 ** (scale - 127)  # in float64; 6 · 2^127 is infinite in float32
        assert torch.equal(values[scale, 0], exact.float())
    assert values[255].isnan().all()


@pytest.mark.parametrize("has_zeros", [False, True])
def test_int4_is_worth_what_it_says(has_zeros: bool) -> None:
    form = WeightFormat("int4", group=4, scale_dtype=torch.float32, has_zeros=has_zeros)
    codes = torch.tensor([[[0x10, 0x32, 0xF8]]], dtype=torch.uint8)
    scales = torch.tensor([[[0.5, -2.0]]])
    zeros = torch.tensor([[[3, 15]]], dtype=torch.uint8) if has_zeros else None
    first, last = (3, 15) if has_zeros else (8, 8)
    expected = [0.5 * (code - first) for code in range(4)] + [-2.0 * (code - last) for code in (8, 15)]
    assert dequantize(QuantizedMatrix(form, codes, scales, zeros)).flatten().tolist() == expected


def test_eight_bits_are_worth_what_they_say() -> None:
    int8 = WeightFormat("int8", group=4, scale_dtype=torch.float32)
    codes = torch.tensor([[[-127, -1, 0, 1, 127, 5]]], dtype=torch.int8)
    values = dequantize(QuantizedMatrix(int8, codes, torch.tensor([[[2.0, 0.25]]])))
    assert values.flatten().tolist() == [-254.0, -2.0, 0.0, 2.0, 31.75, 1.25]
    fp8 = WeightFormat("fp8", group=2, group_rows=2, scale_dtype=torch.float32)
    codes = torch.tensor([[[1.0, 448.0, -0.5]] * 3]).to(torch.float8_e4m3fn)
    values = dequantize(QuantizedMatrix(fp8, codes, torch.tensor([[[2.0, 4.0], [8.0, 16.0]]])))
    assert values.tolist() == [[[2.0, 896.0, -2.0]] * 2 + [[8.0, 3584.0, -8.0]]]


@pytest.mark.parametrize("form", FORMATS, ids=format_name)
def test_slots_are_dequantised_alone(form: WeightFormat) -> None:
    matrix = random_matrix(form, 3, 130, 66)
    values = dequantize(matrix)
    assert values.shape == matrix.shape == (3, 130, 66)
    assert len(matrix) == 3
    assert torch.equal(dequantize(matrix.slot(1))[0], values[1])
    assert torch.equal(dequantize(matrix, torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("form", FORMATS, ids=format_name)
def test_references_multiply_what_the_codes_are_worth(form: WeightFormat) -> None:
    gate_up, down = random_matrix(form, 3, 16, 36), random_matrix(form, 3, 36, 8)
    x, slot_ids = torch.randn(2, 36), torch.tensor([[2, -1], [0, 2]])
    plain = reference.expert_mlp(x, slot_ids, dequantize(gate_up), dequantize(down))
    assert torch.equal(reference.expert_mlp(x, slot_ids, gate_up, down), plain)
    weight = QuantizedMatrix(form, *(part if part is None else part[1] for part in gate_up[1:]))
    assert torch.equal(linear_ref(x, weight), linear_ref(x, dequantize(weight)))


def test_refusals() -> None:
    for arguments, message in [
        (("int3",), "format must be"),
        (("int8", 32, 1, torch.float32, True), "has no zero points"),
        (("int4", 48), "power of two"),
    ]:
        with pytest.raises(ValueError, match=message):
            WeightFormat(*arguments)
    with pytest.raises(ValueError, match="even number of columns"):
        MXFP4.shapes(3, 33)
