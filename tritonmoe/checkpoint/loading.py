"""From checkpoint files to `ModelWeights`: strict accounting, reading into the targets of all tensors, checking.

What memory and file have in one type is read straight into place. Where the memory is of fewer bits, one matrix at a
time is read and quantised.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch
from tqdm import tqdm

from tritonmoe.checkpoint.architectures import load_quantization
from tritonmoe.checkpoint.published_formats import PublishedFormat, is_finite
from tritonmoe.checkpoint.quantization import quantize
from tritonmoe.checkpoint.targets import Target, as_published, make_targets
from tritonmoe.checkpoint.tensor_files import Checkpoint, TensorEntry, TensorReader, open_checkpoint
from tritonmoe.checkpoint.tensor_names import canonical_name, idle_layers, is_skippable
from tritonmoe.errors import CheckpointError
from tritonmoe.memory import require_memory
from tritonmoe.model.expert_store import ExpertStore
from tritonmoe.model.matrices import copy_matrix, in_format, row_slice, select
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import (
    PLAIN,
    ModelWeights,
    Storage,
    allocate,
    weight_bytes,
)
from tritonmoe_kernels.quantized import MXFP4, Matrix, QuantizedMatrix, dequantize

logger = logging.getLogger(__name__)

NUM_READERS = 4
MAX_QUANTIZERS = 16  # threads that quantise what they read
QUANTIZED_ELEMENTS = 4 << 20  # read at a time of a tensor that is one matrix
TRY_ANYWAY = "(--no-check-memory tries anyway)"
MXFP4_BLOCKS = ".mlp.experts.gate_up_proj_blocks"
NAN_EXPONENT = 255  # of MXFP4's scales


def load_weights(
    folder: Path,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    check_finite: bool = True,
    check_memory: bool = True,
    progress: bool = False,
    store: ExpertStore | None = None,
    storage: Storage = PLAIN,
) -> ModelWeights:
    """Read the checkpoint in `folder` onto `device` in `dtype`, the routed experts into `store` if there is one, which
    is pinned afterwards where `device` is a GPU. What `storage` keeps in fewer bits is quantised as it is read, or
    copied as it is where the file has it so.

    Raises CheckpointError naming the tensor for anything missing, doubled, misshapen, unknown or, with
    `check_finite`, not finite; InputError when the weights do not fit in memory.
    """
    started = time.perf_counter()
    checkpoint = open_checkpoint(folder)
    found = _canonical_entries(checkpoint)
    if check_memory:
        _require_memory(spec, device, dtype, store, storage)
    weights = allocate(spec, device, dtype, store, storage)
    if weights.head is weights.embedding and "lm_head.weight" in found:
        weights.head = torch.empty_like(weights.embedding)
    targets = make_targets(spec, weights, found)
    published = load_quantization(folder)
    if published is not None:
        targets = {name: as_published(name, target, published, found) for name, target in targets.items()}
    _account(checkpoint, spec, targets, found)
    readers = [TensorReader(device.type == "cuda", drop_cache=store is not None) for _ in range(_num_readers(targets))]
    _read_all(targets, found, readers, check_finite, progress)
    checkpoint.require_unchanged()
    if "lm_head.weight" not in targets and isinstance(weights.head, QuantizedMatrix):
        _store_rows(weights.head, weights.embedding)
    elif spec.tied_head and isinstance(weights.head, torch.Tensor) and weights.head is not weights.embedding:
        _resolve_tied_head(folder, weights)
    seconds = time.perf_counter() - started
    size = checkpoint.num_bytes / 1e9
    logger.info("loaded %.3g GB from %s in %.2f s (%.2g GB/s)", size, folder, seconds, size / seconds)
    if store is not None and device.type == "cuda":
        store.pin()
    return weights


class Source(NamedTuple):
    """A checkpoint to be converted, not loaded: every tensor has its place, and none of the targets has memory."""

    entries: dict[str, TensorEntry]  # by canonical name
    targets: dict[str, Target]


def open_source(folder: Path, spec: ModelSpec) -> Source:
    """As strictly as `load_weights` does; CheckpointError, too, for matrices that are quantised already."""
    checkpoint = open_checkpoint(folder)
    found = _canonical_entries(checkpoint)
    weights = allocate(spec, torch.device("meta"), torch.float32)
    if published_storage(folder, spec) != PLAIN or load_quantization(folder) is not None:
        raise CheckpointError(f"{folder}: is quantised already; use the checkpoint that it was made from")
    if weights.head is weights.embedding and "lm_head.weight" in found:
        weights.head = torch.empty_like(weights.embedding)
    targets = make_targets(spec, weights, found)
    _account(checkpoint, spec, targets, found)
    return Source(found, targets)


def published_storage(folder: Path, spec: ModelSpec) -> Storage:
    """What the checkpoint in `folder` has in fewer bits and is to be kept so: the routed experts."""
    found = _canonical_entries(open_checkpoint(folder))
    first = f"layers.{min(spec.moe_layers, default=0)}"
    if first + MXFP4_BLOCKS in found:
        return Storage(MXFP4)
    published = load_quantization(folder)
    scales = None if published is None else found.get(f"{first}.mlp.experts.0.gate_proj.{published.scale_name}")
    if published is None or scales is None:
        return PLAIN
    widest = max(spec.hidden_size, *(moe.intermediate_size for moe in spec.moe_layers.values()))
    return Storage(published.weight_format(widest, scales.dtype))


def _num_readers(targets: dict[str, Target]) -> int:
    """Quantising takes longer than reading: as many threads as there are cores."""
    if not any(isinstance(target.memory, QuantizedMatrix) or target.published for target in targets.values()):
        return NUM_READERS
    return max(NUM_READERS, min(MAX_QUANTIZERS, os.cpu_count() or 1))


def _require_memory(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, store: ExpertStore | None, storage: Storage
) -> None:
    """InputError unless what goes to `device` and what goes to main memory both fit."""
    kind = str(dtype).removeprefix("torch.") if storage.experts is None else storage.experts.name
    host_remedy = f"{'--dtype bfloat16 or ' if dtype == torch.float32 else ''}a smaller model {TRY_ANYWAY}"
    remedy = f"{'--dtype bfloat16, ' if dtype == torch.float32 else ''}another --device or a smaller model {TRY_ANYWAY}"
    needed = weight_bytes(spec, dtype, store is None, storage)
    if store is None:
        require_memory(needed, device, f"the weights in {kind}", remedy)
        return
    host, experts, others = torch.device("cpu"), f"{store.num_bytes / 1e9:.1f} GB", f"{needed / 1e9:.1f} GB"
    if device.type == "cpu":
        what = f"the model in {kind} ({experts} of experts and {others} of other weights)"
        require_memory(store.num_bytes + needed, host, what, host_remedy)
        return
    what = f"the set of experts in {kind} (beside {others} of other weights on the GPU)"
    require_memory(store.num_bytes, host, what, host_remedy)
    what = f"the model without its experts in {kind} (beside {experts} of experts in main memory)"
    require_memory(needed, device, what, remedy)


def _canonical_entries(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for entry in checkpoint.entries.values():
        name = canonical_name(entry.name)
        if name in found:
            raise CheckpointError(
                f"{checkpoint.folder}: {found[name].name} and {entry.name} are two names of one tensor; remove one"
            )
        found[name] = entry
    return found


def _account(
    checkpoint: Checkpoint, spec: ModelSpec, targets: dict[str, Target], found: dict[str, TensorEntry]
) -> None:
    """Every needed tensor exists with its shape and a usable type, and every other one is known to be skippable."""
    folder = checkpoint.folder
    needed = {k: tensor for name, target in targets.items() for k, tensor in target.tensors(name).items()}
    missing = [name for name, tensor in needed.items() if name not in found and not tensor.is_optional]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        head = "; config.json says the head is not tied to the embedding" if missing == ["lm_head.weight"] else ""
        raise CheckpointError(f"{folder}: tensor {_disk_name(missing[0])} is missing{more}{head}")
    unknown = [
        entry.name for name, entry in found.items() if name not in needed and not is_skippable(name, len(spec.layers))
    ]
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise CheckpointError(f"{folder}: tensor {unknown[0]}{more} is not part of a {spec.model_type} model")
    idle = idle_layers(found, len(spec.layers))
    if idle:
        logger.warning(
            "%s: not used of the files: layers %s; config.json says that there are %d",
            folder, ", ".join(map(str, idle)), len(spec.layers),
        )  # fmt: skip
    for name, tensor in needed.items():
        if name in found:
            _check_entry(found[name], tensor.shape, tensor.dtypes)


def _check_entry(entry: TensorEntry, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    is_row = len(shape) <= 1 and entry.shape == (1, *shape)  # as ERNIE stores a vector, and others a number
    if entry.shape != shape and not is_row:
        raise CheckpointError(
            f"{entry.file}: {entry.name} has shape {list(entry.shape)} where config.json implies {list(shape)}"
        )
    if entry.dtype not in dtypes:
        kind = str(entry.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{entry.file}: {entry.name} is stored as {kind}, which needs a quantisation not supported"
        )


def _disk_name(canonical: str) -> str:
    return canonical if canonical.startswith("lm_head.") else f"model.{canonical}"


def _read_all(
    targets: dict[str, Target],
    found: dict[str, TensorEntry],
    readers: list[TensorReader],
    check_finite: bool,
    progress: bool,
) -> None:
    """Fill all targets in the order of the bytes on disk, with all readers (closed at the end) at a time: fresh memory
    and fast disks both take more requests than one thread can make."""
    entries = {name: found[next(iter(target.tensors(name)))] for name, target in targets.items()}
    order = sorted(targets, key=lambda name: (entries[name].file, entries[name].offset))
    idle: SimpleQueue[TensorReader] = SimpleQueue()

    def fill(name: str) -> int:
        reader = idle.get()
        try:
            _fill(reader, targets[name], entries[name], found, check_finite)
        finally:
            idle.put(reader)
        return entries[name].num_bytes

    for reader in readers:
        idle.put(reader)
    pool = ThreadPoolExecutor(len(readers))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of each reader: more stand in each other's way
    total = sum(entry.num_bytes for entry in entries.values())
    try:
        with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=not progress, leave=False) as bar:
            for num_bytes in pool.map(fill, order):
                bar.update(num_bytes)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
        for reader in readers:
            reader.close()


def _fill(
    reader: TensorReader, target: Target, entry: TensorEntry, found: dict[str, TensorEntry], check_finite: bool
) -> None:
    memory = target.memory
    if target.published is not None:
        _store_published(reader, target, target.published, entry, found, check_finite)
    elif isinstance(memory, torch.Tensor) and target.scales is None:
        reader.read(replace(entry, shape=target.shape), target.order.as_on_disk(memory))
    else:
        for rows, values in _matrices(reader, target, entry, found):
            if isinstance(memory, QuantizedMatrix) and not _is_finite(values):
                raise CheckpointError(f"{entry.file}: {entry.name} holds NaN or infinite values, which no format has")
            _store_rows(rows, values)
    if not check_finite or isinstance(memory, QuantizedMatrix):
        return
    is_sound = not _has_nan_exponent(memory) if target.is_exponents else _is_finite(memory)
    if is_sound:
        return
    if memory.dtype == torch.float16 and entry.dtype != torch.float16:
        raise CheckpointError(
            f"{entry.file}: {entry.name} has values beyond the range of float16; use --dtype bfloat16 or float32"
        )
    raise CheckpointError(
        f"{entry.file}: {entry.name} holds NaN or infinite values; the file is damaged "
        "(--no-check-weights loads it anyway)"
    )


def _matrices(
    reader: TensorReader, target: Target, entry: TensorEntry, found: dict[str, TensorEntry]
) -> Iterator[tuple[Matrix, torch.Tensor]]:
    """One matrix after the other, where its rows go and their values [rows, columns]."""
    if len(target.shape) == 2:
        count = _rows_at_once(target.memory)
        source = replace(entry, shape=target.shape)
        for first in range(0, target.shape[0], count):
            values = reader.rows(source, first, min(count, target.shape[0] - first))
            yield row_slice(target.memory, first, len(values)), values
        return
    for e in range(target.shape[0]):
        values = reader.rows(entry, e, 1)
        if target.scales is not None:
            packed = QuantizedMatrix(MXFP4, values.flatten(-2), reader.rows(found[target.scales], e, 1))
            values = dequantize(packed)
        yield select(target.memory, e), target.order.as_in_memory(values[0])


def _store_rows(memory: Matrix, values: torch.Tensor) -> None:
    """Keep rows of values in whatever form the memory is; quantised on the host, so that every device gets the same."""
    if isinstance(memory, torch.Tensor):
        memory.copy_(values)
    else:
        copy_matrix(memory, quantize(values.cpu(), memory.format))


def _store_published(
    reader: TensorReader,
    target: Target,
    published: PublishedFormat,
    entry: TensorEntry,
    found: dict[str, TensorEntry],
    check_finite: bool,
) -> None:
    """Keep a published matrix: its own codes where the memory's format can hold them, else its values."""
    expected = published.tensors(*target.shape)
    tensors = {}
    for word, name in target.words.items():
        if name in found:
            tensors[word] = torch.empty(expected[word].shape, dtype=found[name].dtype)
            reader.read(replace(found[name], shape=expected[word].shape), tensors[word])
    try:
        matrix = published.decode(tensors, *target.shape)
    except CheckpointError as problem:
        raise CheckpointError(f"{entry.file}: {entry.name} {problem}") from None
    if check_finite and not is_finite(matrix):
        raise CheckpointError(f"{entry.file}: {entry.name} or its scales hold NaN or infinite values")
    memory = target.memory
    kept = in_format(matrix, memory.format) if isinstance(memory, QuantizedMatrix) else None
    if kept is not None:
        copy_matrix(memory, kept)
    else:
        dtype = memory.dtype if isinstance(memory, torch.Tensor) else torch.float32
        _store_rows(memory, dequantize(matrix, dtype))


def _rows_at_once(memory: Matrix) -> int:
    """Whole groups of rows, which share scales."""
    group = memory.format.group_rows if isinstance(memory, QuantizedMatrix) else 1
    return group * max(1, QUANTIZED_ELEMENTS // (group * memory.shape[-1]))


def _has_nan_exponent(scales: torch.Tensor) -> bool:
    return any(bool((part == NAN_EXPONENT).any()) for part in scales)


def _is_finite(view: torch.Tensor) -> bool:
    """One pass at memory speed: the extremes are NaN if any element is, and infinite if one is.

    A view that is not contiguous would be copied whole, so its dimensions are taken in the order of memory, where the
    experts of a store are contiguous one by one.
    """
    if view.numel() == 0:
        return True
    ordered = view.permute(sorted(range(view.dim()), key=view.stride, reverse=True))
    parts = [ordered] if ordered.is_contiguous() else ordered.unbind()
    return all(bool(extreme.isfinite()) for part in parts for extreme in part.aminmax())


def _resolve_tied_head(folder: Path, weights: ModelWeights) -> None:
    """A file that holds a head although config.json ties it: the same values are shared, others are believed."""
    if isinstance(weights.head, torch.Tensor) and torch.equal(weights.head, weights.embedding):
        weights.head = weights.embedding
    else:
        logger.warning("%s: tie_word_embeddings is true but lm_head.weight differs; lm_head.weight is used", folder)
