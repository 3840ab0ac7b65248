"""Reading and writing files whose origin is unknown."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.checkpoint.tensor_files import TensorReader, open_checkpoint, read_header
from tritonmoe.errors import CheckpointError, ConfigError, TokenizerError
from tritonmoe.files import MAX_DEPTH, open_regular, parse_json, read_file, write_file
from tritonmoe.text.tokenizer import Tokenizer


def test_within_the_limit(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert read_file(tmp_path / "x", 3) == b"abc"
    (tmp_path / "link").symlink_to("x")
    assert read_file(tmp_path / "link", 3) == b"abc"
    with pytest.raises(OSError, match="larger than"):
        read_file(tmp_path / "x", 2)


def test_a_sparse_file_of_a_terabyte(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger than 16 MiB"):
        read_file(tmp_path / "x", 16 << 20)


def test_a_file_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"abcd")
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((0o100000, *[0] * 5, 1, 0, 0, 0)))  # it had one byte
    with pytest.raises(OSError, match="larger than"):
        read_file(tmp_path / "x", 3)


@pytest.mark.parametrize("name", ["pipe", "device", "folder", "dangling", "loop", "null\0byte", "\ud800", "x" * 5000])
def test_what_is_no_file(tmp_path: Path, name: str) -> None:
    """A pipe without a writer would be waited for, /dev/zero read, for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("absent")
    (tmp_path / "loop").symlink_to("loop")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"\w"):
        open_regular(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "tokenizer_config.json"])
def test_a_pipe_in_place_of_a_model_file(model_folder: Path, name: str) -> None:
    (model_folder / name).unlink()
    os.mkfifo(model_folder / name)

    def read() -> None:
        read_json(model_folder / "config.json")
        Tokenizer.from_folder(model_folder)
        open_checkpoint(model_folder)

    with pytest.raises((ConfigError, TokenizerError, CheckpointError), match="not a regular file"):
        read()


def test_weights_replaced_while_they_are_loaded(model_folder: Path) -> None:
    """Between the header and the bytes: gone, a pipe, or shorter."""
    path = model_folder / "model.safetensors"
    entry, data = read_header(path)[-1], path.read_bytes()

    def read() -> None:
        import torch

        reader = TensorReader()
        try:
            reader.read(entry, torch.empty(entry.shape, dtype=entry.dtype))
        finally:
            reader.close()

    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        read()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read()
    path.unlink()
    path.write_bytes(data[: entry.offset + 1])
    with pytest.raises(CheckpointError, match="was it replaced meanwhile"):
        read()


# JSON


def nested(depth: int) -> bytes:
    return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)


def test_depth_of_json() -> None:
    assert parse_json(nested(MAX_DEPTH)) is not None
    for data in (nested(MAX_DEPTH + 1), nested(100_000), b"[" * 100_000, b"[" * 1000 + b"]" * 1000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(data)


@pytest.mark.parametrize("data", [b'{"a": 1, "a": 2}', b'[{"b": {"a": 1, "c": 0, "a": "1"}}]', b'{"a": NaN, "a": NaN}'])
def test_a_key_with_two_values(data: bytes) -> None:
    with pytest.raises(ValueError, match="'a' stands twice"):
        parse_json(data)


def test_a_key_twice_with_one_value() -> None:
    assert parse_json(b'{"a": [1, {"b": null}], "a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}


@pytest.mark.parametrize("data", ["{}".encode("utf-16"), "\ufeff{}".encode(), b"\xff", b"", b"9" * 5000, b"{}x"])
def test_what_is_not_json(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(data)


def test_two_settings_of_one_name_in_a_model(model_folder: Path) -> None:
    config = (model_folder / "config.json").read_text()
    (model_folder / "config.json").write_text(config.replace("{", '{"num_experts_per_tok": 1, ', 1))
    with pytest.raises(ConfigError, match="'num_experts_per_tok' stands twice"):
        read_json(model_folder / "config.json")


# Writing


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_file(path, b"old")
    write_file(path, None)

    def full(self: Path, data: bytes) -> None:
        with self.open("wb") as file:
            file.write(data[:1])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]
    for wrong in (Path("/dev/null"), tmp_path, tmp_path / "absent" / "x"):
        with pytest.raises(OSError, match=r"\w"):
            write_file(wrong, b"new")
    assert Path("/dev/null").is_char_device()


def test_readers_see_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path, contents = tmp_path / "x", [bytes([i]) * 100_000 for i in range(20)]
    write_file(path, contents[0])
    seen: list[Any] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(path.read_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for data in contents:
        write_file(path, data)
    done.set()
    watcher.join()
    assert all(data in contents for data in seen)
