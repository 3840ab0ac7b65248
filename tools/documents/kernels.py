"""Regions of docs/kernels.md."""

from __future__ import annotations

from typing import Any

from documents.markdown import ABSENT, figure, percent, spread, table
from documents.measurement import origin, read


def kernels(part: dict[str, Any]) -> str:
    """One run of tools/bench_kernels.py."""
    copy, product = part["rates"]["copy_bytes_per_s"], part["rates"]["matrix_flop_per_s"]
    rows = []
    for name, cell in part["results"].items():
        is_memory_bound = cell["bytes"] / copy >= cell["flops"] / product
        rate = f"{figure(cell['gb_per_s'])} GB/s" if is_memory_bound else f"{figure(cell['tflop_per_s'])} TFLOP/s"
        against = [figure(cell["floor_us"]), percent(cell["share_of_floor"]), rate]
        if ", " in name:  # a part of the launches that the row before it is: their bytes are not its own
            against = [ABSENT] * 3
        rows.append([name, spread(cell["us"], cell["us_p10"], cell["us_p90"]), *against])
    text = f"{part['dtype']}; a large copy moves {figure(copy / 1e12)} TB/s, "
    text += f"a large matrix product does {figure(product / 1e12)} TFLOP/s.\n\n"
    return text + table(["kernel", "us", "floor, us", "floor / time, %", "rate"], rows) + origin(part)


def gpu_tests() -> str:
    part = read("gpu-tests.json")
    return f"pytest: {part['results']['summary']}.\n" + origin(part)


REGIONS = {"kernels": lambda: kernels(read("kernels.json")), "gpu-tests": gpu_tests}
