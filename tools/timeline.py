"""Three layers of a decode step as they ran on the GPU: what was computed, planned and fetched, and when.

Takes the options of bench_routing.py for one case. Times are the device's, of kernels in the last of a few profiled
replays of the captured step. Tracing gives every kernel a start and an end of its own, which slows the short ones. What
became of each fetched record comes from the planner's lists of that step:

    demand     asked for, and not there
    used       foretold, and there when it was asked for
    late       foretold, asked for, and still under way
    wasted     foretold, and not asked for
    cancelled  likewise, and dropped before all of it had come

Writes the events; `tools/render_figures.py` draws them.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench.cli import positive, stored_forms
from bench.cli import store as write
from bench.random_weights import random_storage
from bench.table_replay import FORM, Case, Model, TableReplay
from bench.trace import device_events
from bench_offload import random_store
from bench_routing import add_options
from provenance import ROOT, provenance
from torch.profiler import ProfilerActivity, profile

from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.errors import InputError, TritonMoeError
from tritonmoe.model.operations import operations

LAYERS = 3  # as the picture shows
PROFILED_STEPS = 4
LAYER_BEGINS = "_norm_router_kernel"
FETCHES = "_fetch_kernel"
PLANS = ("_plan_demand_kernel", "_plan_prefetch_kernel", "_speculate_kernel", "_count_recall_kernel")


class Launch(NamedTuple):
    """A fetch of a step: what it copied, as (expert, outcome) in the order of its list."""

    layer: int
    records: list[tuple[int, str]]


def fetch_order(moe_layers: Sequence[int], lookahead: int) -> list[tuple[str, int]]:
    """(demand or prefetch, layer) of a step's launches: a layer's demand, then what it foretold (nothing at 0)."""
    found = []
    for i, layer in enumerate(moe_layers):
        found.append(("demand", layer))
        found += [("prefetch", later) for later in moe_layers[i + 1 : i + 1 + lookahead]]
    return found


def read_launches(replay: TableReplay, moe_layers: Sequence[int]) -> list[Launch]:
    """The fetches of the step that ran last."""
    device = replay.experts._device
    assert device is not None, "the host planned the step"
    state, num_experts = device.state, device.state.slot_of.shape[1]
    programs = inspect.signature(operations(replay.device).fetch).parameters["programs"].default
    policy = replay.policy
    if policy.lookahead > 1:
        raise NotImplementedError("a layer that is foretold at several distances has several lists")
    found = []
    for kind, layer in fetch_order(moe_layers, 0 if policy.predictor == "none" else 1):
        count = int(getattr(state, f"num_{kind}")[layer])
        keys, slots, arrivals = (
            getattr(state, f"{kind}_{name}")[layer, :count].tolist() for name in ("key", "slot", "arrivals")
        )
        experts = [key % num_experts for key in keys]
        hits, misses = (ids.flatten().tolist() for ids in device._slot_ids[layer])
        routed = replay.routed_ids(layer)
        outcomes = [
            "demand" if kind == "demand" else outcome(expert in routed, slot in hits, slot in misses, arrived, programs)
            for expert, slot, arrived in zip(experts, slots, arrivals, strict=True)
        ]
        found.append(Launch(layer, list(zip(experts, outcomes, strict=True))))
    return found


def outcome(is_routed: bool, is_hit: bool, is_missed: bool, arrived: int, programs: int) -> str:
    """What became of a foretold record."""
    if is_routed and (is_hit or is_missed):
        return "used" if is_hit else "late"
    return "wasted" if arrived == programs else "cancelled"


def step_events(events: Sequence[dict[str, Any]], launches: Sequence[Launch], moe_layers: Sequence[int]) -> list[Any]:
    """The last step of a trace, in us from its first layer's routing on. Raises ValueError for another trace."""
    begins = [event["ts"] for event in events if LAYER_BEGINS in event["name"]][-len(moe_layers) :]
    fetches = [event for event in events if FETCHES in event["name"]][-len(launches) :]
    if len(begins) < len(moe_layers) or len(fetches) < len(launches):
        raise ValueError("the trace does not hold a whole step that the device planned")
    launch_of = {id(event): launch for event, launch in zip(fetches, launches, strict=True)}
    found = []
    for event in events:
        launch = launch_of.get(id(event))
        reached = sum(begin <= event["ts"] for begin in begins)
        if launch is None and (reached == 0 or FETCHES in event["name"]):
            continue  # before the first layer's routing, or of another step
        lane = "fetch" if launch else "plan" if any(name in event["name"] for name in PLANS) else "compute"
        found.append(
            {
                "lane": lane,
                "kernel": event["name"][:80],
                "layer": launch.layer if launch else moe_layers[reached - 1],
                "start_us": event["ts"] - begins[0],
                "duration_us": float(event["dur"]),
                "records": [{"expert": e, "outcome": what} for e, what in launch.records] if launch else [],
            }
        )
    return found


def choose_layers(launches: Sequence[Launch], moe_layers: Sequence[int], count: int = LAYERS) -> list[int]:
    """`count` consecutive layers in which most kinds of outcomes are to be seen, and then most records."""

    def worth(first: int) -> tuple[int, int]:
        shown = set(moe_layers[first : first + count])
        outcomes = [what for launch in launches if launch.layer in shown for _, what in launch.records]
        return len(set(outcomes)), len(outcomes)

    first = max(range(max(1, len(moe_layers) - count)), key=worth)  # the first of equals; the last layer is followed
    return list(moe_layers[first : first + count])  # by the head, which belongs to none


def cut(events: Sequence[dict[str, Any]], layers: Sequence[int]) -> tuple[list[dict[str, Any]], list[float]]:
    """The events in the time of these layers, which begin with their routing, and where each begins and the last ends;
    in us from the first one's beginning on."""
    begins = {e["layer"]: e["start_us"] for e in events if LAYER_BEGINS in e["kernel"]}
    after = [start for layer, start in begins.items() if layer > layers[-1]]
    end = min(after) if after else max(e["start_us"] + e["duration_us"] for e in events)
    origin = begins[layers[0]]
    within = [e for e in events if e["start_us"] < end and e["start_us"] + e["duration_us"] > origin]
    shifted = [{**e, "start_us": e["start_us"] - origin} for e in within]
    return shifted, [*(begins[layer] - origin for layer in layers), end - origin]


def trace_step(replay: TableReplay) -> list[dict[str, Any]]:
    """What ran on the device in a few steps, of which the first pay for the profiler's beginning."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            replay.launch()
            replay.tokens()
        torch.cuda.synchronize(replay.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        return device_events(path)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="timeline.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--case", default="exact:90", help=f"{FORM} (default: exact:90)")
    parser.add_argument("--first-layer", type=int, metavar="L", help="default: where most is to be seen")
    parser.add_argument("--layers", type=positive, default=LAYERS, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, help="default: docs/measurements/timeline-MODEL.json")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    output = options.output or ROOT / f"docs/measurements/timeline-{options.config.stem}.json"
    if device.type != "cuda":
        parser.error("there is no GPU here, and so no timestamps of one")
    try:
        case = Case.parse(options.case)
        if case.policy.lookahead > 1:
            raise InputError("--case: launches of one layer ahead are told apart, not those of more")
        spec = parse_config(read_json(options.config), options.config.name)
        if (options.first_layer or 0) > list(spec.moe_layers)[-1]:
            raise InputError(f"--first-layer {options.first_layer}: the last layer is {list(spec.moe_layers)[-1]}")
        num_slots = case.num_slots(spec, options.slots)
        output.parent.mkdir(parents=True, exist_ok=True)  # so that the stored command names the file alone
        source = provenance()
        dtype = getattr(torch, options.dtype)
        storage = random_storage(options.expert_dtype, options.dense_dtype, spec, dtype)
        store, weights = random_store(spec, dtype, device, storage)
        model = Model(spec, weights, store)
        routing = case.routing(model.shape, num_slots, options.steps, options.recall, options.falloff)
        steps = len(routing.routed)
        replay = TableReplay(model, case.policy, num_slots, case.record_bytes, options.context, steps)
        replay.load(routing)
        replay.restart()
    except TritonMoeError as error:
        parser.error(str(error))
    for _ in range(steps - PROFILED_STEPS):
        replay.launch()
        replay.tokens()
    events = trace_step(replay)
    moe_layers = list(spec.moe_layers)
    launches = read_launches(replay, moe_layers)
    first = options.first_layer
    layers = choose_layers(launches, moe_layers, options.layers)
    if first is not None:
        layers = [layer for layer in moe_layers if layer >= first][: options.layers]
    shown, begins = cut(step_events(events, launches, moe_layers), layers)
    result = {
        "provenance": source,
        "model": options.config.stem,
        "dtype": options.dtype,
        **stored_forms(storage, dtype),
        "case": case.text,
        "policy": str(case.policy),
        "hit_rate_without_prediction": routing.hit_rate,
        "layers": layers,
        "begins_us": begins,
        "events": shown,
    }
    write(output, result)
    print(f"layers {layers[0]} to {layers[-1]}: {begins[-1]:.0f} us, {len(shown)} launches")
    replay.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
