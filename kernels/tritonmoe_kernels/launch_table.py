"""Launch configurations by kernel, architecture, dtype, weight format, shape and tokens: `launch_table.json`.

The first row that matches is taken, so rows for a measured shape stand before the general ones; tools/tune_kernels.py
writes them. A configuration depends on nothing else: not on how many experts are present, nor on what was launched
before, since tiles decide the order in which sums round.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

import torch


@functools.cache
def rows() -> list[dict[str, Any]]:
    """The table: {kernel, architecture, bits, dtype, format, shape, tokens, config}.

    null matches anything, but of `format`, which rows of plain weights do not have; `tokens` is the most. `bits` are
    x's; rows that are for one dtype of so many name it.
    """
    text = (resources.files("tritonmoe_kernels") / "launch_table.json").read_text(encoding="utf-8")
    return json.loads(text)


def launch_config(
    kernel: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    tokens: int,
    device: torch.device,
    weight_format: str | None = None,
) -> dict[str, Any]:
    """The configuration of `kernel` for weights of `shape` and a step of `tokens`; `dtype` is that of x."""
    return _find(kernel, architecture(device), dtype, weight_format, shape, tokens)


@functools.cache
def architecture(device: torch.device) -> str:
    """ "sm_90", "gfx942", …, or "cpu"."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def _find(
    kernel: str, arch: str, dtype: torch.dtype, weight_format: str | None, shape: tuple[int, ...], tokens: int
) -> dict[str, Any]:
    bits, name = 8 * dtype.itemsize, str(dtype).removeprefix("torch.")
    for row in rows():
        if (
            row["kernel"] == kernel
            and row.get("format") == weight_format
            and row["bits"] in (None, bits)
            and row.get("dtype") in (None, name)
            and (row["architecture"] is None or arch.startswith(row["architecture"]))
            and (row["shape"] is None or tuple(row["shape"]) == shape)
            and (row["tokens"] is None or tokens <= row["tokens"])
        ):
            return row["config"]
    weights = "" if weight_format is None else f" of {weight_format}"
    raise KeyError(f"launch_table.json has no row for {kernel}{weights}, {arch}, {bits} bits, {shape}, {tokens} tokens")
