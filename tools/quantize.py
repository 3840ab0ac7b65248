"""Write a model with its experts in fewer bits, as a checkpoint that loads directly, here and elsewhere.

    python tools/quantize.py MODEL --format int4 --out FOLDER

Experts become codes and scales in a layout that others read too, everything else is copied as it is:

    int4, int8   compressed-tensors "pack-quantized"
    mxfp4        compressed-tensors "mxfp4-pack-quantized"; GPT-OSS models as GPT-OSS is published
    fp8          "fp8" in blocks of 128 by 128, or smaller ones that fit, as Qwen and DeepSeek publish

Matrices are read, quantised and written one by one by several threads. FOLDER appears when it is complete, not before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import gcd, prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from command_line import Parser, run_command
from tqdm import tqdm

from tritonmoe.checkpoint.architectures import load_spec
from tritonmoe.checkpoint.hub import resolve_model
from tritonmoe.checkpoint.loading import open_source
from tritonmoe.checkpoint.published_formats import LEAST_GROUP, PublishedFormat
from tritonmoe.checkpoint.quantization import EXPERT_FORMATS, quantize
from tritonmoe.checkpoint.targets import Order, Target
from tritonmoe.checkpoint.tensor_files import DTYPES, INDEX_NAME, TensorEntry, TensorReader
from tritonmoe.engine import EMBEDDED, embedded_folder
from tritonmoe.errors import InputError
from tritonmoe.model.matrices import empty_matrix
from tritonmoe.model.spec import ModelSpec
from tritonmoe.prediction.files import DEFAULT_VECTORS
from tritonmoe_kernels.quantized import QuantizedMatrix, WeightFormat

SHARD_BYTES = 5 << 30
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
OTHER_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".onnx", ".index.json")


class Output(NamedTuple):
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Format:
    """In what the experts are written: our format, the layout on disk, and what config.json says about it."""

    form: WeightFormat
    published: PublishedFormat | None  # None: GPT-OSS's blocks

    def config(self, left_out: list[str]) -> dict[str, Any]:
        """`left_out` are the linear layers that are not quantised."""
        form = self.form
        if self.published is None:
            return {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
        if form.name == "fp8":
            block = [form.group_rows, form.group]
            kind = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
            return {**kind, "modules_to_not_convert": left_out}
        kind = "float" if form.name == "mxfp4" else "int"
        weights = {"num_bits": form.bits, "type": kind, "symmetric": True, "dynamic": False}
        group = {
            "targets": ["Linear"],
            "weights": {**weights, "strategy": "group", "group_size": form.group},
            "input_activations": None,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized" if form.name == "mxfp4" else "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": left_out,
        }


def format_for(spec: ModelSpec, name: str) -> Format:
    """The format called `name` for the sizes of this model; InputError where others could not read it."""
    form = EXPERT_FORMATS[name]
    if spec.model_type == "gpt_oss":
        if name != "mxfp4":
            raise InputError(f"--format {name}: GPT-OSS is written as it is published; use --format mxfp4")
        return Format(form, None)
    sizes = sorted({spec.hidden_size, *(moe.intermediate_size for moe in spec.moe_layers.values())})
    common = gcd(*sizes)
    group = min(form.group, common & -common)  # others read whole groups and blocks only
    if group < LEAST_GROUP[form.bits]:
        raise InputError(f"--format {name}: experts of {', '.join(map(str, sizes))} columns do not divide into groups")
    form = replace(form, group=group, group_rows=min(form.group_rows, group))
    if name == "fp8":
        return Format(form, PublishedFormat("scaled", name, group, group, scale_name="weight_scale_inv"))
    return Format(form, PublishedFormat("bytes" if name == "mxfp4" else "words", name, group))


class Job(NamedTuple):
    """A tensor of the source: quantised into the matrices called by `stems`, or copied where there are none."""

    entry: TensorEntry
    target: Target | None
    stems: tuple[tuple[str, ...], ...]  # by expert; gate and up of a fused tensor are two
    outputs: list[Output]


def jobs(folder: Path, spec: ModelSpec, wanted: Format) -> Iterator[Job]:
    """Everything to be done, in the order of the files."""
    source = open_source(folder, spec)
    names = sorted(source.entries, key=lambda name: (source.entries[name].file, source.entries[name].offset))
    for name in names:
        entry, target = source.entries[name], source.targets.get(name)
        if target is None or ".mlp.experts." not in name or name.endswith("bias"):
            yield Job(entry, None, (), [Output(entry.name, entry.shape, entry.dtype)])
        elif wanted.published is None:
            count, (rows, columns) = target.shape[0], target.memory.shape[-2:]
            groups = (count, rows, columns // wanted.form.group)
            outputs = [
                Output(f"{entry.name}_blocks", (*groups, 16), torch.uint8),
                Output(f"{entry.name}_scales", groups, torch.uint8),
            ]
            yield Job(entry, target, (), outputs)
        else:
            stems = _stems(name, entry, target)
            rows, columns = target.memory.shape[-2] // len(stems[0]), target.memory.shape[-1]
            tensors = _tensors(wanted, rows, columns)
            outputs = [
                Output(stem + word, shape, dtype)
                for stem in (stem for expert in stems for stem in expert)
                for word, (shape, dtype) in tensors.items()
            ]
            yield Job(entry, target, stems, outputs)


def _stems(name: str, entry: TensorEntry, target: Target) -> tuple[tuple[str, ...], ...]:
    """The names of the matrices in a tensor, without their last word: as in the source, or the usual ones of each
    expert where the source has all in one tensor."""
    if len(target.shape) == 2:
        return ((entry.name.removesuffix("weight"),),)
    prefix = entry.name[: entry.name.index("layers.")]
    layer, _, kind = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return tuple(tuple(f"{prefix}{layer}.{e}.{part}." for part in parts) for e in range(target.shape[0]))


def _tensors(wanted: Format, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what a matrix becomes, by the last word of their names."""
    assert wanted.published is not None
    matrix = empty_matrix((rows, columns), torch.float32, torch.device("meta"), wanted.form)
    assert isinstance(matrix, QuantizedMatrix)
    return {word: (tuple(t.shape), t.dtype) for word, t in wanted.published.encode(matrix).items()}


class Writer:
    """Safetensors files of known contents, which any thread may fill at any place."""

    def __init__(self, folder: Path, outputs: list[Output], metadata: dict[str, str]) -> None:
        self._places: dict[str, tuple[int, int]] = {}  # file descriptor and offset
        self._descriptors: list[int] = []
        shards = list(_shards(outputs))
        weight_map = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            weight_map.update({output.name: name for output in shard})
            self._open(folder / name, shard, metadata)
        index = {"metadata": {**metadata, "total_size": sum(o.num_bytes for o in outputs)}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")

    def _open(self, path: Path, shard: list[Output], metadata: dict[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        for output in shard:
            offsets = [end, end + output.num_bytes]
            header[output.name] = {"dtype": DTYPE_NAMES[output.dtype], "shape": output.shape, "data_offsets": offsets}
            end += output.num_bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # data begin at a multiple of 8
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._descriptors.append(descriptor)
        os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)
        os.posix_fallocate(descriptor, 0, 8 + len(text) + end)  # a full disk is found out now
        for output in shard:
            self._places[output.name] = descriptor, 8 + len(text) + header[output.name]["data_offsets"][0]

    def write(self, name: str, tensor: torch.Tensor, offset: int = 0) -> None:
        """Put the bytes of `tensor` at byte `offset` of the tensor called `name`."""
        view = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        descriptor, start = self._places[name]
        while view:
            done = os.pwrite(descriptor, view, start + offset)
            view, offset = view[done:], offset + done

    def close(self) -> None:
        """Everything is on the disk afterwards."""
        for descriptor in self._descriptors:
            os.fsync(descriptor)
            os.close(descriptor)
        self._descriptors.clear()


def _shards(outputs: list[Output]) -> Iterator[list[Output]]:
    shard: list[Output] = []
    size = 0
    for output in outputs:
        if shard and size + output.num_bytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(output)
        size += output.num_bytes
    yield shard


def run(job: Job, wanted: Format, reader: TensorReader, writer: Writer) -> None:
    """Read, quantise and write what one tensor of the source becomes."""
    entry, target = job.entry, job.target
    if target is None:
        values = torch.empty(entry.shape, dtype=entry.dtype)
        reader.read(entry, values)
        writer.write(entry.name, values)
        return
    is_fused = len(target.shape) == 3
    # Rows stay interleaved where GPT-OSS's own layout has them so.
    order = target.order if wanted.published is not None else Order(target.order.is_transposed)
    for e in range(target.shape[0] if is_fused else 1):
        values = reader.rows(entry, e, 1)[0] if is_fused else reader.rows(entry, 0, entry.shape[0])
        try:
            _write_expert(job, wanted, order.as_in_memory(values), e, writer)
        except ValueError as problem:
            raise InputError(f"{entry.file}: {entry.name}: {problem}") from None


def _write_expert(job: Job, wanted: Format, values: torch.Tensor, e: int, writer: Writer) -> None:
    if wanted.published is None:
        matrix = quantize(values, wanted.form)
        for output, part in zip(job.outputs, (matrix.codes, matrix.scales), strict=True):
            writer.write(output.name, part, e * part.nbytes)
        return
    for stem, part in zip(job.stems[e], values.chunk(len(job.stems[e])), strict=True):
        for word, tensor in wanted.published.encode(quantize(part, wanted.form)).items():
            writer.write(stem + word, tensor)


def write_tensors(todo: list[Job], wanted: Format, writer: Writer, threads: int, progress: bool) -> None:
    idle: SimpleQueue[TensorReader] = SimpleQueue()
    readers = [TensorReader(drop_cache=True) for _ in range(threads)]
    for reader in readers:
        idle.put(reader)

    def do(job: Job) -> int:
        reader = idle.get()
        try:
            run(job, wanted, reader, writer)
        finally:
            idle.put(reader)
        return job.entry.num_bytes

    pool = ThreadPoolExecutor(threads)
    own_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of each that quantises
    total = sum(job.entry.num_bytes for job in todo)
    try:
        with tqdm(total=total, unit="B", unit_scale=True, desc="quantising", disable=not progress) as bar:
            for num_bytes in pool.map(do, todo):
                bar.update(num_bytes)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(own_threads)
        for reader in readers:
            reader.close()


def write_config(folder: Path, out: Path, wanted: Format, todo: Iterable[Job]) -> None:
    """config.json with the quantisation, and the files of the source that are not weights."""
    for file in folder.iterdir():
        if file.is_file() and (file.name == DEFAULT_VECTORS or not file.name.endswith(OTHER_WEIGHTS)):
            shutil.copyfile(file, out / file.name)
    matrices = [job.entry for job in todo if job.target is None and len(job.entry.shape) == 2]
    left_out = [
        e.name.removesuffix(".weight") for e in matrices if e.name.endswith(".weight") and "embed" not in e.name
    ]
    left_out += [] if "lm_head" in left_out else ["lm_head"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = wanted.config(left_out)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def convert(folder: Path, name: str, out: Path, threads: int, progress: bool = False) -> int:
    """Write the model in `folder` with experts in the format called `name` to `out`; returns the bytes of its tensors.

    InputError where `out` exists or the disk is full. Whatever goes wrong, nothing is left behind.
    """
    if out.exists():
        raise InputError(f"{out}: exists already; choose another --out")
    spec = load_spec(folder)
    wanted = format_for(spec, name)
    todo = list(jobs(folder, spec, wanted))
    outputs = [output for job in todo for output in job.outputs]
    size = sum(output.num_bytes for output in outputs)
    metadata = {"format": "pt", "expert_format": name, "expert_group": str(wanted.form.group)}
    metadata |= {"expert_scales": str(wanted.form.scale_dtype).removeprefix("torch."), "num_bytes": str(size)}
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        writer = Writer(partial, outputs, metadata)
        write_tensors(todo, wanted, writer, threads, progress)
        writer.close()
        write_config(folder, partial, wanted, todo)
        partial.rename(out)
    except OSError as problem:
        raise InputError(f"{out}: cannot be written ({size / 1e9:.3g} GB): {problem.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return size


def write_model(options: argparse.Namespace) -> None:
    folder = embedded_folder() if options.model == EMBEDDED else resolve_model(options.model)
    size = convert(folder, options.format, options.out, max(1, options.threads), progress=sys.stderr.isatty())
    print(f"{options.out}: {size / 1e9:.3g} GB, experts in {options.format}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a model of the hub, or nano")
    parser.add_argument("--format", required=True, choices=EXPERT_FORMATS)
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 1), help="default: %(default)s")
    return run_command(write_model, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
