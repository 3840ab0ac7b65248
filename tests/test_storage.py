"""The forms in which weights are kept: what options ask for, and what the memory is worth in each of them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TINY_CONFIG, tiny_tensors
from test_loading import change_config, rewrite

from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.checkpoint.quantization import EXPERT_FORMATS
from tritonmoe.engine import Engine
from tritonmoe.errors import InputError
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.model.weights import PLAIN, Storage
from tritonmoe.offload.policy import resolve
from tritonmoe.placement.loader import Placement
from tritonmoe.placement.memory_plan import Budget, plan
from tritonmoe.placement.storage import AUTO, PUBLISHED, Divided, choose, resolve_storage
from tritonmoe_kernels.quantized import MXFP4

GPU, GIB = torch.device("cuda"), 1 << 30
CONFIGS = Path(__file__).parent.parent / "tools/bench/configs"
TINY = parse_config(TINY_CONFIG, "config.json")
INT4, INT8 = (Storage(EXPERT_FORMATS[name]) for name in ("int4", "int8"))
CONTEXT = 8192


def wanted(expert_dtype: str, published: Storage = PLAIN, dense_dtype: str = PUBLISHED) -> list[Storage]:
    return resolve_storage(expert_dtype, dense_dtype, TINY, torch.bfloat16, published)


def test_forms_that_are_asked_for() -> None:
    packed = Storage(MXFP4)
    assert wanted("bf16") == wanted("bf16", packed) == [PLAIN]
    assert wanted("int4") == wanted("int4", packed) == [INT4]
    assert wanted("mxfp4") == [packed]
    assert wanted(PUBLISHED, packed) == wanted(AUTO, packed) == [packed]
    assert wanted(PUBLISHED) == wanted(AUTO) == [PLAIN, INT8, INT4]
    assert wanted(AUTO, Storage(EXPERT_FORMATS["fp8"])) == [Storage(EXPERT_FORMATS["fp8"]), INT4]
    assert wanted("int4", PLAIN, "fp8") == [Storage(EXPERT_FORMATS["int4"], EXPERT_FORMATS["fp8"])]


def test_forms_that_cannot_be() -> None:
    with pytest.raises(
        InputError, match=r"^--expert-dtype fp32: .* here bfloat16; add --dtype float32, or use another"
    ):
        wanted("fp32")
    with pytest.raises(InputError, match=r"^--expert-dtype 'q4_k' is not known; use one of published, auto, bf16, "):
        wanted("q4_k")
    with pytest.raises(InputError, match=r"^--dense-dtype 'int4' is not known; use published, fp8 or int8$"):
        wanted("int4", PLAIN, "int4")
    odd = parse_config({**TINY_CONFIG, "moe_intermediate_size": 15}, "config.json")
    with pytest.raises(InputError, match=r"^--expert-dtype int4 stores two values in a byte, .*; use fp8 or int8$"):
        resolve_storage("int4", PUBLISHED, odd, torch.bfloat16, PLAIN)
    assert resolve_storage(AUTO, PUBLISHED, odd, torch.bfloat16, PLAIN) == [PLAIN, INT8]


# Budgets of cards. Room for experts by hand: the budget less 512 MiB, other weights, keys and values of 8,192 tokens,
# a prefill step of 4,096, and default vectors; over records of 9,437,184 bytes (bfloat16), 4,792,320 (int8: a byte and
# two for each 128), 2,654,208 (int4: half a byte and two for each 32) and 13,236,736 (gpt-oss).
FITS = [
    ("qwen3-30b-a3b", 8, "int4", 1430, "bfloat16 6.54 %, int8 12.9 %, int4 23.3 %"),
    ("qwen3-30b-a3b", 12, "int8", 1688, "bfloat16 13.9 %, int8 27.5 %"),
    ("qwen3-30b-a3b", 16, "int8", 2584, "bfloat16 21.4 %, int8 42.1 %"),
    ("qwen3-30b-a3b", 24, "bfloat16", 2222, "bfloat16 36.2 %"),
    ("gpt-oss-20b", 8, "mxfp4", 277, "mxfp4 36.1 %"),
    ("gpt-oss-20b", 12, "mxfp4", 601, "mxfp4 78.3 %"),
    ("gpt-oss-20b", 16, "mxfp4", 0, "mxfp4 100 %"),
    ("gpt-oss-20b", 24, "mxfp4", 0, "mxfp4 100 %"),
    ("gpt-oss-120b", 8, "mxfp4", 208, "mxfp4 4.51 %"),
    ("gpt-oss-120b", 12, "mxfp4", 533, "mxfp4 11.6 %"),
    ("gpt-oss-120b", 16, "mxfp4", 857, "mxfp4 18.6 %"),
    ("gpt-oss-120b", 24, "mxfp4", 1506, "mxfp4 32.7 %"),
]
RECORD_BYTES = {"bfloat16": 9_437_184, "int8": 4_792_320, "int4": 2_654_208, "mxfp4": 13_236_736}


@pytest.mark.parametrize(("model", "gib", "form", "num_slots", "shares"), FITS)
def test_fit_to_the_card(model: str, gib: int, form: str, num_slots: int, shares: str) -> None:
    spec = parse_config(read_json(CONFIGS / f"{model}.json"), model)
    published = Storage(MXFP4) if model.startswith("gpt-oss") else PLAIN
    budget = Budget(gib * GIB, gib * GIB, gib * GIB)

    def divide(storage: Storage) -> Divided:
        for policy in (resolve("resident"), resolve("exact")):
            try:
                return Divided(policy, plan(spec, torch.bfloat16, GPU, policy, budget, CONTEXT, storage=storage), None)
            except InputError:
                continue
        raise AssertionError("neither fits")

    candidates = resolve_storage(AUTO, PUBLISHED, spec, torch.bfloat16, published)
    _, found, reason = choose(candidates, torch.bfloat16, divide, 100 * GIB)
    assert reason.startswith(f"--expert-dtype auto takes {form}; experts that slots hold: {shares} (25 % wanted)")
    assert ("not the model's own" in reason) == (form in ("int8", "int4"))
    assert found.plan.num_slots == num_slots
    rows = dict(found.plan.rows)
    assert sum(rows.values()) == gib * GIB
    assert rows["workspace of a prefill step"] > 250 << 20
    assert rows["not used"] < RECORD_BYTES[form] or num_slots == 0
    if num_slots:
        assert found.plan.host_bytes == found.plan.num_experts * RECORD_BYTES[form]
        kind = "" if form == "bfloat16" else f" in {form}"
        assert any(what.startswith(f"{num_slots} expert slots") and what.endswith(f"MiB{kind}") for what in rows)


def test_eight_bits_for_the_rest_leave_room_for_slots() -> None:
    spec = parse_config(read_json(CONFIGS / "gpt-oss-20b.json"), "gpt-oss-20b")
    budget = Budget(8 * GIB, 8 * GIB, 8 * GIB)
    slots = [
        plan(spec, torch.bfloat16, GPU, resolve("exact"), budget, CONTEXT, storage=storage).num_slots
        for storage in (Storage(MXFP4), Storage(MXFP4, EXPERT_FORMATS["int8"]))
    ]
    assert slots == [277, 357]


def test_the_embedding_in_main_memory_leaves_its_room_to_slots() -> None:
    spec = parse_config(read_json(CONFIGS / "qwen3-30b-a3b.json"), "qwen3-30b-a3b")
    budget = Budget(8 * GIB, 8 * GIB, 8 * GIB)
    there, here = (
        plan(spec, torch.bfloat16, GPU, resolve("exact"), budget, CONTEXT, storage=replace(INT4, embedding_on_host=on))
        for on in (True, False)
    )
    table = 151_936 * 2048 * 2
    assert (
        dict(here.rows)["weights without experts"] - table == dict(there.rows)["weights without experts and embedding"]
    )
    assert there.num_slots - here.num_slots in (table // RECORD_BYTES["int4"], table // RECORD_BYTES["int4"] + 1)
    assert there.host_bytes - here.host_bytes == table
    tied = replace(spec, tied_head=True)
    with pytest.raises(InputError, match=r"^--embedding host: the head of this model is its embedding.*; add --dense"):
        resolve_storage("int4", PUBLISHED, tied, torch.bfloat16, Storage(embedding_on_host=True))
    assert resolve_storage("int4", "int8", tied, torch.bfloat16, Storage(embedding_on_host=True))
    for placement, message in (
        (Placement(embedding="host"), "--embedding host: there is no GPU"),
        (Placement(embedding="disk"), "--embedding 'disk' is not known; use device or host"),
        (Placement(expert_dtype=AUTO, expert_slots="8"), "--expert-dtype auto decides by the slots .*; leave out"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            Engine.from_pretrained(device="cpu", placement=placement)


def test_main_memory_decides_as_well() -> None:
    spec = parse_config(read_json(CONFIGS / "qwen3-30b-a3b.json"), "qwen3-30b-a3b")

    def divide(storage: Storage, gib: int = 24) -> Divided:
        budget = Budget(gib * GIB, gib * GIB, gib * GIB)
        policy = resolve("exact")
        return Divided(policy, plan(spec, torch.bfloat16, GPU, policy, budget, CONTEXT, storage=storage), None)

    candidates = resolve_storage(AUTO, PUBLISHED, spec, torch.bfloat16, PLAIN)
    storage, _, reason = choose(candidates, torch.bfloat16, divide, 30 * GIB)
    assert storage == INT8
    assert "bfloat16 too large for main memory (58.0 GB where 32.2 are free), int8 71.2 %" in reason
    with pytest.raises(InputError, match=r"^out of memory: experts in no form fit the 5.4 GB of free main memory$"):
        choose(candidates, torch.bfloat16, divide, 5 * GIB)
    with pytest.raises(InputError, match=r"^out of memory: .*; use --embedding host, or --max-context"):
        choose(candidates, torch.bfloat16, lambda storage: divide(storage, 4), 100 * GIB)


# The engine


# Nats per token that were measured, doubled: -0.0009, -0.0001, 0.0517 and -0.0017; a wrong scale or nibble costs whole.
LOSSES = [
    ("fp8", PUBLISHED, 0.002),
    ("int8", "int8", 0.002),
    ("mxfp4", PUBLISHED, 0.1),
    ("int4", PUBLISHED, 0.01),
]


def test_each_form_of_the_embedded_model_writes_as_before() -> None:
    """On text that was drawn from the model itself, whose mean log probability a form can change but little."""
    plain = Engine.from_pretrained(device="cpu")
    ids = plain.generate("Once upon a time", SamplingParams(max_new_tokens=200, temperature=1.0, seed=3)).token_ids
    ids = [*plain.tokenizer.encode("Once upon a time", add_special_tokens=True), *ids]
    expected = sum(plain.score(ids)) / len(ids)
    for name, dense, most in LOSSES:
        placement = Placement("exact", expert_slots="25%", expert_dtype=name, dense_dtype=dense)
        engine = Engine.from_pretrained(device="cpu", placement=placement)
        lost = expected - sum(engine.score(ids)) / len(ids)
        assert abs(lost) < most, (name, dense, lost)
        text = engine.generate("Once upon a time", SamplingParams(max_new_tokens=12)).text
        assert len(text.split()) > 6
        assert text.isascii()


def test_auto_and_advice_say_what_they_do(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model of large experts, on a budget that holds few of them."""
    sizes = {"moe_intermediate_size": 512, "num_experts": 32}
    config = {**TINY_CONFIG, **sizes}
    tensors = {k: v for k, v in tiny_tensors().items() if ".mlp." not in k}
    for i in range(2):
        tensors[f"model.layers.{i}.mlp.gate.weight"] = torch.randn(32, 32)
        for e in range(32):
            for name, shape in {"gate": (512, 32), "up": (512, 32), "down": (32, 512)}.items():
                tensors[f"model.layers.{i}.mlp.experts.{e}.{name}_proj.weight"] = 0.1 * torch.randn(shape)
    rewrite(model_folder, tensors)
    change_config(model_folder, **sizes)
    spec = parse_config(config, "config.json")
    fixed = dict(plan(spec, torch.float32, torch.device("cpu"), resolve("resident"), Budget(GIB, GIB, GIB), 64).rows)
    room = sum(size for what, size in fixed.items() if not what.startswith(("all", "not used"))) + 8 * 196_608 + 1000
    caplog.set_level(logging.INFO)

    def load(expert_dtype: str) -> Engine:
        caplog.clear()
        placement = Placement(gpu_memory=f"{room} B", expert_dtype=expert_dtype)
        return Engine.from_pretrained(model_folder, device="cpu", max_context=64, placement=placement)

    published = load(PUBLISHED)
    assert "--expert-dtype int4 would give slots for 87.5 % of the experts instead of 12.5 %" in caplog.text
    automatic = load(AUTO)
    assert "--expert-dtype auto takes int8; experts that slots hold: float32 12.5 %, int8 " in caplog.text
    assert published.decoder.weights.storage == PLAIN
    assert automatic.decoder.weights.storage == INT8
    params = SamplingParams(max_new_tokens=3)
    assert load("int8").generate([1, 2, 3], params).token_ids == automatic.generate([1, 2, 3], params).token_ids
