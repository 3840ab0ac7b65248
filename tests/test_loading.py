"""Checkpoint layouts and strict accounting: nothing missing, doubled, misshapen, unknown or damaged loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import tiny_tensors
from safetensors.torch import load_file, save_file

from tritonmoe.checkpoint.architectures import load_spec
from tritonmoe.checkpoint.loading import load_weights
from tritonmoe.checkpoint.tensor_files import NO_WEIGHTS
from tritonmoe.errors import CheckpointError, InputError
from tritonmoe.model.weights import ModelWeights, iter_tensors
from tritonmoe_kernels.quantized import MXFP4, QuantizedMatrix, dequantize

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def load(folder: Path, **options: bool) -> ModelWeights:
    return load_weights(folder, load_spec(folder), torch.device("cpu"), torch.float32, **options)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def change_config(folder: Path, **keys: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def shard(folder: Path, index: bool = True) -> dict[str, str]:
    """Split the checkpoint into three files, tensors of one expert scattered; returns the weight map."""
    weight_map = {}
    for part in range(3):
        name = f"model-0000{part}-of-00002.safetensors"
        tensors = {k: v for i, (k, v) in enumerate(tiny_tensors().items()) if i % 3 == part}
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
    (folder / "model.safetensors").unlink()
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def assert_same(a: ModelWeights, b: ModelWeights) -> None:
    for left, right in zip(iter_tensors(a), iter_tensors(b), strict=True):
        assert torch.equal(left, right)


def expect(folder: Path, *fragments: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_element_is_the_files(model_folder: Path) -> None:
    weights, tensors = load(model_folder), tiny_tensors()
    attention, experts = weights.layers[1].attention, weights.layers[1].moe.experts
    qkv = torch.cat([tensors[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"])
    assert torch.equal(attention.qkv, qkv)
    assert torch.equal(experts.gate_up[2, 16:], tensors[EXPERT])
    assert torch.equal(experts.down[3], tensors["model.layers.1.mlp.experts.3.down_proj.weight"])


@pytest.mark.parametrize("index", [True, False], ids=["index", "no-index"])
def test_shards_may_split_an_expert(model_folder: Path, pristine_folder: Path, index: bool) -> None:
    shard(model_folder, index)
    assert_same(load(model_folder), load(pristine_folder))


def test_prefixes_and_skippable_tensors(
    model_folder: Path, pristine_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {k.replace("model.", "model.language_model."): v for k, v in tiny_tensors().items()}
    extra = ("mtp.fc.weight", "model.visual.patch.weight", "model.mtp_block.0.input_layernorm.weight")
    tensors.update({name: torch.ones(3) for name in (*extra, "model.layers.0.self_attn.rotary_emb.inv_freq")})
    tensors["model.layers.2.mlp.gate.weight"] = torch.ones(3)  # one past the last layer: predicts further tokens
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(3)
    rewrite(model_folder, tensors)
    assert_same(load(model_folder), load(pristine_folder))
    assert "not used" not in caplog.text


def test_layers_that_the_config_does_not_know_are_named(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_config(model_folder, num_hidden_layers=1)
    load(model_folder)
    assert "layers 1; config.json says that there are 1" in caplog.text


def test_other_files_beside_weights(model_folder: Path, pristine_folder: Path) -> None:
    (model_folder / "model.safetensors").rename(model_folder / "weights.safetensors")
    for name in NO_WEIGHTS:
        (model_folder / f"{name}.safetensors").write_bytes(b"")
    assert_same(load(model_folder), load(pristine_folder))


@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
def test_fused_layouts(model_folder: Path, pristine_folder: Path, transposed: bool) -> None:
    """hidden 32 is 2 · intermediate 16 here, so gate_up is square and down must tell the orientation."""
    tensors = {k: v for k, v in tiny_tensors().items() if ".experts." not in k}
    for i, layer in enumerate(load(pristine_folder).layers):
        for name, value in (("gate_up_proj", layer.moe.experts.gate_up), ("down_proj", layer.moe.experts.down)):
            tensors[f"model.layers.{i}.mlp.experts.{name}"] = value.mT if transposed else value
    rewrite(model_folder, tensors)
    assert_same(load(model_folder), load(pristine_folder))


def test_tied_head_absent_equal_or_different(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_config(model_folder, tie_word_embeddings=True)
    different = load(model_folder)
    assert "lm_head.weight is used" in caplog.text
    assert torch.equal(different.head, tiny_tensors()["lm_head.weight"])
    tensors = tiny_tensors()
    rewrite(model_folder, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    equal = load(model_folder)
    assert equal.head is equal.embedding
    del tensors["lm_head.weight"]
    rewrite(model_folder, tensors)
    absent = load(model_folder)
    assert absent.head is absent.embedding


def test_untied_head_absent_is_an_error(model_folder: Path) -> None:
    tensors = tiny_tensors()
    del tensors["lm_head.weight"]
    rewrite(model_folder, tensors)
    expect(model_folder, "lm_head.weight is missing", "not tied")


def test_missing_expert_tensor(model_folder: Path) -> None:
    tensors = tiny_tensors()
    del tensors[EXPERT]
    rewrite(model_folder, tensors)
    expect(model_folder, EXPERT, "missing")


def test_fused_where_half_is_missing(model_folder: Path) -> None:
    tensors = {k: v for k, v in tiny_tensors().items() if ".1.mlp.experts." not in k}
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.ones(4, 32, 32)
    rewrite(model_folder, tensors)
    expect(model_folder, "model.layers.1.mlp.experts.down_proj", "missing")


def test_unknown_tensor(model_folder: Path) -> None:
    rewrite(model_folder, {**tiny_tensors(), "model.layers.0.mlp.surprise": torch.ones(2)})
    expect(model_folder, "model.layers.0.mlp.surprise", "not part of a qwen3_moe model")


def test_one_tensor_under_two_names(model_folder: Path) -> None:
    tensors = tiny_tensors()
    rewrite(model_folder, {**tensors, "model.layers.0.mlp.router.gate.weight": torch.ones(4, 32)})
    expect(model_folder, "model.layers.0.mlp.gate.weight", "router.gate", "two names of one tensor")


def test_per_expert_layout_without_its_biases(tmp_path: Path) -> None:
    """GPT-OSS's experts have biases; a checkpoint with only the matrices must not load with random ones."""
    from tiny_checkpoints import build, save

    model = build("gpt_oss")
    if model is None:
        pytest.skip("this transformers has no gpt_oss")
    save(model, tmp_path)
    fused, tensors = load(tmp_path), load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        del tensors[name]

    def per_expert(kind: str, gate_up: str, down: str) -> dict[str, torch.Tensor]:
        parts = {}
        for i, layer in enumerate(fused.layers):
            for e in range(8):
                gate, up = getattr(layer.moe.experts, gate_up)[e].chunk(2)
                for name, value in (("gate", gate), ("up", up), ("down", getattr(layer.moe.experts, down)[e])):
                    parts[f"model.layers.{i}.mlp.experts.{e}.{name}_proj.{kind}"] = value
        return parts

    rewrite(tmp_path, tensors | per_expert("weight", "gate_up", "down"))
    expect(tmp_path, "experts.0.gate_proj.bias", "missing")
    biases = per_expert("bias", "gate_up_bias", "down_bias")
    rewrite(tmp_path, tensors | per_expert("weight", "gate_up", "down") | biases)
    assert_same(load(tmp_path), fused)


def test_misshapen_tensor(model_folder: Path) -> None:
    rewrite(model_folder, {**tiny_tensors(), EXPERT: torch.ones(16, 33)})
    expect(model_folder, EXPERT, "[16, 33]", "[16, 32]")
    rewrite(model_folder, {**tiny_tensors(), EXPERT: torch.ones(1, 16, 32)})
    expect(model_folder, EXPERT, "[1, 16, 32]", "[16, 32]")


def test_unsupported_storage_type(model_folder: Path) -> None:
    rewrite(model_folder, {**tiny_tensors(), EXPERT: torch.ones(16, 32).to(torch.float8_e4m3fn)})
    expect(model_folder, EXPERT, "float8_e4m3fn")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_weights(model_folder: Path, value: float) -> None:
    tensors = tiny_tensors()
    tensors[EXPERT][3, 5] = value
    rewrite(model_folder, tensors)
    expect(model_folder, EXPERT, "NaN or infinite")
    assert not load(model_folder, check_finite=False).layers[1].moe.experts.gate_up.isfinite().all()


def test_weights_beyond_float16(model_folder: Path) -> None:
    tensors = tiny_tensors()
    tensors[EXPERT][3, 5] = 1e5
    rewrite(model_folder, tensors)
    with pytest.raises(CheckpointError, match="beyond the range of float16; use --dtype bfloat16"):
        load_weights(model_folder, load_spec(model_folder), torch.device("cpu"), torch.float16)


def test_large_finite_weights_pass(model_folder: Path, pristine_folder: Path) -> None:
    """Their sum overflows, but no element is infinite."""
    tensors = tiny_tensors()
    tensors[EXPERT][:] = 3e38
    rewrite(model_folder, tensors)
    load(model_folder)


def test_missing_shard(model_folder: Path) -> None:
    weight_map = shard(model_folder)
    (model_folder / weight_map[EXPERT]).unlink()
    expect(model_folder, weight_map[EXPERT], "missing")


def test_index_claims_what_a_shard_does_not_hold(model_folder: Path) -> None:
    weight_map = shard(model_folder)
    other = next(name for name in weight_map.values() if name != weight_map[EXPERT])
    (model_folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {**weight_map, EXPERT: other}})
    )
    expect(model_folder, EXPERT, other)


def test_tensor_in_two_shards(model_folder: Path) -> None:
    shard(model_folder, index=False)
    save_file({EXPERT: torch.ones(16, 32)}, model_folder / "model-extra.safetensors")
    expect(model_folder, EXPERT, "model-extra.safetensors")


def test_index_that_leaves_the_folder(model_folder: Path) -> None:
    (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    expect(model_folder, "leaves the model folder")


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_truncated_file(model_folder: Path, keep: int) -> None:
    file = model_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    expect(model_folder, "model.safetensors")


def test_longer_file(model_folder: Path) -> None:
    file = model_folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    expect(model_folder, "longer than its header says")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [1 << 61, 1 << 61], "data_offsets": [0, 8]}, "bytes for shape"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "gap"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "not usable"),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, "not usable"),
        ({"dtype": "F32", "shape": [2]}, "malformed"),
        ({"dtype": "Q9", "shape": [2], "data_offsets": [0, 8]}, "'Q9'"),
        ([], "malformed"),
    ],
)
def test_hostile_headers(model_folder: Path, entry: object, message: str) -> None:
    header = json.dumps({"t": entry}).encode()
    (model_folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    expect(model_folder, message)


def test_no_weights_at_all(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    expect(model_folder, "no .safetensors files")


def test_out_of_memory_says_what_was_needed(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tritonmoe.memory.available_bytes", lambda device: 1000)
    with pytest.raises(InputError, match=r"out of memory: the weights in float32 needs? .* GB .*--dtype bfloat16"):
        load(model_folder)
    load(model_folder, check_memory=False)


def test_mxfp4_equals_transformers() -> None:
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    blocks = torch.randint(0, 256, (3, 64, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 64, 2), dtype=torch.uint8)
    expected = convert(blocks, scales, dtype=torch.float32)  # [3, in, out]
    ours = dequantize(QuantizedMatrix(MXFP4, blocks.flatten(-2), scales))
    assert torch.equal(ours.mT, expected)


def test_mxfp4_checkpoint_equals_its_dequantised_form(tmp_path: Path) -> None:
    """GPT-OSS as published (packed blocks, interleaved rows) and the same values in bf16 layout load alike."""
    from tiny_checkpoints import build, save

    model = build("gpt_oss")
    if model is None:
        pytest.skip("this transformers has no gpt_oss")
    packed, plain = save(model, tmp_path / "packed"), save(model, tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    mx = dict(tensors)
    generator = torch.Generator().manual_seed(5)
    for name in [k for k in tensors if k.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = mx.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 130, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        mx[f"{name}_blocks"], mx[f"{name}_scales"] = blocks, scales
        tensors[name] = dequantize(QuantizedMatrix(MXFP4, blocks.flatten(-2), scales)).mT
    change_config(packed, quantization_config={"quant_method": "mxfp4"})
    rewrite(packed, mx)
    rewrite(plain, tensors)
    assert_same(load(packed), load(plain))
