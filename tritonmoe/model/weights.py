"""The tensors of a model as the decoder uses them.

Projections that read the same input are stored as one matrix (q|k|v, gate|up), so that a kernel reads them in
one pass. What `Storage` names is stored in fewer bits than the model's type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tritonmoe.memory import empty_tensor
from tritonmoe.model.matrices import empty_matrix, parts, row_groups
from tritonmoe.model.pinned_memory import mapped_tensor
from tritonmoe.model.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec
from tritonmoe_kernels.quantized import Matrix, QuantizedMatrix, WeightFormat


@dataclass(frozen=True)
class Storage:
    """How weights are kept: the formats of those in fewer bits (None: in the model's dtype), and where the table of
    embeddings is, of which a GPU needs a row for each token."""

    experts: WeightFormat | None = None
    dense: WeightFormat | None = None  # attention's projections, dense and shared GLUs, the head
    embedding_on_host: bool = False  # in main memory that the device can read, with an untied or a quantised head

    def expert_format(self, intermediate: int) -> WeightFormat | None:
        """That of experts of this intermediate size: the same for gate_up, whose halves share no scale, and down."""
        return None if self.experts is None else row_groups(self.experts, intermediate)


PLAIN = Storage()


@dataclass
class AttentionWeights:
    qkv: Matrix  # [q_size + 2 · kv_size, H]
    output: Matrix  # [H, q_size]
    qkv_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None  # [heads] float32


@dataclass
class GluWeights:
    gate_up: Matrix  # [2I, H], gate rows first
    down: Matrix  # [H, I]


@dataclass
class ExpertWeights:
    gate_up: Matrix  # [E, 2I, H], gate rows first
    down: Matrix  # [E, H, I]
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
    head: Matrix  # [V, H]; the embedding itself where they are tied
    storage: Storage = PLAIN


class HostExperts(Protocol):
    """Where routed experts live if not on the device: an `ExpertStore`."""

    def layer_weights(self, layer: int) -> ExpertWeights: ...


class Allocator:
    """Makes the weight tensors: matrices in the model's dtype or as `storage` says, norms and routing in float32."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        store: HostExperts | None = None,
        storage: Storage = PLAIN,
    ) -> None:
        self.spec, self.device, self.dtype, self.store, self.storage = spec, device, dtype, store, storage

    def matrix(self, *shape: int) -> torch.Tensor:
        return empty_tensor(shape, self.dtype, self.device)

    def dense(self, rows: int, columns: int, *row_parts: int) -> Matrix:
        """A projection; `row_parts` are the rows of each of those that it joins."""
        form = self.storage.dense
        form = None if form is None else row_groups(form, *(row_parts or (form.group_rows,)))
        return empty_matrix((rows, columns), self.dtype, self.device, form)

    def exact(self, *shape: int) -> torch.Tensor:
        return empty_tensor(shape, torch.float32, self.device)

    def model(self) -> ModelWeights:
        spec = self.spec
        shape = spec.vocab_size, spec.hidden_size
        is_mapped = self.storage.embedding_on_host and self.device.type == "cuda"
        embedding = mapped_tensor(shape, self.dtype, self.device) if is_mapped else self.matrix(*shape)
        return ModelWeights(
            embedding=embedding,
            layers=[self.layer(i, layer) for i, layer in enumerate(spec.layers)],
            final_norm=self.exact(spec.hidden_size),
            head=embedding if spec.tied_head and self.storage.dense is None else self.dense(*shape),
            storage=self.storage,
        )

    def layer(self, layer_id: int, layer: LayerSpec) -> LayerWeights:
        hidden = self.spec.hidden_size
        return LayerWeights(
            input_norm=self.exact(hidden),
            post_norm=self.exact(hidden),
            attention=self.attention(layer.attention),
            moe=None if layer.moe is None else self.moe(layer_id, layer.moe),
            dense=self.glu(layer.dense_size) if layer.moe is None else None,
        )

    def attention(self, spec: AttentionSpec) -> AttentionWeights:
        hidden, rows = self.spec.hidden_size, spec.q_size + 2 * spec.kv_size
        q_norm = {"none": 0, "full": spec.q_size}.get(spec.qk_norm, spec.head_dim)
        k_norm = {"none": 0, "full": spec.kv_size}.get(spec.qk_norm, spec.head_dim)
        return AttentionWeights(
            qkv=self.dense(rows, hidden, spec.q_size, spec.kv_size),
            output=self.dense(hidden, spec.q_size),
            qkv_bias=self.matrix(rows) if spec.qkv_bias else None,
            output_bias=self.matrix(hidden) if spec.output_bias else None,
            q_norm=self.exact(q_norm) if q_norm else None,
            k_norm=self.exact(k_norm) if k_norm else None,
            sinks=self.exact(spec.num_heads) if spec.sinks else None,
        )

    def glu(self, size: int) -> GluWeights:
        return GluWeights(self.dense(2 * size, self.spec.hidden_size, size), self.dense(self.spec.hidden_size, size))

    def moe(self, layer_id: int, spec: MoeSpec) -> MoeWeights:
        hidden, experts = self.spec.hidden_size, spec.num_experts
        return MoeWeights(
            router=self.exact(experts, hidden),
            router_bias=self.exact(experts) if spec.router.logit_bias else None,
            selection_bias=self.exact(experts) if spec.router.selection_bias else None,
            experts=self.experts(spec) if self.store is None else self.stored_experts(layer_id, spec, self.store),
            shared=self.glu(spec.shared_size) if spec.shared_size else None,
            shared_gate=self.matrix(1, hidden) if spec.shared_gate else None,
        )

    def experts(self, spec: MoeSpec) -> ExpertWeights:
        hidden, experts, size = self.spec.hidden_size, spec.num_experts, spec.intermediate_size
        form = self.storage.expert_format(size)
        return ExpertWeights(
            gate_up=empty_matrix((experts, 2 * size, hidden), self.dtype, self.device, form),
            down=empty_matrix((experts, hidden, size), self.dtype, self.device, form),
            gate_up_bias=self.matrix(experts, 2 * size) if spec.expert_bias else None,
            down_bias=self.matrix(experts, hidden) if spec.expert_bias else None,
        )

    def stored_experts(self, layer_id: int, spec: MoeSpec, store: HostExperts) -> ExpertWeights:
        weights = store.layer_weights(layer_id)
        shape = (spec.num_experts, 2 * spec.intermediate_size, self.spec.hidden_size)
        assert weights.gate_up.shape == shape, "the store was made for another model"
        if isinstance(weights.gate_up, QuantizedMatrix):
            kept: object = weights.gate_up.format
        else:
            kept = weights.gate_up.dtype
        wanted = self.storage.expert_format(spec.intermediate_size) or self.dtype
        assert kept == wanted, f"the store was made for another dtype: {kept}, not {wanted}"
        assert (weights.gate_up_bias is not None) == spec.expert_bias, "the store was made for another model"
        return weights


def allocate(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    store: HostExperts | None = None,
    storage: Storage = PLAIN,
) -> ModelWeights:
    """Uninitialised weights of the whole model on `device`; the loader fills every element.

    With a `store` the routed experts of each layer are its views, in host memory, and all else is on `device`.
    """
    return Allocator(spec, device, dtype, store, storage).model()


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, with_experts: bool = True, storage: Storage = PLAIN) -> int:
    """Bytes that `allocate` takes on the device, by running it on the meta device.

    Without the routed experts: what is left there when a store holds those.
    """
    weights = allocate(spec, torch.device("meta"), dtype, storage=storage)
    sizes = {id(tensor): tensor.nbytes for tensor in iter_tensors(weights)}
    if storage.embedding_on_host:
        del sizes[id(weights.embedding)]
    if not with_experts:
        for tensor in iter_tensors([layer.moe.experts for layer in weights.layers if layer.moe is not None]):
            del sizes[id(tensor)]
    return sum(sizes.values())


def iter_tensors(node: object) -> list[torch.Tensor]:
    """Every tensor in a tree of weight dataclasses and lists, in field order; of a quantised matrix, its parts."""
    if isinstance(node, Matrix):
        return parts(node)
    children = node if isinstance(node, list) else vars(node).values() if hasattr(node, "__dict__") else ()
    return [tensor for child in children for tensor in iter_tensors(child)]
