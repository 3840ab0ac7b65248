"""Regions of docs/parity.md."""

from __future__ import annotations

from documents.kernels import gpu_tests
from documents.markdown import table
from documents.measurement import read


def gpu_parity() -> str:
    rows = [
        [name, f"{cell['ours']:.4g}", f"{cell['transformers']:.4g}", f"{cell['ratio']:.2f}"]
        for name, cell in read("gpu-tests.json")["results"]["bfloat16_rms_error"].items()
    ]
    return table(["checkpoint", "tritonmoe", "transformers", "ratio"], rows) + "\n" + gpu_tests()


REGIONS = {"gpu-parity": gpu_parity}
