"""Where a model is: a local folder, the Hugging Face cache, or a download into that cache."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.checkpoint.tensor_files import INDEX_NAME, NO_WEIGHTS
from tritonmoe.errors import HubError, InputError

logger = logging.getLogger(__name__)

SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

# Patterns match the whole path, so "*.safetensors" alone also takes second copies of the weights in
# subfolders: the gpt-oss-20b repository holds 41 GB, of which 14 GB are needed.
ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model"]
IGNORE_PATTERNS = ["*/*.safetensors", "original/*", "metal/*", "onnx/*", "openvino/*", "consolidated*"]
FOREIGN_WEIGHTS = ["*.gguf", "*.bin", "*.pt", "*.pth"]  # listed only to say what a repository holds instead

BeforeDownload = Callable[[int, Path], None]


def resolve_model(
    model: str | Path,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    before_download: BeforeDownload | None = None,
) -> Path:
    """The folder that holds `model`: a folder with a config.json, or a Hugging Face id such as `org/name`.

    A complete copy in the cache is used without any network access. Otherwise the files that are needed are
    downloaded, after `before_download(num_bytes, cache_folder)`, which may raise to refuse. `offline` forbids
    the network; by default HF_HUB_OFFLINE decides.
    """
    path = Path(os.path.expanduser(model))
    if str(model) and os.path.exists(path):  # Path.exists raises for names that are too long; this does not
        if revision is not None:
            raise InputError(f"{path} is local, so revision {revision!r} has no meaning; leave it out")
        return _check_local(path)
    if isinstance(model, Path) or _looks_like_path(model):
        raise HubError(f"{model}: no such folder; check the path, or give a Hugging Face id such as org/name")
    try:
        validate_repo_id(model)
    except errors.HFValidationError:
        raise HubError(f"{model!r} is neither a folder nor a Hugging Face id of the form org/name") from None
    return _resolve_repository(model, revision, offline, before_download)


def snapshot_problems(folder: Path) -> list[str]:
    """What a model folder lacks to be loaded, one line each; empty for a complete one."""
    needed = ("config.json", "tokenizer.json")
    problems = [f"{name} is missing" for name in needed if not os.path.exists(folder / name)]
    if os.path.exists(folder / INDEX_NAME):
        return problems + _index_problems(folder)
    # In the cache a file is a link, which may lead nowhere.
    found = [path.name for path in folder.glob("*.safetensors") if path.exists()]
    names = [name for name in found if not name.startswith(NO_WEIGHTS)]
    if not names:
        return [*problems, "there is no safetensors file"]
    shards = [match for name in names if (match := SHARD.fullmatch(name))]
    # Never too many by this count: where shards are numbered from 0, as for gpt-oss, there is one more.
    if shards and len(shards) < (expected := int(shards[0][1])):
        problems.append(f"{expected - len(shards)} of {expected} safetensors files are missing")
    return problems


def _index_problems(folder: Path) -> list[str]:
    try:
        weight_map = read_json(folder / INDEX_NAME, HubError).get("weight_map")
    except HubError as error:
        return [str(error)]
    if not isinstance(weight_map, dict) or not weight_map:
        return [f"{INDEX_NAME} has no weight_map"]
    names = sorted({str(name) for name in weight_map.values()})
    return [f"{name} is missing, though {INDEX_NAME} names it" for name in names if not os.path.exists(folder / name)]


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.endswith("/") or "\\" in model or model.count("/") > 1


def _check_local(path: Path) -> Path:
    """`path` itself if it is a folder that may hold a readable model; the weights are checked when loaded."""
    if not path.is_dir():
        if path.suffix.lower() == ".gguf":
            raise HubError(_gguf_message(str(path)))
        raise HubError(f"{path} is a file; give the folder that holds it together with config.json")
    try:
        names = os.listdir(path)
    except OSError as error:
        raise HubError(f"{path} cannot be read: {error.strerror}") from None
    _refuse_foreign_weights(str(path), names)
    if "config.json" not in names:
        raise HubError(f"{path} has no config.json; give the folder of a model in safetensors form")
    return path


def _refuse_foreign_weights(where: str, names: Iterable[str]) -> None:
    """Raise if the only weights among `names` are in a format that is not read."""
    names = [name.lower() for name in names]
    if any(name.endswith(".safetensors") for name in names):
        return
    if any(name.endswith(".gguf") for name in names):
        raise HubError(_gguf_message(where))
    if any(name.endswith((".bin", ".pt", ".pth")) and "model" in name for name in names):
        raise HubError(f"{where} holds PyTorch pickle files; only safetensors are read, convert them first")


def _gguf_message(where: str) -> str:
    return (
        f"{where} holds GGUF weights; only safetensors are read, so give the original repository of the "
        "model, usually named the same without -GGUF"
    )


def _resolve_repository(
    repo_id: str, revision: str | None, offline: bool | None, before_download: BeforeDownload | None
) -> Path:
    cached = _cached_snapshot(repo_id, revision)
    problems = ["nothing is cached"] if cached is None else snapshot_problems(cached)
    if not problems and cached is not None:
        return cached
    if constants.HF_HUB_OFFLINE if offline is None else offline:
        raise HubError(
            f"{repo_id} is not complete in {constants.HF_HUB_CACHE} ({_summary(problems)}) and offline mode "
            "is on; unset HF_HUB_OFFLINE to download it, or give a local folder"
        )
    return _download(repo_id, revision, before_download)


def _cached_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """The snapshot folder in the cache, complete or not.

    Asking for one file leaves that judgement to us: some versions of the library check every file of the
    repository, others none.
    """
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id, revision=revision, local_files_only=True, allow_patterns=["config.json"]
            )
        )
    except errors.LocalEntryNotFoundError:
        return None
    except OSError as error:
        raise _explain(error, repo_id, revision) from error


def _download(repo_id: str, revision: str | None, before_download: BeforeDownload | None) -> Path:
    cache = Path(constants.HF_HUB_CACHE)
    try:
        files = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            dry_run=True,
            allow_patterns=ALLOW_PATTERNS + FOREIGN_WEIGHTS,
            ignore_patterns=IGNORE_PATTERNS,
        )
    except Exception as error:  # the network, the Hub, the cache folder: see _explain
        raise _explain(error, repo_id, revision) from error
    _check_listing(repo_id, [file.filename for file in files])
    wanted = set(filter_repo_objects([file.filename for file in files], allow_patterns=ALLOW_PATTERNS))
    num_bytes = sum(file.file_size or 0 for file in files if file.will_download and file.filename in wanted)
    _check_disk(repo_id, num_bytes, cache)
    if before_download is not None and num_bytes:
        before_download(num_bytes, cache)
    logger.info("downloading %s: %s to %s", repo_id, _gigabytes(num_bytes), cache)
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repo_id, revision=revision, allow_patterns=ALLOW_PATTERNS, ignore_patterns=IGNORE_PATTERNS
            )
        )
    except Exception as error:
        raise _explain(error, repo_id, revision) from error
    if problems := snapshot_problems(folder):
        raise HubError(f"the download of {repo_id} is not complete: {_summary(problems)}; run it again")
    arrived = [file for file in files if file.will_download and file.filename in wanted]
    if problems := [line for file in arrived if (line := _damage(folder / file.filename, file.file_size))]:
        raise HubError(f"the download of {repo_id} is damaged: {_summary(problems)}; it was removed, run it again")
    return folder


def _damage(path: Path, num_bytes: int | None) -> str | None:
    """Why a file that was just downloaded is not the Hub's, or None; such a file is removed from the cache.

    The library compares lengths at most. In the cache a file is a link to one named by the hash that the server states:
    SHA-256 of a large file, git's SHA-1 of a small one, for which some mirrors state the plain SHA-1.
    """
    blob = Path(os.path.realpath(path))
    size = blob.stat().st_size
    prefixes = [b""] if len(blob.name) == 64 else [b"", b"blob %d\0" % size]
    kind = hashlib.sha256 if len(blob.name) == 64 else hashlib.sha1
    problem = None
    if num_bytes is not None and size != num_bytes:
        problem = f"{path.name} has {size} bytes instead of {num_bytes}"
    elif DIGEST.fullmatch(blob.name) and blob.name not in [_digest(blob, kind(prefix)) for prefix in prefixes]:
        problem = f"the bytes of {path.name} do not have the hash that the Hub states"
    if problem is not None:
        blob.unlink()
        path.unlink(missing_ok=True)
    return problem


def _digest(path: Path, digest: hashlib._Hash) -> str:
    """The hash of what `digest` has seen already and the file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest()


def _check_listing(repo_id: str, names: list[str]) -> None:
    """Refuse before the download what could not be loaded after it, and names that lead out of the cache."""
    for name in names:
        if not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
            raise HubError(f"{repo_id} names a file {name!r}, which could lead out of the cache; it is not downloaded")
    _refuse_foreign_weights(repo_id, names)
    if not any(name.endswith(".safetensors") for name in names):
        raise HubError(f"{repo_id} has no safetensors weights; give a repository that has")
    if "config.json" not in names:
        raise HubError(f"{repo_id} has no config.json; give the repository of a whole model")
    if "tokenizer.json" not in names:
        raise HubError(f"{repo_id} has no tokenizer.json, the only form that is read; give a copy with it")


def _check_disk(repo_id: str, num_bytes: int, cache: Path) -> None:
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise HubError(
            f"{repo_id} needs {_gigabytes(num_bytes)} but {cache} has {_gigabytes(free)} free; free some "
            "space or set HF_HUB_CACHE to a folder on a larger disk"
        )


def _explain(error: BaseException, repo_id: str, revision: str | None) -> HubError:
    """One line for what a call of huggingface_hub met.

    What it cannot reach it reports as a dry run or a look-up in the cache that failed; their cause says more.
    """
    cache = constants.HF_HUB_CACHE
    if isinstance(error, errors.DryRunError | errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _explain(error.__cause__, repo_id, revision)
    if isinstance(error, errors.GatedRepoError):
        text = f"{repo_id} is gated: accept its terms on the Hub and set HF_TOKEN to a token of that account"
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = f"{repo_id} was not found on the Hub: check the spelling, or set HF_TOKEN if it is private"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{repo_id} has no revision {revision!r}: give a branch, tag or commit of it"
    elif isinstance(error, errors.HfHubHTTPError):
        text = _explain_status(error.response.status_code, repo_id)
    elif isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        text = f"no permission for {error.filename or cache}: set HF_HUB_CACHE to a folder of your own"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        text = f"the disk of {cache} is full: free some space or set HF_HUB_CACHE to a folder on another disk"
    else:
        reason = " ".join(str(error).split()) or type(error).__name__
        text = f"cannot download {repo_id} ({reason}): check network and HF_HUB_OFFLINE, or give a local folder"
    return HubError(text)


def _explain_status(status: int, repo_id: str) -> str:
    if status in (401, 403):
        return f"the Hub denies access to {repo_id} (status {status}): set HF_TOKEN to a valid token"
    return f"the Hub answered with status {status} for {repo_id}: try again later, or give a local folder"


def _summary(problems: list[str]) -> str:
    more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
