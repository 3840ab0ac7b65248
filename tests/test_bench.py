"""The benchmark: floors calculated by hand, and whole runs on a tiny model."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import baseline, cli, floor, measure
from bench.ours import Ours
from bench.random_weights import SCALE, random_storage, random_weights
from conftest import TINY_CONFIG
from test_architectures import GPT_OSS
from tiny_checkpoints import build, save

from tritonmoe.checkpoint.architectures import load_spec, parse_config
from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.checkpoint.loading import load_weights
from tritonmoe.checkpoint.quantization import EXPERT_FORMATS
from tritonmoe.generation.session import allocate_cache
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.kv_cache import KVCache
from tritonmoe.model.matrices import floats
from tritonmoe.model.weights import PLAIN

CONFIGS = Path(cli.__file__).parent / "configs"
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of memory is not what is tested here, and a real measurement takes a second."""
    monkeypatch.setitem(floor.COPY_BYTES, "cpu", 1 << 20)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY_CONFIG))
    return path


def run(tmp_path: Path, *options: object) -> dict[str, Any]:
    output = tmp_path / "out" / "bench.json"
    arguments = [*options, "--device", "cpu", "--output", output]
    assert cli.main([str(argument) for argument in arguments]) == 0
    return json.loads(output.read_text())


def test_weight_bytes_by_hand() -> None:
    spec = parse_config(QWEN3_30B)
    attention = 2 * 2048 * (4096 + 2 * 512 + 4096)
    norms = 4 * (2 * 2048 + 2 * 128)
    router = 4 * 128 * 2048
    expert = 2 * 3 * 768 * 2048
    ends = 2 * 2048 * 151936 + 4 * 2048  # the head and the last norm
    layers = 48 * (attention + norms + router)
    found = floor.weight_bytes_per_step(spec, torch.bfloat16, 1)
    assert found == ends + layers + 48 * 8 * expert + 2 * 2048
    assert found == pytest.approx(6.11e9, rel=1e-3)
    # Four rows that use 20 experts in each layer, and read four rows of the embedding.
    found = floor.weight_bytes_per_step(spec, torch.bfloat16, 4, [20] * 48)
    assert found == ends + layers + 48 * 20 * expert + 4 * 2 * 2048


def test_tied_head_and_dense_layers_are_counted() -> None:
    values = {**TINY_CONFIG, "tie_word_embeddings": True, "mlp_only_layers": [0]}
    attention = 4 * (32 * (64 + 2 * 32) + 64 * 32 + 2 * 32 + 2 * 16)
    dense, moe = 4 * 3 * 48 * 32, 4 * (4 * 32 + 2 * 3 * 16 * 32)
    expected = 2 * attention + dense + moe + 4 * (260 * 32 + 32) + 4 * 32
    assert floor.weight_bytes_per_step(parse_config(values), torch.float32, 1) == expected


def test_uniform_routing_by_hand() -> None:
    """One row uses its 2 experts of 4; of two rows, each expert is missed by both with probability 1/4."""
    spec = parse_config(TINY_CONFIG)
    assert floor.expected_distinct(spec, 1) == [2, 2]
    assert floor.expected_distinct(spec, 2) == [3, 3]


def test_kv_bytes_by_hand() -> None:
    assert floor.kv_bytes_per_step(parse_config(QWEN3_30B), torch.bfloat16, 1, 1000) == 48 * 2 * 512 * 2 * 1000
    # GPT-OSS with four layers: two of them read no more than their window of 128.
    spec = parse_config(GPT_OSS)
    assert floor.kv_bytes_per_step(spec, torch.bfloat16, 3, 1000) == 3 * 2 * 2 * 512 * 2 * (1000 + 128)
    assert floor.kv_bytes_per_step(spec, torch.bfloat16, 1, 100) == 4 * 2 * 512 * 2 * 100


@pytest.mark.parametrize(("name", "gigabytes"), [("qwen3-30b-a3b", 6.11), ("gpt-oss-20b", 7.21)])
def test_configs_are_understood(name: str, gigabytes: float) -> None:
    spec = parse_config(read_json(CONFIGS / f"{name}.json"))
    assert floor.weight_bytes_per_step(spec, torch.bfloat16, 1) == pytest.approx(1e9 * gigabytes, rel=0.005)


def test_random_weights_have_the_scale_of_a_model() -> None:
    weights = random_weights(parse_config(TINY_CONFIG), torch.device("cpu"), torch.bfloat16)
    layer = weights.layers[1]
    assert layer.moe is not None
    assert layer.moe.experts.gate_up.float().std().item() == pytest.approx(SCALE, rel=0.1)
    assert layer.input_norm.unique().tolist() == [1.0]
    assert torch.equal(layer.moe.router, layer.moe.router.bfloat16().float())


def test_json_is_complete(
    tmp_path: Path, config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--random-weights", config_file, "--batch", "1,3", "--context", "5", "--new-tokens", "3"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, options), "--output", str(tmp_path / "out" / "bench.json")])
    result = run(tmp_path, *options)
    assert {"provenance", "settings", "weight_bytes", "memory_gbps", "memory_gbps_after", "rows"} <= result.keys()
    assert str(tmp_path) not in json.dumps(result)
    assert "--output bench.json" in result["provenance"]["command"]
    assert [(row["batch"], row["context"], row["status"]) for row in result["rows"]] == [
        (1, 5, "measured"),
        (3, 5, "measured"),
    ]
    for row in result["rows"]:
        figures = row["ours"]
        assert 0 < figures["tpot_ms"]["p10"] <= figures["tpot_ms"]["median"] <= figures["tpot_ms"]["p90"]
        assert figures["ttft_ms"] > 0
        assert figures["tpot_pipelined_ms"] > 0
        assert figures["tokens_per_s"] > 0
        assert row["host_peak_bytes"] > 1 << 20
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / figures["tpot_ms"]["median"])
        read = row["weight_bytes_per_step"] + row["kv_bytes_per_step"]
        assert row["floor_ms"] == pytest.approx(1e3 * read / (1e9 * result["memory_gbps"]))
        assert row["bytes_per_token"] == round(read / row["batch"])
        assert [2 <= layer["per_step"] <= layer["over_all"] <= 4 for layer in row["distinct_experts"]] == [True] * 2
    assert result["rows"][0]["distinct_experts"][0]["per_step"] == 2
    # Each of the three steps reads the prompt, what was decoded before it, and its own position: 6, 7, 8.
    assert result["rows"][0]["kv_bytes_per_step"] == 2 * 2 * 32 * 4 * 7
    assert capsys.readouterr().out.splitlines()[-3].startswith("batch context |")


def test_checkpoint_is_measured(tmp_path: Path, pristine_folder: Path) -> None:
    result = run(tmp_path, "--model", pristine_folder, "--batch", 1, "--context", 4, "--new-tokens", 2)
    assert result["settings"]["weights"] == "checkpoint"
    assert result["settings"]["model"] == pristine_folder.name
    assert result["rows"][0]["status"] == "measured"


def test_skipped_rows_say_why(tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(decoder: Decoder, batch: int, length: int) -> KVCache:
        if batch == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GB\nmore about it")
        return allocate_cache(decoder, batch, length)

    monkeypatch.setattr("bench.ours.allocate_cache", allocate)
    options = ["--random-weights", config_file, "--batch", "1,2", "--context", "4,127", "--new-tokens", "2"]
    rows = run(tmp_path, *options)["rows"]
    assert [row["status"] for row in rows] == ["measured", "skipped", "skipped", "skipped"]
    assert rows[1]["reason"] == "CUDA out of memory. Tried to allocate 1 GB"
    assert rows[2]["reason"] == "127 + 2 tokens exceed the model's context of 128"


def test_time_limit_is_recorded(tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--random-weights", config_file, "--batch", "1", "--context", "4", "--new-tokens", "2"]
    clock = iter(range(0, 10**9, 100))
    monkeypatch.setattr(cli.time, "perf_counter", lambda: float(next(clock)))
    assert run(tmp_path, *options, "--time-limit", 5)["rows"][0]["reason"] == "not begun within --time-limit 5"


def test_profile_is_written(tmp_path: Path, config_file: Path) -> None:
    options = ["--random-weights", config_file, "--batch", "1", "--context", "4", "--new-tokens", "2"]
    row = run(tmp_path, *options, "--profile")["rows"][0]
    with gzip.open(tmp_path / "out" / row["profile"]["trace"], "rt") as file:
        assert "traceEvents" in json.load(file)
    kernels = row["profile"]["kernels"]
    assert sum(kernel["share"] for kernel in kernels) == pytest.approx(1)
    assert [kernel["total_us"] for kernel in kernels] == sorted((k["total_us"] for k in kernels), reverse=True)


def test_baseline_stands_beside_ours(tmp_path: Path, config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    options = ["--random-weights", config_file, "--batch", "2", "--context", "9", "--new-tokens", "4"]
    result = run(tmp_path, *options, "--baseline", "transformers")
    row = result["rows"][0]
    assert row["baseline"]["status"] == "measured"
    assert row["baseline"]["agreement"]["prefill_logits_max_difference"] < 1e-5
    assert row["baseline"]["agreement"]["leading_steps_with_same_tokens"] == 4
    assert row["speedup"] == row["baseline"]["tpot_ms"]["median"] / row["ours"]["tpot_ms"]["median"]
    assert result["baseline"]["copied_bytes"] == 0
    assert capsys.readouterr().out.rstrip().endswith("x")


@pytest.mark.parametrize("name", ["qwen3_moe-yarn", "qwen3_moe-tied", "qwen3_moe-window", "gpt_oss", "mixtral"])
def test_baseline_decodes_alike(name: str, tmp_path: Path) -> None:
    """Past sliding windows, and twice from the same point: what a restart leaves behind must not matter."""
    pytest.importorskip("transformers")
    folder = save(build(name), tmp_path)
    spec = load_spec(folder)
    decoder = Decoder(spec, load_weights(folder, spec, torch.device("cpu"), torch.float32))
    shared = baseline.SharedModel(read_json(folder / "config.json"), decoder)
    prompts = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    ours, theirs = Ours(decoder, prompts, 6), baseline.Theirs(shared, prompts, 6)
    logits, their_logits = (measure.time_prefill(stepper)[1] for stepper in (ours, theirs))
    assert (logits - their_logits).abs().max() < 1e-4
    first = measure.time_steps(theirs, 6)
    assert measure.time_steps(ours, 6).tokens == first.tokens == measure.time_steps(theirs, 6).tokens


def test_masks_of_plain_attention() -> None:
    """Those that a captured step makes itself give the tokens that transformers' own masks give."""
    pytest.importorskip("transformers")
    config = build("gpt_oss").config.to_dict()
    spec = parse_config(config)
    decoder = Decoder(spec, random_weights(spec, torch.device("cpu"), torch.float32))
    shared = baseline.SharedModel(config, decoder)
    assert shared.attention == "eager"
    theirs = baseline.Theirs(shared, torch.arange(20)[None], 6)
    theirs.prefill()
    expected = measure.time_steps(theirs, 6).tokens
    theirs._captures = True
    assert measure.time_steps(theirs, 6).tokens == expected
    assert theirs._masks().keys() == {"full_attention", "sliding_attention"}


def test_failed_baseline_is_recorded(tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def fail(self: baseline.Theirs) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(baseline.Theirs, "prepare_decoding", fail)
    options = ["--random-weights", config_file, "--batch", "1", "--context", "4", "--new-tokens", "2"]
    row = run(tmp_path, *options, "--baseline", "transformers")["rows"][0]
    assert row["status"] == "measured"
    assert row["baseline"] == {"status": "skipped", "reason": "operation not permitted when stream is capturing"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one of the arguments --model --random-weights is required"),
        (["--model", "nano", "--random-weights", "x.json"], "not allowed with argument"),
        (["--model", "nano", "--batch", "1,0"], "argument --batch: '0' is not a positive integer"),
        (["--model", "nano", "--context", "1e3"], "argument --context: '1e3' is not a positive integer"),
        (["--model", "nano", "--baseline", "llama.cpp"], "invalid choice: 'llama.cpp'"),
        (["--model", "nano", "--dtype", "int3"], "--dtype 'int3' is not supported"),
        (["--random-weights", "missing.json"], "missing.json: no such file"),
    ],
)
def test_bad_arguments_give_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*options, "--device", "cpu", "--output", str(tmp_path / "out.json")])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out.json").exists()


def test_script_and_package_of_one_name_coexist() -> None:
    script = Path(cli.__file__).parent.parent / "bench.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script), "--help"], env=environment, capture_output=True, text=True, check=True
    )
    assert "--random-weights" in done.stdout


@pytest.mark.parametrize(("form", "bits"), [("mxfp4", 4.25), ("int4", 4.5), ("int8", 8.125), ("fp8", 8.002)])
def test_fewer_bits_are_fewer_bytes_of_the_floor(form: str, bits: float) -> None:
    """Eight experts of Qwen3-30B-A3B in each layer, and the rest as it is."""
    spec = parse_config(read_json(CONFIGS / "qwen3-30b-a3b.json"))
    storage = random_storage(form, "published", spec, torch.bfloat16)
    plain, packed = (floor.weight_bytes_per_step(spec, torch.bfloat16, 1, None, s) for s in (PLAIN, storage))
    weights_read = 48 * 8 * 3 * 2048 * 768
    assert plain - packed == pytest.approx(weights_read * (16 - bits) / 8, rel=1e-4)


def test_random_codes_have_the_scale_of_a_model() -> None:
    spec = parse_config({**TINY_CONFIG, "moe_intermediate_size": 256})
    for name, form in EXPERT_FORMATS.items():
        storage = random_storage(name, "int8", spec, torch.float32)
        weights = random_weights(spec, torch.device("cpu"), torch.float32, storage=storage)
        moe = weights.layers[0].moe
        assert moe is not None
        values = floats(moe.experts.gate_up)
        assert values.isfinite().all()
        assert 0.5 * SCALE < values.std().item() < 2 * SCALE, form
        assert 0.5 * SCALE < floats(weights.head).std().item() < 2 * SCALE


def test_weights_of_fewer_bits_are_measured_and_named(tmp_path: Path, config_file: Path) -> None:
    options = ["--random-weights", config_file, "--batch", "2", "--context", "5", "--new-tokens", "2"]
    result = run(tmp_path, *options, "--expert-dtype", "int4", "--dense-dtype", "fp8")
    settings = result["settings"]
    assert (settings["expert_dtype"], settings["dense_dtype"]) == ("int4", "fp8")
    assert result["rows"][0]["status"] == "measured"
    plain = run(tmp_path, *options)
    assert plain["settings"]["expert_dtype"] == plain["settings"]["dense_dtype"] == plain["settings"]["dtype"]
    assert 2 * result["weight_bytes"] < plain["weight_bytes"]
    with pytest.raises(SystemExit):
        run(tmp_path, *options, "--expert-dtype", "int4", "--baseline", "transformers")
