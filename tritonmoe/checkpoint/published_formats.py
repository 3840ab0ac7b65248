"""Quantised matrices as others publish them: what `quantization_config` promises, and the tensors it stands for.

A linear layer of `rows` outputs and `columns` inputs is stored as several tensors, here called by the last word of
their names. Words of 32 bits hold 4- or 8-bit codes from the lowest bits up; codes and zero points are unsigned.

    scaled   weight [rows, columns] F8_E4M3 or I8, and a scale for each block, group, row or for all
    words    weight_packed I32 [rows, columns / codes in a word], weight_scale, weight_shape; weight_zero_point is
             packed along the rows                               (compressed-tensors "pack-quantized")
    bytes    weight_packed U8 [rows, columns / 2], weight_scale U8 exponents        ("mxfp4-pack-quantized")
    awq      qweight I32 [columns, rows / 8], qzeros I32 [groups, rows / 8], scales [groups, rows]; the eight codes of a
             word belong to rows 0, 2, 4, 6, 1, 3, 5, 7                             (AutoAWQ's "gemm")
    gptq     qweight I32 [columns / 8, rows], qzeros, scales and perhaps g_idx; the first version of the format stores
             zero points less one                                                   (AutoGPTQ, GPTQModel)

Where our formats have the same bits, they are kept: codes, scales in their own dtype, zero points. So a dequantised
value is the product that the library of the format computes, before it rounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from tritonmoe.checkpoint.config_reader import ConfigReader
from tritonmoe.checkpoint.quantization import pack_codes
from tritonmoe.errors import CheckpointError, ConfigError
from tritonmoe_kernels.quantized import QuantizedMatrix, WeightFormat

Layout = Literal["scaled", "words", "bytes", "awq", "gptq"]

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the code of each of eight rows in its word
SCALES = (torch.float16, torch.bfloat16, torch.float32)
WORDS, BYTES = (torch.int32,), (torch.uint8,)
LEAST_GROUP = {4: 32, 8: 16}  # columns, by the bits of a code: 16 bytes, which kernels read at a time
UNUSED = ("input_scale", "output_scale")  # of activations, which are not quantised here


# Which matrices are quantised, and how their scales and columns are stored: the tensors say it, and are believed.
SHOWN_BY_TENSORS = """
    desc_act ignore ignored_layers lm_head modules_in_block_to_quantize modules_to_convert modules_to_not_convert
    scale_fmt
""".split()
# How the model was made, and how other programs run it: which does not change what it is.
HISTORY = """
    act_group_aware batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset
    dequantize do_fuse exllama_config fuse_max_seq_len global_compression_ratio hyb_act max_input_length meta
    model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block modules_to_fuse mse
    offload_to_disk pad_token_id parallel_packing run_compressed static_groups tokenizer true_sequential use_cuda_fp16
    use_exllama v2 v2_alpha version
""".split()


class StoredTensor(NamedTuple):
    """What one tensor of a matrix must be."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    is_optional: bool = False


@dataclass(frozen=True)
class PublishedFormat:
    """How a checkpoint stores its quantised matrices."""

    layout: Layout
    name: str  # as in `WeightFormat`
    group: int | None = None  # columns that share a scale; None: all
    group_rows: int | None = 1
    has_zeros: bool = False
    scale_name: str = "weight_scale"
    zeros_less_one: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.name in ("int4", "mxfp4") else 8

    def weight_format(self, columns: int, scale_dtype: torch.dtype) -> WeightFormat:
        """Ours that holds the same; one for matrices of different widths where `columns` is the greatest."""
        group = self.group or 1 << max(1, (columns - 1).bit_length())
        return WeightFormat(self.name, group, self.group_rows or 1, scale_dtype, self.has_zeros)

    def tensors(self, rows: int, columns: int) -> dict[str, StoredTensor]:
        """Those of one matrix, by the last word of their names, the codes first."""
        per_word = 32 // self.bits
        groups = (_ceil(rows, self.group_rows or rows), _ceil(columns, self.group or columns))
        code_dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(self.name, torch.uint8)
        if self.layout == "scaled":
            scales = () if self.group_rows is None else groups
            found = {
                "weight": StoredTensor((rows, columns), (code_dtype,)),
                self.scale_name: StoredTensor(scales, SCALES),
            }
        elif self.layout == "bytes":
            found = {
                "weight_packed": StoredTensor((rows, columns // 2), BYTES),
                "weight_scale": StoredTensor(groups, BYTES),
            }
        elif self.layout == "words":
            found = {
                "weight_packed": StoredTensor((rows, _ceil(columns, per_word)), WORDS),
                "weight_scale": StoredTensor(groups, SCALES),
                "weight_shape": StoredTensor((2,), (torch.int64, torch.int32), is_optional=True),
            }
            if self.has_zeros:
                found["weight_zero_point"] = StoredTensor((_ceil(rows, per_word), groups[1]), WORDS)
        else:
            is_awq = self.layout == "awq"
            codes = (columns, _ceil(rows, per_word)) if is_awq else (_ceil(columns, per_word), rows)
            found = {
                "qweight": StoredTensor(codes, WORDS),
                "scales": StoredTensor((groups[1], rows), SCALES),
                "qzeros": StoredTensor((groups[1], _ceil(rows, per_word)), WORDS),
            }
            if not is_awq:
                found["g_idx"] = StoredTensor((columns,), WORDS, is_optional=True)
        return {**found, **{name: StoredTensor((), SCALES, is_optional=True) for name in UNUSED}}

    def decode(self, tensors: dict[str, torch.Tensor], rows: int, columns: int) -> QuantizedMatrix:
        """The matrix [rows, columns] that the tensors of `self.tensors` hold; CheckpointError, without the name of the
        file, where they hold what the configuration does not say."""
        codes, scales, zeros = DECODERS[self.layout](self, tensors, rows, columns)
        if zeros is not None and not self.has_zeros:
            middle = 1 << (self.bits - 1)
            if not bool((zeros == middle).all()):
                raise CheckpointError(f"has zero points other than {middle}, which config.json calls symmetric")
            zeros = None
        form = self.weight_format(columns, scales.dtype)
        return QuantizedMatrix(form, codes, scales, zeros)

    def encode(self, matrix: QuantizedMatrix) -> dict[str, torch.Tensor]:
        """The tensors that `decode` makes `matrix` of, in the layouts that are written: "scaled", "words", "bytes"."""
        if self.layout == "scaled":
            return {"weight": matrix.codes, self.scale_name: matrix.scales}
        if self.layout == "bytes":
            return {"weight_packed": matrix.codes, "weight_scale": matrix.scales}
        assert self.layout == "words", f"{self.layout} is not written"
        assert matrix.zeros is None, "zero points are not written"
        codes = matrix.codes if self.bits == 4 else matrix.codes.view(torch.uint8) ^ 128
        shape = torch.tensor(matrix.shape, dtype=torch.int64)
        return {"weight_packed": codes.view(torch.int32), "weight_scale": matrix.scales, "weight_shape": shape}


Decoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # codes, scales, zero points [rows, groups]


def _scaled(form: PublishedFormat, tensors: dict[str, torch.Tensor], rows: int, columns: int) -> Decoded:
    scales = tensors[form.scale_name]
    return tensors["weight"], scales.expand(rows, 1) if form.group_rows is None else scales, None


def _bytes(form: PublishedFormat, tensors: dict[str, torch.Tensor], rows: int, columns: int) -> Decoded:
    return tensors["weight_packed"], tensors["weight_scale"], None


def _words(form: PublishedFormat, tensors: dict[str, torch.Tensor], rows: int, columns: int) -> Decoded:
    if "weight_shape" in tensors and tensors["weight_shape"].tolist() != [rows, columns]:
        raise CheckpointError(f"has weight_shape {tensors['weight_shape'].tolist()}, not {[rows, columns]}")
    packed = tensors["weight_packed"].view(torch.uint8)[:, : columns * form.bits // 8]
    zeros = None
    if form.has_zeros:
        zeros = _unpack(tensors["weight_zero_point"].mT, form.bits)[:, :rows].mT
    return _signed(packed, form), tensors["weight_scale"], zeros


def _awq(form: PublishedFormat, tensors: dict[str, torch.Tensor], rows: int, columns: int) -> Decoded:
    def in_order(words: torch.Tensor) -> torch.Tensor:
        return _unpack(words, 4).unflatten(-1, (-1, 8))[..., AWQ_PLACES].flatten(-2).mT.contiguous()

    return pack_codes(in_order(tensors["qweight"])), tensors["scales"].mT, in_order(tensors["qzeros"])


def _gptq(form: PublishedFormat, tensors: dict[str, torch.Tensor], rows: int, columns: int) -> Decoded:
    if "g_idx" in tensors:
        groups = torch.arange(columns, dtype=torch.int32) // (form.group or columns)
        if not torch.equal(tensors["g_idx"], groups):
            raise CheckpointError("has its columns in another order (act-order, desc_act), which is not supported")
    packed = tensors["qweight"].mT.contiguous().view(torch.uint8)
    qzeros = tensors["qzeros"]
    if form.zeros_less_one:  # added to whole words, as the subtraction was done, with its borrows
        qzeros = qzeros + (0x11111111 if form.bits == 4 else 0x01010101)
    return _signed(packed, form), tensors["scales"].mT, _unpack(qzeros, form.bits).mT


DECODERS: dict[Layout, Callable[[PublishedFormat, dict[str, torch.Tensor], int, int], Decoded]] = {
    "scaled": _scaled,
    "bytes": _bytes,
    "words": _words,
    "awq": _awq,
    "gptq": _gptq,
}


def _signed(codes: torch.Tensor, form: PublishedFormat) -> torch.Tensor:
    """8-bit codes less 128; those of 4 bits stay as they are."""
    return (codes ^ 128).view(torch.int8) if form.bits == 8 else codes


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words [..., n] as their codes, uint8 [..., n · 32 / bits]."""
    found = words.contiguous().view(torch.uint8)
    return found if bits == 8 else torch.stack((found & 15, found >> 4), dim=-1).flatten(-2)


def _ceil(size: int, unit: int) -> int:
    return -(-size // unit)


def is_finite(matrix: QuantizedMatrix) -> bool:
    """Whether every value is: the scales, and for fp8 and mxfp4 no code of theirs that means NaN."""
    if matrix.format.name == "mxfp4":
        return bool((matrix.scales != 255).all())
    is_sound = bool(matrix.scales.isfinite().all())
    return is_sound and not (matrix.format.name == "fp8" and bool((matrix.codes.view(torch.uint8) & 127 == 127).any()))


def parse_quantization(config: ConfigReader) -> PublishedFormat | None:
    """From the object `quantization_config`; ConfigError naming whatever is not supported.

    None where it is empty, and for "mxfp4", GPT-OSS's own layout of experts, which the names of its tensors show.
    """
    if not config.values:
        return None
    method = config.raw("quant_method")
    parsers: dict[str, Callable[[ConfigReader], PublishedFormat | None]] = {
        "mxfp4": lambda _: None,
        "fp8": _parse_fp8,
        "compressed-tensors": _parse_compressed_tensors,
        "awq": _parse_awq,
        "gptq": _parse_gptq,
    }
    if not isinstance(method, str) or method not in parsers:
        supported = ", ".join(parsers)
        raise ConfigError(f"{config.where}: quantisation method {method!r} is not supported (supported: {supported})")
    for name in SHOWN_BY_TENSORS + HISTORY:
        config.raw(name)
    found = parsers[method](config)
    group = None if found is None else found.group
    if found is not None and group is not None and (group < LEAST_GROUP[found.bits] or group & (group - 1)):
        raise ConfigError(
            f"{config.where}: groups of {group} columns are not supported "
            f"(supported: powers of two from {LEAST_GROUP[found.bits]})"
        )
    return found


def _parse_fp8(config: ConfigReader) -> PublishedFormat:
    config.require("fmt", ("e4m3", "float8_e4m3fn"))
    config.require("activation_scheme", ("dynamic",))
    config.require("expert_dtype", ("fp8",))
    rows, columns = _block(config, "weight_block_size")
    return PublishedFormat("scaled", "fp8", columns, rows, scale_name="weight_scale_inv")


def _block(config: ConfigReader, name: str) -> tuple[int, int]:
    block = config.raw(name)
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ConfigError(f"{config.where}: {name} must be two sizes such as [128, 128], not {block!r}")
    return block[0], block[1]


def _parse_compressed_tensors(config: ConfigReader) -> PublishedFormat:
    config.require("quantization_status", ("compressed",))
    for name in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        value = config.raw(name)
        if value and value != {"format": "dense"}:
            raise ConfigError(f"{config.where}: {name} is not supported (supported: none)")
    groups = config.child("config_groups")
    found = {_parse_scheme(groups.child(name), config.raw("format")) for name in groups.values}
    if len(found) != 1:
        raise ConfigError(f"{groups.where}: {len(found)} schemes in one model are not supported (supported: one)")
    return found.pop()


def _parse_scheme(group: ConfigReader, default_format: object) -> PublishedFormat:
    stored_as, weights = str(group.raw("format") or default_format), group.child("weights")
    group.raw("targets")
    if group.raw("output_activations"):
        raise ConfigError(f"{group.where}: quantised output activations are not supported (supported: none)")
    group.child("input_activations").require("num_bits", (8,))  # they are not quantised here, which loses nothing
    kind, bits = str(weights.raw("type")), weights.integer("num_bits")
    names: dict[tuple[str, str, int], tuple[Layout, str]] = {
        ("pack-quantized", "int", 4): ("words", "int4"),
        ("pack-quantized", "int", 8): ("words", "int8"),
        ("int-quantized", "int", 8): ("scaled", "int8"),
        ("float-quantized", "float", 8): ("scaled", "fp8"),
        ("naive-quantized", "int", 8): ("scaled", "int8"),
        ("naive-quantized", "float", 8): ("scaled", "fp8"),
        ("mxfp4-pack-quantized", "float", 4): ("bytes", "mxfp4"),
    }
    if (stored_as, kind, bits) not in names:
        known = ", ".join(sorted({f"{name} {kind}{bits}" for name, kind, bits in names}))
        raise ConfigError(f"{group.where}: {stored_as} {kind}{bits} is not supported (supported: {known})")
    layout, name = names[stored_as, kind, bits]
    weights.require("actorder", ("weight", "static", False))
    weights.require("dynamic", (False,))
    has_zeros = not weights.boolean("symmetric", default=True)
    if has_zeros and name != "int4":
        raise ConfigError(f"{weights.where}: {name} with zero points is not supported (supported: int4)")
    size, rows = _strategy(weights, layout)
    return PublishedFormat(layout, name, size, rows, has_zeros)


def _strategy(weights: ConfigReader, layout: Layout) -> tuple[int | None, int | None]:
    """Columns and rows of a scale."""
    strategy = weights.raw("strategy")
    allowed = {"scaled": ("channel", "tensor", "block", "group"), "words": ("group", "channel"), "bytes": ("group",)}
    weights.require("strategy", allowed[layout])
    if strategy == "block":
        rows, columns = _block(weights, "block_structure")
        return columns, rows
    if strategy == "group":
        size = weights.integer("group_size")
        if layout == "bytes":
            weights.require("group_size", (32,))
        return size, 1
    if strategy is None:
        raise ConfigError(f"{weights.where}: strategy is missing")
    return None, 1 if strategy == "channel" else None


def _parse_awq(config: ConfigReader) -> PublishedFormat:
    version = config.raw("version", "format", "checkpoint_format") or "gemm"
    if str(version).lower() != "gemm":
        raise ConfigError(f"{config.where}: AWQ version {version!r} is not supported (supported: 'gemm')")
    config.require("zero_point", (True,))
    config.require("backend", ("autoawq", "auto"))
    if config.integer("bits", "w_bit") != 4:
        raise ConfigError(f"{config.where}: AWQ of {config.raw('bits', 'w_bit')} bits is not supported (supported: 4)")
    return PublishedFormat("awq", "int4", _group_size(config), has_zeros=True, scale_name="scales")


def _parse_gptq(config: ConfigReader) -> PublishedFormat:
    version = config.raw("checkpoint_format", "format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise ConfigError(f"{config.where}: GPTQ format {version!r} is not supported (supported: 'gptq', 'gptq_v2')")
    config.require("pack_dtype", ("int32",))
    config.require("is_marlin_format", (False,))
    for name in config.child("dynamic").values:
        if not name.startswith("-:"):  # which only leaves layers out
            raise ConfigError(f"{config.where}: dynamic {name!r}: settings of some layers are not supported")
    bits, is_symmetric = config.integer("bits"), config.boolean("sym", default=True)
    if bits not in (4, 8) or (bits == 8 and not is_symmetric):
        kind = "" if is_symmetric else " with zero points"
        raise ConfigError(f"{config.where}: GPTQ of {bits} bits{kind} is not supported (supported: 4, and 8 without)")
    return PublishedFormat(
        "gptq",
        f"int{bits}",
        _group_size(config),
        has_zeros=not is_symmetric,
        scale_name="scales",
        zeros_less_one=version == "gptq",
    )


def _group_size(config: ConfigReader) -> int | None:
    size = config.integer("group_size", "q_group_size", minimum=-1)
    return None if size == -1 else size
