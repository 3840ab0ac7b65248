"""The report on formats: its experts compute what the engine's do, and its errors are those of the weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import quantization_error

from tritonmoe import Engine
from tritonmoe.checkpoint.quantization import EXPERT_FORMATS
from tritonmoe.placement.loader import Placement

IDS = [5, 9, 200, 17, 33, 8, 100, 259, 4, 77]


@pytest.mark.parametrize("name", EXPERT_FORMATS)
def test_experts_replaced_by_their_values_compute_what_quantised_ones_do(model_folder: Path, name: str) -> None:
    replaced = Engine.from_pretrained(model_folder)
    plain = replaced.score(IDS)
    quantization_error.replace_experts(replaced, name)
    quantised = Engine.from_pretrained(model_folder, placement=Placement(expert_dtype=name))
    assert replaced.score(IDS) == pytest.approx(quantised.score(IDS), abs=1e-5)
    assert replaced.score(IDS) != pytest.approx(plain, abs=1e-5)


def test_report(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works, out = tmp_path / "works.txt", tmp_path / "report.json"
    works.write_text("The sea was calm. " * 20 + "\x1e" + "Nothing moved. " * 20)
    arguments = ["--works", works, "--characters", 400, "--tokens", 100, "--items", 0, "--out", out, "--formats"]
    names = ["fp8", "int8", "int4", "int4 with zero points"]
    monkeypatch.setattr(
        sys, "argv", ["quantization_error.py", "--model", *map(str, [model_folder, *arguments]), *names]
    )
    quantization_error.main()
    formats = json.loads(out.read_text())["formats"]
    assert list(formats) == ["as published", *names]
    # down has 16 columns, half a group, and half as many values as gate_up
    assert formats["int4"]["bits"] == pytest.approx((2 * 4.5 + 5) / 3)
    assert formats["int4 with zero points"]["bits"] == pytest.approx((2 * 4.75 + 5.5) / 3)
    assert all(found["text"]["characters"] == 400 for found in formats.values())
    engine = Engine.from_pretrained(model_folder)
    for name in names:
        assert [row["layer"] for row in formats[name]["layers"]] == [0, 1]
        for row in formats[name]["layers"]:
            values = engine.decoder.weights.layers[row["layer"]].moe.experts.down
            left = quantization_error.restored(engine.decoder.weights.layers[row["layer"]].moe.experts, name).down
            assert row["down"] == pytest.approx(float((left - values).norm() / values.norm()), rel=1e-4)
            assert 0.5 * row["down"] < row["outputs"] < 3 * row["down"]
    assert (
        formats["int8"]["layers"][0]["down"]
        < formats["fp8"]["layers"][0]["down"]
        < formats["int4"]["layers"][0]["down"]
    )
