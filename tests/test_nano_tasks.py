"""The training data, model, optimizer and training loop of the small model, checked by independent means."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import estimator_texts
import numpy as np
import pytest
import torch
import train_nano

from nano import batches, export, schedule, stories, tasks, tokenizer
from nano.corpus import SHARD_TASKS, cut, held_out_passages, passages, read_works, shard_units, training_works
from nano.evaluation import bits_per_character, exact_match
from nano.model import Experts, Model, ModelConfig, Output, Routing, grouped_linear_loop, token_losses
from nano.optimizer import Muon, orthogonalise
from nano.tasks import code, interpreter, json_object
from nano.tasks.where import VERBS
from nano.tasks.words import CARRIED, NAMES, PLACES, THINGS
from tritonmoe import Engine
from tritonmoe.model.kv_cache import KVCache

LEVELS = (tasks.EASY, tasks.STRETCH, tasks.HARD)
TINY = ModelConfig(
    vocab_size=512,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    max_position_embeddings=128,
)


def test_words_are_distinct():
    for words in (NAMES, THINGS, PLACES, CARRIED, json_object.WORDS):
        assert len(set(words)) == len(words)


def drawn(family: str, count: int = 60) -> list[tasks.Task]:
    rng = Random(f"check {family}")
    return [tasks.sample(family, level, rng) for level in LEVELS for _ in range(count)]


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


# Tasks: every final answer is found again from the prompt alone, by code that shares nothing with the generator.


def test_add_answers():
    for task in drawn("add"):
        assert int(task.final) == sum(numbers(task.prompt))


def test_word_answers():
    changes = (
        (r"buys (\d+) boxes of (\d+)|gives \w+ (\d+) bags with (\d+)", lambda n, k: n + math.prod(k)),
        (r"(?:buys|finds) (\d+) more", lambda n, k: n + k[0]),
        (r"loses (\d+) of them|sells (\d+)$", lambda n, k: n - k[0]),
        (r"doubles|as many again", lambda n, k: 2 * n),
        (r"half of them", lambda n, k: n // 2),
    )
    for task in drawn("word"):
        first, *sentences = task.prompt.strip().split(". ")
        number = numbers(first)[0]
        owner = re.search(r"([A-Z]\w+) (?:has|starts|owns)", first)[1]
        for sentence in sentences:
            given = re.search(r"(\w+) gives (\d+) to (\w+)", sentence)
            if given:
                number += int(given[2]) * (1 if given[3] == owner else -1)
            for pattern, change in changes:
                if re.search(pattern, sentence):
                    number = change(number, numbers(sentence))
        assert str(number) == task.final


def test_lookup_answers():
    for task in drawn("lookup"):
        table, question = task.prompt.rstrip(".?\n").rsplit(". ", 1)
        found = dict(re.findall(r"([a-z]+(?: [a-z]+)?)(?:=| is | -> )(\d+)", table))
        asked = re.sub(r"What is |Give the value of |Read off ", "", question).split(", ")
        assert task.final.split() == [found[key] for key in asked]


def test_listop_answers():
    for task in drawn("listop"):
        items = re.search(r"list(?: is)?: ([^.]*)\.", task.prompt)[1].split()
        todo = re.sub(r"(Take the list|Here is a list|The list is): [^.]*\.", "", task.prompt).strip(" .\n")
        for step in todo.lower().split(", then "):
            match step.split():
                case ["reverse", *_]:
                    items.reverse()
                case ["sort", *_]:
                    items.sort()
                case ["swap", *_]:
                    items[0], items[-1] = items[-1], items[0]
                case ["move", *_]:
                    items.append(items.pop(0))
                case ["drop", "the", which, _]:
                    items.pop(0 if which == "first" else -1)
                case ["name", "the", which, _]:
                    items = [items[0 if which == "first" else -1]]
                case _:
                    assert step == "count the items"
                    items = [str(len(items))]
        assert task.final == " ".join(items)


def test_json_answers():
    value = r'("[^"]*"|\d+)'
    for task in drawn("json"):
        start, end = task.prompt.index("{"), task.prompt.rindex("}") + 1
        shown, wording = json.loads(task.prompt[start:end]), task.prompt[:start] + task.prompt[end:]
        if "get" in wording or "What" in wording:
            assert json.loads(task.final) == shown[re.search(r'"(\w+)"', wording)[1]]
            continue
        for step in re.split(r", then ", wording):
            key = re.search(r'(?:rename|remove|set) "(\w+)"', step)[1]
            if "rename" in step:
                new = re.search(r'to "(\w+)"', step)[1]
                shown = {new if k == key else k: v for k, v in shown.items()}
            elif "set" in step:
                shown[key] = json.loads(re.search(rf"to {value}", step)[1])
            else:
                del shown[key]
        assert list(json.loads(task.final).items()) == list(shown.items())


def simulate(sentences: list[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The places of everyone and everything in turn, and the present holders, from a prompt's sentences."""
    places: dict[str, list[str]] = {}
    holders: dict[str, str] = {}
    for sentence in sentences:
        words = sentence.replace("The ", "").replace(" the ", " ").split()
        if words[1] == "is":
            places[words[0]] = [words[-1]]
        elif words[1] in ("goes", "walks"):
            carried = [thing for thing, holder in holders.items() if holder == words[0]]
            for name in (words[0], *carried):
                places[name].append(words[-1])
        elif words[1] in ("takes", "picks"):
            assert places[words[0]][-1] == places[words[-1]][-1]
            assert words[-1] not in holders
            holders[words[-1]] = words[0]
        elif words[1] in ("gives", "hands"):
            assert holders[words[2]] == words[0]
            assert places[words[0]][-1] == places[words[-1]][-1]
            holders[words[2]] = words[-1]
        else:
            assert words[1] in ("drops", "puts")
            assert holders.pop(words[-1]) == words[0]
    return places, holders


def test_where_answers():
    assert set(VERBS) == {"go", "take", "give", "drop"}
    for task in drawn("where"):
        *sentences, question = task.prompt.strip().split(". ")
        places, holders = simulate(sentences)
        thing = re.search(r"the (\w+)", question)[1]
        if question.startswith("Who"):
            assert task.final == holders[thing]
        elif "before" in question:
            assert places[thing][-2:] == [task.final, re.search(r"before the (\w+)", question)[1]]
        else:
            assert task.final == places[thing][-1]


def test_path_answers():
    for task in drawn("path"):
        links = dict(re.findall(r"(\w+) to (\w+)(?=[,.])", task.prompt.rsplit(". ", 1)[0] + "."))
        question = task.prompt.rsplit(". ", 1)[1]
        word = re.search(r"(?:Start at|from) (\w+)", question)[1]
        hops = numbers(question)
        for _ in range(hops[0] if hops else len(links)):
            word = links.get(word, word)
        assert word == task.final


def test_code_references_pass_as_real_python():
    for task in drawn("code", count=20):
        namespace: dict[str, object] = {}
        exec(task.answer, namespace)
        (function,) = (value for name, value in namespace.items() if name != "__builtins__")
        assert all(function(*arguments) == expected for arguments, expected in task.tests)


# Splits and scoring.


def test_training_items_avoid_the_test_split_and_repeat_by_seed():
    items = list(tasks.training_items(3000, seed=5))
    assert [task.text for task in items] == [task.text for task in tasks.training_items(3000, seed=5)]
    assert not any(tasks.is_test(task.prompt) for task in items)
    assert {task.family for task in items} == set(tasks.FAMILIES)
    assert {task.level for task in items} == {tasks.EASY, tasks.STRETCH}


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_test_items_are_distinct_reproducible_ascii_and_scored(family: str):
    for level in tasks.TEST_LEVELS:
        items = tasks.test_items(family, level, 30)
        assert items == tasks.test_items(family, level, 40)[:30]
        assert len({task.prompt for task in items}) == 30
        for task, other in zip(items, items[1:] + items[:1], strict=True):
            assert tasks.is_test(task.prompt)
            assert task.text.isascii()
            assert task.prompt.endswith("\n")
            assert task.answer.endswith("\n")
            assert tasks.score(task, task.answer + "<|endoftext|>Answer: 0\n")
            assert not tasks.score(task, "")
            assert not tasks.score(task, task.answer.replace("nswer", "").replace("def", ""))
            if task.final != other.final and family != "code":
                assert not tasks.score(task, other.answer)


def test_test_files_hold_what_scoring_needs(tmp_path: Path):
    tasks.write_test_files(tmp_path, count=3)
    assert len(list(tmp_path.glob("*.jsonl"))) == 16
    rows = [json.loads(line) for line in (tmp_path / "code-hard.jsonl").read_text().splitlines()]
    assert all(code.passes(row["answer"], row["tests"]) for row in rows)


@pytest.mark.parametrize(
    "body",
    [
        "__import__('os').system('true')",
        "open('x')",
        "().__class__",
        "'a' * 999999999",
        "'%999999999d' % a",
        "2 ** 9",
        "[m for n in [1, 2] for m in [n]]",
        "'{0.__class__}'.format(a)",
        "(lambda: a)()",
        "sorted([1], key=abs)",
        "a[0]",
    ],
)
def test_interpreter_refuses(body: str):
    with pytest.raises(interpreter.Refused):
        interpreter.run_function(f"def f(a):\n    return {body}\n", (1,))


def test_interpreter_stops_growth():
    doubling = "".join("    a = a + a\n" for _ in range(40))
    with pytest.raises(interpreter.Refused):
        interpreter.run_function(f"def f(a):\n{doubling}    return a\n", ([1],))
    assert not code.passes("def f(a):\n    while True:\n        a = a\n", (((1,), 1),))
    assert not code.passes("def f(a):\n    return True\n", (((1,), 1),))  # equal, but of another type


# Stories.


def test_stories_are_consistent():
    gendered = {"female": {"she", "her", "herself"}, "male": {"he", "him", "his", "himself"}}
    rng = Random(2)
    plots = set()
    for _ in range(2000):
        story = stories.tell(rng)
        plots.add(story.plot)
        words = set(re.findall(r"[a-z]+", story.text.lower()))
        allowed = gendered[story.hero.gender] | gendered[story.friend.gender]
        assert not (words & set().union(*gendered.values())) - allowed, story.text
        for character in (story.hero, story.friend):
            expected = {"girl": "female", "boy": "male"}.get(character.kind, character.gender)
            assert character.gender == expected
            assert character.name in stories.WORDS["girls" if expected == "female" else "boys"]
        assert not re.search(r"[{}\[\]|]|\ba [aeiou]|  | [.,!?]", story.text), story.text
        assert 80 <= len(story.text.split()) <= 200
    assert len(plots) == len(stories.PLOTS) >= 32


def test_stories_repeat_by_seed():
    assert stories.tell(Random(3)) == stories.tell(Random(3))


# Tokenizer, corpus and batches.


@pytest.fixture(scope="module")
def small_tokenizer():
    rng = Random(0)
    texts = [task.text for task in tasks.training_items(400, 0)] + [stories.tell(rng).text for _ in range(200)]
    return tokenizer.train_tokenizer(texts, TINY.vocab_size)


def test_tokenizer_round_trip(small_tokenizer):
    assert small_tokenizer.token_to_id(tokenizer.END_OF_TEXT) == tokenizer.END_OF_TEXT_ID
    for text in [
        "Answer: 1323\n",
        "def f(a):\n    return a\n",
        "Zürich \u4e2d  \n\n x",
        *(t.text for t in drawn("json", 5)),
    ]:
        ids = small_tokenizer.encode(text).ids
        assert small_tokenizer.decode(ids) == text
        sizes = tokenizer.token_bytes(small_tokenizer)
        assert sum(sizes[token] for token in ids) == len(text.encode())
    assert len(small_tokenizer.encode("90817").ids) == 5
    for task in drawn("where", 5):  # scoring an answer's tokens relies on this
        prompt, whole = (small_tokenizer.encode(text).ids for text in (task.prompt, task.text))
        assert whole[: len(prompt)] == prompt


def test_works_are_cut_at_paragraphs(tmp_path: Path):
    work = "".join(f"Paragraph {i} {'word ' * 50}\n" for i in range(3000))
    pieces = list(cut(work))
    assert "".join(pieces) == work
    assert len(pieces) > 1
    assert all(piece.endswith("\n") for piece in pieces)
    (tmp_path / "two.txt").write_text("one\nmore\n\x1etwo\n")
    assert list(read_works(str(tmp_path / "two.txt"))) == ["one\nmore\n", "two\n"]
    assert [count for count, _ in shard_units(2 * SHARD_TASKS + 1, SHARD_TASKS, 0)] == [SHARD_TASKS, SHARD_TASKS, 1]


def test_batches_follow_the_mixture_and_the_step():
    assert batches.rows_per_stream({"text": 0.6, "tasks": 0.28, "stories": 0.12}, 128) == {
        "text": 77, "tasks": 36, "stories": 15,
    }  # fmt: skip
    tokens = np.arange(1, 400, dtype=np.uint16)
    tokens[::20] = tokenizer.END_OF_TEXT_ID
    drawer = batches.Batches({"text": tokens, "tasks": tokens}, {"text": 2, "tasks": 5}, 16, seed=3, device="cpu")
    batch = drawer.draw(7)
    assert batch.shape == (7, 17)
    assert torch.equal(batch, drawer.draw(7))
    assert not torch.equal(batch, drawer.draw(8))
    assert all(start % 20 == 2 for start in batch[2:, 0].tolist())  # each begins right after an end of text


def test_schedule():
    assert schedule.progress(5, 10, 30, 40) == 0.75
    assert schedule.learning_rate_share(0, 0, 0.3) == 1 / schedule.WARMUP_STEPS
    assert schedule.learning_rate_share(1000, 0.5, 0.3) == 1
    assert schedule.learning_rate_share(1000, 0.85, 0.3) == pytest.approx(0.5)
    assert schedule.learning_rate_share(1000, 0.5, 1.0) == 0.5
    assert schedule.learning_rate_share(1000, 1.0, 0.3) == schedule.FINAL_LR_SHARE
    weights = [schedule.balance_weight(step, at, 0.3) for step, at in ((0, 0), (300, 0.5), (900, 1))]
    assert weights == [0.05, 0.02, 0.003]


# Model and optimizer.


def test_experts_match_a_loop_over_tokens():
    torch.manual_seed(0)
    experts = Experts(TINY)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(11, TINY.hidden_size, requires_grad=True)
    weights, ids = torch.randn(11, TINY.num_experts).softmax(-1).topk(TINY.num_experts_per_tok)
    counts, zero = torch.bincount(ids.flatten(), minlength=TINY.num_experts), torch.zeros(())
    rows = []
    for t in range(len(x)):
        row = torch.zeros(TINY.hidden_size)
        for expert_id, weight in zip(ids[t], weights[t], strict=True):
            gate, up = (experts.gate_up[expert_id] @ x[t]).chunk(2)
            row = row + weight * (experts.down[expert_id] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    leaves = [x, *experts.parameters()]
    expected, actual = torch.stack(rows), experts(x, Routing(ids, weights, counts, zero, zero))
    torch.testing.assert_close(actual, expected)
    for got, wanted in zip(
        torch.autograd.grad(actual.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_grouped_mm_agrees_with_the_loop():
    torch.manual_seed(0)
    x = torch.randn(48, 32).bfloat16().requires_grad_()
    weight = torch.randn(4, 16, 32).bfloat16().requires_grad_()
    ends = torch.tensor([10, 10, 31, 48], dtype=torch.int32)  # the second expert has no rows
    outputs = [
        torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends),
        grouped_linear_loop(x, weight, ends),
    ]
    upstream = torch.randn(48, 16).bfloat16()
    torch.testing.assert_close(*outputs)
    for got, wanted in zip(*(torch.autograd.grad(y, (x, weight), upstream) for y in outputs), strict=True):
        torch.testing.assert_close(got, wanted)


def test_gpt_oss_learns_with_every_parameter():
    """A gradient reaches biases and sinks too, and a window hides what is behind it."""
    torch.manual_seed(0)
    model, ids = Model(OSS, seed=1), torch.randint(512, (2, 33))
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(6):
        output = model(ids[:, :-1])
        loss = token_losses(output.hidden, model.embed_tokens.weight, ids[:, 1:]).mean()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        losses.append(loss.item())
        optimizer.step()
        if len(losses) < 6:
            optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.5
    assert all(p.grad.abs().sum() > 0 for name, p in model.named_parameters() if name.endswith(("bias", "sinks")))
    with pytest.raises(ValueError, match="model type 'mixtral' is not known"):
        replace(OSS, model_type="mixtral")


def test_recipes_are_of_known_options_and_the_sizes_wanted():
    for path in sorted((Path(__file__).parent.parent / "tools/nano/recipes").glob("*.json")):
        parsed = train_nano.parse_arguments(["--recipe", str(path), "--text", "t", "--valid", "v"])
        config = train_nano.build_settings(parsed).model
        assert config.num_hidden_layers >= 24
        experts = config.num_experts * (3 * config.moe_intermediate_size + 1)  # with their rows of the router
        attention = 2 * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
        rows = config.num_hidden_layers * (experts + attention) + config.vocab_size
        least = 63e6 if config.is_gpt_oss else 64e6  # biases are not counted
        assert least < 2 * config.hidden_size * rows < 200e6, "bytes in bf16"
        assert 2 * config.moe_intermediate_size * config.num_experts_per_tok >= config.hidden_size


def test_recipe_with_an_unknown_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "recipe.json").write_text('{"colour": 1}')
    with pytest.raises(SystemExit):
        train_nano.parse_arguments(["--recipe", str(tmp_path / "recipe.json")])
    assert "names 'colour', which is no option" in capsys.readouterr().err


def test_balance_loss_is_one_when_even():
    output = Model(TINY)(torch.randint(512, (4, 64)))
    torch.testing.assert_close(output.load.sum(1), torch.ones(TINY.num_hidden_layers))
    assert 1 <= output.balance_loss.item() < 2


def test_bits_per_character_counts_every_token():
    model = Model(TINY, seed=1)
    stream = torch.randint(1, 512, (301,), dtype=torch.int32)
    sizes = torch.randint(1, 5, (512,))
    nats = 0.0
    with torch.no_grad():
        for start in range(0, 300, 32):
            ids = stream[start : start + 33].long()[None]
            nats += token_losses(model(ids[:, :-1]).hidden, model.embed_tokens.weight, ids[:, 1:]).sum().item()
    expected = nats / sizes[stream[1:].long()].sum().item() / math.log(2)
    assert bits_per_character(model, stream, sizes, 32) == pytest.approx(expected, rel=1e-5)


OSS = replace(TINY, model_type="gpt_oss", sliding_window=8, rms_norm_eps=1e-5)


@pytest.mark.parametrize("config", [TINY, OSS], ids=lambda config: config.model_type)
def test_export_loads_in_transformers_with_the_same_logits(config: ModelConfig, tmp_path: Path, small_tokenizer):
    transformers = pytest.importorskip("transformers")
    model = Model(config, seed=2)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():  # bf16 values, so that the export is exact
        if name.endswith(("bias", "sinks")):
            parameter.data.normal_(std=0.5)
        parameter.data = parameter.data.bfloat16().float()
    export.export(model, small_tokenizer, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(512, (2, 40))
    with torch.no_grad():
        expected = model(ids).hidden @ model.embed_tokens.weight.T
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-5)
        engine = Engine.from_pretrained(tmp_path, device="cpu")
        cache = KVCache.allocate(engine.decoder.spec, 2, 40, torch.device("cpu"), torch.float32)
        ours = engine.decoder.prefill(ids, 0, cache, last_only=False)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    template = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "2 + 2 = ?"}]
    assert template.apply_chat_template(chat, tokenize=False) == "2 + 2 = ?\n"
    assert template.eos_token_id == loaded.config.eos_token_id == tokenizer.END_OF_TEXT_ID


def test_split_and_join(tmp_path: Path):
    weights = tmp_path / export.WEIGHTS
    content = np.random.default_rng(0).bytes((2 << 20) + 5)
    weights.write_bytes(content)
    assert len(export.split(weights, 1)) == 3
    weights.unlink()
    train_nano.main(["--join", str(tmp_path)])
    assert weights.read_bytes() == content


@pytest.mark.parametrize("shape", [(6, 32, 64), (6, 64, 32), (3, 48, 48)])
def test_orthogonalise(shape: tuple[int, int, int]):
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
    assert singular.min() > 0.5
    assert singular.max() < 1.3


def test_muon_treats_stacked_halves_as_matrices_of_their_own():
    torch.manual_seed(0)
    start, grad = torch.randn(3, 8, 16), torch.randn(3, 8, 16)
    stacked = torch.nn.Parameter(start.clone())
    halves = [torch.nn.Parameter(half.clone()) for half in start.view(6, 4, 16)]
    stacked.grad = grad.clone()
    for half, half_grad in zip(halves, grad.view(6, 4, 16), strict=True):
        half.grad = half_grad.clone()
    Muon([(stacked, 2)], lr=0.1).step()
    Muon([(half, 1) for half in halves], lr=0.1).step()
    torch.testing.assert_close(stacked.view(6, 4, 16), torch.stack(list(halves)))
    assert not torch.equal(stacked, start)


def test_held_out_passages_are_not_trained_on(tmp_path: Path):
    file = tmp_path / "text.txt"
    works = ["\n".join(f"work {w} line {i} " + "word " * 20 for i in range(4000)) + "\n" for w in range(2)]
    file.write_text("\x1e".join(works))
    held_out, trained = list(held_out_passages([str(file)])), "".join(training_works([str(file)]))
    assert 1 <= len(held_out) < sum(1 for work in works for _ in passages(work)) / 50
    assert not any(passage in trained for passage in held_out)
    assert sum(map(len, held_out)) + len(trained) == sum(map(len, works))


# The command line: a run in two calls ends where the run in one call does.


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("train")
    rng = Random(1)
    works = ["".join(stories.tell(rng).text for _ in range(40)) for _ in range(2)]
    text = folder / "text.txt"
    text.write_text("\x1e".join(works))
    options = {
        "text": text, "valid": text, "cache": folder / "cache", "tasks": 300, "stories": 60, "workers": 1,
        "minutes": 1000, "steps": 6, "batch": 4, "sequence": 64, "log-every": 3, "items": 1, "vocab-size": 512,
        "hidden-size": 32, "num-hidden-layers": 2, "num-attention-heads": 2, "num-key-value-heads": 1,
        "num-experts": 4, "num-experts-per-tok": 2, "moe-intermediate-size": 16,
    }  # fmt: skip

    def run(out: str, **more: object) -> Path:
        given = {**options, "out": folder / out, **{key.replace("_", "-"): value for key, value in more.items()}}
        train_nano.main([argument for key, value in given.items() for argument in (f"--{key}", str(value))])
        return folder / out

    return run


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_resumed_run_equals_the_uninterrupted_one(command, optimizer: str):
    whole = command(f"whole-{optimizer}", optimizer=optimizer)
    parts = command(f"parts-{optimizer}", optimizer=optimizer, stop_step=4)
    assert not (parts / export.WEIGHTS).exists()
    command(f"parts-{optimizer}", optimizer=optimizer, resume=parts / "state.pt", split_mib=1)
    assert (parts / export.WEIGHTS).read_bytes() == (whole / export.WEIGHTS).read_bytes()
    assert (parts / f"{export.WEIGHTS}.part0").exists()
    entries = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [3, 6, 6]
    first, last = (entry["works_bits_per_character"] for entry in entries[:2])
    assert last < first
    assert "where-hard" in entries[2]
    with pytest.raises(ValueError, match="seed"):
        command(f"parts-{optimizer}", optimizer=optimizer, resume=parts / "state.pt", seed=1)


@pytest.mark.parametrize("config", [TINY, OSS], ids=lambda config: config.model_type)
def test_initial_weights_are_the_exported_ones(config: ModelConfig, tmp_path: Path, small_tokenizer):
    exported, other = Model(config, seed=1), Model(config, seed=2)
    export.export(exported, small_tokenizer, tmp_path)
    export.load_weights(other, tmp_path)
    for left, right in zip(exported.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(left.bfloat16(), right.bfloat16())


def test_exact_match_wants_every_token(small_tokenizer):
    task = tasks.test_items("add", tasks.EASY, 1)[0]
    known = torch.tensor(small_tokenizer.encode(task.text).ids)

    class Oracle:
        """Has learned one text by heart."""

        embed_tokens = torch.nn.Embedding.from_pretrained(torch.eye(TINY.vocab_size))

        def __call__(self, ids: torch.Tensor) -> Output:
            hidden = torch.nn.functional.one_hot(known[1:], TINY.vocab_size).float()[None]
            return Output(hidden, *torch.zeros(3))

    last_digit = "1" if task.final[-1] == "0" else "0"
    wrong = replace(task, answer=f"{task.answer[:-2]}{last_digit}\n")
    assert exact_match(Oracle(), [task], small_tokenizer) == 1
    assert exact_match(Oracle(), [wrong], small_tokenizer) == 0
    assert exact_match(Oracle(), [wrong] * 3 + [task], small_tokenizer) == 0.25


def test_texts_for_estimators(tmp_path: Path) -> None:
    """Nothing of what is held out, and none of the tests' items."""
    words = ["ash", "birch", "cedar", "elm", "fir", "hazel", "lime", "oak", "pine", "rowan", "willow", "yew"]
    draw = Random(5)
    works = ["".join(" ".join(draw.choices(words, k=30)) + ".\n" for _ in range(400)) for _ in range(3)]
    text, valid = tmp_path / "train.txt", tmp_path / "valid.txt"
    text.write_text("\x1e".join(works), encoding="utf-8")
    valid.write_text(works[0][:500], encoding="utf-8")
    options = ["--text", str(text), "--valid", str(valid), "--out", str(tmp_path / "texts")]
    assert estimator_texts.main([*options, "--items", "50", "--choice-items", "5"]) == 0
    found = (tmp_path / "texts/estimator.txt").read_text(encoding="utf-8")
    held_out = list(held_out_passages([str(text)]))
    assert held_out, "the sample is long enough to hold something out"
    assert not any(passage in found for passage in held_out)
    kept = [passage for work in works for passage in passages(work) if passage not in held_out]
    assert all(passage in found for passage in kept)
    assert all(item.text in found for item in tasks.training_items(50, estimator_texts.ESTIMATOR_SEED))
    choice = (tmp_path / "texts/choose.txt").read_text(encoding="utf-8")
    assert choice.startswith(works[0][:400])
    items = {item.text for item in tasks.training_items(50, estimator_texts.ESTIMATOR_SEED)}
    assert not any(item in choice for item in items)
    text.write_bytes(b"\xff")
    assert estimator_texts.main(options) == 2, "one line, and nothing written over"
    assert (tmp_path / "texts/estimator.txt").read_text(encoding="utf-8") == found
