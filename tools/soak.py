"""Generate for long with few slots, and hold memory, counters and tokens to what they must be.

Generations of many kinds follow each other in one process: single, in batches, as conversations, as streams that are
abandoned. The same ones are run three times, which must draw the same tokens every time, and the third time in no more
memory than the second (8 MiB of main memory apart): kernels that are compiled, steps that are captured and what is kept
for the next call cost memory once or twice, and what is lost for every generation costs it again. The first and the
last thousand tokens must be those of the same generations with all experts in slots (speculated execution) or resident
(every other policy); what was counted must add up. Exits with 1 where anything does not, which is in the summary too.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from tritonmoe.engine import Engine
from tritonmoe.errors import TritonMoeError
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.offload.experts import OffloadedExperts
from tritonmoe.offload.policy import minimum_slots
from tritonmoe.placement.loader import Placement

KINDS = ("single", "batch", "conversation", "batch", "abandoned")
COMPARED = 1000  # tokens at either end
LONGEST_PROMPT, LONGEST_ANSWER = 200, 160
MAX_BATCH = 4
TURNS = 3
PASSES = 3
GROWTH_BYTES = 8 << 20  # that a process may grow by in the last of them


@dataclass(frozen=True)
class Job:
    """A generation: what follows of it depends on nothing else."""

    kind: str
    prompts: list[list[int]]
    params: SamplingParams


@dataclass
class Outcome:
    """What one policy came to."""

    policy: str
    slots: int
    experts: int
    tokens: int = 0
    generations: int = 0
    seconds: float = 0.0
    compared_tokens: int = 0
    problems: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    host_bytes: dict[str, int] = field(default_factory=dict)
    device_bytes: dict[str, int] = field(default_factory=dict)


def jobs(seed: int, vocab_size: int, max_context: int) -> Iterator[Job]:
    """Endless, and the same for the same arguments: random prompts, sampled answers."""
    chance = random.Random(seed)
    longest = min(LONGEST_PROMPT, max_context // (2 * TURNS))
    for i in range(1 << 30):
        kind = KINDS[i % len(KINDS)]
        count = chance.randint(2, MAX_BATCH) if kind == "batch" else TURNS if kind == "conversation" else 1
        prompts = [[chance.randrange(vocab_size) for _ in range(chance.randint(1, longest))] for _ in range(count)]
        length = chance.randint(8, min(LONGEST_ANSWER, max_context // (2 * TURNS)))
        greedy = i % 8 == 0
        yield Job(kind, prompts, SamplingParams(max_new_tokens=length, temperature=0.0 if greedy else 1.0, seed=i))


def run(engine: Engine, job: Job) -> list[int]:
    """All tokens that a job draws."""
    if job.kind == "conversation":
        session, history, drawn = engine.session(), [], []
        for prompt in job.prompts:
            history += prompt
            stream = engine.stream(history, job.params, session)
            for _ in stream:
                pass
            history += stream.result().token_ids
            drawn += stream.result().token_ids
        return drawn
    if job.kind == "abandoned":
        stream = engine.stream(job.prompts[0], job.params)
        pieces = iter(stream)
        for _ in range(job.params.max_new_tokens // 2):
            if next(pieces, None) is None:
                break
        pieces.close()  # type: ignore[attr-defined]  # a generator
        return stream.result().token_ids
    return [token for result in engine.generate_batch(job.prompts, job.params) for token in result.token_ids]


def soak(engine: Engine, reference: Engine, policy: str, tokens: int, seed: int, ends: float) -> Outcome:
    """Run jobs until so many tokens have been drawn, or until `ends` on the clock of time.perf_counter."""
    experts = engine.decoder.experts
    assert isinstance(experts, OffloadedExperts)
    num_experts = sum(moe.num_experts for moe in engine.decoder.spec.moe_layers.values())
    outcome = Outcome(policy, experts.pool.num_slots, num_experts)
    passes: list[list[tuple[Job, list[int]]]] = []
    host: list[list[int]] = []
    device: list[list[int]] = []
    began = time.perf_counter()
    for i in range(1, PASSES + 1):
        for each in (passes, host, device):
            each.append([])
        first = jobs(seed, engine.tokenizer.vocab_size, engine.max_context)
        for job in first if i == 1 else itertools.islice(first, len(passes[0])):
            drawn = run(engine, job)
            passes[-1].append((job, drawn))
            outcome.tokens += len(drawn)
            check_counters(experts, outcome)
            host[-1].append(resident_bytes())
            device[-1].append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
            is_late = time.perf_counter() - began > i * (ends - began) / PASSES
            if (i == 1 and outcome.tokens * PASSES >= tokens) or is_late:
                break
    done = list(itertools.chain(*passes))
    outcome.generations, outcome.seconds = len(done), time.perf_counter() - began
    if len(done) < PASSES * len(passes[0]) or outcome.tokens < tokens:
        outcome.problems.append(f"ended by --time-limit after {outcome.tokens} of {tokens} tokens")
    for again in passes[1:]:
        for (job, drawn), (_, other) in zip(passes[0], again, strict=False):
            if drawn != other:
                outcome.problems.append(f"seed {job.params.seed} ({job.kind}): other tokens the next time")
    outcome.host_bytes = growth(host, "host memory", GROWTH_BYTES, outcome)
    outcome.device_bytes = growth(device, "device memory", 0, outcome)
    for job, drawn in at_both_ends(done):
        expected = run(reference, job)
        outcome.compared_tokens += len(drawn)
        if drawn != expected:
            at = next((i for i, (a, b) in enumerate(zip(drawn, expected, strict=False)) if a != b), len(drawn))
            outcome.problems.append(f"seed {job.params.seed} ({job.kind}): token {at} is another one")
    return outcome


def check_counters(experts: OffloadedExperts, outcome: Outcome) -> None:
    """What was counted adds up, and the pool is whole."""
    experts.report()
    experts.settle()
    experts.scheduler.check_integrity()
    for what, counters in (("decode", experts.counters), ("prefill", experts.prefill_counters)):
        total = counters.total()
        for name, value in asdict(total).items():
            if isinstance(value, int):
                outcome.counters[f"{what} {name}"] = outcome.counters.get(f"{what} {name}", 0) + value
        ended = total.prefetched_used + total.prefetched_wasted + total.cancelled
        if total.routed != total.hits + total.late + total.demand or total.prefetched < ended:
            outcome.problems.append(f"after {outcome.tokens} tokens the {what} counters do not add up: {total}")


def at_both_ends(done: Sequence[tuple[Job, list[int]]]) -> list[tuple[Job, list[int]]]:
    """The first jobs with COMPARED tokens between them, and the last."""

    def until_enough(order: Sequence[int]) -> set[int]:
        found, drawn = set(), 0
        for i in order:
            if drawn >= COMPARED:
                break
            found.add(i)
            drawn += len(done[i][1])
        return found

    chosen = until_enough(range(len(done))) | until_enough(range(len(done) - 1, -1, -1))
    return [done[i] for i in sorted(chosen)]


def growth(passes: list[list[int]], what: str, allowed: int, outcome: Outcome) -> dict[str, int]:
    """The most in each pass; the last may be above the one before by `allowed` bytes."""
    peaks = [max(samples) for samples in passes]
    grown = peaks[-1] - peaks[-2]
    if grown > allowed:
        outcome.problems.append(f"{what} grew by {grown / 1e6:.1f} MB in the last pass")
    return {"first": passes[0][0], **{f"pass {i + 1}": peak for i, peak in enumerate(peaks)}, "grown": grown}


def resident_bytes() -> int:
    """Of main memory, by this process, now; Linux only."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def load(options: argparse.Namespace, policy: str, slots: str | None) -> Engine:
    placement = Placement(policy=policy, expert_slots=slots)
    return Engine.from_pretrained(
        options.model, device=options.device, dtype=options.dtype, max_context=options.max_context,
        placement=placement, batch_size=MAX_BATCH,
    )  # fmt: skip


def soak_policy(options: argparse.Namespace, policy: str, ends: float) -> Outcome:
    resident = load(options, "resident", None)
    full = load(options, policy, "100%")
    experts = full.decoder.experts
    assert isinstance(experts, OffloadedExperts)
    slots = minimum_slots(full.decoder.spec, experts.policy) if options.slots is None else options.slots
    reference = resident if experts.policy.is_exact else full
    engine = load(options, policy, str(slots))
    try:
        return soak(engine, reference, policy, options.tokens, options.seed, ends)
    finally:
        engine.close()
        full.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-context", type=int, metavar="N")
    parser.add_argument("--policy", action="append", help="repeatable; default: exact, on-demand and router-pf")
    parser.add_argument("--slots", type=int, metavar="S", help="default: the minimum of one sequence's decode step")
    parser.add_argument("--tokens", type=int, default=20_000, help="to draw, for each policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=3600.0, metavar="S", help="for all policies together")
    parser.add_argument("--output", type=Path, help="the JSON summary")
    options = parser.parse_args(argv)
    source, ends = provenance(), time.perf_counter() + options.time_limit
    outcomes: list[dict[str, Any]] = []
    try:
        for policy in options.policy or ("exact", "on-demand", "router-pf"):
            outcomes.append(asdict(soak_policy(options, policy, ends)))
            print(json.dumps(outcomes[-1]))
    except TritonMoeError as error:
        parser.error(str(error))
    if options.output is not None:
        summary = {"provenance": source, "model": str(options.model), "results": outcomes}
        options.output.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return int(any(outcome["problems"] for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
