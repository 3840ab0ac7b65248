"""What tools/fuzz.py damages, and what is then done with it: one row of KINDS for each kind of file."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import fuzz_directed
import numpy as np
import replay
from fuzz_base import INDEX, PROMPTS, SLOTS, Base, split_header, with_header
from fuzz_directed import OTHER_FILES, Directed, other_files, replace_by
from mutation import damage_arrays, damage_bytes, damage_json

from tritonmoe.engine import Engine
from tritonmoe.files import write_file
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.placement.loader import Placement
from tritonmoe.prediction.files import DEFAULT_VECTORS, ESTIMATOR, HYBRID
from tritonmoe.text import template_sandbox
from tritonmoe.text.chat_template import ChatTemplate
from tritonmoe.text.tokenizer import Tokenizer

CHANGING = ("config.json", "tokenizer.json", "model.safetensors")
TEMPLATE_SECONDS = 0.5  # the engine's ten would make a run of hostile templates long

Damage = Callable[[random.Random, Base, Path], None]


@dataclass(frozen=True)
class Kind:
    """Every other case is a directed one, until there are no more; all others are damage at random."""

    damage: Damage
    use: Callable[[Base, Path, random.Random], None]
    directed: Sequence[Directed] = field(default=())

    def make(self, base: Base, folder: Path, number: int, chance: random.Random) -> None:
        if number % 2 == 0 and number // 2 < len(self.directed):
            self.directed[number // 2](base, folder)
        else:
            self.damage(chance, base, folder)


# What is done with the files


def load(base: Base, folder: Path, chance: random.Random) -> None:
    """Load the model, with experts on the device or in host memory, and generate."""
    placement = chance.choice((None, SLOTS, Placement("on-demand", expert_slots="25%")))
    engine = Engine.from_pretrained(folder, device="cpu", placement=placement)
    try:
        engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=2))
        if engine.chat_template.names:
            engine.chat_prompt([{"role": "user", "content": "hello"}])
    finally:
        engine.close()


def load_while_changing(base: Base, folder: Path, chance: random.Random) -> None:
    """Load the model while one of its files changes, disappears and comes back."""
    target, stop = folder / chance.choice(CHANGING), threading.Event()
    data = target.read_bytes()

    def change() -> None:
        while not stop.is_set():
            match chance.randrange(5):
                case 0:
                    target.write_bytes(damage_bytes(chance, data))
                case 1 if target.exists():
                    os.truncate(target, chance.randrange(len(data)))
                case 2:
                    target.unlink(missing_ok=True)
                case 3:
                    os.mkfifo(folder / "other")
                    (folder / "other").replace(target)
                    target.unlink()
                case _:
                    write_file(target, data)
            time.sleep(chance.choice((0.0, 0.001, 0.01)))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        load(base, folder, chance)
    finally:
        stop.set()
        thread.join()


def tokenize(base: Base, folder: Path, chance: random.Random) -> None:
    """Encode prompts, also very hostile ones, and decode what comes of them and what does not."""
    tokenizer = Tokenizer.from_folder(folder)
    for text in PROMPTS:
        ids = tokenizer.encode(text, add_special_tokens=chance.random() < 0.5)
        tokenizer.decode(ids, skip_special_tokens=True)
    tokenizer.decode([0, 1, 5, tokenizer.vocab_size, (1 << 32) - 1])
    ChatTemplate.from_folder(folder, tokenizer.special_tokens)


def render(base: Base, folder: Path, chance: random.Random) -> None:
    template_sandbox.MAX_SECONDS = TEMPLATE_SECONDS
    tokenizer = Tokenizer.from_folder(folder)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a" * 1000, "thinking": "x"}]
    ChatTemplate.from_folder(folder, tokenizer.special_tokens).render(messages, tools=[{"name": "f"}])


def replay_trace(base: Base, folder: Path, chance: random.Random) -> None:
    arguments = [str(folder / "trace.npz"), "--slots", chance.choice(("1", "3", "50%", "100%"))]
    options = replay.build_parser().parse_args(arguments)
    with open(os.devnull, "w") as sink, redirect_stdout(sink):
        replay.run(options)


def load_vectors(base: Base, folder: Path, chance: random.Random) -> None:
    Engine.from_pretrained(folder, device="cpu", placement=SLOTS).close()


def load_estimator(base: Base, folder: Path, chance: random.Random) -> None:
    Engine.from_pretrained(folder, device="cpu", placement=Placement("est-pf", expert_slots="50%")).close()


def load_hybrid(base: Base, folder: Path, chance: random.Random) -> None:
    Engine.from_pretrained(folder, device="cpu", placement=Placement("hybrid-pf", expert_slots="50%")).close()


# What is damaged


def json_file(*names: str, sharded: bool = False) -> Damage:
    """One of the named files, changed at its keys or, more seldom, at its bytes."""

    def damage(chance: random.Random, base: Base, folder: Path) -> None:
        source = base.sharded if sharded else base.model
        name = chance.choice(names)
        data = (source / name).read_bytes()
        changed = damage_bytes(chance, data) if chance.random() < 0.2 else damage_json(chance, json.loads(data))
        base.lay_out(folder, source, **{name: changed})

    return damage


def bytes_of(name: str) -> Damage:
    def damage(chance: random.Random, base: Base, folder: Path) -> None:
        base.lay_out(folder, base.model, **{name: damage_bytes(chance, (base.model / name).read_bytes())})

    return damage


def header_of(name: str) -> Damage:
    """The JSON header of a safetensors file, its length right, or, more seldom, not."""

    def damage(chance: random.Random, base: Base, folder: Path) -> None:
        header, data = split_header((base.model / name).read_bytes())
        text = damage_json(chance, header)
        base.lay_out(folder, base.model, **{name: with_header(text, data, chance.choice((0,) * 20 + (1, -1, 8)))})

    return damage


def vectors(chance: random.Random, base: Base, folder: Path) -> None:
    chance.choice((header_of(DEFAULT_VECTORS), bytes_of(DEFAULT_VECTORS)))(chance, base, folder)


def estimator(chance: random.Random, base: Base, folder: Path) -> None:
    chance.choice((header_of(ESTIMATOR), bytes_of(ESTIMATOR)))(chance, base, folder)


def copies(chance: random.Random, base: Base, folder: Path) -> None:
    """Undamaged, and not links, so that they may change."""
    base.lay_out(folder, base.model, **{name: (base.model / name).read_bytes() for name in CHANGING})


def trace(chance: random.Random, base: Base, folder: Path) -> None:
    if chance.random() < 0.3:
        changed = damage_bytes(chance, base.trace.read_bytes())
    else:
        with np.load(base.trace) as file:
            changed = damage_arrays(chance, dict(file), "header")
    (folder / "trace.npz").write_bytes(changed)


SNIPPETS = (
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if m %}",
    "{% endif %}",
    "{% else %}",
    "{{ m.content }}",
    "{{ messages }}",
    "{% set x = 'ab' * 1000 %}",
    "{% set x = x ~ x %}",
    "{% set x = x * 100 %}",
    "{% set x = x + x %}",
    "{{ x }}",
    "{{ x|replace('a', x) }}",
    "{{ x|upper|trim|length }}",
    "{% set x = [x, x] %}",
    "{% set x = x|string %}",
    "{% macro f(n) %}",
    "{% endmacro %}",
    "{{ f(3) }}",
    "{% set n = namespace(a=1) %}",
    "{% set n.a = x %}",
    "{{ n.a }}",
    "{% for i in range(1000) %}",
    "{{ loop.index0 }}",
    "{% break %}",
    "{% continue %}",
    "{{ raise_exception('no') }}",
    "{{ messages[0].__class__ }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ x.format(x, x) }}",
    "{{ '%s' % x }}",
    "{{ messages|tojson(indent=4) }}",
    "{{ strftime_now('%Y') }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{# ",
    "#}",
    "{%- ",
    "-%}",
    "{{",
    "}}",
    "((((",
    "))))",
    "\x00",
    "\x1b[2J",
    "{{ x|join(x) }}",
    "{{ 9 ** 99 }}",
    "{% set x = 2 %}",
    "{{ x|int|round(3) }}",
    "{{ messages|map(attribute='content')|list }}",
    "{{ tools|selectattr('name')|first }}",
    "{% set x = messages %}",
    "{% filter upper %}",
    "{% endfilter %}",
    "{{ dict(a=x) }}",
    "{{ x.items() }}",
    "{{ caller() }}",
)


def template(chance: random.Random, base: Base, folder: Path) -> None:
    """Pieces of templates in any order, or the model's own with some of them put in, or damaged bytes."""
    config = json.loads((base.model / "tokenizer_config.json").read_text())
    own = config["chat_template"]
    pieces = [chance.choice(SNIPPETS) for _ in range(chance.randint(1, 12))]
    match chance.randrange(3):
        case 0:
            source = "".join(pieces).encode()
        case 1:
            at = chance.randrange(len(own) + 1)
            source = (own[:at] + "".join(pieces[:3]) + own[at:]).encode()
        case _:
            source = damage_bytes(chance, own.encode())
    base.lay_out(folder, base.model, **{"chat_template.jinja": source})


def other_file(chance: random.Random, base: Base, folder: Path) -> None:
    """Something that is no file, or another one, under the name of a file that is read."""
    base.lay_out(folder, source := chance.choice((base.model, base.sharded)))
    name = chance.choice([path.name for path in source.iterdir()] + ["chat_template.jinja", "special_tokens_map.json"])
    replace_by(chance.choice(OTHER_FILES), folder / name, base)


KINDS: dict[str, Kind] = {
    "config": Kind(json_file("config.json"), load, fuzz_directed.CONFIGS),
    "generation": Kind(json_file("generation_config.json"), load),
    "header": Kind(header_of("model.safetensors"), load, fuzz_directed.HEADERS),
    "data": Kind(bytes_of("model.safetensors"), load),
    "index": Kind(json_file(INDEX, sharded=True), load, fuzz_directed.INDICES),
    "tokenizer": Kind(
        json_file("tokenizer.json", "tokenizer.json", "tokenizer_config.json"), tokenize, fuzz_directed.TOKENIZERS
    ),
    "template": Kind(template, render, fuzz_directed.TEMPLATES),
    "vectors": Kind(vectors, load_vectors),
    "estimator": Kind(estimator, load_estimator),
    "hybrid": Kind(json_file(HYBRID), load_hybrid),
    "trace": Kind(trace, replay_trace, [fuzz_directed.bomb]),
    "changing": Kind(copies, load_while_changing),
    "files": Kind(other_file, load, [*other_files("model"), *other_files("sharded")]),
}
