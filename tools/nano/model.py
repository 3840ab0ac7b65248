"""A plain Qwen3-MoE for training: every layer has attention and a routed expert MLP, and embeddings are tied.

Shapes: B batch, S sequence, T = B*S tokens, H hidden, E experts, K experts per token, I intermediate.

Parameters are fp32 master weights. Matrices are cast to the compute type where they are used: bf16 on CUDA,
fp32 on the CPU. The residual stream stays fp32: 2*layers small updates are added to it, bf16 would round away
much of the last ones, and its traffic is only a few percent of a step. The router is fp32 as well, since a
rounded logit changes which experts run; therefore the global float32 matmul precision must stay at "highest".
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes, under the names of Hugging Face's Qwen3-MoE configuration."""

    vocab_size: int = 4096
    hidden_size: int = 160
    num_hidden_layers: int = 16
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6


class Routing(NamedTuple):
    """The experts of every token, how many rows each expert gets, and the two auxiliary losses."""

    topk_ids: Tensor  # [T, K]
    topk_weights: Tensor  # [T, K]
    counts: Tensor  # [E], sums to T*K; stays on the device, so that the host never waits for it
    balance_loss: Tensor
    z_loss: Tensor


class Output(NamedTuple):
    """The auxiliary losses are means over layers; `load` is each expert's share of its layer's rows."""

    hidden: Tensor  # [B, S, H], after the last norm
    balance_loss: Tensor
    z_loss: Tensor
    load: Tensor  # [layers, E]


class Dispatch(torch.autograd.Function):
    """Rows of `x` [T, H] in expert order [T*K, H].

    The plain backward of this gather is a scatter-add. Since `inverse` tells where each row went, it can be a
    gather and a sum over K in fixed order instead: faster and deterministic.
    """

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,), (inverse,) = grads, ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class Undispatch(torch.autograd.Function):
    """Rows in expert order back to token order, where a token's K rows are adjacent; a gather both ways."""

    @staticmethod
    def forward(ctx, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y[inverse]

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,), (order,) = grads, ctx.saved_tensors
        return grad[order], None, None


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows `ends[e-1]:ends[e]` of `x` [N, in] times the transposed matrix of expert e in `weight` [E, out, in]."""
    if x.is_cuda:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return grouped_linear_loop(x, weight, ends)


def grouped_linear_loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """One product per expert, for the CPU."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(x.split(counts), weight, strict=True)])


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Linear(nn.Module):
    """A matrix that is cast to the type of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(hidden, query_size)
        self.k_proj = Linear(hidden, key_size)
        self.v_proj = Linear(hidden, key_size)
        self.o_proj = Linear(query_size, hidden)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in projections)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin).to(x.dtype)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin).to(x.dtype)
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """All experts of a layer in two stacked parameters."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, size = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * size, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, size))

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        ids, top_k = routing.topk_ids.flatten(), routing.topk_ids.shape[1]
        order = ids.to(torch.int16).argsort(stable=True)  # a radix sort: fewer bits, fewer passes
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        ends = routing.counts.cumsum(0).to(torch.int32)
        x = Dispatch.apply(x, order, inverse, top_k)
        gate, up = grouped_linear(x, self.gate_up.to(x.dtype), ends).chunk(2, -1)
        y = grouped_linear((F.silu(gate) * up).contiguous(), self.down.to(x.dtype), ends)
        y = Undispatch.apply(y, order, inverse).unflatten(0, (-1, top_k))
        return (y.float() * routing.topk_weights[..., None]).sum(1)


class MoE(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.router = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.experts = Experts(config)

    def route(self, x: Tensor) -> Routing:
        """`x` is fp32 here. The balance loss is E * sum(load * mean probability), over the whole batch."""
        logits = F.linear(x, self.router)
        probabilities = logits.softmax(-1)
        weights, ids = probabilities.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        num_experts = logits.shape[-1]
        counts = (ids[..., None] == torch.arange(num_experts, device=x.device)).sum((0, 1))
        balance_loss = num_experts * (counts / ids.numel() * probabilities.mean(0)).sum()
        return Routing(ids, weights, counts, balance_loss, logits.logsumexp(-1).square().mean())

    def forward(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Routing]:
        routing = self.route(x)
        return self.experts(x.to(dtype), routing), routing


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = compute_dtype(x)
        x = x + self.self_attn(self.input_layernorm(x).to(dtype), cos, sin)
        out, routing = self.mlp(self.post_attention_layernorm(x).flatten(0, 1), dtype)
        return x + out.view_as(x), routing.counts, routing.balance_loss, routing.z_loss


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.is_cuda else torch.float32


class Model(nn.Module):
    cos: Tensor  # [positions, head_dim]
    sin: Tensor

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.initialise(torch.Generator().manual_seed(seed))
        positions = torch.arange(config.max_position_embeddings)[:, None]
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = (positions * frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Normal with unit gain, but smaller where it writes to the residual, whose sum then has unit gain."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = 0.02 if name.endswith(("embed_tokens.weight", "router")) else parameter.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down")):
                std /= math.sqrt(2 * self.config.num_hidden_layers)
            parameter.normal_(std=std, generator=generator)

    def forward(self, ids: Tensor) -> Output:
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        counts, balance_losses, z_losses = [], [], []
        for layer in self.layers:
            x, count, balance_loss, z_loss = layer(x, cos, sin)
            counts.append(count)
            balance_losses.append(balance_loss)
            z_losses.append(z_loss)
        hidden = self.norm(x).to(compute_dtype(x))
        balance_loss, z_loss = torch.stack(balance_losses).mean(), torch.stack(z_losses).mean()
        load = torch.stack(counts) / (ids.numel() * self.config.num_experts_per_tok)
        return Output(hidden, balance_loss, z_loss, load)

    def compile_blocks(self) -> None:
        """Compile block by block: all share one code, and compiling takes seconds instead of minutes."""
        for layer in self.layers:
            layer.compile(dynamic=False)

    def count_parameters(self) -> tuple[int, int]:
        """All parameters, and those that work on one token."""
        total = sum(parameter.numel() for parameter in self.parameters())
        experts = sum(p.numel() for name, p in self.named_parameters() if ".experts." in name)
        return total, total - experts + experts * self.config.num_experts_per_tok // self.config.num_experts


def token_losses(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats of every target, fp32, shaped like `targets`."""
    logits = F.linear(hidden.flatten(0, -2), embedding.to(hidden.dtype))
    return F.cross_entropy(logits.float(), targets.flatten(), reduction="none").view_as(targets)
