"""In how many bits weights are kept: what the options say, and which format `--expert-dtype auto` settles on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from tritonmoe.checkpoint.quantization import EXPERT_FORMATS
from tritonmoe.errors import InputError
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import Storage
from tritonmoe.offload.policy import Policy
from tritonmoe.placement.memory_plan import MemoryPlan

PUBLISHED, AUTO = "published", "auto"
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DENSE_FORMATS = ("fp8", "int8")
# What `auto` goes down to, by measured error for each bit (docs/quantization.md).
NARROWER = ("int8", "int4")
# Of all experts, that `auto` wants in slots. With fewer a step is mostly bytes over the link, and halving those nearly
# halves it; with more, slots are bought with accuracy and bring less.
WANTED_SHARE = 0.25


def resolve_storage(
    expert_dtype: str, dense_dtype: str, spec: ModelSpec, dtype: torch.dtype, published: Storage
) -> list[Storage]:
    """What the options allow, the first preferred: one, but for "auto" and "published" also what has fewer
    bits, for the one to fall back to and the other to advise.

    `published` is what the checkpoint has. InputError for what is not known or the model's sizes do not permit.
    """
    if dense_dtype not in (PUBLISHED, *DENSE_FORMATS):
        raise InputError(f"--dense-dtype {dense_dtype!r} is not known; use {PUBLISHED}, {' or '.join(DENSE_FORMATS)}")
    found = published if dense_dtype == PUBLISHED else replace(published, dense=EXPERT_FORMATS[dense_dtype])
    if found.embedding_on_host and spec.tied_head and found.dense is None:
        raise InputError(
            "--embedding host: the head of this model is its embedding, and is computed with on the device; "
            "add --dense-dtype int8, which makes a head of its own, or leave it out"
        )
    if expert_dtype in (PUBLISHED, AUTO):
        # Nothing is gained by other codes of as many bits.
        bits = 16 if published.experts is None else published.experts.bits
        narrower = [name for name in NARROWER if EXPERT_FORMATS[name].bits < bits and _suits(name, spec)]
        return [found, *(replace(found, experts=EXPERT_FORMATS[name]) for name in narrower)]
    if expert_dtype in FLOATS:
        if FLOATS[expert_dtype] != dtype:
            kind, wanted = (str(each).removeprefix("torch.") for each in (dtype, FLOATS[expert_dtype]))
            raise InputError(
                f"--expert-dtype {expert_dtype}: floating-point experts have the type of computing, here {kind}; "
                f"add --dtype {wanted}, or use another --expert-dtype"
            )
        return [replace(found, experts=None)]
    if expert_dtype not in EXPERT_FORMATS:
        names = ", ".join((PUBLISHED, AUTO, *FLOATS, *EXPERT_FORMATS))
        raise InputError(f"--expert-dtype {expert_dtype!r} is not known; use one of {names}")
    if not _suits(expert_dtype, spec):
        raise InputError(
            f"--expert-dtype {expert_dtype} stores two values in a byte, and this model's experts have an odd size; "
            "use fp8 or int8"
        )
    return [replace(found, experts=EXPERT_FORMATS[expert_dtype])]


def _suits(name: str, spec: ModelSpec) -> bool:
    sizes = [spec.hidden_size, *(moe.intermediate_size for moe in spec.moe_layers.values())]
    return EXPERT_FORMATS[name].bits == 8 or all(size % 2 == 0 for size in sizes)


def name_of(storage: Storage, dtype: torch.dtype) -> str:
    """Of the form in which experts are kept."""
    return str(dtype).removeprefix("torch.") if storage.experts is None else storage.experts.name


class Divided(NamedTuple):
    """The memory as a form of the experts divides it: the policy that is run, and a line to print about it, or None."""

    policy: Policy
    plan: MemoryPlan
    remark: str | None


def choose(
    candidates: Sequence[Storage], dtype: torch.dtype, divide: Callable[[Storage], Divided], host_bytes: int
) -> tuple[Storage, Divided, str]:
    """The first of the candidates, widest first, that fits `host_bytes` of main memory and has slots for enough
    experts; if none has, the last one that fits. Returns it, the division, and the reason to print.

    `divide` raises InputError for what does not fit the device; so does this, if nothing fits.
    """
    tried: list[str] = []
    usable: list[tuple[Storage, Divided]] = []
    problem = InputError(f"out of memory: experts in no form fit the {host_bytes / 1e9:.1f} GB of free main memory")
    for storage in candidates:
        name = name_of(storage, dtype)
        try:
            found = divide(storage)
        except InputError as error:
            problem = error
            tried.append(f"{name} too large for the device")
            continue
        if found.plan.host_bytes > host_bytes:
            sizes = f"{found.plan.host_bytes / 1e9:.1f} GB where {host_bytes / 1e9:.1f} are free"
            tried.append(f"{name} too large for main memory ({sizes})")
            continue
        usable.append((storage, found))
        tried.append(f"{name} {100 * found.plan.slot_share:.3g} %")
        if found.plan.slot_share >= WANTED_SHARE:
            break
    if not usable:
        raise problem
    storage, found = usable[-1]
    reason = (
        f"--expert-dtype {AUTO} takes {name_of(storage, dtype)}; experts that slots hold: {', '.join(tried)} "
        f"({100 * WANTED_SHARE:.0f} % wanted)"
    )
    if storage != candidates[0]:
        reason += f". Outputs are not the model's own; those need --expert-dtype {PUBLISHED}"
    return storage, found, reason
