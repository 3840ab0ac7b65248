"""The launch table: every row is one that a launch can take, and takes what it is for."""

from __future__ import annotations

import pytest
import torch

from tritonmoe_kernels import launch_table

CUDA = torch.device("cuda")
BY_BITS = {16: torch.bfloat16, 32: torch.float32, None: torch.float32}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_table, "architecture", lambda _device: "sm_90")


def test_no_row_hides_behind_another() -> None:
    """The first that matches is taken, so one that says the same before it would keep it from ever being."""
    keys = ("kernel", "architecture", "bits", "dtype", "format", "shape", "tokens")
    seen = [tuple(str(row.get(key)) for key in keys) for row in launch_table.rows()]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("kernel", ["expert_gate_up_decode", "expert_down_decode"])
@pytest.mark.parametrize("shape", [(768, 2048), (2048, 768), (2880, 2880)])
@pytest.mark.usefixtures("on")
def test_tiles_of_tensor_cores_are_for_bfloat16_alone(kernel: str, shape: tuple[int, int]) -> None:
    """Other dtypes keep the tiles that were found for the other form."""
    for dtype in (torch.float16, torch.float32):
        assert "dot" not in launch_table.launch_config(kernel, dtype, shape, 1, CUDA, "mxfp4")
    assert not any(row["config"].get("dot") and row.get("dtype") != "bfloat16" for row in launch_table.rows())


@pytest.mark.usefixtures("on")
def test_every_row_with_a_shape_can_be_taken() -> None:
    for row in launch_table.rows():
        if row["architecture"] == "sm_90" and row["shape"] is not None:
            dtype = getattr(torch, row["dtype"]) if "dtype" in row else BY_BITS[row["bits"]]
            shape, tokens = tuple(row["shape"]), row["tokens"] or 1
            candidates = (dtype, torch.float16) if row["bits"] == 16 and "dtype" not in row else (dtype,)
            assert row["config"] in [
                launch_table.launch_config(row["kernel"], one, shape, tokens, CUDA, row.get("format"))
                for one in candidates
            ], row


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(KeyError, match=r"no row for nothing of int4, cpu, 32 bits, \(1, 2\), 3 tokens"):
        launch_table.launch_config("nothing", torch.float32, (1, 2), 3, torch.device("cpu"), "int4")
