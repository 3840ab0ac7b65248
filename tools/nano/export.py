"""Write a trained model as a Hugging Face folder; split large files for transfer and join them again."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from .model import SWIGLU_LIMIT, Model, ModelConfig
from .tokenizer import END_OF_TEXT_ID, write_tokenizer

WEIGHTS = "model.safetensors"


def hf_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its checkpoint name: Qwen3-MoE's expert by expert, GPT-OSS's all in one, transposed."""
    is_gpt_oss = model.config.is_gpt_oss
    for name, parameter in model.state_dict().items():
        prefix, _, kind = ("model." + name).rpartition(".")
        match kind:
            case "router":
                yield f"{prefix}.{'router' if is_gpt_oss else 'gate'}.weight", parameter
            case "router_bias":
                yield f"{prefix}.router.bias", parameter
            case "glu":
                yield f"{prefix}.gate_up_proj", parameter.mT
            case "down" if is_gpt_oss:
                yield f"{prefix}.down_proj", parameter.mT
            case "glu_bias" | "down_bias":
                yield f"{prefix}.{'gate_up' if kind == 'glu_bias' else 'down'}_proj_bias", parameter
            case "gate_up":
                for expert_id, (gate, up) in enumerate(matrix.chunk(2) for matrix in parameter):
                    yield f"{prefix}.{expert_id}.gate_proj.weight", gate
                    yield f"{prefix}.{expert_id}.up_proj.weight", up
            case "down":
                for expert_id, matrix in enumerate(parameter):
                    yield f"{prefix}.{expert_id}.down_proj.weight", matrix
            case _:
                yield f"{prefix}.{kind}", parameter


def load_weights(model: Model, folder: Path) -> None:
    """The inverse of `hf_tensors`: fill the model from an exported folder of the same sizes."""
    stored = load_file(folder / WEIGHTS)
    with torch.no_grad():
        for name, parameter in hf_tensors(model):
            parameter.copy_(stored.pop(name))
    if stored:
        raise ValueError(f"{folder} holds tensors that the model does not: {', '.join(sorted(stored)[:3])}")


def hf_config(config: ModelConfig) -> dict[str, object]:
    sizes = dict(vars(config))
    if config.is_gpt_oss:
        sizes |= {
            "num_local_experts": sizes.pop("num_experts"),
            "intermediate_size": sizes.pop("moe_intermediate_size"),
            "layer_types": config.layer_types,
            "rope_parameters": {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")},
            "swiglu_limit": SWIGLU_LIMIT,
        }
    else:
        sizes.pop("sliding_window")
        sizes |= {
            "intermediate_size": config.moe_intermediate_size * config.num_experts_per_tok,  # no layer is dense
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    return {
        "architectures": ["GptOssForCausalLM" if config.is_gpt_oss else "Qwen3MoeForCausalLM"],
        **sizes,
        "hidden_act": "silu",
        "attention_bias": config.is_gpt_oss,
        "tie_word_embeddings": True,
        "output_router_logits": False,
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def export(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """bf16 weights, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in hf_tensors(model)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / "config.json", hf_config(model.config))
    end = {"eos_token_id": END_OF_TEXT_ID, "pad_token_id": END_OF_TEXT_ID}
    write_json(folder / "generation_config.json", {**end, "do_sample": False})
    write_tokenizer(tokenizer, folder, model.config.max_position_embeddings)


def split(path: Path, part_mib: int) -> list[Path]:
    """Copy a file into parts of at most `part_mib` MiB beside it: name.part0, name.part1, ..."""
    parts = []
    with path.open("rb") as file:
        while chunk := file.read(part_mib << 20):
            parts.append(path.with_name(f"{path.name}.part{len(parts)}"))
            parts[-1].write_bytes(chunk)
    return parts


def join(folder: Path) -> Path:
    """Rebuild the weights file of a folder from its parts, which are kept."""
    parts = sorted(folder.glob(f"{WEIGHTS}.part*"), key=lambda path: int(path.suffix.removeprefix(".part")))
    if not parts:
        raise FileNotFoundError(f"no {WEIGHTS}.part* in {folder}")
    with (folder / WEIGHTS).open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, file)
    return folder / WEIGHTS
