"""The generic decoder: executes a `ModelSpec` over `ModelWeights`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tritonmoe.attention import attention_block
from tritonmoe.kv_cache import KVCache
from tritonmoe.moe import moe_block
from tritonmoe.rope import RotaryTable
from tritonmoe.spec import LayerSpec, ModelSpec
from tritonmoe.weights import LayerWeights, ModelWeights
from tritonmoe_kernels import reference


class Decoder:
    """A decoder-only Mixture-of-Experts model with all weights on one device."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights) -> None:
        self.spec = spec
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._rotary = RotaryTable({layer.attention.rope for layer in spec.layers}, self.device)

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, length: int, last_only: bool = True
    ) -> torch.Tensor:
        """Run T new tokens of each of B sequences and append their keys and values to the cache.

        token_ids, positions [B, T] int64; `cache` has B rows; `length` bounds all positions (exclusive).
        Returns float32 logits [B, V] of each row's last token, or [B, T, V] unless `last_only`.
        """
        spec = self.spec
        rotary = self._rotary.at(positions)
        residual = F.embedding(token_ids, self.weights.embedding) * spec.embedding_multiplier
        for layer_id, (layer, weights) in enumerate(zip(spec.layers, self.weights.layers, strict=True)):
            x = reference.rms_norm(residual, weights.input_norm, spec.norm_epsilon)
            out = attention_block(
                layer.attention,
                weights.attention,
                x,
                rotary[layer.attention.rope],
                positions,
                cache,
                layer_id,
                length,
                spec.norm_epsilon,
            )
            residual = residual + out * spec.residual_multiplier
            x = reference.rms_norm(residual, weights.post_norm, spec.norm_epsilon)
            residual = residual + self._feed_forward(layer, weights, x) * spec.residual_multiplier
        if last_only:
            residual = residual[:, -1]
        x = reference.rms_norm(residual, self.weights.final_norm, spec.norm_epsilon)
        return F.linear(x, self.weights.head).float() / spec.logits_divisor

    def _feed_forward(self, layer: LayerSpec, weights: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        if layer.moe is not None and weights.moe is not None:
            return moe_block(layer.moe, weights.moe, tokens).view_as(x)
        assert weights.dense is not None
        return reference.glu_mlp(tokens, weights.dense.gate_up, weights.dense.down).view_as(x)
