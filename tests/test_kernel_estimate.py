"""The estimator of decode steps against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_testing import DTYPES, KERNEL_MARKS, assert_close, poisoned, randn

from tritonmoe_kernels.estimate import estimate
from tritonmoe_kernels.estimate_reference import EstimatorWeights, estimate_ref

pytestmark = KERNEL_MARKS


def network(hidden: int, width: int, inner: int, experts: int, dtype: torch.dtype = torch.float32) -> EstimatorWeights:
    def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
        return randn(rows, columns, dtype=dtype, scale=columns**-0.5, seed=seed)

    return EstimatorWeights(
        matrix(width, hidden, 1),
        randn(width, dtype=dtype, scale=0.5, seed=2),
        matrix(inner, width, 3),
        matrix(width, inner, 4),
        (1 + randn(width, scale=0.2, seed=5)).to(dtype),
        randn(width, dtype=dtype, scale=0.3, seed=6),
        matrix(experts, width, 7),
    )


def widened(weights: EstimatorWeights, dtype: torch.dtype) -> EstimatorWeights:
    return EstimatorWeights(*(part.to(dtype) for part in weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "sizes"), [(1, (1, 1, 1, 1)), (3, (33, 7, 19, 5)), (16, (160, 96, 200, 32)), (2, (700, 520, 600, 9))]
)
@pytest.mark.parametrize("has_base", [False, True])
def test_estimate(tokens: int, sizes: tuple[int, int, int, int], has_base: bool, dtype: torch.dtype) -> None:
    weights, q = network(*sizes, dtype=dtype), randn(tokens, sizes[0], dtype=dtype)
    base = randn(tokens, sizes[3], scale=2.0, seed=8) if has_base else None
    out = estimate(q, weights, base, out=poisoned(tokens, sizes[3], dtype=torch.float32))
    exact = estimate_ref(q.double(), widened(weights, torch.float64), base)
    if dtype == torch.float32:
        assert_close(out, exact.float(), factor=2)  # three products one after the other
    else:  # rounded between the products: as near to the exact result as the reference, which is rounded there too
        theirs = (estimate_ref(q, weights, base).double() - exact).square().mean().sqrt()
        ours = (out.double() - exact).square().mean().sqrt()
        assert ours <= 1.5 * theirs + 1e-3 * exact.double().square().mean().sqrt()


def test_layer_vector_decides() -> None:
    weights, q = network(16, 8, 12, 4), randn(2, 16)
    other = weights._replace(layer=weights.layer.flip(0).contiguous())
    assert not torch.allclose(estimate(q, weights), estimate(q, other), atol=1e-3)


def test_rows_do_not_depend_on_the_batch() -> None:
    weights, q = network(96, 40, 72, 10), randn(5, 96)
    together = estimate(q, weights)
    for row in range(5):
        assert estimate(q[row : row + 1], weights).equal(together[row : row + 1])


def test_no_tokens() -> None:
    assert estimate(randn(0, 16), network(16, 8, 12, 4)).shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.ones(17, 16)}, "17 tokens"),
        ({"q": torch.ones(1, 15)}, "into has shape"),
        ({"base": torch.ones(1, 5)}, "base has shape"),
        ({"out": torch.ones(1, 4, dtype=torch.float16)}, "out is torch.float16"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    weights = EstimatorWeights(*(part.cpu() for part in network(16, 8, 12, 4)))
    with pytest.raises(ValueError, match=message):
        estimate(**({"q": torch.ones(1, 16), "weights": weights} | change))


@pytest.mark.parametrize("name", ["layer", "up", "down", "norm_bias", "head"])
def test_wrong_weights(name: str) -> None:
    weights = network(16, 8, 12, 4)
    with pytest.raises(ValueError, match=f"{name} has shape"):
        estimate(randn(1, 16), weights._replace(**{name: randn(3, 3, 3)}))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_model_shapes(dtype: torch.dtype) -> None:
    weights, q = network(2048, 1024, 4096, 128, dtype), randn(1, 2048, dtype=dtype)
    exact = estimate_ref(q.double(), widened(weights, torch.float64))
    theirs = (estimate_ref(q, weights).double() - exact).square().mean().sqrt()
    assert (estimate(q, weights).double() - exact).square().mean().sqrt() <= 1.5 * theirs + 1e-6
