"""Fill the generated regions of the documents from docs/measurements; `--check` only says whether they agree.

A region is `<!-- generated: NAME -->`, its text, `<!-- end -->`. So no figure in a document is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from provenance import ROOT

MEASUREMENTS = ROOT / "docs/measurements"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs/embedded-model.md", ROOT / "docs/parity.md")
REGION = re.compile(r"(<!-- generated: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def read(name: str) -> dict[str, Any]:
    return json.loads((MEASUREMENTS / name).read_text(encoding="utf-8"))


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def origin(part: dict[str, Any]) -> str:
    """One line that says how to repeat a measurement."""
    source = part["provenance"]
    machine = source.get("gpu") or f"{source['cpu']}, {source['torch_threads']} thread(s)"
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    return f"\n`{source['command']}` at commit {source['commit']} on {machine} ({versions}).\n"


def embedded_tasks() -> str:
    part = read("embedded-model.json")["tasks"]
    families = sorted({name.split("-")[0] for name in part["results"]})
    rows = []
    for family in families:
        cells = [part["results"][f"{family}-{level}"] for level in ("easy", "hard")]
        rows.append([family, *(f"{100 * c['accuracy']:.1f} ± {100 * c['standard_error']:.1f}" for c in cells)])
    return table(["family", "easy, % right", "hard, % right"], rows) + origin(part)


def embedded_text() -> str:
    part = read("embedded-model.json")["text"]
    names = {
        "works": "20 whole works that training never saw",
        "passages": "held-out passages of works whose other passages were trained on (the simplest third of the text)",
    }
    rows = [
        [
            names[name],
            f"{cell['bits_per_character']:.3f}",
            f"{cell['perplexity_per_token']:.1f}",
            f"{cell['characters']:,}",
        ]
        for name, cell in part["results"].items()
    ]
    return table(["held-out text", "bits per character", "perplexity per token", "characters"], rows) + origin(part)


def embedded_speed() -> str:
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


def embedded_samples() -> str:
    part = read("embedded-model.json")["samples"]
    blocks = [
        f"`{json.dumps(sample['prompt'])}` ({sample['sampling']})\n\n```text\n{sample['text'].rstrip()}\n```\n"
        for sample in part["results"]
    ]
    return "\n".join(blocks) + origin(part)


def gpu_parity() -> str:
    part = read("gpu-tests.json")
    rows = [
        [name, f"{cell['ours']:.4g}", f"{cell['transformers']:.4g}", f"{cell['ratio']:.2f}"]
        for name, cell in part["results"]["bfloat16_rms_error"].items()
    ]
    head = table(["checkpoint", "tritonmoe", "transformers", "ratio"], rows)
    return head + f"\npytest: {part['results']['summary']}.\n" + origin(part)


REGIONS: dict[str, Callable[[], str]] = {
    "embedded-tasks": embedded_tasks,
    "embedded-text": embedded_text,
    "embedded-speed": embedded_speed,
    "embedded-samples": embedded_samples,
    "gpu-parity": gpu_parity,
}


def render(text: str) -> str:
    return REGION.sub(lambda found: f"{found[1]}\n{REGIONS[found[2]]()}\n{found[4]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a document is out of date")
    check = parser.parse_args().check
    stale = []
    for path in DOCUMENTS:
        old = path.read_text(encoding="utf-8")
        new = render(old)
        if new != old:
            stale.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(("out of date: " if check else "written: ") + ", ".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
