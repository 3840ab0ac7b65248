"""Time prefill and decoding of a model, beside the memory's floor and, on request, transformers; `--help` says how."""

from __future__ import annotations

import sys

from bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
