"""Compute the default vectors of a model, or choose by measurement what foretells each of its layers.

Default vectors are the unweighted mean outputs of each expert over the tokens that chose it.

One pass over text files, or over a sample of its own, in which every layer routes as in any prefill; experts may be in
host memory. Writes a safetensors file that names its model, and prints how often experts were chosen.

With --choose-hybrid the recall of each predictor is measured layer by layer, on text that should be held out from the
training of the model's estimator; a JSON file says what was chosen for which layer, and why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from random import Random

import torch
from command_line import Parser, run_command
from prediction import subject
from prediction.choice import choose
from prediction.recall import measure
from prediction.routings import chunks
from tqdm import tqdm

from nano.stories import tell
from nano.tasks import training_items
from tritonmoe import Engine
from tritonmoe.engine import EMBEDDED
from tritonmoe.errors import InputError
from tritonmoe.generation.sampling import NOT_FINITE
from tritonmoe.generation.session import allocate_cache, prefill_chunk
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.spec import ModelSpec
from tritonmoe.placement.loader import Placement
from tritonmoe.prediction.default_vectors import DefaultVectors, model_identity, vector_shape
from tritonmoe.text.tokenizer import Tokenizer

WINDOW = 4096  # tokens that see each other, where the model's context is not shorter
PIECE_CHARACTERS = 1 << 16  # of a file in memory at once
SLICE_TOKENS = 256  # whose outputs are in float64 at once: 32 MiB for 8 experts of a token and a hidden size of 2048
NANO_TASKS, NANO_STORIES = 1200, 120  # about the shares that they have of each other in its training
SAMPLE = (
    # Jane Austen, Pride and Prejudice (1813)
    """\
It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.

However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so
well fixed in the minds of the surrounding families, that he is considered as the rightful property of some one or other
of their daughters.

"My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let at last?"

Mr. Bennet replied that he had not.

"But it is," returned she; "for Mrs. Long has just been here, and she told me all about it."
""",
    # Lewis Carroll, Alice's Adventures in Wonderland (1865)
    """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice
she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the use
of a book," thought Alice, "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid),
whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when
suddenly a White Rabbit with pink eyes ran close by her.
""",
    # Abraham Lincoln at Gettysburg (1863)
    """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and
dedicated to the proposition that all men are created equal.

Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and so dedicated, can
long endure. We are met on a great battle-field of that war. We have come to dedicate a portion of that field, as a
final resting place for those who here gave their lives that that nation might live. It is altogether fitting and proper
that we should do this.
""",
    # Charles Darwin, On the Origin of Species (1859)
    """\
When on board H.M.S. 'Beagle,' as naturalist, I was much struck with certain facts in the distribution of the
inhabitants of South America, and in the geological relations of the present to the past inhabitants of that continent.
These facts seemed to me to throw some light on the origin of species, that mystery of mysteries, as it has been called
by one of our greatest philosophers.
""",
    # Franz Kafka, Die Verwandlung (1915); Jean-Jacques Rousseau, Du contrat social (1762)
    """\
Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett zu einem ungeheueren
Ungeziefer verwandelt.

L'homme est né libre, et partout il est dans les fers. Tel se croit le maître des autres, qui ne laisse pas d'être plus
esclave qu'eux.
""",
    """\
def primes(limit):
    \"\"\"All prime numbers below a limit, by the sieve of Eratosthenes.\"\"\"
    is_prime = [True] * limit
    for number in range(2, int(limit**0.5) + 1):
        if is_prime[number]:
            for multiple in range(number * number, limit, number):
                is_prime[multiple] = False
    return [number for number in range(2, limit) if is_prime[number]]


SELECT name, COUNT(*) AS orders FROM customers JOIN orders USING (customer_id) GROUP BY name ORDER BY orders DESC;

{"id": 17, "tags": ["red", "small"], "price": 4.25, "in_stock": true}
""",
    """\
Question: A train leaves at 9:40 and travels 150 km at 60 km/h. When does it arrive?
Answer: 150 / 60 = 2.5, so it travels for 2 hours and 30 minutes. 9:40 plus 2:30 is 12:10. It arrives at 12:10.

Question: What is the sum of the first ten odd numbers?
Answer: The sum of the first n odd numbers is n squared. For n = 10 it is 10 * 10 = 100.
""",
)


class Accumulator:
    """Sums and counts of expert outputs, as they come from a decoder's `on_experts`. Sums are kept on the host, in
    float64, where the device's memory is full of slots."""

    def __init__(self, spec: ModelSpec) -> None:
        shape = vector_shape(spec)
        self.sums = torch.zeros(shape, dtype=torch.float64)
        self.counts = torch.zeros(shape[:2], dtype=torch.int64)
        self._rows = {layer_id: row for row, layer_id in enumerate(spec.moe_layers)}

    def add(self, layer_id: int, topk_ids: torch.Tensor, expert_out: torch.Tensor) -> None:
        """topk_ids [T, K] of a layer and the outputs [T, K, H] of these experts, on any device."""
        row = self._rows[layer_id]
        sums = torch.zeros(self.sums.shape[1:], dtype=torch.float64, device=expert_out.device)
        for ids, out in zip(topk_ids.split(SLICE_TOKENS), expert_out.split(SLICE_TOKENS), strict=True):
            sums.index_add_(0, ids.flatten().long(), out.flatten(0, 1).double())
        self.sums[row] += sums.cpu()
        self.counts[row] += topk_ids.flatten().bincount(minlength=len(sums)).cpu()


def calibrate(decoder: Decoder, windows: Iterable[Sequence[int]], length: int) -> DefaultVectors:
    """Run every window, of at most `length` tokens, by itself through the model.

    InputError where there is none, or where outputs are not finite.
    """
    found = Accumulator(decoder.spec)
    cache = allocate_cache(decoder, 1, length)  # written anew from its start by each window
    chunk = prefill_chunk(decoder.device)
    decoder.hooks.on_experts = found.add
    try:
        for window in windows:
            for start in range(0, len(window), chunk):
                ids = torch.tensor([window[start : start + chunk]], device=decoder.device)
                decoder.prefill(ids, start, cache)
    finally:
        decoder.hooks.on_experts = None
    if not found.counts.any():
        raise InputError("there is no text to calibrate with")
    if not found.sums.isfinite().all():
        raise InputError(NOT_FINITE)
    return DefaultVectors.from_sums(found.sums, found.counts)


def windows_of(texts: Iterable[Iterable[str]], tokenizer: Tokenizer, length: int, limit: int) -> Iterator[list[int]]:
    """The first `limit` tokens of all texts, each given in pieces, cut into windows of `length`. Texts follow one
    another, an end-of-text token in front of each where the tokenizer has one."""
    end = None if tokenizer.eos_token is None else tokenizer.token_to_id(tokenizer.eos_token)
    separator = [] if end is None else [end]
    encoded = chain.from_iterable(
        chain(separator, chain.from_iterable(tokenizer.encode(piece) for piece in text)) for text in texts
    )
    tokens = islice(encoded, limit)
    while window := list(islice(tokens, length)):
        yield window


def pieces(path: Path) -> Iterator[str]:
    """A UTF-8 file in pieces that end with a line; InputError where it is none."""
    try:
        with path.open(encoding="utf-8") as stream:
            while piece := stream.read(PIECE_CHARACTERS):
                yield piece + stream.readline()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8; convert it first") from None


def built_in(model: str) -> tuple[str, list[str]]:
    """What the sample is called, and its texts: for the embedded model also what it was trained on, none of it from
    its test split."""
    if model != EMBEDDED:
        return "built-in sample", list(SAMPLE)
    rng = Random(0)
    stories = [tell(rng).text for _ in range(NANO_STORIES)]
    texts = [*SAMPLE, *(task.text for task in training_items(NANO_TASKS, seed=0)), *stories]
    rng.shuffle(texts)
    return "built-in sample, tasks and stories", texts


def with_progress(windows: Iterable[list[int]], total: int) -> Iterator[list[int]]:
    """The same windows, each counted once it is done."""
    with tqdm(total=total, unit="token", desc="calibrating", disable=None, leave=False) as bar:
        for window in windows:
            yield window
            bar.update(len(window))


def report(spec: ModelSpec, counts: torch.Tensor) -> list[str]:
    """Lines that say, by layer, how often experts were chosen: counts [L_moe, E]."""
    lines = ["layer    least     most   unseen   (how often an expert was chosen; experts never chosen)"]
    for layer_id, row in zip(spec.moe_layers, counts, strict=True):
        lines.append(f"{layer_id:5} {int(row.min()):8} {int(row.max()):8} {int((row == 0).sum()):8}")
    unseen = int((counts == 0).sum())
    if unseen:
        lines.append(f"{unseen} of {counts.numel()} experts were never chosen: each has the mean of its layer's others")
    return lines


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("texts", nargs="*", type=Path, metavar="TEXT", help="UTF-8 files (default: a built-in sample)")
    parser.add_argument("--built-in", action="store_true", help="begin with the built-in sample, then the files")
    parser.add_argument("--model", default=EMBEDDED, help="a folder, a hub id, or 'nano': the embedded model (default)")
    parser.add_argument("--tokens", type=int, default=200_000, metavar="N", help="at most N (default: %(default)s)")
    parser.add_argument("--max-context", type=int, metavar="N", help=f"tokens of a window (default: at most {WINDOW})")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="fetch experts from host memory, using so much of the GPU")
    parser.add_argument("--expert-slots", metavar="N", help="fetch them into so many slots, or P%% of all experts")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    group = parser.add_argument_group("with --choose-hybrid, which writes hybrid.json")
    group.add_argument("--choose-hybrid", action="store_true", help="choose a predictor for each layer")
    group.add_argument("--default-vectors", type=Path, metavar="FILE", help="(default: beside the model)")
    group.add_argument("--estimator", type=Path, metavar="FILE", help="(default: beside the model)")
    return parser


def placement(options: argparse.Namespace) -> Placement:
    """Where the experts live: fetched without prediction, which prefill has no use for, where that is asked for."""
    if options.gpu_memory is None and options.expert_slots is None:
        return Placement()
    return Placement("on-demand", options.gpu_memory, options.expert_slots)


def choose_hybrid(options: argparse.Namespace, corpus: list[str], texts: Iterable[Iterable[str]]) -> None:
    """Measure every predictor that the model has what it needs for, and write the choice."""
    found = subject.load(options)
    decoder, length = found.decoder, subject.window_length(found, options.max_context)
    estimator = found.load_estimator(options.estimator)
    kinds = ["residual", *(["quasi-hidden"] if found.defaults is not None else [])]
    predictors = {kind: found.predictor(kind) for kind in kinds}
    if estimator is not None:
        predictors["estimator"] = found.predictor("estimator", estimator)
    windows = list(windows_of(texts, found.engine.tokenizer, length, options.tokens))
    if not windows:
        raise InputError("there is no text to choose by")
    choice, why = choose(measure(predictors, chunks(decoder, with_progress(windows, options.tokens), length)).summary())
    facts = {"tokens": sum(map(len, windows)), "corpus": corpus, **why}
    choice.save(options.out, model_identity(decoder.spec, decoder.weights), facts)
    for layer, name in choice.by_layer.items():
        cells = "".join(f"{kind:>14} {100 * recall:5.1f}%" for kind, recall in why["recall"][str(layer)].items())
        print(f"{layer:5}{cells}  {name}")
    print(f"hybrid choice from {facts['tokens']} tokens written to {options.out}")


def run(options: argparse.Namespace) -> None:
    if options.tokens < 1:
        raise InputError(f"--tokens must be at least 1, not {options.tokens}")
    if not options.out.parent.is_dir():
        raise InputError(f"--out {options.out}: there is no such folder")
    for path in options.texts:  # a mistake should not cost the time to load the model
        if next(pieces(path), None) is None:
            raise InputError(f"{path} is empty")
    corpus, texts = [path.name for path in options.texts], [pieces(path) for path in options.texts]
    if options.built_in or not options.texts:
        name, sample = built_in(options.model)
        corpus, texts = [name, *corpus], [*([text] for text in sample), *texts]
    if options.choose_hybrid:
        choose_hybrid(options, corpus, texts)
        return
    if options.default_vectors is not None or options.estimator is not None:
        raise InputError("--default-vectors and --estimator are for --choose-hybrid; add it, or leave them out")
    engine = Engine.from_pretrained(
        options.model,
        dtype=options.dtype,
        device=options.device,
        max_context=options.max_context,
        placement=placement(options),
        progress=sys.stderr.isatty(),
    )
    decoder, spec = engine.decoder, engine.decoder.spec
    length = engine.max_context if options.max_context is not None else min(engine.max_context, WINDOW)
    windows = windows_of(texts, engine.tokenizer, length, options.tokens)
    result = calibrate(decoder, with_progress(windows, options.tokens), length)
    choices = sum(moe.num_experts_per_tok for moe in spec.moe_layers.values())
    tokens = int(result.counts.sum()) // choices
    result.save(options.out, model_identity(spec, decoder.weights), f"{tokens} tokens: {', '.join(corpus)}")
    print("\n".join(report(spec, result.counts)))
    print(f"default vectors from {tokens} tokens written to {options.out}")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
