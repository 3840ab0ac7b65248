"""Decode steps of the embedded model on a GPU: captured ones against uncaptured, reused runners, sessions, the CPU."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from nano.tasks import FAMILIES, TEST_LEVELS, read_test_file
from tritonmoe import Engine, Generation, Interrupted, SamplingParams
from tritonmoe.engine import embedded_folder
from tritonmoe.errors import InputError
from tritonmoe.generation.decode_runner import DecodeRunner
from tritonmoe.generation.session import allocate_cache
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.kv_cache import KVCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEVICE = torch.device("cuda")
NUM_TOKENS = 150
GREEDY = SamplingParams()
# In float32 two devices, or two shapes of a step, differ by some 1e-5 on logits of about 20.
TIE = 1e-3


@functools.cache
def loaded(dtype: str, device: torch.device) -> Engine:
    return Engine.from_pretrained(dtype=dtype, device=str(device))


def new_engine(like: Engine) -> Engine:
    """An engine over the same weights without the runners of earlier calls."""
    return Engine(like.decoder, like.tokenizer, like.chat_template, like.stop_ids, like.defaults, like.max_context)


@pytest.fixture(params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return new_engine(loaded(request.param, DEVICE))


@pytest.fixture
def exact() -> Engine:
    return new_engine(loaded("float32", DEVICE))


def make_prompts(engine: Engine, count: int) -> list[list[int]]:
    """Token ids of tasks: all families, easy ones first."""
    files = [f"{family}-{level}.jsonl" for level in TEST_LEVELS for family in FAMILIES]
    tasks = [read_test_file(embedded_folder() / "tasks" / files[i % len(files)])[i // len(files)] for i in range(count)]
    return [engine.tokenizer.encode(task.prompt) for task in tasks]


def sampled(count: int) -> list[SamplingParams]:
    """Parameters that differ by row; one row of several is greedy beside the others."""
    params = [
        SamplingParams(temperature=0.7 + 0.2 * i, top_k=50 - i, top_p=0.95, repetition_penalty=1.1, seed=5 + i)
        for i in range(count)
    ]
    return params if count < 2 else [*params[:-1], GREEDY]


def make_runner(engine: Engine, batch: int, capacity: int, capture: bool = True) -> DecodeRunner:
    cache = allocate_cache(engine.decoder, batch, capacity)
    return DecodeRunner(engine.decoder, cache, engine.tokenizer.vocab_size, capture)


def prefill(decoder: Decoder, prompts: Sequence[list[int]], cache: KVCache) -> torch.Tensor:
    """Logits [B, V] after prompts of any lengths."""
    ids = [torch.tensor([prompt], device=decoder.device) for prompt in prompts]
    return torch.cat([decoder.prefill(row, 0, cache.rows(i, 1)) for i, row in enumerate(ids)])


def start(runner: DecodeRunner, engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[int]:
    """Take up the prompts and draw a token for each."""
    logits = prefill(engine.decoder, prompts, runner.cache)
    runner.begin(prompts, params)
    runner.sample(logits)
    return runner.tokens()


def advance(runner: DecodeRunner, count: int) -> list[list[int]]:
    """`count` further tokens of every row, as many steps ahead of the host as the engine is."""
    drawn: list[list[int]] = []
    launched = 0
    while len(drawn) < count:
        while launched < min(count, len(drawn) + 1 + runner.lookahead):
            runner.launch()
            launched += 1
        drawn.append(runner.tokens())
    return drawn


def draw(
    runner: DecodeRunner, engine: Engine, prompts: list[list[int]], params: list[SamplingParams], count: int
) -> list[list[int]]:
    return [start(runner, engine, prompts, params), *advance(runner, count - 1)]


def captured(runner: DecodeRunner) -> set[bool]:
    """Which kinds of step are replayed: all greedy (True), or any parameters (False)."""
    return {kind for kind, graph in runner._steps._graphs.items() if graph is not None}


def top_two(engine: Engine, token_ids: list[int]) -> tuple[set[int], float]:
    """The two likeliest next tokens, and how far their logits are apart."""
    cache = allocate_cache(engine.decoder, 1, len(token_ids))
    values, ids = prefill(engine.decoder, [token_ids], cache)[0].topk(2)
    return set(ids.tolist()), (values[0] - values[1]).item()


def assert_same_greedy(engine: Engine, prompt: list[int], actual: list[int], expected: list[int]) -> None:
    """Equal up to the first tie: there rounding decides, and what follows are two different texts."""
    for i, (ours, theirs) in enumerate(zip(actual, expected, strict=False)):
        if ours != theirs:
            likeliest, gap = top_two(engine, prompt + expected[:i])
            assert {ours, theirs} == likeliest, f"token {i} is {ours}, expected {theirs}"
            assert gap < TIE, f"token {i} is {ours}, expected {theirs}, and their logits are {gap} apart"
            return
    assert len(actual) == len(expected)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_captured_steps_equal_uncaptured_ones(engine: Engine, batch: int, kind: str) -> None:
    prompts = make_prompts(engine, batch)
    assert len(set(map(len, prompts))) == batch
    params = [GREEDY] * batch if kind == "greedy" else sampled(batch)
    capacity = max(map(len, prompts)) + NUM_TOKENS
    runners = {capture: make_runner(engine, batch, capacity, capture) for capture in (True, False)}
    tokens = {capture: draw(runner, engine, prompts, params, NUM_TOKENS) for capture, runner in runners.items()}
    assert captured(runners[True]) == {kind == "greedy"}
    assert captured(runners[False]) == set()
    assert tokens[True] == tokens[False]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_runner_serves_one_request_after_another(engine: Engine, batch: int) -> None:
    """Other prompts and other parameters, through the same graphs."""
    prompts = make_prompts(engine, 3 * batch)
    capacity = max(map(len, prompts)) + 40
    reused = make_runner(engine, batch, capacity)
    for params in ([GREEDY] * batch, sampled(batch), [GREEDY] * batch):
        request, prompts = prompts[:batch], prompts[batch:]
        tokens = draw(reused, engine, request, params, 40)
        assert tokens == draw(make_runner(engine, batch, capacity), engine, request, params, 40)
    assert captured(reused) == {True, False}


def test_seeds_and_penalties_reach_a_replayed_step(engine: Engine) -> None:
    """The parameters that a graph was captured with are not those that it keeps."""
    prompts = make_prompts(engine, 1)
    runner = make_runner(engine, 1, len(prompts[0]) + 40)
    requests = [
        SamplingParams(temperature=1.5, seed=seed, repetition_penalty=p) for seed, p in ((1, 1), (2, 1), (1, 2))
    ]
    texts = [tuple(map(tuple, draw(runner, engine, prompts, [params], 40))) for params in (*requests, requests[0])]
    assert len(set(texts)) == 3
    assert texts[0] == texts[3]


@pytest.mark.parametrize("batch", [1, 3])
def test_logits_do_not_depend_on_capacity_or_replay(engine: Engine, batch: int) -> None:
    """Bit for bit, captured or not, in a cache that just fits and in a larger one of an odd size."""
    prompts = make_prompts(engine, batch)
    longest = max(map(len, prompts))
    results = []
    for capacity in (longest + 1, 3 * longest + 5):
        cache = allocate_cache(engine.decoder, batch, capacity)
        token_ids = prefill(engine.decoder, prompts, cache).argmax(-1)
        positions = torch.tensor([len(prompt) for prompt in prompts], device=DEVICE)
        results += decoded(engine.decoder, token_ids, positions, cache)
    assert all(torch.equal(result, results[0]) for result in results[1:])
    assert results[0].isfinite().all()


@torch.inference_mode()
def decoded(decoder: Decoder, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache) -> list[torch.Tensor]:
    """Logits of a step: uncaptured, then replayed twice."""
    results = [decoder.decode(token_ids, positions, cache)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = decoder.decode(token_ids, positions, cache)
    for _ in range(2):
        logits.fill_(float("nan"))
        graph.replay()
        results.append(logits.clone())
    return results


def test_float32_tokens_are_those_of_the_cpu(exact: Engine) -> None:
    host = loaded("float32", torch.device("cpu"))
    for prompt in make_prompts(exact, 3):
        ours, theirs = (
            [token for (token,) in draw(make_runner(engine, 1, len(prompt) + 60), engine, [prompt], [GREEDY], 60)]
            for engine in (exact, host)
        )
        assert_same_greedy(host, prompt, ours, theirs)


def test_stream_is_generate_in_pieces(engine: Engine) -> None:
    (prompt,) = make_prompts(engine, 1)
    for params in (SamplingParams(max_new_tokens=40), SamplingParams(max_new_tokens=40, temperature=1.0, seed=3)):
        whole, stream = engine.generate(prompt, params), engine.stream(prompt, params)
        pieces = list(stream)
        assert len(pieces) > 1
        assert "".join(pieces) == whole.text
        assert stream.result().token_ids == whole.token_ids
    assert captured(engine._idle[1]) == {True, False}


def converse(engine: Engine) -> list[tuple[list[int], Generation]]:
    """Three turns of a session, prompt and result of each: the first ends with a stop token, the second at its limit.

    When a stop token is seen the step after it has run, and has stored it: the second turn has another token there.
    """
    session, history, turns = engine.session(), [], []
    for task, limit in zip(make_prompts(engine, 3), (100, 5, 100), strict=True):
        prompt = history + task
        stream = engine.stream(prompt, SamplingParams(max_new_tokens=limit), session)
        text, result = "".join(stream), stream.result()
        assert text == result.text
        assert result.finish_reason == ("length" if limit == 5 else "stop")
        # All of the history but for its last token where that was never run.
        assert result.reused_tokens == max(0, len(history) - (limit == 100))
        in_flight = len(session._runner._steps._drawn)
        assert in_flight == (0 if limit == 5 else session._runner.lookahead)
        ended = result.finish_reason == "stop"
        history = prompt + (result.token_ids[:-1] if ended else result.token_ids)
        turns.append((prompt, result))
    assert session._runner.cache.max_length > len(turns[0][0]) + 100, "the cache should have grown"
    return turns


def test_session_that_grows_and_stops(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit as without capturing; in float32 also as a prompt that is computed anew, ties aside."""
    turns = converse(engine)
    if engine.decoder.dtype == torch.float32:
        for prompt, result in turns:
            params = SamplingParams(max_new_tokens=len(result.token_ids))
            assert_same_greedy(engine, prompt, result.token_ids, engine.generate(prompt, params).token_ids)
    monkeypatch.setattr("tritonmoe.generation.session.DecodeRunner", functools.partial(DecodeRunner, capture=False))
    assert [(prompt, result.token_ids) for prompt, result in turns] == [
        (prompt, result.token_ids) for prompt, result in converse(engine)
    ]


def test_conversations_come_and_go_in_bounded_memory(exact: Engine) -> None:
    """Each captures steps of its own; what CUDA keeps of a graph on the host should go with it."""
    host, device = [], []
    for _ in range(60):
        session = exact.session()
        stream = exact.stream("Once upon a time", SamplingParams(max_new_tokens=8), session)
        assert "".join(stream)
        assert captured(session._runner) == {True}
        del session, stream
        gc.collect()
        host.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        device.append(torch.cuda.memory_allocated())
    assert max(device[40:]) <= max(device[20:40])
    assert max(host[40:]) - max(host[20:40]) < 16e6


@pytest.mark.parametrize("batch", [3, 17])
def test_rows_that_end_at_different_times(engine: Engine, batch: int) -> None:
    """Also in a batch of more tokens than the decode forms of routing take."""
    prompts = make_prompts(engine, batch)
    alone, uncaptured = new_engine(engine), new_engine(engine)
    uncaptured._idle[batch] = make_runner(engine, batch, engine.max_context, capture=False)
    for params in (SamplingParams(max_new_tokens=100), SamplingParams(max_new_tokens=60, temperature=0.8, seed=1)):
        results = engine.generate_batch(prompts, params)
        assert len({len(result.token_ids) for result in results}) >= 3
        assert "stop" in {result.finish_reason for result in results}
        for ours, theirs in zip(results, uncaptured.generate_batch(prompts, params), strict=True):
            assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        if params.temperature == 0 and engine.decoder.dtype == torch.float32:
            for prompt, result in zip(prompts, results, strict=True):
                assert_same_greedy(engine, prompt, result.token_ids, alone.generate(prompt, params).token_ids)
    assert captured(engine._idle[batch]) == {True, False}
    assert captured(uncaptured._idle[batch]) == set()


@contextmanager
def damaged(decoder: Decoder) -> Iterator[None]:
    """Not a number in the middle of the model, so that what later layers put into the cache is none either."""
    tensor = decoder.weights.layers[len(decoder.weights.layers) // 2].attention.output
    with torch.inference_mode():
        before = tensor.clone()
        tensor[0, 0] = float("nan")
    try:
        yield
    finally:
        with torch.inference_mode():
            tensor.copy_(before)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_logits_that_are_not_finite(engine: Engine, kind: str) -> None:
    """Reported by the step that computes them, also when it is replayed, and forgotten by the next request."""
    prompts = make_prompts(engine, 2)
    params = [GREEDY] * 2 if kind == "greedy" else sampled(2)
    runner = make_runner(engine, 2, max(map(len, prompts)) + 20)
    expected = draw(runner, engine, prompts, params, 20)
    with damaged(engine.decoder), pytest.raises(InputError, match="not finite"):
        start(runner, engine, prompts, params)
    assert draw(runner, engine, prompts, params, 20) == expected
    start(runner, engine, prompts, params)
    assert advance(runner, 3) == expected[1:4]
    with damaged(engine.decoder), pytest.raises(InputError, match="not finite"):
        advance(runner, 3)
    assert draw(runner, engine, prompts, params, 20) == expected


def test_engine_after_logits_that_are_not_finite(engine: Engine) -> None:
    (prompt,) = make_prompts(engine, 1)
    params = SamplingParams(max_new_tokens=20)
    expected = engine.generate(prompt, params).token_ids
    with damaged(engine.decoder), pytest.raises(InputError, match="not finite"):
        engine.generate(prompt, params)
    assert engine.generate(prompt, params).token_ids == expected


def test_a_stream_closed_in_the_middle(engine: Engine) -> None:
    """What it had launched ahead is not taken for the next one's."""
    first, second = make_prompts(engine, 2)
    params = SamplingParams(max_new_tokens=30)
    expected = [engine.generate(prompt, params).token_ids for prompt in (first, second)]
    runner = engine._idle[1]
    stream = engine.stream(first, params)
    iterator = iter(stream)
    next(iterator)
    next(iterator)
    iterator.close()
    cut = stream.result()
    assert cut.finish_reason == "interrupted"
    assert cut.token_ids == expected[0][: len(cut.token_ids)]
    assert [engine.generate(prompt, params).token_ids for prompt in (second, first)] == expected[::-1]
    assert engine._idle[1] is runner


def test_an_interrupted_batch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts(engine, 3)
    params = SamplingParams(max_new_tokens=30)
    expected = [result.token_ids for result in engine.generate_batch(prompts, params)]
    steps = []

    def take(*arguments: object) -> list[str]:
        if len(steps) == 3:
            raise KeyboardInterrupt
        steps.append(1)
        return original(*arguments)

    original = engine._take
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_take", take)
        with pytest.raises(Interrupted) as caught:
            engine.generate_batch(prompts, params)
    assert [result.token_ids for result in caught.value.results] == [tokens[:4] for tokens in expected]
    assert [result.token_ids for result in engine.generate_batch(prompts, params)] == expected


def allocated_bytes() -> int:
    gc.collect()  # runners of earlier tests
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_steps_leave_no_memory_behind(engine: Engine, kind: str) -> None:
    prompts = make_prompts(engine, 2)
    params = [GREEDY] * 2 if kind == "greedy" else sampled(2)
    runner = make_runner(engine, 2, max(map(len, prompts)) + 341)
    start(runner, engine, prompts, params)
    advance(runner, 40)
    before = allocated_bytes()
    advance(runner, 300)
    assert allocated_bytes() == before


def test_calls_leave_no_memory_behind(engine: Engine) -> None:
    prompts = make_prompts(engine, 2)
    before = 0
    for call in range(5):
        params = SamplingParams(max_new_tokens=20, temperature=0.8 * (call % 2), seed=call)
        engine.generate_batch(prompts, params)
        if call == 1:  # both kinds of step are captured now
            before = allocated_bytes()
    assert allocated_bytes() == before
