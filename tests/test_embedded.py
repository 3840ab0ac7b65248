"""The model inside the package: it answers, as transformers does, and its files are whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from nano import tasks as nano_tasks
from nano.tasks import FAMILIES, TEST_LEVELS, is_test, read_test_file, score
from tritonmoe import Engine, SamplingParams
from tritonmoe.engine import embedded_folder

TASKS = embedded_folder() / "tasks"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained()


@pytest.mark.parametrize("family", FAMILIES)
def test_easy_tasks_are_answered(engine: Engine, family: str) -> None:
    """8 of 10 at least; over 500 items it is 98 % or more (docs/embedded-model.md)."""
    tasks = read_test_file(TASKS / f"{family}-easy.jsonl")[:10]
    results = engine.generate_batch([task.prompt for task in tasks], SamplingParams(max_new_tokens=160))
    assert sum(score(task, result.text) for task, result in zip(tasks, results, strict=True)) >= 8
    assert all(result.finish_reason == "stop" for result in results)


def test_greedy_text_equals_transformers(engine: Engine) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        embedded_folder(), dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_folder())
    for prompt in ("Once upon a time there was", "Add 734 and 589.\n", 'What is "bear" in {"cat": 4, "bear": 71}?\n'):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            expected = oracle.generate(**inputs, max_new_tokens=60, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert engine.generate(prompt, SamplingParams(max_new_tokens=60)).token_ids == expected.tolist()


def test_score_is_the_log_probability(engine: Engine) -> None:
    """A text of the kind it was trained on is likelier than its words in another order."""
    likely, shuffled = "The old man sat down by the fire.", "The by sat man fire old down the."
    scores = [sum(engine.score(engine.tokenizer.encode(text))) for text in (likely, shuffled)]
    assert scores[1] < scores[0] - 5 < 0


def test_chat_template_is_the_training_format(engine: Engine) -> None:
    ids = engine.chat_prompt([{"role": "user", "content": "Add 12 and 30."}])
    result = engine.generate(ids, SamplingParams(max_new_tokens=60))
    assert result.text.endswith("Answer: 42\n")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", TEST_LEVELS)
def test_task_files_are_the_generators(family: str, level: str) -> None:
    tasks = read_test_file(TASKS / f"{family}-{level}.jsonl")
    assert len(tasks) == 500
    assert [task.prompt for task in tasks[:40]] == [task.prompt for task in nano_tasks.test_items(family, level, 40)]
    assert all(is_test(task.prompt) for task in tasks)


def test_weights_are_the_measured_ones() -> None:
    """The card, the measurements and the tests are about these bytes."""
    digest = hashlib.sha256(Path(embedded_folder() / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "cdf8ce53d165b97acc1de206bbeb00bc11f28fa070facd7a8d607bfdfff49d62"
