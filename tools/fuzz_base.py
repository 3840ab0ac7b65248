"""The good files that tools/fuzz.py makes damaged copies of."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tritonmoe.engine import Engine, embedded_folder
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.offload.trace import TraceRecorder
from tritonmoe.placement.loader import Placement
from tritonmoe.prediction.default_vectors import DefaultVectors, model_identity
from tritonmoe.prediction.estimator import Estimator
from tritonmoe.prediction.files import DEFAULT_VECTORS, ESTIMATOR, HYBRID
from tritonmoe.prediction.hybrid import HybridChoice

LAYERS, EXPERTS, VOCABULARY = 2, 4, 320
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
PROMPTS = ("Once upon a time", "a" * 200 + "b", "<|endoftext|> é漢\U0001f600\u0000\n\t  x", "")
SLOTS = Placement(policy="exact", expert_slots="50%")


@dataclass(frozen=True)
class Base:
    """Good files, which cases are damaged copies of: the embedded model with fewer layers, experts and tokens."""

    model: Path  # a folder with one file of weights
    sharded: Path  # the same weights in two, with an index
    trace: Path

    @classmethod
    def make(cls, folder: Path) -> Base:
        base = cls(folder / "model", folder / "sharded", folder / "trace.npz")
        base.model.mkdir()
        source = embedded_folder()
        config = json.loads((source / "config.json").read_text())
        config |= {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": 2}
        (base.model / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY}))
        (base.model / "generation_config.json").write_text(json.dumps(GENERATION))
        (base.model / "tokenizer.json").write_text(json.dumps(_tokenizer(source)))
        shutil.copy(source / "tokenizer_config.json", base.model)
        tensors = _tensors(source)
        save_file(tensors, base.model / "model.safetensors", metadata={"format": "pt"})
        shutil.copytree(base.model, base.sharded)
        (base.sharded / "model.safetensors").unlink()
        names = sorted(tensors)
        files = {name: SHARDS[i * 2 // len(names)] for i, name in enumerate(names)}
        for file in SHARDS:
            save_file({name: tensors[name] for name in names if files[name] == file}, base.sharded / file)
        (base.sharded / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
        base._measure()
        return base

    def _measure(self) -> None:
        """Default vectors and a trace of the model itself, so that undamaged ones are accepted."""
        engine = Engine.from_pretrained(self.model, device="cpu", placement=Placement("on-demand", expert_slots="50%"))
        spec = engine.decoder.spec
        counts = torch.ones(len(spec.moe_layers), EXPERTS, dtype=torch.int64)
        sums = torch.randn(*counts.shape, spec.hidden_size, generator=torch.Generator().manual_seed(0)).double()
        identity = model_identity(spec, engine.decoder.weights)
        vectors = DefaultVectors.from_sums(sums, counts)
        vectors.save(self.model / DEFAULT_VECTORS, identity, "none")
        estimator = Estimator.initial(spec, 16, 16, corrects=True, vectors=vectors.identity, seed=0)
        estimator.save(self.model / ESTIMATOR, identity, {})
        HybridChoice(dict.fromkeys(list(spec.moe_layers)[1:], "estimator")).save(self.model / HYBRID, identity, {})
        engine.close()
        engine = Engine.from_pretrained(self.model, device="cpu", placement=SLOTS)
        with TraceRecorder(self.trace).attach(engine.decoder):
            engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=6))
        engine.close()

    def lay_out(self, folder: Path, source: Path, **files: bytes) -> None:
        """The files of `source` in `folder`, some with other contents: links, which `files` does not write through."""
        for path in source.iterdir():
            os.link(path, folder / path.name)
        for name, data in files.items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_bytes(data)


GENERATION = {
    "eos_token_id": [0], "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.0,
    "repetition_penalty": 1.05,
}  # fmt: skip


def _tokenizer(source: Path) -> dict[str, Any]:
    """The first tokens of the vocabulary, and the merges that make them."""
    values = json.loads((source / "tokenizer.json").read_text())
    model = values["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < VOCABULARY}
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    model["merges"] = [pair for pair in pairs if all(text in model["vocab"] for text in (*pair, "".join(pair)))]
    values["added_tokens"] = [token for token in values["added_tokens"] if token["id"] < VOCABULARY]
    return values


def _tensors(source: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    with safe_open(source / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a dict
            parts = name.split(".")
            layer = int(parts[parts.index("layers") + 1]) if "layers" in parts else 0
            expert = int(parts[parts.index("experts") + 1]) if "experts" in parts else 0
            if layer < LAYERS and expert < EXPERTS:
                rows = EXPERTS if name.endswith("mlp.gate.weight") else VOCABULARY if "embed_tokens" in name else None
                tensors[name] = file.get_tensor(name)[:rows].clone()
    return tensors


def split_header(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(text: bytes, data: bytes, off_by: int = 0) -> bytes:
    return max(0, len(text) + off_by).to_bytes(8, "little") + text + data
