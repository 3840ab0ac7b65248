"""What each format of the experts costs a model: errors of weights and of layers, held-out text, and tasks.

Errors are relative root-mean-square ones: of a layer's matrices, and of the sum of its experts for the inputs that the
unquantised model has there. Text and tasks are measured with the values that the codes stand for in place of the
experts, which is what the engine computes with (tests/test_quantization_error.py shows it). Beside the formats of
`--expert-dtype` stand the usual choices of scales and other groups, measured without tasks: they say why it has those.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from evaluate_nano import accuracy, bits_per_character
from provenance import ROOT, provenance

from nano.corpus import held_out_passages, read_works
from nano.tasks import read_test_file
from tritonmoe import Engine
from tritonmoe.checkpoint.quantization import EXPERT_FORMATS, quantize
from tritonmoe.engine import EMBEDDED, embedded_folder
from tritonmoe.errors import InputError
from tritonmoe.model.matrices import row_groups
from tritonmoe.model.moe import Experts
from tritonmoe.model.weights import ExpertWeights
from tritonmoe_kernels.quantized import MXFP4_VALUES, Matrix, WeightFormat, dequantize
from tritonmoe_kernels.routing import NormRouterOutput

Restore = Callable[[torch.Tensor, WeightFormat], torch.Tensor]  # values [E, rows, columns] to what is left of them
PUBLISHED = "as published"


def through(values: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    return dequantize(quantize(values, form), values.dtype)


def plain_mxfp4(values: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """With the scale of the OCP specification, the power of two below the largest magnitude over that below 6."""
    groups = values.float().unflatten(-1, (-1, form.group))
    scale = torch.exp2(torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True).clamp_min(1e-30))) - 2)
    steps, levels = (groups / scale).abs(), torch.tensor(MXFP4_VALUES[:8], device=values.device)
    found = levels[(steps[..., None] - levels).abs().argmin(-1)]
    return (found * groups.sign() * scale).flatten(-2).to(values.dtype)


def plain_int4(values: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """With 7.5 steps for the largest magnitude of a group, as compressed-tensors has it."""
    groups = values.float().unflatten(-1, (-1, form.group))
    scale = (groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 7.5).bfloat16().float()
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(-2).to(values.dtype)


def int4(group: int, has_zeros: bool = False) -> WeightFormat:
    return WeightFormat("int4", group, scale_dtype=torch.bfloat16, has_zeros=has_zeros)


VARIANTS: dict[str, tuple[WeightFormat, Restore]] = {
    **{name: (form, through) for name, form in EXPERT_FORMATS.items()},
    "mxfp4, scales by the OCP rule": (EXPERT_FORMATS["mxfp4"], plain_mxfp4),
    "int4, 7.5 steps to the largest": (EXPERT_FORMATS["int4"], plain_int4),
    "int4 with zero points": (int4(32, has_zeros=True), through),
    "int4 in groups of 64": (int4(64), through),
    "int4 in groups of 128": (int4(128), through),
}


class ComparedExperts(Experts):
    """Experts that also compute each layer with what is left of its weights, and keep how far that is off."""

    def compare(self, names: Sequence[str]) -> None:
        self._names = names
        self._squares: dict[tuple[str, int, str], torch.Tensor] = {}  # variant, layer, what: [of errors, of values]

    def _compute(self, layer_id: int, routed: NormRouterOutput, out: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        used = super()._compute(layer_id, routed, out, is_prefill)
        moe = self._weights.layers[layer_id].moe
        assert moe is not None
        exact, other = (out * used[..., None]).sum(1), torch.empty_like(out)
        for name in self._names:
            left = restored(moe.experts, name)
            self._run_slots(layer_id, routed.x, routed.topk_ids, left, other)
            self._add(name, layer_id, "outputs", (other * used[..., None]).sum(1), exact)
            self._add(name, layer_id, "gate_up", tensor(left.gate_up), tensor(moe.experts.gate_up))
            self._add(name, layer_id, "down", tensor(left.down), tensor(moe.experts.down))
        return used

    def _add(self, name: str, layer_id: int, what: str, found: torch.Tensor, exact: torch.Tensor) -> None:
        squares = torch.stack([(found.float() - exact.float()).square().sum(), exact.float().square().sum()])
        key = (name, layer_id, what)
        self._squares[key] = self._squares.get(key, 0) + squares.double().cpu()

    def errors(self, name: str) -> list[dict[str, float]]:
        """By layer that has experts."""
        found: dict[int, dict[str, float]] = {}
        for (variant, layer_id, what), (error, value) in self._squares.items():
            if variant == name:
                found.setdefault(layer_id, {"layer": layer_id})[what] = float((error / value).sqrt())
        return [found[layer_id] for layer_id in sorted(found)]


def tensor(matrix: Matrix) -> torch.Tensor:
    if not isinstance(matrix, torch.Tensor):
        raise InputError("the model is quantised already; measure the one that it was made from")
    return matrix


def format_of(experts: ExpertWeights, name: str) -> WeightFormat:
    intermediate = experts.down.shape[-1]
    return row_groups(VARIANTS[name][0], intermediate)


def restored(experts: ExpertWeights, name: str) -> ExpertWeights:
    """What the variant leaves of the experts of a layer."""
    form, restore = format_of(experts, name), VARIANTS[name][1]
    gate_up, down = restore(tensor(experts.gate_up), form), restore(tensor(experts.down), form)
    return ExpertWeights(gate_up, down, experts.gate_up_bias, experts.down_bias)


def replace_experts(engine: Engine, name: str) -> None:
    """Put what the variant leaves of the experts' values in their place."""
    for layer in engine.decoder.weights.layers:
        if layer.moe is not None:
            layer.moe.experts = restored(layer.moe.experts, name)


def bits(experts: ExpertWeights, name: str) -> float:
    """Per value of the two matrices, with scales."""
    shapes = [matrix.shape[1:] for matrix in (experts.gate_up, experts.down)]
    parts = [part for shape in shapes for part in format_of(experts, name).shapes(*shape).values()]
    num_bytes = sum(shape[0] * shape[1] * dtype.itemsize for shape, dtype in parts)
    return 8 * num_bytes / sum(rows * columns for rows, columns in shapes)


def layer_errors(engine: Engine, ids: list[int], names: Sequence[str]) -> dict[str, list[dict[str, float]]]:
    decoder = engine.decoder
    compared = ComparedExperts(decoder.operations, decoder.spec, decoder.weights)
    compared.compare(names)
    before, decoder.experts = decoder.experts, compared
    engine.score(ids)
    decoder.experts = before
    return {name: compared.errors(name) for name in names}


def tasks(engine: Engine, items: int, batch: int) -> dict[str, dict[str, float]]:
    """Accuracy at each level, all families together."""
    found = {}
    for level in ("easy", "hard"):
        files = sorted((embedded_folder() / "tasks").glob(f"*-{level}.jsonl"))
        found[level] = accuracy(engine, [task for file in files for task in read_test_file(file)[:items]], batch)
    return found


def documents(options: argparse.Namespace) -> list[str]:
    """Held-out text of at most `--characters`, whole passages or the beginning of works."""
    texts = held_out_passages([str(options.passages)]) if options.passages else read_works(str(options.works))
    found, left = [], options.characters
    for text in texts:
        if left <= 0:
            break
        found.append(text[:left])
        left -= len(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--formats", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--works", type=Path, help="held-out text: whole works, separated by U+001E")
    source.add_argument("--passages", type=Path, help="a training text, of which the held-out passages are measured")
    parser.add_argument("--characters", type=int, default=150_000, help="of that text (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="whose layers are compared (default: %(default)s)")
    parser.add_argument(
        "--items", type=int, default=100, help="of each family and level of tasks (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/measurements/quantization-nano.json")
    options = parser.parse_args()
    found = {"provenance": provenance(), "model": Path(options.model).name, "formats": {}}
    engine, texts = Engine.from_pretrained(options.model), documents(options)
    experts = next(layer.moe.experts for layer in engine.decoder.weights.layers if layer.moe is not None)
    errors = layer_errors(engine, engine.tokenizer.encode("\n".join(texts))[: options.tokens], options.formats)
    for name in (PUBLISHED, *options.formats):
        result: dict[str, object] = {}
        if name != PUBLISHED:
            engine = Engine.from_pretrained(options.model)
            replace_experts(engine, name)
            result = {"bits": bits(experts, name), "layers": errors[name]}
        result["text"] = bits_per_character(engine, texts, engine.max_context)
        if options.items and name in (PUBLISHED, *EXPERT_FORMATS):
            result["tasks"] = tasks(engine, options.items, options.batch)
        found["formats"][name] = result
        options.out.write_text(json.dumps(found, indent=1) + "\n")  # what there is so far
        print(name, json.dumps({**result, "layers": None}), flush=True)


if __name__ == "__main__":
    main()
