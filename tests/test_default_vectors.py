"""Default vectors: means against a loop over tokens, unseen experts, files and the models they belong to, the tool."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import calibrate as tool
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY_CONFIG, tiny_tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nano.tasks import is_test, training_items
from tritonmoe.checkpoint.architectures import load_spec, parse_config
from tritonmoe.checkpoint.loading import load_weights
from tritonmoe.errors import InputError
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.operations import REFERENCES
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ModelWeights
from tritonmoe.prediction.default_vectors import DefaultVectors, load_default_vectors, model_identity
from tritonmoe.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
SPEC = parse_config(TINY_CONFIG, "config.json")
WINDOWS = [[5, 9, 77, 200, 31, 8, 8, 90, 3, 4, 5, 6, 250], [44, 45], [17] * 30]
OTHER_SPEC = replace(SPEC, layers=SPEC.layers[:1])


@pytest.fixture(scope="module")
def weights(pristine_folder: Path) -> ModelWeights:
    return load_weights(pristine_folder, SPEC, CPU, torch.float32)


def example(weights: ModelWeights) -> DefaultVectors:
    return tool.calibrate(Decoder(SPEC, weights), WINDOWS, 64)


def brute_force(weights: ModelWeights) -> tuple[dict[tuple[int, int], torch.Tensor], dict[tuple[int, int], int]]:
    """Mean output and count by (layer, expert): what went into the experts, run through them a token at a time."""
    inputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def recording(x: torch.Tensor, slot_ids: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        inputs.append((x.clone(), slot_ids.clone()))
        return REFERENCES.expert_gemm(x, slot_ids, *arguments, **options)

    decoder = Decoder(SPEC, weights, REFERENCES._replace(expert_gemm=recording))
    cache = tool.allocate_cache(decoder, 1, 64)
    for window in WINDOWS:
        decoder.prefill(torch.tensor([window]), 0, cache)
    outputs = defaultdict(list)
    for call, (x, ids) in enumerate(inputs):
        layer = call % len(SPEC.layers)
        moe = weights.layers[layer].moe
        assert moe is not None
        for token in range(len(x)):
            for expert in ids[token].tolist():
                gate, up = (moe.experts.gate_up[expert].double() @ x[token].double()).chunk(2)
                outputs[layer, expert].append(moe.experts.down[expert].double() @ (F.silu(gate) * up))
    means = {key: torch.stack(found).mean(dim=0) for key, found in outputs.items()}
    return means, {key: len(found) for key, found in outputs.items()}


def test_means_and_counts_are_those_of_a_loop(weights: ModelWeights) -> None:
    found = example(weights)
    means, counts = brute_force(weights)
    tokens = sum(map(len, WINDOWS))
    assert found.counts.sum(dim=1).tolist() == [2 * tokens] * 2
    for (layer, expert), mean in means.items():
        assert found.counts[layer, expert] == counts[layer, expert]
        torch.testing.assert_close(found.vectors[layer, expert].double(), mean, rtol=1e-5, atol=1e-6)
    assert int((found.counts > 0).sum()) == len(means)


@pytest.mark.parametrize("chunk", [3, 17])
def test_chunks_and_slices_change_nothing(weights: ModelWeights, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = example(weights)
    monkeypatch.setattr(tool, "prefill_chunk", lambda device: chunk)
    monkeypatch.setattr(tool, "SLICE_TOKENS", 2)
    found = example(weights)
    assert torch.equal(found.counts, expected.counts)
    torch.testing.assert_close(found.vectors, expected.vectors, rtol=1e-4, atol=1e-5)


def test_the_decoder_is_left_as_it_was(weights: ModelWeights) -> None:
    decoder = Decoder(SPEC, weights)
    tool.calibrate(decoder, WINDOWS, 64)
    assert decoder.hooks.on_experts is None
    with pytest.raises(IndexError):
        tool.calibrate(decoder, [[SPEC.vocab_size]], 64)
    assert decoder.hooks.on_experts is None


def test_nothing_to_calibrate_with(weights: ModelWeights) -> None:
    with pytest.raises(InputError, match="there is no text"):
        tool.calibrate(Decoder(SPEC, weights), [], 64)


def test_outputs_that_are_not_finite(pristine_folder: Path) -> None:
    broken = load_weights(pristine_folder, SPEC, CPU, torch.float32)
    moe = broken.layers[1].moe
    assert moe is not None
    moe.experts.down.fill_(float("inf"))
    with pytest.raises(InputError, match="not finite"):
        example(broken)


def test_unseen_experts_get_the_mean_of_the_others() -> None:
    sums = torch.zeros(2, 4, 3, dtype=torch.float64)
    counts = torch.tensor([[2, 0, 8, 0], [1, 1, 1, 1]])
    sums[0, 0], sums[0, 2] = torch.tensor([2.0, 4.0, 6.0]), torch.tensor([24.0, 0.0, 8.0])
    sums[1] = torch.arange(12.0).view(4, 3)
    found = DefaultVectors.from_sums(sums, counts)
    # Each seen expert weighs the same: the mean of [1, 2, 3] and [3, 0, 1].
    assert found.vectors[0].tolist() == [[1, 2, 3], [2, 1, 2], [3, 0, 1], [2, 1, 2]]
    assert torch.equal(found.vectors[1], sums[1].float())
    assert torch.equal(found.counts, counts)
    with pytest.raises(ValueError, match="at least one token in every layer"):
        DefaultVectors.from_sums(sums, torch.tensor([[2, 0, 8, 0], [0, 0, 0, 0]]))


def test_by_layer_skips_dense_layers() -> None:
    dense = replace(SPEC.layers[0], moe=None, dense_size=8)
    spec = replace(SPEC, layers=(dense, SPEC.layers[0], dense, SPEC.layers[1]))
    vectors = torch.randn(2, 4, 32)
    found = DefaultVectors(vectors, torch.ones(2, 4, dtype=torch.int64)).by_layer(spec, CPU, torch.bfloat16)
    assert found.shape == (4, 4, 32)
    assert torch.equal(found[[1, 3]], vectors.bfloat16())
    assert not found[[0, 2]].any()


def test_file_gives_back_what_was_saved(weights: ModelWeights, tmp_path: Path) -> None:
    saved = example(weights)
    saved.save(tmp_path / "vectors.safetensors", model_identity(SPEC, weights), "a test")
    found = load_default_vectors(tmp_path / "vectors.safetensors", SPEC, weights)
    assert torch.equal(found.vectors, saved.vectors)
    assert torch.equal(found.counts, saved.counts)
    with safe_open(tmp_path / "vectors.safetensors", "pt") as file:
        assert file.metadata()["corpus"] == "a test"
    with pytest.raises(InputError, match="cannot be written"):
        saved.save(tmp_path / "missing" / "vectors.safetensors", "", "")


def test_identity_is_the_routers_and_sizes(pristine_folder: Path, weights: ModelWeights) -> None:
    expected = model_identity(SPEC, weights)
    assert expected.startswith("sha256:")
    other = load_weights(pristine_folder, SPEC, CPU, torch.bfloat16)
    assert model_identity(SPEC, other) == expected  # the type that the experts are loaded in does not matter
    for layer in other.layers:
        assert layer.moe is not None
        layer.moe.experts.down.zero_()
    assert model_identity(SPEC, other) == expected
    last = other.layers[-1].moe
    assert last is not None
    last.router[-1, -1] += 1e-3
    assert model_identity(SPEC, other) != expected
    assert model_identity(replace(SPEC, model_type="qwen2_moe"), weights) != expected
    last.router[-1, -1] = weights.layers[-1].moe.router[-1, -1]  # type: ignore[union-attr]
    last.selection_bias = torch.zeros(4)
    assert model_identity(SPEC, other) != expected


def test_files_that_are_refused(weights: ModelWeights, tmp_path: Path) -> None:
    path = tmp_path / "vectors.safetensors"
    example(weights).save(path, model_identity(SPEC, weights), "a test")
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    data = path.read_bytes()

    def refused(match: str, spec: ModelSpec = SPEC) -> None:
        with pytest.raises(InputError, match=match) as caught:
            load_default_vectors(path, spec, weights)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(str(path))

    def write(changes: dict[str, torch.Tensor], names: dict[str, str] | None = None) -> None:
        save_file({**tensors, **changes}, path, metadata={**metadata, **(names or {})})

    refused(r"vectors is float32 \[2, 4, 32\] where this model has \[1, 4, 32\]; make the file anew", OTHER_SPEC)
    write({"vectors": tensors["vectors"][:, :3].contiguous()})
    refused(r"vectors is float32 \[2, 3, 32\] where this model has \[2, 4, 32\]")
    write({"vectors": tensors["vectors"].half()})
    refused(r"vectors is float16 \[2, 4, 32\]")
    write({"counts": tensors["counts"].flatten()})
    refused(r"counts is int64 \[8\] where this model has \[2, 4\]")
    write({}, {"model": "sha256:0"})
    refused("default vectors of another model")
    write({"vectors": tensors["vectors"] * float("nan")})
    refused("NaN or infinite")
    write({"more": torch.zeros(1)})
    refused("not a file of default vectors")
    write({}, {"format": "something else"})
    refused("not a file of default vectors")
    save_file(tensors, path)
    refused("not a file of default vectors")
    path.write_bytes(data[:-10])
    refused("truncated: .*; make the file anew")
    path.write_bytes(b"")
    refused("truncated or not a safetensors file")
    path.unlink()
    refused("cannot be read")
    path.mkdir()
    refused("cannot be read")


def test_another_model_is_refused(
    pristine_folder: Path, model_folder: Path, weights: ModelWeights, tmp_path: Path
) -> None:
    save_file(tiny_tensors(seed=1), model_folder / "model.safetensors", metadata={"format": "pt"})
    other = load_weights(model_folder, SPEC, CPU, torch.float32)
    example(weights).save(tmp_path / "vectors.safetensors", model_identity(SPEC, weights), "a test")
    with pytest.raises(InputError, match="default vectors of another model") as caught:
        load_default_vectors(tmp_path / "vectors.safetensors", SPEC, other)
    assert "\n" not in str(caught.value)


def test_layers_with_different_numbers_of_experts() -> None:
    moe = SPEC.layers[1].moe
    assert moe is not None
    uneven = replace(SPEC, layers=(SPEC.layers[0], replace(SPEC.layers[1], moe=replace(moe, num_experts=8))))
    with pytest.raises(InputError, match="this model has 4 and 8 experts"):
        tool.Accumulator(uneven)


def test_windows(pristine_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(pristine_folder)  # a token a byte; <|end|> is 0
    a, b = tokenizer.encode("abc"), tokenizer.encode("de")
    found = list(tool.windows_of([["ab", "c"], ["de"]], tokenizer, 4, 100))
    assert found == [[0, *a], [0, *b]]
    assert list(tool.windows_of([["abc"], ["de"]], tokenizer, 3, 5)) == [[0, *a[:2]], [a[2], 0]]
    assert list(tool.windows_of([], tokenizer, 3, 5)) == []


def test_pieces_end_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "PIECE_CHARACTERS", 10)
    text = "one line\nanother line, a long one\n\nüñí\nlast"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    found = list(tool.pieces(tmp_path / "text.txt"))
    assert "".join(found) == text
    assert len(found) == 2
    assert all(piece.endswith("\n") for piece in found[:-1])


def test_the_sample_of_the_embedded_model_is_not_what_it_is_tested_on() -> None:
    name, texts = tool.built_in("nano")
    assert name == "built-in sample, tasks and stories"
    assert set(tool.SAMPLE) < set(texts)
    tasks = [task for task in training_items(tool.NANO_TASKS, seed=0) if task.text in texts]
    assert len(tasks) == tool.NANO_TASKS
    assert not any(is_test(task.prompt) for task in tasks)
    assert tool.built_in("some/model") == ("built-in sample", list(tool.SAMPLE))


def test_tool(pristine_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("Hello, world.\n" * 30)
    out = tmp_path / "vectors.safetensors"
    options = ["--model", str(pristine_folder), "--out", str(out), "--tokens", "200", "--max-context", "64"]
    assert tool.main([str(tmp_path / "text.txt"), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    spec = load_spec(pristine_folder)
    found = load_default_vectors(out, spec, load_weights(pristine_folder, spec, CPU, torch.float32))
    assert found.counts.sum(dim=1).tolist() == [400, 400]
    for layer, line in enumerate(lines[1:3]):
        counts = found.counts[layer]
        assert line.split() == [str(n) for n in (layer, int(counts.min()), int(counts.max()), int((counts == 0).sum()))]
    assert lines[-1] == f"default vectors from 200 tokens written to {out}"
    with safe_open(out, "pt") as file:
        assert file.metadata()["corpus"] == "200 tokens: text.txt"
    assert tool.main([str(tmp_path / "text.txt"), "--built-in", *options]) == 0
    with safe_open(out, "pt") as file:
        assert file.metadata()["corpus"] == "200 tokens: built-in sample, text.txt"
    assert tool.main(options) == 0
    assert "from 200 tokens" in capsys.readouterr().out


def test_tool_with_experts_in_host_memory(pristine_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Hello, world.\n" * 30)
    options = [str(tmp_path / "text.txt"), "--model", str(pristine_folder), "--tokens", "300"]
    assert tool.main([*options, "--out", str(tmp_path / "resident")]) == 0
    assert tool.main([*options, "--out", str(tmp_path / "fetched"), "--expert-slots", "2"]) == 0
    resident, fetched = (load_file(tmp_path / name) for name in ("resident", "fetched"))
    assert torch.equal(resident["vectors"], fetched["vectors"])
    assert torch.equal(resident["counts"], fetched["counts"])


def test_tool_reports_unseen_experts() -> None:
    lines = tool.report(SPEC, torch.tensor([[3, 0, 5, 2], [4, 1, 1, 4]]))
    assert [line.split() for line in lines[1:3]] == [["0", "0", "5", "1"], ["1", "1", "4", "0"]]
    assert lines[-1] == "1 of 8 experts were never chosen: each has the mean of its layer's others"


def test_tool_refuses_in_one_line(pristine_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    tokenizer_only = ["--model", str(pristine_folder)]
    out = ["--out", str(tmp_path / "vectors.safetensors")]

    def refused(*arguments: str) -> str:
        assert tool.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert len(lines) == 1, captured.err
        return lines[0]

    assert refused(*tokenizer_only) == "error: the following arguments are required: --out (--help lists the options)"
    assert "--tokens must be at least 1, not 0" in refused(*out, "--tokens", "0")
    assert "invalid int value: 'many'" in refused(*out, "--tokens", "many")
    assert "there is no such folder" in refused("--out", str(tmp_path / "missing" / "file"))
    assert "none.txt: No such file" in refused(str(tmp_path / "none.txt"), *out)
    assert "latin.txt is not UTF-8" in refused(str(tmp_path / "latin.txt"), *out)
    assert "--max-context must be from 2" in refused(*tokenizer_only, *out, "--max-context", "1")
    assert "--expert-slots 0 hold no expert" in refused(*tokenizer_only, *out, "--expert-slots", "0")
    assert "empty.txt is empty" in refused(str(tmp_path / "empty.txt"), *out)
    assert "no-model" in refused(*out, "--model", str(tmp_path / "no-model"))
