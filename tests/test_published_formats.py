"""Checkpoints that the libraries of quantised formats wrote, by `make_published_checkpoints.py`: read to the bit, kept in
their own bits, and refused by name where they are something else."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from make_published_checkpoints import DATA, hash_of
from safetensors.torch import load_file, save_file

from tritonmoe.architectures import load_quantization, load_spec
from tritonmoe.errors import CheckpointError, ConfigError
from tritonmoe.loading import expert_format, load_weights
from tritonmoe.matrices import floats, row_slice, select
from tritonmoe.weights import ModelWeights, Storage, iter_tensors
from tritonmoe_kernels.quantized import Matrix, QuantizedMatrix, WeightFormat

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


def load(folder: Path, storage: Storage = Storage()) -> ModelWeights:
    return load_weights(folder, load_spec(folder), torch.device("cpu"), torch.float32, storage=storage)


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
    return {name: hash_of(floats(matrix, torch.float32)) for name, matrix in matrices(weights).items()}


@EVERY
def test_values_are_those_of_the_formats_library(name: str) -> None:
    """In every bit of float32, for each matrix of the model."""
    assert hashes(load(DATA / name)) == RECORD["hashes"][name]


@EVERY
def test_experts_are_kept_in_their_own_bits(name: str) -> None:
    """Their codes and scales, not codes found anew: the values would differ."""
    folder = DATA / name
    form = expert_format(folder, load_spec(folder))
    assert form == FORMATS[name]
    weights = load(folder, Storage(experts=form))
    assert isinstance(weights.layers[0].moe.experts.down, QuantizedMatrix)
    assert hashes(weights) == RECORD["hashes"][name]
