"""Checkpoints that `tools/quantize.py` writes: they load as the same model quantised on load does, others read them,
and they exist whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import quantize
import torch
from conftest import byte_tokenizer
from make_published_checkpoints import make
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tritonmoe import Engine
from tritonmoe.checkpoint.architectures import load_spec
from tritonmoe.checkpoint.loading import load_weights, published_storage
from tritonmoe.checkpoint.quantization import EXPERT_FORMATS
from tritonmoe.errors import CheckpointError, InputError
from tritonmoe.model.weights import ModelWeights, Storage, iter_tensors
from tritonmoe_kernels.quantized import QuantizedMatrix, dequantize

EVERY = pytest.mark.parametrize("name", EXPERT_FORMATS)
IDS = [5, 9, 20, 17, 3, 8, 10, 29, 4, 7]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A small model with two experts, hidden size 64 and intermediate size 32, in bfloat16, and all its files."""
    folder = tmp_path / "plain"
    make(folder, {}, lambda weight: ({"weight": weight.bfloat16()}, weight))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "README.md").write_text("a model")
    return folder


def load(folder: Path, storage: Storage | None = None) -> ModelWeights:
    spec = load_spec(folder)
    storage = published_storage(folder, spec) if storage is None else storage
    return load_weights(folder, spec, torch.device("cpu"), torch.float32, storage=storage)


def assert_same(left: ModelWeights, right: ModelWeights) -> None:
    for a, b in zip(iter_tensors(left), iter_tensors(right), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@EVERY
def test_loads_as_the_model_quantised_on_load(plain: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    size = quantize.convert(plain, name, out, threads=3)
    form = quantize.format_for(load_spec(plain), name).form
    found = load(out)
    assert isinstance(found.layers[0].moe.experts.down, QuantizedMatrix)
    assert_same(found, load(plain, Storage(experts=form)))
    assert sorted(os.listdir(tmp_path)) == ["out", "plain"]
    assert {"tokenizer.json", "README.md", "config.json"} <= set(os.listdir(out))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    with safe_open(out / "model-00001-of-00001.safetensors", "pt") as file:  # the library agrees with our header
        assert file.metadata()["expert_format"] == name
        assert set(file.keys()) == set(index["weight_map"])
        assert sum(file.get_tensor(key).nbytes for key in file.keys()) == size  # noqa: SIM118


def test_several_files_of_bounded_size(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "SHARD_BYTES", 6000)
    quantize.convert(plain, "int4", tmp_path / "out", threads=2)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert len(files) > 3
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 8192 for file in files)
    assert_same(load(tmp_path / "out"), load(plain, Storage(experts=EXPERT_FORMATS["int4"])))


def test_gpt_oss_is_written_as_it_is_published(tmp_path: Path) -> None:
    """Experts of a layer in one tensor, gate and up rows alternating, [in, out] in the source."""
    from tiny_checkpoints import build, save

    model = build("gpt_oss")
    if model is None:
        pytest.skip("this transformers has no gpt_oss")
    plain = save(model, tmp_path / "plain")
    out = tmp_path / "out"
    quantize.convert(plain, "mxfp4", out, threads=2)
    names = load_file(next(out.glob("*.safetensors")))
    assert names["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape == (8, 64, 1, 16)
    assert_same(load(out), load(plain, Storage(experts=EXPERT_FORMATS["mxfp4"])))
    with pytest.raises(InputError, match="use --format mxfp4"):
        quantize.convert(plain, "int4", tmp_path / "other", threads=1)


def test_fused_experts_get_names_of_their_own(plain: Path, tmp_path: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    stem = "model.layers.0.mlp.experts"
    expected = load(plain, Storage(experts=EXPERT_FORMATS["int4"]))
    each = {
        n: torch.stack([tensors.pop(f"{stem}.{e}.{n}_proj.weight") for e in range(2)]) for n in ("gate", "up", "down")
    }
    tensors |= {f"{stem}.gate_up_proj": torch.cat([each["gate"], each["up"]], 1), f"{stem}.down_proj": each["down"]}
    save_file(tensors, plain / "model.safetensors")
    quantize.convert(plain, "int4", tmp_path / "out", threads=2)
    assert f"{stem}.1.up_proj.weight_packed" in load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert_same(load(tmp_path / "out"), expected)


@EVERY
def test_transformers_reads_it(plain: Path, tmp_path: Path, name: str) -> None:
    """To the same logits, where the libraries are that it does so with. compressed-tensors rounds to bfloat16."""
    library, kept = ("accelerate", torch.float32) if name == "fp8" else ("compressed_tensors", torch.bfloat16)
    pytest.importorskip(library)
    transformers: Any = pytest.importorskip("transformers")
    out = tmp_path / "out"
    quantize.convert(plain, name, out, threads=2)
    engine = Engine.from_pretrained(out)
    for layer in engine.decoder.weights.layers:
        experts = layer.moe.experts
        experts.gate_up, experts.down = (dequantize(m).to(kept).float() for m in (experts.gate_up, experts.down))
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    with torch.no_grad():
        scores = model(torch.tensor([IDS])).logits[0].float().log_softmax(-1)
    theirs = scores[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])].tolist()
    assert engine.score(IDS) == pytest.approx(theirs, abs=1e-4)


def test_nothing_is_left_of_what_fails(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"][3, 5] = torch.inf
    save_file(tensors, plain / "model.safetensors")
    with pytest.raises(InputError, match=r"experts\.1\.up_proj\.weight: .*not finite"):
        quantize.convert(plain, "int4", tmp_path / "out", threads=2)
    assert os.listdir(tmp_path) == ["plain"]

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match="No space left on device"):
        quantize.convert(plain, "int4", tmp_path / "out", threads=2)
    assert os.listdir(tmp_path) == ["plain"]


def test_an_existing_folder_is_kept(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists already"):
        quantize.convert(plain, "int4", plain, threads=1)


def test_a_quantised_model_is_refused(plain: Path, tmp_path: Path) -> None:
    quantize.convert(plain, "int8", tmp_path / "out", threads=1)
    with pytest.raises(CheckpointError, match="quantised already"):
        quantize.convert(tmp_path / "out", "int4", tmp_path / "again", threads=1)


@pytest.mark.parametrize("name", ["mxfp4", "int4"])
def test_sizes_that_do_not_divide(pristine_folder: Path, tmp_path: Path, name: str) -> None:
    """An intermediate size of 16 is half a group of 4 bits, and one of int8."""
    with pytest.raises(InputError, match=r"16, 32 columns do not divide"):
        quantize.convert(pristine_folder, name, tmp_path / name, threads=1)
    quantize.convert(pristine_folder, "int8", tmp_path / "int8", threads=1)
    assert load(tmp_path / "int8").layers[0].moe.experts.down.format.group == 16


def test_command(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(plain), "--format", "fp8", "--out", str(tmp_path / "out")]
    assert quantize.main(arguments) == 0
    assert "experts in fp8" in capsys.readouterr().out
    assert quantize.main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
