"""The projection of decode steps against its reference."""

from __future__ import annotations

import pytest
import torch
from kernel_testing import DEVICE, DTYPES, KERNEL_MARKS, assert_close, poisoned, randn
from quantized_matrices import FORMATS, format_name, random_matrix

from tritonmoe_kernels.linear import linear
from tritonmoe_kernels.quantized import QuantizedMatrix, WeightFormat
from tritonmoe_kernels.references import linear_ref

pytestmark = KERNEL_MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "units", "hidden"), [(1, 1, 1), (1, 7, 33), (3, 300, 130), (16, 33, 64), (1, 5, 2880)]
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_linear(tokens: int, units: int, hidden: int, has_norm: bool, dtype: torch.dtype) -> None:
    x, weight, bias = randn(tokens, hidden, dtype=dtype), randn(units, hidden, dtype=dtype, seed=1), None
    norm_weight = None
    if has_norm:
        norm_weight = 1 + randn(hidden, scale=0.2, seed=2)
    else:
        bias = randn(units, dtype=dtype, seed=3)
    out = linear(x, weight, bias, norm_weight, 1e-6, out=poisoned(tokens, units, dtype=dtype))
    expected = linear_ref(x.float(), weight.float(), None if bias is None else bias.float(), norm_weight, 1e-6)
    assert_close(out, expected)


def test_float32_result_of_any_dtype() -> None:
    """Logits are float32 whatever the weights are: what 16 bits would round away is there."""
    x, weight = randn(2, 64, dtype=torch.float16), randn(9, 64, dtype=torch.float16, seed=1)
    out = linear(x, weight, out=poisoned(2, 9, dtype=torch.float32))
    assert_close(out, linear_ref(x.float(), weight.float()))


def test_weight_plus_one() -> None:
    x, weight, norm_weight = randn(1, 40), randn(6, 40, seed=1), randn(40, scale=0.1, seed=2)
    assert_close(
        linear(x, weight, None, norm_weight, 1e-5, weight_plus_one=True),
        linear(x, weight, None, norm_weight + 1, 1e-5),
    )


def quantized_weight(form: WeightFormat, units: int, hidden: int) -> QuantizedMatrix:
    matrix = random_matrix(form, 1, units, hidden, hidden**-0.5, 1, DEVICE)
    return QuantizedMatrix(form, *(part if part is None else part[0] for part in matrix[1:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("units", "hidden", "has_norm"), [(7, 34, True), (130, 144, False)])
@pytest.mark.parametrize("form", FORMATS[4:], ids=format_name)
def test_quantized(form: WeightFormat, units: int, hidden: int, has_norm: bool, dtype: torch.dtype) -> None:
    weight, x = quantized_weight(form, units, hidden), randn(2, hidden, dtype=dtype)
    norm_weight, bias = (1 + randn(hidden, scale=0.2, seed=2), None) if has_norm else (None, randn(units, dtype=dtype))
    out = linear(x, weight, bias, norm_weight, 1e-6, out=poisoned(2, units, dtype=dtype))
    assert_close(out, linear_ref(x, weight, bias, norm_weight, 1e-6))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("units", "hidden"), [(5120, 2048), (2048, 4096), (5120, 2880), (201088, 2880)])
@pytest.mark.parametrize("form", FORMATS[4:], ids=format_name)
def test_quantized_model_shapes(form: WeightFormat, units: int, hidden: int, dtype: torch.dtype) -> None:
    weight, x = quantized_weight(form, units, hidden), randn(1, hidden, dtype=dtype)
    out = linear(x, weight, None, torch.ones(hidden, device=DEVICE), 1e-6, out=poisoned(1, units, dtype=dtype))
    assert_close(out, linear_ref(x, weight, None, torch.ones(hidden, device=DEVICE), 1e-6))


def test_no_tokens() -> None:
    assert linear(randn(0, 8), randn(3, 8)).shape == (0, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x, weight = randn(5, 96, dtype=dtype), randn(40, 96, dtype=dtype, seed=1)
    together = linear(x, weight, None, torch.ones(96, device=x.device), 1e-6)
    for row in range(5):
        assert linear(x[row : row + 1], weight, None, torch.ones(96, device=x.device), 1e-6).equal(
            together[row : row + 1]
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("units", "hidden", "has_norm"),
    [(5120, 2048, True), (2048, 4096, False), (5120, 2880, True), (2880, 4096, False), (4096, 18432, False)],
)
def test_model_shapes(units: int, hidden: int, has_norm: bool, dtype: torch.dtype) -> None:
    x, weight = randn(1, hidden, dtype=dtype), randn(units, hidden, dtype=dtype, scale=0.02, seed=1)
    norm_weight = 1 + randn(hidden, scale=0.2, seed=2) if has_norm else None
    out = linear(x, weight, None, norm_weight, 1e-6, out=poisoned(1, units, dtype=dtype))
    expected = linear_ref(x.double(), weight.double(), None, norm_weight, 1e-6)
    assert_close(out, expected.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(17, 8)}, "17 tokens"),
        ({"x": torch.ones(1, 7)}, "x has shape"),
        ({"x": torch.ones(1, 8, dtype=torch.float16)}, "weight is torch.float32, expected torch.float16"),
        ({"bias": torch.ones(4)}, "bias has shape"),
        ({"norm_weight": torch.ones(3)}, "norm_weight has shape"),
        ({"out": torch.ones(1, 4)}, "out has shape"),
    ],
)
def test_wrong_arguments(change: dict, message: str) -> None:
    arguments = {"x": torch.ones(1, 8), "weight": torch.ones(3, 8)} | change
    with pytest.raises(ValueError, match=message):
        linear(**arguments)
