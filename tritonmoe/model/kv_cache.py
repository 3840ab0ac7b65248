"""Keys and values of past positions, for a fixed number of sequences and positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tritonmoe.model.spec import ModelSpec


@dataclass(frozen=True)
class KVCache:
    """Per layer [B, kv_heads, max_length, D]; entry j of a row belongs to position j of that sequence.

    Frozen is the shape, not the content: the decoder writes into the tensors. A `rows` view shares them.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def allocate(
        cls, spec: ModelSpec, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> KVCache:
        """Uninitialised: nothing reads an entry before it was written."""
        shapes = [(batch, layer.attention.num_kv_heads, max_length, layer.attention.head_dim) for layer in spec.layers]
        return cls(
            tuple(torch.empty(shape, device=device, dtype=dtype) for shape in shapes),
            tuple(torch.empty(shape, device=device, dtype=dtype) for shape in shapes),
        )

    def rows(self, first: int, count: int) -> KVCache:
        """The view of sequences `first … first + count`."""
        return KVCache(
            tuple(k[first : first + count] for k in self.keys),
            tuple(v[first : first + count] for v in self.values),
        )

    @property
    def max_length(self) -> int:
        return self.keys[0].shape[2]


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Cache bytes that one position of one sequence takes in all layers."""
    return sum(2 * layer.attention.kv_size for layer in spec.layers) * dtype.itemsize


def attention_bytes(spec: ModelSpec, tokens: int, length: int) -> int:
    """Scratch of attention over `length` positions for a chunk of one sequence: scores and weights in float32."""
    heads = max(layer.attention.num_heads for layer in spec.layers)
    return 2 * 4 * heads * min(tokens, length) * length
