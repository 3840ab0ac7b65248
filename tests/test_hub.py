"""Finding and downloading models, against a stand-in for the Hub: nothing here touches the network."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from tritonmoe.checkpoint.hub import resolve_model, snapshot_problems
from tritonmoe.errors import HubError, InputError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}})
REPOSITORY = {
    "config.json": "{}",
    "tokenizer.json": "{}",
    "model.safetensors.index.json": INDEX,
    SHARDS[0]: "x" * 1000,
    SHARDS[1]: "x" * 500,
    "chat_template.jinja": "hello",
    "README.md": "x" * 50,
    "original/model.safetensors": "x" * 5000,
    "fp8/model.safetensors": "x" * 5000,
    "metal/weights.json": "x" * 5000,
    "consolidated.safetensors": "x" * 5000,
}
NEEDED = {name for name in REPOSITORY if "/" not in name} - {"README.md", "consolidated.safetensors"}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


@dataclass
class FakeHub:
    """Behaves like `snapshot_download` for one repository, with a real cache folder."""

    cache: Path
    files: dict[str, str] = field(default_factory=lambda: dict(REPOSITORY))
    error: Exception | None = None  # raised by whatever needs the network
    download_error: Exception | None = None  # raised by the download itself
    lost: frozenset[str] = frozenset()  # files that an interrupted download leaves out
    calls: list[str] = field(default_factory=list)

    @property
    def snapshot(self) -> Path:
        return self.cache / "models--org--name" / "snapshots" / COMMIT

    def snapshot_download(
        self,
        repo_id: str,
        *,
        revision: str | None = None,
        local_files_only: bool = False,
        dry_run: bool = False,
        allow_patterns: list[str] | None = None,
        ignore_patterns: tuple[str, ...] | list[str] = (),
    ) -> Any:
        self.calls.append("cache" if local_files_only else "list" if dry_run else "download")
        if local_files_only:
            if not self.snapshot.exists():
                raise errors.LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder")
            return str(self.snapshot)
        if self.error is not None:
            raise errors.DryRunError("Dry run cannot be performed.") from self.error
        names = [
            name
            for name in self.files
            if any(fnmatch(name, pattern) for pattern in allow_patterns or ["*"])
            and not any(fnmatch(name, pattern) for pattern in ignore_patterns)
        ]
        if dry_run:
            return [self._describe(name) for name in names]
        if self.download_error is not None:
            raise self.download_error
        write(self.snapshot, {name: self.files[name] for name in names if name not in self.lost})
        return str(self.snapshot)

    def _describe(self, name: str) -> SimpleNamespace:
        is_cached = (self.snapshot / name).exists()
        return SimpleNamespace(filename=name, file_size=len(self.files[name]), will_download=not is_cached)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(fake.cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    return fake


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(f"{status} Client Error.\n\nfor url: somewhere", response=response)  # type: ignore[arg-type]


# Local folders and files


def test_local_folder_is_returned(tmp_path: Path, hub: FakeHub) -> None:
    folder = write(tmp_path / "org" / "name", {"config.json": "{}"})
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder) + "/") == folder
    assert resolve_model("org/name") == Path("org/name")
    assert hub.calls == []


def test_home_folder_is_expanded(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write(tmp_path / "model", {"config.json": "{}"})
    assert resolve_model("~/model") == folder


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"notes.txt": ""}, "no config.json"),
        ({"model-Q4_K_M.gguf": ""}, "GGUF"),
        ({"config.json": "{}", "model.GGUF": ""}, "GGUF"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, "only safetensors are read"),
        ({"pytorch_model-00001-of-00002.bin": ""}, "only safetensors are read"),
    ],
)
def test_folder_that_cannot_be_read(tmp_path: Path, hub: FakeHub, files: dict[str, str], message: str) -> None:
    with pytest.raises(HubError, match=message):
        resolve_model(write(tmp_path / "model", files))
    assert hub.calls == []


def test_safetensors_beside_other_formats_are_fine(tmp_path: Path, hub: FakeHub) -> None:
    files = dict.fromkeys(["config.json", "model.safetensors", "model.gguf", "pytorch_model.bin"], "{}")
    folder = write(tmp_path / "model", files | {"training_args.bin": ""})
    assert resolve_model(folder) == folder


@pytest.mark.parametrize(("name", "message"), [("m.gguf", "original repository"), ("m.safetensors", "is a file")])
def test_file_instead_of_folder(tmp_path: Path, hub: FakeHub, name: str, message: str) -> None:
    write(tmp_path, {name: ""})
    with pytest.raises(HubError, match=message):
        resolve_model(name)


@pytest.mark.parametrize(
    "model", ["./org/name", "../name", "/org/name", "~/org/name", "org/name/", "C:\\models", "a/b/c", Path("org/name")]
)
def test_absent_path_is_not_looked_up(hub: FakeHub, model: str | Path) -> None:
    with pytest.raises(HubError, match="no such folder"):
        resolve_model(model)
    assert hub.calls == []


@pytest.mark.parametrize("model", ["", " ", "org/name:Q4_K_M", "org/na me", "-name", "a" * 5000, "a..b", "x\0"])
def test_malformed_id(hub: FakeHub, model: str) -> None:
    with pytest.raises(HubError, match="neither a folder nor a Hugging Face id"):
        resolve_model(model)
    assert hub.calls == []


def test_revision_of_a_local_folder(tmp_path: Path, hub: FakeHub) -> None:
    with pytest.raises(InputError, match="revision"):
        resolve_model(write(tmp_path / "model", {"config.json": "{}"}), revision="main")


# The cache


def test_complete_cache_needs_no_network(hub: FakeHub) -> None:
    write(hub.snapshot, {name: REPOSITORY[name] for name in NEEDED})
    assert resolve_model("org/name") == hub.snapshot
    assert resolve_model("org/name", offline=True) == hub.snapshot
    assert hub.calls == ["cache", "cache"]


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", *SHARDS])
def test_partial_cache_is_completed(hub: FakeHub, missing: str) -> None:
    write(hub.snapshot, {name: REPOSITORY[name] for name in NEEDED - {missing}})
    sizes: list[int] = []
    assert resolve_model("org/name", before_download=lambda size, _: sizes.append(size)) == hub.snapshot
    assert hub.calls == ["cache", "list", "download"]
    assert sizes == [len(REPOSITORY[missing])]
    assert snapshot_problems(hub.snapshot) == []


@pytest.mark.parametrize("by_variable", [True, False])
def test_partial_cache_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, by_variable: bool) -> None:
    write(hub.snapshot, {name: REPOSITORY[name] for name in NEEDED - {SHARDS[1]}})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", by_variable)
    with pytest.raises(HubError, match=rf"{SHARDS[1]} is missing.*HF_HUB_OFFLINE.*local folder"):
        resolve_model("org/name", offline=None if by_variable else True)
    assert hub.calls == ["cache"]


def test_nothing_cached_offline(hub: FakeHub) -> None:
    with pytest.raises(HubError, match=r"nothing is cached.*HF_HUB_OFFLINE"):
        resolve_model("org/name", offline=True)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_unreadable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = write(tmp_path / "models--org--name", {"refs/main": COMMIT}) / "refs" / "main"
    refs.chmod(0)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(HubError, match="HF_HUB_CACHE"):
        resolve_model("org/name", offline=True)


def test_cache_of_the_real_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own layout and look-up, including links that lead nowhere."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    storage = tmp_path / "models--org--name"
    snapshot = write(storage / "snapshots" / COMMIT, {name: REPOSITORY[name] for name in NEEDED})
    write(storage, {"refs/main": COMMIT})
    assert resolve_model("org/name", offline=True) == snapshot
    assert resolve_model("org/name", revision=COMMIT, offline=True) == snapshot
    with pytest.raises(HubError, match="nothing is cached"):
        resolve_model("org/name", revision="other", offline=True)
    (snapshot / SHARDS[0]).unlink()
    (snapshot / SHARDS[0]).symlink_to(storage / "blobs" / "absent")
    with pytest.raises(HubError, match=SHARDS[0]):
        resolve_model("org/name", offline=True)


# Downloads


def test_download_takes_only_what_is_needed(hub: FakeHub) -> None:
    announced: list[tuple[int, Path]] = []
    folder = resolve_model("org/name", before_download=lambda size, cache: announced.append((size, cache)))
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == NEEDED
    assert announced == [(sum(len(REPOSITORY[name]) for name in NEEDED), hub.cache)]


def test_download_can_be_refused(hub: FakeHub) -> None:
    def refuse(num_bytes: int, cache: Path) -> None:
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        resolve_model("org/name", before_download=refuse)
    assert "download" not in hub.calls


def test_disk_too_small(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    monkeypatch.setattr(FakeHub, "_describe", describe_large)
    with pytest.raises(HubError, match=r"needs 60\.0 GB but .* has 1\.0 GB free.*HF_HUB_CACHE"):
        resolve_model("org/name")
    assert "download" not in hub.calls


def describe_large(hub: FakeHub, name: str) -> SimpleNamespace:
    size = 30 * 10**9 if name in SHARDS else None
    return SimpleNamespace(filename=name, file_size=size, will_download=True)


def test_interrupted_download_is_noticed(hub: FakeHub) -> None:
    hub.lost = frozenset({SHARDS[0]})
    with pytest.raises(HubError, match=f"not complete: {SHARDS[0]} is missing.*run it again"):
        resolve_model("org/name")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "model-Q4.gguf", "Q8/model.gguf"], "GGUF.*without -GGUF"),
        (["config.json", "tokenizer.json", "pytorch_model.bin"], "only safetensors are read"),
        (["config.json", "tokenizer.json"], "no safetensors"),
        (["adapter_model.safetensors"], "no config.json"),
        (["config.json", "model.safetensors", "tiktoken.model"], "no tokenizer.json"),
    ],
)
def test_useless_repository_is_refused_before_the_download(hub: FakeHub, files: list[str], message: str) -> None:
    hub.files = dict.fromkeys(files, "{}")
    with pytest.raises(HubError, match=message):
        resolve_model("org/name")
    assert hub.calls == ["cache", "list"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.GatedRepoError, 403), "gated.*HF_TOKEN"),
        (http_error(errors.RepositoryNotFoundError, 401), "not found.*HF_TOKEN"),
        (http_error(errors.RevisionNotFoundError, 404), "no revision 'v9'"),
        (http_error(errors.HfHubHTTPError, 401), "denies access.*HF_TOKEN"),
        (http_error(errors.HfHubHTTPError, 503), "status 503"),
        (ConnectionError("Name or service\nnot known"), "Name or service not known.*HF_HUB_OFFLINE.*local folder"),
        (errors.OfflineModeIsEnabled("offline mode is enabled"), "HF_HUB_OFFLINE"),
        (TimeoutError(), "TimeoutError.*local folder"),
    ],
)
def test_unreachable_repository(hub: FakeHub, error: Exception, message: str) -> None:
    hub.error = error
    with pytest.raises(HubError, match=rf"^[^\n]*{message}[^\n]*$"):
        resolve_model("org/name", revision="v9", offline=False)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/cache/models"), "/cache/models.*HF_HUB_CACHE"),
        (OSError(errno.EROFS, "Read-only file system"), "cache: set HF_HUB_CACHE"),
        (OSError(errno.ENOSPC, "No space left on device"), "full.*HF_HUB_CACHE"),
        (RuntimeError("connection reset"), "connection reset.*network"),
        (errors.LocalEntryNotFoundError("gone"), "gone"),
    ],
)
def test_failing_download(hub: FakeHub, error: Exception, message: str) -> None:
    hub.download_error = error
    with pytest.raises(HubError, match=message):
        resolve_model("org/name")


@pytest.mark.parametrize(
    "name",
    [
        "../evil.json",
        "/etc/evil.json",
        "a/../../evil.json",
        "a\\..\\evil.json",
        "a//b.json",
        "./x.json",
        "x\x1b[2J.json",
    ],
)
def test_names_that_lead_out_of_the_cache(hub: FakeHub, name: str) -> None:
    hub.files[name] = "{}"
    with pytest.raises(HubError, match=r"^[^\n]*could lead out of the cache") as caught:
        resolve_model("org/name")
    assert str(caught.value).isprintable()
    assert "download" not in hub.calls


def blobs(hub: FakeHub, name: str, digest: str, content: str) -> None:
    """Have the hub keep a file as its library does: a link to one named by the hash that the server states."""
    original = hub.snapshot_download

    def download(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        link = hub.snapshot / name
        if hub.calls[-1] == "download" and not link.is_symlink():
            link.unlink()
            blob = write(hub.cache / "models--org--name" / "blobs", {digest: content}) / digest
            link.symlink_to(os.path.relpath(blob, link.parent))
        return found

    huggingface_hub.snapshot_download = download  # the fixture restores it


@pytest.mark.parametrize("kind", ["large", "small", "small of a mirror"])
def test_downloads_are_compared_with_their_hashes(hub: FakeHub, kind: str) -> None:
    data = hub.files[SHARDS[0]].encode()
    prefix = b"" if kind == "small of a mirror" else b"blob 1000\0"
    digest = hashlib.sha256(data) if kind == "large" else hashlib.sha1(prefix + data)
    blobs(hub, SHARDS[0], digest.hexdigest(), "y" + data.decode()[1:])
    with pytest.raises(HubError, match=f"is damaged: the bytes of {SHARDS[0]} do not have the hash.*run it again"):
        resolve_model("org/name")
    assert snapshot_problems(hub.snapshot) == [f"{SHARDS[0]} is missing, though model.safetensors.index.json names it"]
    assert not list((hub.cache / "models--org--name" / "blobs").iterdir())
    blobs(hub, SHARDS[0], digest.hexdigest(), data.decode())
    assert resolve_model("org/name") == hub.snapshot


def test_downloads_of_another_length(hub: FakeHub) -> None:
    blobs(hub, SHARDS[0], "etag", "x" * 999)
    with pytest.raises(HubError, match=f"{SHARDS[0]} has 999 bytes instead of 1000"):
        resolve_model("org/name")


def test_the_library_keeps_names_within_its_cache(tmp_path: Path) -> None:
    """Should a name ever get past the check above."""
    from huggingface_hub.file_download import _get_pointer_path

    with pytest.raises(ValueError, match="Invalid pointer path"):
        _get_pointer_path(str(tmp_path), COMMIT, "../../../evil.json")


# Completeness


def test_problems_of_a_folder(tmp_path: Path) -> None:
    assert snapshot_problems(tmp_path) == [
        "config.json is missing",
        "tokenizer.json is missing",
        "there is no safetensors file",
    ]
    write(tmp_path, {"config.json": "{}", "tokenizer.json": "{}", "estimator.safetensors": ""})
    assert snapshot_problems(tmp_path) == ["there is no safetensors file"]
    write(tmp_path, {"model.safetensors": ""})
    assert snapshot_problems(tmp_path) == []


@pytest.mark.parametrize(
    ("index", "problem"), [("{", "not valid JSON"), ("{}", "no weight_map"), ('{"weight_map": []}', "no weight_map")]
)
def test_broken_index(tmp_path: Path, index: str, problem: str) -> None:
    write(tmp_path, REPOSITORY | {"model.safetensors.index.json": index})
    (found,) = snapshot_problems(tmp_path)
    assert problem in found


def test_shards_without_an_index(tmp_path: Path) -> None:
    files = {"config.json": "{}", "tokenizer.json": "{}", SHARDS[0]: ""}
    assert snapshot_problems(write(tmp_path, files)) == ["1 of 2 safetensors files are missing"]
    assert snapshot_problems(write(tmp_path, {SHARDS[1]: ""})) == []
    # gpt-oss counts its three shards from 0 to 2 of 2.
    assert snapshot_problems(write(tmp_path, {"model-00000-of-00002.safetensors": ""})) == []
