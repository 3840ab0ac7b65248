"""Time `fetch` in CUDA graphs, by programs and tiles, beside the copy engine's rate over the same host memory.

A figure is the median over replays of (graph time / launches). Each launch of a graph reads other records of the host
and writes other slots than the few before it. The bytes moved are counted, and those of the default tiles' last list
are looked at.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from provenance import ROOT, provenance

from tritonmoe.memory import empty_tensor
from tritonmoe.model.pinned_memory import register, unregister
from tritonmoe_kernels.fetch import fetch

OUTPUT = ROOT / "docs/measurements/fetch.json"
RECORD_BYTES = (9_437_184, 2_506_752)  # an expert of 2048 x 768 in bfloat16; about what it takes with 4 bits
RECORDS = (1, 2, 4, 8)
PROGRAMS = (4, 8, 16, 32)
TILES = tuple(itertools.product((2048, 4096, 8192), (4, 8)))  # words of a chunk, warps
LOOKS = (1, 2, 4, 8, 16)
HOST_BYTES = 64 * RECORD_BYTES[0]  # more than a CPU's cache holds
SLOT_BYTES = 16 * RECORD_BYTES[0]  # more than a GPU's cache holds
GRAPH_BYTES = 100_000_000
REPLAYS = 3


@dataclass(frozen=True)
class Setting:
    """One launch: a list of `records`, and how it is shared out."""

    record_bytes: int
    records: int = max(RECORDS)
    is_speculative: bool = False
    programs: int = 16
    chunk_words: int = 4096
    num_warps: int = 4
    chunks_per_look: int = 2

    @property
    def num_bytes(self) -> int:
        return self.records * self.record_bytes


class Bench:
    """Host memory that a kernel can read, and slots."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._registered: list[torch.Tensor] = []
        self.host = empty_tensor((HOST_BYTES,), torch.uint8, torch.device("cpu"))
        torch.arange(HOST_BYTES // 4, dtype=torch.int32, out=self.host.view(torch.int32))
        problem = register(self.host, self._registered)
        if problem:
            raise SystemExit(f"this machine cannot map host memory for its GPU: {problem}")
        self.slots = torch.empty(SLOT_BYTES, dtype=torch.uint8, device=device)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        unregister(self._registered)

    def _views(self, record_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Records of the host and slots, [number, record_bytes] each."""
        host, slots = (part[: part.numel() // record_bytes * record_bytes] for part in (self.host, self.slots))
        return host.view(-1, record_bytes), slots.view(-1, record_bytes)

    def time(self, setting: Setting, launches: int | None = None) -> float:
        """Seconds per launch."""
        wanted = max(4, round(GRAPH_BYTES / setting.num_bytes)) if setting.records else 200
        launches = wanted if launches is None else launches
        host, buffer = self._views(setting.record_bytes)
        shape = (launches, max(RECORDS))
        order = torch.arange(launches * shape[1], dtype=torch.int32, device=self.device).view(shape)
        # 7 divides neither number of records: lists do not walk through memory as one long copy would.
        keys, slots = 7 * order % len(host), order % len(buffer)
        epochs = torch.ones(shape, dtype=torch.int64, device=self.device)
        counts = torch.full((launches, 1), setting.records, dtype=torch.int32, device=self.device)
        arrivals = torch.zeros(shape, dtype=torch.int32, device=self.device)
        base = torch.tensor([host.data_ptr()], device=self.device)
        copy_epoch = torch.ones(len(buffer), dtype=torch.int64, device=self.device)
        landed, moved = torch.zeros_like(copy_epoch), torch.zeros(1, dtype=torch.int64, device=self.device)

        def launch(i: int) -> None:
            fetch(
                keys[i], slots[i], epochs[i], counts[i], arrivals[i], base, len(host), setting.record_bytes,
                buffer, copy_epoch, landed, moved, setting.is_speculative, setting.programs, setting.chunk_words,
                setting.chunks_per_look, setting.num_warps,
            )  # fmt: skip

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch(0)  # compiled before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            arrivals.zero_()
            for i in range(launches):
                launch(i)
        self._replay(graph)
        seconds = sorted(self._replay(graph) for _ in range(REPLAYS))[REPLAYS // 2]
        last = launches - 1
        expected = host[keys[last, : setting.records].cpu().long()]
        if setting == Setting(setting.record_bytes, is_speculative=setting.is_speculative) and not torch.equal(
            buffer[slots[last, : setting.records].long()].cpu(), expected
        ):
            raise SystemExit("fetch copied something wrong: see tests/test_kernel_fetch.py")
        if int(moved) != ((REPLAYS + 1) * launches + 1) * setting.num_bytes:
            raise SystemExit(f"fetch moved {int(moved)} bytes, not what it was told to")
        return seconds / launches

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def copy_engine_rate(self, record_bytes: int) -> float:
        """Bytes per second of copies of whole records, one after the other."""
        host, buffer = self._views(record_bytes)
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for i in range(32):
                buffer[i % len(buffer)].copy_(host[7 * i % len(host)], non_blocking=True)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return 32 * record_bytes / min(times)


def measure(bench: Bench) -> list[dict[str, object]]:
    """A row for each setting."""
    settings = [
        Setting(size, records, is_speculative, programs, chunk, warps)
        for size in RECORD_BYTES
        for is_speculative in (False, True)
        for (chunk, warps), programs, records in itertools.product(TILES, PROGRAMS, RECORDS)
    ]
    settings += [Setting(size, is_speculative=True, chunks_per_look=look) for size in RECORD_BYTES for look in LOOKS]
    settings += [Setting(size, records=0, programs=programs) for size in RECORD_BYTES[:1] for programs in PROGRAMS]
    rows = []
    for setting in dict.fromkeys(settings):
        seconds = bench.time(setting)
        rows.append({**asdict(setting), "us": 1e6 * seconds, "gbps": setting.num_bytes / seconds / 1e9})
    return rows


def report(rows: list[dict[str, object]], rates: dict[int, float]) -> None:
    """Print the rates of long lists by programs and tiles, and the times of all lists with the default ones."""
    found = {Setting(**{key: row[key] for key in Setting.__dataclass_fields__}): row for row in rows}  # type: ignore[arg-type]

    def figure(setting: Setting, name: str) -> float:
        return float(str(found[setting][name]))

    for size in RECORD_BYTES:
        base = Setting(size)
        print(f"\nrecords of {size / 1e6:.3f} MB; copy engine {rates[size] / 1e9:.1f} GB/s")
        print(f"GB/s of {base.records} records, demand / speculative, by chunk (words) x warps")
        print("programs " + "".join(f"{f'{chunk} x {warps}':>13}" for chunk, warps in TILES))
        for programs in PROGRAMS:
            cells = []
            for chunk, warps in TILES:
                demand = replace(base, programs=programs, chunk_words=chunk, num_warps=warps)
                pair = (figure(replace(demand, is_speculative=kind), "gbps") for kind in (False, True))
                cells.append("/".join(f"{rate:.1f}" for rate in pair))
            print(f"{programs:>8} " + "".join(f"{cell:>13}" for cell in cells))
        print("records, us a launch, demand / speculative:")
        for records in RECORDS:
            pair = [figure(replace(base, records=records, is_speculative=kind), "us") for kind in (False, True)]
            print(f"{records:>8} {pair[0]:9.1f} / {pair[1]:.1f}")
        looks = (replace(base, is_speculative=True, chunks_per_look=look) for look in LOOKS)
        print("chunks per look, GB/s: " + ", ".join(f"{s.chunks_per_look}: {figure(s, 'gbps'):.1f}" for s in looks))
    empty = (Setting(RECORD_BYTES[0], records=0, programs=programs) for programs in PROGRAMS)
    print("\nan empty list, us by programs: " + ", ".join(f"{s.programs}: {figure(s, 'us'):.2f}" for s in empty))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU: there is nothing to measure")
    bench = Bench(torch.device("cuda"))
    rates = {size: bench.copy_engine_rate(size) for size in RECORD_BYTES}
    rows = measure(bench)
    bench.close()
    report(rows, rates)
    copies = [{"record_bytes": size, "gbps": rate / 1e9} for size, rate in rates.items()]
    result = {"provenance": provenance(), "copy_engine": copies, "rows": rows}
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
