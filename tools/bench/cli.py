"""Options, the rows of the table, and what is stored of them."""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from bench.baseline import SharedModel, Theirs
from bench.floor import kv_bytes_per_step, memory_rate, weight_bytes_per_step
from bench.measure import Pass, host_peak_bytes, run_steps, summarise, time_prefill, time_steps
from bench.ours import Ours
from bench.random_weights import random_storage, random_weights
from bench.routing import probe
from bench.trace import profile_steps
from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.checkpoint.hub import resolve_model
from tritonmoe.checkpoint.loading import load_weights, published_storage
from tritonmoe.engine import EMBEDDED, embedded_folder, resolve_device, resolve_dtype
from tritonmoe.errors import InputError, TritonMoeError
from tritonmoe.model.decoder import Decoder
from tritonmoe.model.weights import Storage, weight_bytes
from tritonmoe.placement.storage import PUBLISHED, name_of, resolve_storage

DESCRIPTION = """\
Time prefill and decoding: TTFT, TPOT, tokens/s, memory, and the share of the floor that the bytes of weights and KV
imply at the memory rate measured in the same run. Writes one JSON and prints a table.

TTFT is the time until every row of the batch has its first token; rows are prefilled one after another. The prompts
are random token ids. With --baseline, passes over the same steps run in the order ours, theirs, theirs, ours."""
PRINTED_KERNELS = 12
SEED = 0


@dataclass
class Bench:
    """What all rows share."""

    options: argparse.Namespace
    decoder: Decoder
    shared: SharedModel | None
    memory_bps: float  # bytes per second
    began: float  # on the clock of time.perf_counter, before anything was loaded

    @property
    def device(self) -> torch.device:
        return self.decoder.device


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        bench, config_name = prepare(options)
    except TritonMoeError as error:
        parser.error(str(error))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.touch()  # so that the stored command names it without its folder
    source = provenance()  # now: the files may have changed by the time the last row is done
    spec = bench.decoder.spec
    result: dict[str, Any] = {
        "provenance": source,
        "settings": {
            "model": config_name,
            "model_type": spec.model_type,
            "weights": "random" if options.random_weights else "checkpoint",
            "dtype": str(bench.decoder.dtype).removeprefix("torch."),
            **stored_forms(bench.decoder.weights.storage, bench.decoder.dtype),
            "device": str(bench.device),
            "batch": options.batch,
            "context": options.context,
            "new_tokens": options.new_tokens,
            "baseline": options.baseline,
            "seed": SEED,
        },
        "weight_bytes": weight_bytes(spec, bench.decoder.dtype, storage=bench.decoder.weights.storage),
        "memory_gbps": bench.memory_bps / 1e9,
        "baseline": None
        if bench.shared is None
        else {"attention": bench.shared.attention, "copied_bytes": bench.shared.copied_bytes},
        "rows": [],
    }
    for context in options.context:
        for batch in options.batch:
            result["rows"].append(measure_or_skip(bench, batch, context))
            store(options.output, result)  # after each row, so that an interrupt costs only the one in progress
    release(bench.device)
    result["memory_gbps_after"] = memory_rate(bench.device) / 1e9
    store(options.output, result)
    print(table(result["rows"]))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="a folder, a hub id, or 'nano', the embedded model")
    which.add_argument(
        "--random-weights", type=Path, metavar="CONFIG", help="a config.json, or a folder with one; no weights needed"
    )
    parser.add_argument("--batch", type=positive_list, default=[1, 2, 4, 8], help="1,2,… (default: 1,2,4,8)")
    parser.add_argument(
        "--context",
        type=positive_list,
        default=[128, 1024, 4096, 16384, 65536],
        help="prompt lengths (default: 128,1024,4096,16384,65536)",
    )
    parser.add_argument("--new-tokens", type=positive, default=64, help="decode steps (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add_storage_options(parser)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--baseline", choices=["transformers"], help="time this too, on the same weights")
    parser.add_argument("--profile", action="store_true", help="write a Chrome trace of a few decode steps of each row")
    parser.add_argument("--time-limit", type=positive, metavar="S", help="begin no row after this many seconds")
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    return parser


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Those of the engine; of random weights nothing is published, so that they are in --dtype by default."""
    parser.add_argument("--expert-dtype", default=PUBLISHED, metavar="FORM", help="fp8, int8, mxfp4 or int4")
    parser.add_argument("--dense-dtype", default=PUBLISHED, metavar="FORM", help="fp8 or int8")


def stored_forms(storage: Storage, dtype: torch.dtype) -> dict[str, str]:
    """The forms in which weights are kept, for the JSON."""
    dense = str(dtype).removeprefix("torch.") if storage.dense is None else storage.dense.name
    return {"expert_dtype": name_of(storage, dtype), "dense_dtype": dense}


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def positive_list(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def prepare(options: argparse.Namespace) -> tuple[Bench, str]:
    """The loaded or invented model, and its name without folders of this machine."""
    began = time.perf_counter()
    if options.random_weights is not None:
        path = options.random_weights
        path = path / "config.json" if path.is_dir() else path
        name = path.parent.name if path.name == "config.json" else path.stem
    else:
        path = embedded_folder() if options.model == EMBEDDED else resolve_model(options.model)
        path = path / "config.json"
        name = Path(options.model).name if Path(options.model).exists() else options.model
    config = read_json(path)
    spec = parse_config(config, str(path))
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device, spec)
    if options.random_weights is not None:
        storage = random_storage(options.expert_dtype, options.dense_dtype, spec, dtype)
        weights = random_weights(spec, device, dtype, SEED, storage)
    else:
        published = published_storage(path.parent, spec)
        storage = resolve_storage(options.expert_dtype, options.dense_dtype, spec, dtype, published)[0]
        weights = load_weights(path.parent, spec, device, dtype, storage=storage)
    decoder = Decoder(spec, weights)
    shared = SharedModel(config, decoder) if options.baseline else None
    return Bench(options, decoder, shared, memory_rate(device), began), name


def measure_or_skip(bench: Bench, batch: int, context: int) -> dict[str, Any]:
    """One row, or the reason why there is none."""
    options, spec = bench.options, bench.decoder.spec
    row: dict[str, Any] = {"batch": batch, "context": context, "status": "skipped"}
    if context + options.new_tokens > spec.max_position:
        reason = f"{context} + {options.new_tokens} tokens exceed the model's context of {spec.max_position}"
        return {**row, "reason": reason}
    if options.time_limit is not None and time.perf_counter() - bench.began > options.time_limit:
        return {**row, "reason": f"not begun within --time-limit {options.time_limit}"}
    print(f"batch {batch}, context {context} …", flush=True)
    release(bench.device)  # what the last row, or the error that ended it, still held
    try:
        return {**row, "status": "measured", **measure(bench, batch, context)}
    except (InputError, torch.OutOfMemoryError) as error:
        return {**row, "reason": first_line(error)}


def measure(bench: Bench, batch: int, context: int) -> dict[str, Any]:
    """The figures of one row; with a baseline, both sides' passes in the order ours, theirs, theirs, ours."""
    steps, spec, dtype = bench.options.new_tokens, bench.decoder.spec, bench.decoder.dtype
    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(spec.vocab_size, (batch, context), generator=generator).to(bench.device)
    held = start_peak(bench.device)
    ours = Ours(bench.decoder, prompts, steps)
    runs, logits = time_prefill(ours)
    run_steps(ours, steps if bench.device.type == "cuda" else 1)
    passes = [time_steps(ours, steps)]
    storage = bench.decoder.weights.storage
    peak = end_peak(bench.device, held, weight_bytes(spec, dtype, storage=storage))
    baseline = measure_baseline(bench, prompts, logits, passes[0])
    passes.append(time_steps(ours, steps))
    figures = {**summarise(runs, passes, batch), "gpu_peak_bytes": peak}
    experts = probe(bench.decoder, ours, passes[0].tokens)
    weights = weight_bytes_per_step(spec, dtype, batch, [layer["per_step"] for layer in experts], storage)
    cached = kv_bytes_per_step(spec, dtype, batch, context + (steps + 1) / 2)
    floor_ms = 1e3 * (weights + cached) / bench.memory_bps
    row = {
        "ours": figures,
        "host_peak_bytes": host_peak_bytes(),
        "weight_bytes_per_step": weights,
        "kv_bytes_per_step": cached,
        "bytes_per_token": round((weights + cached) / batch),
        "floor_ms": floor_ms,
        "share_of_floor": floor_ms / figures["tpot_ms"]["median"],
        "distinct_experts": experts,
        "baseline": baseline,
    }
    if baseline is not None and baseline["status"] == "measured":
        row["speedup"] = baseline["tpot_ms"]["median"] / figures["tpot_ms"]["median"]
    if bench.options.profile:
        row["profile"] = profile(bench, ours, batch, context)
    return row


def measure_baseline(bench: Bench, prompts: torch.Tensor, logits: torch.Tensor, first: Pass) -> dict[str, Any] | None:
    """transformers' figures for the row, and how far its results are from ours; why not, if it cannot run."""
    if bench.shared is None:
        return None
    batch, steps = prompts.shape[0], bench.options.new_tokens
    held = start_peak(bench.device)
    try:
        theirs = Theirs(bench.shared, prompts, steps)
        runs, their_logits = time_prefill(theirs)
        theirs.prepare_decoding()
        run_steps(theirs, steps if bench.device.type == "cuda" else 1)
        passes = [time_steps(theirs, steps) for _ in range(2)]
    except (InputError, RuntimeError) as error:  # a failed capture or allocation costs this side only
        return {"status": "skipped", "reason": first_line(error)}
    same = [a == b for a, b in zip(first.tokens, passes[0].tokens, strict=True)]
    return {
        "status": "measured",
        **summarise(runs, passes, batch),
        "gpu_peak_bytes": end_peak(bench.device, held, bench.shared.num_bytes),
        "experts": theirs.experts,
        "experts_trials": theirs.trials,
        "cuda_graph": bench.device.type == "cuda",
        "agreement": {
            "prefill_logits_max_difference": (logits - their_logits).abs().max().item(),
            "prefill_logits_rms_difference": (logits - their_logits).square().mean().sqrt().item(),
            "prefill_logits_rms": logits.square().mean().sqrt().item(),
            "prefill_same_argmax": int((logits.argmax(-1) == their_logits.argmax(-1)).sum()),
            "leading_steps_with_same_tokens": (*same, False).index(False),
        },
    }


def profile(bench: Bench, ours: Ours, batch: int, context: int) -> dict[str, Any]:
    """The trace next to the output, its kernels printed."""
    output = bench.options.output
    path = output.with_name(f"{output.stem}-b{batch}-c{context}.trace.json.gz")
    kernels = profile_steps(ours, path, bench.options.new_tokens)
    for kernel in kernels[:PRINTED_KERNELS]:
        print(f"{kernel['total_us']:12.1f} us {100 * kernel['share']:5.1f} % {kernel['calls']:6} {kernel['name'][:80]}")
    return {"trace": path.name, "kernels": kernels}


def start_peak(device: torch.device) -> int:
    """Bytes held on the GPU now, from where on the peak is counted."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def end_peak(device: torch.device, held: int, weights: int) -> int | None:
    """The peak on the GPU of a side that has `weights` bytes of weights, without what the other side holds."""
    return torch.cuda.max_memory_allocated(device) - held + weights if device.type == "cuda" else None


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def store(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text: times in ms, TPOT as median (p10 to p90), the share of the floor in percent."""
    lines = ["batch context |  TTFT ms | TPOT ms (p10 to p90)     | tokens/s  | floor ms share | baseline TPOT ratio"]
    for row in rows:
        head = f"{row['batch']:5} {row['context']:7} |"
        if row["status"] == "skipped":
            lines.append(f"{head} skipped: {row['reason']}")
            continue
        ours, tpot = row["ours"], row["ours"]["tpot_ms"]
        line = (
            f"{head} {ours['ttft_ms']:8.1f} | {tpot['median']:8.2f} ({tpot['p10']:.2f} to {tpot['p90']:.2f})".ljust(52)
            + f"| {ours['tokens_per_s']:9.1f} | {row['floor_ms']:8.2f} {100 * row['share_of_floor']:4.0f}% |"
        )
        baseline = row["baseline"]
        if baseline is not None and baseline["status"] == "skipped":
            line += f" skipped: {baseline['reason']}"
        elif baseline is not None:
            line += f" {baseline['tpot_ms']['median']:13.2f} {row['speedup']:5.2f}x"
        lines.append(line)
    return "\n".join(lines)
