"""The tools that study prediction: what they measure against loops and by hand, and each run whole on a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import calibrate
import evaluate
import pytest
import torch
import train_estimator
from prediction import scoring
from prediction.choice import choose
from prediction.cost import training_cost
from prediction.distillation import divergence
from prediction.drift import spearman
from prediction.figures import accuracy_by_bytes, drift_by_layer, pareto, recall_by_layer
from prediction.policies import Asked
from prediction.recall import Recall
from prediction.report import report
from prediction.scoring import Pair
from prediction.study import shuffle

from nano.tasks import test_items as make_test_items
from tritonmoe import Engine
from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.errors import InputError
from tritonmoe.model.weights import iter_tensors
from tritonmoe.placement.loader import Placement
from tritonmoe.prediction.estimator import NO_VECTORS, load_estimator
from tritonmoe.prediction.hybrid import load_hybrid

TEXT = "Ann has 3 pens. Ben takes 2 of them away and gives one back; how many are left? " * 40

TRAINING = [
    *("--tokens", "4096", "--block", "512", "--held-out", "256", "--check-tokens", "1024"),
    *("--batch", "256", "--passes", "24", "--lr", "0.01"),
]


def test_recall_by_hand() -> None:
    """Two tokens, K = 2, M = 3: of the first both ids are foretold, of the second one, with a quarter of its weight."""
    recall = Recall()
    foretold, routed = torch.tensor([[4, 1, 0], [2, 3, 5]]), torch.tensor([[1, 4], [0, 3]])
    recall.add(foretold, routed, torch.tensor([[0.5, 0.5], [0.75, 0.25]]))
    assert recall.summary() == {
        "recall": 0.75,
        "standard_error": pytest.approx(math.sqrt(0.0625 / 2)),
        "precision": 0.5,
        "gate_mass_recall": 0.625,
        "whole": 0.5,
    }


def test_spearman_and_divergence_by_definition() -> None:
    one = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    other = torch.tensor([[30.0, 2.0, 1.0, 0.5], [9.0, 8.0, 7.0, 6.0]])
    torch.testing.assert_close(spearman(one, other), torch.tensor([0.8, -1.0], dtype=torch.float64))
    p, q = one.softmax(-1), other.softmax(-1)
    torch.testing.assert_close(divergence(other, one, False), (p * (p / q).log()).sum(-1), rtol=1e-4, atol=1e-5)
    p, q = one.double().sigmoid(), other.double().sigmoid()
    expected = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(divergence(other.double(), one.double(), True), expected.sum(-1), rtol=1e-4, atol=1e-5)


def test_hybrid_takes_the_cheapest_within_the_margin() -> None:
    rows = {"residual": (0.80, 0.50, 0.891), "quasi-hidden": (0.805, 0.70, 0.90), "estimator": (0.8, 0.76, 0.90)}
    recall = {name: {str(i + 1): {"recall": r} for i, r in enumerate(found)} for name, found in rows.items()}
    choice, why = choose(recall)
    assert choice.by_layer == {1: "residual", 2: "estimator", 3: "residual"}
    assert why["recall"]["2"] == {"residual": 0.5, "quasi-hidden": 0.7, "estimator": 0.76}


def test_policies_as_they_are_asked_for() -> None:
    asked = Asked.parse("exact+predict=residual+candidates=2+cache-bias=0.5")
    assert (asked.policy.predictor, asked.policy.candidates, asked.policy.cache_bias) == ("residual", 2, 0.5)
    assert asked.depends_on_slots
    assert not Asked.parse("router-pf").depends_on_slots
    assert not Asked.parse("exact").depends_on_slots
    for text, match in (
        ("exact+colour=1", "'colour=1' is no option"),
        ("exact+lookahead", "'lookahead' is no option"),
        ("exact+name=x", "'name=x' is no option"),
        ("fast", "--policy 'fast' is not known"),
        ("est-pf+lookahead=2", "--lookahead above 1"),
    ):
        with pytest.raises(InputError, match=match):
            Asked.parse(text)


@pytest.mark.parametrize("by_steps", [False, True])
def test_scores_are_those_of_the_engine(pristine_folder: Path, by_steps: bool) -> None:
    engine = Engine.from_pretrained(pristine_folder, device="cpu")
    rows = [[5, 9, 77, 200, 31, 8], [44, 45], [17] * 11]
    pairs = [Pair(rows[0][:2], rows[0][2:]), Pair(rows[1][:1], rows[1][1:]), Pair(rows[2][:4], rows[2][4:])]
    found = scoring.score(engine, pairs, batch=2, by_steps=by_steps)
    for pair, row, score in zip(pairs, rows, found, strict=True):
        assert score.log_probability == pytest.approx(sum(engine.score(row)[len(pair.context) - 1 :]), rel=1e-4)
    greedy = engine.generate(rows[0][:3]).token_ids[:4]
    right, wrong = Pair(rows[0][:3], greedy), Pair(rows[0][:3], [*greedy[:3], (greedy[3] + 1) % 200])
    assert [s.is_greedy for s in scoring.score(engine, [right, wrong], 2, by_steps)] == [True, False]


def test_policies_act_on_scores(pristine_folder: Path) -> None:
    """Also on the first token of a continuation, and not where all is read as a prompt."""
    pair = [Pair([5, 9, 77], [200])]
    placement = Placement("router-pf", expert_slots="100%")
    exact = scoring.score(Engine.from_pretrained(pristine_folder, device="cpu"), pair, 1)
    guessed = Engine.from_pretrained(pristine_folder, device="cpu", placement=placement)
    assert scoring.score(guessed, pair, 1)[0].log_probability != pytest.approx(exact[0].log_probability, rel=1e-6)
    assert scoring.score(guessed, pair, 1, by_steps=False)[0].log_probability == pytest.approx(
        exact[0].log_probability, rel=1e-5
    )


def test_shuffled_weights_are_the_same_values(pristine_folder: Path) -> None:
    weights = Engine.from_pretrained(pristine_folder, device="cpu").decoder.weights
    before = [tensor.clone() for tensor in iter_tensors(weights)]
    shuffle(weights, 0)
    for old, new in zip(before, iter_tensors(weights), strict=True):
        assert torch.equal(old.flatten().sort().values, new.flatten().sort().values)
        assert old.dim() == 1 or not torch.equal(old, new)


def test_cost_of_training_by_hand() -> None:
    config = json.loads(train_estimator.LARGE_CONFIG.read_text())
    cost = training_cost(parse_config(config, "config.json"), 1024, 7168, 1000, 2, 400, 1e12, 1e9, 0.5)
    matrices = 1024 * (2048 + 2 * 7168 + 128)
    assert cost["parameters"] == matrices + 47 * 1024 + 2 * 1024
    assert cost["training_s"] == pytest.approx(6 * matrices * 47 * 1000 * 2 / 0.5e12)
    assert cost["link_s"] == pytest.approx(3 * 48 * 128 * 3 * 2048 * 768 * 2 / 1e9)
    assert 2 * 2.5e9 * 1000 < cost["forward_flops"] < 2 * 3.5e9 * 1000, "3.3 B work on a token, embeddings among them"


@pytest.fixture
def study_folder(model_folder: Path) -> Path:
    """A model with everything that predictors need, made by the tools as a user runs them."""
    (model_folder / "text.txt").write_text(TEXT)
    text, small = str(model_folder / "text.txt"), ["--device", "cpu", "--max-context", "64"]
    vectors = str(model_folder / "default-vectors.safetensors")
    assert calibrate.main([text, "--model", str(model_folder), *small, "--tokens", "300", "--out", vectors]) == 0
    out = str(model_folder / "estimator.safetensors")
    arguments = [str(model_folder), text, *small, *TRAINING, "--width", "16", "--inner", "32", "--out", out]
    assert train_estimator.main([*arguments, "--log", str(model_folder / "log.json")]) == 0
    choice = ["--choose-hybrid", "--model", str(model_folder), "--tokens", "256"]
    assert calibrate.main([text, *small, *choice, "--out", str(model_folder / "hybrid.json")]) == 0
    return model_folder


def test_training_helps_and_is_repeatable(study_folder: Path, tmp_path: Path) -> None:
    log = json.loads((study_folder / "log.json").read_text())
    first, last = log["log"]["checks"][0], log["log"]["checks"][-1]
    assert first["divergence"] == pytest.approx(first["router_divergence"]), "it begins by correcting nothing"
    assert min(check["divergence"] for check in log["log"]["checks"]) < 0.7 * first["divergence"]
    assert last["tokens"] == log["log"]["tokens"] <= 4096
    recall = {name: rows["1"]["recall"] for name, rows in log["recall"].items()}
    assert recall["estimator"] > recall["residual"]
    assert log["large_model"]["tokens"] == train_estimator.LARGE_TOKENS
    again = tmp_path / "again.safetensors"
    arguments = [str(study_folder), str(study_folder / "text.txt"), "--device", "cpu", "--max-context", "64", *TRAINING]
    offloaded = ["--width", "16", "--inner", "32", "--expert-slots", "3"]  # the same, with experts in host memory
    assert train_estimator.main([*arguments, *offloaded, "--out", str(again)]) == 0
    engine = Engine.from_pretrained(study_folder, device="cpu")
    vectors = calibrate.subject.load(train_estimator.build_parser().parse_args([*arguments, "--out", "x"])).vectors
    assert vectors is not None
    loaded = [
        load_estimator(path, engine.decoder.spec, engine.decoder.weights, vectors.identity)
        for path in (again, study_folder / "estimator.safetensors")
    ]
    assert all(map(torch.equal, *(estimator.shared for estimator in loaded)))
    assert vectors.identity != NO_VECTORS
    choice = load_hybrid(study_folder / "hybrid.json", engine.decoder.spec, engine.decoder.weights)
    assert list(choice.by_layer) == [1]
    assert "rule" in json.loads((study_folder / "hybrid.json").read_text())["why"]


def test_files_asked_for_must_exist_also_beside_the_model(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, missing = tmp_path / "text.txt", model_folder / "estimator.safetensors"
    text.write_text(TEXT)
    arguments = [str(text), "--model", str(model_folder), "--device", "cpu", "--out", str(tmp_path / "hybrid.json")]
    assert calibrate.main([*arguments, "--choose-hybrid", "--estimator", str(missing)]) == 2
    assert f"{missing}: " in capsys.readouterr().err


def test_evaluate_whole(study_folder: Path, tmp_path: Path) -> None:
    items = make_test_items("lookup", "easy", 2)
    rows = [{"prompt": t.prompt, "final": t.final, "answer": t.answer, "tests": []} for t in items]
    tasks = tmp_path / "lookup-easy.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output, table = tmp_path / "out.json", tmp_path / "out.md"
    policies = "exact,router-pf,est-pf+gate=routed,router-free,on-demand+cache-bias=0.5"
    sizes = ["--tokens", "256", "--decode-tokens", "32", "--windows", "2", "--slot-windows", "1", "--prompts", "2"]
    found = evaluate.main(
        [str(study_folder), "--policies", policies, "--text", str(study_folder / "text.txt"), "--tasks", str(tasks),
         "--items", "2", "--slot-items", "1", "--batch", "2", "--slots", "75%", "--device", "cpu", *sizes,
         "--output", str(output), "--table", str(table)]
    )  # fmt: skip
    assert found == 0
    content = json.loads(output.read_text())
    by_policy = {row["policy"]: row for row in content["policies"]["results"]}
    assert list(by_policy) == ["resident", *policies.split(",")]
    exact, baseline = by_policy["exact"], by_policy["resident"]
    assert exact["text"] == baseline["text"], "exact is exact"
    assert exact["tasks"]["lookup-easy"] == baseline["tasks"]["lookup-easy"]
    assert by_policy["router-pf"]["text"]["nats_per_token"] != baseline["text"]["nats_per_token"]
    assert by_policy["on-demand+cache-bias=0.5"]["batch"] == 1
    assert by_policy["exact"]["traffic"]["75%"]["bytes_per_token"] > 0
    recall = content["prediction"]["results"]["text"]["recall"]
    assert recall["estimator"]["1"]["recall"] > recall["residual"]["1"]["recall"]
    assert recall["residual, 2k"]["1"]["recall"] == 1.0, "2k are all that there are"
    assert content["prediction"]["results"]["text"]["drift"]["residual"]["1"]["cosine"] < 1
    assert len(content["caches"]["results"]["rows"]) == 4
    assert table.read_text() == report(content)
    assert "| est-pf+gate=routed |" in table.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "17"], "--batch must be from 1 to 16"),
        (["--policies", "fast"], "--policy 'fast' is not known"),
        (["--tasks", "missing-easy.jsonl"], "missing-easy.jsonl: No such file"),
        (["--parts", "prediction"], "needs --text or --tasks"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], message: str, pristine_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: list[Any] = [str(pristine_folder), "--device", "cpu", "--output", str(tmp_path / "x.json"), *options]
    assert evaluate.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_figures_show_what_was_measured() -> None:
    def by_layer(**found: list[float]) -> dict[str, Any]:
        return {
            name: {str(i + 1): {"recall": v, "cosine": v} for i, v in enumerate(row)} for name, row in found.items()
        }

    text = {"recall": by_layer(residual=[0.5, 0.9], estimator=[0.8, 0.9]), "drift": by_layer(residual=[0.5, 0.9])}
    untrained = {"recall": by_layer(residual=[0.7, 0.6])}
    cell = {"accuracy": 0.5, "standard_error": 0.05}
    rows = [
        {"policy": name, "tasks": {"add": {**cell, "accuracy": right}}, "traffic": {"25%": {"bytes_per_token": size}}}
        for name, right, size in (("exact", 0.9, 3e6), ("est-pf", 0.8, 2e6), ("router-pf", 0.1, 2.5e6))
    ]
    content = {
        "model": "tiny",
        "prediction": {"results": {"top_k": 2, "text": text, "untrained": untrained}},
        "policies": {"results": rows},
    }
    picture = recall_by_layer(content, "text")
    assert "estimator, 1: 80" in picture
    assert "untrained" in picture
    assert "residual, 2: 0.9" in drift_by_layer(content, "text")
    picture = accuracy_by_bytes(content)
    assert "router-pf, 25%: 2.500 MB, 10.0 %" in picture
    points = [(3.0, 90.0, 5.0, "exact"), (2.0, 80.0, 5.0, "est-pf"), (2.5, 10.0, 5.0, "router-pf")]
    assert [p[3] for p in pareto(points)] == ["est-pf", "exact"]
