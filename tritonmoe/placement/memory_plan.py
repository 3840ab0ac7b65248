"""How a device's memory is divided, by arithmetic and before anything is loaded: what a model cannot do without first,
slots for experts from the rest. "Device" is the GPU, or main memory where there is none."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from tritonmoe.errors import InputError
from tritonmoe.generation.check import second_policy
from tritonmoe.generation.session import step_bytes
from tritonmoe.memory import available_bytes
from tritonmoe.model.expert_store import RecordLayout
from tritonmoe.model.kv_cache import kv_bytes_per_token
from tritonmoe.model.operations import DEQUANTIZED_BYTES, DEQUANTIZED_ELEMENTS
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import PLAIN, Storage, weight_bytes
from tritonmoe.offload.policy import PRESETS, Policy, minimum_slots

# By type of device: the libraries' own workspaces, compiled kernels, captured graphs, and what allocators round up.
RESERVE_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
MIN_CONTEXT = 2  # a prompt of one token and one that is generated
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
NUMBER = r"\d{1,15}(?:\.\d{1,6})?"
SIZE = re.compile(rf"({NUMBER}) ?(%|[KMGT]I?B|B)", re.ASCII)
SLOTS = re.compile(rf"(\d{{1,15}})|({NUMBER}) ?%", re.ASCII)


@dataclass(frozen=True)
class Budget:
    """Bytes of the device that may be used (`num_bytes`) and that could be given at most (`limit_bytes`), both beside
    an expert store in the same memory; `resident_bytes` may be used by a run that has no store."""

    num_bytes: int
    limit_bytes: int
    resident_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """What each part of a run takes of the device, in `rows` of (what, bytes) that add up to `budget_bytes`."""

    place: str  # "on the GPU" or "in main memory"
    budget_bytes: int
    rows: tuple[tuple[str, int], ...]
    cache_bytes: int  # that KV caches may take altogether: those set aside for them, and those that nothing else uses
    num_slots: int  # 0 where every expert is resident
    minimum_slots: int  # likewise
    layer_slots: int  # likewise; the fewest that hold what a layer of a decode step needs, so that it runs at once
    num_experts: int  # of all layers together
    fits_resident: bool  # whether the budget holds every expert
    host_bytes: int  # of main memory: all experts where they are not resident, and the embedding if it is there

    @property
    def slot_share(self) -> float:
        """Of all experts, those on the device at a time."""
        return self.num_slots / self.num_experts if self.num_slots else 1.0

    def lines(self) -> list[str]:
        """The table to print before loading."""
        sizes = [format_bytes(num_bytes) for _, num_bytes in self.rows]
        left, right = max(len(what) for what, _ in self.rows), max(map(len, sizes))
        lines = [f"{format_bytes(self.budget_bytes)} {self.place}, divided into"]
        lines += [f"  {what:<{left}}  {size:>{right}}" for (what, _), size in zip(self.rows, sizes, strict=True)]
        if self.num_slots:
            lines.append(
                f"  slots for {100 * self.slot_share:.3g} % of {self.num_experts} experts; "
                f"the minimum is {self.minimum_slots}"
            )
            if self.num_slots < self.layer_slots:
                lines.append("  fewer slots than a layer needs at once: it runs in waves, which is slower")
            elif self.num_slots < self.minimum_slots:
                lines.append("  fewer slots than the minimum: not all that is foretold is prefetched, which is slower")
        return lines


def read_budget(text: str | None, device: torch.device, store_bytes: int = 0) -> Budget:
    """The value of `--gpu-memory` ("10GiB", or "80%" of what is free), or all that is free for "auto" and where it is
    not given.

    `store_bytes` is what the host's copy of the experts will take; on a CPU it comes out of the same memory. Raises
    InputError, one line, for a value that is not understood or more than there is.
    """
    free = available_bytes(device)
    limit = free if device.type == "cuda" else max(0, free - store_bytes)
    if text is None or text.strip().lower() == "auto":
        return Budget(limit, limit, free)
    match = SIZE.fullmatch(text.strip().upper())
    if match is None:
        raise InputError(
            f"--gpu-memory {text!r} is not understood; use a size such as 10GiB, or a share of what is free such as 80%"
        )
    number, unit = Fraction(match[1]), match[2]
    num_bytes = int(limit * number / 100) if unit == "%" else int(number * UNITS[unit])
    if num_bytes == 0 or num_bytes > limit:
        raise InputError(
            f"--gpu-memory {text} is {format_bytes(num_bytes)}; it must be above 0 and at most the "
            f"{format_bytes(limit)} free {_place(device)}"
        )
    return Budget(num_bytes, limit, num_bytes)


def read_slots(text: str, num_experts: int) -> int:
    """The value of `--expert-slots`: "N" slots, or "P%" of the model's `num_experts` experts, rounded down.

    Raises InputError, one line, for anything else and for more slots than there are experts.
    """
    match = SLOTS.fullmatch(text.strip())
    if match is None:
        raise InputError(
            f"--expert-slots {text!r} is not understood; use a number such as 512, or a share of all experts: 25%"
        )
    slots = Fraction(match[1]) if match[1] else num_experts * Fraction(match[2]) / 100
    if slots > num_experts:
        raise InputError(f"--expert-slots {text} is more than the model's {num_experts} experts; use 100% for all")
    return int(slots)


def plan(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    policy: Policy,
    budget: Budget,
    max_context: int,
    batch: int = 1,
    expert_slots: str | None = None,
    storage: Storage = PLAIN,
    estimator_bytes: int = 0,
    check: str | None = None,
) -> MemoryPlan:
    """Divide `budget` for a model in `dtype` and `storage` and `batch` sequences of up to `max_context` tokens.

    `policy` is the effective one, `expert_slots` the option's text, `check` the kind of --check that runs beside.
    Raises InputError where it does not fit: one line that says what is needed and which option to change.
    """
    division = _Division(spec, dtype, device, policy, max_context, batch, storage, estimator_bytes, check)
    if policy.is_resident:
        if expert_slots is not None:
            raise InputError("--expert-slots has no effect with --policy resident; leave it out, or use --policy exact")
        return division.resident(budget)
    return division.slots(budget, expert_slots)


def format_bytes(num_bytes: int) -> str:
    """In binary units, as in "9.00 MiB" or "312 B"."""
    size, unit = _in_units(num_bytes)
    return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"


class _Division:
    """A division under way: what a model needs for a given context, and what is then left for experts."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        policy: Policy,
        max_context: int,
        batch: int,
        storage: Storage,
        estimator_bytes: int,
        check: str | None,
    ) -> None:
        self._spec, self._dtype, self._device, self._policy = spec, dtype, device, policy
        self._max_context, self._batch = max_context, batch
        self._storage, self._estimator_bytes, self._check = storage, estimator_bytes, check
        self._num_experts = sum(moe.num_experts for moe in spec.moe_layers.values())
        self._weight_bytes = weight_bytes(spec, dtype, with_experts=False, storage=storage)
        all_experts = weight_bytes(spec, dtype, storage=storage) - self._weight_bytes
        self._format = "" if storage.experts is None else f" in {storage.experts.name}"
        self._resident_row = (f"all {self._num_experts} experts{self._format}", all_experts)

    def resident(self, budget: Budget) -> MemoryPlan:
        if not self._fits_resident(budget):
            raise self._refusal(
                self._resident_row,
                budget.resident_bytes,
                max(budget.resident_bytes, budget.limit_bytes),
                ["--policy exact, which needs room for few of the experts"],
            )
        host_bytes = self._embedding_bytes()
        return self._plan(self._resident_row, budget, budget.resident_bytes, host_bytes=host_bytes)

    def slots(self, budget: Budget, expert_slots: str | None) -> MemoryPlan:
        record_bytes = self._record_bytes()
        most = min(moe.num_experts - moe.num_experts_per_tok for moe in self._spec.moe_layers.values())
        if self._policy.candidates > most:
            raise InputError(
                f"--candidates {self._policy.candidates} is more than a layer has beyond the experts it chooses; "
                f"use {most} or less"
            )
        minimum = minimum_slots(self._spec, self._policy, self._batch)
        fitting = max(0, budget.num_bytes - _total(self._fixed(self._max_context))) // record_bytes
        if expert_slots is None:
            wanted = max(minimum, min(fitting, self._num_experts))
        else:
            wanted = read_slots(expert_slots, self._num_experts)
            if wanted < 1:
                raise InputError(f"--expert-slots {expert_slots} hold no expert; use 1 or more")
        row = (f"{wanted} expert slots of {format_bytes(record_bytes)}{self._format}", wanted * record_bytes)
        if wanted > fitting:
            remedies = []
            if fitting >= 1 and expert_slots is not None:
                remedies.append(f"--expert-slots {fitting} or fewer")
            elif fitting >= 1:
                remedies.append(f"--expert-slots {fitting}, which is slower")
            if expert_slots is None and self._unpredicted_minimum() <= fitting:
                remedies.append("--policy on-demand, which prefetches nothing")
            raise self._refusal(row, budget.num_bytes, budget.limit_bytes, remedies)
        host_bytes = self._num_experts * record_bytes + self._embedding_bytes()
        return self._plan(row, budget, budget.num_bytes, wanted, minimum, host_bytes)

    def _fixed(self, context: int) -> list[tuple[str, int]]:
        """Everything but experts."""
        spec, dtype, batch, dense = self._spec, self._dtype, self._batch, self._storage.dense
        workspace = step_bytes(spec, self._device, dtype, context)
        if dense is not None:
            workspace += DEQUANTIZED_BYTES * min(DEQUANTIZED_ELEMENTS, spec.vocab_size * spec.hidden_size)
        kind = "" if dense is None else f", most in {dense.name}"
        without = "experts and embedding" if self._storage.embedding_on_host else "experts"
        rows = [
            (f"weights without {without}{kind}", self._weight_bytes),
            (f"KV cache of {batch} x {context} tokens", self._kv_bytes(context)),
            ("workspace of a prefill step", workspace),
            ("default vectors", self._vector_bytes()),
            ("estimator", self._estimator_bytes),
            (f"--check {self._check}", self._check_bytes()),
            ("reserve", RESERVE_BYTES[self._device.type]),
        ]
        return [(what, num_bytes) for what, num_bytes in rows if num_bytes > 0]

    def _table_bytes(self) -> int:
        return self._spec.vocab_size * self._spec.hidden_size * self._dtype.itemsize

    def _embedding_bytes(self) -> int:
        """In main memory."""
        return self._table_bytes() if self._storage.embedding_on_host else 0

    def _may_move_embedding(self) -> bool:
        is_free = not self._spec.tied_head or self._storage.dense is not None
        return self._device.type == "cuda" and is_free and not self._storage.embedding_on_host

    def _kv_bytes(self, context: int) -> int:
        return self._batch * context * kv_bytes_per_token(self._spec, self._dtype)

    def _vector_bytes(self) -> int:
        """Default vectors on the device are [layers, E, H], dense layers included."""
        if not self._policy.uses_default_vectors:
            return 0
        most = max(moe.num_experts for moe in self._spec.moe_layers.values())
        return len(self._spec.layers) * most * self._spec.hidden_size * self._dtype.itemsize

    def _check_bytes(self) -> int:
        """What a step's experts computed, and for `slots` the same of its second run, and the slots of that."""
        if self._check is None:
            return 0
        outputs = sum(moe.num_experts_per_tok for moe in self._spec.moe_layers.values())
        kept = self._batch * outputs * self._spec.hidden_size * self._dtype.itemsize
        if self._check != "slots":
            return kept
        return 2 * kept + minimum_slots(self._spec, second_policy(self._policy)) * self._record_bytes()

    def _record_bytes(self) -> int:
        return RecordLayout.of(self._spec, self._dtype, self._storage).num_bytes

    def _fits_resident(self, budget: Budget) -> bool:
        needed = _total([*self._fixed(self._max_context), self._resident_row]) - self._vector_bytes()
        return needed <= budget.resident_bytes

    def _plan(
        self,
        experts: tuple[str, int],
        budget: Budget,
        num_bytes: int,
        num_slots: int = 0,
        minimum: int = 0,
        host_bytes: int = 0,
    ) -> MemoryPlan:
        rows = [*self._fixed(self._max_context), experts]
        unused = num_bytes - _total(rows)
        rows.append(("not used", unused))
        return MemoryPlan(
            _place(self._device),
            num_bytes,
            tuple(rows),
            self._kv_bytes(self._max_context) + unused,
            num_slots,
            minimum,
            self._unpredicted_minimum() if num_slots else 0,
            self._num_experts,
            self._fits_resident(budget),
            host_bytes,
        )

    def _refusal(
        self, experts: tuple[str, int], num_bytes: int, limit_bytes: int, remedies: Sequence[str]
    ) -> InputError:
        """What is needed, part by part, and which option to change; each change alone suffices."""
        rows = [*self._fixed(self._max_context), experts]
        needed = _total(rows)
        found = list(remedies)
        if needed <= limit_bytes:
            found.append(f"--gpu-memory {_rounded_up(needed)} or more")
        if self._may_move_embedding() and needed - self._table_bytes() <= num_bytes:
            found.append("--embedding host")
        context = self._largest_context(num_bytes - experts[1])
        if context >= MIN_CONTEXT:
            found.append(f"--max-context {context} or less")
        if not found:
            found = ["a smaller model or another --device"]
            if self._dtype == torch.float32:
                found.insert(0, "--dtype bfloat16")
        parts = ", ".join(f"{what} {format_bytes(size)}" for what, size in rows)
        have = "given with --gpu-memory" if num_bytes < limit_bytes else f"free {_place(self._device)}"
        return InputError(
            f"out of memory: {format_bytes(needed)} are needed ({parts}) and {format_bytes(num_bytes)} are {have}; "
            f"use {', or '.join(found)}"
        )

    def _largest_context(self, num_bytes: int) -> int:
        """The most tokens of context for which `num_bytes` hold everything but experts, or 0."""
        low, high = 0, self._max_context  # `low` fits or is 0, `high` is taken not to
        while high - low > 1:
            middle = (low + high) // 2
            if _total(self._fixed(middle)) <= num_bytes:
                low = middle
            else:
                high = middle
        return low

    def _unpredicted_minimum(self) -> int:
        return minimum_slots(self._spec, PRESETS["on-demand"], self._batch)


def _place(device: torch.device) -> str:
    return "on the GPU" if device.type == "cuda" else "in main memory"


def _total(rows: Sequence[tuple[str, int]]) -> int:
    return sum(num_bytes for _, num_bytes in rows)


def _in_units(num_bytes: int) -> tuple[float, str]:
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return size, unit


def _rounded_up(num_bytes: int) -> str:
    """A value for --gpu-memory that is no less."""
    size, unit = _in_units(num_bytes)
    return f"{math.ceil(size * 100) / 100:.2f}{unit}"
