"""Regions of docs/prediction.md; the tables of tools/evaluate.py are in prediction/report.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prediction.report import cache_table, drift_table, policy_table, recall_table, summary_table, traffic_table

from documents.markdown import figure, percent, table
from documents.measurement import files, origin, read, runs

EMBEDDED = "prediction-nano"


def _part_of(name: str, part: str, show: Callable[[dict[str, Any]], str]) -> str:
    """A part of a model's evaluation; FileNotFoundError where it was not measured."""
    content = read(name)
    if part not in content:
        raise FileNotFoundError(f"measurements/{name} is missing its part {part}")
    return show(content[part]) + origin(content[part])


def _of_siblings(part: str, show: Callable[[dict[str, Any]], str], sign: str = ":\n\n") -> list[str]:
    """That part of the larger models of which it was measured, each after its name and a sign."""
    names = [name for name in files("prediction-sibling-*.json") if part in read(name)]
    return [f"{_model(name)}{sign}{_part_of(name, part, show)}" for name in names]


def _model(name: str) -> str:
    return name.partition("-")[2].removesuffix(".json")


def prediction_recall() -> str:
    """For text and tasks: means over layers, then layer by layer; of larger models, which figures show, the means."""

    def means(part: dict[str, Any]) -> str:
        corpora = [name for name in ("text", "tasks", "untrained") if name in part["results"]]
        return "\n".join(f"{corpus}:\n\n{summary_table(part, corpus)}" for corpus in corpora)

    own = _part_of(f"{EMBEDDED}.json", "prediction", _recall)
    return "\n".join([own, *_of_siblings("prediction", means, ", ")])


def _recall(part: dict[str, Any]) -> str:
    text, top_k = "", part["results"]["top_k"]
    for corpus in ("text", "tasks"):
        text += f"{part['results'][corpus]['tokens']:,} tokens of {corpus}, the {top_k} experts of each layer:\n\n"
        text += f"{summary_table(part, corpus)}\n{recall_table(part, corpus)}\n"
    text += "The same model with its weights shuffled, so that it has learned nothing:\n\n"
    return text + summary_table(part, "untrained")


def prediction_drift() -> str:
    def show(part: dict[str, Any]) -> str:
        return "\n".join(f"On {corpus}:\n\n{drift_table(part, corpus)}" for corpus in ("text", "tasks"))

    return _part_of(f"{EMBEDDED}.json", "prediction", show)


def prediction_policies() -> str:
    def show(part: dict[str, Any]) -> str:
        return f"{policy_table(part)}\n{traffic_table(part)}"

    own = [_part_of(name, "policies", show) for name in runs(EMBEDDED)]
    return "\n".join([*own, *_of_siblings("policies", show)])


def prediction_caches() -> str:
    return "\n".join([_part_of(f"{EMBEDDED}.json", "caches", cache_table), *_of_siblings("caches", cache_table)])


def prediction_published() -> str:
    part = read("published-speculating-experts.json")
    accuracy = part["accuracy"]
    rows = [[name, *map(percent, row)] for name, row in accuracy["rows"].items()]
    text = table(["published", *(f"{column}, %" for column in accuracy["columns"])], rows)
    return f"{text}\n{table(['published recall', ''], map(list, part['recall'].items()))}\n{part['source']}.\n"


def prediction_estimator() -> str:
    others = [f"{_model(name)}: {_estimator(read(name))}" for name in files("estimator-sibling-*.json")]
    return "\n".join([_estimator(read("estimator-nano.json")), *others])


def _estimator(part: dict[str, Any]) -> str:
    """What training took, what it brought to each layer on held-out text, and what a large model would take."""
    log, large = part["log"], part["large_model"]
    recall = part["recall"]
    rows = [[layer, *(percent(found[layer]["recall"]) for found in recall.values())] for layer in recall["estimator"]]
    weakest = min(recall["quasi-hidden"], key=lambda layer: recall["quasi-hidden"][layer]["recall"])
    gain = 100 * (recall["estimator"][weakest]["recall"] - recall["quasi-hidden"][weakest]["recall"])
    text = f"{part['parameters']:,} parameters, trained on {log['tokens']:,} tokens: {figure(log['collect_s'])} s of "
    text += f"running the model, {figure(log['train_s'])} s of training ({figure(part['train_flop_per_s'] / 1e9)} "
    text += f"GFLOP/s). The weakest layer, {weakest}, gains {gain:.1f} points.\n\n"
    text += table(["layer", *(f"{name}, %" for name in recall)], rows)
    text += f"\nArithmetic for Qwen3-30B-A3B on an H200 at {percent(large['share_of_peak'])} % of its matrix rate: "
    text += f"{figure(large['parameters'] / 1e6)} M parameters, {figure(large['tokens'] / 1e6)} M tokens gone through "
    text += f"{large['passes']} times take {figure(large['training_s'])} s of training and "
    text += f"{figure(large['forward_s'])} s of running the model; with all experts in host memory "
    text += f"{figure(large['link_s'])} s over the link.\n"
    return text + origin(part)


REGIONS = {
    "prediction-estimator": prediction_estimator,
    "prediction-recall": prediction_recall,
    "prediction-drift": prediction_drift,
    "prediction-policies": prediction_policies,
    "prediction-caches": prediction_caches,
    "prediction-published": prediction_published,
}
