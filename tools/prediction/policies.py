"""What running under a policy does to a model's text and answers, and what it moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from command_line import split_policy

from nano.tasks import Task, score
from tritonmoe import Engine, Generation, SamplingParams
from tritonmoe.errors import InputError
from tritonmoe.offload.experts import OffloadedExperts
from tritonmoe.offload.policy import RESIDENT, Policy, resolve
from tritonmoe.placement.loader import Placement

from . import scoring
from .scoring import Pair

PROMPT_TOKENS = 16  # of a window, prefilled with true routing; what follows is fed token by token
SPARE_TOKENS = 16  # beyond the longest reference answer, before an item counts as unanswered


@dataclass(frozen=True)
class Asked:
    """A policy as it is asked for: "exact", or "router-pf+gate=routed" with options of the command line."""

    text: str
    preset: str
    overrides: dict[str, Any]
    policy: Policy

    @classmethod
    def parse(cls, text: str) -> Asked:
        """InputError for what is not known or does not go together."""
        preset, overrides = split_policy(text)
        return cls(text, preset, overrides, resolve(preset, **overrides))

    @property
    def depends_on_slots(self) -> bool:
        """Whether what is computed depends on which experts have a slot."""
        return self.policy.execute == "routed" and not self.policy.is_exact


def open_engine(model: str, asked: Asked, slots: str, batch: int, options: dict[str, Any]) -> Engine:
    """The model under a policy, with so many slots where it has any."""
    if asked.preset == RESIDENT:
        return Engine.from_pretrained(model, placement=Placement(RESIDENT), batch_size=batch, **options)
    placement = Placement(asked.preset, expert_slots=slots, overrides=asked.overrides)
    return Engine.from_pretrained(model, placement=placement, batch_size=batch, **options)


def answers(engine: Engine, tasks: Sequence[Task], batch: int) -> list[Generation]:
    """Greedy answers in the order of the tasks; those of about equal length run together."""
    lengths = [len(engine.tokenizer.encode(task.answer)) for task in tasks]
    order = sorted(range(len(tasks)), key=lambda i: (lengths[i], i))
    found: dict[int, Generation] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        params = SamplingParams(max_new_tokens=max(lengths[i] for i in chosen) + SPARE_TOKENS)
        results = engine.generate_batch([tasks[i].prompt for i in chosen], params)
        found.update(zip(chosen, results, strict=True))
    return [found[i] for i in range(len(tasks))]


def accuracy(tasks: Sequence[Task], found: Sequence[Generation], baseline: Sequence[Generation]) -> dict[str, float]:
    """Exact match of final answers with its standard error, and how far the tokens are those of the baseline."""
    right = sum(score(task, result.text) for task, result in zip(tasks, found, strict=True))
    pairs = [(list(one.token_ids), list(other.token_ids)) for one, other in zip(found, baseline, strict=True)]
    share = right / len(tasks)
    return {
        "items": len(tasks),
        "accuracy": share,
        "standard_error": math.sqrt(share * (1 - share) / len(tasks)),
        "same_answers": sum(one == other for one, other in pairs) / len(pairs),
        "same_tokens": sum(_common(one, other) for one, other in pairs) / max(1, sum(len(other) for _, other in pairs)),
    }


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens at the start are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def perplexity(engine: Engine, windows: Sequence[Sequence[int]], batch: int) -> dict[str, float]:
    """Of the tokens of windows of equal length, each fed in a decode step as policies act in them."""
    pairs = [Pair(window[:PROMPT_TOKENS], window[PROMPT_TOKENS:]) for window in windows]
    count = len(pairs[0].continuation)
    nats = torch.tensor([-found.log_probability / count for found in scoring.score(engine, pairs, batch)])
    return {
        "nats_per_token": float(nats.mean()),
        "standard_error": float(nats.std() / len(nats) ** 0.5) if len(nats) > 1 else math.nan,  # over windows
        "perplexity": float(nats.mean().exp()),
        "tokens": count * len(pairs),
    }


def traffic(engine: Engine, prompts: Sequence[str], new_tokens: int) -> dict[str, Any]:
    """What is moved for single sequences, one after the other: bytes a token, hits, recall; all but the first prompt,
    which fills the slots."""
    experts = engine.decoder.experts
    assert isinstance(experts, OffloadedExperts)
    sums: dict[str, float] = {}
    for i, prompt in enumerate(prompts):
        engine.generate(prompt, SamplingParams(max_new_tokens=new_tokens))
        experts.report()
        if i:
            counters, total = experts.counters, experts.counters.total()
            row = {
                "tokens": counters.tokens, "records": counters.moved_records(), "routed": total.routed,
                "hits": total.hits, "late": total.late, "demand": total.demand, "prefetched": total.prefetched,
                "used": total.prefetched_used, "wasted": total.prefetched_wasted, "left_out": total.left_out,
            }  # fmt: skip
            sums = {name: sums.get(name, 0) + value for name, value in row.items()}
    tokens = max(1, sums.get("tokens", 0))
    return {
        **sums,
        "slots": experts.pool.num_slots,
        "record_bytes": experts.counters.record_bytes,
        "bytes_per_token": sums.get("records", 0) * experts.counters.record_bytes / tokens,
        "hit_rate": sums.get("hits", 0) / max(1, sums.get("routed", 0)),
    }


def read_tasks(paths: Sequence[Path], items: int) -> dict[str, list[Task]]:
    """By file, its first items; InputError where a file is no list of tasks."""
    from nano.tasks import read_test_file

    found = {}
    for path in paths:
        try:
            found[path.stem] = read_test_file(path)[:items]
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path}: not a file of tasks, such as tritonmoe/nano/tasks/add-hard.jsonl") from None
    return found
