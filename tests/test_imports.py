"""The architecture as imports: who may know whom, and the packaging traps of a top-level folder `kernels`."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENGINE = sorted(path for path in (ROOT / "tritonmoe").rglob("*.py") if path.name != "__init__.py")
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))

# Folders of the engine and the modules beside them. Each imports from lower ones and from itself.
LAYERS = (
    ("errors", "files"),
    ("memory", "signals", "waiting"),
    ("model",),
    ("checkpoint",),
    ("prediction", "text"),
    ("offload",),
    ("generation",),
    ("placement",),
    ("engine",),
    ("chat", "self_test"),
    ("console", "doctor"),
    ("generate",),
)


def imports(path: Path) -> set[str]:
    """Every module a file imports, dotted."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def unit(path: Path) -> str:
    """The folder of a module, or the module that stands beside them."""
    return path.relative_to(ROOT / "tritonmoe").with_suffix("").parts[0]


def rank(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def test_every_module_has_its_place() -> None:
    assert {unit(path) for path in ENGINE} == {name for names in LAYERS for name in names}


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: path.stem)
def test_imports_point_downwards(path: Path) -> None:
    own = unit(path)
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "tritonmoe" and len(parts) > 1 and any(parts[1] in names for names in LAYERS):
            assert parts[1] == own or rank(parts[1]) < rank(own), f"{path.stem} imports {module}"


def test_no_folder_imports_in_circles() -> None:
    known = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ENGINE}
    graph = {name: imports(path) & set(known) for name, path in known.items()}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the circle


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_know_torch_and_triton_only(path: Path) -> None:
    foreign = {m.split(".")[0] for m in imports(path)} - {"torch", "triton", "tritonmoe_kernels", "__future__"}
    assert foreign <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", ["generate", "chat", "console", "doctor"])
def test_only_the_command_line_prints(name: str) -> None:
    """And it does: a rename that emptied this test would be seen."""
    assert "print(" in (ROOT / "tritonmoe" / f"{name}.py").read_text(encoding="utf-8")
    for path in [*ENGINE, *KERNELS]:
        if path.stem not in ("generate", "chat", "console", "doctor"):
            calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
            assert not any(isinstance(c.func, ast.Name) and c.func.id == "print" for c in calls), path


def test_no_package_named_kernels() -> None:
    """`kernels` is also a package on PyPI, which transformers imports where it is installed."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "kernels" / "__init__.py").exists()


def test_the_engine_does_not_import_the_compiler() -> None:
    """torch's takes longer to import than all the rest."""
    script = "import sys, tritonmoe.engine; print('torch._dynamo' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
