"""Experts in host memory: where the parts of a record lie, that loading fills them in place, and pinning."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import tiny_tensors
from safetensors.torch import load_file
from test_loading import EXPERT, assert_same, change_config, rewrite
from test_parity import PROMPT_LENGTH, oracle, prompt, run
from tiny_checkpoints import TINY, save

from tritonmoe.checkpoint import loading
from tritonmoe.checkpoint.architectures import load_spec
from tritonmoe.checkpoint.loading import load_weights
from tritonmoe.checkpoint.quantization import EXPERT_FORMATS
from tritonmoe.checkpoint.tensor_files import TensorEntry, TensorReader
from tritonmoe.errors import CheckpointError, ConfigError, InputError
from tritonmoe.model import expert_store, pinned_memory
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.expert_store import ExpertStore, RecordLayout
from tritonmoe.model.matrices import row_groups
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ExpertWeights, ModelWeights, allocate, iter_tensors, weight_bytes
from tritonmoe_kernels.quantized import MXFP4

CPU = torch.device("cpu")


def load_both(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelSpec, ModelWeights, ModelWeights]:
    """(spec, weights as plain tensors, weights whose experts are a store's)."""
    spec = load_spec(folder)
    store = ExpertStore.allocate(spec, dtype)
    return spec, load_weights(folder, spec, CPU, dtype), load_weights(folder, spec, CPU, dtype, store=store)


def moe_layers(spec: ModelSpec) -> list[int]:
    return [i for i, layer in enumerate(spec.layers) if layer.moe is not None]


def parts(weights: ExpertWeights) -> list[torch.Tensor]:
    """In the order of a record: each matrix, then its bias."""
    halves = [weights.gate_up, weights.gate_up_bias], [weights.down, weights.down_bias]
    return [tensor for half in halves for tensor in iter_tensors(half)]


# Record layout


def offsets(layout: RecordLayout) -> dict[str, int]:
    return {name: part.offset for name, part in layout.parts.items()}


@pytest.mark.parametrize(
    ("dtype", "by_hand", "num_bytes"),
    [
        # H 5, I 7: gate_up 70 elements and 14, down 35 and 5.
        (torch.bfloat16, [0, 256, 512, 768], 1024),
        (torch.float16, [0, 256, 512, 768], 1024),
        (torch.float32, [0, 512, 768, 1024], 1280),
    ],
)
def test_layout_by_hand(dtype: torch.dtype, by_hand: list[int], num_bytes: int) -> None:
    layout = RecordLayout(5, 7, dtype, has_bias=True)
    assert offsets(layout) == dict(zip(["gate_up", "gate_up_bias", "down", "down_bias"], by_hand, strict=True))
    assert layout.num_bytes == num_bytes
    assert layout.first_bytes == by_hand[2]
    without = replace(layout, has_bias=False)
    assert offsets(without) == {"gate_up": 0, "down": without.first_bytes} == {"gate_up": 0, "down": by_hand[1]}
    assert without.num_bytes == (512 if dtype.itemsize == 2 else 768)


def test_parts_that_end_on_the_boundary_need_no_padding() -> None:
    layout = RecordLayout(16, 8, torch.bfloat16, has_bias=False)  # gate_up 512 bytes, down 256
    assert offsets(layout) == {"gate_up": 0, "down": 512}
    assert layout.num_bytes == 768
    qwen3 = RecordLayout(2048, 768, torch.bfloat16, has_bias=False)
    assert qwen3.num_bytes == 3 * 2048 * 768 * 2


def test_layout_of_fewer_bits_by_hand() -> None:
    """gpt-oss's experts as published: 2880 columns are 1440 bytes of codes and 90 scales a row."""
    layout = RecordLayout(2880, 2880, torch.bfloat16, has_bias=True, format=MXFP4)
    assert offsets(layout) == {
        "gate_up.codes": 0,
        "gate_up.scales": 5760 * 1440,
        "gate_up_bias": 5760 * 1530,
        "down.codes": 5760 * 1530 + 11_520,
        "down.scales": 5760 * 1530 + 11_520 + 2880 * 1440,
        "down_bias": 8640 * 1530 + 11_520 + 128,  # up to a multiple of 256
    }
    assert layout.num_bytes == 13_236_736
    # 3 · 2048 · 768 values of 4.25 bits.
    assert RecordLayout(2048, 768, torch.bfloat16, False, MXFP4).num_bytes == 2_506_752


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("hidden", "size"), [(1, 1), (5, 7), (33, 3), (64, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parts_are_aligned_and_do_not_overlap(dtype: torch.dtype, hidden: int, size: int, has_bias: bool) -> None:
    layout = RecordLayout(hidden, size, dtype, has_bias)
    buffer = torch.zeros(3, layout.num_bytes, dtype=torch.uint8)
    views = layout.views(buffer)
    assert views.gate_up.shape == (3, 2 * size, hidden)
    assert views.down.shape == (3, hidden, size)
    assert (views.gate_up_bias is not None) == (views.down_bias is not None) == has_bias
    for part in parts(views):
        part += 1
        for record in part:
            assert (record.data_ptr() - buffer.data_ptr()) % 256 == 0
            assert record.is_contiguous()
    assert layout.num_bytes % 256 == 0
    values = buffer.view(dtype)
    assert values.max() == 1  # no element belongs to two parts
    assert values.sum() == sum(part.numel() for part in parts(views))


@pytest.mark.parametrize("name", EXPERT_FORMATS)
@pytest.mark.parametrize(("hidden", "size"), [(2, 2), (6, 10), (34, 130), (64, 32)])
def test_parts_of_fewer_bits_are_aligned_and_do_not_overlap(name: str, hidden: int, size: int) -> None:
    form = row_groups(EXPERT_FORMATS[name], size)
    for layout in (
        RecordLayout(hidden, size, torch.bfloat16, True, form),
        RecordLayout(hidden, size, torch.bfloat16, False, replace(form, has_zeros=name == "int4")),
    ):
        buffer = torch.zeros(3, layout.num_bytes, dtype=torch.uint8)
        views = layout.views(buffer)
        assert views.gate_up.shape == (3, 2 * size, hidden)
        assert views.down.shape == (3, hidden, size)
        for number, part in enumerate(parts(views), start=1):
            for record in part:
                assert (record.data_ptr() - buffer.data_ptr()) % 256 == 0
                assert record.is_contiguous()
                raw = record.view(torch.uint8)
                assert not raw.any()  # no byte belongs to two parts
                raw += number
        used = sum(part[0].nbytes for part in parts(views))
        assert int((buffer[0] != 0).sum()) == used <= layout.num_bytes < used + 256 * len(parts(views))


def test_layers_must_agree(model_folder: Path) -> None:
    spec = load_spec(model_folder)
    first, second = spec.layers
    assert second.moe is not None
    other = replace(second, moe=replace(second.moe, intermediate_size=24))
    with pytest.raises(ConfigError, match=r"differ between layers \(16 without bias, 24 without bias\)"):
        RecordLayout.of(replace(spec, layers=(first, other)), torch.float32)
    dense = replace(first, moe=None, dense_size=8)
    with pytest.raises(ConfigError, match="no routed experts"):
        ExpertStore.allocate(replace(spec, layers=(dense, dense)), torch.float32)


# Arenas and records


def test_arenas_hold_whole_layers(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(model_folder)
    spec = replace(spec, layers=spec.layers[:1] * 5)
    record_bytes = RecordLayout.of(spec, torch.float32).num_bytes
    for records, sizes in ((100, [20]), (11, [8, 8, 4]), (8, [8, 8, 4]), (4, [4] * 5), (1, [4] * 5)):
        monkeypatch.setattr(expert_store, "ARENA_BYTES", records * record_bytes)
        store = ExpertStore.allocate(spec, torch.float32)
        assert [len(arena) for arena in store._arenas] == sizes
        assert store.num_bytes == 20 * record_bytes
        addresses = {store.record(layer, e).data_ptr() for layer in range(5) for e in range(4)}
        assert len(addresses) == 20
        assert all(address % 256 == 0 for address in addresses)


def test_layers_without_experts_have_no_records(tmp_path: Path) -> None:
    """mellum's first layer is dense: keys are still indices into spec.layers."""
    spec, plain, stored = load_both(save(oracle("mellum"), tmp_path))
    assert moe_layers(spec) == [1, 2, 3]
    store = ExpertStore.allocate(spec, torch.float32)
    assert sorted(store._layers) == [1, 2, 3]
    with pytest.raises(KeyError):
        store.layer_weights(0)
    assert_same(plain, stored)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_record_is_its_parts_in_order(name: str, tmp_path: Path) -> None:
    """Between the parts lies padding, which is ignored: no one may rely on its bytes."""
    folder = save(oracle(name), tmp_path)
    spec = load_spec(folder)
    store = ExpertStore.allocate(spec, torch.float32)
    plain = load_weights(folder, spec, CPU, torch.float32)
    load_weights(folder, spec, CPU, torch.float32, store=store)
    for layer in moe_layers(spec):
        moe = plain.layers[layer].moe
        assert moe is not None
        for e in range(8):
            record = store.record(layer, e)
            assert record.shape == (store.layout.num_bytes,)
            assert record.is_contiguous()
            assert record.data_ptr() == store.layer_weights(layer).gate_up[e].data_ptr()
            for (start, _, _), part in zip(store.layout.parts.values(), parts(moe.experts), strict=True):
                assert torch.equal(record[start : start + part[e].nbytes], part[e].flatten().view(torch.uint8))


# Loading


@pytest.mark.parametrize("original_format", [True, False], ids=["published", "fused"])
@pytest.mark.parametrize("name", TINY)
def test_loads_like_plain_tensors(name: str, original_format: bool, tmp_path: Path) -> None:
    """Every architecture and layout; then the decoder's logits over the views, bit for bit."""
    spec, plain, stored = load_both(save(oracle(name), tmp_path, save_original_format=original_format))
    assert_same(plain, stored)
    steps = [16, 11, *[1] * (PROMPT_LENGTH - 27)]
    ids = prompt(batch=2)
    assert torch.equal(run(Decoder(spec, plain), ids, steps), run(Decoder(spec, stored), ids, steps))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_loads_with_a_cast(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    _, plain, stored = load_both(save(oracle(name), tmp_path), dtype)
    assert_same(plain, stored)


@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
def test_fused_orientations(model_folder: Path, transposed: bool) -> None:
    plain = load_weights(model_folder, load_spec(model_folder), CPU, torch.float32)
    tensors = {k: v for k, v in tiny_tensors().items() if ".experts." not in k}
    for i, layer in enumerate(plain.layers):
        assert layer.moe is not None
        for name, value in (("gate_up_proj", layer.moe.experts.gate_up), ("down_proj", layer.moe.experts.down)):
            tensors[f"model.layers.{i}.mlp.experts.{name}"] = value.mT if transposed else value
    rewrite(model_folder, tensors)
    _, fused, stored = load_both(model_folder)
    assert_same(plain, fused)
    assert_same(plain, stored)


def test_mxfp4_lands_in_the_records(tmp_path: Path) -> None:
    folder = save(oracle("gpt_oss"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name in [k for k in tensors if k.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator)
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    rewrite(folder, tensors)
    for dtype in (torch.float32, torch.bfloat16):
        _, plain, stored = load_both(folder, dtype)
        assert_same(plain, stored)


def test_experts_are_the_stores_memory(model_folder: Path) -> None:
    spec = load_spec(model_folder)
    store = ExpertStore.allocate(spec, torch.float32)
    weights = load_weights(model_folder, spec, CPU, torch.float32, store=store)
    for i, layer in enumerate(weights.layers):
        assert layer.moe is not None
        pairs = zip(parts(layer.moe.experts), parts(store.layer_weights(i)), strict=True)
        assert all(a.data_ptr() == b.data_ptr() and a.stride() == b.stride() for a, b in pairs)
    # Every byte on the meta device is one that the store does not hold.
    meta = allocate(spec, torch.device("meta"), torch.float32, store)
    on_device = sum({id(t): t.nbytes for t in iter_tensors(meta) if t.device.type == "meta"}.values())
    assert on_device == weight_bytes(spec, torch.float32, with_experts=False)
    experts = sum(part.numel() * 4 for i in moe_layers(spec) for part in parts(store.layer_weights(i)))
    assert weight_bytes(spec, torch.float32) == on_device + experts


@pytest.mark.parametrize("fused", [False, True], ids=["published", "fused"])
def test_no_byte_of_an_expert_takes_a_detour(fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal dtypes: each read goes to the address in the record, nothing is staged, the check copies nothing."""
    folder = save(oracle("qwen3_moe"), tmp_path, save_original_format=not fused)
    spec = load_spec(folder)
    store = ExpertStore.allocate(spec, torch.float32)
    read: list[tuple[int, int]] = []
    read_bytes, aminmax = TensorReader._read_bytes, torch.Tensor.aminmax

    def spy_read(self: TensorReader, entry: TensorEntry, offset: int, dest: torch.Tensor) -> None:
        if ".experts." in entry.name:
            read.append((dest.data_ptr(), dest.numel()))
        read_bytes(self, entry, offset, dest)

    def spy_aminmax(self: torch.Tensor) -> Iterable[torch.Tensor]:
        assert self.is_contiguous()
        return aminmax(self)

    def no_staging(self: TensorReader, num_bytes: int) -> torch.Tensor:
        raise AssertionError(f"{num_bytes} bytes are staged")

    monkeypatch.setattr(TensorReader, "_read_bytes", spy_read)
    monkeypatch.setattr(TensorReader, "_staging_buffer", no_staging)
    monkeypatch.setattr(torch.Tensor, "aminmax", spy_aminmax)
    load_weights(folder, spec, CPU, torch.float32, store=store)
    filled = {
        (part[e].data_ptr(), part[e].nbytes)
        for i in moe_layers(spec)
        for e in range(8)
        for part in parts(store.layer_weights(i))
    }
    half = {(start + k * size // 2, size // 2) for start, size in filled for k in (0, 1)}
    assert set(read) <= filled | half  # gate and up are read one after the other where they are two tensors
    assert sum(size for _, size in read) == sum(size for _, size in filled)


def test_staging_of_a_cast_is_bounded(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    staging = TensorReader._staging_buffer

    def spy(self: TensorReader, num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return staging(self, num_bytes)

    monkeypatch.setattr(TensorReader, "_staging_buffer", spy)
    monkeypatch.setattr("tritonmoe.checkpoint.tensor_files.STAGING_BYTES", 1024)
    load_both(model_folder, torch.bfloat16)
    assert 0 < max(sizes) <= 1024


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_finite_check_sees_the_views(model_folder: Path, value: float) -> None:
    tensors = tiny_tensors()
    tensors[EXPERT][3, 5] = value
    rewrite(model_folder, tensors)
    spec = load_spec(model_folder)
    with pytest.raises(CheckpointError, match=rf"{EXPERT} holds NaN or infinite"):
        load_weights(model_folder, spec, CPU, torch.float32, store=ExpertStore.allocate(spec, torch.float32))


def test_finite_check_of_strided_views() -> None:
    layout = RecordLayout(6, 4, torch.float32, has_bias=True)
    buffer = torch.full((3, layout.num_bytes), 255, dtype=torch.uint8)  # NaN; padding is not looked at
    for part in parts(layout.views(buffer)):
        part.zero_()
    gate_up = layout.views(buffer).gate_up
    for view in (gate_up, gate_up.mT, gate_up.unflatten(1, (2, 4)).transpose(1, 2), gate_up[:, :0]):
        assert loading._is_finite(view)
    gate_up[2, 7, 5] = float("-inf")
    for view in (gate_up, gate_up.mT, gate_up.unflatten(1, (2, 4)).transpose(1, 2)):
        assert not loading._is_finite(view)


def test_a_store_for_another_dtype_is_refused(model_folder: Path) -> None:
    spec = load_spec(model_folder)
    with pytest.raises(AssertionError, match="another dtype"):
        load_weights(model_folder, spec, CPU, torch.float32, store=ExpertStore.allocate(spec, torch.bfloat16))


# Page cache


def test_page_cache_is_dropped_behind_the_experts(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = model_folder / "model.safetensors"
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "tritonmoe.checkpoint.tensor_files.os.posix_fadvise",
        lambda fd, offset, length, advice: dropped.append((offset, length)),
        raising=False,
    )
    monkeypatch.setattr("tritonmoe.checkpoint.tensor_files.os.POSIX_FADV_DONTNEED", 4, raising=False)
    spec = load_spec(model_folder)
    load_weights(model_folder, spec, CPU, torch.float32)
    assert not dropped
    load_weights(model_folder, spec, CPU, torch.float32, store=ExpertStore.allocate(spec, torch.float32))
    reads = [span for span in dropped if span != (0, 0)]
    assert sum(length for _, length in reads) == sum(math.prod(t.shape) * 4 for t in tiny_tensors().values())
    assert max(offset + length for offset, length in reads) == file.stat().st_size
    assert (0, 0) in dropped  # and at the end whatever is left


@pytest.mark.parametrize("platform", ["without the call", "refusing it"])
def test_page_cache_that_cannot_be_dropped(model_folder: Path, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    def refuse(*_: int) -> None:
        raise OSError(95, "Operation not supported")

    if platform == "refusing it":
        monkeypatch.setattr("tritonmoe.checkpoint.tensor_files.os.posix_fadvise", refuse, raising=False)
    else:
        monkeypatch.delattr("tritonmoe.checkpoint.tensor_files.os.posix_fadvise", raising=False)
    _, plain, stored = load_both(model_folder)
    assert_same(plain, stored)


# Memory check


def test_memory_check_adds_both_sides_on_the_cpu(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(model_folder)
    store = ExpertStore.allocate(spec, torch.float32)
    needed = store.num_bytes + weight_bytes(spec, torch.float32, with_experts=False)
    monkeypatch.setattr("tritonmoe.memory.available_bytes", lambda device: needed)
    load_weights(model_folder, spec, CPU, torch.float32, store=store)
    monkeypatch.setattr("tritonmoe.memory.available_bytes", lambda device: needed - 1)
    with pytest.raises(InputError, match=r"GB of experts and .* GB of other weights\) needs .* free in main memory"):
        load_weights(model_folder, spec, CPU, torch.float32, store=store)
    load_weights(model_folder, spec, CPU, torch.float32, store=store, check_memory=False)


@pytest.mark.parametrize(
    ("short", "message"),
    [
        (
            "cpu",
            r"the set of experts in bfloat16 \(beside 0.0 GB of other weights on the GPU\) needs .* in main memory",
        ),
        ("cuda", r"without its experts in bfloat16 \(beside 0.0 GB of experts in main memory\) needs .* on the GPU"),
    ],
)
def test_memory_check_names_both_sides(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, short: str, message: str
) -> None:
    spec = load_spec(model_folder)
    store = ExpertStore.allocate(spec, torch.bfloat16)
    sides = {"cpu": store.num_bytes, "cuda": weight_bytes(spec, torch.bfloat16, with_experts=False)}
    sides[short] -= 1
    monkeypatch.setattr("tritonmoe.memory.available_bytes", lambda device: sides[device.type])
    with pytest.raises(InputError, match=message) as caught:
        load_weights(model_folder, spec, torch.device("cuda"), torch.bfloat16, store=store)
    assert "\n" not in str(caught.value)


# Pinning


class FakeCudart:
    """Stands in for the CUDA runtime: remembers what is registered, refuses the registrations told to."""

    def __init__(self, refused: Iterable[int] = ()) -> None:
        self.refused = set(refused)
        self.calls: list[tuple[int, int, int]] = []
        self.registered: set[int] = set()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append((address, num_bytes, flags))
        if len(self.calls) - 1 in self.refused:
            return 2
        assert address not in self.registered
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return {2: "out of memory"}[code]


@pytest.fixture
def store(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> ExpertStore:
    """A store of four arenas, one per layer."""
    spec = load_spec(model_folder)
    monkeypatch.setattr(expert_store, "ARENA_BYTES", 1)
    return ExpertStore.allocate(replace(spec, layers=spec.layers * 2), torch.float32)


def with_cuda(monkeypatch: pytest.MonkeyPatch, refused: Iterable[int] = ()) -> FakeCudart:
    cudart = FakeCudart(refused)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(pinned_memory, "_clear_last_error", lambda: cudart.calls.append((0, 0, 0)))
    return cudart


def test_pins_every_arena_once(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = with_cuda(monkeypatch)
    assert not store.is_pinned
    assert store.pin()
    assert store.pin()
    assert store.is_pinned
    assert cudart.calls == [(arena.data_ptr(), arena.nbytes, 3) for arena in store._arenas]  # portable | mapped
    store.close()
    store.close()
    assert not store.is_pinned
    assert not cudart.registered
    assert store.record(0, 0).sum() == 0  # still readable


@pytest.mark.parametrize("refused", [0, 2, 3])
def test_refused_pinning_leaves_nothing_registered(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: int
) -> None:
    cudart = with_cuda(monkeypatch, [refused])
    assert not store.pin()
    assert not store.is_pinned
    assert not cudart.registered
    assert cudart.calls[-1] == (0, 0, 0)  # the runtime's last error is cleared
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "pinning memory failed: experts stay in pageable memory (out of memory); copies will be slower"
    )


def test_cuda_that_cannot_start(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA driver is too old\nand more")

    with_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "cudart", broken)
    assert not store.pin()
    assert "(CUDA driver is too old); copies" in caplog.text


def test_without_cuda_nothing_is_pinned_or_said(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not store.pin()
    assert not store.is_pinned
    assert not caplog.records


def test_memory_that_kernels_cannot_read_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    cudart = with_cuda(monkeypatch, refused=[0])
    with pytest.raises(InputError, match=r"^the GPU cannot read 0.0082 GB of main memory \(out of memory\); use --emb"):
        pinned_memory.mapped_tensor((1000, 4096), torch.bfloat16, gpu)
    monkeypatch.setattr(pinned_memory, "device_address", lambda address: "the driver does not map it")
    with pytest.raises(InputError, match=r"\(the driver does not map it\); use --embedding device$"):
        pinned_memory.mapped_tensor((1000, 4096), torch.bfloat16, gpu)
    assert len(cudart.calls) == 3  # the first refused, its error cleared, the second taken back
    assert not cudart.registered


def test_nothing_of_zero_size_is_registered(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(model_folder)
    first, second = spec.layers
    assert first.moe is not None
    empty = replace(first, moe=replace(first.moe, num_experts=0))
    monkeypatch.setattr(expert_store, "ARENA_BYTES", 1)
    store = ExpertStore.allocate(replace(spec, layers=(empty, second)), torch.float32)
    cudart = with_cuda(monkeypatch)
    assert store.pin()
    assert [num_bytes for _, num_bytes, _ in cudart.calls] == [store.num_bytes]


def test_collecting_the_store_unregisters(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(model_folder)
    store = ExpertStore.allocate(spec, torch.float32)
    cudart = with_cuda(monkeypatch)
    store.pin()
    record = store.record(1, 3)
    assert cudart.registered
    del store
    gc.collect()
    assert not cudart.registered
    assert record.sum() == 0


def test_the_loader_pins_after_filling(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only for a GPU: here one whose tensors are on the CPU."""
    spec = load_spec(model_folder)
    store = ExpertStore.allocate(spec, torch.float32)
    seen: list[float] = []
    monkeypatch.setattr(ExpertStore, "pin", lambda self: seen.append(float(self.layer_weights(1).gate_up[3, 0, 0])))
    load_weights(model_folder, spec, CPU, torch.float32, store=store)
    assert not seen
    store = ExpertStore.allocate(spec, torch.float32)
    monkeypatch.setattr(loading, "allocate", lambda spec, device, *rest: allocate(spec, CPU, *rest))
    monkeypatch.setattr(loading, "TensorReader", lambda pin_staging, drop_cache: TensorReader(False, drop_cache))
    load_weights(model_folder, spec, torch.device("cuda"), torch.float32, store=store, check_memory=False)
    assert seen == [float(tiny_tensors()["model.layers.1.mlp.experts.3.gate_proj.weight"][0, 0])]


@pytest.mark.gpu
def test_pinning_on_a_gpu(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Really pinned memory, and a refusal that leaves the GPU usable."""
    spec = load_spec(model_folder)
    store = ExpertStore.allocate(spec, torch.float32)
    load_weights(model_folder, spec, torch.device("cuda"), torch.float32, store=store)
    assert store.is_pinned
    record = store.record(1, 3)
    assert record.is_pinned()
    assert torch.equal(record.to("cuda", non_blocking=True).cpu(), record)
    again = ExpertStore(store.layout, store._arenas, store._layers)
    assert not again.pin()  # registered already
    assert "experts stay in pageable memory" in caplog.text
    torch.ones(3, device="cuda").mul_(2.0)
    torch.cuda.synchronize()
    store.close()
    assert not record.is_pinned()
    assert again.pin()
    again.close()
