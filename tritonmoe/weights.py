"""The tensors of a model as the decoder uses them.

Projections that read the same input are stored as one matrix (q|k|v, gate|up), so that a kernel reads them in
one pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tritonmoe.memory import empty_tensor
from tritonmoe.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec


@dataclass
class AttentionWeights:
    qkv: torch.Tensor  # [q_size + 2 · kv_size, H]
    output: torch.Tensor  # [H, q_size]
    qkv_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None  # [heads] float32


@dataclass
class GluWeights:
    gate_up: torch.Tensor  # [2I, H], gate rows first
    down: torch.Tensor  # [H, I]


@dataclass
class ExpertWeights:
    gate_up: torch.Tensor  # [E, 2I, H], gate rows first
    down: torch.Tensor  # [E, H, I]
    gate_up_bias: torch.Tensor | None  # [E, 2I]
    down_bias: torch.Tensor | None  # [E, H]


@dataclass
class MoeWeights:
    router: torch.Tensor  # [E, H] float32
    router_bias: torch.Tensor | None  # [E] float32
    selection_bias: torch.Tensor | None  # [E] float32
    experts: ExpertWeights
    shared: GluWeights | None
    shared_gate: torch.Tensor | None  # [1, H]


@dataclass
class LayerWeights:
    input_norm: torch.Tensor  # [H] float32
    post_norm: torch.Tensor  # [H] float32
    attention: AttentionWeights
    moe: MoeWeights | None
    dense: GluWeights | None


@dataclass
class ModelWeights:
    embedding: torch.Tensor  # [V, H]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [H] float32
    head: torch.Tensor  # [V, H]; the embedding itself where they are tied


class Allocator:
    """Makes the weight tensors: matrices in the model's dtype, norms and routing in float32."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.spec, self.device, self.dtype = spec, device, dtype

    def matrix(self, *shape: int) -> torch.Tensor:
        return empty_tensor(shape, self.dtype, self.device)

    def exact(self, *shape: int) -> torch.Tensor:
        return empty_tensor(shape, torch.float32, self.device)

    def model(self) -> ModelWeights:
        spec = self.spec
        embedding = self.matrix(spec.vocab_size, spec.hidden_size)
        return ModelWeights(
            embedding=embedding,
            layers=[self.layer(layer) for layer in spec.layers],
            final_norm=self.exact(spec.hidden_size),
            head=embedding if spec.tied_head else self.matrix(spec.vocab_size, spec.hidden_size),
        )

    def layer(self, layer: LayerSpec) -> LayerWeights:
        hidden = self.spec.hidden_size
        return LayerWeights(
            input_norm=self.exact(hidden),
            post_norm=self.exact(hidden),
            attention=self.attention(layer.attention),
            moe=None if layer.moe is None else self.moe(layer.moe),
            dense=self.glu(layer.dense_size) if layer.moe is None else None,
        )

    def attention(self, spec: AttentionSpec) -> AttentionWeights:
        hidden, rows = self.spec.hidden_size, spec.q_size + 2 * spec.kv_size
        q_norm = {"none": 0, "full": spec.q_size}.get(spec.qk_norm, spec.head_dim)
        k_norm = {"none": 0, "full": spec.kv_size}.get(spec.qk_norm, spec.head_dim)
        return AttentionWeights(
            qkv=self.matrix(rows, hidden),
            output=self.matrix(hidden, spec.q_size),
            qkv_bias=self.matrix(rows) if spec.qkv_bias else None,
            output_bias=self.matrix(hidden) if spec.output_bias else None,
            q_norm=self.exact(q_norm) if q_norm else None,
            k_norm=self.exact(k_norm) if k_norm else None,
            sinks=self.exact(spec.num_heads) if spec.sinks else None,
        )

    def glu(self, size: int) -> GluWeights:
        return GluWeights(self.matrix(2 * size, self.spec.hidden_size), self.matrix(self.spec.hidden_size, size))

    def moe(self, spec: MoeSpec) -> MoeWeights:
        hidden, experts, size = self.spec.hidden_size, spec.num_experts, spec.intermediate_size
        return MoeWeights(
            router=self.exact(experts, hidden),
            router_bias=self.exact(experts) if spec.router.logit_bias else None,
            selection_bias=self.exact(experts) if spec.router.selection_bias else None,
            experts=ExpertWeights(
                gate_up=self.matrix(experts, 2 * size, hidden),
                down=self.matrix(experts, hidden, size),
                gate_up_bias=self.matrix(experts, 2 * size) if spec.expert_bias else None,
                down_bias=self.matrix(experts, hidden) if spec.expert_bias else None,
            ),
            shared=self.glu(spec.shared_size) if spec.shared_size else None,
            shared_gate=self.matrix(1, hidden) if spec.shared_gate else None,
        )


def allocate(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Uninitialised weights of the whole model on `device`; the loader fills every element."""
    return Allocator(spec, device, dtype).model()


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes that `allocate` takes, by running it on the meta device."""
    weights = allocate(spec, torch.device("meta"), dtype)
    seen = {id(tensor): tensor.nbytes for tensor in iter_tensors(weights)}
    return sum(seen.values())


def iter_tensors(node: object) -> list[torch.Tensor]:
    """Every tensor in a tree of weight dataclasses and lists, in field order."""
    if isinstance(node, torch.Tensor):
        return [node]
    children = node if isinstance(node, list) else vars(node).values() if hasattr(node, "__dict__") else ()
    return [tensor for child in children for tensor in iter_tensors(child)]
