"""The training loop: a run that may be spread over several calls, with its saved state and its log."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from . import schedule
from .batches import Batches, rows_per_stream
from .corpus import HELD_OUT_STREAMS, Corpus
from .evaluation import bits_per_character, task_accuracies
from .export import load_weights
from .model import Model, ModelConfig, Output, token_losses
from .optimizer import build_optimizers
from .tokenizer import token_bytes

MIXTURE = {"text": 0.6, "tasks": 0.28, "stories": 0.12}
CLIP_NORM = 1.0
Z_LOSS_WEIGHT = 1e-3
LOGGED_TOKENS = 1 << 17  # of each held-out stream during the run; the last measurement takes all of them


@dataclass(frozen=True)
class Settings:
    """Everything that a run's result depends on besides the corpus; a resumed run must have the same."""

    model: ModelConfig
    minutes: float
    steps: int
    batch: int = 128
    sequence: int = 1024
    lr: float = 3e-3
    optimizer: str = "muon"
    seed: int = 0
    decay_share: float = 0.4  # of the run, at its end, over which the learning rate falls
    initial: str | None = None  # folder of an exported model to start from
    mixture: dict[str, float] = field(default_factory=lambda: dict(MIXTURE))


class Trainer:
    def __init__(self, settings: Settings, corpus: Corpus, folder: Path, device: str) -> None:
        self.settings, self.corpus, self.folder = settings, corpus, folder
        self.model = Model(settings.model, settings.seed).to(device)
        if settings.initial is not None:
            load_weights(self.model, Path(settings.initial))
        self.optimizers = build_optimizers(self.model, settings.optimizer, settings.lr)
        self.rows = rows_per_stream(settings.mixture, settings.batch)
        streams = {name: corpus.stream(name) for name in self.rows}
        self.batches = Batches(streams, self.rows, settings.sequence, settings.seed, device)
        self.held_out = {
            name: torch.from_numpy(corpus.stream(name).astype("int32")).to(device) for name in HELD_OUT_STREAMS
        }
        self.token_bytes = torch.tensor(token_bytes(corpus.tokenizer), device=device)
        self.token_losses: Callable[[Tensor, Tensor, Tensor], Tensor] = token_losses
        if device == "cuda":
            self.model.compile_blocks()
            self.token_losses = torch.compile(token_losses, dynamic=False)
        self.step = 0
        self.seconds = 0.0  # spent in `run`, over all calls

    def progress(self) -> float:
        return schedule.progress(self.step, self.settings.steps, self.seconds, 60 * self.settings.minutes)

    def run(self, pause: Callable[[], bool], log_every: int, save: Callable[[], None], save_minutes: float) -> bool:
        """Train until the schedule ends (True) or `pause` says so (False), saving every `save_minutes`."""
        started, before = time.perf_counter(), self.seconds
        logged_step, logged_seconds, saved_seconds = self.step, self.seconds, self.seconds
        while (progress := self.progress()) < 1 and not pause():
            output, row_losses = self.train_step(progress)
            self.step += 1
            self.seconds = time.perf_counter() - started + before
            if self.step % log_every == 0:
                losses = self.losses(row_losses)  # waits for the device, and only then is the clock right
                self.seconds = time.perf_counter() - started + before
                tokens = (self.step - logged_step) * self.settings.batch * self.settings.sequence
                speed = round(tokens / (self.seconds - logged_seconds))
                self.log({"step": self.step, **losses, **self.measure(output), "tokens_per_s": speed})
                logged_step, logged_seconds = self.step, time.perf_counter() - started + before
            if self.seconds - saved_seconds > 60 * save_minutes:
                save()
                saved_seconds = self.seconds
        return progress >= 1

    def train_step(self, progress: float) -> tuple[Output, Tensor]:
        """One update. Nothing here waits for the device. Returns the losses of the rows for the log."""
        ids = self.batches.draw(self.step)
        output = self.model(ids[:, :-1])
        row_losses = self.token_losses(output.hidden, self.model.embed_tokens.weight, ids[:, 1:]).mean(1)
        balance_weight = schedule.balance_weight(self.step, progress, self.settings.decay_share)
        loss = row_losses.mean() + balance_weight * output.balance_loss + Z_LOSS_WEIGHT * output.z_loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        lr = self.settings.lr * schedule.learning_rate_share(self.step, progress, self.settings.decay_share)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return output, row_losses.detach()

    def losses(self, row_losses: Tensor) -> dict[str, float]:
        """The loss of each stream in the step just done, in nats per token; RuntimeError once it is not finite."""
        if not row_losses.isfinite().all():
            raise RuntimeError(f"the loss is not finite at step {self.step}; lower --lr")
        parts = zip(self.rows, row_losses.split(list(self.rows.values())), strict=True)
        return {f"loss_{name}": part.mean().item() for name, part in parts if len(part)}

    def measure(self, output: Output) -> dict[str, float]:
        """How evenly the experts were used in the step just done, and the held-out measure."""
        load = output.load * output.load.shape[1]  # 1 is an expert's fair share
        return {
            "minutes": self.seconds / 60,
            "progress": self.progress(),
            "balance_loss": output.balance_loss.item(),
            "z_loss": output.z_loss.item(),
            "busiest_expert": load.max().item(),
            "least_used_expert": load.min().item(),
            "load_cv": load.std(1).mean().item(),
            **self.held_out_bits(LOGGED_TOKENS),
        }

    def held_out_bits(self, tokens: int | None = None) -> dict[str, float]:
        """Bits per character of each held-out stream, or of its first `tokens`."""
        return {
            f"{name}_bits_per_character": bits_per_character(
                self.model, stream[:tokens], self.token_bytes, self.settings.sequence
            )
            for name, stream in self.held_out.items()
            if len(stream) > 1  # a small text may have no held-out passage
        }

    def measure_final(self, items: int) -> None:
        """Log the exact held-out measures and the accuracies of all task families."""
        accuracies = task_accuracies(self.model, self.corpus.tokenizer, items)
        self.log({"step": self.step, "final": True, **self.held_out_bits(), **accuracies})

    def log(self, entry: dict[str, object]) -> None:
        entry = {key: round(value, 5) if isinstance(value, float) else value for key, value in entry.items()}
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")
        print("  ".join(f"{key} {value}" for key, value in entry.items()), flush=True)

    def save(self, path: Path) -> None:
        state = {
            "settings": asdict(self.settings),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)  # a call that is cut short never leaves half a state

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu")
        settings = asdict(self.settings)
        differing = [name for name in settings if settings[name] != state["settings"][name]]
        if differing:
            raise ValueError(f"{path} was saved by a run with other settings: {', '.join(differing)}")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]
