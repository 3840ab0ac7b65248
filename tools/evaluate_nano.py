"""Measure the embedded model through the engine: held-out text, task accuracy, speed, and sample outputs.

Each part is measured on its own and stored with its own provenance; parts that are not asked for keep what the
output file has.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from provenance import ROOT, provenance

from nano.corpus import held_out_passages, read_works
from nano.tasks import Task, read_test_file, score
from tritonmoe import Engine, SamplingParams
from tritonmoe.engine import EMBEDDED, embedded_folder

STRIDE = 512  # of the text windows: every token but the first ones is predicted from at least this many
PARTS = ("text", "tasks", "speed", "samples")
PROMPTS = (
    "Once upon a time",
    "The old man looked at the sea and",
    "Add 4821 and 977.\n",
    "Anna has 12 pens. Anna buys 9 more. Anna loses 5 of them. How many pens does Anna have now?\n",
    "Table: dog=97, bread=81, bird=13, rose=34. Read off bird.\n",
)
SAMPLED = SamplingParams(max_new_tokens=150, temperature=0.8, top_p=0.9, seed=1)


def bits_per_character(engine: Engine, documents: Iterable[str], window: int) -> dict[str, float]:
    """Every document predicted from an end-of-text token on, in windows that overlap by all but STRIDE tokens."""
    start = engine.tokenizer.token_to_id(engine.tokenizer.eos_token or "")
    nats, tokens, characters = 0.0, 0, 0
    for document in documents:
        ids = [start, *engine.tokenizer.encode(document)]
        for fresh in _window_scores(engine, ids, window):
            nats -= sum(fresh)
            tokens += len(fresh)
        characters += len(document)
    return {
        "bits_per_character": nats / math.log(2) / characters,
        "perplexity_per_token": math.exp(nats / tokens),
        "tokens": tokens,
        "characters": characters,
        "window": window,
        "stride": STRIDE,
    }


def _window_scores(engine: Engine, ids: list[int | None], window: int) -> Iterator[list[float]]:
    """Log-probabilities of the tokens that each window adds to the ones before it."""
    done = 1
    while done < len(ids):
        end = min(len(ids), window if done == 1 else done + STRIDE)
        scores = engine.score(ids[max(0, end - window) : end])  # type: ignore[arg-type]
        yield scores[len(scores) - (end - done) :]
        done = end


def accuracy(engine: Engine, tasks: Sequence[Task], batch: int) -> dict[str, float]:
    """Share of items whose greedy continuation ends in the right final answer, with its standard error."""
    longest = max(len(engine.tokenizer.encode(task.answer)) for task in tasks)
    params = SamplingParams(max_new_tokens=longest + 16)
    right = 0
    for start in range(0, len(tasks), batch):
        chunk = tasks[start : start + batch]
        results = engine.generate_batch([task.prompt for task in chunk], params)
        right += sum(score(task, result.text) for task, result in zip(chunk, results, strict=True))
    share = right / len(tasks)
    return {"accuracy": share, "standard_error": math.sqrt(share * (1 - share) / len(tasks)), "items": len(tasks)}


def measure_tasks(engine: Engine, folder: Path, items: int, batch: int) -> dict[str, dict[str, float]]:
    results = {}
    for file in sorted(folder.glob("*.jsonl")):
        results[file.stem] = accuracy(engine, read_test_file(file)[:items], batch)
        print(file.stem, f"{results[file.stem]['accuracy']:.3f}", flush=True)
    return results


def measure_speed(model: str, repeats: int = 7) -> dict[str, dict[str, float]]:
    """The command line as a user runs it, each time in a process of its own: medians with their spread."""
    measured: dict[str, list[float]] = {"ready_s": [], "first_token_ms": [], "decode_tokens_per_s": []}
    command = [sys.executable, "-m", "tritonmoe.generate", "Once upon a time", "--model", model, "--json"]
    for _ in range(repeats):
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        result = json.loads(done.stdout)
        measured["ready_s"].append(seconds - len(result["token_ids"]) / result["tokens_per_s"])
        measured["first_token_ms"].append(result["ttft_ms"])
        measured["decode_tokens_per_s"].append(1e3 / result["tpot_ms"])
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in measured.items()
    }


def measure_samples(engine: Engine) -> list[dict[str, str]]:
    """Tasks greedily, prose sampled: exactly what the command line prints for the same options."""
    results = []
    for prompt in PROMPTS:
        params = SamplingParams(max_new_tokens=150) if prompt.endswith("\n") else SAMPLED
        results.append({"prompt": prompt, "text": engine.generate(prompt, params).text, "sampling": describe(params)})
    return results


def describe(params: SamplingParams) -> str:
    if params.temperature == 0:
        return "greedy"
    return f"--temperature {params.temperature} --top-p {params.top_p} --seed {params.seed}"


def measure_text(engine: Engine, works: Path | None, passages: Path | None) -> dict[str, dict[str, float]]:
    results = {}
    if works is not None:
        results["works"] = bits_per_character(engine, read_works(str(works)), engine.max_context)
    if passages is not None:
        # Shorter than a window: how far the text before them would help is not measured.
        results["passages"] = bits_per_character(engine, held_out_passages([str(passages)]), engine.max_context)
    return results


def store(path: Path, part: str, origin: dict[str, object], results: object) -> None:
    """Put one part's results beside the others that the file has by now."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found[part] = {"provenance": origin, "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS, help="what to measure")
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--works", type=Path, help="held-out text: whole works, separated by U+001E")
    parser.add_argument("--passages", type=Path, help="a training text, of which the held-out passages are measured")
    parser.add_argument("--items", type=int, default=500, help="per family and level (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/measurements/embedded-model.json")
    options = parser.parse_args()
    engine = Engine.from_pretrained(options.model)
    origin = provenance()  # now: the files may have changed by the time a part is done
    for part in options.parts:
        results: object
        if part == "text":
            results = measure_text(engine, options.works, options.passages)
        elif part == "tasks":
            results = measure_tasks(engine, embedded_folder() / "tasks", options.items, options.batch)
        elif part == "speed":
            results = measure_speed(options.model)
        else:
            results = measure_samples(engine)
        store(options.out, part, origin, results)
        print(f"{part}: written to {options.out.name}", flush=True)


if __name__ == "__main__":
    main()
