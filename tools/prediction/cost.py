"""What it would take to train an estimator for a large model: arithmetic from sizes and measured rates."""

from __future__ import annotations

from typing import Any

import torch

from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import weight_bytes

TRAINING_FLOPS = 6  # for a weight and a state: forward, and twice as much backward
FORWARD_FLOPS = 2


def training_cost(
    spec: ModelSpec,
    width: int,
    inner: int,
    tokens: int,
    passes: int,
    chunk: int,
    flop_per_s: float,
    link_bytes_per_s: float,
    share: float,
) -> dict[str, Any]:
    """Seconds of training and of running the model over `tokens`, on a device that reaches `share` of `flop_per_s`.

    The model reads `chunk` tokens a step. With its experts in host memory each step fetches all of them over the link.
    """
    experts = next(iter(spec.moe_layers.values())).num_experts
    layers = len(spec.moe_layers) - 1
    matrices = width * (spec.hidden_size + 2 * inner + experts)
    total, without = weight_bytes(spec, torch.bfloat16), weight_bytes(spec, torch.bfloat16, with_experts=False)
    active = without + sum(
        (total - without) / len(spec.moe_layers) * moe.num_experts_per_tok / moe.num_experts
        for moe in spec.moe_layers.values()
    )
    embedding = spec.vocab_size * spec.hidden_size * torch.bfloat16.itemsize * (1 if spec.tied_head else 2)
    train = TRAINING_FLOPS * matrices * layers * tokens * passes
    forward = FORWARD_FLOPS * (active - embedding) / torch.bfloat16.itemsize * tokens
    rate = share * flop_per_s
    return {
        "parameters": matrices + layers * width + 2 * width,
        "tokens": tokens,
        "passes": passes,
        "training_flops": train,
        "forward_flops": forward,
        "share_of_peak": share,
        "training_s": train / rate,
        "forward_s": forward / rate,
        "link_s": -(-tokens // chunk) * (total - without) / link_bytes_per_s,
    }
