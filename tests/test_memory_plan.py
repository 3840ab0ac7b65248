"""How memory is divided: numbers worked out by hand, limits to the byte, and errors whose advice works."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TINY_CONFIG

from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.errors import ConfigError, InputError
from tritonmoe.model.weights import Storage
from tritonmoe.offload.policy import PRESETS, minimum_slots, resolve
from tritonmoe.placement import memory_plan
from tritonmoe.placement.memory_plan import Budget, MemoryPlan, format_bytes, plan, read_budget, read_slots

CPU, GPU = torch.device("cpu"), torch.device("cuda")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3 = parse_config(QWEN3_30B, "config.json")
TINY = parse_config(TINY_CONFIG, "config.json")
DENSE = replace(TINY, layers=tuple(replace(layer, moe=None, dense_size=48) for layer in TINY.layers))
EXACT, ON_DEMAND, RESIDENT = PRESETS["exact"], PRESETS["on-demand"], PRESETS["resident"]

# Qwen3-30B-A3B in bf16, with routers and norms in float32.
QWEN3_LAYER = (
    2 * 2048 * 4  # two norms
    + (32 + 2 * 4) * 128 * 2048 * 2  # q, k and v
    + 2048 * 32 * 128 * 2  # output
    + 2 * 128 * 4  # norms of q and k
    + 128 * 2048 * 4  # router
)
QWEN3_WEIGHTS = 2 * 151936 * 2048 * 2 + 48 * QWEN3_LAYER + 2048 * 4  # with embedding, head and final norm
QWEN3_EXPERT = 3 * 2048 * 768 * 2
QWEN3_KV = 2 * 4 * 128 * 48 * 2  # of one token
QWEN3_WORKSPACE = 4096 * (8 * (2048 + 768) + 8 * 2048) * 2
QWEN3_VECTORS = 48 * 128 * 2048 * 2

# The tiny model in float32.
TINY_LAYER = 2 * 32 * 4 + (64 + 2 * 32) * 32 * 4 + 32 * 64 * 4 + 2 * 16 * 4 + 4 * 32 * 4
TINY_WEIGHTS = 2 * 260 * 32 * 4 + 2 * TINY_LAYER + 32 * 4
TINY_EXPERT = 3 * 32 * 16 * 4
TINY_FIXED = TINY_WEIGHTS + 128 * 2 * 2 * 2 * 16 * 4 + 2 * 4 * 4 * 128 * 128 + 64 * MIB


def of(num_bytes: int, limit: int | None = None) -> Budget:
    return Budget(num_bytes, num_bytes if limit is None else limit, num_bytes)


def plan_qwen3(num_bytes: int, **options: Any) -> MemoryPlan:
    given = {"policy": EXACT, "max_context": 40960, "budget": of(num_bytes), **options}
    return plan(QWEN3, torch.bfloat16, GPU, **given)


def plan_tiny(num_bytes: int, **options: Any) -> MemoryPlan:
    given = {"policy": ON_DEMAND, "max_context": 128, "budget": of(num_bytes), **options}
    return plan(TINY, torch.float32, CPU, **given)


def test_qwen3_by_hand() -> None:
    assert QWEN3_WEIGHTS == 3_107_774_464
    assert QWEN3_EXPERT == 9 * MIB
    found = plan_qwen3(10 * GIB)
    fixed = QWEN3_WEIGHTS + 40960 * QWEN3_KV + QWEN3_WORKSPACE + QWEN3_VECTORS + 512 * MIB
    assert fixed == 8_015_110_144
    assert found.num_slots == 288 == (10 * GIB - fixed) // QWEN3_EXPERT
    assert found.rows == (
        ("weights without experts", QWEN3_WEIGHTS),
        ("KV cache of 1 x 40960 tokens", 4_026_531_840),
        ("workspace of a prefill step", 304 * MIB),
        ("default vectors", 24 * MIB),
        ("reserve", 512 * MIB),
        ("288 expert slots of 9.00 MiB", 288 * QWEN3_EXPERT),
        ("not used", 10 * GIB - fixed - 288 * QWEN3_EXPERT),
    )
    assert found.minimum_slots == 16
    assert found.num_experts == 48 * 128
    assert not found.fits_resident


def test_a_second_run_takes_its_part() -> None:
    """Its slots, one layer's experts fetched on demand, and twice what 8 experts of 48 layers compute; or that once."""
    for kind, wanted, gone in (("slots", 8 * QWEN3_EXPERT + 3 * MIB, 8), ("reference", 3 * MIB // 2, 0)):
        found = plan_qwen3(10 * GIB, check=kind)
        assert dict(found.rows)[f"--check {kind}"] == wanted
        assert plan_qwen3(10 * GIB).num_slots - found.num_slots in (gone, gone + 1)
    speculated = plan_qwen3(10 * GIB, check="slots", policy=resolve("router-pf"))
    assert dict(speculated.rows)["--check slots"] == 16 * QWEN3_EXPERT + 3 * MIB


def test_tiny_by_hand() -> None:
    assert TINY_WEIGHTS == 117_632
    assert TINY_EXPERT == 6 * KIB
    found = plan_tiny(TINY_FIXED + 5 * TINY_EXPERT + 100)
    assert (found.num_slots, found.minimum_slots, found.num_experts) == (5, 2, 8)
    assert dict(found.rows) == {
        "weights without experts": TINY_WEIGHTS,
        "KV cache of 1 x 128 tokens": 64 * KIB,
        "workspace of a prefill step": 512 * KIB,
        "reserve": 64 * MIB,
        "5 expert slots of 6.00 KiB": 5 * TINY_EXPERT,
        "not used": 100,
    }


@pytest.mark.parametrize("num_bytes", [8 * GIB, 20 * GIB, 300 * GIB])
@pytest.mark.parametrize("options", [{}, {"batch": 4, "max_context": 4096}, {"expert_slots": "16"}])
def test_rows_add_up_to_the_budget(num_bytes: int, options: dict[str, Any]) -> None:
    found = plan_qwen3(num_bytes, **options)
    assert sum(size for _, size in found.rows) == num_bytes
    assert all(size >= 0 for _, size in found.rows)
    assert found.minimum_slots <= found.num_slots <= found.num_experts


def test_a_short_context_has_a_small_workspace() -> None:
    """The prefill chunk is fixed, but no prompt is longer than the context."""
    rows = dict(plan_qwen3(20 * GIB, max_context=512).rows)
    assert rows["workspace of a prefill step"] == QWEN3_WORKSPACE // 8
    assert dict(plan_qwen3(20 * GIB, max_context=8192).rows)["workspace of a prefill step"] == QWEN3_WORKSPACE


def test_minimum_slots() -> None:
    def least(batch: int = 1, preset: str = "exact", **overrides: Any) -> int:
        return minimum_slots(QWEN3, resolve(preset, **overrides), batch)

    assert least(preset="on-demand") == 8
    assert least() == least(preset="router-pf") == 16
    assert least(lookahead=3) == 32
    assert least(candidates=4) == 20
    assert least(lookahead=2, candidates=4) == 28
    assert least(batch=4, preset="on-demand") == 32
    assert least(batch=4, candidates=4) == 32 + 48
    assert least(batch=100, preset="on-demand") == 128  # no layer has more
    assert least(batch=100, candidates=4) == 256
    assert minimum_slots(TINY, resolve("exact", lookahead=3, candidates=2)) == 8  # all there are


def test_no_more_slots_than_experts() -> None:
    found = plan_qwen3(100 * GIB)
    assert found.num_slots == 6144
    assert dict(found.rows)["not used"] > 30 * GIB


def test_slots_that_are_asked_for() -> None:
    assert plan_qwen3(20 * GIB, expert_slots="512").num_slots == 512
    assert plan_qwen3(20 * GIB, expert_slots="12.5%").num_slots == 768
    assert plan_qwen3(80 * GIB, expert_slots="100%").num_slots == 6144
    for none in ("0", "0.01%"):
        with pytest.raises(InputError, match=rf"^--expert-slots {none} hold no expert; use 1 or more$"):
            plan_qwen3(20 * GIB, expert_slots=none)
    with pytest.raises(InputError, match=r"^--candidates 121 is more than .*; use 120 or less$"):
        plan_qwen3(20 * GIB, policy=resolve("exact", candidates=121))


@pytest.mark.parametrize("slots", [1, 7, 8, 15, 16])
@pytest.mark.parametrize("preset", ["on-demand", "exact", "router-pf"])
def test_fewer_slots_than_the_minimum_if_asked_for(slots: int, preset: str) -> None:
    """One line says what they cost."""
    found = plan_qwen3(20 * GIB, expert_slots=str(slots), policy=resolve(preset))
    assert (found.num_slots, found.layer_slots) == (slots, 8)
    remark = "".join(found.lines()[len(found.rows) + 2 :])
    assert ("runs in waves, which is slower" in remark) == (slots < 8)
    assert ("not all that is foretold is prefetched, which is slower" in remark) == (8 <= slots < found.minimum_slots)
    assert plan_qwen3(20 * GIB, expert_slots="16", policy=ON_DEMAND, batch=4).layer_slots == 32


def test_the_division_alone_keeps_to_the_minimum() -> None:
    """Fewer slots than the minimum are advice, and it suffices."""
    fixed = QWEN3_WEIGHTS + 2 * QWEN3_KV + QWEN3_WORKSPACE // 2048 + 512 * MIB
    with pytest.raises(InputError, match=r"use --expert-slots 7, which is slower, or --embedding host$"):
        plan_qwen3(fixed + 7 * QWEN3_EXPERT, max_context=2, policy=ON_DEMAND)
    assert plan_qwen3(fixed + 7 * QWEN3_EXPERT, max_context=2, policy=ON_DEMAND, expert_slots="7").num_slots == 7
    assert plan_qwen3(fixed + 8 * QWEN3_EXPERT, max_context=2, policy=ON_DEMAND).num_slots == 8


def test_bytes_for_kv_caches() -> None:
    """What nothing else uses is theirs, too."""
    assert plan_tiny(TINY_FIXED + 5 * TINY_EXPERT + 100).cache_bytes == 64 * KIB + 100
    assert plan_tiny(TINY_FIXED + 10 * TINY_EXPERT, policy=RESIDENT).cache_bytes == 64 * KIB + 2 * TINY_EXPERT


def test_fits_to_the_byte() -> None:
    assert plan_tiny(TINY_FIXED + 2 * TINY_EXPERT).num_slots == 2
    assert plan_tiny(TINY_FIXED + 2 * TINY_EXPERT, expert_slots="2").num_slots == 2
    with pytest.raises(InputError, match="out of memory"):
        plan_tiny(TINY_FIXED + 2 * TINY_EXPERT - 1)
    with pytest.raises(InputError, match="out of memory"):
        plan_tiny(TINY_FIXED + 3 * TINY_EXPERT - 1, expert_slots="3")
    everything = TINY_FIXED + 8 * TINY_EXPERT
    assert plan_tiny(everything).fits_resident
    assert not plan_tiny(everything - 1).fits_resident
    assert plan_tiny(everything, policy=EXACT).fits_resident  # which needs no room for default vectors


def test_resident() -> None:
    found = plan_tiny(TINY_FIXED + 8 * TINY_EXPERT, policy=RESIDENT)
    assert (found.num_slots, found.minimum_slots, found.fits_resident) == (0, 0, True)
    assert dict(found.rows)["all 8 experts"] == 8 * TINY_EXPERT
    assert dict(found.rows)["not used"] == 0
    with pytest.raises(InputError, match="use --policy exact, which needs room for few") as caught:
        plan_qwen3(20 * GIB, policy=RESIDENT)
    assert "all 6144 experts 54.00 GiB" in str(caught.value)
    with pytest.raises(InputError, match=r"^--expert-slots has no effect with --policy resident"):
        plan_tiny(GIB, policy=RESIDENT, expert_slots="4")


def test_a_model_without_experts() -> None:
    assert plan(DENSE, torch.float32, CPU, RESIDENT, of(GIB), 128).fits_resident
    with pytest.raises(ConfigError, match="has no routed experts"):
        plan(DENSE, torch.float32, CPU, EXACT, of(GIB), 128)


@pytest.mark.parametrize("gib", [2, 5, 7, 7.4])
@pytest.mark.parametrize("expert_slots", [None, "25%"])
def test_too_small_is_one_line_whose_every_advice_suffices(gib: int, expert_slots: str | None) -> None:
    budget = of(int(gib * GIB), limit=30 * GIB)
    with pytest.raises(InputError) as caught:
        plan_qwen3(0, budget=budget, expert_slots=expert_slots)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("out of memory: ")
    assert f"and {gib:.2f} GiB are given with --gpu-memory; use " in message
    assert "weights without experts 2.89 GiB" in message
    advice = message.partition("; use ")[2]
    larger = re.search(r"--gpu-memory ([\d.]+)GiB or more", advice)
    assert larger is not None
    enough = int(float(larger[1]) * GIB)
    plan_qwen3(enough, expert_slots=expert_slots)
    with pytest.raises(InputError):
        plan_qwen3(enough - 20 * MIB, expert_slots=expert_slots)
    if "--embedding host" in advice:
        plan_qwen3(0, budget=budget, expert_slots=expert_slots, storage=Storage(embedding_on_host=True))
    context = re.search(r"--max-context (\d+) or less", advice)
    assert (context is not None) == (expert_slots is None and gib > 3)
    if context is not None:
        plan_qwen3(0, budget=budget, max_context=int(context[1]))
        with pytest.raises(InputError):
            plan_qwen3(0, budget=budget, max_context=int(context[1]) + 1)


def test_advice_of_fewer_slots_or_another_policy() -> None:
    with pytest.raises(InputError) as caught:
        plan_qwen3(10 * GIB, expert_slots="25%")
    assert str(caught.value).endswith("free on the GPU; use --expert-slots 288 or fewer")
    at_least = QWEN3_WEIGHTS + 2 * QWEN3_KV + QWEN3_WORKSPACE // 2048 + QWEN3_VECTORS + 512 * MIB
    with pytest.raises(InputError, match=r"use --expert-slots 15, which is slower, or --policy on-demand, which pref"):
        plan_qwen3(at_least + 15 * QWEN3_EXPERT, max_context=2)
    with pytest.raises(InputError, match=r"use a smaller model or another --device$"):
        plan_qwen3(GIB)
    with pytest.raises(InputError, match="free in main memory; use --dtype bfloat16, or a smaller model"):
        plan_tiny(MIB)


def test_table() -> None:
    assert plan_qwen3(10 * GIB).lines() == [
        "10.00 GiB on the GPU, divided into",
        "  weights without experts         2.89 GiB",
        "  KV cache of 1 x 40960 tokens    3.75 GiB",
        "  workspace of a prefill step   304.00 MiB",
        "  default vectors                24.00 MiB",
        "  reserve                       512.00 MiB",
        "  288 expert slots of 9.00 MiB    2.53 GiB",
        "  not used                        4.20 MiB",
        "  slots for 4.69 % of 6144 experts; the minimum is 16",
    ]
    lines = plan_tiny(GIB, policy=RESIDENT).lines()
    assert lines[0] == "1.00 GiB in main memory, divided into"
    assert not any("slots" in line for line in lines)


def test_sizes() -> None:
    found = [format_bytes(size) for size in (0, 1023, 1536, 9 * MIB, 54 * GIB, 5000 * GIB)]
    assert found == ["0 B", "1023 B", "1.50 KiB", "9.00 MiB", "54.00 GiB", "5000.00 GiB"]


def test_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "available_bytes", lambda device: 20 * GIB)
    assert read_budget(None, GPU, store_bytes=54 * GIB) == Budget(20 * GIB, 20 * GIB, 20 * GIB)
    assert read_budget("auto", GPU) == read_budget(None, GPU)
    assert read_budget("10GiB", GPU) == Budget(10 * GIB, 20 * GIB, 10 * GIB)
    for text, expected in {
        "80%": 16 * GIB,
        "100 %": 20 * GIB,
        "0.5%": GIB // 10,
        "1.5gib": 3 * GIB // 2,
        "10 GB": 10**10,
        "4096MiB": 4 * GIB,
        "1048576 B": MIB,
    }.items():
        assert read_budget(text, GPU).num_bytes == expected
    # On a CPU the host's copy of the experts lies in the same memory; a resident run has none.
    assert read_budget(None, CPU, store_bytes=5 * GIB) == Budget(15 * GIB, 15 * GIB, 20 * GIB)
    assert read_budget("50%", CPU, store_bytes=5 * GIB).num_bytes == 15 * GIB // 2
    assert read_budget(None, CPU, store_bytes=50 * GIB).num_bytes == 0


@pytest.mark.parametrize("text", ["", "ten", "10", "10G", "-1GiB", "10GiB%", "1e3MiB", "٣GiB", "%", "9" * 5000 + "B"])
def test_budget_not_understood(text: str) -> None:
    with pytest.raises(InputError, match=r"^--gpu-memory .* is not understood; use a size such as 10GiB, or a share"):
        read_budget(text, CPU)


@pytest.mark.parametrize("text", ["0%", "0GiB", "101%", "21GiB"])
def test_budget_out_of_range(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "available_bytes", lambda device: 20 * GIB)
    with pytest.raises(InputError, match=rf"^--gpu-memory {text} is .*; it must be above 0 and at most the 20.00 GiB"):
        read_budget(text, GPU)


def test_slots_option() -> None:
    assert read_slots("512", 6144) == 512
    assert read_slots(" 25% ", 6144) == 1536
    assert read_slots("4%", 6144) == 245
    assert read_slots("29%", 100) == 29  # in floating point 28.999…
    assert read_slots("100 %", 8) == 8
    assert read_slots("0", 8) == 0  # for the plan to refuse
    for text in ("", "many", "-3", "1.5", "25 percent", "1e2", "0x10", "9" * 5000):
        with pytest.raises(InputError, match=r"^--expert-slots .* is not understood; use a number such as 512"):
            read_slots(text, 8)
    for text in ("9", "101%"):
        with pytest.raises(InputError, match=rf"^--expert-slots {text} is more than the model's 8 experts"):
            read_slots(text, 8)
