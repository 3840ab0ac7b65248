"""Weights of fewer bits, from the file to the logits: what is read is what is quantised, wherever experts live."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import test_device_scheduler as device
import torch
from conftest import tiny_tensors
from safetensors.torch import load_file
from test_loading import EXPERT, change_config, rewrite
from test_offload import DEVICE, POLICIES, Offloaded, generate, make_spec, noise
from test_parity import PROMPT_LENGTH, oracle, prompt, run
from tiny_checkpoints import save

from tritonmoe.checkpoint import loading
from tritonmoe.checkpoint.architectures import load_spec
from tritonmoe.checkpoint.loading import load_weights, published_storage
from tritonmoe.checkpoint.quantization import EXPERT_FORMATS, quantize
from tritonmoe.errors import CheckpointError
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.expert_store import ExpertStore, RecordLayout
from tritonmoe.model.matrices import empty_matrix, floats, parts, row_groups, row_slice, select
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import PLAIN, ModelWeights, Storage, allocate, iter_tensors, weight_bytes
from tritonmoe_kernels.quantized import MXFP4, Matrix, QuantizedMatrix, WeightFormat, dequantize

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []  # wherever it runs, on what is there
CPU = torch.device("cpu")
ZERO_POINTS = WeightFormat("int4", 32, scale_dtype=torch.bfloat16, has_zeros=True)
FORMATS = {**EXPERT_FORMATS, "int4-zeros": ZERO_POINTS}
EIGHT_BITS = ("fp8", "int8")


def quantised(spec: ModelSpec, weights: ModelWeights, storage: Storage) -> ModelWeights:
    """The same model with `storage`, quantised tensor by tensor from weights in floats."""
    found = allocate(spec, weights.embedding.device, weights.embedding.dtype, storage=storage)
    plain, kept = matrices(weights), matrices(found)
    for name, memory in kept.items():
        value = plain[name]
        if isinstance(memory, QuantizedMatrix):
            assert isinstance(value, torch.Tensor)
            value = quantize(value, memory.format)
        for part, made in zip(parts(memory), parts(value), strict=True):
            part.copy_(made)
    return found


def matrices(node: object, name: str = "") -> dict[str, Matrix]:
    """Every tensor or quantised matrix of a tree of weights, by its path."""
    if isinstance(node, Matrix):
        return {name: node}
    if isinstance(node, list):
        children = enumerate(node)
    elif hasattr(node, "__dict__") and not isinstance(node, Storage):
        children = vars(node).items()
    else:
        return {}
    return {path: found for key, child in children for path, found in matrices(child, f"{name}.{key}").items()}


def assert_same_bits(actual: ModelWeights, expected: ModelWeights) -> None:
    pairs = zip(matrices(actual).items(), matrices(expected).items(), strict=True)
    for (name, one), (_, other) in pairs:
        for part, wanted in zip(parts(one), parts(other), strict=True):
            assert part.dtype == wanted.dtype
            assert torch.equal(part.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)), name


def load(folder: Path, storage: Storage, in_store: bool) -> ModelWeights:
    spec = load_spec(folder)
    store = ExpertStore.allocate(spec, torch.float32, storage) if in_store else None
    return load_weights(folder, spec, CPU, torch.float32, store=store, storage=storage)


# Matrices


@pytest.mark.parametrize("form", [None, *FORMATS.values()], ids=lambda form: form.name if form else "plain")
def test_slices_and_selections_are_those_of_the_values(form: WeightFormat | None) -> None:
    values = torch.randn(3, 12, 6, generator=torch.Generator().manual_seed(0))
    form = None if form is None else row_groups(form, 4)
    matrix = values if form is None else quantize(values, form)
    whole = floats(matrix)
    assert torch.equal(floats(select(matrix, 1)), whole[1])
    assert torch.equal(floats(select(matrix, None)), whole[None])
    assert torch.equal(floats(row_slice(matrix, 4, 8)), whole[:, 4:12])
    made = empty_matrix(tuple(values.shape), torch.float32, CPU, form)
    assert [part.shape for part in parts(made)] == [part.shape for part in parts(matrix)]


def test_rows_that_share_a_scale_are_not_parted() -> None:
    matrix = quantize(torch.randn(12, 6), row_groups(EXPERT_FORMATS["fp8"], 4))
    for first, count in ((2, 4), (4, 3)):
        with pytest.raises(AssertionError, match="a scale covers rows"):
            row_slice(matrix, first, count)
    row_slice(quantize(torch.randn(11, 6), matrix.format), 8, 3)  # the last group is short


# The decoder


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("spec_name", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("name", FORMATS)
def test_offloaded_is_resident_to_the_bit(name: str, spec_name: str, batch: int) -> None:
    spec = make_spec(spec_name)
    weights = quantised(spec, noise(spec), Storage(FORMATS[name]))
    expected = generate(Decoder(spec, weights), batch, steps=6)
    everything = sum(moe.num_experts for moe in spec.moe_layers.values())
    for policy, num_slots in (("on-demand", 1), ("quasi-hidden", 9), ("lookahead", everything)):
        offloaded = Offloaded(spec, weights, num_slots, POLICIES[policy])
        assert torch.equal(generate(offloaded.decoder, batch, steps=6), expected), (policy, num_slots)
        layout = RecordLayout.of(spec, torch.float32, weights.storage)
        assert offloaded.experts.counters.record_bytes == layout.num_bytes
        offloaded.check()
        offloaded.experts.close()


@pytest.mark.parametrize("name", ["fp8", "int4-zeros"])
def test_the_device_fetches_records_of_any_format(name: str) -> None:
    spec = make_spec("gpt_oss")
    weights = quantised(spec, noise(spec), Storage(FORMATS[name]))
    expected = device.generate(Decoder(spec, weights), 2)
    offloaded = device.on_device(spec, weights, 9, POLICIES["quasi-hidden"])
    assert torch.equal(device.generate(offloaded.decoder, 2), expected)
    device.check(offloaded)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_dense_weights_of_eight_bits(name: str) -> None:
    """Logits are those of the dequantised weights, for one token and for many, within float32's rounding."""
    for spec_name in ("qwen3", "dense-layer"):
        spec = make_spec(spec_name)
        weights = quantised(spec, noise(spec), Storage(dense=EXPERT_FORMATS[name]))
        values = allocate(spec, DEVICE, torch.float32)
        for path, matrix in matrices(values).items():
            kept = matrices(weights)[path]
            assert isinstance(matrix, torch.Tensor)
            matrix.copy_(floats(kept))
        actual, expected = (generate(Decoder(spec, each), 1, 21, 4) for each in (weights, values))
        assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()
        plain = generate(Decoder(spec, noise(spec)), 1, 21, 0)
        assert (plain - actual[:1]).abs().max() > 1e-3 * expected.abs().max()  # not the float model by mistake


# Loading


@pytest.mark.parametrize("in_store", [False, True], ids=["resident", "store"])
@pytest.mark.parametrize("name", FORMATS)
def test_quantising_on_load_is_quantising_what_was_loaded(name: str, in_store: bool, tmp_path: Path) -> None:
    """One by one and fused, either orientation, gate and up rows alternating with biases."""
    storage = Storage(FORMATS[name], EXPERT_FORMATS["int8"])
    for model, original in (("qwen3_moe", True), ("qwen3_moe", False), ("gpt_oss", True), ("granitemoe", True)):
        folder = save(oracle(model), tmp_path / f"{model}-{original}", save_original_format=original)
        spec = load_spec(folder)
        loaded = load_weights(folder, spec, CPU, torch.float32)
        assert_same_bits(load(folder, storage, in_store), quantised(spec, loaded, storage))


def test_transposed_experts_are_quantised_along_their_inputs(model_folder: Path) -> None:
    plain = load(model_folder, PLAIN, False)
    tensors = {k: v for k, v in tiny_tensors().items() if ".experts." not in k}
    for i, layer in enumerate(plain.layers):
        assert layer.moe is not None
        for name, value in (("gate_up_proj", layer.moe.experts.gate_up), ("down_proj", layer.moe.experts.down)):
            assert isinstance(value, torch.Tensor)
            tensors[f"model.layers.{i}.mlp.experts.{name}"] = value.mT
    rewrite(model_folder, tensors)
    for name in FORMATS:
        storage = Storage(FORMATS[name])
        assert_same_bits(load(model_folder, storage, True), quantised(load_spec(model_folder), plain, storage))


def test_threads_and_chunks_change_nothing(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(EXPERT_FORMATS["fp8"], EXPERT_FORMATS["fp8"])
    expected = load(model_folder, storage, True)
    monkeypatch.setattr(loading, "QUANTIZED_ELEMENTS", 100)
    monkeypatch.setattr(loading, "_num_readers", lambda targets: 1)
    assert_same_bits(load(model_folder, storage, True), expected)


def packed_gpt_oss(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint as GPT-OSS is published, and its tensors."""
    save(oracle("gpt_oss"), folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name in [k for k in tensors if k.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    rewrite(folder, tensors)
    return tensors


@pytest.mark.parametrize("in_store", [False, True], ids=["resident", "store"])
def test_published_mxfp4_stays_packed(in_store: bool, tmp_path: Path) -> None:
    tensors = packed_gpt_oss(tmp_path)
    storage = published_storage(tmp_path, load_spec(tmp_path))
    assert storage == Storage(MXFP4)
    packed, unpacked = load(tmp_path, storage, in_store), load(tmp_path, PLAIN, in_store)
    for i, (layer, plain) in enumerate(zip(packed.layers, unpacked.layers, strict=True)):
        assert layer.moe is not None
        assert plain.moe is not None
        for name in ("gate_up", "down"):
            matrix = getattr(layer.moe.experts, name)
            assert isinstance(matrix, QuantizedMatrix)
            assert torch.equal(dequantize(matrix), getattr(plain.moe.experts, name))
            blocks = tensors[f"model.layers.{i}.mlp.experts.{name}_proj_blocks"].flatten(-2)
            if name == "gate_up":  # alternating in the file
                blocks = torch.cat((blocks[:, 0::2], blocks[:, 1::2]), dim=1)
            assert torch.equal(matrix.codes, blocks)
        assert layer.moe.experts.gate_up_bias is not None
        assert torch.equal(layer.moe.experts.gate_up_bias, plain.moe.experts.gate_up_bias)
    spec = load_spec(tmp_path)
    steps = [16, 11, *[1] * (PROMPT_LENGTH - 27)]
    logits = [run(Decoder(spec, each), prompt(batch=2), steps) for each in (packed, unpacked)]
    assert torch.equal(*logits)
    # Other codes are made of its values.
    assert_same_bits(load(tmp_path, Storage(ZERO_POINTS), in_store), quantised(spec, unpacked, Storage(ZERO_POINTS)))


def test_an_exponent_that_is_no_number_is_refused(tmp_path: Path) -> None:
    tensors = packed_gpt_oss(tmp_path)
    tensors["model.layers.2.mlp.experts.down_proj_scales"][3, 4, 0] = 255
    rewrite(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.down_proj_scales holds NaN"):
        load(tmp_path, Storage(MXFP4), True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_cannot_be_quantised(model_folder: Path, value: float) -> None:
    tensors = tiny_tensors()
    tensors[EXPERT][3, 5] = value
    rewrite(model_folder, tensors)
    storage = Storage(EXPERT_FORMATS["int4"])
    for check in (True, False):  # no format has such values, checked or not
        with pytest.raises(CheckpointError, match=rf"{EXPERT} holds NaN or infinite"):
            load_weights(model_folder, load_spec(model_folder), CPU, torch.float32, check_finite=check, storage=storage)


def test_bytes_of_weights_in_fewer_bits(model_folder: Path) -> None:
    spec = load_spec(model_folder)
    for name in FORMATS:
        storage = Storage(FORMATS[name], EXPERT_FORMATS["int8"])
        loaded = load(model_folder, storage, False)
        assert weight_bytes(spec, torch.float32, storage=storage) == sum(t.nbytes for t in iter_tensors(loaded))


def test_a_tied_head_of_eight_bits_is_made_from_the_embedding(tmp_path: Path) -> None:
    folder = save(oracle("qwen3_moe-tied"), tmp_path)
    loaded = load(folder, Storage(dense=EXPERT_FORMATS["int8"]), False)
    assert isinstance(loaded.head, QuantizedMatrix)
    expected = quantize(loaded.embedding, EXPERT_FORMATS["int8"])
    assert torch.equal(loaded.head.codes, expected.codes)
    assert torch.equal(loaded.head.scales, expected.scales)


def test_a_store_of_another_format_is_refused(model_folder: Path) -> None:
    spec = load_spec(model_folder)
    store = ExpertStore.allocate(spec, torch.float32, Storage(MXFP4))
    with pytest.raises(AssertionError, match="another dtype"):
        load_weights(model_folder, spec, CPU, torch.float32, store=store)
    other = Storage(replace(EXPERT_FORMATS["int4"], scale_dtype=torch.float32))
    with pytest.raises(AssertionError, match="another dtype"):
        load_weights(model_folder, spec, CPU, torch.float32, store=store, storage=other)
