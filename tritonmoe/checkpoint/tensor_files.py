"""Safetensors files on disk: which tensors there are, where, and their bytes.

Headers are parsed here, not by the safetensors library, because experts are read straight into records of large
arenas: that needs offsets, and one read per tensor without a copy in between.
Format: 8 bytes little-endian header length, a JSON header, then the data (safetensors format specification).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.errors import CheckpointError
from tritonmoe.files import open_regular, parse_json

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors library
STAGING_BYTES = 64 << 20
INDEX_NAME = "model.safetensors.index.json"
NO_WEIGHTS = ("adapter", "consolidated", "default-vectors", "estimator")  # how other files beside a model's begin


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `num_bytes` bytes at `offset` of `file`, row-major."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """Every tensor of a model folder, by its name on disk."""

    folder: Path
    entries: dict[str, TensorEntry]
    stamps: dict[Path, tuple[int, ...]]  # of each file, before its header was read

    def require_unchanged(self) -> None:
        """CheckpointError where a file is not the one whose header was read: tensors may be of both."""
        for file, stamp in self.stamps.items():
            if _stamp(file) != stamp:
                raise CheckpointError(f"{file}: was replaced or written to while it was read; run it again")

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers of all weight files; CheckpointError for missing shards and doubled or absent tensors."""
    files, claimed = _weight_files(folder)
    entries: dict[str, TensorEntry] = {}
    stamps = {file: _stamp(file) for file in files}
    for file in files:
        for entry in read_header(file):
            if entry.name in entries:
                other = entries[entry.name].file.name
                raise CheckpointError(f"{folder}: tensor {entry.name} is in both {other} and {file.name}")
            entries[entry.name] = entry
    for name, file_name in claimed.items():
        if name not in entries or entries[name].file.name != file_name:
            raise CheckpointError(f"{folder}: {INDEX_NAME} claims {name} is in {file_name}, which does not hold it")
    return Checkpoint(folder, entries, stamps)


def _stamp(file: Path) -> tuple[int, ...]:
    """What changes with the file, or with what is in it."""
    try:
        found = os.stat(file)
    except OSError as problem:
        raise CheckpointError(f"{file}: cannot be read: {problem.strerror}") from None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a model and what its index, if any, claims of them."""
    index = folder / INDEX_NAME
    if not index.exists():
        files = sorted(folder.glob("model*.safetensors")) or [
            file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith(NO_WEIGHTS)
        ]
        if not files:
            raise CheckpointError(f"{folder}: no .safetensors files; only safetensors checkpoints are read")
        return files, {}
    claimed = read_json(index, CheckpointError).get("weight_map")
    if not isinstance(claimed, dict) or not claimed or not all(isinstance(v, str) for v in claimed.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    files = []
    for name in sorted(set(claimed.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index}: shard name {name!r} leaves the model folder")
        if not os.path.isfile(folder / name):  # unlike that of Path, for every name
            raise CheckpointError(f"{folder}: shard {name} named in {INDEX_NAME} is missing; download it again")
        files.append(folder / name)
    return files, claimed


def read_header(file: Path) -> list[TensorEntry]:
    """Parse and verify one file's header: types, sizes, and offsets that tile the data without a gap."""
    return read_header_and_metadata(file)[0]


def read_header_and_metadata(file: Path) -> tuple[list[TensorEntry], dict[str, Any]]:
    """`read_header`, and what the file says about itself."""
    try:
        with open(open_regular(file), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{file}: truncated or not a safetensors file ({size} bytes)")
            header = parse_json(stream.read(length))
    except OSError as problem:
        raise CheckpointError(f"{file}: cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise CheckpointError(f"{file}: the header is not valid JSON ({problem}); the file is damaged") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is not a JSON object; the file is damaged")
    metadata = header.pop("__metadata__", None)
    entries = sorted((_entry(file, name, value, 8 + length) for name, value in header.items()), key=_place)
    expected = 8 + length
    for entry in entries:
        if entry.offset != expected:
            raise CheckpointError(f"{file}: the bytes of {entry.name} overlap another tensor's or leave a gap")
        expected += entry.num_bytes
    if expected != size:
        kind = "truncated" if size < expected else "longer than its header says"
        raise CheckpointError(f"{file}: {kind}: {size} bytes instead of {expected}; download it again")
    return entries, metadata if isinstance(metadata, dict) else {}


def _place(entry: TensorEntry) -> tuple[int, int]:
    return entry.offset, entry.num_bytes  # empty tensors share an offset with their successor


def _entry(file: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = DTYPES.get(value["dtype"]), value["shape"], value["data_offsets"]
        integers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{file}: the header entry of {name} is malformed; the file is damaged") from None
    if dtype is None:
        raise CheckpointError(f"{file}: tensor {name} has the unsupported type {value['dtype']!r}")
    if not all(type(i) is int and 0 <= i < 1 << 62 for i in integers):
        raise CheckpointError(f"{file}: the shape or offsets of {name} are not usable; the file is damaged")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{file}: {name} has {end - begin} bytes for shape {shape} of {value['dtype']}")
    return TensorEntry(name, file, dtype, tuple(shape), data_start + begin, end - begin)


class TensorReader:
    """Copies bytes from checkpoint files into tensors, through one staging buffer where a cast is needed.

    For one thread at a time; `close` it. With `drop_cache` the system forgets the bytes once they were read: it would
    otherwise keep a second copy of the model, and may evict the first for it."""

    def __init__(self, pin_staging: bool = False, drop_cache: bool = False) -> None:
        self._descriptors: dict[Path, int] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._pin = pin_staging
        self._drop_cache = drop_cache

    def read(self, entry: TensorEntry, dest: torch.Tensor) -> None:
        """Fill `dest` (any strides, device and floating dtype; the entry's shape) with the entry's values."""
        if dest.device.type == "cpu" and dest.dtype == entry.dtype:
            if dest.is_contiguous():
                self._read_bytes(entry, entry.offset, _as_bytes(dest))
                return
            if dest[0].is_contiguous():  # one tensor for all experts of a layer, whose records lie apart
                row_bytes = entry.num_bytes // len(dest)
                for i, row in enumerate(dest):
                    self._read_bytes(entry, entry.offset + i * row_bytes, _as_bytes(row))
                return
        for first, rows in self._chunks(entry):
            part = dest if not entry.shape else dest[first : first + rows.shape[0]]
            part.copy_(rows.view(part.shape))

    def rows(self, entry: TensorEntry, first: int, count: int) -> torch.Tensor:
        """Rows `first … first + count` along axis 0, as a fresh CPU tensor in the dtype of the file."""
        out = torch.empty((count, *entry.shape[1:]), dtype=entry.dtype)
        row_bytes = entry.num_bytes // entry.shape[0]
        self._read_bytes(entry, entry.offset + first * row_bytes, _as_bytes(out))
        return out

    def _chunks(self, entry: TensorEntry) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows) of the entry along axis 0, at most STAGING_BYTES (or one row) at a time."""
        num_rows = entry.shape[0] if entry.shape else 1
        if entry.num_bytes == 0:
            return
        row_bytes = entry.num_bytes // num_rows
        step = max(1, STAGING_BYTES // row_bytes)
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            raw = self._staging_buffer(count * row_bytes)
            self._read_bytes(entry, entry.offset + first * row_bytes, raw)
            yield first, raw.view(entry.dtype).view(count, *entry.shape[1:])

    def _staging_buffer(self, num_bytes: int) -> torch.Tensor:
        if self._staging.numel() < num_bytes:
            size = max(num_bytes, min(STAGING_BYTES, 2 * num_bytes))
            self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
        return self._staging[:num_bytes]

    def _read_bytes(self, entry: TensorEntry, offset: int, dest: torch.Tensor) -> None:
        if entry.file not in self._descriptors:
            try:
                self._descriptors[entry.file] = open_regular(entry.file)
            except OSError as problem:
                raise CheckpointError(f"{entry.file}: cannot be read: {problem.strerror}") from None
        view = memoryview(dest.numpy())  # type: ignore[arg-type]  # ndarray is a buffer; the stubs lag
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptors[entry.file], [view[done:]], offset + done)
            except OSError as problem:
                raise CheckpointError(f"{entry.file}: {entry.name} cannot be read: {problem.strerror}") from None
            if count == 0:
                raise CheckpointError(f"{entry.file}: ended while reading {entry.name}; was it replaced meanwhile?")
            done += count
        if done:
            self._drop(entry.file, offset, done)

    def _drop(self, file: Path, offset: int, num_bytes: int) -> None:
        """Advise the system that these bytes (0: all from there on) need no place in its page cache."""
        # Not every platform has the call and not every file system heeds it; the bytes are read either way.
        if self._drop_cache and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptors[file], offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for file, descriptor in self._descriptors.items():
            self._drop(file, 0, 0)  # the pages that two tensors share, which neither read dropped
            os.close(descriptor)
        self._descriptors.clear()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous CPU tensor as [num_bytes] uint8."""
    return tensor.view(-1).view(torch.uint8)
