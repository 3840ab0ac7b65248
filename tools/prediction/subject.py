"""The model that is studied, with what was made to foretell its experts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tritonmoe import Engine
from tritonmoe.checkpoint.hub import resolve_model
from tritonmoe.engine import EMBEDDED, embedded_folder
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.operations import operations
from tritonmoe.placement.loader import Placement
from tritonmoe.prediction.default_vectors import DefaultVectors
from tritonmoe.prediction.estimator import NO_VECTORS, Estimator, load_estimator
from tritonmoe.prediction.files import PredictionFiles
from tritonmoe.prediction.predictors import RouterPredictor

WINDOW = 1024  # tokens that see each other, where the model's context is not shorter


@dataclass(frozen=True)
class Subject:
    """An engine whose experts all run as routed, and the model's default vectors."""

    engine: Engine
    files: PredictionFiles
    vectors: DefaultVectors | None
    defaults: torch.Tensor | None  # the same, [layers, E, H] on the device

    @property
    def decoder(self) -> Decoder:
        return self.engine.decoder

    @property
    def vectors_identity(self) -> str:
        return NO_VECTORS if self.vectors is None else self.vectors.identity

    def load_estimator(self, path: Path | None) -> Estimator | None:
        """That of a file, or the one beside the model where there is one, on the device."""
        path = path or self.files.estimator
        if path is None:
            return None
        decoder = self.decoder
        return load_estimator(path, decoder.spec, decoder.weights, self.vectors_identity).to(
            decoder.device, decoder.dtype
        )

    def predictor(
        self,
        kind: str,
        estimator: Estimator | None = None,
        lookahead: int = 1,
        extra: int = 0,
        kinds: Mapping[int, str] | None = None,
    ) -> RouterPredictor:
        """What foretells every layer in one way, or as `kinds` says; `extra` ids beyond the model's k."""
        decoder = self.decoder
        kinds = kinds or dict.fromkeys(list(decoder.spec.moe_layers)[1:], kind)
        ops = operations(decoder.device)
        return RouterPredictor(ops, decoder.spec, decoder.weights, lookahead, extra, self.defaults, estimator, kinds)


def folder_of(model: str) -> Path:
    return embedded_folder() if model == EMBEDDED else resolve_model(model)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How to load the model, for every tool that studies one."""
    group = parser.add_argument_group("the model")
    group.add_argument("--max-context", type=int, metavar="N", help=f"tokens of a window (default: at most {WINDOW})")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--gpu-memory", metavar="SIZE", help="fetch experts from host memory, using so much of the GPU")
    group.add_argument("--expert-slots", metavar="N", help="fetch them into so many slots, or P%% of all experts")
    group.add_argument("--default-vectors", type=Path, metavar="FILE", help="(default: beside the model)")


def load(options: argparse.Namespace) -> Subject:
    """The model `options.model` under `add_options`: resident unless slots or memory are asked for."""
    is_offloaded = options.gpu_memory is not None or options.expert_slots is not None
    placement = Placement("on-demand", options.gpu_memory, options.expert_slots) if is_offloaded else Placement()
    engine = Engine.from_pretrained(
        options.model,
        dtype=options.dtype,
        device=options.device,
        max_context=options.max_context,
        placement=placement,
        progress=sys.stderr.isatty(),
    )
    decoder = engine.decoder
    files = PredictionFiles.found(folder_of(options.model), options.default_vectors)
    vectors = files.load_vectors(decoder.spec, decoder.weights)
    defaults = None if vectors is None else vectors.by_layer(decoder.spec, decoder.device, decoder.dtype)
    return Subject(engine, files, vectors, defaults)


def window_length(subject: Subject, asked: int | None) -> int:
    return subject.engine.max_context if asked is not None else min(subject.engine.max_context, WINDOW)
