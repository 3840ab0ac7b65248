"""`speculate` against its reference."""

from __future__ import annotations

import pytest
import torch
from kernel_testing import DEVICE, DTYPES, KERNEL_MARKS, assert_close, poisoned, randn

from tritonmoe_kernels import reference
from tritonmoe_kernels.norm_router import Routing
from tritonmoe_kernels.references import speculate_ref
from tritonmoe_kernels.routing import SpeculateOutput
from tritonmoe_kernels.speculate import speculate

pytestmark = KERNEL_MARKS

EPSILON = 1e-6
ROUTINGS = {
    "softmax": Routing(4, "softmax", renormalize=True),
    "sigmoid": Routing(4, "sigmoid"),
    "topk_softmax": Routing(4, "topk_softmax"),
    "softmax_groups": Routing(3, "softmax", num_groups=4, topk_groups=2),
    "sigmoid_groups": Routing(4, "sigmoid", renormalize=True, num_groups=3, topk_groups=2),
}


def arguments(
    tokens: int, hidden: int, experts: int, top_k: int, dtype: torch.dtype, router_dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Layer l has `experts` + 3 experts, so that the two counts cannot be confused."""
    ids = torch.stack([torch.randperm(experts + 3, generator=torch.Generator().manual_seed(t)) for t in range(tokens)])
    return {
        "residual": randn(tokens, hidden, dtype=dtype, seed=1),
        "default_vectors": randn(experts + 3, hidden, dtype=dtype, seed=2),
        "topk_ids": ids[:, :top_k].int().contiguous().to(DEVICE),
        "topk_weights": randn(tokens, top_k, seed=3).softmax(-1),
        "norm_weight": 1 + randn(hidden, scale=0.2, seed=4),
        "router": randn(experts, hidden, dtype=router_dtype, scale=hidden**-0.5, seed=5),
        "counter": torch.zeros(tokens, dtype=torch.int32, device=DEVICE),
    }


def poisoned_output(tokens: int, hidden: int, experts: int, count: int, dtype: torch.dtype) -> SpeculateOutput:
    return SpeculateOutput(
        poisoned(tokens, experts, dtype=torch.float32),
        poisoned(tokens, count, dtype=torch.int32),
        poisoned(tokens, hidden, dtype=dtype),
    )


def assert_speculated(
    actual: SpeculateOutput, expected: SpeculateOutput, routing: Routing, selection_bias: torch.Tensor | None = None
) -> None:
    """q and logits are close; the ids are those of the kernel's own logits, whose last bits differ."""
    if actual.q is not None:
        assert expected.q is not None
        assert_close(actual.q, expected.q)
    assert_close(actual.logits, expected.logits, factor=1 if expected.q.dtype == torch.float32 else 400)
    ids, _ = reference.route_topk(
        actual.logits,
        actual.ids.shape[1],
        routing.score,
        routing.renormalize,
        selection_bias,
        num_groups=routing.num_groups,
        topk_groups=routing.topk_groups,
    )
    assert torch.equal(actual.ids, ids.int())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "top_k", "count"), [(1, 160, 5, 1, 5), (7, 90, 12, 4, 6), (2, 720, 33, 10, 14)]
)
def test_speculate(tokens: int, hidden: int, experts: int, top_k: int, count: int, dtype: torch.dtype) -> None:
    routing = ROUTINGS["softmax"]
    given = arguments(tokens, hidden, experts, top_k, dtype)
    expected = speculate_ref(**given, routing=routing, count=count, epsilon=EPSILON)
    for _ in range(2):  # the second launch finds the counter as the first left it
        out = poisoned_output(tokens, hidden, experts, count, dtype)
        assert speculate(**given, routing=routing, count=count, epsilon=EPSILON, out=out) is out
        assert not given["counter"].any()
        assert_speculated(out, expected, routing)


def test_no_tokens() -> None:
    given = arguments(1, 64, 8, 2, torch.float32)
    given |= {name: given[name][:0] for name in ("residual", "topk_ids", "topk_weights")}
    out = speculate(**given, routing=Routing(2, "softmax"), count=3, epsilon=EPSILON)
    assert list(out.logits.shape) == [0, 8]
    assert list(out.ids.shape) == [0, 3]


@pytest.mark.parametrize("router_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(dtype: torch.dtype, router_dtype: torch.dtype) -> None:
    """Multiplier, 1 + w, both biases, a 16-bit router, other default vectors, and the residual alone."""
    routing = ROUTINGS["sigmoid_groups"]
    given = arguments(3, 48, 12, 4, dtype, router_dtype)
    given["default_vectors"] = given["default_vectors"].float()
    given |= {"router_bias": randn(12, seed=6), "selection_bias": randn(12, seed=7)}
    options = {"routing": routing, "count": 6, "epsilon": EPSILON, "residual_multiplier": 0.22, "weight_plus_one": True}
    without = dict.fromkeys(("default_vectors", "topk_ids", "topk_weights"))
    results = []
    for change in ({}, without):
        out = speculate(**(given | change), **options)
        assert out.q is None
        expected = speculate_ref(**(given | change), **options)
        assert_speculated(out, expected, routing, given["selection_bias"])
        results.append(out.logits)
    assert not torch.equal(*results)


@pytest.mark.parametrize("name", ROUTINGS)
def test_routings_and_ties(name: str) -> None:
    """Small integers: every logit is exact and many are equal, so ids must equal the stable sort's."""
    routing = ROUTINGS[name]
    generator = torch.Generator().manual_seed(8)
    signs = torch.randint(0, 2, (7, 6), generator=generator) * 2.0 - 1
    router = torch.randint(-2, 3, (12, 6), generator=generator) / 4
    default_vectors = torch.randint(0, 2, (9, 6), generator=generator) * 2.0 - 1
    weights = torch.tensor([2.0, -1.0, 0.0]).repeat(7, 1)
    topk_ids = torch.tensor([4, 4, 8], dtype=torch.int32).repeat(7, 1)
    # d is one default vector (2 - 1 = 1); the residual takes it away again and leaves signs, of mean square 1.
    given = {"residual": signs - default_vectors[4], "default_vectors": default_vectors, "topk_ids": topk_ids}
    given |= {"topk_weights": weights, "norm_weight": torch.ones(6), "router": router}
    given |= {"counter": torch.zeros(7, dtype=torch.int32)}
    given = {key: value.to(DEVICE) for key, value in given.items()}
    out = speculate(**given, routing=routing, count=7, epsilon=0.0)
    expected = speculate_ref(**given, routing=routing, count=7, epsilon=0.0)
    assert torch.equal(out.logits, expected.logits)
    assert len(out.logits.unique()) < out.logits.numel() / 2
    assert torch.equal(out.ids, expected.ids)


def test_count_beyond_the_eligible_groups() -> None:
    """After the eligible groups the lowest other ids follow, as in the reference: still distinct and valid."""
    routing = Routing(2, "sigmoid", num_groups=4, topk_groups=1)
    given = arguments(2, 32, 12, 2, torch.float32)
    out = speculate(**given, routing=routing, count=6, epsilon=EPSILON)
    assert_speculated(out, speculate_ref(**given, routing=routing, count=6, epsilon=EPSILON), routing)
    assert all(len(set(row)) == 6 for row in out.ids.tolist())


def test_same_input_same_bits() -> None:
    given = arguments(4, 100, 20, 4, torch.float16)
    first = speculate(**given, routing=ROUTINGS["softmax"], count=6, epsilon=EPSILON)
    second = speculate(**given, routing=ROUTINGS["softmax"], count=6, epsilon=EPSILON)
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.ids, second.ids)


REFUSED = {
    "residual has shape": {"residual": torch.zeros(2, 7)},
    "default_vectors has shape": {"default_vectors": torch.zeros(7, 9)},
    "topk_ids is torch.int64": {"topk_ids": torch.zeros(2, 2, dtype=torch.int64)},
    "topk_weights has shape": {"topk_weights": torch.zeros(2, 3)},
    "topk_weights is torch.float16": {"topk_weights": torch.zeros(2, 2, dtype=torch.float16)},
    "go together": {"topk_weights": None},
    "norm_weight has shape": {"norm_weight": torch.zeros(9)},
    "router is torch.int32": {"router": torch.zeros(4, 8, dtype=torch.int32)},
    "counter has 1 entries": {"counter": torch.zeros(1, dtype=torch.int32)},
    "count is 5": {"count": 5},
    "17 tokens": {"residual": torch.zeros(17, 8)},
    "takes no selection_bias": {"routing": Routing(2, "topk_softmax"), "selection_bias": torch.zeros(4)},
    "out.q has shape": {"out": (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 9))},
    "out.ids has shape": {"out": (torch.zeros(2, 4), torch.zeros(2, 2, dtype=torch.int32), None)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    given = arguments(2, 8, 4, 2, torch.float32) | {"routing": Routing(2, "softmax"), "count": 3, "epsilon": EPSILON}
    wrong = {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in REFUSED[message].items()}
    if "out" in wrong:
        wrong["out"] = SpeculateOutput(*(part if part is None else part.to(DEVICE) for part in wrong["out"]))
    with pytest.raises(ValueError, match=message):
        speculate(**(given | wrong))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "top_k", "count", "name"),
    [
        (1, 2048, 128, 8, 12, "softmax"),
        (16, 2048, 128, 8, 8, "softmax"),
        (1, 2880, 32, 4, 6, "topk_softmax"),
        (7, 8192, 256, 8, 12, "sigmoid"),
        (8, 2048, 512, 10, 16, "softmax"),
    ],
)
def test_model_shapes(
    tokens: int, hidden: int, experts: int, top_k: int, count: int, name: str, dtype: torch.dtype
) -> None:
    routing = ROUTINGS[name]
    for router_dtype in (torch.float32, torch.bfloat16):
        given = arguments(tokens, hidden, experts, top_k, dtype, router_dtype)
        out = poisoned_output(tokens, hidden, experts, count, dtype)
        speculate(**given, routing=routing, count=count, epsilon=EPSILON, out=out)
        assert not given["counter"].any()
        assert_speculated(out, speculate_ref(**given, routing=routing, count=count, epsilon=EPSILON), routing)
