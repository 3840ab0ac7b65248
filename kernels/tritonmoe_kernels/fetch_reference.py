"""What `fetch` does, one record after the other, on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from tritonmoe_kernels.checks import check_tensor

# Bytes, of records and their parts. Records that are not a multiple of 16 lost 15-25 % when a kernel gathered them; 256
# suits every engine.
RECORD_ALIGNMENT = 256
READY = -1  # of a list whose records' first parts are in their slots


def fetch_ref(
    keys: torch.Tensor,
    slots: torch.Tensor,
    epochs: torch.Tensor,
    count: torch.Tensor,
    arrivals: torch.Tensor,
    layer_base: torch.Tensor,
    num_experts: int,
    record_bytes: int,
    buffer: torch.Tensor,
    copy_epoch: torch.Tensor,
    landed: torch.Tensor,
    moved: torch.Tensor,
    is_speculative: bool,
    programs: int = 16,
    chunk_words: int = 4096,
    chunks_per_look: int = 2,
    num_warps: int = 4,
    delay: int = 0,
    ready: torch.Tensor | None = None,
    first_bytes: int = 0,
    closing: torch.Tensor | None = None,
    listed: torch.Tensor | None = None,
    goes_first: Sequence[torch.Tensor] = (),
) -> None:
    """`fetch` where nothing is refuted while it runs. It waits for the device; records must be in host memory.

    `programs` is what `arrivals` counts up to; tiles, `delay` and who has its turn when change nothing.
    """
    check_fetch(
        keys, slots, epochs, count, arrivals, layer_base, num_experts, record_bytes, buffer, copy_epoch, landed, moved,
        ready, first_bytes, closing, listed, goes_first,
    )  # fmt: skip
    rows = buffer.view(torch.uint8)
    for entry in range(int(count)):
        slot, epoch = int(slots[entry]), int(epochs[entry])
        if is_speculative and int(copy_epoch[slot]) != epoch:
            continue
        layer, expert = divmod(int(keys[entry]), num_experts)
        record = ctypes.string_at(int(layer_base[layer]) + expert * record_bytes, record_bytes)
        rows[slot] = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(rows.device)
        arrivals[entry] += programs
        landed[slot] = epoch
        moved += record_bytes
    settle_words(ready, closing, listed)


def settle_words(ready: torch.Tensor | None, closing: torch.Tensor | None, listed: torch.Tensor | None) -> None:
    """What a launch leaves in its words."""
    for word, value in ((ready, READY), (closing, READY), (listed, 0)):
        if word is not None:
            word.fill_(value)


def check_fetch(
    keys: torch.Tensor,
    slots: torch.Tensor,
    epochs: torch.Tensor,
    count: torch.Tensor,
    arrivals: torch.Tensor,
    layer_base: torch.Tensor,
    num_experts: int,
    record_bytes: int,
    buffer: torch.Tensor,
    copy_epoch: torch.Tensor,
    landed: torch.Tensor,
    moved: torch.Tensor,
    ready: torch.Tensor | None,
    first_bytes: int,
    closing: torch.Tensor | None,
    listed: torch.Tensor | None,
    goes_first: Sequence[torch.Tensor],
) -> None:
    """Check what `fetch` and its reference share."""
    device, size = buffer.device, len(keys)
    check_tensor("buffer", buffer, (None, None), (buffer.dtype,), device)
    for name, tensor, shape, dtype in (
        ("keys", keys, (None,), torch.int32),
        ("slots", slots, (size,), torch.int32),
        ("epochs", epochs, (size,), torch.int64),
        ("count", count, (1,), torch.int32),
        ("arrivals", arrivals, (size,), torch.int32),
        ("layer_base", layer_base, (None,), torch.int64),
        ("copy_epoch", copy_epoch, (len(buffer),), torch.int64),
        ("landed", landed, (len(buffer),), torch.int64),
        ("moved", moved, (1,), torch.int64),
    ):
        check_tensor(name, tensor, shape, (dtype,), device)
    words = {"ready": ready, "closing": closing, "listed": listed}
    words |= {f"goes_first[{i}]": word for i, word in enumerate(goes_first)}
    for name, word in words.items():
        if word is not None:
            check_tensor(name, word, (1,), (torch.int32,), device)
    if listed is not None and closing is None:
        raise ValueError("listed is there and closing is not: give both")
    if len(goes_first) > 2 or (goes_first and listed is None):
        raise ValueError("goes_first is for launches with `listed`, and two words at most")
    if num_experts < 1:
        raise ValueError(f"num_experts is {num_experts}, expected at least 1")
    if record_bytes < 1 or record_bytes % RECORD_ALIGNMENT:
        raise ValueError(f"record_bytes is {record_bytes}, expected a multiple of {RECORD_ALIGNMENT}")
    if first_bytes % RECORD_ALIGNMENT or not 0 <= first_bytes <= record_bytes:
        raise ValueError(
            f"first_bytes is {first_bytes}, expected a multiple of {RECORD_ALIGNMENT} up to {record_bytes}"
        )
    row_bytes = buffer.shape[1] * buffer.element_size()
    if row_bytes != record_bytes:
        raise ValueError(f"a row of buffer has {row_bytes} bytes, expected those of a record, {record_bytes}")
