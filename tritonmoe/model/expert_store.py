"""All routed experts of a model in host memory, each one contiguous record that a single copy moves.

Dimensions: E experts of a layer, H hidden size, I intermediate size, S slots or records.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from tritonmoe.errors import ConfigError
from tritonmoe.model.pinned_memory import own_pages, register, unregister
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import PLAIN, ExpertWeights, Storage
from tritonmoe_kernels.fetch_reference import RECORD_ALIGNMENT
from tritonmoe_kernels.quantized import Matrix, QuantizedMatrix, WeightFormat

logger = logging.getLogger(__name__)

ARENA_BYTES = 16 << 30  # few registrations, of about a second each
NAMED = 5  # experts in a message


class Part(NamedTuple):
    """A tensor within a record: its first byte, its shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RecordLayout:
    """Where the parts of an expert lie in its record of bytes: gate_up and its bias, then down and its, each at a
    multiple of 256 bytes. Nothing else that moves records knows in which format they are. The padding between parts is
    never read.

    A matrix in fewer bits is several parts, its codes, scales and zero points. Biases are always in `dtype`.
    """

    hidden: int
    intermediate: int
    dtype: torch.dtype
    has_bias: bool
    format: WeightFormat | None = None  # of the matrices; None: `dtype`

    @classmethod
    def of(cls, spec: ModelSpec, dtype: torch.dtype, storage: Storage = PLAIN) -> RecordLayout:
        """The layout that all experts of the model share; ConfigError where they have none in common."""
        kinds = {(layer.moe.intermediate_size, layer.moe.expert_bias) for layer in spec.layers if layer.moe is not None}
        if not kinds:
            raise ConfigError(f"this {spec.model_type} model has no routed experts to keep in host memory")
        if len(kinds) > 1:
            sizes = ", ".join(f"{size} {'with' if bias else 'without'} bias" for size, bias in sorted(kinds))
            raise ConfigError(f"the experts of this {spec.model_type} model differ between layers ({sizes})")
        intermediate, has_bias = kinds.pop()
        return cls(spec.hidden_size, intermediate, dtype, has_bias, storage.expert_format(intermediate))

    @cached_property
    def parts(self) -> dict[str, Part]:
        """By field of `ExpertWeights`, and behind a dot that of `QuantizedMatrix`, in the order of the record."""
        hidden, rows = self.hidden, 2 * self.intermediate
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, shape in (("gate_up", (rows, hidden)), ("down", (hidden, self.intermediate))):
            if self.format is None:
                wanted[name] = shape, self.dtype
            else:
                wanted |= {f"{name}.{field}": part for field, part in self.format.shapes(*shape).items()}
            if self.has_bias:
                wanted[f"{name}_bias"] = shape[:1], self.dtype
        found: dict[str, Part] = {}
        end = 0
        for name, (shape, dtype) in wanted.items():
            found[name] = Part(_aligned(end), shape, dtype)
            end = found[name].end
        return found

    @property
    def num_bytes(self) -> int:
        """From one record to the next, a multiple of 256."""
        return _aligned(max(part.end for part in self.parts.values()))

    @property
    def first_bytes(self) -> int:
        """Of a record, what gate_up and its bias take: its beginning."""
        return next(part.offset for name, part in self.parts.items() if name.startswith("down"))

    def views(self, buffer: torch.Tensor) -> ExpertWeights:
        """The parts of all records of `buffer` [S, num_bytes] uint8, as strided views [S, …] of it."""
        assert buffer.dtype == torch.uint8
        assert buffer.shape[1] == self.num_bytes
        found = {
            name: buffer[:, part.offset : part.end].view(part.dtype).unflatten(1, part.shape)
            for name, part in self.parts.items()
        }
        biases = found.get("gate_up_bias"), found.get("down_bias")
        return ExpertWeights(self._matrix("gate_up", found), self._matrix("down", found), *biases)

    def _matrix(self, name: str, found: dict[str, torch.Tensor]) -> Matrix:
        if self.format is None:
            return found[name]
        return QuantizedMatrix(self.format, found[f"{name}.codes"], found[f"{name}.scales"], found.get(f"{name}.zeros"))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


class ExpertStore:
    """The records of all experts, in a few large arenas of host memory.

    Keep the store for as long as anything copies from its records on a GPU: its end unregisters the memory, which the
    tensors keep alive but pageable.
    """

    def __init__(self, layout: RecordLayout, arenas: list[torch.Tensor], layers: dict[int, torch.Tensor]) -> None:
        """`layers` maps a layer to its records [E, num_bytes] uint8, which lie in the arenas [records, num_bytes]."""
        self.layout = layout
        self.is_pinned = False
        self._arenas = arenas
        self._layers = layers
        self._records = {layer: records.unbind(0) for layer, records in layers.items()}
        # The list holds the arenas, so that none is unmapped before it is unregistered.
        self._registered: list[torch.Tensor] = []
        weakref.finalize(self, unregister, self._registered)

    @classmethod
    def allocate(cls, spec: ModelSpec, dtype: torch.dtype, storage: Storage = PLAIN) -> ExpertStore:
        """Room for all experts, untouched and not yet pinned: filled memory is pinned many times faster.

        ConfigError where experts differ between layers; InputError where the system refuses the memory.
        """
        layout = RecordLayout.of(spec, dtype, storage)
        counts = {i: layer.moe.num_experts for i, layer in enumerate(spec.layers) if layer.moe is not None}
        arenas, layers = [], {}
        for group in _group(counts, ARENA_BYTES // layout.num_bytes):
            arena = _empty_arena(sum(counts[layer] for layer in group), layout)
            arenas.append(arena)
            layers.update(zip(group, arena.split([counts[layer] for layer in group]), strict=True))
        return cls(layout, arenas, layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all records, with their padding."""
        return sum(arena.nbytes for arena in self._arenas)

    def layer_weights(self, layer: int) -> ExpertWeights:
        """The experts of a layer as views [E, …] of their records; KeyError for a layer without routed experts."""
        return self.layout.views(self._layers[layer])

    def addresses(self) -> dict[int, int]:
        """Where the records of each layer begin in host memory."""
        return {layer: records.data_ptr() for layer, records in self._layers.items()}

    def record(self, layer: int, expert: int) -> torch.Tensor:
        """One expert's record [num_bytes] uint8, contiguous."""
        return self._records[layer][expert]

    def pin(self) -> bool:
        """Register the arenas with CUDA, for fast copies and for kernels that read them; True if they are pinned.

        Call it once they are filled. Where that fails, all stay pageable and one warning says so; without a GPU
        nothing happens.
        """
        if self.is_pinned or not torch.cuda.is_available():
            return self.is_pinned
        started = time.perf_counter()
        for arena in self._arenas:
            problem = register(arena, self._registered)
            if problem:
                unregister(self._registered)
                logger.warning(
                    "pinning memory failed: experts stay in pageable memory (%s); copies will be slower", problem
                )
                return False
        self.is_pinned = True
        logger.info("pinned %.3g GB of experts in %.2f s", self.num_bytes / 1e9, time.perf_counter() - started)
        return True

    def close(self) -> None:
        """Unregister the memory, from which no copy may be under way. The records stay readable, pageable."""
        self.is_pinned = False
        unregister(self._registered)


def expert_name(layer_id: int, expert: int) -> str:
    """An expert in a message."""
    return f"expert {expert} of layer {layer_id}"


def not_arrived(names: list[str]) -> str:
    """What follows a message about something that did not end."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f" (not arrived: {', '.join(names[:NAMED]) or 'nothing'}{more})"


def _group(counts: dict[int, int], limit: int) -> list[list[int]]:
    """Consecutive layers whose experts together are at most `limit`; a layer that is larger stands alone, whole."""
    groups: list[list[int]] = []
    room = -1
    for layer, count in counts.items():
        if count > room:
            groups.append([])
            room = limit
        groups[-1].append(layer)
        room -= count
    return groups


def _empty_arena(num_records: int, layout: RecordLayout) -> torch.Tensor:
    """Uninitialised host memory [num_records, layout.num_bytes] that can be pinned."""
    arena = own_pages(num_records * layout.num_bytes)
    assert arena.data_ptr() % RECORD_ALIGNMENT == 0
    return arena.view(num_records, layout.num_bytes)
