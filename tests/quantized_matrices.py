"""Random quantised matrices for tests."""

from __future__ import annotations

import torch

from tritonmoe_kernels.quantized import MXFP4, QuantizedMatrix, WeightFormat

FORMATS = [
    MXFP4,
    WeightFormat("int4", 32, scale_dtype=torch.bfloat16),
    WeightFormat("int4", 64, scale_dtype=torch.float32, has_zeros=True),
    WeightFormat("int4", 128, scale_dtype=torch.float16, has_zeros=True),
    WeightFormat("int8", 32, scale_dtype=torch.bfloat16),
    WeightFormat("fp8", 128, 128, scale_dtype=torch.float32),
    WeightFormat("fp8", 128, 128, scale_dtype=torch.bfloat16),
]
# About the root mean square of a format's codes, so that products of any format are of one size.
CODE_SIZES = {"mxfp4": 2.5, "int4": 4.6, "int8": 73.0, "fp8": 100.0}


def format_name(form: WeightFormat) -> str:
    """Of a test's parameter."""
    return f"{form.name}-{form.group}-{str(form.scale_dtype)[6:]}{'-zeros' * form.has_zeros}"


def random_matrix(
    form: WeightFormat, slots: int, rows: int, columns: int, size: float = 0.1, seed: int = 0, device: str = "cpu"
) -> QuantizedMatrix:
    """Every code there is but NaN, under scales between a half and twice what gives values of about `size`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = form.shapes(rows, columns)
    (codes_shape, code_dtype), (groups, scale_dtype) = shapes["codes"], shapes["scales"]
    codes = torch.randint(0, 256, (slots, *codes_shape), dtype=torch.uint8, generator=generator)
    if form.name == "int8":
        codes.masked_fill_(codes == 0x80, 0)  # -128 is no code
    elif form.name == "fp8":
        codes.masked_fill_(codes & 0x7F == 0x7F, 0)  # NaN
    step = size / CODE_SIZES[form.name]
    spread = torch.exp2(2 * torch.rand(slots, *groups, generator=generator) - 1)
    if form.name == "mxfp4":
        scales = (torch.tensor(step).log2().round() + 127 + spread.log2().round()).to(scale_dtype)
    else:
        scales = (step * spread).to(scale_dtype)
    zeros = torch.randint(0, 16, (slots, *groups), dtype=torch.uint8, generator=generator) if form.has_zeros else None
    parts = (codes.view(code_dtype), scales, zeros)
    return QuantizedMatrix(form, *(part if part is None else part.to(device) for part in parts))
