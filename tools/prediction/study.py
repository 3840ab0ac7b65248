"""One pass over text that holds every way to foretell a layer against what its router then says."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tritonmoe.model.weights import ModelWeights, iter_tensors
from tritonmoe.prediction.estimator import Estimator
from tritonmoe.prediction.predictors import RouterPredictor
from tritonmoe_kernels import reference
from tritonmoe_kernels.routing import NormRouterOutput, SpeculateOutput

from .drift import DriftTable
from .recall import RecallTable
from .routings import Chunk
from .subject import Subject

AHEAD = "quasi-hidden, two layers ahead"
REUSED = "this layer's router input"  # put through the later router as it is
PREVIOUS, POPULAR = "previous token", "most popular"
TWICE = ", 2k"


@dataclass(frozen=True)
class Study:
    """Tables of recall and drift, by predictor and layer."""

    recall: RecallTable
    drift: DriftTable

    def summary(self) -> dict[str, Any]:
        return {"recall": self.recall.summary(), "drift": self.drift.summary()}


def study(
    subject: Subject, chunks: Iterable[Chunk], estimator: Estimator | None, kinds: dict[int, str] | None
) -> Study:
    """`kinds`, of a hybrid choice, need what they name; without default vectors quasi-hidden is left out."""
    top_k = max(moe.num_experts_per_tok for moe in subject.decoder.spec.moe_layers.values())
    predictors: dict[str, RouterPredictor] = {"residual": subject.predictor("residual", extra=top_k)}
    if subject.defaults is not None:
        predictors["quasi-hidden"] = subject.predictor("quasi-hidden", extra=top_k)
        ahead = subject.predictor("quasi-hidden", lookahead=2)
    else:
        ahead = None
    if estimator is not None:
        predictors["estimator"] = subject.predictor("estimator", estimator, extra=top_k)
    if kinds is not None:
        predictors["hybrid"] = subject.predictor("", estimator, extra=top_k, kinds=kinds)
    found = Study(RecallTable(), DriftTable())
    layers = list(subject.decoder.spec.moe_layers)
    for chunk in chunks:
        for layer in layers:
            for name, predictor in predictors.items():
                for later, guess in predictor.guess_prompt(layer, chunk.routed[layer]).items():
                    _add(found, name, later, guess, chunk.routed[later], top_k)
        _add_controls(found, subject, chunk, layers, top_k)
        for layer in layers[:-2] if ahead is not None else ():
            guesses = ahead.guess_prompt(layer, chunk.routed[layer]) if ahead is not None else {}
            later = layers[layers.index(layer) + 2]
            found.recall.add(AHEAD, later, guesses[later].ids, chunk.routed[later])
    return found


def _add(found: Study, name: str, later: int, guess: SpeculateOutput, truth: NormRouterOutput, top_k: int) -> None:
    found.recall.add(name, later, guess.ids[:, :top_k], truth)
    found.recall.add(name + TWICE, later, guess.ids, truth)
    found.drift.add(name, later, guess, truth, is_state=name in ("residual", "quasi-hidden"))


def _add_controls(found: Study, subject: Subject, chunk: Chunk, layers: list[int], top_k: int) -> None:
    """What knows less: the input of the router before, the token before, what is popular anyway."""
    weights = subject.decoder.weights
    for layer, later in itertools.pairwise(layers):
        truth, moe = chunk.routed[later], weights.layers[later].moe
        assert moe is not None
        x = chunk.routed[layer].x
        logits = reference.router_logits(x, moe.router, moe.router_bias)
        guess = SpeculateOutput(logits, logits.topk(top_k).indices.int(), x)
        found.recall.add(REUSED, later, guess.ids, truth)
        found.drift.add(REUSED, later, guess, truth, is_state=True)
        before = NormRouterOutput(*(part[1:] for part in truth))
        found.recall.add(PREVIOUS, later, truth.topk_ids[:-1], before)
        if subject.vectors is not None:
            popular = subject.vectors.counts[layers.index(later)].topk(top_k).indices.int().to(x.device)
            found.recall.add(POPULAR, later, popular.expand(len(x), -1), truth)


def shuffle(weights: ModelWeights, seed: int) -> None:
    """Give every matrix its own values in a random order: a model of the same sizes and scales that learned nothing."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in iter_tensors(weights):
        if tensor.dim() > 1:
            order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
            tensor.copy_(tensor.flatten()[order].view_as(tensor))
