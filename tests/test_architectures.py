"""config.json to spec: every spelling of a key, published files, and clear refusals."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_CONFIG
from tiny_checkpoints import TINY, build

from tritonmoe.checkpoint.architectures import ARCHITECTURES, NEEDS, parse_config
from tritonmoe.errors import ConfigError
from tritonmoe.model.rope import inverse_frequencies
from tritonmoe.model.spec import ModelSpec

GPT_OSS = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "num_experts_per_tok": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def parse(base: dict[str, Any] = TINY_CONFIG, **changes: Any) -> ModelSpec:
    """The spec of `base` with keys changed; a change to None removes the key."""
    values = {**copy.deepcopy(base), **changes}
    return parse_config({key: value for key, value in values.items() if value is not None})


def test_qwen3_moe_values() -> None:
    spec = parse()
    attention, moe = spec.layers[1].attention, spec.layers[1].moe
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.qk_norm) == (4, 2, 16, "head")
    assert attention.scale == 16**-0.5
    assert attention.rope.theta == 10000.0
    assert moe is not None
    assert (moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size) == (4, 2, 16)
    assert moe.router.renormalize
    assert spec.checkpoint_dtype == "float32"


def test_gpt_oss_published_file() -> None:
    spec = parse(GPT_OSS)
    assert [layer.attention.window for layer in spec.layers] == [128, None, 128, None]
    yarn = spec.layers[0].attention.rope.yarn
    assert yarn is not None
    assert yarn.attention_factor == pytest.approx(1.3466, abs=1e-4)
    assert not yarn.truncate
    assert spec.layers[0].attention.sinks
    assert spec.layers[0].attention.output_bias


def test_gpt_oss_absent_keys_mean_the_published_model() -> None:
    spec = parse(GPT_OSS, layer_types=None, rope_scaling=None, rope_theta=None, swiglu_limit=None, attention_bias=None)
    assert spec == parse(GPT_OSS)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": None, "num_local_experts": 4},
        {"num_experts_per_tok": None, "experts_per_token": 2},
        {"torch_dtype": None, "dtype": "float32"},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "default", "type": "default", "rope_theta": None}},
        {"rope_scaling": None, "rope_parameters": None},
        {"num_local_experts": 4},
        {"decoder_sparse_step": 1, "mlp_only_layers": []},
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 48},
    ],
)
def test_spellings_are_equivalent(changes: dict[str, Any]) -> None:
    assert parse(**changes) == parse()


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "mscale": None},
        },
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "rope_type": None}, "rope_parameters": None},
        {"rope_scaling": None, "rope_parameters": None, "sliding_window": None, "head_dim": None, "layer_types": None},
        {"quantization_config": None, "text_config": None, "mlp_only_layers": None, "num_local_experts": None},
    ],
)
def test_nulls_are_absent_keys(changes: dict[str, Any]) -> None:
    """As they stand in published files; `parse` leaves them out."""

    def without(values: dict[str, Any]) -> dict[str, Any]:
        return {k: without(v) if isinstance(v, dict) else v for k, v in values.items() if v is not None}

    assert parse_config({**TINY_CONFIG, **changes}) == parse_config(without({**TINY_CONFIG, **changes}))


YARN_OLD = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_NEW = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN_OLD},
        {"rope_scaling": YARN_NEW},
        {"rope_theta": None, "rope_parameters": {**YARN_NEW, "rope_theta": 10000.0}},
        {"rope_scaling": YARN_NEW, "rope_parameters": {**YARN_NEW, "rope_theta": 10000.0}},
        {"rope_scaling": YARN_NEW, "rope_parameters": None},
        {"rope_parameters": YARN_NEW},
    ],
)
def test_yarn_is_never_dropped(changes: dict[str, Any]) -> None:
    """RoPE scaling alone, together with its new spelling, and beside nulls."""
    rope = parse(**changes).layers[0].attention.rope
    assert rope.theta == 10000.0
    assert rope.yarn is not None
    assert rope.yarn.factor == 4.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported: ernie4_5_moe"),
        ({"model_type": ["x"]}, "is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size must be an integer of at least 1, not '32'"),
        ({"hidden_size": -1}, "at least 1, not -1"),
        ({"num_hidden_layers": 2**80}, "num_hidden_layers must be an integer"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"num_experts_per_tok": 9}, "9 experts per token of only 4"),
        ({"num_experts": 4, "num_local_experts": 8}, "two names of one setting"),
        ({"num_key_value_heads": 3}, "cannot be grouped"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta = 10000 but"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "RoPE type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "llama3"}}, "RoPE type 'llama3' is not supported"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "two names of one setting"),
        ({"rope_scaling": 4}, "rope_scaling must be an object"),
        (
            {"rope_scaling": YARN_NEW, "rope_parameters": {**YARN_NEW, "factor": 8.0}},
            "rope_scaling.factor = 4.0 but rope_parameters.factor = 8.0",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantisation method 'hqq' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer type 'linear_attention' is not supported"),
        ({"mlp_only_layers": [0, 1]}, "no layer has routed experts"),
        ({"head_dim": 15}, "cannot be grouped"),
        ({"tie_word_embeddings": "yes"}, "must be true or false"),
        ({"partial_rotary_factor": 1.5}, "RoPE over 24 of 16 values"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported"),
    ],
)
def test_refusals_are_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", NEEDS)
def test_known_but_unsupported_architectures_say_what_is_missing(model_type: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(model_type=model_type)
    assert NEEDS[model_type] in str(caught.value)
    assert all(name in str(caught.value) for name in ARCHITECTURES)


def test_text_config_is_entered() -> None:
    assert parse_config({"model_type": "wrapper", "text_config": TINY_CONFIG}) == parse()


def test_unknown_keys_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse(router_aux_loss_coef=0.1)
        assert not caplog.records
        parse(secret_sauce=3)
    assert "not understood and ignored: secret_sauce" in caplog.text


def test_hunyuan_lists_and_alpha() -> None:
    spec = parse_config(
        {
            "model_type": "hunyuan_v1_moe",
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_head_dim": 8,
            "intermediate_size": 16,
            "moe_intermediate_size": [16, 16],
            "num_experts": 8,
            "moe_topk": [2, 2],
            "num_shared_expert": [1, 1],
            "max_position_embeddings": 64,
            "rope_theta": 10000.0,
            "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic", "beta_fast": 32, "beta_slow": 1},
            "use_qk_norm": True,
            "use_cla": False,
        }
    )
    moe = spec.layers[0].moe
    assert moe is not None
    assert (moe.num_experts_per_tok, moe.shared_size) == (2, 16)
    assert spec.layers[0].attention.rope.theta == pytest.approx(10000.0 * 1000.0 ** (8 / 6))


@pytest.mark.parametrize("name", [name for name, tiny in TINY.items() if name == tiny.model_type])
def test_absent_keys_mean_what_transformers_takes_them_for(name: str, tmp_path: Path) -> None:
    """Each key that transformers saves is removed in turn: the spec is that of its default, or the key is asked for."""
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    model = build(name)
    if model is None:
        pytest.skip(f"this transformers has no {name}")
    model.config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    for key in sorted(saved.keys() - {"model_type"}):
        reduced = {k: v for k, v in saved.items() if k != key}
        try:
            ours = parse_config(copy.deepcopy(reduced))
        except ConfigError:
            continue  # obligatory here
        mapping[name].from_dict(copy.deepcopy(reduced)).save_pretrained(tmp_path)
        completed = json.loads((tmp_path / "config.json").read_text())
        theirs = parse_config({**completed, "dtype": reduced.get("dtype")})
        assert ours == theirs, key


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.7,
        "partial_rotary_factor": 0.5,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_angles_equal_transformers(rope: dict[str, Any]) -> None:
    rotary = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe").Qwen3MoeRotaryEmbedding
    config = pytest.importorskip("transformers").Qwen3MoeConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=256, rope_parameters=dict(rope)
    )
    if rope.get("partial_rotary_factor") is None:
        expected_cos, _ = rotary(config)(torch.zeros(1), torch.arange(300)[None])
    else:
        functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
        frequencies, magnitude = functions[rope["rope_type"]](config, torch.device("cpu"))
        angles = torch.arange(300)[None, :, None].float() * frequencies
        expected_cos = torch.cat((angles, angles), -1).cos() * magnitude
    spec = (
        parse(head_dim=32, max_position_embeddings=256, rope_theta=None, rope_parameters=rope).layers[0].attention.rope
    )
    magnitude = 1.0 if spec.yarn is None else spec.yarn.attention_factor
    cos = (torch.arange(300)[None, :, None].float() * inverse_frequencies(spec)).cos() * magnitude
    assert torch.equal(cos, expected_cos[..., : spec.dim // 2])


def test_yarn_extends_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert parse(rope_scaling=yarn).max_position == 512
    assert parse().max_position == 128
