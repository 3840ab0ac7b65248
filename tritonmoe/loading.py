"""From checkpoint files to `ModelWeights`: where each tensor belongs, strict accounting, reading, checking.

A `Target` is a view of the model's memory in the element order of the file, so every layout on disk (per expert or
fused, either orientation, interleaved gate and up rows) becomes one strided copy without a second buffer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import torch
from tqdm import tqdm

from tritonmoe.checkpoint import Checkpoint, TensorEntry, TensorReader, open_checkpoint
from tritonmoe.errors import CheckpointError
from tritonmoe.expert_store import ExpertStore
from tritonmoe.memory import require_memory
from tritonmoe.spec import LayerSpec, ModelSpec, MoeSpec
from tritonmoe.tensor_names import canonical_name, is_skippable
from tritonmoe.weights import (
    AttentionWeights,
    ExpertWeights,
    GluWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    allocate,
    weight_bytes,
)
from tritonmoe_kernels import reference

logger = logging.getLogger(__name__)

NUM_READERS = 4
TRY_ANYWAY = "(--no-check-memory tries anyway)"
FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Target:
    """Destination of one tensor: `shape` is what the file must have, `view` the same elements in memory.

    `scales` names the tensor of block exponents of an MXFP4 target, whose `shape` is that of the packed blocks.
    """

    shape: tuple[int, ...]
    view: torch.Tensor
    scales: str | None = None


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
) -> ModelWeights:
    """Read the checkpoint in `folder` onto `device` in `dtype`, the routed experts into `store` if there is one,
    which is pinned afterwards where `device` is a GPU.

    Raises CheckpointError naming the tensor for anything missing, doubled, misshapen, unknown or, with
    `check_finite`, not finite; InputError when the weights do not fit in memory.
    """
    started = time.perf_counter()
    checkpoint = open_checkpoint(folder)
    found = _canonical_entries(checkpoint)
    if check_memory:
        _require_memory(spec, device, dtype, store)
    weights = allocate(spec, device, dtype, store)
    if spec.tied_head and "lm_head.weight" in found:
        weights.head = torch.empty_like(weights.embedding)
    targets = _targets(spec, weights, found)
    _account(checkpoint, spec, targets, found)
    readers = [TensorReader(device.type == "cuda", drop_cache=store is not None) for _ in range(NUM_READERS)]
    _read_all(targets, found, readers, check_finite, progress)
    checkpoint.require_unchanged()
    if spec.tied_head and weights.head is not weights.embedding:
        _resolve_tied_head(folder, weights)
    seconds = time.perf_counter() - started
    size = checkpoint.num_bytes / 1e9
    logger.info("loaded %.3g GB from %s in %.2f s (%.2g GB/s)", size, folder, seconds, size / seconds)
    if store is not None and device.type == "cuda":
        store.pin()
    return weights


def _require_memory(spec: ModelSpec, device: torch.device, dtype: torch.dtype, store: ExpertStore | None) -> None:
    """InputError unless what goes to `device` and what goes to main memory both fit."""
    kind = str(dtype).removeprefix("torch.")
    host_remedy = f"{'--dtype bfloat16 or ' if dtype == torch.float32 else ''}a smaller model {TRY_ANYWAY}"
    remedy = f"{'--dtype bfloat16, ' if dtype == torch.float32 else ''}another --device or a smaller model {TRY_ANYWAY}"
    needed = weight_bytes(spec, dtype, with_experts=store is None)
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


def _targets(spec: ModelSpec, weights: ModelWeights, found: dict[str, TensorEntry]) -> dict[str, Target]:
    """Every tensor the model needs, by canonical name, in the layout that the file uses."""
    targets = {
        "embed_tokens.weight": _plain(weights.embedding),
        "norm.weight": _plain(weights.final_norm),
    }
    if weights.head is not weights.embedding:
        targets["lm_head.weight"] = _plain(weights.head)
    for i, (layer, layer_weights) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        targets.update({f"layers.{i}.{k}": v for k, v in _layer_targets(layer, layer_weights, f"layers.{i}.", found)})
    return targets


def _plain(view: torch.Tensor) -> Target:
    return Target(tuple(view.shape), view)


def _layer_targets(
    spec: LayerSpec, weights: LayerWeights, prefix: str, found: dict[str, TensorEntry]
) -> Iterable[tuple[str, Target]]:
    yield "input_layernorm.weight", _plain(weights.input_norm)
    yield "post_attention_layernorm.weight", _plain(weights.post_norm)
    yield from _attention_targets(spec.attention.q_size, spec.attention.kv_size, weights.attention)
    if weights.dense is not None:
        yield from _glu_targets("mlp", weights.dense)
    if spec.moe is not None and weights.moe is not None:
        yield from _moe_targets(spec.moe, weights.moe)
        yield from _expert_targets(spec.moe, weights.moe.experts, prefix, found)


def _attention_targets(q_size: int, kv_size: int, weights: AttentionWeights) -> Iterable[tuple[str, Target]]:
    sizes = [q_size, kv_size, kv_size]
    for name, view in zip("qkv", weights.qkv.split(sizes), strict=True):
        yield f"self_attn.{name}_proj.weight", _plain(view)
    if weights.qkv_bias is not None:
        for name, view in zip("qkv", weights.qkv_bias.split(sizes), strict=True):
            yield f"self_attn.{name}_proj.bias", _plain(view)
    optional = {
        "o_proj.weight": weights.output,
        "o_proj.bias": weights.output_bias,
        "q_norm.weight": weights.q_norm,
        "k_norm.weight": weights.k_norm,
        "sinks": weights.sinks,
    }
    yield from ((f"self_attn.{name}", _plain(view)) for name, view in optional.items() if view is not None)


def _glu_targets(prefix: str, weights: GluWeights) -> Iterable[tuple[str, Target]]:
    gate, up = weights.gate_up.chunk(2)
    yield f"{prefix}.gate_proj.weight", _plain(gate)
    yield f"{prefix}.up_proj.weight", _plain(up)
    yield f"{prefix}.down_proj.weight", _plain(weights.down)


def _moe_targets(spec: MoeSpec, weights: MoeWeights) -> Iterable[tuple[str, Target]]:
    yield "mlp.router.weight", _plain(weights.router)
    if weights.router_bias is not None:
        yield "mlp.router.bias", _plain(weights.router_bias)
    if weights.selection_bias is not None:
        yield "mlp.selection_bias", _plain(weights.selection_bias)
    if weights.shared is not None:
        yield from _glu_targets("mlp.shared_expert", weights.shared)
    if weights.shared_gate is not None:
        yield "mlp.shared_expert_gate.weight", _plain(weights.shared_gate)


def _expert_targets(
    spec: MoeSpec, weights: ExpertWeights, prefix: str, found: dict[str, TensorEntry]
) -> Iterable[tuple[str, Target]]:
    """The routed experts, in whichever of the three layouts the names on disk show."""
    if f"{prefix}mlp.experts.gate_up_proj_blocks" in found:
        yield from _mxfp4_targets(spec, weights, f"{prefix}mlp.experts.")
    elif f"{prefix}mlp.experts.gate_up_proj" in found:
        yield from _fused_targets(spec, weights, found, prefix)
    else:
        for e in range(spec.num_experts):
            yield from _glu_targets(f"mlp.experts.{e}", GluWeights(weights.gate_up[e], weights.down[e]))
            if weights.gate_up_bias is not None and weights.down_bias is not None:
                gate, up = weights.gate_up_bias[e].chunk(2)
                for name, bias in (("gate", gate), ("up", up), ("down", weights.down_bias[e])):
                    yield f"mlp.experts.{e}.{name}_proj.bias", _plain(bias)


def _fused_targets(
    spec: MoeSpec, weights: ExpertWeights, found: dict[str, TensorEntry], prefix: str
) -> Iterable[tuple[str, Target]]:
    """All experts in one tensor, as [out, in] matrices or as [in, out]."""
    experts, rows, hidden = weights.gate_up.shape
    gate_up, down = _file_order(spec, weights.gate_up), weights.down
    # Both cannot be square at once, so the one that is not tells the orientation of both.
    if rows != hidden:
        transposed = found[f"{prefix}mlp.experts.gate_up_proj"].shape == (experts, hidden, rows)
    else:
        down_entry = found.get(f"{prefix}mlp.experts.down_proj")  # its absence is for the accounting to report
        transposed = down_entry is not None and down_entry.shape == (experts, rows // 2, hidden)
    if transposed:
        gate_up, down = gate_up.movedim(-1, 1), down.transpose(1, 2)
    shape = (experts, hidden, rows) if transposed else (experts, rows, hidden)
    yield "mlp.experts.gate_up_proj", Target(shape, gate_up)
    yield "mlp.experts.down_proj", _plain(down)
    yield from _expert_bias_targets(spec, weights)


def _mxfp4_targets(spec: MoeSpec, weights: ExpertWeights, prefix: str) -> Iterable[tuple[str, Target]]:
    """GPT-OSS's packed experts: blocks of 32 values in 16 bytes, rows always [out, in]."""
    for name, view in (("gate_up_proj", _file_order(spec, weights.gate_up)), ("down_proj", weights.down)):
        experts, columns = view.shape[0], view.shape[-1]
        if columns % 32:
            raise CheckpointError(f"{prefix}{name}_blocks: MXFP4 needs a multiple of 32 columns, not {columns}")
        rows = view[0].numel() // columns
        yield (
            f"mlp.experts.{name}_blocks",
            Target((experts, rows, columns // 32, 16), view, scales=f"{prefix}{name}_scales"),
        )
    yield from _expert_bias_targets(spec, weights)


def _expert_bias_targets(spec: MoeSpec, weights: ExpertWeights) -> Iterable[tuple[str, Target]]:
    if weights.gate_up_bias is not None and weights.down_bias is not None:
        shape = tuple(weights.gate_up_bias.shape)
        yield "mlp.experts.gate_up_proj_bias", Target(shape, _file_order(spec, weights.gate_up_bias))
        yield "mlp.experts.down_proj_bias", _plain(weights.down_bias)


def _file_order(spec: MoeSpec, gate_up: torch.Tensor) -> torch.Tensor:
    """[E, 2I, …] in the file's order of rows: GPT-OSS alternates gate and up rows, [E, I, 2, …]."""
    if spec.activation != "swiglu_clamped":
        return gate_up
    return gate_up.unflatten(1, (2, spec.intermediate_size)).transpose(1, 2)


def _account(
    checkpoint: Checkpoint, spec: ModelSpec, targets: dict[str, Target], found: dict[str, TensorEntry]
) -> None:
    """Every needed tensor exists with its shape and a usable type, and every other one is known to be skippable."""
    folder = checkpoint.folder
    scales = {target.scales for target in targets.values() if target.scales is not None}
    missing = [name for name in [*targets, *scales] if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        head = "; config.json says the head is not tied to the embedding" if missing == ["lm_head.weight"] else ""
        raise CheckpointError(f"{folder}: tensor {_disk_name(missing[0])} is missing{more}{head}")
    unknown = [
        entry.name
        for name, entry in found.items()
        if name not in targets and name not in scales and not is_skippable(name, len(spec.layers))
    ]
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise CheckpointError(f"{folder}: tensor {unknown[0]}{more} is not part of a {spec.model_type} model")
    for name, target in targets.items():
        _check_entry(found[name], target.shape, (torch.uint8,) if target.scales else FLOATING)
        if target.scales:
            _check_entry(found[target.scales], target.shape[:-1], (torch.uint8,))


def _check_entry(entry: TensorEntry, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if entry.shape not in (shape, (1, *shape)):  # ERNIE stores a vector as one row
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
    order = sorted(targets, key=lambda name: (found[name].file, found[name].offset))
    idle: SimpleQueue[TensorReader] = SimpleQueue()

    def fill(name: str) -> int:
        reader = idle.get()
        try:
            _fill(reader, targets[name], found[name], found, check_finite)
        finally:
            idle.put(reader)
        return found[name].num_bytes

    for reader in readers:
        idle.put(reader)
    pool = ThreadPoolExecutor(len(readers))
    total = sum(found[name].num_bytes for name in targets)
    try:
        with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=not progress, leave=False) as bar:
            for num_bytes in pool.map(fill, order):
                bar.update(num_bytes)
    finally:
        pool.shutdown(cancel_futures=True)
        for reader in readers:
            reader.close()


def _fill(
    reader: TensorReader, target: Target, entry: TensorEntry, found: dict[str, TensorEntry], check_finite: bool
) -> None:
    if target.scales is not None:
        _read_mxfp4(reader, entry, found[target.scales], target)
    else:
        reader.read(replace(entry, shape=target.shape), target.view)
    if check_finite and not _is_finite(target.view):
        if target.view.dtype == torch.float16 and entry.dtype != torch.float16:
            raise CheckpointError(
                f"{entry.file}: {entry.name} has values beyond the range of float16; use --dtype bfloat16 or float32"
            )
        raise CheckpointError(
            f"{entry.file}: {entry.name} holds NaN or infinite values; the file is damaged "
            "(--no-check-weights loads it anyway)"
        )


def _read_mxfp4(reader: TensorReader, blocks: TensorEntry, scales: TensorEntry, target: Target) -> None:
    for e in range(target.shape[0]):
        values = reference.mxfp4_dequantize(reader.rows(blocks, e, 1)[0], reader.rows(scales, e, 1)[0])
        target.view[e].copy_(values.view(target.view[e].shape))


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
    if torch.equal(weights.head, weights.embedding):
        weights.head = weights.embedding
    else:
        logger.warning("%s: tie_word_embeddings is true but lm_head.weight differs; lm_head.weight is used", folder)
