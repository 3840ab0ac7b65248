"""Small safetensors files that belong to one model: default vectors, estimators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from tritonmoe.checkpoint.tensor_files import TensorReader, read_header_and_metadata
from tritonmoe.errors import CheckpointError, InputError
from tritonmoe.files import write_file

Shape = tuple[int, ...]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """The whole file or none of it; InputError where it cannot be written."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        write_file(path, save(whole, metadata=metadata))
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def read_tensors(
    path: Path,
    form: str,
    what: str,
    names: tuple[str, ...],
    expected: Callable[[Mapping[str, Shape]], Mapping[str, tuple[Shape, torch.dtype]]],
    remedy: str,
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of these names, and the metadata, of a file whose metadata name the format `form`.

    `expected` says what they must be, given their shapes. InputError, one line, for a file that cannot be read, is no
    file of `what`, or holds something else or a number that is not finite; nothing is read before all that fits.
    """
    reader, found = TensorReader(), {}
    try:
        listed, metadata = read_header_and_metadata(path)
        entries = {entry.name: entry for entry in listed}
        if metadata.get("format") != form or set(entries) != set(names):
            raise InputError(f"{path}: not a file of {what}; {remedy}")
        wanted = expected({name: entry.shape for name, entry in entries.items()})
        for name in names:
            entry, (shape, dtype) = entries[name], wanted[name]
            if entry.shape != shape or entry.dtype != dtype:
                kind, own = str(entry.dtype).removeprefix("torch."), list(entry.shape)
                raise InputError(f"{path}: {name} is {kind} {own} where this model has {list(shape)}; {remedy}")
        for name in names:
            found[name] = torch.empty(entries[name].shape, dtype=entries[name].dtype)
            reader.read(entries[name], found[name])
    except CheckpointError as error:
        raise InputError(f"{error}; {remedy}") from None
    finally:
        reader.close()
    if not all(tensor.isfinite().all() for tensor in found.values()):
        raise InputError(f"{path}: holds NaN or infinite values; {remedy}")
    return found, metadata
