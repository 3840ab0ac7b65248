"""Checkpoints that the libraries of quantised formats wrote, by `make_published_checkpoints.py`: read to the bit, kept
in their own bits, and refused by name where they are something else."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from make_published_checkpoints import (
    AWQ_CONFIG,
    DATA,
    FP8_CONFIG,
    GPTQ_CONFIG,
    awq,
    compressed_tensors,
    ct_config,
    fp8_blocks,
    gptq,
    hash_of,
    noise,
)
from make_published_checkpoints import weights as ct_weights
from safetensors.torch import load_file, save_file

from tritonmoe.checkpoint.architectures import load_quantization, load_spec
from tritonmoe.checkpoint.config_reader import ConfigReader
from tritonmoe.checkpoint.loading import load_weights, published_storage
from tritonmoe.checkpoint.published_formats import parse_quantization
from tritonmoe.errors import CheckpointError, ConfigError
from tritonmoe.model.matrices import row_slice, select
from tritonmoe.model.weights import PLAIN, ModelWeights, Storage
from tritonmoe_kernels.quantized import Matrix, QuantizedMatrix, WeightFormat, dequantize

RECORD = json.loads((DATA / "published.json").read_text())
NAMES = sorted(RECORD["hashes"])
EVERY = pytest.mark.parametrize("name", NAMES)
EXPERT = "model.layers.0.mlp.experts.1.up_proj"

FORMATS = {
    "awq": WeightFormat("int4", 32, scale_dtype=torch.float16, has_zeros=True),
    "compressed-tensors-fp8-rows": WeightFormat("fp8", 64, scale_dtype=torch.bfloat16),
    "compressed-tensors-int4": WeightFormat("int4", 32, scale_dtype=torch.bfloat16),
    "compressed-tensors-int4-zeros": WeightFormat("int4", 32, scale_dtype=torch.bfloat16, has_zeros=True),
    "compressed-tensors-mxfp4": WeightFormat("mxfp4"),
    "fp8-blocks": WeightFormat("fp8", 128, 128, torch.bfloat16),
    "gptq": WeightFormat("int4", 32, scale_dtype=torch.float16),
    "gptq-v2-zeros": WeightFormat("int4", 32, scale_dtype=torch.float16, has_zeros=True),
}


def load(folder: Path, storage: Storage = PLAIN) -> ModelWeights:
    return load_weights(folder, load_spec(folder), torch.device("cpu"), torch.float32, storage=storage)


def values_of(matrix: Matrix) -> torch.Tensor:
    return dequantize(matrix) if isinstance(matrix, QuantizedMatrix) else matrix


def matrices(weights: ModelWeights) -> dict[str, Matrix]:
    """Each linear layer of the one decoder layer, under its published name."""
    layer = weights.layers[0]
    assert layer.moe is not None
    attention, experts = layer.attention, layer.moe.experts
    dim, width = attention.q_norm.numel(), attention.output.shape[1]
    rows = {"q": (0, width), "k": (width, dim), "v": (width + dim, dim)}
    found = {f"self_attn.{name}_proj": row_slice(attention.qkv, *span) for name, span in rows.items()}
    found["self_attn.o_proj"] = attention.output
    for e in range(len(experts.gate_up)):
        gate_up, size = select(experts.gate_up, e), experts.gate_up.shape[1] // 2
        found[f"mlp.experts.{e}.gate_proj"] = row_slice(gate_up, 0, size)
        found[f"mlp.experts.{e}.up_proj"] = row_slice(gate_up, size, size)
        found[f"mlp.experts.{e}.down_proj"] = select(experts.down, e)
    return {f"model.layers.0.{name}": matrix for name, matrix in found.items()}


def hashes(weights: ModelWeights) -> dict[str, str]:
    return {name: hash_of(values_of(matrix)) for name, matrix in matrices(weights).items()}


@EVERY
def test_values_are_those_of_the_formats_library(name: str) -> None:
    """In every bit of float32, for each matrix of the model."""
    assert hashes(load(DATA / name)) == RECORD["hashes"][name]


@EVERY
def test_experts_are_kept_in_their_own_bits(name: str) -> None:
    """Their codes and scales, not codes found anew: the values would differ."""
    folder = DATA / name
    storage = published_storage(folder, load_spec(folder))
    assert storage == Storage(experts=FORMATS[name])
    weights = load(folder, storage)
    assert isinstance(weights.layers[0].moe.experts.down, QuantizedMatrix)
    assert hashes(weights) == RECORD["hashes"][name]


@EVERY
def test_experts_in_another_format_are_quantised_anew(name: str) -> None:
    other = WeightFormat("int8", 64, scale_dtype=torch.bfloat16)
    weights, original = load(DATA / name, Storage(experts=other)), load(DATA / name)
    matrix, values = weights.layers[0].moe.experts.down, original.layers[0].moe.experts.down
    assert matrix.format == other
    assert (values_of(matrix) - values).norm() < 0.02 * values.norm()


def test_dense_layers_keep_blocks_with_scales_of_another_type() -> None:
    """bfloat16 scales fit into float32, and a block of 128 rows into four of 32."""
    blocks = WeightFormat("fp8", 128, 128, torch.float32)
    weights = load(DATA / "fp8-blocks", Storage(dense=blocks))
    qkv = weights.layers[0].attention.qkv
    assert isinstance(qkv, QuantizedMatrix)
    assert qkv.format.group_rows == 32  # of 4 heads of q, and one of k and of v
    found, expected = hashes(weights), RECORD["hashes"]["fp8-blocks"]
    assert {k for k in expected if found[k] != expected[k]} == {  # were not quantised in the file
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
    }


def copied(name: str, folder: Path, **tensors: torch.Tensor | None) -> Path:
    """The checkpoint with the tensors of one expert matrix, by the last word of their names, replaced or left out."""
    shutil.copytree(DATA / name, folder, dirs_exist_ok=True)
    found = load_file(folder / "model.safetensors")
    stem = EXPERT if f"{EXPERT}.{next(iter(tensors))}" in found else EXPERT.replace(".1.", ".0.")
    for word, tensor in tensors.items():
        found.pop(f"{stem}.{word}", None)
        if tensor is not None:
            found[f"{stem}.{word}"] = tensor
    save_file(found, folder / "model.safetensors")
    return folder


def stored(name: str, word: str) -> torch.Tensor:
    found = load_file(DATA / name / "model.safetensors")
    return next(tensor for key, tensor in found.items() if key.endswith(f".up_proj.{word}"))


NAN_CODE = torch.full((128, 128), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
DAMAGED = {
    "missing zeros": ("awq", {"qzeros": None}, ["qzeros is missing"]),
    "missing codes": ("compressed-tensors-int4", {"weight_packed": None}, ["weight_packed is missing"]),
    "missing scales": ("compressed-tensors-int4", {"weight_scale": None}, ["up_proj.weight is missing"]),
    "shape of scales": ("gptq", {"scales": torch.ones(4, 32)}, ["scales has shape [4, 32]", "implies [2, 32]"]),
    "type of codes": ("gptq", {"qweight": torch.ones(8, 32)}, ["qweight is stored as float32"]),
    "weight_shape": ("compressed-tensors-int4", {"weight_shape": torch.tensor([32, 63])}, ["weight_shape [32, 63]"]),
    "act-order": ("gptq", {"g_idx": torch.arange(64, dtype=torch.int32) % 2}, ["qweight", "desc_act"]),
    "zero points": ("gptq", {"qzeros": stored("gptq", "qzeros") + 1}, ["qweight", "zero points other than 8"]),
    "NaN code": ("fp8-blocks", {"weight": NAN_CODE}, ["up_proj.weight", "NaN"]),
    "NaN scale": ("awq", {"scales": torch.full((2, 32), torch.nan).half()}, ["up_proj.qweight", "NaN"]),
    "NaN exponent": (
        "compressed-tensors-mxfp4",
        {"weight_scale": torch.full((32, 2), 255, dtype=torch.uint8)},
        ["up_proj.weight_packed", "NaN"],
    ),
    "unknown": ("awq", {"qweight_packed": torch.ones(2)}, ["up_proj.qweight_packed is not part"]),
}


@pytest.mark.parametrize(("name", "tensors", "fragments"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damage_is_named(
    tmp_path: Path, name: str, tensors: dict[str, torch.Tensor | None], fragments: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(copied(name, tmp_path, **tensors))
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_scales_of_activations_are_not_used(tmp_path: Path) -> None:
    folder = copied("compressed-tensors-fp8-rows", tmp_path, input_scale=torch.ones(1))
    assert hashes(load(folder)) == RECORD["hashes"]["compressed-tensors-fp8-rows"]


def settings_of(name: str) -> dict[str, Any]:
    return json.loads((DATA / name / "config.json").read_text())["quantization_config"]


def changed(name: str, path: str, value: Any) -> dict[str, Any]:
    """The settings of a checkpoint with the value at a dotted path replaced."""
    found = settings_of(name)
    *parents, last = path.split(".")
    inner = found
    for key in parents:
        inner = inner[key] if inner.get(key) is not None else inner.setdefault(key, {})
    inner[last] = value
    return found


WEIGHTS = "config_groups.group_0.weights"
CT = "compressed-tensors-int4"
REFUSED = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["'bitsandbytes'", "gptq"]),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["'modelopt'"]),
    ({"quant_method": "auto-round"}, ["'auto-round'"]),
    ({"bits": 4}, ["None"]),
    ({"quant_method": ["fp8"]}, ["['fp8']"]),
    (changed(CT, "format", ["pack-quantized"]), ["['pack-quantized'] int4"]),
    (changed("fp8-blocks", "weight_block_size", None), ["weight_block_size", "[128, 128]"]),
    (changed("fp8-blocks", "weight_block_size", [128, 96]), ["96 columns", "powers of two"]),
    (changed("fp8-blocks", "fmt", "e5m2"), ["e5m2", "e4m3"]),
    (changed("fp8-blocks", "activation_scheme", "static"), ["static", "dynamic"]),
    (changed("fp8-blocks", "expert_dtype", "fp4"), ["fp4"]),
    (changed(CT, "format", "nvfp4-pack-quantized"), ["nvfp4-pack-quantized int4", "pack-quantized int4"]),
    (changed(CT, "format", "marlin-24"), ["marlin-24"]),
    (changed(CT, f"{WEIGHTS}.num_bits", 3), ["pack-quantized int3"]),
    (changed(CT, f"{WEIGHTS}.actorder", "group"), ["actorder", "'group'"]),
    (changed(CT, f"{WEIGHTS}.group_size", 48), ["48 columns", "powers of two from 32"]),
    (changed("awq", "group_size", 16), ["16 columns", "powers of two from 32"]),
    (changed(CT, f"{WEIGHTS}.strategy", "tensor"), ["strategy", "tensor"]),
    (changed(CT, f"{WEIGHTS}.strategy", None), ["strategy is missing"]),
    (changed("compressed-tensors-fp8-rows", f"{WEIGHTS}.symmetric", False), ["fp8 with zero points"]),
    (
        changed(CT, "config_groups.group_1", {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}),
        ["2 schemes"],
    ),
    (changed(CT, "config_groups", {}), ["0 schemes"]),
    (changed(CT, "config_groups.group_0.input_activations", {"num_bits": 4}), ["num_bits = 4"]),
    (changed(CT, "config_groups.group_0.output_activations", {"num_bits": 8}), ["output activations"]),
    (changed(CT, "quantization_status", "frozen"), ["frozen"]),
    (changed(CT, "kv_cache_scheme", {"num_bits": 8}), ["kv_cache_scheme"]),
    (changed(CT, "transform_config", {"config_groups": {}}), ["transform_config"]),
    (changed(CT, "sparsity_config", {"format": "sparse-24-bitmask"}), ["sparsity_config"]),
    (changed("awq", "version", "gemv"), ["gemv", "gemm"]),
    (changed("awq", "bits", 8), ["AWQ of 8 bits"]),
    (changed("awq", "zero_point", False), ["zero_point"]),
    (changed("gptq", "bits", 3), ["GPTQ of 3 bits"]),
    (changed("gptq-v2-zeros", "bits", 8), ["GPTQ of 8 bits with zero points"]),
    (changed("gptq", "checkpoint_format", "marlin"), ["marlin", "gptq_v2"]),
    (changed("gptq", "is_marlin_format", True), ["is_marlin_format"]),
    (changed("gptq", "dynamic", {"+:.*down.*": {"bits": 8}}), ["+:.*down.*"]),
    (changed("gptq", "pack_dtype", "int8"), ["pack_dtype", "int8"]),
]


@pytest.mark.parametrize(("quantization", "fragments"), REFUSED, ids=[" ".join(parts) for _, parts in REFUSED])
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, quantization: dict[str, Any], fragments: list[str]
) -> None:
    config = json.loads((DATA / "awq" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(ConfigError) as caught:
        load_spec(tmp_path)
    for fragment in ["quantization_config", *fragments]:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@EVERY
def test_settings_are_understood_whole(name: str, caplog: pytest.LogCaptureFixture) -> None:
    load_spec(DATA / name)
    assert not caplog.records


def test_settings_of_the_decoder_of_a_larger_model(tmp_path: Path) -> None:
    config = json.loads((DATA / "awq" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "any", "text_config": config}))
    assert load_quantization(tmp_path) == load_quantization(DATA / "awq")


def ct(format_name: str, num_bits: int, **scheme: Any) -> tuple[str, dict[str, Any], Any]:
    found = ct_weights(num_bits, **scheme)
    return "compressed_tensors", ct_config(found, format_name), lambda: compressed_tensors(found, format_name)


def of_gptq(group: int, bits: int, is_symmetric: bool, version: int) -> tuple[str, dict[str, Any], Any]:
    kind = {"bits": bits, "group_size": group, "sym": is_symmetric, "format": "gptq" if version == 1 else "gptq_v2"}
    return "gptqmodel", {**GPTQ_CONFIG, **kind}, lambda: gptq(group, bits, is_symmetric, version)


LIBRARIES = {
    "fp8 blocks": ("transformers", FP8_CONFIG, lambda: fp8_blocks(torch.float32)),
    "int4 rows": ct("pack-quantized", 4, strategy="channel"),
    "int4 groups": ct("pack-quantized", 4, group_size=64),
    "int4 zeros": ct("pack-quantized", 4, group_size=32, symmetric=False),
    "int8 groups": ct("pack-quantized", 8, group_size=128),
    "int8 rows": ct("int-quantized", 8, strategy="channel"),
    "fp8 rows": ct("float-quantized", 8, type="float", strategy="channel"),
    "mxfp4": ct("mxfp4-pack-quantized", 4, type="float", group_size=32),
    "awq": ("awq", {**AWQ_CONFIG, "group_size": 128}, lambda: awq(128)),
    "gptq 1 symmetric": of_gptq(128, 4, True, 1),
    "gptq 1 zeros": of_gptq(32, 4, False, 1),
    "gptq 2 zeros": of_gptq(64, 4, False, 2),
    "gptq 1 of 8 bits": of_gptq(128, 8, True, 1),
}


@pytest.mark.parametrize(("library", "settings", "packer"), LIBRARIES.values(), ids=LIBRARIES.keys())
def test_any_matrix_as_its_library_packs_it(library: str, settings: dict[str, Any], packer: Any) -> None:
    """Where the library is installed; its modules that pack, not the files that it made once."""
    if library not in sys.modules and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    published, pack = parse_quantization(ConfigReader(settings, "quantization_config")), packer()
    assert published is not None
    torch.manual_seed(1)
    for rows, columns in ((128, 256), (256, 128), (384, 640)):
        tensors, expected = pack(noise(rows, columns).bfloat16().float())
        for word, tensor in published.tensors(rows, columns).items():
            assert tensor.is_optional or (tensors[word].shape, True) == (
                tensor.shape,
                tensors[word].dtype in tensor.dtypes,
            )
        assert torch.equal(values_of(published.decode(tensors, rows, columns)), expected)
