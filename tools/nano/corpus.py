"""From text files and generators to packed streams of token ids, one stream per kind of document.

Every stream is a flat uint16 array in which each document is followed by <|endoftext|>. The streams stay
separate so that the mixture can be chosen when batches are drawn. A text document is a whole work without its
held-out passages, its paragraphs in order, so long windows are real context. Prepared streams are kept in a
cache folder and used again when the recipe agrees.
"""

import hashlib
import json
import lzma
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from .stories import tell
from .tasks import training_items
from .tokenizer import END_OF_TEXT_ID, train_tokenizer

WORK_SEPARATOR = "\x1e"
# Held out: whole works that training never sees, and single passages of works whose other passages it does see.
HELD_OUT_STREAMS = ("works", "passages")

# Sizes of one unit of work for a process: small enough to share evenly, large enough to hide the hand-over.
PIECE_CHARACTERS = 1 << 18
PASSAGE_CHARACTERS = 1500
HELD_OUT_ONE_IN = 256
SHARD_TASKS = 10_000
SHARD_STORIES = 4_000

# What the tokenizer is trained on: enough to settle 4096 merges, in about the proportions of the mixture.
SAMPLE_CHARACTERS = 20_000_000
SAMPLE_TASKS = 30_000
SAMPLE_STORIES = 4_000


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that the streams depend on."""

    text_files: tuple[str, ...]
    valid_file: str
    tasks: int
    stories: int
    vocab_size: int
    seed: int


@dataclass(frozen=True)
class Corpus:
    """A cache folder with prepared streams."""

    folder: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def stream(self, name: str) -> np.ndarray:
        return np.fromfile(self.folder / f"{name}.bin", dtype=np.uint16)


def read_works(path: str) -> Iterator[str]:
    """The works of a file in order. Paragraphs are lines; the works are separated by U+001E."""
    content = Path(path).read_bytes()
    text = (lzma.decompress(content) if path.endswith(".xz") else content).decode()
    for work in text.split(WORK_SEPARATOR):
        if work.strip():
            yield work.strip("\n") + "\n"


def cut(work: str) -> Iterator[str]:
    """A work in pieces of about PIECE_CHARACTERS that end where paragraphs end."""
    start = 0
    while start < len(work):
        end = work.find("\n", start + PIECE_CHARACTERS) + 1 or len(work)
        yield work[start:end]
        start = end


def passages(work: str) -> Iterator[str]:
    """A work in runs of whole paragraphs of about PASSAGE_CHARACTERS."""
    start = 0
    while start < len(work):
        end = work.find("\n", start + PASSAGE_CHARACTERS) + 1 or len(work)
        yield work[start:end]
        start = end


def is_held_out(passage: str) -> bool:
    """Decided by the passage alone, so that no list of them has to be kept."""
    return int.from_bytes(hashlib.blake2b(passage.encode(), digest_size=4).digest(), "little") % HELD_OUT_ONE_IN == 0


class Encoder:
    """Turns units of work into token ids. Each process holds its own copy."""

    def __init__(self, tokenizer_file: str) -> None:
        # The processes share the cores already: threads inside each of them would only get in the way.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.tokenizer = Tokenizer.from_file(tokenizer_file)

    def documents(self, texts: Iterable[str]) -> bytes:
        encodings = self.tokenizer.encode_batch_fast(list(texts))
        ids = [token for encoding in encodings for token in (*encoding.ids, END_OF_TEXT_ID)]
        return np.array(ids, dtype=np.uint16).tobytes()

    def text(self, unit: tuple[str, bool]) -> bytes:
        piece, ends_work = unit
        ids = self.tokenizer.encode(piece).ids
        return np.array([*ids, END_OF_TEXT_ID] if ends_work else ids, dtype=np.uint16).tobytes()

    def tasks(self, unit: tuple[int, int]) -> bytes:
        count, seed = unit
        return self.documents(task.text for task in training_items(count, seed))

    def stories(self, unit: tuple[int, int]) -> bytes:
        count, seed = unit
        rng = Random(seed)
        return self.documents(tell(rng).text for _ in range(count))


encoder_of = cache(Encoder)  # every process loads the tokenizer once


def encode_unit(job: tuple[str, str, tuple]) -> bytes:
    """Run one method of this process's encoder. One argument, because it is mapped over processes."""
    tokenizer_file, method, unit = job
    return getattr(encoder_of(tokenizer_file), method)(unit)


@contextmanager
def ordered_map(workers: int) -> Iterator[Callable]:
    """`map` over `workers` processes with results in order, or the plain one for a single worker."""
    if workers <= 1:
        yield map
        return
    with get_context("fork").Pool(workers) as pool:
        yield pool.imap


def text_units(works: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """The pieces of all works, each with whether its work ends there."""
    for work in works:
        *pieces, last = cut(work)
        yield from ((piece, False) for piece in pieces)
        yield last, True


def training_works(files: Iterable[str]) -> Iterator[str]:
    """Every work without its held-out passages."""
    for path in files:
        for work in read_works(path):
            kept = "".join(passage for passage in passages(work) if not is_held_out(passage))
            if kept:
                yield kept


def held_out_passages(files: Iterable[str]) -> Iterator[str]:
    for path in files:
        for work in read_works(path):
            yield from filter(is_held_out, passages(work))


def shard_units(count: int, size: int, seed: int) -> Iterator[tuple[int, int]]:
    """(items, seed) of every shard. Shards of different training seeds never share a seed."""
    for shard, start in enumerate(range(0, count, size)):
        yield min(size, count - start), seed * 1_000_003 + shard


def tokenizer_sample(recipe: Recipe) -> Iterator[str]:
    """Evenly spread pieces of the text files, and some tasks and stories."""
    per_file = SAMPLE_CHARACTERS // len(recipe.text_files)
    for path in recipe.text_files:
        pieces = [piece for work in read_works(path) for piece in cut(work)]
        stride = max(1, round(sum(map(len, pieces)) / per_file))
        yield from (line for piece in pieces[::stride] for line in piece.splitlines(keepends=True))
    # Seeds below zero are used nowhere else.
    yield from (task.text for task in training_items(min(SAMPLE_TASKS, recipe.tasks), -1))
    rng = Random(-2)
    yield from (tell(rng).text for _ in range(min(SAMPLE_STORIES, recipe.stories)))


def write_trained_tokenizer(job: tuple[Recipe, str]) -> None:
    recipe, path = job
    train_tokenizer(tokenizer_sample(recipe), recipe.vocab_size).save(path)


def prepare(recipe: Recipe, folder: Path, workers: int, tokenizer_file: Path | None = None) -> Corpus:
    """Build the streams in `folder`, or find them there from an earlier call with the same recipe."""
    recipe_file, wanted = folder / "recipe.json", json.loads(json.dumps(asdict(recipe)))
    if recipe_file.exists() and json.loads(recipe_file.read_text()) == wanted:
        return Corpus(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "tokenizer.json"
    units = {
        "text": ("text", text_units(training_works(recipe.text_files))),
        "tasks": ("tasks", shard_units(recipe.tasks, SHARD_TASKS, recipe.seed)),
        "stories": ("stories", shard_units(recipe.stories, SHARD_STORIES, recipe.seed)),
        "works": ("text", text_units(read_works(recipe.valid_file))),
        "passages": ("text", text_units(held_out_passages(recipe.text_files))),
    }
    with ordered_map(workers) as mapped:
        started = time.perf_counter()
        if tokenizer_file is None:
            # In a child process: the trainer starts threads, and forking after that would be unsafe.
            list(mapped(write_trained_tokenizer, [(recipe, str(target))]))
        else:
            target.write_bytes(tokenizer_file.read_bytes())
        print(f"tokenizer: {time.perf_counter() - started:.0f} s", flush=True)
        for name, (method, stream_units) in units.items():
            started = time.perf_counter()
            jobs = ((str(target), method, unit) for unit in stream_units)
            with open(folder / f"{name}.bin", "wb") as file:
                size = sum(file.write(encoded) for encoded in mapped(encode_unit, jobs))
            print(f"{name}: {size / 2e6:.1f} M tokens, {time.perf_counter() - started:.0f} s", flush=True)
    # Written last, so that its presence says that all is complete.
    recipe_file.write_text(json.dumps(wanted, indent=2) + "\n")
    return Corpus(folder)
