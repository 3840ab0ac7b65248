"""The memory benchmark: whole runs on a tiny model, and what it takes for within the budget."""

from __future__ import annotations

import json
from pathlib import Path

import bench_memory
import pytest
import torch
from conftest import TINY_CONFIG

CONFIG = {**TINY_CONFIG, "max_position_embeddings": 512, "moe_intermediate_size": 256, "num_experts": 32}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_rows_of_budgets(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Few bytes ask for fewer bits; the driver's figure decides, whatever it is of."""
    output = config_file.parent / "memory.json"
    monkeypatch.setattr(bench_memory.Free, "taken", lambda self: 68 << 20)
    monkeypatch.setattr(bench_memory, "SECONDS", 0.01)
    options = ["--device", "cpu", "--dtype", "float32", "--max-context", "140", "--expert-dtype", "auto"]
    given = [str(config_file), *options, "--budgets", "1MiB,66MiB,100MiB", "--output", str(output)]
    assert bench_memory.main(given) == 0
    result = json.loads(output.read_text())
    assert [row["budget"] for row in result["skipped"]] == ["1MiB"]
    few, many = result["rows"]
    assert (few["policy"], few["expert_dtype"], many["policy"], many["expert_dtype"]) == (
        "exact", "int8", "resident", "float32",
    )  # fmt: skip
    assert (few["is_within"], many["is_within"]) == (False, True)
    assert 0 < few["slots"] / 64 == few["slot_share"] < 1
    assert sum(few["plan"].values()) == few["budget_bytes"] == 66 << 20
    assert few["host_bytes"] == 64 * (3 * 32 * 256 + 1024 + 256) > many["host_bytes"] == 0
    assert few["prompt"] == 140 - 128
    assert few["tpot_ms"] > 0
    printed = capsys.readouterr().out
    assert printed.count("MORE THAN THE BUDGET") == 1


def test_what_is_taken_is_what_the_driver_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([(900, 1000), (650, 1000), (700, 1000)])
    limits = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: next(free))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append(share))
    taken = bench_memory.Free(torch.device("cuda"), 300)
    assert limits == [0.3]
    assert [taken.taken(), taken.taken()] == [250, 200]
