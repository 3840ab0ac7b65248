"""The doctor says what is there, finds what is broken, and exits accordingly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_testing import DEVICE, KERNEL_MARKS

from tritonmoe import doctor, self_test
from tritonmoe.model.operations import REFERENCES, Operations, kernels

CPU = torch.device("cpu")


def test_on_a_machine_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing, but for the size of its copies."""
    monkeypatch.setattr(doctor, "COPIED_BYTES", 1 << 20)
    assert doctor.main(["--json", "--device", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gpu"] is None
    assert report["problems"] == []
    assert report["versions"]["torch"] == torch.__version__
    assert report["memory"]["host_free_bytes"] > 0
    assert report["bandwidth_gbps"]["copy within main memory"] > 0
    (outcome,) = report["self_test"].values()
    assert outcome["is_right"]
    assert report["advice"][0].startswith("no GPU")


def test_what_is_wrong_is_a_problem(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_device: torch.device) -> str:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(doctor, "COPIED_BYTES", 1 << 20)
    for test, said in (
        (lambda _device: "token 3 is another one", "token 3 is another one"),
        (broken, "RuntimeError: no kernel image is available"),
    ):
        monkeypatch.setattr(self_test, "compare_transfers", test)
        assert doctor.main(["--device", "cpu"]) == 1
        assert f"problem: experts in host memory against resident ones: {said}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("to", "code", "said"), [("| true", 0, ""), ("> /dev/full", 1, "No space left on device")])
def test_output_that_nobody_takes(to: str, code: int, said: str) -> None:
    program = (
        "import sys; from tritonmoe import doctor; from test_doctor import gpu_report; "
        "doctor.examine = lambda _device: gpu_report(); sys.exit(doctor.main(['--json']))"
    )
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -c \"{program}\" {to}; exit ${{PIPESTATUS[0]}}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def gpu_report(**card: Any) -> doctor.Report:
    return {
        "versions": {"tritonmoe": "1", "triton": None},
        "gpu": {
            "name": "Some GPU", "compute_capability": "9.0", "driver": "1.2", "link_generation": "5",
            "link_generation_most": "5", "link_width": "8", "link_width_most": "16", **card,
        },
        "memory": {"host_free_bytes": 100 << 30, "device_free_bytes": 40 << 30, "lockable_bytes": 8 << 20},
        "bandwidth_gbps": {"host to device, one expert of 9.4 MB": 36.0},
        "pinning": {"tried_bytes": 1 << 30, "is_pinned": False, "gb_per_s": 4.0},
        "self_test": {}, "problems": [], "advice": [],
    }  # fmt: skip


def test_report_of_a_machine_with_a_gpu() -> None:
    report = gpu_report()
    report["advice"] = doctor.advice(report)
    text = "\n".join(doctor.lines(report))
    assert "GPU: Some GPU, compute capability 9.0, driver 1.2, PCIe 5 x8 (at most 5 x16)" in text
    assert "lockable: 8.00 MiB" in text
    assert "pinning 1.1 GB: no" in text
    assert "advice: memory cannot be pinned: raise `ulimit -l`" in text
    assert "Qwen/Qwen3-30B-A3B in bfloat16 fits with experts in host memory: --policy exact" in text
    assert "at most 100 ms per token" in text
    assert "gpt-oss-120b in mxfp4 fits with experts in host memory: --policy exact" in text
    report = gpu_report(link_generation=None, driver=None)
    assert "driver not told, its link is not told" in "\n".join(doctor.lines(report))


IN_HOST = "fits with experts in host memory: --policy exact (the default), "
RESIDENT = "fits: --policy resident"
WITH_INT4 = "; with --expert-dtype int4 it "
WITH_SMALLER_REST = "; with --dense-dtype int8 --embedding host, too, it "
NOT_FREE = "are more than what is free"
NO_ROOM = f"{NOT_FREE} in main memory"


@pytest.mark.parametrize(
    ("device_gib", "host_gib", "said"),
    [
        (8, 64, [
            f"gpt-oss-20b in mxfp4 {IN_HOST}7 % of them in slots; at most 35 ms per token for what no slot holds"
            f"{WITH_SMALLER_REST}{IN_HOST}30 % of them in slots; at most 35 ms per token for what no slot holds\n",
            f"30B-A3B in bfloat16 {IN_HOST}2 % of them in slots; at most 100 ms per token for what no slot holds"
            f"{WITH_INT4}{IN_HOST}8 % of them in slots; at most 28 ms per token for what no slot holds"
            f"{WITH_SMALLER_REST}{IN_HOST}19 % of them in slots; at most 28 ms per token",
            f"235B-A22B in bfloat16 does not fit: its rest (16 GB) {NOT_FREE} on the GPU\n",
        ]),
        (24, 128, [
            f"gpt-oss-20b in mxfp4 {RESIDENT}",
            f"30B-A3B in bfloat16 {IN_HOST}32 % of them in slots; at most 100 ms per token for what no slot holds\n",
            f"235B-A22B in bfloat16 does not fit: its experts (454 GB) {NO_ROOM}"
            f"{WITH_INT4}{IN_HOST}4 % of them in slots; at most 222 ms per token for what no slot holds"
            f"{WITH_SMALLER_REST}{IN_HOST}11 % of them in slots; at most 222 ms per token",
        ]),
        (24, 64, [
            f"gpt-oss-120b in mxfp4 {IN_HOST}28 % of them in slots; at most 53 ms per token",
            f"235B-A22B in bfloat16 does not fit: its experts (454 GB) {NO_ROOM}"
            f"{WITH_INT4}does not fit: its experts (128 GB) {NO_ROOM}\n",
        ]),
        (141, 256, [
            f"gpt-oss-120b in mxfp4 {RESIDENT}",
            f"235B-A22B in bfloat16 does not fit: its experts (454 GB) {NO_ROOM}{WITH_INT4}{RESIDENT}",
        ]),
        (None, 125, [
            "gpt-oss-120b in mxfp4 fits in main memory\n",
            f"235B-A22B in bfloat16 does not fit: its 470 GB {NO_ROOM}{WITH_INT4}does not fit: its 144 GB {NO_ROOM}\n",
        ]),
        (None, 40, [
            f"30B-A3B in bfloat16 does not fit: its 61 GB {NO_ROOM}{WITH_INT4}fits in main memory\n",
            f"gpt-oss-120b in mxfp4 does not fit: its 65 GB {NO_ROOM}\n",
        ]),
    ],
)  # fmt: skip
def test_advice(device_gib: int | None, host_gib: int, said: list[str]) -> None:
    report = gpu_report()
    report["memory"] = {
        "host_free_bytes": host_gib << 30, "device_free_bytes": None if device_gib is None else device_gib << 30,
    }  # fmt: skip
    if device_gib is None:
        report["gpu"] = None
    text = "".join(f"{line}\n" for line in doctor.advice(report))
    for line in said:
        assert line in text


@pytest.mark.parametrize("output", ["550.1, 4, 5, 16, 16", "nothing of the kind", None])
def test_what_the_driver_tells(output: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        if output is None:
            raise FileNotFoundError("nvidia-smi")
        return subprocess.CompletedProcess(command, 0, output + "\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: object())
    found = doctor.query_driver(torch.device("cuda", 0))
    assert found["driver"] == ("550.1" if output and "550" in output else None)
    assert found["link_width_most"] == ("16" if output and "550" in output else None)


def test_every_operation_is_run_and_a_broken_one_is_found(pristine_folder: Path) -> None:
    right = self_test.compare_kernels(pristine_folder, CPU, torch.float32, REFERENCES)
    assert right.problems == {}
    assert set(right.calls) == set(Operations._fields)
    for name in ("combine", "norm_router", "fetch", "plan_demand", "rope_qk"):

        def broken(*arguments: Any, name: str = name, **options: Any) -> Any:
            result = getattr(REFERENCES, name)(*arguments, **options)
            if name == "combine":
                result[0, 0] += 1.0
            elif name == "norm_router":
                result.x.mul_(1.01)
            elif name == "rope_qk":
                arguments[4].add_(0.1)  # values
            elif name == "fetch":
                arguments[8][:, 3] = 9.0  # the slots
            else:
                arguments[0].counters.add_(1)
            return result

        wrong = self_test.compare_kernels(
            pristine_folder, CPU, torch.float32, REFERENCES._replace(**{name: broken})
        ).problems
        assert name in wrong, name
        assert "times the tolerance off its reference" in wrong[name]


@pytest.mark.parametrize("marked", [pytest.param(None, marks=KERNEL_MARKS)])
def test_kernels_pass(marked: None, pristine_folder: Path) -> None:
    """On a GPU as the doctor runs them; under the interpreter in float32."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    found = self_test.compare_kernels(pristine_folder, DEVICE, dtype, kernels())
    assert found.problems == {}
    assert set(found.calls) == set(Operations._fields)
