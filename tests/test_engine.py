"""The public API on the small random model: batching, streaming, sessions, stopping, limits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import tritonmoe.engine
from tritonmoe import Engine, Interrupted, SamplingParams
from tritonmoe.errors import InputError
from tritonmoe.generation.row import Row
from tritonmoe.model.kv_cache import kv_bytes_per_token
from tritonmoe.placement.loader import Placement

PROMPTS = ["Hello", "A much longer prompt than the first, to differ", "x"]
SAMPLED = SamplingParams(max_new_tokens=20, temperature=1.0, top_p=0.95, seed=5)


@pytest.fixture(scope="module")
def engine(pristine_folder: Path) -> Engine:
    return Engine.from_pretrained(pristine_folder)


def test_stream_is_generate_in_pieces(engine: Engine) -> None:
    for params in (SamplingParams(max_new_tokens=20), SAMPLED):
        whole = engine.generate("Hello", params)
        stream = engine.stream("Hello", params)
        pieces = list(stream)
        assert "".join(pieces) == stream.result().text == whole.text
        assert stream.result().token_ids == whole.token_ids
        assert len(pieces) > 1


def test_batch_equals_alone(engine: Engine) -> None:
    """Greedy and sampled: draws depend on seed and position only."""
    for params in (SamplingParams(max_new_tokens=20), SAMPLED):
        together = engine.generate_batch(PROMPTS, params)
        for prompt, row in zip(PROMPTS, together, strict=True):
            alone = engine.generate(prompt, params)
            assert row.token_ids == alone.token_ids
            assert (row.text, row.finish_reason) == (alone.text, alone.finish_reason)


def test_rows_that_end_early_do_not_disturb_the_others(engine: Engine) -> None:
    stop = engine.generate("x", SamplingParams(max_new_tokens=3)).token_ids[2]
    early = Engine(
        engine.decoder, engine.tokenizer, engine.chat_template, frozenset({stop}), engine.defaults, engine.max_context
    )
    together = early.generate_batch(PROMPTS, SamplingParams(max_new_tokens=20))
    assert together[2].finish_reason == "stop"
    for prompt, row in zip(PROMPTS, together, strict=True):
        assert row.token_ids == early.generate(prompt, SamplingParams(max_new_tokens=20)).token_ids


def test_same_seed_same_text_other_seed_other_text(engine: Engine) -> None:
    texts = [engine.generate("Hello", dataclasses.replace(SAMPLED, seed=seed)).text for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_prompts_of_token_ids(engine: Engine) -> None:
    ids = [5, 6, 7]
    expected = engine.generate(ids, SAMPLED)
    for prompt in (np.array(ids), torch.tensor(ids), tuple(ids)):
        assert engine.generate(prompt, SAMPLED).token_ids == expected.token_ids
    for prompt in (None, 5, [1.5], ["a"]):
        with pytest.raises(InputError, match="sequence of integer token ids"):
            engine.generate(prompt, SAMPLED)
    with pytest.raises(InputError, match="prompts must be several"):
        engine.generate_batch("abc", SAMPLED)


def test_prefill_chunks_give_the_same_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "the prompt is longer than a chunk " * 3
    whole = engine.generate(prompt, SAMPLED)
    monkeypatch.setattr(tritonmoe.engine, "prefill_chunk", lambda _device: 7)
    assert engine.generate(prompt, SAMPLED).token_ids == whole.token_ids


def test_session_reuses_the_common_prefix(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=10)
    session = engine.session()
    first = engine.stream("Hello", params, session)
    assert "".join(first) == engine.generate("Hello", params).text
    grown = engine.tokenizer.encode("Hello") + first.result().token_ids + engine.tokenizer.encode(" and more")
    second = engine.stream(grown, params, session)
    "".join(second)
    assert second.result().reused_tokens >= len(grown) - len(" and more") - 1
    assert second.result().token_ids == engine.generate(grown, params).token_ids
    other = engine.stream("Jello", params, session)
    assert "".join(other) == engine.generate("Jello", params).text
    assert other.result().reused_tokens == 0


def test_session_that_grows_keeps_what_it_holds(engine: Engine) -> None:
    """The second turn needs a larger cache than the first."""
    params = SamplingParams(max_new_tokens=4)
    session = engine.session()
    first = engine.stream("Hello", params, session)
    "".join(first)
    grown = engine.tokenizer.encode("Hello") + first.result().token_ids + engine.tokenizer.encode(" again" * 9)
    second = engine.stream(grown, params, session)
    "".join(second)
    assert second.result().reused_tokens >= 8
    assert second.result().token_ids == engine.generate(grown, params).token_ids


def test_interrupt_while_the_cache_grows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old cache stays, and what the session says of it stays true."""
    params = SamplingParams(max_new_tokens=4)
    session = engine.session()
    "".join(engine.stream("Hello", params, session))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tritonmoe.generation.session.allocate_cache", interrupted)
        with pytest.raises(KeyboardInterrupt):
            "".join(engine.stream("Hello there, much longer", params, session))
    again = engine.stream("Hello", params, session)
    assert "".join(again) == engine.generate("Hello", params).text
    assert again.result().reused_tokens == 4


def test_interrupted_batch_keeps_what_it_has(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def step(*arguments: object) -> list[str]:
        if len(steps) == 3:
            raise KeyboardInterrupt
        steps.append(1)
        return original(*arguments)

    original = engine._take
    monkeypatch.setattr(engine, "_take", step)
    with pytest.raises(Interrupted) as caught:
        engine.generate_batch(PROMPTS, SamplingParams(max_new_tokens=20))
    assert [len(result.token_ids) for result in caught.value.results] == [4, 4, 4]
    assert {result.finish_reason for result in caught.value.results} == {"interrupted"}


def test_ids_past_the_tokenizer_are_never_drawn(engine: Engine) -> None:
    """Embedding tables are padded; the last row here gets the largest logit of all."""
    logits = torch.zeros(1, engine.decoder.spec.vocab_size)
    logits[0, -1] = 9.0
    logits[0, 7] = 1.0
    row = engine._row("Hello", SamplingParams(max_new_tokens=3))
    with engine._runner([row]) as runner:
        runner.begin([row.token_ids], [row.params])
        runner.sample(logits)
        assert runner.tokens() == [7]
    assert engine.tokenizer.vocab_size < engine.decoder.spec.vocab_size


def test_text_ends_with_an_unfinished_character(engine: Engine) -> None:
    """The end of a generation shows bytes that can no longer become a character."""
    row = Row([5], SamplingParams(max_new_tokens=2), engine.tokenizer, frozenset(), 100)
    first, _ = engine.tokenizer.encode("é")
    assert row.append(engine.tokenizer.encode("a")[0]) == "a"
    assert row.append(first) == "\ufffd"
    assert row.result().text == "a\ufffd"


def test_logits_that_are_not_finite(engine: Engine) -> None:
    row = engine._row("Hello", SAMPLED)
    with engine._runner([row]) as runner:
        runner.begin([row.token_ids], [row.params])
        with pytest.raises(InputError, match="not finite"):
            runner.sample(torch.full((1, engine.decoder.spec.vocab_size), float("nan")))


def test_session_survives_an_abandoned_stream(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=30)
    session = engine.session()
    stream = engine.stream("Hello", params, session)
    iterator = iter(stream)
    next(iterator)
    iterator.close()
    assert stream.result().finish_reason == "interrupted"
    again = engine.stream("Hello", params, session)
    assert "".join(again) == engine.generate("Hello", params).text
    assert again.result().reused_tokens > 0


def test_stop_string_is_cut_off(engine: Engine) -> None:
    text = engine.generate("Hello", SAMPLED).text
    stop = text[6:9]
    cut = engine.generate("Hello", dataclasses.replace(SAMPLED, stop=(stop,)))
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"


def test_generation_ends_with_the_context(pristine_folder: Path) -> None:
    engine = Engine.from_pretrained(pristine_folder, max_context=12)
    result = engine.generate("Hello", SamplingParams(max_new_tokens=100))
    assert result.finish_reason == "length"
    assert result.prompt_tokens + len(result.token_ids) == 12


def test_result_counts(engine: Engine) -> None:
    result = engine.generate("Hello", SamplingParams(max_new_tokens=4))
    assert (result.prompt_tokens, len(result.token_ids), result.finish_reason) == (5, 4, "length")
    assert result.ttft_ms is not None
    assert result.tpot_ms is not None
    assert 0 < result.tpot_ms < result.ttft_ms + 1e4
    assert engine.generate("Hello", SamplingParams(max_new_tokens=1)).tpot_ms is None


def test_token_ids_as_prompt(engine: Engine) -> None:
    ids = engine.tokenizer.encode("Hello")
    params = SamplingParams(max_new_tokens=5)
    assert engine.generate(ids, params).text == engine.generate("Hello", params).text
    assert engine.generate_batch([], params) == []


def test_chat_prompt(engine: Engine) -> None:
    ids = engine.chat_prompt([{"role": "user", "content": "hi"}])
    assert engine.tokenizer.decode(ids) == "<|user|>hi<|end|><|assistant|>"
    assert ids[0] == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ("x" * 200, "200 tokens, which leaves no room in the context of 128"),
        ([1, 2, 999], "token id 999"),
        ([1.5], "integer token ids"),
    ],
)
def test_bad_prompts(engine: Engine, prompt: str | list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine.generate_batch([prompt])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_context": 1}, "--max-context must be from 2 to the model's 128"),
        ({"max_context": 1 << 40}, "--max-context must be"),
        ({"dtype": "int3"}, "--dtype 'int3' is not supported"),
        ({"device": "quantum"}, "--device 'quantum' is not known"),
        ({"device": "meta"}, "is not supported"),
    ],
)
def test_bad_options(pristine_folder: Path, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Engine.from_pretrained(pristine_folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_asked_for_and_absent(pristine_folder: Path) -> None:
    with pytest.raises(InputError, match="no such GPU here; use --device cpu"):
        Engine.from_pretrained(pristine_folder, device="cuda")


def test_cache_that_does_not_fit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine._idle.clear()  # a cache that is there already would do
    monkeypatch.setattr("tritonmoe.memory.available_bytes", lambda device: 1000)
    with pytest.raises(InputError, match=r"the KV cache of 1 x \d+ tokens .* needs .* --max-context"):
        engine.generate("Hello")


def planned(engine: Engine, tokens: int) -> Engine:
    """The same model, with room in its KV caches for so many tokens."""
    num_bytes = tokens * kv_bytes_per_token(engine.decoder.spec, engine.decoder.dtype)
    return Engine(
        engine.decoder, engine.tokenizer, engine.chat_template, engine.stop_ids, engine.defaults, engine.max_context,
        num_bytes,
    )  # fmt: skip


def test_caches_keep_to_the_division_of_memory(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=6)
    limited = planned(engine, 24)
    assert limited.generate("Hello", params).text == engine.generate("Hello", params).text
    first, second = limited.session(), limited.session()
    # The idle cache of the call before makes room; one that a conversation holds does not.
    assert "".join(limited.stream("Hello there", params, first)) == engine.generate("Hello there", params).text
    with pytest.raises(
        InputError,
        match=r"^out of memory: the KV cache of 1 x 17 tokens needs .* GB beside .* GB in use, and .* GB were set "
        r"aside for KV caches; use a smaller --max-context or --max-new-tokens, or a larger --gpu-memory$",
    ):
        "".join(limited.stream("Hello there", params, second))
    with pytest.raises(InputError, match="the KV cache of 3 x 8 tokens"):
        limited.generate_batch(["He"] * 3, params)
    with pytest.raises(InputError, match="the KV cache of 1 x 20 tokens"):
        limited.score(list(range(20)))
    del first
    assert "".join(limited.stream("Hello there", params, second)) == engine.generate("Hello there", params).text


def test_runners_of_several_batch_sizes_are_kept_where_there_is_room(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=6)
    limited = planned(engine, 100)
    kept = []
    for count in (1, 2, 1, 2):
        limited.generate_batch(["Hello"] * count, params)
        kept.append(limited._idle[count])
    assert kept[0] is kept[2]
    assert kept[1] is kept[3]
    kept.clear()
    limited.generate_batch(["Hello"] * 5, params)  # 80 tokens: the others make room
    assert list(limited._idle) == [5]


def test_a_cache_no_larger_than_needed_where_room_is_short(engine: Engine) -> None:
    """A power of two would not fit for either."""
    params = SamplingParams(max_new_tokens=6)
    limited = planned(engine, 9 * 2)
    rows = limited.generate_batch(["Hey", "Hoi"], params)
    assert [row.text for row in rows] == [row.text for row in engine.generate_batch(["Hey", "Hoi"], params)]
    with pytest.raises(InputError, match="2 x 10 tokens"):
        limited.generate_batch(["Heyo", "Hoi"], params)


def test_a_conversation_that_outgrows_half_of_its_room(engine: Engine) -> None:
    """Its old cache makes way for the new one, and what it held is computed again."""
    params = SamplingParams(max_new_tokens=4)
    limited = planned(engine, 40)
    session = limited.session()
    for text, length, reused in (("Hello", 9, 0), ("Hello, you", 18, 5), ("Hello, you" + "!" * 12, 36, 0)):
        stream = limited.stream(text, params, session)
        assert "".join(stream) == engine.generate(text, params).text
        assert session.runner(1).cache.max_length == length
        assert stream.result().reused_tokens == reused
    with pytest.raises(InputError, match="1 x 44 tokens"):
        "".join(limited.stream("Hello, you" * 4, params, session))
    assert session.token_ids == []
    assert "".join(limited.stream("Hello", params, session)) == engine.generate("Hello", params).text


def test_memory_is_divided_for_caches(pristine_folder: Path) -> None:
    """What was divided bounds them: here nothing but the cache of one sequence, and what is not used."""
    free = Engine.from_pretrained(pristine_folder)
    assert free._caches.has_room(1000, 128)
    limited = Engine.from_pretrained(pristine_folder, placement=Placement(gpu_memory="70MiB", expert_slots="2"))
    assert limited._caches.has_room(1, 128)
    assert not limited._caches.has_room(1000, 128)


def test_scores_in_slices(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few logits fit in the memory of a prefill step, never more of them."""
    ids = engine.tokenizer.encode("Hello there, you two")
    whole = engine.score(ids)
    assert len(whole) == len(ids) - 1
    logits = engine.decoder.logits
    sizes: list[int] = []

    def watched(residual: torch.Tensor) -> torch.Tensor:
        sizes.append(len(residual))
        return logits(residual)

    monkeypatch.setattr(engine.decoder, "logits", watched)
    monkeypatch.setattr("tritonmoe.engine.step_bytes", lambda *_: 3 * 4 * 260 * 7 + 1)
    assert engine.score(ids) == pytest.approx(whole, abs=1e-5)
    assert sizes == [7, 7, 5]


def test_bfloat16_runs_on_the_cpu(pristine_folder: Path) -> None:
    result = Engine.from_pretrained(pristine_folder, dtype="bfloat16").generate("Hello", SAMPLED)
    assert len(result.token_ids) > 0
