"""A batch drawn on the device against `sample` row by row: on the CPU, and on a GPU from a captured graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from tritonmoe.errors import InputError
from tritonmoe.generation.device_sampling import BatchSampler, SampleOutput
from tritonmoe.generation.sampling import SamplingParams, sample, uniform

CPU = torch.device("cpu")
NUM_STEPS = 3
MARGIN = 1e-9  # see `margin`
SAMPLED, GREEDY = SamplingParams(temperature=1.0), SamplingParams()


@dataclass(frozen=True)
class Row:
    """One row's parameters, history and (by seed and kind) logits."""

    params: SamplingParams
    history: tuple[int, ...]
    position: int
    kind: str
    noise_seed: int

    def logits(self, vocab_size: int, step: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.noise_seed + step)
        noise = torch.randn(vocab_size, generator=generator)
        match self.kind:
            case "ties":
                return (2 * noise).round()
            case "flat":
                return torch.zeros(vocab_size)
            case "zeros":  # of both signs, which are equal
                return torch.where(noise > 0, 0.0, -0.0)
            case "peaked":
                return 30 * noise
        return 3 * noise


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 9e-6, 1e-5, 0.1, 0.7, 1.0, 1.0, 1.5, 100.0]) | st.floats(0.2, 2.0),
    top_k=st.sampled_from([0, 0, 1, 2, 259, 260, 261, 1 << 30]) | st.integers(3, 300),
    top_p=st.sampled_from([1.0, 1.0, 1e-4, 0.5, 0.7, 0.9, 0.999]) | st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]) | st.floats(0.0, 1.0),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.1, 1.5, 0.8, 0.01, 100.0]) | st.floats(0.5, 2.0),
    seed=st.integers(0, 2**63 - 1),
)
ROWS = st.builds(
    Row,
    params=PARAMS,
    # Ids from 260 on are outside the smaller vocabulary, as those of padded embeddings are.
    history=st.lists(st.integers(0, 300), max_size=40).map(tuple),
    position=st.integers(0, 2**20) | st.just(2**31 - NUM_STEPS - 1),
    kind=st.sampled_from(["noise", "noise", "ties", "flat", "zeros", "peaked"]),
    noise_seed=st.integers(0, 10_000),
)
BATCHES = st.lists(ROWS, min_size=1, max_size=6)


def sampler_of(rows: list[Row], vocab_size: int, device: torch.device = CPU) -> BatchSampler:
    sampler = BatchSampler([row.params for row in rows], vocab_size, device)
    remember(sampler, rows)
    return sampler


def remember(sampler: BatchSampler, rows: list[Row]) -> None:
    for i, row in enumerate(rows):
        sampler.remember(i, row.history)


def assert_steps(rows: list[Row], vocab_size: int, step: Callable[..., SampleOutput], allowance: float = 0.0) -> int:
    """Let `step(logits, positions)` draw several tokens in turn, each a part of the next one's history.

    Returns how many drawn tokens differ from those of `sample`; each such row must be within `allowance`.
    """
    histories = [list(row.history) for row in rows]
    differing = 0
    for n in range(NUM_STEPS):
        logits = torch.stack([row.logits(vocab_size, n) for row in rows])
        positions = [row.position + n for row in rows]
        out = step(logits, torch.tensor(positions))
        assert out.is_finite.tolist() == [True] * len(rows)
        for row, row_logits, history, position, token in zip(
            rows, logits, histories, positions, out.tokens.tolist(), strict=True
        ):
            if token != sample(row_logits, row.params, history, position):
                assert margin(row_logits, row.params, history, position) < allowance, row
                differing += 1
            history.append(token)
    return differing


def margin(logits: torch.Tensor, params: SamplingParams, history: list[int], position: int) -> float:
    """How near a draw is to a boundary that rounding could move it over: that of two tokens, of top-p or of min-p.

    In probability. The sums of a GPU differ from the host's in the last of float64's 16 digits, and its exp too.
    """
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({i for i in history if i < len(logits)}), dtype=torch.long)
        factor = torch.where(logits > 0, 1 / params.repetition_penalty, params.repetition_penalty)
        logits = logits.double().index_put((seen,), (logits.double() * factor)[seen])
    weights = (logits.double().sort(descending=True).values / max(params.temperature, 1e-5)).softmax(-1)
    weights = weights[: params.top_k or None]
    weights = weights / weights.sum()
    before = weights.cumsum(-1) - weights
    distances = [1.0]
    if params.top_p < 1.0:
        distances.append((before - params.top_p).abs().min().item())
    if params.min_p > 0.0:
        ratios = weights[weights < weights[0]] / weights[0]  # equal ones compare equal everywhere
        distances += (ratios - params.min_p).abs().tolist()
    kept = weights[(before < params.top_p) & (weights >= params.min_p * weights[0])]
    covered = kept.cumsum(-1) / kept.sum()
    distances.append((covered - uniform(params.seed, position)).abs().min().item())
    return min(distances)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(rows=BATCHES)
def test_equals_sample_row_by_row(rows: list[Row]) -> None:
    assert_steps(rows, 260, sampler_of(rows, 260).sample)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=BATCHES)
def test_equals_sample_in_a_larger_vocabulary(rows: list[Row]) -> None:
    assert_steps(rows, 5003, sampler_of(rows, 5003).sample)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pair=st.integers(1, 6).flatmap(lambda n: st.tuples(*2 * (st.lists(ROWS, min_size=n, max_size=n),))))
def test_load_in_place(pair: tuple[list[Row], list[Row]]) -> None:
    """Nothing of the requests before remains, and every tensor stays where a graph expects it."""
    first, second = pair
    sampler = sampler_of(first, 260)
    addresses = {name: value.data_ptr() for name, value in vars(sampler).items() if torch.is_tensor(value)}
    assert_steps(first, 260, sampler.sample)
    sampler.load([row.params for row in second])
    remember(sampler, second)
    assert_steps(second, 260, sampler.sample)
    assert addresses == {name: value.data_ptr() for name, value in vars(sampler).items() if torch.is_tensor(value)}


def test_threshold_on_a_boundary_takes_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tritonmoe.generation.device_sampling.uniform_ref", lambda *_: torch.tensor([0.5]))
    monkeypatch.setattr("tritonmoe.generation.sampling.uniform", lambda *_: 0.5)
    logits = torch.zeros(1, 4)
    assert sample(logits[0], SAMPLED, [], 0) == 2
    assert BatchSampler([SAMPLED], 4, CPU).sample(logits, torch.tensor([0])).tokens.tolist() == [2]


def test_is_greedy() -> None:
    penalized = replace(GREEDY, repetition_penalty=1.1)
    for params, expected in (
        ([GREEDY, GREEDY], True),
        ([GREEDY, replace(GREEDY, temperature=9e-6, top_k=5)], True),
        ([GREEDY, SAMPLED], False),
        ([GREEDY, penalized], False),
    ):
        sampler = BatchSampler([GREEDY, SAMPLED], 8, CPU)
        assert not sampler.is_greedy
        sampler.load(params)
        assert sampler.is_greedy == expected


def test_greedy_does_not_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.Tensor, "sort", refuse)
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    assert BatchSampler([GREEDY] * 2, 4, CPU).sample(logits, torch.tensor([5, 6])).tokens.tolist() == [1, 0]
    with pytest.raises(AssertionError):
        BatchSampler([GREEDY, SAMPLED], 4, CPU).sample(logits, torch.tensor([5, 6]))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SamplingParams(temperature=0.5, top_k=2, top_p=0.5, min_p=0.1)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite(params: SamplingParams, value: float) -> None:
    """Such a row is flagged and still gets a token of the vocabulary; the other rows do not change."""
    logits = torch.randn(4, 260, generator=torch.Generator().manual_seed(0))
    wrong = logits.clone()
    wrong[1, 7] = value
    wrong[3] = value
    positions = torch.arange(4)
    expected = BatchSampler([params] * 4, 260, CPU).sample(logits, positions)
    out = BatchSampler([params] * 4, 260, CPU).sample(wrong, positions)
    assert expected.is_finite.tolist() == [True] * 4
    assert out.is_finite.tolist() == [True, False, True, False]
    assert out.tokens[[0, 2]].tolist() == expected.tokens[[0, 2]].tolist()
    assert all(0 <= token < 260 for token in out.tokens.tolist())
    with pytest.raises(InputError):
        sample(wrong[1], params, [], 1)


def test_a_slice_of_padded_logits() -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))[:, :260]
    for params in (GREEDY, SAMPLED):
        out = BatchSampler([params] * 2, 260, CPU).sample(logits, torch.tensor([3, 4]))
        assert out.tokens.tolist() == [sample(row, params, [], 3 + i) for i, row in enumerate(logits)]


def test_refusals() -> None:
    sampler = BatchSampler([GREEDY, SAMPLED], 8, CPU)
    logits, positions = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 parameters for a batch of 2"):
        sampler.load([GREEDY] * 3)
    for wrong in (logits[:1], logits[:, :7], logits.half()):
        with pytest.raises(ValueError, match="logits are"):
            sampler.sample(wrong, positions)
    for wrong in (positions[:1], positions.int(), positions[:, None]):
        with pytest.raises(ValueError, match="positions are"):
            sampler.sample(logits, wrong)


class Captured:
    """A sampler and its captured graph; `params` at capture decide which of the two graphs it is."""

    def __init__(self, params: list[SamplingParams], vocab_size: int) -> None:
        self.sampler = BatchSampler(params, vocab_size, torch.device("cuda"))
        self.logits = torch.zeros(len(params), vocab_size, device="cuda")
        self.positions = torch.zeros(len(params), dtype=torch.int64, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.sampler.sample(self.logits, self.positions)  # compiles the kernel, which a capture cannot
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.sampler.sample(self.logits, self.positions)

    def load(self, rows: list[Row]) -> None:
        self.sampler.load([row.params for row in rows])
        remember(self.sampler, rows)

    def step(self, logits: torch.Tensor, positions: torch.Tensor) -> SampleOutput:
        self.logits.copy_(logits)
        self.positions.copy_(positions)
        self.graph.replay()
        return self.out


@functools.cache
def captured(params: SamplingParams, batch: int, vocab_size: int) -> Captured:
    """One graph for all examples: what a graph must serve."""
    return Captured([params] * batch, vocab_size)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("vocab_size", [260, 5003, 151_669])
def test_replayed_graph_equals_sample(vocab_size: int) -> None:
    """A replay draws the host's token; one that does not must be within `MARGIN` of a boundary, and such are rare."""
    differing, total = 0, 0

    @settings(max_examples=40 if vocab_size > 10_000 else 150, deadline=None, derandomize=True)
    @given(rows=BATCHES)
    def check(rows: list[Row]) -> None:
        nonlocal differing, total
        replayed = captured(SAMPLED, len(rows), vocab_size)
        replayed.load(rows)
        differing += assert_steps(rows, vocab_size, replayed.step, MARGIN)
        total += NUM_STEPS * len(rows)

    check()
    # Equal logits with a round top_p put boundaries of the filter right where rounding decides.
    assert differing <= 0.05 * total


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("batch", [1, 6, 16])
def test_replayed_greedy_graph(batch: int) -> None:
    replayed = captured(GREEDY, batch, 151_669)
    for kind in ("noise", "ties", "flat", "zeros"):
        rows = [Row(GREEDY, (), 9, kind, 100 * i) for i in range(batch)]
        replayed.load(rows)
        assert assert_steps(rows, 151_669, replayed.step) == 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_replayed_graph_flags_logits_that_are_not_finite(params: SamplingParams) -> None:
    replayed = captured(params, 3, 5003)
    for value in (float("nan"), float("inf"), float("-inf")):
        rows = [Row(params, (), 0, "noise", i) for i in range(3)]
        replayed.load(rows)
        logits = torch.stack([row.logits(5003) for row in rows])
        logits[1, 77] = value
        out = replayed.step(logits, torch.arange(3))
        assert out.is_finite.tolist() == [True, False, True]
        assert all(0 <= token < 5003 for token in out.tokens.tolist())
    replayed.load(rows)
    assert_steps(rows, 5003, replayed.step)
