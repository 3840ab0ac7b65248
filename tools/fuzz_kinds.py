"""What tools/fuzz.py damages, and what is then done with it: one row of KINDS for each kind of file."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import zipfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import replay
import torch
from mutation import damage_arrays, damage_bytes, damage_json
from safetensors import safe_open
from safetensors.torch import save_file

from tritonmoe import template_sandbox
from tritonmoe.chat_template import ChatTemplate
from tritonmoe.default_vectors import DefaultVectors, model_identity
from tritonmoe.engine import Engine, embedded_folder
from tritonmoe.placement import DEFAULT_VECTORS, Placement
from tritonmoe.sampling import SamplingParams
from tritonmoe.tokenizer import Tokenizer
from tritonmoe.trace import TraceRecorder

LAYERS, EXPERTS, VOCABULARY = 2, 4, 320
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
PROMPTS = ("Once upon a time", "a" * 200 + "b", "<|endoftext|> é漢\U0001f600\u0000\n\t  x", "")
TEMPLATE_SECONDS = 0.5  # the engine's ten would make a run of hostile templates long
SLOTS = Placement(policy="exact", expert_slots="50%")


@dataclass(frozen=True)
class Base:
    """Good files, which cases are damaged copies of: the embedded model with fewer layers, experts and tokens."""

    model: Path  # a folder with one file of weights
    sharded: Path  # the same weights in two, with an index
    trace: Path

    @classmethod
    def make(cls, folder: Path) -> Base:
        base = cls(folder / "model", folder / "sharded", folder / "trace.npz")
        base.model.mkdir()
        source = embedded_folder()
        config = json.loads((source / "config.json").read_text())
        config |= {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": 2}
        (base.model / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY}))
        (base.model / "generation_config.json").write_text(json.dumps(GENERATION))
        (base.model / "tokenizer.json").write_text(json.dumps(_tokenizer(source)))
        shutil.copy(source / "tokenizer_config.json", base.model)
        tensors = _tensors(source)
        save_file(tensors, base.model / "model.safetensors", metadata={"format": "pt"})
        shutil.copytree(base.model, base.sharded)
        (base.sharded / "model.safetensors").unlink()
        names = sorted(tensors)
        files = {name: SHARDS[i * 2 // len(names)] for i, name in enumerate(names)}
        for file in SHARDS:
            save_file({name: tensors[name] for name in names if files[name] == file}, base.sharded / file)
        (base.sharded / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
        base._measure()
        return base

    def _measure(self) -> None:
        """Default vectors and a trace of the model itself, so that undamaged ones are accepted."""
        engine = Engine.from_pretrained(self.model, device="cpu", placement=Placement("on-demand", expert_slots="50%"))
        spec = engine.decoder.spec
        counts = torch.ones(len(spec.moe_layers), EXPERTS, dtype=torch.int64)
        sums = torch.randn(*counts.shape, spec.hidden_size, generator=torch.Generator().manual_seed(0)).double()
        identity = model_identity(spec, engine.decoder.weights)
        DefaultVectors.from_sums(sums, counts).save(self.model / DEFAULT_VECTORS, identity, "none")
        engine.close()
        engine = Engine.from_pretrained(self.model, device="cpu", placement=SLOTS)
        with TraceRecorder(self.trace).attach(engine.decoder):
            engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=6))
        engine.close()

    def lay_out(self, folder: Path, source: Path, **files: bytes) -> None:
        """The files of `source` in `folder`, some with other contents: links, which `files` does not write through."""
        for path in source.iterdir():
            os.link(path, folder / path.name)
        for name, data in files.items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_bytes(data)


GENERATION = {
    "eos_token_id": [0], "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.0,
    "repetition_penalty": 1.05,
}  # fmt: skip


def _tokenizer(source: Path) -> dict[str, Any]:
    """The first tokens of the vocabulary, and the merges that make them."""
    values = json.loads((source / "tokenizer.json").read_text())
    model = values["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < VOCABULARY}
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    model["merges"] = [pair for pair in pairs if all(text in model["vocab"] for text in (*pair, "".join(pair)))]
    values["added_tokens"] = [token for token in values["added_tokens"] if token["id"] < VOCABULARY]
    return values


def _tensors(source: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    with safe_open(source / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a dict
            parts = name.split(".")
            layer = int(parts[parts.index("layers") + 1]) if "layers" in parts else 0
            expert = int(parts[parts.index("experts") + 1]) if "experts" in parts else 0
            if layer < LAYERS and expert < EXPERTS:
                rows = EXPERTS if name.endswith("mlp.gate.weight") else VOCABULARY if "embed_tokens" in name else None
                tensors[name] = file.get_tensor(name)[:rows].clone()
    return tensors


Damage = Callable[[random.Random, Base, Path], None]
Directed = Callable[[Base, Path], None]


@dataclass(frozen=True)
class Kind:
    """`directed` cases come first, then damage at random."""

    damage: Damage
    use: Callable[[Base, Path, random.Random], None]
    directed: Sequence[Directed] = field(default=())

    def make(self, base: Base, folder: Path, number: int, chance: random.Random) -> None:
        if 0 <= number < len(self.directed):
            self.directed[number](base, folder)
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


def split_header(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(text: bytes, data: bytes, off_by: int = 0) -> bytes:
    return max(0, len(text) + off_by).to_bytes(8, "little") + text + data


def vectors(chance: random.Random, base: Base, folder: Path) -> None:
    chance.choice((header_of(DEFAULT_VECTORS), bytes_of(DEFAULT_VECTORS)))(chance, base, folder)


def trace(chance: random.Random, base: Base, folder: Path) -> None:
    if chance.random() < 0.3:
        changed = damage_bytes(chance, base.trace.read_bytes())
    else:
        with np.load(base.trace) as file:
            changed = damage_arrays(chance, dict(file), "header")
    (folder / "trace.npz").write_bytes(changed)


SNIPPETS = (
    "{% for m in messages %}", "{% endfor %}", "{% if m %}", "{% endif %}", "{% else %}", "{{ m.content }}", "{{ messages }}",
    "{% set x = 'ab' * 1000 %}", "{% set x = x ~ x %}", "{% set x = x * 100 %}", "{% set x = x + x %}", "{{ x }}",
    "{{ x|replace('a', x) }}", "{{ x|upper|trim|length }}", "{% set x = [x, x] %}", "{% set x = x|string %}",
    "{% macro f(n) %}", "{% endmacro %}", "{{ f(3) }}", "{% set n = namespace(a=1) %}", "{% set n.a = x %}", "{{ n.a }}",
    "{% for i in range(1000) %}", "{{ loop.index0 }}", "{% break %}", "{% continue %}", "{{ raise_exception('no') }}",
    "{{ messages[0].__class__ }}", "{{ ''.__class__.__mro__ }}", "{{ x.format(x, x) }}", "{{ '%s' % x }}",
    "{{ messages|tojson(indent=4) }}", "{{ strftime_now('%Y') }}", "{% generation %}", "{% endgeneration %}", "{# ", "#}",
    "{%- ", "-%}", "{{", "}}", "((((", "))))", "\x00", "\x1b[2J", "{{ x|join(x) }}", "{{ 9 ** 99 }}", "{% set x = 2 %}",
    "{{ x|int|round(3) }}", "{{ messages|map(attribute='content')|list }}", "{{ tools|selectattr('name')|first }}",
    "{% set x = messages %}", "{% filter upper %}", "{% endfilter %}", "{{ dict(a=x) }}", "{{ x.items() }}", "{{ caller() }}",
)  # fmt: skip


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


OTHER_FILES = (
    "nothing", "empty", "folder", "pipe", "zero", "random", "full", "null", "terminal", "dangling", "loop", "socket", "sparse",
    "sparse header", "one byte", "itself twice", "outside",
)  # fmt: skip


def replace_by(what: str, path: Path, base: Base) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
    match what:
        case "empty":
            path.touch()
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "zero" | "random" | "full" | "null" | "terminal":
            path.symlink_to({"terminal": "/dev/ptmx", "random": "/dev/urandom"}.get(what, f"/dev/{what}"))
        case "dangling":
            path.symlink_to("absent")
        case "loop":
            path.symlink_to(path.name)
        case "socket":
            with socket.socket(socket.AF_UNIX) as made, suppress(OSError):  # a long path has none
                made.bind(str(path))
        case "sparse" | "sparse header":
            with path.open("wb") as file:
                file.write((1 << 39).to_bytes(8, "little") if what == "sparse header" else b"{")
                file.truncate(1 << 40)
        case "one byte":
            path.write_bytes(b"x")
        case "itself twice":
            path.write_bytes((base.model / "config.json").read_bytes() * 2)
        case "outside":
            path.symlink_to("/etc/passwd")


# Directed cases


def config_with(**values: Any) -> Directed:
    def make(base: Base, folder: Path) -> None:
        config = json.loads((base.model / "config.json").read_text()) | values
        base.lay_out(folder, base.model, **{"config.json": json.dumps(config).encode()})

    return make


def header_with(change: Callable[[dict[str, Any]], object]) -> Directed:
    def make(base: Base, folder: Path) -> None:
        header, data = split_header((base.model / "model.safetensors").read_bytes())
        change(header)
        base.lay_out(folder, base.model, **{"model.safetensors": with_header(json.dumps(header).encode(), data)})

    return make


def tensor_with(**values: Any) -> Directed:
    return header_with(lambda header: header["model.norm.weight"].update(values))


def weights_of(data: bytes) -> Directed:
    return lambda base, folder: base.lay_out(folder, base.model, **{"model.safetensors": data})


def index_with(file: str) -> Directed:
    def make(base: Base, folder: Path) -> None:
        index = json.loads((base.sharded / INDEX).read_text())
        index["weight_map"]["model.norm.weight"] = file
        base.lay_out(folder, base.sharded, **{INDEX: json.dumps(index).encode()})

    return make


def tokenizer_with(**values: Any) -> Directed:
    def make(base: Base, folder: Path) -> None:
        tokenizer = json.loads((base.model / "tokenizer.json").read_text()) | values
        base.lay_out(folder, base.model, **{"tokenizer.json": json.dumps(tokenizer).encode()})

    return make


def template_of(source: str) -> Directed:
    return lambda base, folder: base.lay_out(folder, base.model, **{"chat_template.jinja": source.encode()})


def other_files(base_name: str) -> list[Directed]:
    def case(name: str, what: str) -> Directed:
        def make(base: Base, folder: Path) -> None:
            base.lay_out(folder, getattr(base, base_name))
            replace_by(what, folder / name, base)

        return make

    names = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
    names += [INDEX, SHARDS[0]] if base_name == "sharded" else ["model.safetensors", DEFAULT_VECTORS]
    return [case(name, what) for name in names for what in OTHER_FILES]


def bomb(base: Base, folder: Path) -> None:
    """A small file that unpacks to a terabyte, as it says."""
    with zipfile.ZipFile(folder / "trace.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ids.npy", bytes(1 << 20))
        archive.infolist()[0].file_size = 1 << 40


HUGE = 1 << 60
CONFIGS = [
    config_with(**{name: value})
    for name in ("num_hidden_layers", "hidden_size", "vocab_size", "num_experts", "moe_intermediate_size", "head_dim")
    for value in (1 << 31, (1 << 40) - 1, HUGE, 10**4000, -1, 0, 1.0, "2", True, float("nan"), [2, 2], None)
] + [
    config_with(hidden_size=1 << 31, num_experts=1 << 31, moe_intermediate_size=1 << 31),
    config_with(head_dim=None, num_attention_heads=1 << 20, num_key_value_heads=1 << 20),
    config_with(rope_theta=1.0, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    config_with(rope_scaling={"rope_type": "yarn", "factor": 1e29}),
    config_with(rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-310}),
    config_with(rope_scaling={"type": "dynamic", "alpha": 1e29}, head_dim=4),
    config_with(rope_scaling={"type": "dynamic", "alpha": 2.0}, head_dim=2),
    config_with(max_position_embeddings=(1 << 40) - 1),
    config_with(mlp_only_layers=list(range(500_000)), num_hidden_layers=4000),
    config_with(model_type="\x1b[2J\n" + "x" * 100_000),
    config_with(**{"\x1b]52;c;cm0gLXJm\x07": 1}),
]
HEADERS = [
    weights_of(HUGE.to_bytes(8, "little") + b"{}"),
    weights_of(b"\xff" * 8),
    weights_of((2).to_bytes(8, "little") + b"{}"),
    weights_of((0).to_bytes(8, "little")),
    weights_of(with_header(b"[" * 1_000_000, b"")),
    weights_of(with_header(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},' + b'"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}', bytes(4))),
    tensor_with(shape=[1 << 32, 1 << 32], data_offsets=[0, 0]),
    tensor_with(shape=[(1 << 62) - 1] * 8),
    tensor_with(shape=[HUGE, 0], data_offsets=[0, 0]),
    tensor_with(shape=[-160]),
    tensor_with(shape=[-1, -160]),
    tensor_with(data_offsets=[-320, 0]),
    tensor_with(data_offsets=[0, HUGE]),
    tensor_with(data_offsets=[HUGE, HUGE + 320]),
    tensor_with(data_offsets=[320, 0]),
    tensor_with(data_offsets=[0, 320]),
    tensor_with(data_offsets=[0]),
    tensor_with(data_offsets="00"),
    tensor_with(data_offsets={"0": 0, "320": 0}),
    tensor_with(shape={"160": 1}),
    tensor_with(shape="1"),
    tensor_with(shape=[160.0]),
    tensor_with(shape=[True, 160]),
    tensor_with(dtype="F8_E8M0"),
    tensor_with(dtype=["F32"]),
    tensor_with(dtype={}),
    header_with(lambda header: header.update({"\x1b[2J\nx": header.pop("model.norm.weight")})),
    header_with(lambda header: header.update({"\ud800": header.pop("model.norm.weight")})),
    header_with(lambda header: header.update({"x" * 1_000_000: header.pop("model.norm.weight")})),
    header_with(lambda header: header.update({"model.layers." + "9" * 5000 + ".x": header.pop("model.norm.weight")})),
    header_with(lambda header: header.update(__metadata__=[1])),
]  # fmt: skip
INDICES = [
    index_with(name)
    for name in (
        "../model.safetensors", "/etc/passwd", "..", ".", "", "a/b", "model\0.safetensors", "\ud800", "x" * 5000, "x" * 300,
        SHARDS[0], "config.json", "\x1b[2J", "//", "~", "model-00001-of-00002.safetensors/",
    )
]  # fmt: skip


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


TOKENIZERS = [
    tokenizer_with(pre_tokenizer=_split("(a+)+$")),
    tokenizer_with(pre_tokenizer=_split("(a|a)*$")),
    tokenizer_with(pre_tokenizer=_split("(a|aa|aaa)*(.*a.*){9}c")),
    tokenizer_with(pre_tokenizer=_split("")),
    tokenizer_with(pre_tokenizer=_split("(((")),
    tokenizer_with(pre_tokenizer=_split("a{100000}{100000}")),
    tokenizer_with(pre_tokenizer=_split("(" * 5000 + ")" * 5000)),
    tokenizer_with(normalizer=_replace("", "xx")),
    tokenizer_with(normalizer={"type": "Sequence", "normalizers": [_replace("a", "a" * 100)] * 8}),
    tokenizer_with(normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 1000}] * 100}),
    tokenizer_with(decoder={"type": "Sequence", "decoders": [_replace("a", "a" * 100)] * 8}),
    tokenizer_with(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    tokenizer_with(normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}),
    tokenizer_with(padding={"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}),
    tokenizer_with(truncation={"max_length": 1, "strategy": "LongestFirst", "stride": 10, "direction": "Right"}),
    tokenizer_with(decoder={"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}),
    tokenizer_with(decoder={"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}),
    tokenizer_with(decoder={"type": "WordPiece", "prefix": "", "cleanup": True}),
    tokenizer_with(decoder={"type": "BPEDecoder", "suffix": ""}),
    tokenizer_with(pre_tokenizer={"type": "Metaspace", "replacement": "", "prepend_scheme": "always", "split": True}),
    tokenizer_with(pre_tokenizer={"type": "FixedLength", "length": 0}),
    tokenizer_with(post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [], "special_tokens": {}}),
    tokenizer_with(post_processor={"type": "Sequence", "processors": []}),
    tokenizer_with(added_tokens=[{"id": 4294967295, "content": "", "special": True, "single_word": False, "lstrip": True, "rstrip": True, "normalized": True}]),
    tokenizer_with(model={"type": "BPE", "vocab": {"a": 0, "b": 4294967295}, "merges": []}),
    tokenizer_with(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "zz"]]}),
    tokenizer_with(model={"type": "BPE", "dropout": 1e9, "vocab": {"a": 0}, "merges": []}),
    tokenizer_with(model={"type": "BPE", "vocab": {}, "merges": [], "unk_token": "nothing"}),
    tokenizer_with(model={"type": "Unigram", "unk_id": 5, "vocab": [["a", -1.0]], "byte_fallback": False}),
    tokenizer_with(model={"type": "Unigram", "unk_id": None, "vocab": [["a", -1e308], ["b", 1e308]], "byte_fallback": True}),
    tokenizer_with(model={"type": "Unigram", "unk_id": 0, "vocab": [], "byte_fallback": True}),
    tokenizer_with(model={"type": "WordPiece", "unk_token": "x", "continuing_subword_prefix": "", "max_input_chars_per_word": 10**12, "vocab": {"a": 0}}),
    tokenizer_with(model={"type": "WordLevel", "unk_token": "x", "vocab": {"a": 0}}),
]  # fmt: skip
NESTED = "{% set l = ['x'] %}" + "{% set l = [l, l] %}" * 64
TEMPLATES = [
    template_of(source)
    for source in (
        "{{ 'x' * 10 ** 10 }}", "{% set n = 10 ** 10 %}{{ 'x' * n }}", "{{ [0] * 10 ** 10 }}", "{{ 10 ** (10 ** 10) }}",
        "{% set a = 9 ** 99 %}" + "{% set a = a * a %}" * 40 + "{{ a > 1 }}", "{{ range(10 ** 12)|list }}",
        "{% set s = 'x' * 1000 %}" + "{% set s = s ~ s %}" * 40, "{% set s = 'x' * 1000 %}" + "{% set s = s + s %}" * 40,
        "{% set s = 'ab' %}" + "{% set s = s.replace('a', s) %}" * 40, "{% set s = 'ab' %}" + "{% set s = s|replace('a', s) %}" * 40,
        "{% set s = 'ab' * 1000 %}" + "{% set s = s.join(s) %}" * 4, "{% set s = 'ab' * 1000 %}" + "{% set s = s|join(s) %}" * 4,
        "{{ 'x'.ljust(10 ** 10) }}", "{{ 'x'.zfill(10 ** 10) }}", "{{ 'x'|center(10 ** 10) }}", "{{ 'x\\ty'.expandtabs(10 ** 10) }}",
        "{{ 'a\\nb'|indent(10 ** 10) }}", "{{ messages|tojson(indent=10 ** 10) }}", "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 10, 1) }}", "{{ '%10000000000d'|format(1) }}", "{{ '{:>10000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10 ** 10) }}", "{{ ('%s' * 1000) % (('x' * 1000000,) * 1000) }}", "{{ lipsum(n=10 ** 7) }}",
        "{{ 1|round(-(10 ** 9)) }}", "{{ 1.5|round(10 ** 9, 'floor') }}", "{{ [1]|batch(10 ** 10, 0)|list }}",
        "{{ [1]|slice(10 ** 10)|list }}", NESTED + "{{ l }}", NESTED + "{{ l|string|length }}", NESTED + "{{ l|tojson }}",
        NESTED + NESTED.replace("l", "k") + "{{ l == k }}", "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% macro f(n) %}{{ f(n-1) ~ f(n-1) if n }}{% endmacro %}{{ f(60) }}",
        "{{ 'x' * 10 ** 6 }}" * 100, "{% set s = 'x' * 10 ** 6 %}{{ (s,) * 10 ** 6 }}", "(" * 10_000, "{{ " + "(" * 10_000,
        "{{ " + "-" * 50_000 + "1 }}", "{% if 1 %}" * 5000, "{{ 1" + " + 1" * 20_000 + " }}", "{{ x" + ".a" * 20_000 + " }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self._TemplateReference__context }}", "{{ ''.format_map({}) }}", "{{ '{0.__class__}'.format(1) }}",
        "{{ '{0.__init__.__globals__}'.format(raise_exception) }}", "{{ messages|map('attr', '__class__')|list }}",
        "{{ (messages|attr('append'))(1) }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends 'x' %}",
        "{{ strftime_now('%1000000000Y') }}", "{{ strftime_now('\\ud800') }}", "{{ strftime_now('%') }}", "{{ '\\ud800' }}",
        "{{ ('9' * 100000)|int }}", "{{ (('f' * 1000000)|int(base=16)) // 3 }}", "{{ 1 // 0 }}", "{{ 1e308 * 10 }}",
        "{{ ('<' * 1000000)|striptags|length }}", "{{ ('http://' * 100000)|urlize|length }}", "{{ ('a ' * 1000000)|wordwrap(1) }}",
        "{{ range(100000)|map('string')|join('x' * 10000) }}", "{{ ('x' * 1000000)|list|sort|join|length }}", "{{ 'x'|pprint }}",
        "{{ dict.fromkeys(range(100000), 'x' * 10 ** 6)|string|length }}", "{{ ('a' * 10000000).rfind('b' + 'a' * 5000000) }}",
        "{{ ''.join(messages|map(attribute='content')) }}", "{% set x %}{{ 'x' * 10 ** 6 }}{% endset %}" + "{% set x = x ~ x %}" * 30,
        "{{ 'a'.translate({97: 'x' * 10 ** 6}) * 1000 }}", "{% set s = 'a' * 10 ** 6 %}{{ s.translate({97: s}) }}",
    )
]  # fmt: skip

KINDS: dict[str, Kind] = {
    "config": Kind(json_file("config.json"), load, CONFIGS),
    "generation": Kind(json_file("generation_config.json"), load),
    "header": Kind(header_of("model.safetensors"), load, HEADERS),
    "data": Kind(bytes_of("model.safetensors"), load),
    "index": Kind(json_file(INDEX, sharded=True), load, INDICES),
    "tokenizer": Kind(json_file("tokenizer.json", "tokenizer.json", "tokenizer_config.json"), tokenize, TOKENIZERS),
    "template": Kind(template, render, TEMPLATES),
    "vectors": Kind(vectors, load_vectors),
    "trace": Kind(trace, replay_trace, [bomb]),
    "files": Kind(other_file, load, [*other_files("model"), *other_files("sharded")]),
}
