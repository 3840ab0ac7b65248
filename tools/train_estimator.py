"""Train the estimator of a model: a small network that foretells the next layer's router from the quasi-hidden state.

The model reads text, with its experts resident or in host memory, and what its routers say is distilled as it goes: the
states of one block of tokens at a time, so that memory does not grow with the text. One window in sixteen is held out;
training ends early where those gain nothing more, and the weights that did best on them are kept. The safetensors file
that is written names its model and the default vectors of its states.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from calibrate import built_in, pieces, windows_of
from command_line import Parser, run_command
from prediction import subject as model
from prediction.cost import training_cost
from prediction.distillation import Block, Distillation, Recipe, blocks
from prediction.recall import measure
from prediction.routings import chunks
from prediction.subject import Subject
from provenance import ROOT, provenance
from tqdm import tqdm

from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.errors import InputError
from tritonmoe.prediction.default_vectors import model_identity
from tritonmoe.prediction.estimator import Estimator

HELD_OUT_ONE_IN = 16
LARGE_CONFIG = ROOT / "tools/bench/configs/qwen3-30b-a3b.json"
LARGE_TOKENS, LARGE_CHUNK, LARGE_SHARE = 4_500_000, 4096, 0.3  # the paper's 4 to 5 million; of the peak, assumed


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id, or 'nano': the embedded model")
    parser.add_argument("texts", nargs="*", type=Path, metavar="TEXT", help="UTF-8 files (default: a built-in sample)")
    parser.add_argument("--built-in", action="store_true", help="begin with the built-in sample, then the files")
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    parser.add_argument("--log", type=Path, metavar="FILE", help="also write what was measured, as JSON")
    model.add_options(parser)
    group = parser.add_argument_group("the network")
    group.add_argument("--width", type=int, metavar="D", help="(default: half the hidden size)")
    group.add_argument("--inner", type=int, metavar="N", help="of its MLP (default: four times its width)")
    group.add_argument("--plain", action="store_true", help="as published: it does not correct the layer's own router")
    group = parser.add_argument_group("training")
    group.add_argument("--tokens", type=int, default=4_000_000, metavar="N", help="text again if short (%(default)s)")
    group.add_argument("--held-out", type=int, default=16_384, metavar="N", help="at most N tokens (%(default)s)")
    for name, what in {"block": "tokens held at once", "passes": "over a block", "batch": "states of a step"}.items():
        size = getattr(Recipe, name)
        group.add_argument(f"--{name}", type=int, default=size, metavar="N", help=f"{what} (%(default)s)")
    group.add_argument("--check-tokens", type=int, default=Recipe.check_tokens, metavar="N", help="between two looks")
    group.add_argument("--lr", type=float, default=Recipe.lr, help="(default: %(default)s)")
    group.add_argument("--patience", type=int, default=Recipe.patience, metavar="N", help="looks without gain")
    group.add_argument("--minutes", type=float, default=math.inf, help="end after so long, whatever was reached")
    group.add_argument("--seed", type=int, default=Recipe.seed)
    return parser


def read_windows(
    subject: Subject, options: argparse.Namespace, length: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Windows of token ids to train on and those held out, in a seeded order; InputError where there are too few."""
    texts = [pieces(path) for path in options.texts]
    if options.built_in or not options.texts:
        texts = [*([text] for text in built_in(options.model)[1]), *texts]
    limit = options.tokens + options.held_out
    windows = [np.array(window, np.int32) for window in windows_of(texts, subject.engine.tokenizer, length, limit)]
    if len(windows) < 2:
        raise InputError("the text is shorter than two windows; give more, or a smaller --max-context")
    Random(options.seed).shuffle(windows)  # type: ignore[arg-type]
    count = max(1, min(len(windows) // HELD_OUT_ONE_IN, options.held_out // length))
    return windows[count:], windows[:count]


def repeated(windows: list[np.ndarray], tokens: int) -> Iterator[list[int]]:
    """The windows, again and again, until so many tokens are reached."""
    while True:
        for window in windows:
            if tokens <= 0:
                return
            yield window[:tokens].tolist()
            tokens -= len(window)


def large_model_cost() -> dict[str, Any]:
    """Arithmetic for a 30B model, from rates that were measured on a GPU."""
    rates = json.loads((ROOT / "docs/measurements/kernels.json").read_text(encoding="utf-8"))["rates"]
    link = json.loads((ROOT / "docs/measurements/offload-qwen3-30b-a3b.json").read_text(encoding="utf-8"))
    spec = parse_config(json.loads(LARGE_CONFIG.read_text(encoding="utf-8")), LARGE_CONFIG.name)
    width = spec.hidden_size // 2
    return training_cost(
        spec, width, 7 * width, LARGE_TOKENS, Recipe.passes, LARGE_CHUNK, rates["matrix_flop_per_s"],
        link["link_bytes_per_s"], LARGE_SHARE,
    )  # fmt: skip


def facts_of(training: Distillation, network: Estimator, options: argparse.Namespace) -> dict[str, Any]:
    log, recipe = training.log, training.recipe
    rows, parameters = network.shared.layer.shape[0], network.num_parameters
    states = log.tokens * rows * recipe.passes
    return {
        "texts": [path.name for path in options.texts],
        "parameters": parameters,
        "width": len(network.shared.into),
        "inner": len(network.shared.up),
        "corrects": network.corrects,
        "recipe": asdict(recipe),
        "log": asdict(log),
        "tokens_per_s": log.tokens / (log.collect_s + log.train_s),
        "collect_tokens_per_s": log.tokens / max(log.collect_s, 1e-9),
        "train_states_per_s": states / max(log.train_s, 1e-9),
        "train_flop_per_s": 6 * (parameters - network.shared.layer.numel()) * states / max(log.train_s, 1e-9),
    }


@torch.inference_mode()
def train(subject: Subject, options: argparse.Namespace) -> tuple[Distillation, list[list[int]]]:
    """The whole run; also the windows that were held out."""
    spec, length = subject.decoder.spec, model.window_length(subject, options.max_context)
    windows, held_out = read_windows(subject, options, length)
    width = options.width or spec.hidden_size // 2
    sizes = options.tokens, options.block, options.passes, options.batch
    recipe = Recipe(*sizes, options.lr, options.seed, options.check_tokens, options.patience)
    with torch.inference_mode(False):
        network = Estimator.initial(
            spec, width, options.inner or 4 * width, not options.plain, subject.vectors_identity, options.seed
        )
        training = Distillation(subject.decoder, network, recipe)
    states = subject.predictor("quasi-hidden")
    aside = [window.tolist() for window in held_out]
    kept: list[Block] = list(blocks(states, chunks(subject.decoder, aside, length), recipe.block))
    stream = blocks(states, chunks(subject.decoder, repeated(windows, options.tokens), length), recipe.block)
    with tqdm(total=options.tokens, unit="token", desc="training", disable=None, leave=False) as bar:
        for tokens in training.run(stream, kept, options.minutes):
            bar.update(tokens)
            bar.set_postfix(divergence=f"{training.log.checks[-1]['divergence']:.4f}")
    return training, aside


def run(options: argparse.Namespace) -> None:
    for name in ("tokens", "held_out", "block", "passes", "batch", "check_tokens", "patience"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    if not options.out.parent.is_dir():
        raise InputError(f"--out {options.out}: there is no such folder")
    for path in options.texts:
        if next(pieces(path), None) is None:
            raise InputError(f"{path} is empty")
    origin = provenance()
    subject = model.load(options)
    training, aside = train(subject, options)
    network, decoder = training.result(), subject.decoder
    facts = facts_of(training, network, options)
    network.save(options.out, model_identity(decoder.spec, decoder.weights), facts)
    fitted = network.to(decoder.device, decoder.dtype)
    predictors = {kind: subject.predictor(kind, fitted) for kind in ("residual", "quasi-hidden", "estimator")}
    length = model.window_length(subject, options.max_context)
    recall = measure(predictors, chunks(decoder, aside, length)).summary()
    print("\n".join(lines_of(recall, facts)))
    if options.log is not None:
        content = {"provenance": origin, **facts, "recall": recall, "large_model": large_model_cost()}
        options.log.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"estimator of {network.num_parameters:,} parameters written to {options.out}")


def lines_of(recall: dict[str, dict[str, dict[str, float]]], facts: dict[str, Any]) -> list[str]:
    """Recall of the held-out text by layer, and what the training took."""
    lines = [f"{'layer':>5}" + "".join(f"{name:>14}" for name in recall)]
    for layer in recall["estimator"]:
        lines.append(f"{layer:>5}" + "".join(f"{100 * rows[layer]['recall']:>13.1f}%" for rows in recall.values()))
    log = facts["log"]
    lines.append(
        f"{log['tokens']:,} tokens: {log['collect_s']:.0f} s of reading, {log['train_s']:.0f} s of training; "
        f"ended by {log['ended_by']}"
    )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
