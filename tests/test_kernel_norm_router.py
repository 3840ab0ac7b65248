"""`norm_router`, `add_rms_norm` and `route_topk` against their references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_testing import DEVICE, DTYPES, KERNEL_MARKS, assert_close, poisoned, randn

from tritonmoe_kernels.norm_router import NormRouterOutput, Routing, add_rms_norm, norm_router, route_topk
from tritonmoe_kernels.references import add_rms_norm_ref, norm_router_ref, route_topk_ref

pytestmark = KERNEL_MARKS

EPSILON = 1e-6
ROUTINGS = {
    "softmax": Routing(2, "softmax"),
    "softmax_renormalized": Routing(4, "softmax", renormalize=True, renorm_minimum=0.25, scale=1.5),
    "sigmoid": Routing(3, "sigmoid", renormalize=True, renorm_epsilon=1e-20, scale=2.5),
    "topk_softmax": Routing(4, "topk_softmax"),
    "softmax_groups": Routing(3, "softmax", num_groups=4, topk_groups=2),
    "sigmoid_groups": Routing(4, "sigmoid", renormalize=True, num_groups=3, topk_groups=2),
    "sigmoid_groups_of_one": Routing(2, "sigmoid", num_groups=12, topk_groups=5),
    "one": Routing(1, "softmax", renormalize=True),
    "all": Routing(12, "softmax"),
}


def exact_logits(tokens: int, experts: int, dtype: torch.dtype, hidden: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H] of small integers and a router of quarters: every logit is exact in any order, and many are equal."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-2, 3, (tokens, hidden), generator=generator)
    router = torch.randint(-2, 3, (experts, hidden), generator=generator) / 4
    return x.to(DEVICE, dtype), router.to(DEVICE, dtype)


def poisoned_output(tokens: int, hidden: int, experts: int, top_k: int, dtype: torch.dtype) -> NormRouterOutput:
    return NormRouterOutput(
        poisoned(tokens, hidden, dtype=dtype),
        poisoned(tokens, hidden, dtype=dtype),
        poisoned(tokens, experts, dtype=torch.float32),
        poisoned(tokens, top_k, dtype=torch.int32),
        poisoned(tokens, top_k, dtype=torch.float32),
    )


def zero_counter(tokens: int) -> torch.Tensor:
    return torch.zeros(tokens, dtype=torch.int32, device=DEVICE)


def arguments(
    tokens: int, hidden: int, experts: int, dtype: torch.dtype, router_dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return {
        "residual": randn(tokens, hidden, dtype=dtype, seed=1),
        "delta": randn(tokens, hidden, dtype=dtype, seed=2),
        "norm_weight": 1 + randn(hidden, scale=0.2, seed=3),
        "router": randn(experts, hidden, dtype=router_dtype, scale=hidden**-0.5, seed=4),
        "counter": zero_counter(tokens),
    }


def assert_routed(
    actual: NormRouterOutput, expected: NormRouterOutput, routing: Routing, **biases: torch.Tensor
) -> None:
    """Residual, x and logits are close; ids and gate weights are those of the kernel's own logits.

    The logits differ in their last bits between the two, so that their choice may differ where scores nearly tie.
    """
    assert_close(actual.residual, expected.residual)
    assert_close(actual.x, expected.x)
    assert_close(actual.logits, expected.logits, factor=1 if actual.x.dtype == torch.float32 else 400)
    ids, weights = route_topk_ref(actual.logits, routing, **biases)
    assert torch.equal(actual.topk_ids, ids)
    assert_close(actual.topk_weights, weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden", "experts"), [(1, 160, 5), (7, 90, 12), (2, 720, 33), (1, 64, 1)], ids=lambda value: str(value)
)
def test_norm_router(tokens: int, hidden: int, experts: int, dtype: torch.dtype) -> None:
    routing = Routing(min(4, experts), "softmax", renormalize=True)
    given = arguments(tokens, hidden, experts, dtype)
    expected = norm_router_ref(**given, routing=routing, epsilon=EPSILON)
    for _ in range(2):  # the second launch finds the counter as the first left it
        out = poisoned_output(tokens, hidden, experts, routing.top_k, dtype)
        assert norm_router(**given, routing=routing, epsilon=EPSILON, out=out) is out
        assert not given["counter"].any()
        assert_routed(out, expected, routing)


def test_no_tokens() -> None:
    out = norm_router(**arguments(0, 64, 8, torch.float32), routing=Routing(2, "softmax"), epsilon=EPSILON)
    assert [list(tensor.shape) for tensor in out] == [[0, 64], [0, 64], [0, 8], [0, 2], [0, 2]]


@pytest.mark.parametrize("router_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(dtype: torch.dtype, router_dtype: torch.dtype) -> None:
    """Multiplier, 1 + w, both biases, a 16-bit router, and no delta."""
    routing = ROUTINGS["sigmoid"]
    given = arguments(3, 48, 12, dtype, router_dtype)
    bias, selection_bias = randn(12, seed=5), randn(12, seed=6)
    options = {
        "router_bias": bias,
        "selection_bias": selection_bias,
        "residual_multiplier": 0.22,
        "weight_plus_one": True,
    }
    for delta in (given["delta"], None):
        given["delta"] = delta
        out = norm_router(**given, routing=routing, epsilon=EPSILON, **options)
        expected = norm_router_ref(**given, routing=routing, epsilon=EPSILON, **options)
        assert_routed(out, expected, routing, selection_bias=selection_bias)


@pytest.mark.parametrize("name", ROUTINGS)
def test_routings_and_ties(name: str) -> None:
    """Every router type, in both kernels, on logits full of ties: ids equal the stable sort's."""
    routing = ROUTINGS[name]
    biased = routing.score == "sigmoid"
    x, router = exact_logits(7, 12, torch.float32)
    # A norm weight of zero plus one over a residual with unit mean square would round; undo the norm's scale instead.
    residual = torch.where(x == 0, 1.0, x.sign())
    selection_bias = (torch.arange(12, device=DEVICE) % 3 / 8) if biased else None
    given = {"norm_weight": torch.ones(6, device=DEVICE), "router": router, "routing": routing}
    given |= {"counter": zero_counter(7), "epsilon": 0.0, "selection_bias": selection_bias}
    out = norm_router(residual, None, **given)
    expected = norm_router_ref(residual, None, **given)
    assert torch.equal(out.x, residual)
    assert torch.equal(out.logits, expected.logits)
    assert len(out.logits.unique()) < out.logits.numel() / 2
    assert torch.equal(out.topk_ids, expected.topk_ids)
    assert_close(out.topk_weights, expected.topk_weights)
    topk_ids, topk_weights = route_topk(out.logits, routing, selection_bias)
    assert torch.equal(topk_ids, expected.topk_ids)
    assert_close(topk_weights, expected.topk_weights)


@pytest.mark.parametrize(
    ("experts", "top_k"), [(32, 1), (60, 4), (72, 10), (128, 8), (256, 8), (512, 10)], ids=lambda value: str(value)
)
def test_real_expert_counts(experts: int, top_k: int) -> None:
    """Ranking by counting and by rounds, distinct logits and equal ones."""
    routing = Routing(top_k, "topk_softmax")
    x, router = exact_logits(2, experts, torch.float32)
    residual = torch.where(x == 0, 1.0, x.sign())
    given = {"norm_weight": torch.ones(6, device=DEVICE), "router": router, "routing": routing}
    given |= {"counter": zero_counter(2), "epsilon": 0.0}
    out = norm_router(residual, None, **given)
    assert torch.equal(out.topk_ids, norm_router_ref(residual, None, **given).topk_ids)
    assert torch.equal(route_topk(out.logits, routing)[0], out.topk_ids)
    distinct = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i)) for i in range(2)])
    distinct = distinct.float().to(DEVICE) / 16
    assert torch.equal(route_topk(distinct, routing)[0], route_topk_ref(distinct, routing)[0])


@pytest.mark.parametrize("tokens", [0, 1, 7, 33, 300])
@pytest.mark.parametrize("name", ["softmax_renormalized", "sigmoid_groups"])
def test_route_topk_tokens(name: str, tokens: int) -> None:
    routing = ROUTINGS[name]
    logits = randn(tokens, 12, scale=3)
    buffers = poisoned(tokens, routing.top_k, dtype=torch.int32), poisoned(tokens, routing.top_k, dtype=torch.float32)
    topk_ids, topk_weights = route_topk(logits, routing, None, *buffers)
    assert topk_ids is buffers[0]
    assert topk_weights is buffers[1]
    if tokens:
        expected_ids, expected_weights = route_topk_ref(logits, routing)
        assert torch.equal(topk_ids, expected_ids)
        assert_close(topk_weights, expected_weights)


def test_logits_that_are_not_finite() -> None:
    """NaN ranks first and -inf last, as in the reference; ids stay valid and distinct."""
    logits = torch.tensor([[0.0, float("nan"), 2.0, -float("inf"), float("inf"), -0.0]], device=DEVICE)
    topk_ids, _ = route_topk(logits, Routing(6, "sigmoid"))
    assert topk_ids.tolist() == [[1, 4, 2, 0, 5, 3]]
    assert route_topk_ref(logits, Routing(6, "sigmoid"))[0].tolist() == topk_ids.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "hidden"), [(0, 64), (1, 2880), (7, 160), (33, 50), (300, 24)], ids=str)
def test_add_rms_norm(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    given = arguments(tokens, hidden, 1, dtype)
    residual, delta, weight = given["residual"], given["delta"], given["norm_weight"]
    buffers = poisoned(tokens, hidden, dtype=dtype), poisoned(tokens, hidden, dtype=dtype)
    actual = add_rms_norm(residual, delta, weight, EPSILON, 0.5, True, *buffers)
    expected = add_rms_norm_ref(residual, delta, weight, EPSILON, 0.5, True)
    assert actual[0] is buffers[0]
    assert actual[1] is buffers[1]
    if tokens:
        assert_close(actual[0], expected[0])
        assert_close(actual[1], expected[1])
        same, x = add_rms_norm(residual, None, weight, EPSILON)
        assert same is residual
        assert_close(x, add_rms_norm_ref(residual, None, weight, EPSILON)[1])
        in_place, x = add_rms_norm(residual.clone(), delta, weight, EPSILON, 0.5, True)
        assert torch.equal(in_place, actual[0])
        assert torch.equal(x, actual[1])


def test_in_place_residual() -> None:
    given = arguments(3, 40, 1, torch.float32)
    expected, x = add_rms_norm_ref(given["residual"], given["delta"], given["norm_weight"], EPSILON)
    residual = given["residual"]
    out, actual = add_rms_norm(residual, given["delta"], given["norm_weight"], EPSILON, residual_out=residual)
    assert out is residual
    assert_close(residual, expected)
    assert_close(actual, x)


def test_same_input_same_bits() -> None:
    routing = ROUTINGS["softmax_renormalized"]
    given = arguments(4, 100, 20, torch.float16)
    first = norm_router(**given, routing=routing, epsilon=EPSILON)
    second = norm_router(**given, routing=routing, epsilon=EPSILON)
    for name, one, other in zip(first._fields, first, second, strict=True):
        assert torch.equal(one, other), name


REFUSED = {
    "residual has shape": {"residual": torch.zeros(2, 7)},
    "residual is torch.int32": {"residual": torch.zeros(2, 8, dtype=torch.int32)},
    "residual is not contiguous": {"residual": torch.zeros(8, 2).T},
    "delta is torch.float16": {"delta": torch.zeros(2, 8, dtype=torch.float16)},
    "delta has shape": {"delta": torch.zeros(1, 8)},
    "norm_weight has shape": {"norm_weight": torch.zeros(9)},
    "router has shape": {"router": torch.zeros(8)},
    "router_bias has shape": {"router_bias": torch.zeros(3)},
    "selection_bias has shape": {"selection_bias": torch.zeros(3)},
    "counter has 1 entries": {"counter": torch.zeros(1, dtype=torch.int32)},
    "counter is torch.int64": {"counter": torch.zeros(2, dtype=torch.int64)},
    "17 tokens": {"residual": torch.zeros(17, 8)},
    "top_k is 5": {"routing": Routing(5, "softmax")},
    "top_k is 0": {"routing": Routing(0, "softmax")},
    "score is 'relu'": {"routing": Routing(2, "relu")},  # type: ignore[arg-type]
    "num_groups is 3": {"routing": Routing(2, "softmax", num_groups=3)},
    "topk_groups is 3": {"routing": Routing(2, "softmax", num_groups=2, topk_groups=3)},
    "takes no selection_bias": {"routing": Routing(2, "topk_softmax"), "selection_bias": torch.zeros(4)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    given = arguments(2, 8, 4, torch.float32) | {"routing": Routing(2, "softmax"), "epsilon": EPSILON}
    wrong = {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in REFUSED[message].items()}
    with pytest.raises(ValueError, match=message):
        norm_router(**(given | wrong))


def test_refused_buffers() -> None:
    given = arguments(2, 8, 4, torch.float32) | {"routing": Routing(2, "softmax"), "epsilon": EPSILON}
    out = poisoned_output(2, 8, 4, 2, torch.float32)
    with pytest.raises(ValueError, match="topk_ids is"):
        norm_router(**given, out=out._replace(topk_ids=out.topk_ids.long()))
    with pytest.raises(ValueError, match="residual must not share memory"):
        norm_router(**given, out=out._replace(residual=given["residual"]))
    with pytest.raises(ValueError, match="logits is"):
        route_topk(out.logits.half(), given["routing"])
    with pytest.raises(ValueError, match="topk_ids has shape"):
        route_topk(out.logits, replace(given["routing"], top_k=3), None, out.topk_ids)
    with pytest.raises(ValueError, match="without a delta"):
        add_rms_norm(given["residual"], None, given["norm_weight"], EPSILON, residual_out=out.residual)
    with pytest.raises(ValueError, match="x has shape"):
        add_rms_norm(given["residual"], None, given["norm_weight"], EPSILON, x=out.x[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "name"),
    [
        (1, 2048, 128, "softmax_renormalized"),
        (16, 2048, 128, "softmax_renormalized"),
        (1, 2880, 32, "topk_softmax"),
        (7, 8192, 256, "sigmoid"),
        (8, 2048, 512, "softmax_renormalized"),
    ],
)
def test_model_shapes(tokens: int, hidden: int, experts: int, name: str, dtype: torch.dtype) -> None:
    routing = ROUTINGS[name]
    for router_dtype in (torch.float32, torch.bfloat16):
        given = arguments(tokens, hidden, experts, dtype, router_dtype)
        out = poisoned_output(tokens, hidden, experts, routing.top_k, dtype)
        norm_router(**given, routing=routing, epsilon=EPSILON, out=out)
        assert not given["counter"].any()
        assert_routed(out, norm_router_ref(**given, routing=routing, epsilon=EPSILON), routing)


@pytest.mark.gpu
def test_replayed_100_000_times() -> None:
    """The arrival counter never lets a program read logits that are not there yet.

    A replay makes 20 launches, each on another input with its logits poisoned first, so that reading them too early
    shows; the device counts the values that differ from those of a launch whose results were checked.
    """
    routing = ROUTINGS["softmax_renormalized"]
    launches, replays, tokens = 20, 5_000, 3
    given = arguments(tokens, 2048, 128, torch.bfloat16)
    inputs = [randn(tokens, 2048, dtype=torch.bfloat16, seed=100 + i) for i in range(launches)]
    expected = []
    for residual in inputs:
        out = norm_router(**(given | {"residual": residual}), routing=routing, epsilon=EPSILON)
        assert_routed(
            out, norm_router_ref(**(given | {"residual": residual}), routing=routing, epsilon=EPSILON), routing
        )
        expected.append(out)
    out = poisoned_output(tokens, 2048, 128, routing.top_k, torch.bfloat16)
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def step() -> None:
        for residual, wanted in zip(inputs, expected, strict=True):
            out.logits.fill_(float("nan"))
            norm_router(**(given | {"residual": residual}), routing=routing, epsilon=EPSILON, out=out)
            for one, other in zip(out, wanted, strict=True):
                differing.add_((one != other).sum())

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm up on the side, as capture wants
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    assert differing.item() == 0
    assert not given["counter"].any()
