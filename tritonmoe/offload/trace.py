"""Traces: what every layer routed, foretold and found in its slots, recorded to be replayed without the model.

A file is a compressed .npz of flat arrays and one JSON header. A run is one MoE layer of one step; the runs of a step
follow each other in the order of layers. Of a decode step there are all ids and gate weights, of a piece of a prompt,
where nearly every expert is wanted, the distinct ids alone. `tools/replay.py` replays it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import time
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

import tritonmoe
from tritonmoe.errors import InputError, TritonMoeError
from tritonmoe.files import open_regular, parse_json, write_file
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.expert_store import RecordLayout
from tritonmoe.offload.counters import Counters
from tritonmoe.offload.experts import OffloadedExperts
from tritonmoe.offload.policy import RESIDENT, Policy
from tritonmoe.prediction.default_vectors import model_identity

FORMAT = "tritonmoe trace, version 1"
REMEDY = "record it anew with --trace"
MAX_BYTES = 2 << 30  # unpacked; a decode step of 48 layers takes about 10 kB
MALFORMED = (ValueError, TypeError, SyntaxError, tokenize.TokenError)  # numpy, of the header of an array
MAX_EXPERTS = 1 << 24  # of all layers: what a replay makes tables of
MAX_RECORD_BYTES = 1 << 40
# Of each array: whole numbers ("i", "u"), truth values ("b") or floating point ("f").
KINDS = {
    **dict.fromkeys(("layer", "generation", "num_tokens", "num_ids", "ids", "found"), "iu"),
    **dict.fromkeys(("foretold_run", "foretold_layer", "foretold_num_ids", "foretold_ids"), "iu"),
    **dict.fromkeys(("weights", "began_s", "wait_s"), "f"),
    "is_prefill": "b",
}


@dataclass(frozen=True)
class TraceHeader:
    """What a trace was recorded with."""

    version: str  # of tritonmoe
    model: str  # default_vectors.model_identity
    model_type: str
    experts: tuple[int, ...]  # of each layer; 0 where it is dense
    num_experts_per_tok: int  # the most of any layer
    record_bytes: int  # of one expert
    device: str
    dtype: str
    policy: Policy
    num_slots: int  # 0 where experts were resident: then nothing was foretold or fetched
    began_empty: bool  # whether no slot held an expert at first; a replay begins so
    dropped_steps: int = 0  # interrupted, and not in the trace

    def __post_init__(self) -> None:
        sizes = (self.num_experts_per_tok, self.record_bytes, max(self.experts, default=0))
        if not all(type(size) is int for size in (*sizes, *self.experts, self.num_slots)):
            raise ValueError("a size is no integer")
        if min(sizes) < 1 or min(self.experts) < 0 or self.num_slots < 0 or self.record_bytes > MAX_RECORD_BYTES:
            raise ValueError("a size is out of range")
        if max(len(self.experts) * max(self.experts), self.num_experts_per_tok, self.num_slots) > MAX_EXPERTS:
            raise ValueError("a size is out of range")

    @property
    def num_layers(self) -> int:
        return len(self.experts)

    @property
    def num_experts(self) -> int:
        """Of the layer with the most."""
        return max(self.experts)

    @property
    def moe_layers(self) -> list[int]:
        """Positions of the layers with experts."""
        return [layer for layer, count in enumerate(self.experts) if count]


@dataclass(frozen=True)
class LayerRun:
    """One MoE layer of a step. hits, late and demand count distinct experts, as counters do; 0 if all were resident."""

    layer: int
    is_prefill: bool
    generation: int  # counts from 0; between two of them whatever is foretold is given up
    num_tokens: int  # T
    ids: np.ndarray  # [T, K] of a decode step, in a prefill [1, distinct ids in the order of their first appearance]
    weights: np.ndarray  # [T, K] float32 of a decode step, in a prefill [0, 0]
    foretold: dict[int, np.ndarray]  # by later layer, ids [T, M], best first: what this layer foretold
    hits: int
    late: int
    demand: int
    began_s: float  # host clock, from the start of the recording: the layer's routing is enqueued
    wait_s: float  # exposed transfer time; 0 on a GPU, where the host does not know it yet

    @property
    def wanted(self) -> list[int]:
        """The distinct ids: those of a decode step in the order of their first appearance, a prompt's sorted."""
        return np.unique(self.ids).tolist() if self.is_prefill else list(dict.fromkeys(self.ids.ravel().tolist()))


Step = list[LayerRun]


@dataclass(frozen=True)
class Trace:
    """A recording; every step has a run of each MoE layer."""

    header: TraceHeader
    steps: list[Step]

    @property
    def runs(self) -> list[LayerRun]:
        return [run for step in self.steps for run in step]


class TraceRecorder:
    """Records what a decoder does into a file.

    >>> with TraceRecorder(Path("trace.npz")).attach(engine.decoder):
    ...     engine.generate("Once upon a time")

    The file appears when the block ends, complete; not at all if that is by an exception. Only whole steps are in it.
    """

    def __init__(self, path: Path) -> None:
        """InputError where the file cannot be written."""
        self._path = path.absolute()
        self._steps: list[Step] = []
        self._step: Step = []
        self._dropped = 0
        self._decoder: Decoder | None = None
        self._write(None)

    def attach(self, decoder: Decoder) -> TraceRecorder:
        """Begin to record, between two steps; meanwhile every step is planned on the host and nothing is captured."""
        assert self._decoder is None, "the recorder is attached already"
        if isinstance(decoder.experts, OffloadedExperts):
            decoder.experts.settle()  # so that the pool knows what is in the slots
        self._header = _header(decoder)
        self._decoder = decoder
        self._last = self._counted()
        self._counters = self._last_counters()
        self._generation = -1
        self._started = self._began = time.perf_counter()
        self._others = decoder.hooks.on_route, decoder.experts.is_capturable
        decoder.hooks.on_route = self._on_route
        decoder.hooks.on_layer = self._on_layer
        decoder.experts.is_capturable = False
        return self

    def detach(self) -> None:
        """Record no more."""
        if self._decoder is not None:
            self._decoder.hooks.on_layer = None
            self._decoder.hooks.on_route, self._decoder.experts.is_capturable = self._others
            self._decoder = None

    def save(self) -> None:
        """Write the steps that are complete; InputError where that fails, and then there is no file of them."""
        dropped = self._dropped + bool(self._step)
        header = dataclasses.replace(self._header, dropped_steps=dropped)
        self._write(_pack(header, self._steps))

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()
        if kind is None:
            self.save()

    def _on_route(self, layer: int, ids: torch.Tensor) -> None:
        self._began = time.perf_counter()
        if self._others[0] is not None:
            self._others[0](layer, ids)

    def _on_layer(
        self, layer: int, is_prefill: bool, ids: np.ndarray, weights: np.ndarray, foretold: dict[int, np.ndarray]
    ) -> None:
        if layer == self._header.moe_layers[0]:
            self._dropped += bool(self._step)
            self._step = []
            self._generation += self._is_new_generation(is_prefill)
        now = self._counted()
        hits, late, demand, wait_s = (a - b for a, b in zip(now[layer], self._last[layer], strict=True))
        self._last = now
        distinct = list(dict.fromkeys(ids.ravel().tolist())) if is_prefill else []
        self._step.append(
            LayerRun(
                layer,
                is_prefill,
                self._generation,
                len(ids),
                np.array([distinct], dtype=np.int32) if is_prefill else ids.astype(np.int32),
                np.empty((0, 0), dtype=np.float32) if is_prefill else weights.astype(np.float32),
                {} if is_prefill else {later: rows.astype(np.int32) for later, rows in foretold.items()},
                int(hits),
                int(late),
                int(demand),
                self._began - self._started,
                wait_s,
            )
        )
        if layer == self._header.moe_layers[-1]:
            self._steps.append(self._step)
            self._step = []

    def _is_new_generation(self, is_prefill: bool) -> bool:
        """Whether the counters were exchanged; resident experts have none, there a prompt after a decode step tells."""
        before, self._counters = self._counters, self._last_counters()
        if self._counters is not before:
            self._last = dict.fromkeys(self._header.moe_layers, (0, 0, 0, 0.0))
            return True
        if self._generation < 0:
            return True
        last = self._steps[-1][0] if self._steps else None
        return self._counters is None and is_prefill and last is not None and not last.is_prefill

    def _last_counters(self) -> Counters | None:
        experts = self._decoder.experts if self._decoder is not None else None
        return experts.counters if isinstance(experts, OffloadedExperts) else None

    def _counted(self) -> dict[int, tuple[int, int, int, float]]:
        """hits, late, demand by layer so far, and the wait of all layers."""
        experts = self._decoder.experts if self._decoder is not None else None
        layers = self._header.moe_layers
        if not isinstance(experts, OffloadedExperts):
            return dict.fromkeys(layers, (0, 0, 0, 0.0))
        decode, prefill = experts.counters, experts.prefill_counters
        # Elsewhere it would wait for the device.
        wait_s = experts.waited_s() if self._header.device == "cpu" else 0.0
        rows = ((layer, decode.layers[layer], prefill.layers[layer]) for layer in layers)
        return {
            layer: (one.hits + other.hits, one.late + other.late, one.demand + other.demand, wait_s)
            for layer, one, other in rows
        }

    def _write(self, data: bytes | None) -> None:
        try:
            write_file(self._path, data)
        except OSError as error:
            raise InputError(f"{self._path}: the trace cannot be written: {error.strerror}") from None


def read_trace(path: Path) -> Trace:
    """Read a file of `TraceRecorder`.

    Raises InputError, one line, for a file that cannot be read, is of another kind, or is damaged.
    """
    try:
        with open(open_regular(path), "rb") as file, zipfile.ZipFile(file) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_BYTES:
                raise InputError(f"{path}: not a trace: it unpacks to more than {MAX_BYTES >> 30} GiB")
            arrays = {name.removesuffix(".npy"): _read_array(archive, name) for name in archive.namelist()}
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, MemoryError, *MALFORMED):
        raise InputError(f"{path}: not a trace, or a damaged one; {REMEDY}") from None
    try:
        header = _read_header(arrays)
        return Trace(header, _unpack(header, arrays))
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, TritonMoeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise InputError(f"{path}: not a trace, or a damaged one ({reason}); {REMEDY}") from None


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read whole before it is parsed: its checksum is tested at its end."""
    return np.lib.format.read_array(io.BytesIO(archive.read(name)), allow_pickle=False)


def _header(decoder: Decoder) -> TraceHeader:
    spec, experts = decoder.spec, decoder.experts
    moes = [layer.moe for layer in spec.layers]
    offloaded = experts if isinstance(experts, OffloadedExperts) else None
    return TraceHeader(
        version=tritonmoe.__version__,
        model=model_identity(spec, decoder.weights),
        model_type=spec.model_type,
        experts=tuple(0 if moe is None else moe.num_experts for moe in moes),
        num_experts_per_tok=max(moe.num_experts_per_tok for moe in moes if moe is not None),
        record_bytes=RecordLayout.of(spec, decoder.dtype, decoder.weights.storage).num_bytes,
        device=decoder.device.type,
        dtype=str(decoder.dtype).removeprefix("torch."),
        policy=Policy(RESIDENT) if offloaded is None else offloaded.policy,
        num_slots=0 if offloaded is None else offloaded.pool.num_slots,
        began_empty=offloaded is None or bool((offloaded.pool.key_of < 0).all()),
    )


def _pack(header: TraceHeader, steps: Sequence[Step]) -> bytes:
    runs = [run for step in steps for run in step]
    foretold = [(i, later, rows) for i, run in enumerate(runs) for later, rows in run.foretold.items()]
    facts = {"format": FORMAT, **dataclasses.asdict(header)}
    ids = np.uint16 if header.num_experts <= 1 << 16 else np.int32
    arrays = {
        "header": np.array(json.dumps(facts, sort_keys=True)),
        "layer": np.array([run.layer for run in runs], dtype=np.int32),
        "is_prefill": np.array([run.is_prefill for run in runs], dtype=bool),
        "generation": np.array([run.generation for run in runs], dtype=np.int32),
        "num_tokens": np.array([run.num_tokens for run in runs], dtype=np.int32),
        "num_ids": np.array([run.ids.size for run in runs], dtype=np.int32),
        "ids": _joined([run.ids for run in runs], ids),
        "weights": _joined([run.weights for run in runs], np.float32),
        "found": np.array([(run.hits, run.late, run.demand) for run in runs], dtype=np.int32).reshape(-1, 3),
        "began_s": np.array([run.began_s for run in runs], dtype=np.float64),
        "wait_s": np.array([run.wait_s for run in runs], dtype=np.float64),
        "foretold_run": np.array([i for i, _, _ in foretold], dtype=np.int32),
        "foretold_layer": np.array([later for _, later, _ in foretold], dtype=np.int32),
        "foretold_num_ids": np.array([rows.size for _, _, rows in foretold], dtype=np.int32),
        "foretold_ids": _joined([rows for _, _, rows in foretold], ids),
    }
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=dtype), *(part.ravel().astype(dtype) for part in parts)])


def _read_header(arrays: dict[str, np.ndarray]) -> TraceHeader:
    facts = parse_json(str(arrays["header"]).encode())
    if not isinstance(facts, dict) or facts.pop("format", None) != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    facts["policy"] = Policy(**facts["policy"])
    facts["experts"] = tuple(facts["experts"])
    return TraceHeader(**facts)


def _unpack(header: TraceHeader, arrays: dict[str, np.ndarray]) -> list[Step]:
    """The steps; ValueError for arrays that contradict each other or the header."""
    for name, kinds in KINDS.items():
        if arrays[name].dtype.kind not in kinds or arrays[name].ndim != (2 if name == "found" else 1):
            raise ValueError(f"{name} is {arrays[name].dtype} {list(arrays[name].shape)}")
    columns = ("layer", "is_prefill", "generation", "num_tokens", "num_ids", "found", "began_s", "wait_s")
    if len({len(arrays[name]) for name in columns}) != 1 or arrays["found"].shape[1:] != (3,):
        raise ValueError("columns of different lengths")
    for name in ("ids", "foretold_ids"):
        if arrays[name].size and not 0 <= arrays[name].min() <= arrays[name].max() < header.num_experts:
            raise ValueError(f"{name}: an expert that the model does not have")
    if not np.isfinite(arrays["weights"]).all():
        raise ValueError("a gate weight is not finite")
    layers, is_prefill, num_tokens = (arrays[name] for name in ("layer", "is_prefill", "num_tokens"))
    moe_layers = header.moe_layers
    if len(layers) % len(moe_layers) or layers.tolist() != moe_layers * (len(layers) // len(moe_layers)):
        raise ValueError("a step has not every layer once")
    for name in ("is_prefill", "generation", "num_tokens"):
        by_step = arrays[name].reshape(-1, len(moe_layers))
        if (by_step != by_step[:, :1]).any():
            raise ValueError(f"{name} differs between the layers of a step")
    if num_tokens.size and num_tokens.min() < 1:
        raise ValueError("a step without a token")
    ids = _parts(arrays["ids"], np.where(is_prefill, 1, num_tokens), arrays["num_ids"])
    weights = _parts(arrays["weights"], np.where(is_prefill, 0, num_tokens), np.where(is_prefill, 0, arrays["num_ids"]))
    foretold = _unpack_foretold(header, arrays)
    runs = [
        LayerRun(int(layer), bool(prefill), int(generation), int(tokens), *parts, *map(int, found), *map(float, times))
        for layer, prefill, generation, tokens, parts, found, times in zip(
            layers,
            is_prefill,
            arrays["generation"],
            num_tokens,
            zip(ids, weights, foretold, strict=True),
            arrays["found"],
            zip(arrays["began_s"], arrays["wait_s"], strict=True),
            strict=True,
        )
    ]
    return [runs[i : i + len(moe_layers)] for i in range(0, len(runs), len(moe_layers))]


def _unpack_foretold(header: TraceHeader, arrays: dict[str, np.ndarray]) -> list[dict[int, np.ndarray]]:
    """By run, then by later layer."""
    found: list[dict[int, np.ndarray]] = [{} for _ in arrays["layer"]]
    at, layers, is_prefill = arrays["foretold_run"], arrays["foretold_layer"], arrays["is_prefill"].astype(bool)
    if at.size and not 0 <= at.min() <= at.max() < len(found):
        raise ValueError("something foretold by no run")
    if is_prefill[at].any():
        raise ValueError("something foretold by a prompt")
    rows = _parts(arrays["foretold_ids"], arrays["num_tokens"][at], arrays["foretold_num_ids"])
    for run, later, part in zip(at.tolist(), layers.tolist(), rows, strict=True):
        if later not in header.moe_layers or later <= arrays["layer"][run]:
            raise ValueError("something foretold for no later layer")
        found[run][later] = part
    return found


def _parts(flat: np.ndarray, num_rows: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Cut into arrays of `num_rows` rows and `sizes` elements each."""
    if (sizes < 0).any() or sizes.sum() != flat.size:
        raise ValueError("more or fewer ids or weights than there should be")
    parts = np.split(flat, np.cumsum(sizes)[:-1]) if len(sizes) else []
    wide = np.float32 if flat.dtype == np.float32 else np.int32
    return [part.astype(wide).reshape(rows, -1 if rows else 0) for part, rows in zip(parts, num_rows, strict=True)]
