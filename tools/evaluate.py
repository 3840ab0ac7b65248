"""Measure how well a model's experts are foretold, and what running under each policy does to its text and answers.

Parts, each stored with its own provenance in one JSON file; those not asked for keep what the file has:

  prediction  recall, precision, gate mass, drift of states and rank agreement, by layer and predictor
  policies    perplexity in decode steps, exact match of answers, agreement with the baseline, bytes and hits
  caches      hit rates of caches over recorded routing

A policy is a preset with options: exact, router-pf+gate=routed, exact+cache-bias=0.5, exact+predict=estimator. Where
what is computed depends on slots, sequences run one at a time with every share of --slots, over fewer items.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from calibrate import pieces, windows_of
from command_line import Parser, run_command
from prediction import policies as running
from prediction import subject as model
from prediction.caches import cache_rows
from prediction.policies import Asked
from prediction.report import report
from prediction.routings import chunks
from prediction.study import shuffle, study
from prediction.subject import Subject
from provenance import provenance
from tqdm import tqdm

from nano.tasks import Task
from tritonmoe import Engine, Generation, SamplingParams
from tritonmoe.errors import InputError
from tritonmoe.offload.policy import RESIDENT
from tritonmoe.offload.trace import TraceRecorder, read_trace
from tritonmoe.prediction.hybrid import load_hybrid

PARTS = ("prediction", "policies", "caches")
BASELINE = Asked.parse(RESIDENT)
DEFAULT_POLICIES = "exact,router-pf,router-pf+gate=routed,router-pf+predict=residual,est-pf,hybrid-pf,router-free"


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id, or 'nano': the embedded model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--policies", default=DEFAULT_POLICIES, metavar="A,B", help="(default: %(default)s)")
    parser.add_argument("--text", nargs="+", type=Path, default=[], metavar="FILE", help="held-out UTF-8 text")
    parser.add_argument("--tasks", nargs="+", type=Path, default=[], metavar="FILE", help="items, JSON lines")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the JSON file")
    parser.add_argument("--table", type=Path, metavar="FILE", help="also write everything as a Markdown table")
    model.add_options(parser)
    group = parser.add_argument_group("sizes")
    group.add_argument("--tokens", type=int, default=16_384, metavar="N", help="of text, and of tasks (%(default)s)")
    group.add_argument("--decode-tokens", type=int, default=256, metavar="N", help="of a window, for perplexity")
    group.add_argument("--windows", type=int, default=32, metavar="N", help="for perplexity (%(default)s)")
    group.add_argument("--items", type=int, default=500, metavar="N", help="of each task file (%(default)s)")
    group.add_argument("--slot-items", type=int, default=50, metavar="N", help="where slots matter (%(default)s)")
    group.add_argument("--slot-windows", type=int, default=4, metavar="N", help="likewise (%(default)s)")
    group.add_argument("--prompts", type=int, default=16, metavar="N", help="for bytes and hits (%(default)s)")
    group.add_argument("--batch", type=int, default=16, metavar="N", help="sequences at once, up to 16 (%(default)s)")
    group.add_argument("--slots", default="10%,25%,50%", metavar="P%,…", help="shares of all experts (%(default)s)")
    group.add_argument("--seed", type=int, default=0)
    return parser


def text_windows(subject: Subject, paths: Sequence[Path], length: int, tokens: int, seed: int) -> list[list[int]]:
    """Whole windows drawn from all of the text, `tokens` in all; InputError where there is less."""
    texts = (pieces(path) for path in paths)
    found = [w for w in windows_of(texts, subject.engine.tokenizer, length, 64 * tokens) if len(w) == length]
    if not found:
        raise InputError(f"--text holds less than a window of {length} tokens; give more, or a smaller --max-context")
    Random(seed).shuffle(found)
    return found[: max(1, tokens // length)]


def task_windows(
    subject: Subject, tasks: dict[str, list[Task]], length: int, tokens: int, seed: int
) -> list[list[int]]:
    """Items with their worked answers, as the model is used: each by itself."""
    items = [task for family in tasks.values() for task in family]
    Random(seed).shuffle(items)
    encode, found = subject.engine.tokenizer.encode, []
    for task in items:
        if tokens <= 0:
            break
        found.append(encode(task.text)[:length])
        tokens -= len(found[-1])
    return found


def measure_prediction(subject: Subject, options: argparse.Namespace, tasks: dict[str, list[Task]]) -> dict[str, Any]:
    length, decoder = model.window_length(subject, options.max_context), subject.decoder
    corpora: dict[str, list[list[int]]] = {}
    if options.text:
        corpora["text"] = text_windows(subject, options.text, length, options.tokens, options.seed)
    if tasks:
        corpora["tasks"] = task_windows(subject, tasks, length, options.tokens, options.seed)
    if not corpora:
        raise InputError("the part prediction needs --text or --tasks")
    estimator = subject.load_estimator(None)
    path = subject.files.hybrid
    kinds = None if path is None else load_hybrid(path, decoder.spec, decoder.weights).by_layer
    if kinds is not None and estimator is None and "estimator" in kinds.values():
        kinds = None
    results: dict[str, Any] = {"top_k": next(iter(decoder.spec.moe_layers.values())).num_experts_per_tok}
    for name, windows in corpora.items():
        reading = chunks(decoder, shown(windows, f"reading {name}"), length)
        results[name] = {"tokens": sum(map(len, windows)), **study(subject, reading, estimator, kinds).summary()}
    first = next(iter(corpora.values()))
    shuffle(decoder.weights, options.seed)  # last: the engine is of no use afterwards
    bare = replace(subject, vectors=None, defaults=None)
    results["untrained"] = study(bare, chunks(decoder, shown(first, "untrained"), length), None, None).summary()
    return results


def shown(rows: Sequence[Any], what: str) -> Iterator[Any]:
    return iter(tqdm(rows, desc=what, disable=None, leave=False))


class Policies:
    """Runs policies one after the other, against a baseline with all experts resident."""

    def __init__(self, options: argparse.Namespace, tasks: dict[str, list[Task]], windows: list[list[int]]) -> None:
        self._options, self._tasks, self._windows = options, tasks, windows
        self._engine_options = {"dtype": options.dtype, "device": options.device, "max_context": options.max_context}
        self._baseline: dict[tuple[str, int, int], list[Generation]] = {}  # by task file, batch and items
        self._baseline_text: dict[tuple[int, int], dict[str, float]] = {}  # by windows and batch

    def rows(self) -> Iterator[dict[str, Any]]:
        for text in [RESIDENT, *self._options.policies.split(",")]:
            asked = Asked.parse(text)
            if asked.depends_on_slots:
                for slots in self._options.slots.split(","):
                    yield self._row(asked, slots, 1, self._options.slot_items)
            else:
                yield self._row(asked, "100%", self._options.batch, self._options.items)

    def _row(self, asked: Asked, slots: str, batch: int, items: int) -> dict[str, Any]:
        row: dict[str, Any] = {"policy": asked.text, "description": str(asked.policy), "batch": batch, "slots": slots}
        row["tasks"] = {}
        with self._opened(asked, slots, batch) as engine:
            if self._windows:
                count = self._options.slot_windows if asked.depends_on_slots else len(self._windows)
                row["text"] = self._text(engine, asked, count, batch)
            for name, tasks in self._tasks.items():
                found = running.answers(engine, tasks[:items], batch)
                if asked == BASELINE:
                    self._baseline[name, batch, len(found)] = found
                expected = self._baseline_of(name, batch, tasks[:items])
                row["tasks"][name] = running.accuracy(tasks[:items], found, expected)
                print(f"{asked.text} {slots} {name} {row['tasks'][name]['accuracy']:.3f}", flush=True)
        if asked != BASELINE:
            shares = [slots] if asked.depends_on_slots else self._options.slots.split(",")
            row["traffic"] = {share: self._traffic(asked, share) for share in shares}
        return row

    def _text(self, engine: Engine, asked: Asked, count: int, batch: int) -> dict[str, float]:
        """Perplexity over the first windows, with the baseline's over the same ones."""
        found = running.perplexity(engine, self._windows[:count], batch)
        if asked == BASELINE:
            self._baseline_text[count, batch] = found
        if (count, batch) not in self._baseline_text:
            with self._opened(BASELINE, "", batch) as other:
                self._baseline_text[count, batch] = running.perplexity(other, self._windows[:count], batch)
        return {**found, "baseline_perplexity": self._baseline_text[count, batch]["perplexity"]}

    @contextlib.contextmanager
    def _opened(self, asked: Asked, slots: str, batch: int) -> Iterator[Engine]:
        engine = running.open_engine(self._options.model, asked, slots, batch, self._engine_options)
        try:
            yield engine
        finally:
            engine.close()

    def _baseline_of(self, name: str, batch: int, tasks: list[Task]) -> list[Generation]:
        """The baseline's answers in batches of the same size, whose sums round in the same way."""
        key = name, batch, len(tasks)
        if key not in self._baseline:
            with self._opened(BASELINE, "", batch) as engine:
                self._baseline[key] = running.answers(engine, tasks, batch)
        return self._baseline[key]

    def _traffic(self, asked: Asked, slots: str) -> dict[str, Any]:
        with self._opened(asked, slots, 1) as engine:
            return running.traffic(engine, self.prompts(), 64)

    def prompts(self) -> list[str]:
        """Of all task files in turn, so many as are asked for."""
        items = [task for family in self._tasks.values() for task in family]
        Random(self._options.seed).shuffle(items)
        return [task.prompt for task in items[: self._options.prompts]] or ["Once upon a time"] * self._options.prompts


def measure_caches(subject: Subject, options: argparse.Namespace, prompts: list[str]) -> dict[str, Any]:
    """Generations under exact routing with quasi-hidden or residual speculation, recorded, then replayed."""
    asked = Asked.parse("exact")
    given = {"dtype": options.dtype, "device": options.device, "max_context": options.max_context}
    engine = running.open_engine(options.model, asked, "50%", 1, given)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        with TraceRecorder(path).attach(engine.decoder):
            for prompt in prompts:
                engine.generate(prompt, SamplingParams(max_new_tokens=64))
        trace = read_trace(path)
    engine.close()
    if subject.vectors is None:
        raise InputError("the part caches takes what is popular from the default vectors; make them first")
    layers = list(subject.decoder.spec.moe_layers)
    counts = subject.vectors.counts.tolist()
    popularity = {(layer, i): n for layer, row in zip(layers, counts, strict=True) for i, n in enumerate(row)}
    steps = sum(not step[0].is_prefill for step in trace.steps)
    return {"steps": steps, "prompts": len(prompts), "rows": cache_rows(trace, (0.05, 0.1, 0.25, 0.5), popularity)}


def store(path: Path, part: str, results: object, origin: dict[str, object], name: str) -> dict[str, Any]:
    """Put one part's results beside the others that the file has by now."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    content["model"] = name
    content[part] = {"provenance": origin, "results": results}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


def run(options: argparse.Namespace) -> None:
    if not 1 <= options.batch <= 16:
        raise InputError(f"--batch must be from 1 to 16, as many as are speculated for at once, not {options.batch}")
    if not options.output.parent.is_dir():
        raise InputError(f"--output {options.output}: there is no such folder")
    for text in options.policies.split(","):  # a mistake should not cost the time of those before it
        Asked.parse(text)
    origin, name = provenance(), Path(options.model).name
    tasks = running.read_tasks(options.tasks, options.items)
    subject = model.load(options)
    windows: list[list[int]] = []
    if options.text:
        needed = options.windows * options.decode_tokens
        windows = text_windows(subject, options.text, options.decode_tokens, needed, options.seed)
    runs = Policies(options, tasks, windows)
    content: dict[str, Any] = {}
    if "caches" in options.parts:
        content = store(options.output, "caches", measure_caches(subject, options, runs.prompts()), origin, name)
    if "policies" in options.parts:
        rows: list[dict[str, Any]] = []
        for row in runs.rows():
            rows.append(row)
            content = store(options.output, "policies", rows, origin, name)
    if "prediction" in options.parts:
        content = store(options.output, "prediction", measure_prediction(subject, options, tasks), origin, name)
    if options.table is not None:
        options.table.write_text(report(content), encoding="utf-8")
    print(f"written to {options.output}")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
