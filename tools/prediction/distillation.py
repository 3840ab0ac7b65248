"""Training of an estimator: Kullback-Leibler distillation from the routers of a model that is reading text.

States are kept for one block of tokens at a time, for all layers: 1 GB for 4,096 tokens of a model with 48 layers,
2,048 wide. A block is shuffled over tokens and layers and gone through `passes` times.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tritonmoe.model.decoder import Decoder
from tritonmoe.prediction.estimator import Estimator
from tritonmoe.prediction.predictors import RouterPredictor
from tritonmoe_kernels.estimate_reference import EstimatorWeights, estimate_ref

from .routings import Chunk

ADAM_BETAS, WEIGHT_DECAY, CLIP_NORM = (0.9, 0.98), 0.01, 1.0
WARMUP_STEPS = 100
FINAL_LR_SHARE = 0.02


@dataclass(frozen=True)
class Recipe:
    """What a result depends on besides the model, its text and the machine."""

    tokens: int
    block: int = 4096  # tokens whose states are held at once
    passes: int = 2
    batch: int = 2048  # states, of any token and layer
    lr: float = 2e-3
    seed: int = 0
    check_tokens: int = 65536  # between two looks at what is held out
    patience: int = 4  # looks without an improvement before training ends
    improvement: float = 1e-3  # of the held-out divergence, in parts of itself


class Block(NamedTuple):
    """States of B tokens of every layer but the last."""

    q: torch.Tensor  # [L - 1, B, H]
    base: torch.Tensor  # [L - 1, B, E], the later router's logits on q
    target: torch.Tensor  # [L - 1, B, E], its logits on its true input


@dataclass
class Log:
    """What happened; seconds of running the model and of training."""

    collect_s: float = 0.0
    train_s: float = 0.0
    tokens: int = 0
    steps: int = 0
    checks: list[dict[str, float]] = field(default_factory=list)
    ended_by: str = "tokens"  # or "patience", or "minutes"


def blocks(predictor: RouterPredictor, chunks: Iterable[Chunk], size: int) -> Iterator[Block]:
    """States of `size` tokens each, the last of fewer; `predictor` makes the quasi-hidden states."""
    pieces: list[Block] = []
    held = 0
    for chunk in chunks:
        pieces.append(_states(predictor, chunk))
        held += chunk.num_tokens
        while held >= size:
            whole = _joined(pieces)
            yield Block(*(part[:, :size] for part in whole))
            pieces, held = [Block(*(part[:, size:] for part in whole))], held - size
    if held:
        yield _joined(pieces)


def _states(predictor: RouterPredictor, chunk: Chunk) -> Block:
    layers = list(chunk.routed)
    found = [
        (predictor.guess_prompt(layer, chunk.routed[layer])[later], chunk.routed[later].logits)
        for layer, later in itertools.pairwise(layers)
    ]
    return Block(
        torch.stack([guess.q for guess, _ in found if guess.q is not None]),
        torch.stack([guess.logits for guess, _ in found]),
        torch.stack([target for _, target in found]),
    )


def _joined(pieces: list[Block]) -> Block:
    return Block(*(torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)))


def divergence(logits: torch.Tensor, target: torch.Tensor, is_sigmoid: bool) -> torch.Tensor:
    """KL(router || estimate) [N] of logits [N, E]: over the experts, or where each has a sigmoid of its own, summed."""
    if not is_sigmoid:
        return F.kl_div(logits.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    p = target.sigmoid()
    cross = F.binary_cross_entropy_with_logits(logits, p, reduction="none")
    return (cross - F.binary_cross_entropy_with_logits(target, p, reduction="none")).sum(-1)


class Distillation:
    """An estimator in training, in float32 on the model's device."""

    def __init__(self, decoder: Decoder, estimator: Estimator, recipe: Recipe) -> None:
        self.recipe, self.log = recipe, Log()
        self._device = decoder.device
        first = next(iter(decoder.spec.moe_layers.values()))
        self._is_sigmoid = first.router.score == "sigmoid"
        self._estimator = estimator.to(decoder.device, torch.float32)
        self._parameters = [part.requires_grad_() for part in self._estimator.shared]
        matrices = [part for part in self._parameters if part.dim() > 1]
        others = [part for part in self._parameters if part.dim() == 1]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=ADAM_BETAS, weight_decay=WEIGHT_DECAY)
        self._generator = torch.Generator(decoder.device).manual_seed(recipe.seed)
        self._best: tuple[float, list[torch.Tensor]] = (math.inf, [])

    def run(self, training: Iterable[Block], held_out: list[Block], minutes: float = math.inf) -> Iterator[int]:
        """Train on every block; yields the tokens of each once it is done. Ends early where nothing is gained, or
        after so many minutes."""
        log, waiting, next_check = self.log, 0, self.recipe.check_tokens
        self._look(held_out)
        began = time.perf_counter()
        for block in training:
            log.collect_s += time.perf_counter() - began
            began = time.perf_counter()
            tokens = block.q.shape[1]
            self._train(block)
            log.tokens += tokens
            log.train_s += self._elapsed(began)
            if log.tokens >= next_check:
                next_check += self.recipe.check_tokens
                waiting = 0 if self._look(held_out) else waiting + 1
            yield tokens
            if waiting >= self.recipe.patience or log.collect_s + log.train_s > 60 * minutes:
                log.ended_by = "patience" if waiting >= self.recipe.patience else "minutes"
                break
            began = time.perf_counter()
        self._look(held_out)

    def result(self) -> Estimator:
        """The weights that did best on what is held out."""
        return replace(self._estimator, shared=EstimatorWeights(*self._best[1]))

    def _elapsed(self, began: float) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began

    @torch.inference_mode(False)
    def _train(self, block: Block) -> None:
        block = Block(*(part.clone() for part in block))  # made in inference mode, which autograd does not take
        rows, tokens = block.q.shape[:2]
        flat = Block(*(part.flatten(0, 1) for part in block))
        for _ in range(self.recipe.passes):
            order = torch.randperm(rows * tokens, generator=self._generator, device=self._device)
            for chosen in order.split(self.recipe.batch):
                self._step(flat, chosen, chosen // tokens)

    def _step(self, flat: Block, chosen: torch.Tensor, rows: torch.Tensor) -> None:
        loss = divergence(self._estimate(flat, chosen, rows), flat.target[chosen], self._is_sigmoid).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM)
        done = min(1.0, self.log.tokens / self.recipe.tokens)
        share = max(FINAL_LR_SHARE, 0.5 * (1 + math.cos(math.pi * done)))
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.lr * share * min(1.0, (self.log.steps + 1) / WARMUP_STEPS)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.log.steps += 1

    def _estimate(self, flat: Block, chosen: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        shared = self._estimator.shared
        network = shared._replace(layer=shared.layer[rows])
        base = flat.base[chosen] if self._estimator.corrects else None
        return estimate_ref(flat.q[chosen].float(), network, base)

    @torch.no_grad()
    def _look(self, held_out: list[Block]) -> bool:
        """Whether the divergence of what is held out has fallen; the weights are kept if it has."""
        sums = torch.zeros(len(held_out[0].q), dtype=torch.float64)
        plain = torch.zeros_like(sums)
        tokens = sum(block.q.shape[1] for block in held_out)
        for block in held_out:
            for row in range(len(block.q)):
                flat = Block(*(part[row] for part in block))
                chosen = torch.arange(len(flat.q), device=self._device)
                estimated = self._estimate(flat, chosen, torch.full_like(chosen, row))
                sums[row] += divergence(estimated, flat.target, self._is_sigmoid).double().sum().cpu()
                plain[row] += divergence(flat.base, flat.target, self._is_sigmoid).double().sum().cpu()
        found = float(sums.mean() / tokens)
        self.log.checks.append(
            {"tokens": self.log.tokens, "divergence": found, "router_divergence": float(plain.mean() / tokens)}
        )
        is_better = found < self._best[0] * (1 - self.recipe.improvement)
        if found < self._best[0]:
            self._best = found, [part.detach().clone() for part in self._estimator.shared]
        return is_better
