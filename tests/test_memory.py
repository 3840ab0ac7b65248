"""How much memory is said to be free."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tritonmoe import memory

CPU = torch.device("cpu")


def test_a_container_may_be_smaller_than_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = memory.available_bytes(CPU)
    assert machine > 0
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.available_bytes(CPU) == 3000000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes(CPU) > 3000000


def test_large_tensors_are_ordinary_tensors() -> None:
    tensor = memory.empty_tensor((3, 1 << 20), torch.float32, CPU)
    tensor.fill_(2.0)
    assert tensor.is_contiguous()
    assert float(tensor.sum()) == 6 << 20
