"""Tiny quantised checkpoints written by the libraries of their formats, and what those libraries make of them.

Run where the libraries are, which need not be where the tests run:

    pip install --target SITE --no-deps compressed-tensors loguru frozendict autoawq accelerate gptqmodel ...
    PYTHONPATH=SITE:tests python tests/make_published_checkpoints.py

The packages of AutoAWQ and GPTQModel start GPU machinery when they are imported; only their modules that pack and
unpack are imported here, from beside their `__init__`. tests/data/published.json has the versions, and for each matrix
the hash of its values as the library dequantises it in float32.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DATA = Path(__file__).resolve().parent / "data"
Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]  # by the last word of their names; the library's values in float32

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 0,
}
# Whole blocks of 128 by 128 are the least that transformers quantises; one expert keeps the file small.
BLOCK_CONFIG = {**CONFIG, "hidden_size": 128, "moe_intermediate_size": 128, "num_attention_heads": 4, "num_experts": 1}


def noise(*shape: int) -> torch.Tensor:
    return 0.1 * torch.randn(shape)


def hash_of(values: torch.Tensor) -> str:
    assert values.dtype == torch.float32
    return hashlib.blake2b(values.contiguous().numpy().tobytes(), digest_size=16).hexdigest()


def modules_of(package: str, *folders: str) -> None:
    """Make the modules in these folders of an installed package importable without running the package's own code."""
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    for folder in ("", *folders):
        name = ".".join((package, *folder.split("/"))) if folder else package
        module = types.ModuleType(name)
        module.__path__ = [str(root / folder)]
        sys.modules[name] = module


def linear(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.to(dtype)
    return layer


def range_of(weight: torch.Tensor, group: int, is_symmetric: bool, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [rows, groups], for the libraries that are given them."""
    groups = weight.unflatten(1, (-1, group))
    if is_symmetric:
        scales = groups.abs().amax(-1) / (2 ** (bits - 1) - 0.5)
        return scales, torch.full_like(scales, 2 ** (bits - 1))
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scales = (high - low) / (2**bits - 1)
    return scales, (-low / scales).round()


def fp8_blocks(scale_dtype: torch.dtype) -> Callable[[torch.Tensor], Packed]:
    """By transformers' quantiser of fine-grained FP8; scales as it has them, or as Qwen publishes them."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    quantizer = types.SimpleNamespace(quantization_config=FineGrainedFP8Config())

    def pack(weight: torch.Tensor) -> Packed:
        found = Fp8Quantize(quantizer).convert({"x.weight": weight.bfloat16()})
        if "x.weight_scale_inv" not in found:
            return {"weight": weight.bfloat16()}, weight.bfloat16().float()  # smaller than a block
        codes, scales = found["x.weight"], found["x.weight_scale_inv"].to(scale_dtype)
        restored = Fp8Dequantize(quantizer)._dequantize_one(codes, scales, torch.float32)
        return {"weight": codes, "weight_scale_inv": scales}, restored

    return pack


def compressed_tensors(scheme: dict[str, Any], format_name: str) -> Callable[[torch.Tensor], Packed]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    parsed = QuantizationScheme(targets=["Linear"], weights=scheme)
    compressor = BaseCompressor.get_value_from_registry(format_name)

    def pack(weight: torch.Tensor) -> Packed:
        group = scheme.get("group_size") or weight.shape[1]
        values = weight.unflatten(1, (-1, group))
        scale, zero = calculate_qparams(values.amin(-1), values.amax(-1), parsed.weights)
        state = {"weight": weight, "weight_scale": scale.bfloat16(), "weight_zero_point": zero.to(torch.int8)}
        if scheme["type"] == "float" and scheme["num_bits"] == 4:
            state = {"weight": weight, "weight_scale": scale}
        packed = compressor.compress(state, parsed)
        wide = {k: v.float() if k == "weight_scale" and v.dtype == torch.bfloat16 else v for k, v in packed.items()}
        return packed, compressor.decompress(wide, parsed)["weight"].float()

    return pack


def awq(group: int) -> Callable[[torch.Tensor], Packed]:
    modules_of("awq", "modules", "modules/linear", "utils")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    def pack(weight: torch.Tensor) -> Packed:
        scales, zeros = range_of(weight, group, is_symmetric=False)
        layer = linear(weight, torch.float16)
        made = WQLinear_GEMM.from_linear(layer, 4, group, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
        tensors = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}
        return tensors, dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), 4, group).T

    return pack


def gptq(group: int, bits: int, is_symmetric: bool, version: int) -> Callable[[torch.Tensor], Packed]:
    modules_of("gptqmodel", "models")
    package: Any = sys.modules["gptqmodel"]
    package.DEBUG_ON, package.DEVICE_THREAD_POOL = False, None
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    def pack(weight: torch.Tensor) -> Packed:
        rows, columns = weight.shape
        scales, zeros = range_of(weight, group, is_symmetric, bits)
        made = TorchLinear(bits, group, is_symmetric, False, columns, rows)
        made.pack_original(linear(weight), scales, zeros)
        made.post_init()
        wide = made.scales.float()
        codes = made.scales
        made.scales = wide
        restored = made.dequantize_weight().T.float()
        made.scales = codes
        if version == 1:
            convert_gptq_v2_to_v1_format_module(made, types.SimpleNamespace(bits=bits, pack_dtype=torch.int32))
        return {name: getattr(made, name) for name in ("qweight", "qzeros", "scales", "g_idx")}, restored

    return pack


def weights(num_bits: int, **others: Any) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": "group", **others}


def ct_config(scheme: dict[str, Any], format_name: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**scheme, "dynamic": False}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
    }


FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "damp_percent": 0.05}
INT4, INT4_ZEROS = weights(4, group_size=32), weights(4, group_size=32, symmetric=False)
MXFP4, FP8_ROWS = weights(4, type="float", group_size=32), weights(8, type="float", strategy="channel")

VARIANTS: dict[str, tuple[dict[str, Any], Callable[[], Callable[[torch.Tensor], Packed]]]] = {
    "fp8-blocks": (FP8_CONFIG, lambda: fp8_blocks(torch.bfloat16)),
    "compressed-tensors-int4": (
        ct_config(INT4, "pack-quantized"),
        lambda: compressed_tensors(INT4, "pack-quantized"),
    ),
    "compressed-tensors-int4-zeros": (
        ct_config(INT4_ZEROS, "pack-quantized"),
        lambda: compressed_tensors(INT4_ZEROS, "pack-quantized"),
    ),
    "compressed-tensors-fp8-rows": (
        ct_config(FP8_ROWS, "float-quantized"),
        lambda: compressed_tensors(FP8_ROWS, "float-quantized"),
    ),
    "compressed-tensors-mxfp4": (
        ct_config(MXFP4, "mxfp4-pack-quantized"),
        lambda: compressed_tensors(MXFP4, "mxfp4-pack-quantized"),
    ),
    "awq": (AWQ_CONFIG, lambda: awq(32)),
    "gptq": ({**GPTQ_CONFIG, "sym": True, "checkpoint_format": "gptq"}, lambda: gptq(32, 4, True, 1)),
    "gptq-v2-zeros": ({**GPTQ_CONFIG, "sym": False, "checkpoint_format": "gptq_v2"}, lambda: gptq(32, 4, False, 2)),
}


def make(folder: Path, quantization: dict[str, Any], pack: Callable[[torch.Tensor], Packed]) -> dict[str, str]:
    """A checkpoint whose every linear layer but the router and the head is quantised; the hashes of their values."""
    config = BLOCK_CONFIG if quantization.get("quant_method") == "fp8" else CONFIG
    hidden, size, dim = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    torch.manual_seed(0)
    tensors: Tensors = {"model.embed_tokens.weight": noise(config["vocab_size"], hidden).bfloat16()}
    layer = "model.layers.0"
    norms = {"model.norm": hidden, f"{layer}.input_layernorm": hidden, f"{layer}.post_attention_layernorm": hidden}
    norms |= {f"{layer}.self_attn.q_norm": dim, f"{layer}.self_attn.k_norm": dim}
    tensors |= {f"{name}.weight": (1 + noise(width)).bfloat16() for name, width in norms.items()}
    tensors[f"{layer}.mlp.gate.weight"] = noise(config["num_experts"], hidden).bfloat16()
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"q": (q_size, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden), "o": (hidden, q_size)}
    matrices = {f"{layer}.self_attn.{name}_proj": shape for name, shape in shapes.items()}
    for e in range(config["num_experts"]):
        for name, shape in {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}.items():
            matrices[f"{layer}.mlp.experts.{e}.{name}_proj"] = shape
    hashes = {}
    for name, shape in matrices.items():
        packed, restored = pack(noise(*shape).bfloat16().float())
        tensors |= {f"{name}.{word}": tensor.contiguous() for word, tensor in packed.items()}
        hashes[name] = hash_of(restored)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return hashes


def main() -> None:
    found = {}
    for name, (quantization, packer) in VARIANTS.items():
        pack = packer()
        found[name] = make(DATA / name, quantization, pack)
        print(name, sum(file.stat().st_size for file in (DATA / name).iterdir()))
    packages = ("torch", "transformers", "compressed-tensors", "autoawq", "gptqmodel")
    versions = {package: importlib.metadata.version(package) for package in packages}
    (DATA / "published.json").write_text(json.dumps({"versions": versions, "hashes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
