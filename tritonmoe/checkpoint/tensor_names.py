"""Names of tensors on disk: published models spell the same tensor in many ways, inside there is one.

Renaming looks at the name alone, never at the architecture, because the same model is published under both its
original names and those that transformers 5 writes.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# Spellings of the same tensor, in the order they are applied; the right-hand side is what `targets` uses.
RENAMES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(?:model\.language_model\.model\.|model\.language_model\.|language_model\.model\.|model\.)", ""),
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.mlp\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.mlp\.output_linear\.weight$", ".mlp.experts.down_proj"),
        (r"\.experts\.(\d+)\.w1\.", r".experts.\1.gate_proj."),
        (r"\.experts\.(\d+)\.w3\.", r".experts.\1.up_proj."),
        (r"\.experts\.(\d+)\.w2\.", r".experts.\1.down_proj."),
        (r"\.mlp\.(?:shared_experts|shared_mlp)\.", ".mlp.shared_expert."),
        (r"\.mlp\.(?:gate\.)?moe_statics\.e_score_correction_bias$", ".mlp.selection_bias"),
        (r"\.mlp\.(?:gate\.)?e_score_correction_bias$", ".mlp.selection_bias"),
        (r"\.mlp\.expert_bias$", ".mlp.selection_bias"),
        (r"\.mlp\.(?:gate\.wg|gate|router\.gate|router\.layer)\.weight$", ".mlp.router.weight"),
        (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
        (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
    )
)
# Tensors of parts that are not run: next-token-prediction heads, vision and audio towers, recomputed buffers.
SKIPPED = re.compile(
    r"^(?:mtp(?:_\w+)?|visual|vision_tower|multi_modal_projector|audio_tower)\.|\.rotary_emb\.inv_freq$"
)
LAYER = re.compile(r"^layers\.(\d+)\.")


def canonical_name(name: str) -> str:
    """The one spelling under which `targets` knows the tensor that a file calls `name`."""
    for pattern, replacement in RENAMES:
        name = pattern.sub(replacement, name)
    return name


def is_skippable(canonical: str, num_layers: int) -> bool:
    """Whether the tensor is known not to belong to the decoder, or is of a layer past the last."""
    return bool(SKIPPED.search(canonical)) or layer_of(canonical) >= num_layers


def layer_of(canonical: str) -> int:
    """The tensor's layer; -1 where it belongs to none."""
    layer = LAYER.match(canonical)
    return -1 if layer is None else int(layer[1])


def idle_layers(names: Collection[str], num_layers: int) -> list[int]:
    """Layers past the last that do not predict further tokens, as those do that join two states (`eh_proj`)."""
    beyond = sorted({layer_of(name) for name in names if layer_of(name) >= num_layers})
    return [layer for layer in beyond if f"layers.{layer}.eh_proj.weight" not in names]
