"""Files of unknown origin: opened if they are files at all, read and parsed within limits; and files written whole."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

MAX_DEPTH = 64  # of JSON; published files have under ten levels


def open_regular(path: Path) -> int:
    """A descriptor to read from; OSError for what is no regular file: a pipe would be waited for without end, a device
    never ends."""
    try:
        # Without O_NONBLOCK the call itself waits for the other end of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a name with a null byte, or not in the file system's encoding
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_file(path: Path, limit: int) -> bytes:
    """The contents; OSError also for a file of more than `limit` bytes, even if it grows meanwhile."""
    with open(open_regular(path), "rb") as file:
        is_larger = os.fstat(file.fileno()).st_size > limit
        data = b"" if is_larger else file.read(limit + 1)
    if is_larger or len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 20} MiB, so not what its name says", str(path))
    return data


def parse_json(data: bytes) -> Any:
    """The JSON value; ValueError for bytes that are not JSON in UTF-8, nest too deeply, or give a key two values."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unambiguous)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return value
    raise ValueError("nested too deeply")


def _children(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that stands twice, readers believe the first or the last value: two programs, two models."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if value != found[name]:
                raise ValueError(f"{name!r} stands twice in one object, with different values")
    return found


def write_file(path: Path, data: bytes | None) -> None:
    """Put a whole file in the place of `path`, or leave what was there; OSError where that fails. A link stays one.

    With None only see that it could be done: the one sure way to know is to make a file in the same folder."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a rename would replace a device, too
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    temporary = target.with_name(f".{target.name[:100]}-{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data or b"")
        if data is not None:
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def discard_stdout() -> None:
    """Python would complain again when it flushes what is left at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
