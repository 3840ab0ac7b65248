"""Regions of docs/embedded-model.md: the parts of one file of tools/evaluate_nano.py."""

from __future__ import annotations

import json

from documents.markdown import percent_right, table
from documents.measurement import origin, read


def tasks() -> str:
    part = read("embedded-model.json")["tasks"]
    families = sorted({name.split("-")[0] for name in part["results"]})
    rows = [
        [family, *(percent_right(part["results"][f"{family}-{level}"]) for level in ("easy", "hard"))]
        for family in families
    ]
    return table(["family", "easy, % right", "hard, % right"], rows) + origin(part)


def text() -> str:
    part = read("embedded-model.json")["text"]
    names = {
        "works": "20 whole works that training never saw",
        "passages": "held-out passages of works whose other passages were trained on (the simplest third of the text)",
    }
    rows = []
    for name, cell in part["results"].items():
        cells = [f"{cell['bits_per_character']:.3f}", f"{cell['perplexity_per_token']:.1f}", f"{cell['characters']:,}"]
        rows.append([names[name], *cells])
    return table(["held-out text", "bits per character", "perplexity per token", "characters"], rows) + origin(part)


def speed() -> str:
    part = read("embedded-model.json")["speed"]
    names = {
        "ready_s": "start of the process to ready (imports, loading), s",
        "first_token_ms": "first token, ms",
        "decode_tokens_per_s": "decoding, tokens/s",
    }
    rows = [
        [names[name], *(f"{cell[kind]:.3g}" for kind in ("median", "min", "max"))]
        for name, cell in part["results"].items()
    ]
    return table(["on the CPU", "median", "least", "most"], rows) + origin(part)


def samples() -> str:
    part = read("embedded-model.json")["samples"]
    blocks = [
        f"`{json.dumps(sample['prompt'])}` ({sample['sampling']})\n\n```text\n{sample['text'].rstrip()}\n```\n"
        for sample in part["results"]
    ]
    return "\n".join(blocks) + origin(part)


REGIONS = {"embedded-tasks": tasks, "embedded-text": text, "embedded-speed": speed, "embedded-samples": samples}
