"""From `config.json` to a `ModelSpec`: the one place that knows architectures by name.

An `Architecture` row holds what a `model_type` implies without saying it; every number comes from the file.
Both the spellings of published files and those that transformers 5 writes are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tritonmoe.checkpoint.config_reader import MAX_INTEGER, MISSING, ConfigReader, read_json
from tritonmoe.checkpoint.published_formats import PublishedFormat, parse_quantization
from tritonmoe.errors import ConfigError
from tritonmoe.model.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    QKNorm,
    RopeSpec,
    RouterScore,
    RouterSpec,
    YarnSpec,
)

# Some hundred times what any published model has: a loop over them still ends at once.
MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 16

# Which layers slide: as `layer_types` says; every layer once `sliding_window` is set; or only with
# `use_sliding_window`, and then every layer (or, where `layer_types` is obligatory, those it names).
Windows = Literal["layer_types", "all", "switchable", "switchable_types"]


@dataclass(frozen=True)
class Architecture:
    """What a `model_type` implies; the defaults are those of most architectures."""

    score: RouterScore = "softmax"
    renormalize: bool | None = None  # None: `norm_topk_prob` decides, and is `renormalize_default` if absent
    renormalize_default: bool = False
    selection_bias: bool = False
    logit_bias: bool = False
    renorm_epsilon: float = 0.0
    renorm_minimum: float = 0.0
    qk_norm: QKNorm = "none"
    qk_norm_key: str | None = None  # the boolean that switches `qk_norm` on
    qkv_bias_key: str | None = "attention_bias"
    qkv_bias_default: bool = False
    output_bias: bool = True  # o_proj has a bias where q, k and v have one
    expert_size_key: str = "moe_intermediate_size"
    activation: Activation = "silu"
    expert_bias: bool = False
    shared_size_key: str | None = None  # width of the shared expert, given directly …
    shared_count_key: str | None = None  # … or as a number of experts of the routed ones' width
    shared_count_default: int = 1
    shared_gate: bool = False
    windows: Windows = "layer_types"
    sinks: bool = False
    first_dense: int = 0  # dense layers at the start when the file does not say
    rope_theta: float | None = 10000.0  # None: the file must say
    rope_interleaved: bool = False
    rotary_factor: float = 1.0
    default_yarn: bool = False  # rope_parameters absent means GPT-OSS's published YaRN
    tied_default: bool = False
    norm_epsilon: float = 1e-6
    head_dim: int | None = None  # None: hidden size over heads
    kv_heads_optional: bool = False  # absent means as many as heads
    attention_scale: float | None = None  # None: head_dim ** -0.5
    router_scale: float = 1.0
    first_sparse: int = 0  # `moe_layer_start_index` when the file does not say


ARCHITECTURES: dict[str, Architecture] = {
    "qwen3_moe": Architecture(qk_norm="head", windows="switchable"),
    "qwen2_moe": Architecture(
        qkv_bias_key="qkv_bias",
        qkv_bias_default=True,
        output_bias=False,
        windows="switchable_types",
        shared_size_key="shared_expert_intermediate_size",
        shared_gate=True,
    ),
    "mixtral": Architecture(
        renormalize=True,
        qkv_bias_key=None,
        expert_size_key="intermediate_size",
        windows="all",
        rope_theta=1e6,
        norm_epsilon=1e-5,
    ),
    "olmoe": Architecture(
        qk_norm="full", expert_size_key="intermediate_size", norm_epsilon=1e-5, kv_heads_optional=True
    ),
    "gpt_oss": Architecture(
        score="topk_softmax",
        renormalize=True,
        logit_bias=True,
        qkv_bias_default=True,
        sinks=True,
        expert_size_key="intermediate_size",
        activation="swiglu_clamped",
        expert_bias=True,
        rope_theta=150000.0,
        default_yarn=True,
        norm_epsilon=1e-5,
        head_dim=64,
    ),
    "glm4_moe": Architecture(
        score="sigmoid",
        renormalize_default=True,
        selection_bias=True,
        renorm_epsilon=1e-20,
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        output_bias=False,
        rotary_factor=0.5,
        first_dense=1,
        shared_count_key="n_shared_experts",
        norm_epsilon=1e-5,
    ),
    "granitemoe": Architecture(
        score="topk_softmax",
        renormalize=True,
        expert_size_key="intermediate_size",
        kv_heads_optional=True,
        attention_scale=1.0,
    ),
    "ernie4_5_moe": Architecture(
        renormalize=True,
        selection_bias=True,
        renorm_minimum=1e-12,
        qkv_bias_key=None,
        rope_interleaved=True,
        rope_theta=500000.0,
        shared_count_key="moe_num_shared_experts",
        shared_count_default=2,
        tied_default=True,
        norm_epsilon=1e-5,
        first_sparse=1,
    ),
    "minimax_m2": Architecture(
        score="sigmoid",
        renormalize=True,
        selection_bias=True,
        qk_norm="full",
        qkv_bias_key=None,
        expert_size_key="intermediate_size",
        rope_theta=5e6,
        head_dim=128,
    ),
    "mellum": Architecture(renormalize_default=True, qk_norm="head", rope_theta=None, head_dim=128),
    "hy_v3": Architecture(
        score="sigmoid",
        renormalize=True,
        selection_bias=True,
        renorm_epsilon=1e-20,
        qk_norm="head",
        shared_count_key="num_shared_experts",
        first_dense=1,
        rope_theta=11158840.0,
        norm_epsilon=1e-5,
        head_dim=128,
        router_scale=2.826,
    ),
    "hunyuan_v1_moe": Architecture(
        renormalize=True,
        qk_norm="head_after_rope",
        expert_size_key="intermediate_size",
        shared_size_key="intermediate_size",
        norm_epsilon=1e-5,
        kv_heads_optional=True,
    ),
}

# Known architectures that need layers this decoder does not have yet.
NEEDS: dict[str, str] = {
    "qwen3_next": "gated delta net attention",
    "qwen3_5_moe": "gated delta net attention",
    "qwen3_5_moe_text": "gated delta net attention",
    "deepseek_v2": "multi-head latent attention",
    "deepseek_v3": "multi-head latent attention",
    "glm4_moe_lite": "multi-head latent attention",
    "kimi_k2": "multi-head latent attention",
    "lfm2_moe": "short convolution layers",
    "gemma4": "parallel dense and expert branches",
    "gemma4_text": "parallel dense and expert branches",
    "nemotron_h": "Mamba-2 layers",
    "llama4": "routing weights on the expert input and chunked attention",
    "llama4_text": "routing weights on the expert input and chunked attention",
    "phimoe": "LayerNorm and the sparse-mixer router",
}

# Keys with one supported meaning, in whatever file they occur.
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_bias": (False,),
    "mlp_bias": (False,),
    "use_mla": (False,),
    "use_cla": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "add_classification_head": (False,),
    "group_limited_greedy": (False,),
    "norm_type": ("rms",),
    "use_rotary_pos_emb": (True,),
    "use_mixed_mlp_moe": (True,),
    "attn_type_list": (1,),
    "qk_norm_type": ("per_layer",),
    "use_routing_bias": (True,),
    "topk_method": ("noaux_tc", "greedy"),
    "pruned_heads": ({},),
}


def load_spec(folder: Path) -> ModelSpec:
    """The spec of the model in `folder`; ConfigError in one line for anything that cannot be run exactly."""
    return parse_config(read_json(folder / "config.json"), str(folder / "config.json"))


def parse_config(values: dict[str, Any], where: str = "config.json") -> ModelSpec:
    """Build the spec from the contents of a config.json. Keys that nothing read are logged as a warning."""
    top = ConfigReader(values, where)
    reader = top.child("text_config") if top.raw("text_config") is not None else top
    model_type = reader.raw("model_type")
    architecture = _architecture(model_type, where)
    for name, allowed in REQUIRED_VALUES.items():
        reader.require(name, allowed)
    quantization = _quantization(top)
    reader.raw("quantization_config")
    parse_quantization(quantization)
    quantization.report_unread()
    num_layers = reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
    hidden_size = reader.integer("hidden_size")
    attention = _attention_specs(reader, architecture, num_layers, hidden_size)
    moe = _moe_spec(reader, architecture)
    sparse = _sparse_layers(reader, architecture, num_layers)
    dense_size = 0 if all(sparse) else reader.integer("intermediate_size")
    reader.raw("intermediate_size")  # unused where every layer is sparse
    spec = ModelSpec(
        model_type=str(model_type),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(
            LayerSpec(attention[i], moe if sparse[i] else None, 0 if sparse[i] else dense_size)
            for i in range(num_layers)
        ),
        norm_epsilon=reader.number("rms_norm_eps", "layer_norm_eps", "norm_eps", default=architecture.norm_epsilon),
        tied_head=reader.boolean("tie_word_embeddings", default=architecture.tied_default),
        max_position=max([reader.integer("max_position_embeddings"), *_yarn_limits(attention)]),
        checkpoint_dtype=reader.raw("dtype", "torch_dtype"),
        embedding_multiplier=reader.number("embedding_multiplier", default=1.0),
        residual_multiplier=reader.number("residual_multiplier", default=1.0),
        logits_divisor=reader.number("logits_scaling", default=1.0),
    )
    reader.report_unread()
    return spec


def _architecture(model_type: Any, where: str) -> Architecture:
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    supported = ", ".join(sorted(ARCHITECTURES))
    if model_type is None:
        raise ConfigError(f"{where}: model_type is missing; supported: {supported}")
    need = NEEDS.get(model_type) if isinstance(model_type, str) else None
    reason = f"needs {need}, which is not supported yet" if need else "is not supported"
    raise ConfigError(f"{where}: model_type {model_type!r} {reason}; supported: {supported}")


def _yarn_limits(attention: list[AttentionSpec]) -> list[int]:
    """How far YaRN reaches; recipes add it without raising max_position_embeddings."""
    yarns = [spec.rope.yarn for spec in attention if spec.rope.yarn is not None]
    return [int(yarn.original_max_position * yarn.factor) for yarn in yarns]


def load_quantization(folder: Path) -> PublishedFormat | None:
    """How the checkpoint in `folder` stores the matrices that it has in fewer bits."""
    where = str(folder / "config.json")
    return parse_quantization(_quantization(ConfigReader(read_json(folder / "config.json"), where)))


def _quantization(top: ConfigReader) -> ConfigReader:
    """What says how the weights are quantised, for the whole model or beside the description of its decoder."""
    if top.raw("quantization_config"):
        return top.child("quantization_config")
    return top.child("text_config").child("quantization_config")


def _sparse_layers(reader: ConfigReader, architecture: Architecture, num_layers: int) -> list[bool]:
    """Which layers hold routed experts: each convention in use, and all of those a file states must hold."""
    types = reader.strings("mlp_layer_types", length=num_layers)
    if types is not None:
        unknown = set(types) - {"sparse", "dense"}
        if unknown:
            raise ConfigError(f"{reader.where}: mlp_layer_types entry {unknown.pop()!r} is not supported")
        sparse = [kind == "sparse" for kind in types]
        reader.raw("first_k_dense_replace")
    else:
        first = reader.integer("first_k_dense_replace", default=architecture.first_dense, minimum=0)
        sparse = [i >= first for i in range(num_layers)]
    step = reader.integer("decoder_sparse_step", default=1)
    start = reader.integer("moe_layer_start_index", default=architecture.first_sparse, minimum=0)
    end = reader.integer("moe_layer_end_index", default=-1, minimum=-1)
    interval = reader.integer("moe_layer_interval", default=1)
    last = num_layers - 1 if end == -1 else end
    listed = reader.raw("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(i, int) for i in listed):
        raise ConfigError(f"{reader.where}: mlp_only_layers must be a list of layer numbers")
    dense = frozenset(listed)
    sparse = [
        is_sparse and i not in dense and (i + 1) % step == 0 and start <= i <= last and (i + 1) % interval == 0
        for i, is_sparse in enumerate(sparse)
    ]
    if not any(sparse):
        raise ConfigError(f"{reader.where}: no layer has routed experts, so this is not a Mixture-of-Experts model")
    return sparse


def _moe_spec(reader: ConfigReader, architecture: Architecture) -> MoeSpec:
    num_experts = reader.uniform(
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", maximum=MAX_EXPERTS
    )
    top_k = reader.uniform(
        "num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token"
    )
    if top_k > num_experts:
        raise ConfigError(f"{reader.where}: {top_k} experts per token of only {num_experts} experts")
    size = reader.uniform(architecture.expert_size_key)
    if architecture.expert_size_key != "moe_intermediate_size":
        reader.require("moe_intermediate_size", (size,))  # some files repeat it
    clamped = architecture.activation == "swiglu_clamped"
    return MoeSpec(
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        intermediate_size=size,
        router=_router_spec(reader, architecture, num_experts),
        activation=architecture.activation,
        expert_bias=architecture.expert_bias,
        swiglu_limit=reader.number("swiglu_limit", default=7.0) if clamped else 0.0,
        swiglu_alpha=reader.number("swiglu_alpha", default=1.702) if clamped else 0.0,
        shared_size=_shared_size(reader, architecture, size),
        shared_gate=architecture.shared_gate,
    )


def _shared_size(reader: ConfigReader, architecture: Architecture, expert_size: int) -> int:
    if architecture.shared_size_key is not None:
        reader.require("num_shared_expert", (1,))
        return reader.integer(architecture.shared_size_key)
    if architecture.shared_count_key is not None:
        count = reader.integer(architecture.shared_count_key, default=architecture.shared_count_default, minimum=0)
        return count * expert_size
    reader.require("shared_expert_intermediate_size", (0,))
    return 0


def _router_spec(reader: ConfigReader, architecture: Architecture, num_experts: int) -> RouterSpec:
    groups = reader.integer("n_group", default=1)
    topk_groups = reader.integer("topk_group", default=1)
    if num_experts % groups or not topk_groups <= groups:
        raise ConfigError(
            f"{reader.where}: n_group {groups}, topk_group {topk_groups} do not fit {num_experts} experts"
        )
    scoring = {"softmax": "softmax", "sigmoid": "sigmoid"}.get(architecture.score)
    if scoring is not None:
        reader.require("scoring_func", (scoring,))
    renormalize = architecture.renormalize
    if renormalize is None:
        renormalize = reader.boolean("norm_topk_prob", default=architecture.renormalize_default)
    else:
        reader.require("norm_topk_prob", (renormalize,))
    return RouterSpec(
        score=architecture.score,
        renormalize=renormalize,
        logit_bias=architecture.logit_bias,
        selection_bias=architecture.selection_bias,
        renorm_epsilon=architecture.renorm_epsilon,
        renorm_minimum=reader.number("moe_norm_min", default=architecture.renorm_minimum),
        scale=reader.number("routed_scaling_factor", "router_scaling_factor", default=architecture.router_scale),
        num_groups=groups,
        topk_groups=topk_groups,
    )


def _attention_specs(
    reader: ConfigReader, architecture: Architecture, num_layers: int, hidden_size: int
) -> list[AttentionSpec]:
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", default=heads if architecture.kv_heads_optional else MISSING)
    head_dim = reader.integer("head_dim", "attention_head_dim", default=architecture.head_dim or hidden_size // heads)
    if heads % kv_heads or head_dim % 2 or head_dim == 0:
        raise ConfigError(
            f"{reader.where}: {heads} heads with {kv_heads} key-value heads of {head_dim} values cannot be grouped"
        )
    has_qkv_bias = architecture.qkv_bias_key is not None and reader.boolean(
        architecture.qkv_bias_key, default=architecture.qkv_bias_default
    )
    qk_norm = architecture.qk_norm
    if architecture.qk_norm_key is not None and not reader.boolean(architecture.qk_norm_key, default=False):
        qk_norm = "none"
    elif architecture.qk_norm_key is None:
        reader.require("use_qk_norm", (qk_norm != "none",))
    base = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=RopeSpec(0.0, 0),  # replaced below, layer by layer
        scale=reader.number("attention_multiplier", default=architecture.attention_scale or head_dim**-0.5),
        qk_norm=qk_norm,
        qkv_bias=has_qkv_bias,
        output_bias=has_qkv_bias and architecture.output_bias,
        sinks=architecture.sinks,
        clip_qkv=reader.number("clip_qkv", default=None),
    )
    types = reader.strings("layer_types", length=num_layers)
    windows = _windows(reader, architecture, types, num_layers)
    ropes = _ropes(reader, architecture, head_dim, windows)
    return [replace(base, window=windows[i], rope=ropes[i]) for i in range(num_layers)]


def _windows(
    reader: ConfigReader, architecture: Architecture, types: list[str] | None, num_layers: int
) -> list[int | None]:
    """The sliding window of each layer, None where the layer sees everything."""
    unknown = set(types or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(f"{reader.where}: layer type {unknown.pop()!r} is not supported")
    window = reader.integer("sliding_window", default=None, minimum=0) or None
    switchable = architecture.windows in ("switchable", "switchable_types")
    if switchable and not reader.boolean("use_sliding_window", default=False):
        return [None] * num_layers
    if types is None:
        if architecture.windows == "switchable_types":
            raise ConfigError(f"{reader.where}: use_sliding_window needs layer_types")
        if architecture.sinks:  # GPT-OSS: layers 0, 2, 4 … slide
            types = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
        elif architecture.windows in ("all", "switchable"):
            types = ["sliding_attention"] * num_layers
        else:
            types = ["full_attention"] * num_layers
    if architecture.windows != "all" and "sliding_attention" in types and window is None:
        raise ConfigError(f"{reader.where}: layer_types has sliding layers but sliding_window is missing")
    return [window if kind == "sliding_attention" else None for kind in types]


def _ropes(
    reader: ConfigReader, architecture: Architecture, head_dim: int, windows: list[int | None]
) -> list[RopeSpec]:
    """RoPE per layer: one description for all, or one for each layer type (nested objects)."""
    merged = _merged_rope_values(reader)
    nested = {kind: merged.pop(kind) for kind in ("full_attention", "sliding_attention") if kind in merged}
    fallback = ConfigReader(merged, f"{reader.where}: rope_parameters")
    specs: dict[str, RopeSpec] = {}
    for kind in {"sliding_attention" if window else "full_attention" for window in windows}:
        own = fallback
        if isinstance(nested.get(kind), dict):
            own = ConfigReader({**merged, **nested[kind]}, f"{reader.where}: rope_parameters.{kind}")
        specs[kind] = _rope_spec(reader, own, architecture, head_dim)
        own.report_unread()
    return [specs["sliding_attention" if window else "full_attention"] for window in windows]


def _merged_rope_values(reader: ConfigReader) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) and `rope_scaling` (before) as one object; both must agree."""
    new, old = reader.child("rope_parameters").values, reader.child("rope_scaling").values
    merged = {**old, **new}
    for name in old.keys() & new.keys():
        if old[name] is not None and new[name] is not None and old[name] != new[name]:
            raise ConfigError(
                f"{reader.where}: rope_scaling.{name} = {old[name]!r} but rope_parameters.{name} = {new[name]!r}"
            )
        merged[name] = new[name] if new[name] is not None else old[name]
    return merged


def _agreeing(reader: ConfigReader, own: ConfigReader, name: str, default: float | None) -> float:
    """A RoPE number that may stand inside the RoPE object, beside it, or in both places alike."""
    inside, outside = own.number(name, default=None), reader.number(name, default=None)
    if inside is not None and outside is not None and inside != outside:
        raise ConfigError(f"{reader.where}: {name} = {outside:g} but {own.where.split(': ')[-1]} says {inside:g}")
    value = inside if inside is not None else outside if outside is not None else default
    if value is None:
        raise ConfigError(f"{reader.where}: {name} is missing")
    return value


def _rope_spec(reader: ConfigReader, own: ConfigReader, architecture: Architecture, head_dim: int) -> RopeSpec:
    theta = _agreeing(reader, own, "rope_theta", architecture.rope_theta)
    factor = _agreeing(reader, own, "partial_rotary_factor", architecture.rotary_factor)
    rotary_dim = reader.integer("rotary_dim", default=None)
    if rotary_dim is not None and factor not in (architecture.rotary_factor, rotary_dim / head_dim):
        raise ConfigError(f"{reader.where}: rotary_dim = {rotary_dim} but partial_rotary_factor = {factor:g}")
    dim = rotary_dim if rotary_dim is not None else int(head_dim * factor)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ConfigError(f"{reader.where}: RoPE over {dim} of {head_dim} values of a head is not possible")
    rope = RopeSpec(theta, dim, interleaved=architecture.rope_interleaved)
    kind = own.raw("rope_type", "type")
    if kind is None and not own.values and architecture.default_yarn:
        return replace(rope, yarn=YarnSpec(32.0, 4096, 32.0, 1.0, False, _yarn_magnitude(32.0)))
    if kind in (None, "default", "mrope"):
        return rope
    if kind == "linear":
        return replace(rope, linear_factor=own.number("factor"))
    if kind == "dynamic" and own.raw("alpha") is not None:
        # Hunyuan: a fixed stretch of the base, not the length-dependent scaling the name suggests.
        for name in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            own.raw(name)
        if dim == 2:
            raise ConfigError(f"{own.where}: RoPE over 2 values cannot be stretched by alpha")
        return replace(rope, theta=theta * own.number("alpha") ** (dim / (dim - 2)))
    if kind == "yarn":
        if theta <= 1.0:
            raise ConfigError(f"{own.where}: YaRN needs a rope_theta above 1, not {theta:g}")
        return replace(rope, yarn=_yarn_spec(reader, own))
    raise ConfigError(
        f"{own.where}: RoPE type {kind!r} is not supported (supported: default, linear, yarn, dynamic with alpha)"
    )


def _yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """The attention temperature of arXiv 2309.00071, section 3.4, as a factor on cos and sin."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _yarn_spec(reader: ConfigReader, own: ConfigReader) -> YarnSpec:
    max_position = reader.integer("max_position_embeddings")
    original = own.integer("original_max_position_embeddings", default=max_position)
    factor = own.number("factor", default=max_position / original)
    if original * factor > MAX_INTEGER:
        raise ConfigError(f"{own.where}: {factor:g} times {original} positions are too many")
    mscale, mscale_all = own.number("mscale", default=None), own.number("mscale_all_dim", default=None)
    magnitude = own.number("attention_factor", default=None)
    if magnitude is None and mscale is not None and mscale_all is not None:
        magnitude = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all)
    return YarnSpec(
        factor=factor,
        original_max_position=original,
        beta_fast=own.number("beta_fast", default=32.0),
        beta_slow=own.number("beta_slow", default=1.0),
        truncate=own.boolean("truncate", default=True),
        attention_factor=_yarn_magnitude(factor) if magnitude is None else magnitude,
    )
