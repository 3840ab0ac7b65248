"""Where each tensor of a checkpoint belongs in memory, in whichever layout the file has it.

A `Target` is the model's memory of one tensor and the order in which the file has its elements. So every layout on
disk (per expert or fused, either orientation, interleaved gate and up rows) becomes one strided copy without a second
buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from tritonmoe.checkpoint.published_formats import PublishedFormat, StoredTensor
from tritonmoe.checkpoint.tensor_files import TensorEntry
from tritonmoe.errors import CheckpointError
from tritonmoe.model.matrices import row_slice, select
from tritonmoe.model.spec import LayerSpec, ModelSpec, MoeSpec
from tritonmoe.model.weights import AttentionWeights, ExpertWeights, LayerWeights, ModelWeights, MoeWeights
from tritonmoe_kernels.quantized import MXFP4, Matrix, QuantizedMatrix

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Order(NamedTuple):
    """How a file orders the values of a matrix [..., rows, columns] whose rows are outputs, gate rows first."""

    is_transposed: bool = False  # [..., columns, rows]
    is_interleaved: bool = False  # gate and up rows alternate, as GPT-OSS has them

    def as_on_disk(self, memory: torch.Tensor) -> torch.Tensor:
        """A view [E, …] in the file's order of memory [E, rows, …]; interleaved rows are two axes."""
        view = memory.unflatten(1, (2, -1)).transpose(1, 2) if self.is_interleaved else memory
        return view.movedim(-1, 1) if self.is_transposed else view

    def as_in_memory(self, values: torch.Tensor) -> torch.Tensor:
        """Rows [rows, columns] of one matrix as the file has it."""
        rows = values.mT if self.is_transposed else values
        return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if self.is_interleaved else rows


IN_ORDER = Order()


@dataclass(frozen=True)
class Target:
    """Destination of one tensor: `shape` is what the file must have, `memory` where the values go, in our order.

    `scales` names the tensor of block exponents where the file's is MXFP4 to be dequantised, whose `shape` is that of
    the packed blocks. Codes that are kept as they are have a target of their own type, as have their `is_exponents`.
    A matrix that is `published` as several tensors has their names in `words`, by the last word of each.
    """

    shape: tuple[int, ...]
    memory: Matrix
    order: Order = IN_ORDER
    dtypes: tuple[torch.dtype, ...] = FLOATING
    scales: str | None = None
    is_exponents: bool = False
    published: PublishedFormat | None = None
    words: dict[str, str] = field(default_factory=dict)

    def tensors(self, name: str) -> dict[str, StoredTensor]:
        """What the file must have for the target called `name`, by canonical name, the one with the values first."""
        if self.published is not None:
            return {self.words[word]: tensor for word, tensor in self.published.tensors(*self.shape).items()}
        found = {name: StoredTensor(self.shape, self.dtypes)}
        return found if self.scales is None else {**found, self.scales: StoredTensor(self.shape[:-1], (torch.uint8,))}


def make_targets(spec: ModelSpec, weights: ModelWeights, found: dict[str, TensorEntry]) -> dict[str, Target]:
    """Every tensor the model needs, by canonical name, in the layout that the file uses."""
    targets = {
        "embed_tokens.weight": _plain(weights.embedding),
        "norm.weight": _plain(weights.final_norm),
    }
    if weights.head is not weights.embedding and not (spec.tied_head and "lm_head.weight" not in found):
        targets["lm_head.weight"] = _plain(weights.head)
    for i, (layer, layer_weights) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        targets.update({f"layers.{i}.{k}": v for k, v in _layer_targets(layer, layer_weights, f"layers.{i}.", found)})
    return targets


def _plain(memory: Matrix) -> Target:
    return Target(tuple(memory.shape), memory)


def as_published(name: str, target: Target, published: PublishedFormat, found: dict[str, TensorEntry]) -> Target:
    """The target of a matrix, if it is one that the file has in fewer bits, which the presence of its scales tells."""
    stem = name.removesuffix("weight")
    if stem == name or len(target.shape) != 2 or stem + published.scale_name not in found:
        return target
    return replace(target, published=published, words={word: stem + word for word in published.tensors(*target.shape)})


def _layer_targets(
    spec: LayerSpec, weights: LayerWeights, prefix: str, found: dict[str, TensorEntry]
) -> Iterable[tuple[str, Target]]:
    yield "input_layernorm.weight", _plain(weights.input_norm)
    yield "post_attention_layernorm.weight", _plain(weights.post_norm)
    yield from _attention_targets(spec.attention.q_size, spec.attention.kv_size, weights.attention)
    if weights.dense is not None:
        yield from _glu_targets("mlp", weights.dense.gate_up, weights.dense.down)
    if spec.moe is not None and weights.moe is not None:
        yield from _moe_targets(spec.moe, weights.moe)
        yield from _expert_targets(spec.moe, weights.moe.experts, prefix, found)


def _attention_targets(q_size: int, kv_size: int, weights: AttentionWeights) -> Iterable[tuple[str, Target]]:
    rows = {"q": (0, q_size), "k": (q_size, kv_size), "v": (q_size + kv_size, kv_size)}
    for name, (first, count) in rows.items():
        yield f"self_attn.{name}_proj.weight", _plain(row_slice(weights.qkv, first, count))
        if weights.qkv_bias is not None:
            yield f"self_attn.{name}_proj.bias", _plain(weights.qkv_bias[first : first + count])
    optional = {
        "o_proj.weight": weights.output,
        "o_proj.bias": weights.output_bias,
        "q_norm.weight": weights.q_norm,
        "k_norm.weight": weights.k_norm,
        "sinks": weights.sinks,
    }
    yield from ((f"self_attn.{name}", _plain(memory)) for name, memory in optional.items() if memory is not None)


def _glu_targets(prefix: str, gate_up: Matrix, down: Matrix) -> Iterable[tuple[str, Target]]:
    size = gate_up.shape[-2] // 2
    yield f"{prefix}.gate_proj.weight", _plain(row_slice(gate_up, 0, size))
    yield f"{prefix}.up_proj.weight", _plain(row_slice(gate_up, size, size))
    yield f"{prefix}.down_proj.weight", _plain(down)


def _moe_targets(spec: MoeSpec, weights: MoeWeights) -> Iterable[tuple[str, Target]]:
    yield "mlp.router.weight", _plain(weights.router)
    if weights.router_bias is not None:
        yield "mlp.router.bias", _plain(weights.router_bias)
    if weights.selection_bias is not None:
        yield "mlp.selection_bias", _plain(weights.selection_bias)
    if weights.shared is not None:
        yield from _glu_targets("mlp.shared_expert", weights.shared.gate_up, weights.shared.down)
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
            yield from _glu_targets(f"mlp.experts.{e}", select(weights.gate_up, e), select(weights.down, e))
            if weights.gate_up_bias is not None and weights.down_bias is not None:
                gate, up = weights.gate_up_bias[e].chunk(2)
                for name, bias in (("gate", gate), ("up", up), ("down", weights.down_bias[e])):
                    yield f"mlp.experts.{e}.{name}_proj.bias", _plain(bias)


def _fused_targets(
    spec: MoeSpec, weights: ExpertWeights, found: dict[str, TensorEntry], prefix: str
) -> Iterable[tuple[str, Target]]:
    """All experts in one tensor, as [out, in] matrices or as [in, out]."""
    experts, rows, hidden = weights.gate_up.shape
    # Both cannot be square at once, so the one that is not tells the orientation of both.
    if rows != hidden:
        is_transposed = found[f"{prefix}mlp.experts.gate_up_proj"].shape == (experts, hidden, rows)
    else:
        down_entry = found.get(f"{prefix}mlp.experts.down_proj")  # its absence is for the accounting to report
        is_transposed = down_entry is not None and down_entry.shape == (experts, rows // 2, hidden)
    for name, memory in (("gate_up_proj", weights.gate_up), ("down_proj", weights.down)):
        _, outputs, inputs = memory.shape
        shape = (experts, inputs, outputs) if is_transposed else (experts, outputs, inputs)
        order = Order(is_transposed, name == "gate_up_proj" and _is_interleaved(spec))
        yield f"mlp.experts.{name}", Target(shape, memory, order)
    yield from _expert_bias_targets(spec, weights)


def _mxfp4_targets(spec: MoeSpec, weights: ExpertWeights, prefix: str) -> Iterable[tuple[str, Target]]:
    """GPT-OSS's packed experts: blocks of 32 values in 16 bytes, rows always [out, in]."""
    for name, memory in (("gate_up_proj", weights.gate_up), ("down_proj", weights.down)):
        experts, rows, columns = memory.shape
        if columns % 32:
            raise CheckpointError(f"{prefix}{name}_blocks: MXFP4 needs a multiple of 32 columns, not {columns}")
        groups, order = (experts, rows, columns // 32), Order(False, name == "gate_up_proj" and _is_interleaved(spec))
        blocks = f"mlp.experts.{name}_blocks"
        if isinstance(memory, QuantizedMatrix) and memory.format == MXFP4:  # as the file has them
            codes = memory.codes.unflatten(-1, (-1, 16))
            yield blocks, Target((*groups, 16), codes, order, (torch.uint8,))
            yield f"mlp.experts.{name}_scales", Target(groups, memory.scales, order, (torch.uint8,), is_exponents=True)
        else:
            yield blocks, Target((*groups, 16), memory, order, (torch.uint8,), f"{prefix}{name}_scales")
    yield from _expert_bias_targets(spec, weights)


def _expert_bias_targets(spec: MoeSpec, weights: ExpertWeights) -> Iterable[tuple[str, Target]]:
    if weights.gate_up_bias is not None and weights.down_bias is not None:
        order = Order(is_interleaved=_is_interleaved(spec))
        yield "mlp.experts.gate_up_proj_bias", Target(tuple(weights.gate_up_bias.shape), weights.gate_up_bias, order)
        yield "mlp.experts.down_proj_bias", _plain(weights.down_bias)


def _is_interleaved(spec: MoeSpec) -> bool:
    return spec.activation == "swiglu_clamped"
