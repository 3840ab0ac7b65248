"""When launches of a captured graph that may begin early do so, by the edges into them.

Small graphs of launches of one warp, all with the attribute of programmatic dependent launch. Each notes when it began
and ended on the device's clock, in us from the first one's beginning; of four replays the last counts. They are called

    long, short   let dependents begin at once, wait for what they come behind, then run for some microseconds
    looks         notes when it began, then waits: what is asked

Each graph is made with streams of the main one's priority, and with streams that go before it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from bench.cli import store
from provenance import ROOT, provenance

from tritonmoe.offload.branch import forget_launches
from tritonmoe_kernels.dependent_launch import await_inputs, launch_options, release_dependents

OUTPUT = ROOT / "docs/measurements/log/graph-edges.json"
PRIORITIES = (0, -1)
REPLAYS = 4
MOST_LAUNCHES = 16


@triton.jit
def _clock() -> Any:
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _run_kernel(times_ptr, place, microseconds, LOOKS: tl.constexpr, PDL: tl.constexpr):
    began = _clock()
    release_dependents(PDL)
    if not LOOKS:
        await_inputs(PDL)
    start = _clock()
    now = start
    while now - start < microseconds * 1000:
        now = _clock()
    tl.store(times_ptr + 2 * place, began)
    tl.store(times_ptr + 2 * place + 1, now)
    if LOOKS:
        await_inputs(PDL)


def _launch(times: torch.Tensor, place: int, microseconds: int, is_looking: bool) -> None:
    options: dict[str, Any] = {"LOOKS": is_looking, "num_warps": 1, **launch_options(times.device)}
    _run_kernel[(1,)](times, place, microseconds, **options)


@dataclass
class Graph:
    """Launches in the order of their capture, on streams that begin behind the first one."""

    times: torch.Tensor
    priority: int  # of the other streams
    streams: dict[str, torch.cuda.Stream] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def launch(self, name: str, microseconds: int, stream: str = "main") -> torch.cuda.Event:
        """A launch behind the stream's last one; returns when it is done."""
        with torch.cuda.stream(self.stream(stream)):
            place = len(self.names)
            _launch(self.times, place, microseconds, is_looking=name == "looks")
        self.names.append(name)
        event = torch.cuda.Event()
        event.record(self.stream(stream))
        return event

    def stream(self, name: str) -> torch.cuda.Stream:
        if name == "main":
            return torch.cuda.current_stream()
        if name not in self.streams:
            self.streams[name] = torch.cuda.Stream(priority=self.priority)
        return self.streams[name]

    def wait(self, stream: str, *events: torch.cuda.Event) -> None:
        """What the stream launches next comes behind these, too."""
        for event in events:
            self.stream(stream).wait_event(event)


def one_edge(graph: Graph) -> None:
    """Behind one launch of another stream, which three others come behind as well"""
    done = graph.launch("long", 40)
    for stream in ("b", "c", "d"):
        graph.wait(stream, done)
        graph.launch("looks", 1, stream)
    graph.launch("looks", 1)


def two_edges(first_us: int, second_us: int) -> Callable[[Graph], None]:
    def build(graph: Graph) -> None:
        root = graph.launch("root", 2)
        graph.wait("b", root)
        first = graph.launch("first", first_us, "b")
        second = graph.launch("second", second_us)
        graph.launch("other", 5)  # comes behind the second one, too
        graph.wait("c", first, second)
        graph.launch("looks", 1, "c")

    build.__doc__ = f"Behind one of {first_us} us, and a later one of {second_us} us that another is behind, too"
    return build


def implied_edge(is_forgotten: bool) -> Callable[[Graph], None]:
    def build(graph: Graph) -> None:
        root = graph.launch("root", 2)
        graph.wait("b", root)
        graph.wait("main", graph.launch("short", 2, "b"))
        graph.launch("short", 3)
        done = graph.launch("long", 40)
        if is_forgotten:
            forget_launches(graph.stream("b"))
        graph.wait("b", done)
        graph.launch("looks", 1, "b")

    build.__doc__ = "Behind one launch, on a stream whose last launch that one came behind" + (
        ", and which was made to forget it" if is_forgotten else ""
    )
    return build


def joined(graph: Graph) -> None:
    """Where a side stream joins, whose launch was captured before the last one of the main stream"""
    root = graph.launch("root", 2)
    graph.wait("b", root)
    side = graph.launch("side", 10, "b")
    graph.launch("short", 12)
    graph.launch("long", 20)
    graph.wait("main", side)
    graph.launch("looks", 1)


GRAPHS = (one_edge, two_edges(60, 20), two_edges(20, 60), implied_edge(False), implied_edge(True), joined)


def measure(build: Callable[[Graph], None], priority: int, device: torch.device) -> list[dict[str, Any]]:
    """What a graph's launches noted."""
    times = torch.zeros(2 * MOST_LAUNCHES, dtype=torch.int64, device=device)
    found, captured = Graph(times, priority), torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        build(found)
        for stream in found.streams.values():
            torch.cuda.current_stream().wait_stream(stream)
    for _ in range(REPLAYS):
        captured.replay()
        torch.cuda.synchronize(device)
    began = times.tolist()
    return [
        {"name": name, "begin_us": (began[2 * i] - began[0]) / 1e3, "end_us": (began[2 * i + 1] - began[0]) / 1e3}
        for i, name in enumerate(found.names)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        parser.error("launches begin early on NVIDIA GPUs of compute capability 9.0 and above; there is none here")
    device = torch.device("cuda", torch.cuda.current_device())
    for looks in (False, True):  # compiles, which a capture must not
        times = torch.zeros(2, dtype=torch.int64, device=device)
        _launch(times, 0, 1, looks)
    torch.cuda.synchronize(device)
    graphs: list[dict[str, Any]] = [
        {"graph": build.__doc__, "priority": priority, "launches": measure(build, priority, device)}
        for build in GRAPHS
        for priority in PRIORITIES
    ]
    store(options.output, {"provenance": provenance(), "graphs": graphs})
    for graph in graphs:
        print(f"{graph['graph']}; streams of priority {graph['priority']}")
        for launch in graph["launches"]:
            print(f"    {launch['name']:8}{launch['begin_us']:6.1f} to {launch['end_us']:5.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
