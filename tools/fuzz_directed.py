"""Hostile files that were thought of, not found: what tools/fuzz.py tries in every run."""

from __future__ import annotations

import json
import os
import socket
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fuzz_base import INDEX, SHARDS, Base, split_header, with_header

from tritonmoe.prediction.files import DEFAULT_VECTORS

Directed = Callable[[Base, Path], None]
OTHER_FILES = (
    "nothing",
    "empty",
    "folder",
    "pipe",
    "zero",
    "random",
    "full",
    "null",
    "terminal",
    "dangling",
    "loop",
    "socket",
    "sparse",
    "sparse header",
    "one byte",
    "itself twice",
    "outside",
)


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
    weights_of(
        with_header(
            b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
            + b'"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}',
            bytes(4),
        )
    ),
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
]
INDICES = [
    index_with(name)
    for name in (
        "../model.safetensors",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/b",
        "model\0.safetensors",
        "\ud800",
        "x" * 5000,
        "x" * 300,
        SHARDS[0],
        "config.json",
        "\x1b[2J",
        "//",
        "~",
        "model-00001-of-00002.safetensors/",
    )
]


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
    tokenizer_with(
        padding={
            "strategy": {"Fixed": 10**12},
            "direction": "Right",
            "pad_to_multiple_of": 0,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        }
    ),
    tokenizer_with(truncation={"max_length": 1, "strategy": "LongestFirst", "stride": 10, "direction": "Right"}),
    tokenizer_with(decoder={"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}),
    tokenizer_with(decoder={"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}),
    tokenizer_with(decoder={"type": "WordPiece", "prefix": "", "cleanup": True}),
    tokenizer_with(decoder={"type": "BPEDecoder", "suffix": ""}),
    tokenizer_with(pre_tokenizer={"type": "Metaspace", "replacement": "", "prepend_scheme": "always", "split": True}),
    tokenizer_with(pre_tokenizer={"type": "FixedLength", "length": 0}),
    tokenizer_with(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    ),
    tokenizer_with(post_processor={"type": "Sequence", "processors": []}),
    tokenizer_with(
        added_tokens=[
            {
                "id": 4294967295,
                "content": "",
                "special": True,
                "single_word": False,
                "lstrip": True,
                "rstrip": True,
                "normalized": True,
            }
        ]
    ),
    tokenizer_with(model={"type": "BPE", "vocab": {"a": 0, "b": 4294967295}, "merges": []}),
    tokenizer_with(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "zz"]]}),
    tokenizer_with(model={"type": "BPE", "dropout": 1e9, "vocab": {"a": 0}, "merges": []}),
    tokenizer_with(model={"type": "BPE", "vocab": {}, "merges": [], "unk_token": "nothing"}),
    tokenizer_with(model={"type": "Unigram", "unk_id": 5, "vocab": [["a", -1.0]], "byte_fallback": False}),
    tokenizer_with(
        model={"type": "Unigram", "unk_id": None, "vocab": [["a", -1e308], ["b", 1e308]], "byte_fallback": True}
    ),
    tokenizer_with(model={"type": "Unigram", "unk_id": 0, "vocab": [], "byte_fallback": True}),
    tokenizer_with(
        model={
            "type": "WordPiece",
            "unk_token": "x",
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": 10**12,
            "vocab": {"a": 0},
        }
    ),
    tokenizer_with(model={"type": "WordLevel", "unk_token": "x", "vocab": {"a": 0}}),
]
NESTED = "{% set l = ['x'] %}" + "{% set l = [l, l] %}" * 64
TEMPLATES = [
    template_of(source)
    for source in (
        "{{ 'x' * 10 ** 10 }}",
        "{% set n = 10 ** 10 %}{{ 'x' * n }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% set a = 9 ** 99 %}" + "{% set a = a * a %}" * 40 + "{{ a > 1 }}",
        "{{ range(10 ** 12)|list }}",
        "{% set s = 'x' * 1000 %}" + "{% set s = s ~ s %}" * 40,
        "{% set s = 'x' * 1000 %}" + "{% set s = s + s %}" * 40,
        "{% set s = 'ab' %}" + "{% set s = s.replace('a', s) %}" * 40,
        "{% set s = 'ab' %}" + "{% set s = s|replace('a', s) %}" * 40,
        "{% set s = 'ab' * 1000 %}" + "{% set s = s.join(s) %}" * 4,
        "{% set s = 'ab' * 1000 %}" + "{% set s = s|join(s) %}" * 4,
        "{{ 'x'.ljust(10 ** 10) }}",
        "{{ 'x'.zfill(10 ** 10) }}",
        "{{ 'x'|center(10 ** 10) }}",
        "{{ 'x\\ty'.expandtabs(10 ** 10) }}",
        "{{ 'a\\nb'|indent(10 ** 10) }}",
        "{{ messages|tojson(indent=10 ** 10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 10, 1) }}",
        "{{ '%10000000000d'|format(1) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10 ** 10) }}",
        "{{ ('%s' * 1000) % (('x' * 1000000,) * 1000) }}",
        "{{ lipsum(n=10 ** 7) }}",
        "{{ 1|round(-(10 ** 9)) }}",
        "{{ 1.5|round(10 ** 9, 'floor') }}",
        "{{ [1]|batch(10 ** 10, 0)|list }}",
        "{{ [1]|slice(10 ** 10)|list }}",
        NESTED + "{{ l }}",
        NESTED + "{{ l|string|length }}",
        NESTED + "{{ l|tojson }}",
        NESTED + NESTED.replace("l", "k") + "{{ l == k }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{{ f(n-1) ~ f(n-1) if n }}{% endmacro %}{{ f(60) }}",
        "{{ 'x' * 10 ** 6 }}" * 100,
        "{% set s = 'x' * 10 ** 6 %}{{ (s,) * 10 ** 6 }}",
        "(" * 10_000,
        "{{ " + "(" * 10_000,
        "{{ " + "-" * 50_000 + "1 }}",
        "{% if 1 %}" * 5000,
        "{{ 1" + " + 1" * 20_000 + " }}",
        "{{ x" + ".a" * 20_000 + " }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self._TemplateReference__context }}",
        "{{ ''.format_map({}) }}",
        "{{ 'x'.encode() * 10 ** 10 }}",
        "{{ ('é' * 1000000).encode('punycode') }}",
        "{{ (1).to_bytes(10 ** 10) }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{0.__init__.__globals__}'.format(raise_exception) }}",
        "{{ messages|map('attr', '__class__')|list }}",
        "{{ (messages|attr('append'))(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{{ strftime_now('%1000000000Y') }}",
        "{{ strftime_now('\\ud800') }}",
        "{{ strftime_now('%') }}",
        "{{ '\\ud800' }}",
        "{{ ('9' * 100000)|int }}",
        "{{ (('f' * 1000000)|int(base=16)) // 3 }}",
        "{{ 1 // 0 }}",
        "{{ 1e308 * 10 }}",
        "{{ ('<' * 1000000)|striptags|length }}",
        "{{ ('http://' * 100000)|urlize|length }}",
        "{{ ('a ' * 1000000)|wordwrap(1) }}",
        "{{ range(100000)|map('string')|join('x' * 10000) }}",
        "{{ ('x' * 1000000)|list|sort|join|length }}",
        "{{ 'x'|pprint }}",
        "{{ dict.fromkeys(range(100000), 'x' * 10 ** 6)|string|length }}",
        "{{ ('a' * 10000000).rfind('b' + 'a' * 5000000) }}",
        "{{ ''.join(messages|map(attribute='content')) }}",
        "{% set x %}{{ 'x' * 10 ** 6 }}{% endset %}" + "{% set x = x ~ x %}" * 30,
        "{{ 'a'.translate({97: 'x' * 10 ** 6}) * 1000 }}",
        "{% set s = 'a' * 10 ** 6 %}{{ s.translate({97: s}) }}",
    )
]
