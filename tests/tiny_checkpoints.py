"""Tiny random checkpoints of every supported architecture, saved by transformers itself (the oracle).

Norms, biases, sinks and correction biases are randomised: with their initial ones and zeros a decoder that
forgot them would pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SHARED = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}


@dataclass(frozen=True)
class Tiny:
    """One oracle model: a transformers `model_type` and the config keys that differ from `SHARED`."""

    model_type: str
    keys: dict[str, Any] = field(default_factory=dict)


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}
QWEN3 = {**EXPERTS, "head_dim": 16, "intermediate_size": 48, "norm_topk_prob": True}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

TINY: dict[str, Tiny] = {
    "qwen3_moe": Tiny("qwen3_moe", {**QWEN3, "mlp_only_layers": [1]}),
    "qwen3_moe-yarn": Tiny("qwen3_moe", {**QWEN3, "rope_parameters": YARN}),
    "qwen3_moe-tied": Tiny("qwen3_moe", {**QWEN3, "tie_word_embeddings": True, "norm_topk_prob": False}),
    "qwen3_moe-bias": Tiny("qwen3_moe", {**QWEN3, "attention_bias": True}),
    "qwen3_moe-window": Tiny("qwen3_moe", {**QWEN3, "use_sliding_window": True, "sliding_window": 8}),
    "gpt_oss": Tiny("gpt_oss", {**LOCAL_EXPERTS, "head_dim": 16, "intermediate_size": 32, "sliding_window": 8}),
    "mixtral": Tiny("mixtral", LOCAL_EXPERTS),
    "mixtral-window": Tiny("mixtral", {**LOCAL_EXPERTS, "sliding_window": 8}),
    "olmoe": Tiny(
        "olmoe",
        {
            "num_key_value_heads": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 16,
            "clip_qkv": 1.0,
        },
    ),
    "qwen2_moe": Tiny(
        "qwen2_moe",
        {**EXPERTS, "intermediate_size": 48, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
    ),
    "glm4_moe": Tiny(
        "glm4_moe",
        {
            "head_dim": 16,
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "granitemoe": Tiny(
        "granitemoe",
        {
            **LOCAL_EXPERTS,
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "logits_scaling": 6.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    "ernie4_5_moe": Tiny(
        "ernie4_5_moe",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
        },
    ),
    "minimax_m2": Tiny(
        "minimax_m2",
        {
            **LOCAL_EXPERTS,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "mellum": Tiny(
        "mellum",
        {
            **EXPERTS,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": MIXED_LAYERS,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "intermediate_size": 48,
        },
    ),
    "hy_v3": Tiny("hy_v3", {**EXPERTS, "head_dim": 16, "intermediate_size": 48}),
    "hunyuan_v1_moe": Tiny(
        "hunyuan_v1_moe", {"head_dim": 16, "intermediate_size": 16, "num_experts": 8, "moe_topk": 2}
    ),
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter, and the router's bias buffers, with seeded noise of a useful size."""
    generator = torch.Generator().manual_seed(seed)
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if "bias" in name]
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *buffers]:
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1.0 + 0.2 * noise if "norm" in name else 0.25 * noise)


def build(name: str, seed: int = 0) -> Any:
    """The oracle: a transformers model of `TINY[name]` in float32 with randomised weights, eager attention."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    tiny = TINY[name]
    if tiny.model_type not in CONFIG_MAPPING:
        return None
    config = CONFIG_MAPPING[tiny.model_type](**{**SHARED, **tiny.keys})
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    randomise(model, seed)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """`save_pretrained` without its progress bar; returns the folder."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **options)
    return folder
