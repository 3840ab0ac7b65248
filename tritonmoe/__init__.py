"""tritonmoe: runs Mixture-of-Experts language models, exactly as they are.

The public names are imported when they are first used: importing torch takes a second, which `--help`, an error in
an option and Ctrl-C should not have to wait for.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tritonmoe.engine import Engine, Interrupted, TextStream
    from tritonmoe.errors import TritonMoeError
    from tritonmoe.generation.row import Generation
    from tritonmoe.generation.sampling import SamplingParams

__all__ = ["Engine", "Generation", "Interrupted", "SamplingParams", "TextStream", "TritonMoeError"]
__version__ = "0.1.0"

# OpenMP's threads spin for milliseconds between the small steps of a decode and starve each other where the CPU is
# shared: beside one busy process a small model falls to a fraction of its speed. Spinning for microseconds costs little
# on an idle machine and nothing more on a busy one. Read when torch loads.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_MODULES = {
    "Engine": "engine",
    "Generation": "generation.row",
    "Interrupted": "engine",
    "SamplingParams": "generation.sampling",
    "TextStream": "engine",
    "TritonMoeError": "errors",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'tritonmoe' has no attribute {name!r}")
    return getattr(import_module(f"tritonmoe.{_MODULES[name]}"), name)
