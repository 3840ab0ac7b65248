"""Fixtures: a small random model folder that is complete, and the embedded model."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

if os.environ.get("PYTEST_XDIST_WORKER"):  # processes beside this one use the other cores
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of commands that tests start

TINY_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "test_interpreted" not in item.nodeid)  # it takes minutes, beside which the rest runs


def tiny_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of `TINY_CONFIG` under their published names."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return 0.25 * torch.randn(shape, generator=generator)

    hidden, size = TINY_CONFIG["hidden_size"], TINY_CONFIG["moe_intermediate_size"]
    tensors = {"model.embed_tokens.weight": noise(260, hidden), "lm_head.weight": noise(260, hidden)}
    tensors["model.norm.weight"] = 1 + noise(hidden)
    for i in range(TINY_CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = 1 + noise(hidden)
        for name, shape in {"q": (64, hidden), "k": (32, hidden), "v": (32, hidden), "o": (hidden, 64)}.items():
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = noise(*shape)
        for name in ("q_norm", "k_norm"):
            tensors[f"{layer}.self_attn.{name}.weight"] = 1 + noise(16)
        tensors[f"{layer}.mlp.gate.weight"] = noise(4, hidden)
        for e in range(4):
            for name, shape in {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}.items():
                tensors[f"{layer}.mlp.experts.{e}.{name}_proj.weight"] = noise(*shape)
    return tensors


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte, after the special <|end|> (0), <|user|> (1) and <|assistant|> (2)."""
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(special + alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return backend


@pytest.fixture(autouse=True)
def network_attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Tests reach this machine alone; a test that tries more fails, also where its code swallows the error."""
    attempts: list[str] = []

    def guarded(function: Any, place: int) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            address = arguments[place]
            host = address[0] if isinstance(address, tuple) else address
            is_internet = place == 0 or arguments[0].family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and host not in (None, "", "localhost", "127.0.0.1", "::1"):
                attempts.append(str(host))
                raise OSError(f"tests have no network: {host}")
            return function(*arguments, **options)

        return call

    for owner, name, place in (
        (socket.socket, "connect", 1),
        (socket.socket, "connect_ex", 1),
        (socket, "getaddrinfo", 0),
    ):
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name), place))
    yield attempts
    assert not attempts


@pytest.fixture(scope="session")
def pristine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete, valid model folder; not to be changed."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    save_file(tiny_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": template}),
    )
    return folder


@pytest.fixture
def model_folder(pristine_folder: Path, tmp_path: Path) -> Path:
    """A private copy of the valid model folder, to be damaged."""
    return Path(shutil.copytree(pristine_folder, tmp_path / "model"))
