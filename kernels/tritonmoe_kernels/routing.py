"""What routing kernels take and give: the rule from logits to experts, and their outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

MAX_DECODE_TOKENS = 16  # the most that decode forms take, each of which reads weights again or needs a counter


@dataclass(frozen=True)
class Routing:
    """From router logits to `topk_ids` and `topk_weights`; the formulas are `reference.route_topk`'s."""

    top_k: int
    score: Literal["softmax", "sigmoid", "topk_softmax"]
    renormalize: bool = False
    renorm_epsilon: float = 0.0
    renorm_minimum: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1


class NormRouterOutput(NamedTuple):
    """Everything that `norm_router` writes."""

    residual: torch.Tensor  # [T, H]
    x: torch.Tensor  # [T, H]
    logits: torch.Tensor  # [T, E] float32
    topk_ids: torch.Tensor  # [T, K] int32
    topk_weights: torch.Tensor  # [T, K] float32

    @classmethod
    def allocate(cls, residual: torch.Tensor, num_experts: int, top_k: int) -> NormRouterOutput:
        tokens = len(residual)
        return cls(
            torch.empty_like(residual),
            torch.empty_like(residual),
            residual.new_empty(tokens, num_experts, dtype=torch.float32),
            residual.new_empty(tokens, top_k, dtype=torch.int32),
            residual.new_empty(tokens, top_k, dtype=torch.float32),
        )


class SpeculateOutput(NamedTuple):
    """What `speculate` writes."""

    logits: torch.Tensor  # [T, E] float32
    ids: torch.Tensor  # [T, M] int32, the most confident first
    q: torch.Tensor | None = None  # [T, H] the quasi-hidden state, in the residual's dtype
