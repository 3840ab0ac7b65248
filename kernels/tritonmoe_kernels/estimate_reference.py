"""The estimator of the next layer's router logits (arXiv 2603.19289), in torch: what `estimate` takes and computes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

LAYER_NORM_EPSILON = 1e-5


class EstimatorWeights(NamedTuple):
    """One network for all layers, D wide inside; only `layer` differs from layer to layer. All of one dtype."""

    into: torch.Tensor  # [D, H]
    layer: torch.Tensor  # [D], the learned vector of the layer that is foretold
    up: torch.Tensor  # [N, D]
    down: torch.Tensor  # [D, N]
    norm_weight: torch.Tensor  # [D]
    norm_bias: torch.Tensor  # [D]
    head: torch.Tensor  # [E, D]


def estimate_ref(
    q: torch.Tensor,
    weights: EstimatorWeights,
    base: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`estimate` in torch, for any T and differentiable: rounded to q's dtype between its products, as the kernel is.

    `weights.layer` may be [T, D], a layer for each token; `out` is not used.
    """
    hidden = F.linear(q, weights.into) + weights.layer
    inner = hidden + F.linear(F.silu(F.linear(hidden, weights.up)), weights.down)
    normed = F.layer_norm(inner, inner.shape[-1:], weights.norm_weight, weights.norm_bias, LAYER_NORM_EPSILON)
    logits = F.linear(normed, weights.head).float()
    return logits if base is None else logits + base
