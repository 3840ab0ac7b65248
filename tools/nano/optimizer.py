"""Muon for the matrices inside the blocks, AdamW for everything else.

Muon replaces a matrix's momentum by the nearest orthogonal matrix. That takes only matrix products, so all
matrices of one shape, of every layer and expert, go through it as one batch.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
# The quintic a*x + b*x^3 + c*x^5 whose iteration moves singular values in (0, 1] fastest to the neighbourhood
# of one.
QUINTIC = (3.4445, -4.7750, 2.0315)
# Gives an orthogonal update the root mean square of a typical AdamW step, so that both share one learning
# rate.
UPDATE_RMS = 0.2
ADAM_BETAS, ADAM_EPS = (0.9, 0.95), 1e-9
WEIGHT_DECAY = 0.1


def orthogonalise(matrices: Tensor) -> Tensor:
    """Singular values of `matrices` [N, rows, columns] to about one (0.7 to 1.2), in bf16."""
    a, b, c = QUINTIC
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if tall else x  # the smaller side first: the Gram matrix below is then the smaller one
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Takes (parameter, parts) pairs: 2-D or stacked 3-D matrices, each made of `parts` equal slices of rows."""

    def __init__(self, matrices: Iterable[tuple[nn.Parameter, int]], lr: float) -> None:
        matrices = list(matrices)
        super().__init__([parameter for parameter, _ in matrices], {"lr": lr, "weight_decay": WEIGHT_DECAY})
        self.buckets: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for parameter, parts in matrices:
            self.buckets[parameter.shape[-2] // parts, parameter.shape[-1]].append(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        group = self.param_groups[0]
        for shape, parameters in self.buckets.items():
            grads = torch.cat([p.grad.reshape(-1, *shape) for p in parameters if p.grad is not None])
            state = self.state[parameters[0]]  # one momentum for the bucket, kept with its first parameter
            if not state:
                state["momentum"] = torch.zeros_like(grads)
            momentum = state["momentum"].lerp_(grads, 1 - MOMENTUM)
            updates = orthogonalise(torch.lerp(grads, momentum, MOMENTUM))  # Nesterov's look ahead
            sizes = [parameter.numel() // (shape[0] * shape[1]) for parameter in parameters]
            for parameter, update in zip(parameters, updates.split(sizes), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.reshape(parameter.shape), alpha=-group["lr"] * UPDATE_RMS * max(shape) ** 0.5)


def build_optimizers(model: nn.Module, kind: str, lr: float) -> list[torch.optim.Optimizer]:
    """For "muon" both optimizers; for "adamw" one, which then decays the same matrices that Muon would."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        in_block = ".self_attn." in name or ".experts." in name
        is_matrix = parameter.dim() > 1 and not name.endswith("bias")  # experts' biases are stacked
        (matrices if in_block and is_matrix else others).append((name, parameter))
    groups = [{"params": [parameter for _, parameter in others], "weight_decay": 0.0}]
    if kind == "adamw":
        groups.append({"params": [parameter for _, parameter in matrices], "weight_decay": WEIGHT_DECAY})
    fused = next(model.parameters()).is_cuda
    adamw = torch.optim.AdamW(groups, lr=lr, betas=ADAM_BETAS, eps=ADAM_EPS, fused=fused)
    if kind == "adamw":
        return [adamw]
    # gate and up are two matrices that only share a parameter
    return [adamw, Muon([(p, 2 if name.endswith("gate_up") else 1) for name, p in matrices], lr)]
