"""Documents agree with the measurements and with the files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import render_docs

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("path", render_docs.DOCUMENTS, ids=lambda path: path.name)
def test_generated_regions_are_up_to_date(path: Path) -> None:
    """`python tools/render_docs.py` writes them."""
    text = path.read_text(encoding="utf-8")
    assert render_docs.REGION.search(text)
    assert render_docs.render(text) == text


def test_readme_names_every_module() -> None:
    tree = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert tree is not None
    named = set(re.findall(r"\w+\.py", tree[1]))
    existing = {path.name for path in (ROOT / "tritonmoe").glob("*.py")} - {"__init__.py"}
    assert existing <= named
    assert named <= existing | {path.name for folder in ("tools", "kernels") for path in (ROOT / folder).rglob("*.py")}


def test_commands_of_readme_are_found() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("run", "test"):
        assert len(re.findall(rf"<!-- command: {name} -->\s*```sh\n(.*?)```", text, re.DOTALL)) == 1
