"""Train a small Mixture-of-Experts model, of Qwen3's form or GPT-OSS's, and write it as a Hugging Face folder."""

import argparse
import json
import os
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch

from nano.corpus import Recipe, prepare
from nano.export import WEIGHTS, export, join, split
from nano.model import ModelConfig
from nano.trainer import MIXTURE, Settings, Trainer

EPILOG = """\
From scratch, on one GPU, in one call:

  python3 tools/train_nano.py --text train_*.txt.xz --valid valid.txt.xz --out build/nano --minutes 18

Text files hold one paragraph a line, with works separated by U+001E. The corpus is prepared first (minutes on
a few cores) and kept in --cache; --prepare-only stops there. --minutes is the whole run's time, compilation
included, and the learning rate decays to its end. The same run in two calls, the second of which continues
the schedule:

  python3 tools/train_nano.py ... --minutes 18 --stop-after 9
  python3 tools/train_nano.py ... --minutes 18 --resume build/nano/state.pt

Larger siblings, to study routing at the depth of real models (tools/nano/recipes):

  python3 tools/train_nano.py --recipe tools/nano/recipes/sibling-gpt-oss.json --text train_*.txt.xz \\
      --valid valid.txt.xz --tokenizer tritonmoe/nano/tokenizer.json --out build/sibling-gpt-oss

The output folder then has model.safetensors, config.json, the tokenizer, and log.jsonl with everything
measured. The seed fixes the data, its order and the initial weights; a time limit, unlike --steps, does not
fix where the run ends.
"""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--join", type=Path, metavar="DIR", help="only join the parts of --split-mib in DIR")

    parser.add_argument("--recipe", type=Path, metavar="FILE", help="JSON with other defaults, by name of the option")

    files = parser.add_argument_group("files")
    files.add_argument("--text", nargs="+", metavar="FILE", help="training text, .txt or .txt.xz")
    files.add_argument("--valid", metavar="FILE", help="held-out text")
    files.add_argument("--out", type=Path, default=Path("build/nano"), help="folder to write (default: %(default)s)")
    files.add_argument("--cache", type=Path, help="folder of the prepared corpus (default: OUT/corpus)")
    files.add_argument("--tokenizer", type=Path, metavar="FILE", help="use this tokenizer.json instead of training one")
    files.add_argument("--state", type=Path, help="where to save the training state (default: OUT/state.pt)")
    files.add_argument("--resume", type=Path, metavar="FILE", help="continue from a saved training state")
    files.add_argument("--split-mib", type=int, metavar="N", help="also write the weights in parts of N MiB")

    corpus = parser.add_argument_group("corpus")
    corpus.add_argument("--tasks", type=int, default=3_500_000, help="task items to make (default: %(default)s)")
    corpus.add_argument("--stories", type=int, default=300_000, help="stories to make (default: %(default)s)")
    corpus.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    corpus.add_argument("--prepare-only", action="store_true", help="prepare the corpus in --cache and exit")
    corpus.add_argument(
        "--mixture",
        type=float,
        nargs=3,
        default=tuple(MIXTURE.values()),
        metavar=tuple(name.upper() for name in MIXTURE),
        help="share of each kind of document in a batch (default: %(default)s)",
    )

    run = parser.add_argument_group("run")
    run.add_argument("--minutes", type=float, default=18.0, help="time limit of the run (default: %(default)s)")
    run.add_argument("--steps", type=int, default=1_000_000, help="step limit of the run (default: %(default)s)")
    run.add_argument("--stop-after", type=float, default=float("inf"), metavar="MINUTES", help="pause there and save")
    run.add_argument("--stop-step", type=int, metavar="STEP", help="pause before this step and save")
    run.add_argument("--batch", type=int, default=128, help="windows in a batch (default: %(default)s)")
    run.add_argument("--sequence", type=int, default=1024, help="tokens in a window (default: %(default)s)")
    run.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (default: %(default)s)")
    run.add_argument("--decay-share", type=float, default=0.4, help="part of the run with falling rate (default: 0.4)")
    run.add_argument("--initial", metavar="DIR", help="start from the weights of an exported model of the same sizes")
    run.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="for the matrices")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--log-every", type=int, default=250, metavar="STEPS")
    run.add_argument("--save-every", type=float, default=5.0, metavar="MINUTES")
    run.add_argument("--items", type=int, default=500, help="test items per family and level (default: %(default)s)")

    model = parser.add_argument_group("model")
    for size in fields(ModelConfig):
        option = "--" + size.name.replace("_", "-")
        model.add_argument(option, type=size.type, default=size.default, help="(default: %(default)s)")
    known, _ = parser.parse_known_args(arguments)
    if known.recipe:
        given = json.loads(known.recipe.read_text(encoding="utf-8"))
        unknown = sorted(set(given) - set(vars(known)))
        if unknown:
            parser.error(f"{known.recipe} names {unknown[0]!r}, which is no option")
        parser.set_defaults(**given)
    parsed = parser.parse_args(arguments)
    if not parsed.join and not (parsed.text and parsed.valid):
        parser.error("--text and --valid are needed")
    return parsed


def build_settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        model=ModelConfig(**{size.name: getattr(arguments, size.name) for size in fields(ModelConfig)}),
        minutes=arguments.minutes,
        steps=arguments.steps,
        batch=arguments.batch,
        sequence=arguments.sequence,
        lr=arguments.lr,
        optimizer=arguments.optimizer,
        seed=arguments.seed,
        decay_share=arguments.decay_share,
        initial=arguments.initial,
        mixture=dict(zip(MIXTURE, arguments.mixture, strict=True)),
    )


def train(trainer: Trainer, arguments: argparse.Namespace) -> bool:
    """Run one call's share of the training. True when the whole run is done."""
    state = arguments.state or arguments.out / "state.pt"
    if arguments.resume:
        trainer.load(arguments.resume)
        print(f"resumed at step {trainer.step}, {trainer.seconds / 60:.2f} minutes")

    def pause() -> bool:
        return trainer.seconds >= 60 * arguments.stop_after or trainer.step == arguments.stop_step

    save = partial(trainer.save, state)
    done = trainer.run(pause, arguments.log_every, save, arguments.save_every)
    save()
    print(f"{'finished' if done else 'paused'} at step {trainer.step}, state in {state}", flush=True)
    return done


def main(arguments: list[str] | None = None) -> None:
    parsed = parse_arguments(arguments)
    if parsed.join:
        print(join(parsed.join))
        return
    settings = build_settings(parsed)
    recipe = Recipe(
        tuple(parsed.text), parsed.valid, parsed.tasks, parsed.stories, settings.model.vocab_size, parsed.seed
    )
    corpus = prepare(recipe, parsed.cache or parsed.out / "corpus", parsed.workers, parsed.tokenizer)
    if parsed.prepare_only:
        return
    parsed.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(settings, corpus, parsed.out, DEVICE)
    total, active = trainer.model.count_parameters()
    print(f"{total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active, rows {trainer.rows}", flush=True)
    if train(trainer, parsed):
        export(trainer.model, corpus.tokenizer, parsed.out)
        if parsed.split_mib:
            split(parsed.out / WEIGHTS, parsed.split_mib)
        trainer.measure_final(parsed.items)


if __name__ == "__main__":
    main()
