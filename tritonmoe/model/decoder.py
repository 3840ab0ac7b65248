"""The generic decoder: executes a `ModelSpec` over `ModelWeights`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tritonmoe.model.attention import Tokens, attention_block
from tritonmoe.model.kv_cache import KVCache
from tritonmoe.model.moe import Experts, Hooks
from tritonmoe.model.operations import Operations, operations, product, streams
from tritonmoe.model.rope import inverse_frequencies
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ModelWeights


class Decoder:
    """A decoder-only Mixture-of-Experts model."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        ops: Operations | None = None,
        experts: Experts | None = None,
    ) -> None:
        """`ops` and `experts` are the kernels of the weights' device and experts on that device unless given."""
        self.spec = spec
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.operations = operations(self.device) if ops is None else ops
        self.experts = Experts(self.operations, spec, weights) if experts is None else experts
        ropes = {layer.attention.rope for layer in spec.layers}
        self._inv_freq = {rope: inverse_frequencies(rope).to(self.device) for rope in ropes}

    @property
    def hooks(self) -> Hooks:
        return self.experts.hooks

    @torch.inference_mode()
    def prefill(self, token_ids: torch.Tensor, start: int, cache: KVCache, last_only: bool = True) -> torch.Tensor:
        """Run T tokens of each of B sequences, at positions start … start + T, and append them to the cache.

        token_ids [B, T] int64; `cache` has B rows. Returns float32 logits [B, V] of each row's last token, or
        [B, T, V] unless `last_only`.
        """
        batch, count = token_ids.shape
        residual = self.prefill_residual(token_ids, start, cache)
        if last_only:
            return self.logits(residual[count - 1 :: count])
        return self.logits(residual).unflatten(0, (batch, count))

    @torch.inference_mode()
    def prefill_residual(self, token_ids: torch.Tensor, start: int, cache: KVCache) -> torch.Tensor:
        """The residual [B · T, H] that `prefill` makes logits of, for whoever needs them for a few tokens at a time."""
        batch, count = token_ids.shape
        end = start + count
        positions = torch.arange(start, end, device=self.device).repeat(batch)
        return self._layers(token_ids.flatten(), Tokens(positions, positions + 1, batch, start, end), cache)

    @torch.inference_mode()
    def decode(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, length: int | None = None
    ) -> torch.Tensor:
        """Run one token of each of B sequences: token_ids, positions [B] int64 -> float32 logits [B, V].

        Nothing here depends on the values of the tensors, so the step can be captured once and replayed. A position
        outside the cache is not stored. `length` may bound all positions (exclusive) where the host knows them: a
        reference then reads that much of the cache instead of all.
        """
        tokens = Tokens(positions, positions + 1, len(token_ids), None, length)
        return self.logits(self._layers(token_ids, tokens, cache))

    def _layers(self, token_ids: torch.Tensor, tokens: Tokens, cache: KVCache) -> torch.Tensor:
        """token_ids [B · T] -> residual [B · T, H] after the last layer."""
        spec, ops = self.spec, self.operations
        residual = F.embedding(token_ids, self.weights.embedding)
        if spec.embedding_multiplier != 1.0:
            residual = residual * spec.embedding_multiplier
        for layer_id, (layer, weights) in enumerate(zip(spec.layers, self.weights.layers, strict=True)):
            delta = attention_block(
                ops,
                layer.attention,
                weights.attention,
                residual,
                weights.input_norm,
                spec.norm_epsilon,
                self._inv_freq[layer.attention.rope],
                tokens,
                cache.keys[layer_id],
                cache.values[layer_id],
            )
            residual = self.experts.layer(layer_id, residual, delta, is_prefill=tokens.start is not None)
        return residual

    @torch.inference_mode()
    def logits(self, residual: torch.Tensor) -> torch.Tensor:
        """residual [T, H] -> float32 logits [T, V]."""
        head, norm, epsilon = self.weights.head, self.weights.final_norm, self.spec.norm_epsilon
        residual = residual.contiguous()
        if streams(len(residual), head):
            out = torch.empty(len(residual), len(head), dtype=torch.float32, device=self.device)
            logits = self.operations.linear(residual, head, None, norm, epsilon, out=out)
        else:
            _, x = self.operations.add_rms_norm(residual, None, norm, epsilon)
            logits = product(x, head, to_float=True)  # not rounded to 16 bits on the way
        return logits if self.spec.logits_divisor == 1.0 else logits / self.spec.logits_divisor
