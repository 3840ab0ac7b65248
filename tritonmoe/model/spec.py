"""The declarative description of a model: what varies between architectures, as frozen data.

`architectures.py` fills it from a `config.json`; `weights.py` derives every tensor shape from it; `decoder.py`
executes it. Nothing below this file knows the name of an architecture.

Layer kinds that are not implemented yet (gated delta net, latent attention, short convolution, parallel dense
branches) have their place here: a new `AttentionKind`, and fields beside `moe` and `dense_size` of `LayerSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionKind = Literal["gqa"]
QKNorm = Literal["none", "head", "full", "head_after_rope"]
RouterScore = Literal["softmax", "sigmoid", "topk_softmax"]
Activation = Literal["silu", "swiglu_clamped"]


@dataclass(frozen=True)
class YarnSpec:
    """YaRN context extension (arXiv 2309.00071): per-frequency blend of interpolation and extrapolation."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float  # multiplies cos and sin


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of the first `dim` values of each head."""

    theta: float
    dim: int
    interleaved: bool = False  # pairs (0,1),(2,3)… instead of (0,dim/2),(1,dim/2+1)…
    linear_factor: float = 1.0  # positions are divided by it
    yarn: YarnSpec | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float  # multiplies q·k
    kind: AttentionKind = "gqa"
    qk_norm: QKNorm = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    window: int | None = None  # key j is visible to query i iff i - window < j <= i
    sinks: bool = False  # one learned logit per head, in the softmax denominator only
    clip_qkv: float | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class RouterSpec:
    """From router logits to `topk_ids` and `topk_weights`; the formula is in `reference.route_topk`."""

    score: RouterScore
    renormalize: bool
    logit_bias: bool = False
    selection_bias: bool = False  # added to the scores for the choice only, never to the weights
    renorm_epsilon: float = 0.0  # added to the sum
    renorm_minimum: float = 0.0  # the sum is at least this
    scale: float = 1.0
    num_groups: int = 1  # the best `topk_groups` groups, by the sum of their two best scores, stay eligible
    topk_groups: int = 1


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts of one layer, and the shared expert beside them."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    router: RouterSpec
    activation: Activation = "silu"
    expert_bias: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0
    shared_size: int = 0  # intermediate size of the shared expert; 0: none
    shared_gate: bool = False  # the shared expert's output is multiplied by sigmoid(x · gate)


@dataclass(frozen=True)
class LayerSpec:
    """Attention, then either routed experts or a dense SiLU-GLU of width `dense_size`."""

    attention: AttentionSpec
    moe: MoeSpec | None
    dense_size: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only Mixture-of-Experts language model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_epsilon: float
    tied_head: bool
    max_position: int
    checkpoint_dtype: str | None  # as config.json says: "bfloat16", …
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0

    @property
    def moe_layers(self) -> dict[int, MoeSpec]:
        """The layers with routed experts, in their order, by position in `layers`."""
        return {i: layer.moe for i, layer in enumerate(self.layers) if layer.moe is not None}
