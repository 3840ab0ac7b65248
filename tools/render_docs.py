"""Fill the generated regions of the documents from docs/measurements; `--check` only says whether they agree.

A region is `<!-- generated: NAME -->`, its text, `<!-- end -->`. So no figure in a document is typed by hand.
Each document has its file in tools/documents, whose REGIONS say what renders which; a document may also show a region
of another.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

from documents import (
    embedded_model,
    kernels,
    offload,
    parity,
    performance,
    prediction,
    quantization,
    readme,
    reliability,
)
from provenance import ROOT

SOURCES = {
    ROOT / "README.md": readme,
    ROOT / "docs/embedded-model.md": embedded_model,
    ROOT / "docs/kernels.md": kernels,
    ROOT / "docs/offload.md": offload,
    ROOT / "docs/parity.md": parity,
    ROOT / "docs/performance.md": performance,
    ROOT / "docs/prediction.md": prediction,
    ROOT / "docs/quantization.md": quantization,
    ROOT / "docs/reliability.md": reliability,
}
DOCUMENTS = tuple(SOURCES)
REGION = re.compile(r"(<!-- generated: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
REGIONS: dict[str, Callable[[], str]] = {
    name: show for source in SOURCES.values() for name, show in source.REGIONS.items()
}


def render(text: str) -> str:
    return REGION.sub(lambda found: f"{found[1]}\n{REGIONS[found[2]]()}\n{found[4]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a document is out of date")
    check = parser.parse_args().check
    old = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    try:
        new = {path: render(text) for path, text in old.items()}  # all before any is written
    except FileNotFoundError as error:
        parser.error(str(error))
    stale = [path for path in DOCUMENTS if new[path] != old[path]]
    if not check:
        for path in stale:
            path.write_text(new[path], encoding="utf-8")
    if stale:
        print(("out of date: " if check else "written: ") + ", ".join(path.name for path in stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
