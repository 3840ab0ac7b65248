"""Runs a sample of decode steps a second time, on the side, and holds the first run to it (--check).

`slots`: with the same kernels, each expert fetched anew into an empty slot, to the bit. What the step left in its
slots is compared with the records in host memory byte by byte. `reference`: in float32 on the CPU, within a tolerance.
Either names the first layer, and where it can the expert, that differs. The second run writes the same keys and values
to the same positions, so that what is generated is what it would be without.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from tritonmoe.errors import CheckError, InputError
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.expert_store import expert_name
from tritonmoe.model.kv_cache import KVCache
from tritonmoe.model.matrices import floats, select
from tritonmoe.model.moe import Experts
from tritonmoe.model.operations import REFERENCES
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ExpertWeights, ModelWeights, Storage
from tritonmoe.offload.copy_engine import Copy, CopyEngine
from tritonmoe.offload.experts import OffloadedExperts
from tritonmoe.offload.policy import PRESETS, Policy, minimum_slots
from tritonmoe.prediction.predictors import Predictor
from tritonmoe_kernels.quantized import Matrix, QuantizedMatrix
from tritonmoe_kernels.routing import NormRouterOutput

EVERY = 16  # steps of which one is checked
KINDS = ("slots", "reference")
OPTION = re.compile(r"(slots|reference)(?::([1-9]\d{0,5}))?", re.ASCII)
# Root mean square of the difference / that of the reference, at the end of a step. docs/reliability.md
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}


class Step(NamedTuple):
    """The inputs of a decode step and what came of it."""

    token_ids: torch.Tensor  # [B] int64
    positions: torch.Tensor  # [B] int64
    length: int | None  # bounds the positions, where the host knows it
    cache: KVCache
    logits: torch.Tensor  # [B, V] float32


class Outputs(NamedTuple):
    """Of a layer's experts."""

    topk_ids: torch.Tensor  # [T, K] int32
    out: torch.Tensor  # [T, K, H]


def read_option(text: str) -> tuple[str, int]:
    """ "slots" or "reference", and one of how many steps is checked: "slots:4"; InputError for anything else."""
    match = OPTION.fullmatch(text)
    if match is None:
        raise InputError(f"--check {text!r} is not understood; use slots or reference, or slots:N for one step of N")
    return match[1], int(match[2] or EVERY)


def make_check(text: str, decoder: Decoder) -> StepCheck:
    """The check that `--check` asks for; InputError where it has nothing to compare."""
    kind, every = read_option(text)
    experts = decoder.experts
    policy = experts.policy if isinstance(experts, OffloadedExperts) else None
    if policy is not None and policy.miss_tolerance > 0.0:
        raise InputError("--check needs --miss-tolerance 0: which experts are left out depends on what is in slots")
    if kind == "reference":
        if policy is not None and policy.execute == "speculated":
            raise InputError("--check reference follows the true routers; use --execute routed, or --check slots")
        return ReferenceCheck(decoder, every)
    if policy is None:
        raise InputError(
            "--check slots compares slots with experts in host memory, and here all are resident; add --policy exact "
            "or --policy on-demand, or use --check reference"
        )
    return SlotCheck(decoder, every)


def second_policy(policy: Policy) -> Policy:
    """Under which `slots` runs a step again: what is speculated must be foretold again, the rest fetched on demand."""
    return policy if policy.execute == "speculated" else PRESETS["on-demand"]


class StepCheck:
    """What both checks share: which steps, what their experts computed, and the report."""

    def __init__(self, decoder: Decoder, every: int) -> None:
        self._decoder = decoder
        self._every = every
        self._kept: dict[int, dict[int, Outputs]] = {}  # by batch size and layer, of the last step
        self._steps = self._checked = self._compared = 0
        self._seconds = 0.0
        decoder.hooks.on_experts = self._keep

    def watch(self, batch: int) -> None:
        """Steps of so many sequences will come."""
        self._kept.setdefault(batch, {})

    def is_due(self) -> bool:
        """Whether the step that comes now is one of the sample."""
        self._steps += 1
        return (self._steps - 1) % self._every == 0

    def verify(self, step: Step) -> None:
        """Run the step again; CheckError for the first difference."""
        began = time.perf_counter()
        with torch.inference_mode():
            self._verify(step, self._kept[len(step.token_ids)])
        self._checked += 1
        self._seconds += time.perf_counter() - began

    def line(self) -> str:
        """What was checked, to print."""
        return (
            f"checked {self._checked} of {self._steps} decode steps, {self._compared} experts: {self._verdict()} "
            f"({self._seconds:.2f} s)"
        )

    def _keep(self, layer_id: int, topk_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Copy what a layer's experts computed. Of a captured step the copies are captured, too."""
        layers = self._kept.get(len(out))
        if layers is None:  # a prompt
            return
        if layer_id not in layers or layers[layer_id].out.shape != out.shape:
            layers[layer_id] = Outputs(torch.empty_like(topk_ids), torch.empty_like(out))
        layers[layer_id].topk_ids.copy_(topk_ids)
        layers[layer_id].out.copy_(out)

    def _fail(self, what: str) -> CheckError:
        return CheckError(f"--check: decode step {self._steps}, {what}")

    def _verify(self, step: Step, kept: dict[int, Outputs]) -> None:
        raise NotImplementedError

    def _verdict(self) -> str:
        raise NotImplementedError


class SlotCheck(StepCheck):
    """The same bits with each expert fetched by itself, and in the slots the bytes of the records."""

    def __init__(self, decoder: Decoder, every: int) -> None:
        super().__init__(decoder, every)
        experts = decoder.experts
        assert isinstance(experts, OffloadedExperts)
        self._experts = experts
        policy = second_policy(experts.policy)
        predictor = experts.predictor if policy is experts.policy else Predictor()
        self._fresh = experts.beside(minimum_slots(decoder.spec, policy), policy, predictor, FreshCopies)
        self._second = Decoder(decoder.spec, decoder.weights, decoder.operations, self._fresh)
        self._outputs: dict[int, Outputs] = {}
        self._fresh.hooks.on_experts = lambda layer, ids, out: self._outputs.update({layer: Outputs(ids, out)})

    def _verify(self, step: Step, kept: dict[int, Outputs]) -> None:
        cache = step.cache
        for layer_id, outputs in kept.items():
            self._compare_slots(layer_id, outputs.topk_ids)
        before = [_entries(tensor, step) for tensor in cache.keys + cache.values]
        self._fresh.resize(self._fresh.pool.num_slots)  # nothing is left of the last time
        self._outputs.clear()
        logits = self._second.decode(step.token_ids, step.positions, cache, step.length)
        after = [_entries(tensor, step) for tensor in cache.keys + cache.values]
        layers = len(cache.keys)
        for layer_id in range(layers):
            for name, i in (("keys", layer_id), ("values", layers + layer_id)):
                if not _same_bits(before[i], after[i]):
                    raise self._fail(f"layer {layer_id}: its {name} are not those of the step run again")
            if layer_id in kept:
                self._compare_outputs(layer_id, kept[layer_id], self._outputs[layer_id])
        if not _same_bits(step.logits, logits):
            raise self._fail("the logits are not those of the step run again, though every layer's are")
        self._compared += sum(outputs.topk_ids.unique().numel() for outputs in kept.values())

    def _compare_slots(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        found = self._experts.differing_slot(layer_id, topk_ids.unique().tolist())
        if found is not None:
            expert, slot, byte = found
            raise self._fail(f"{expert_name(layer_id, expert)}: slot {slot} is not its record, from byte {byte} on")

    def _compare_outputs(self, layer_id: int, first: Outputs, second: Outputs) -> None:
        if not torch.equal(first.topk_ids, second.topk_ids):
            raise self._fail(f"layer {layer_id}: its router chose other experts than when the step was run again")
        if not _same_bits(first.out, second.out):
            differs = (_bits(first.out) != _bits(second.out)).flatten(2).any(-1)
            token, k = differs.nonzero()[0].tolist()
            name = expert_name(layer_id, int(first.topk_ids[token, k]))
            raise self._fail(f"{name}: its output for sequence {token} is not that of its record fetched anew")

    def _verdict(self) -> str:
        return "every bit equal to the step run again with each expert fetched anew"


class ReferenceCheck(StepCheck):
    """The reference operations in float32 on the CPU, on the cache as it is, with the experts that were chosen."""

    def __init__(self, decoder: Decoder, every: int) -> None:
        super().__init__(decoder, every)
        weights = in_float32(decoder.weights)
        self._followed: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        experts = FollowingExperts(decoder.spec, weights, self._followed)
        experts.hooks.on_experts = lambda layer, _ids, out: self._outputs.update({layer: out})
        self._second = Decoder(decoder.spec, weights, REFERENCES, experts)
        self._tolerance = TOLERANCE[decoder.dtype]
        self._worst = 0.0

    def _verify(self, step: Step, kept: dict[int, Outputs]) -> None:
        positions = step.positions.cpu()
        rows = (positions < step.cache.max_length).nonzero()[:, 0]  # others are stored nowhere, and mean nothing
        if len(rows) == 0:
            return
        length = int(positions[rows].max()) + 1
        cache = KVCache(*(_rows(ts, rows, length) for ts in (step.cache.keys, step.cache.values)))
        self._followed.clear()
        self._followed.update({layer: outputs.topk_ids.cpu()[rows] for layer, outputs in kept.items()})
        logits = self._second.decode(step.token_ids.cpu()[rows], positions[rows], cache, length)
        for layer_id, outputs in kept.items():
            self._compare_outputs(layer_id, self._followed[layer_id], outputs.out.cpu()[rows], self._outputs[layer_id])
        error = _relative_error(step.logits.cpu()[rows], logits)
        self._worst = max(self._worst, error)
        if not error <= self._tolerance:
            raise self._fail(
                f"the logits: relative error {error:.3g} against float32, of {self._tolerance:.3g} allowed"
            )
        self._compared += sum(ids.unique().numel() for ids in self._followed.values())

    def _compare_outputs(self, layer_id: int, ids: torch.Tensor, out: torch.Tensor, expected: torch.Tensor) -> None:
        error = _relative_error(out, expected)
        self._worst = max(self._worst, error)
        if not error <= self._tolerance:
            wrong = (out.float() - expected).square().sum(-1).nan_to_num(torch.inf)
            name = expert_name(layer_id, int(ids.flatten()[wrong.flatten().argmax()]))
            raise self._fail(f"{name}: {self._far(error)}")

    def _far(self, error: float) -> str:
        return f"relative error {error:.3g} against float32, of {self._tolerance:.3g} allowed"

    def _verdict(self) -> str:
        return f"relative error at most {self._worst:.3g} against float32, of {self._tolerance:.3g} allowed"


class FreshCopies(CopyEngine):
    """Copies at once, on the stream that computes, into slots that hold NaN before."""

    def __init__(self, slots: torch.Tensor, landed: Callable[[int, int], object]) -> None:
        super().__init__(slots, landed)
        slots.view(torch.uint8).fill_(255)

    def waited_s(self) -> float:
        return 0.0

    def _quiesce(self) -> None:
        pass

    def _start(self, copy: Copy) -> None:
        self._slots[copy.slot].copy_(copy.record)

    def _is_done(self, copy: Copy) -> bool:
        return True

    def _await(self, copy: Copy) -> None:
        pass

    def _finish(self, copy: Copy) -> None:
        pass


class FollowingExperts(Experts):
    """Runs the experts it is told to in float32, with the weights that the router here gives them."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, followed: dict[int, torch.Tensor]) -> None:
        """`followed`: by layer, the ids [T, K] of the step to come."""
        super().__init__(REFERENCES, spec, weights)
        self._followed = followed

    def _compute(self, layer_id: int, routed: NormRouterOutput, out: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        ids = self._followed[layer_id]
        wanted, slots = ids.unique(return_inverse=True)
        _, moe = self._moe(layer_id)
        parts = {f.name: getattr(moe.experts, f.name) for f in dataclasses.fields(moe.experts)}
        few = ExpertWeights(
            **{name: None if t is None else _picked(t, wanted) for name, t in parts.items()}  # type: ignore[arg-type]
        )
        self._run_slots(layer_id, routed.x, slots.int(), few, out)
        return self._gate_weights(layer_id, routed.logits, ids)


def in_float32(weights: ModelWeights) -> ModelWeights:
    """A copy on the CPU but for the routed experts, which stay where and what they are."""
    seen: dict[int, torch.Tensor] = {}

    def converted(value: Any) -> Any:
        if isinstance(value, torch.Tensor | QuantizedMatrix):
            if id(value) not in seen:
                seen[id(value)] = floats(value).detach().cpu()
            return seen[id(value)]
        if isinstance(value, list):
            return [converted(item) for item in value]
        if value is None or isinstance(value, ExpertWeights | Storage):
            return value
        return dataclasses.replace(
            value, **{f.name: converted(getattr(value, f.name)) for f in dataclasses.fields(value)}
        )

    return converted(weights)


def _picked(matrix: Matrix, experts: Iterable[torch.Tensor]) -> torch.Tensor:
    """[n, …] float32 on the CPU."""
    return torch.stack([floats(select(matrix, int(expert))).cpu() for expert in experts])


def _rows(tensors: tuple[torch.Tensor, ...], rows: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    """The first `length` entries of some sequences' keys or values, in float32 on the CPU."""
    return tuple(tensor[rows.to(tensor.device), :, :length].cpu().float() for tensor in tensors)


def _entries(tensor: torch.Tensor, step: Step) -> torch.Tensor:
    """Of keys or values [B, heads, length, D]: a copy of each sequence's at its position, or of its last entry."""
    rows = torch.arange(len(tensor), device=tensor.device)
    return tensor[rows, :, step.positions.clamp(max=tensor.shape[2] - 1)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(_bits(first), _bits(second))


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference / that of what is expected; NaN where anything is not a number."""
    expected = expected.double()
    return float((actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-30))
