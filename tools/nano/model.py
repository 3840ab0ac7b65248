"""Plain Mixture-of-Experts models for training: every layer has attention and a routed expert MLP, embeddings are tied.

Two forms: Qwen3-MoE, and GPT-OSS with its biases, attention sinks, windows in every other layer, gate weights that are
a softmax over the chosen logits, and clamped SwiGLU.

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

QWEN3, GPT_OSS = "qwen3_moe", "gpt_oss"
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # GPT-OSS's
BIAS_COLUMNS = 8  # a bias is a column of its matrix, padded so that rows stay aligned to 16 bytes in bf16


@dataclass(frozen=True)
class ModelConfig:
    """The form and its sizes, under the names of Hugging Face's Qwen3-MoE configuration."""

    model_type: str = QWEN3
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
    sliding_window: int = 128  # of GPT-OSS's even layers

    def __post_init__(self) -> None:
        if self.model_type not in (QWEN3, GPT_OSS):
            raise ValueError(f"model type {self.model_type!r} is not known; use {QWEN3} or {GPT_OSS}")

    @property
    def is_gpt_oss(self) -> bool:
        return self.model_type == GPT_OSS

    @property
    def layer_types(self) -> list[str]:
        """GPT-OSS's, under its configuration's names."""
        return [("full_attention", "sliding_attention")[i % 2 == 0] for i in range(self.num_hidden_layers)]


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

    def __init__(self, inputs: int, outputs: int, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        has_bias = config.is_gpt_oss
        self.q_proj = Linear(hidden, query_size, has_bias)
        self.k_proj = Linear(hidden, key_size, has_bias)
        self.v_proj = Linear(hidden, key_size, has_bias)
        self.o_proj = Linear(query_size, hidden, has_bias)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads)) if config.is_gpt_oss else None
        if not config.is_gpt_oss:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor) -> Tensor:
        """`visible` [S, S] says which keys a query sees; without sinks all up to its own."""
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in projections)
        if self.sinks is None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotate(q.transpose(1, 2).float(), cos, sin).to(x.dtype)
        k = rotate(k.transpose(1, 2).float(), cos, sin).to(x.dtype)
        if self.sinks is None:
            out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        else:
            out = attention_with_sinks(q, k, v.transpose(1, 2), self.sinks, visible)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, visible: Tensor) -> Tensor:
    """q [B, heads, S, D], k and v [B, kv_heads, S, D] -> [B, heads, S, D]; a head's sink takes its share of the softmax
    and gives nothing. All scores at once: windows are short here."""
    q = q.unflatten(1, (k.shape[1], -1))  # [B, kv_heads, group, S, D]
    scores = (q @ k[:, :, None].mT).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible, float("-inf"))
    sink = sinks.float().view(1, k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
    shares = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return (shares.to(v.dtype) @ v[:, :, None]).flatten(1, 2)


class Experts(nn.Module):
    """All experts of a layer in two stacked parameters."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, size = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * size, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, size))

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        order, inverse, ends = expert_order(routing)
        x = Dispatch.apply(x, order, inverse, routing.topk_ids.shape[1])
        gate, up = grouped_linear(x, self.gate_up.to(x.dtype), ends).chunk(2, -1)
        y = grouped_linear((F.silu(gate) * up).contiguous(), self.down.to(x.dtype), ends)
        return weighted_sum(y, order, inverse, routing)


def expert_order(routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Which row of all token's rows comes when by expert, where each went, and where each expert's rows end."""
    ids = routing.topk_ids.flatten()
    order = ids.to(torch.int16).argsort(stable=True)  # a radix sort: fewer bits, fewer passes
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    return order, inverse, routing.counts.cumsum(0).to(torch.int32)


def weighted_sum(y: Tensor, order: Tensor, inverse: Tensor, routing: Routing) -> Tensor:
    """Rows in expert order -> the sum over each token's experts [T, H], fp32."""
    rows = Undispatch.apply(y, order, inverse).unflatten(0, (-1, routing.topk_ids.shape[1]))
    return (rows.float() * routing.topk_weights[..., None]).sum(1)


class BiasedExperts(nn.Module):
    """GPT-OSS's: gate and up in turn, row by row, each matrix with a bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, size = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.glu = nn.Parameter(torch.empty(experts, 2 * size, hidden))
        self.glu_bias = nn.Parameter(torch.zeros(experts, 2 * size))
        self.down = nn.Parameter(torch.empty(experts, hidden, size))
        self.down_bias = nn.Parameter(torch.zeros(experts, hidden))

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        order, inverse, ends = expert_order(routing)
        x = Dispatch.apply(x, order, inverse, routing.topk_ids.shape[1])
        gate, up = biased_linear(x, self.glu, self.glu_bias, ends).unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        inner = (up + 1) * gate * torch.sigmoid(gate * SWIGLU_ALPHA)
        return weighted_sum(biased_linear(inner, self.down, self.down_bias, ends), order, inverse, routing)


def biased_linear(x: Tensor, weight: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear` with a bias [E, out], as one product: its gradient is then one, too."""
    extra = F.pad(bias[..., None], (0, BIAS_COLUMNS - 1))
    ones = F.pad(x.new_ones(len(x), 1), (0, BIAS_COLUMNS - 1))
    return grouped_linear(torch.cat((x, ones), -1), torch.cat((weight, extra), -1).to(x.dtype), ends)


class MoE(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.router = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.router_bias = nn.Parameter(torch.zeros(config.num_experts)) if config.is_gpt_oss else None
        self.experts = BiasedExperts(config) if config.is_gpt_oss else Experts(config)

    def route(self, x: Tensor) -> Routing:
        """`x` is fp32 here. The balance loss is E * sum(load * mean probability), over the whole batch."""
        logits = F.linear(x, self.router, self.router_bias)
        probabilities = logits.softmax(-1)
        weights, ids = probabilities.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)  # which is a softmax over the chosen logits
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = compute_dtype(x)
        x = x + self.self_attn(self.input_layernorm(x).to(dtype), cos, sin, visible)
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
            if parameter.dim() < 2 or name.endswith("bias"):
                continue
            std = 0.02 if name.endswith(("embed_tokens.weight", "router")) else parameter.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down")):
                std /= math.sqrt(2 * self.config.num_hidden_layers)
            parameter.normal_(std=std, generator=generator)

    def forward(self, ids: Tensor) -> Output:
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        counts, balance_losses, z_losses = [], [], []
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        windowed = causal.triu(1 - self.config.sliding_window)
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            visible = windowed if kind == "sliding_attention" else causal
            x, count, balance_loss, z_loss = layer(x, cos, sin, visible)
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
