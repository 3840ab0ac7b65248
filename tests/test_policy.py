"""Policies: what the presets are, what overrides make of them, and that nothing without effect is accepted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tritonmoe.checkpoint.architectures import parse_config
from tritonmoe.checkpoint.config_reader import read_json
from tritonmoe.errors import InputError
from tritonmoe.offload.policy import OPTIONS, PRESET_NAMES, PRESETS, Policy, resolve, should_host_plan
from tritonmoe_kernels.fetch_reference import RECORD_ALIGNMENT

CONFIGS = Path(__file__).parent.parent / "tools/bench/configs"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # preset, overrides, and what the line begins with: the option at fault
    (
        "fast",
        {},
        "--policy 'fast' is not known; use on-demand, exact, router-pf, est-pf, hybrid-pf, router-free or res",
    ),
    ("exact", {"predictor": "network"}, "--predict 'network' is not known"),
    ("exact", {"execute": "guessed"}, "--execute 'guessed' is not known; use routed or speculated"),
    ("router-pf", {"gate": "true"}, "--gate 'true' is not known"),
    ("exact", {"miss_fill": "zero"}, "--miss-fill 'zero' is not known"),
    ("exact", {"eviction": "fifo"}, "--eviction 'fifo' is not known; use lru or lfu"),
    ("exact", {"lookahead": 0}, "--lookahead must be an integer from 1 to 3, not 0"),
    ("exact", {"lookahead": 4}, "--lookahead must be an integer from 1 to 3, not 4"),
    ("exact", {"lookahead": True}, "--lookahead must be"),
    ("exact", {"lookahead": 1.0}, "--lookahead must be"),
    ("exact", {"candidates": -1}, "--candidates must be an integer from 0, not -1"),
    ("exact", {"candidates": 2.5}, "--candidates must be"),
    ("exact", {"miss_tolerance": 1.0}, "--miss-tolerance must be a number from 0 to below 1, not 1.0"),
    ("exact", {"miss_tolerance": -0.1}, "--miss-tolerance must be"),
    ("exact", {"miss_tolerance": float("nan")}, "--miss-tolerance must be"),
    ("exact", {"miss_tolerance": True}, "--miss-tolerance must be"),
    ("on-demand", {"execute": "speculated"}, "--execute speculated runs what a predictor ranks, and 'none' ranks"),
    ("exact", {"execute": "speculated", "predictor": "oracle"}, "--execute speculated runs"),
    ("router-pf", {"predictor": "previous-token"}, "--execute speculated runs"),
    ("router-pf", {"predictor": "none"}, "--execute speculated runs"),
    ("router-pf", {"candidates": 4}, "--candidates needs --execute routed"),
    ("router-pf", {"miss_tolerance": 0.1}, "--miss-tolerance needs --execute routed"),
    ("router-pf", {"miss_fill": "default-vector"}, "--miss-fill needs --execute routed"),
    ("exact", {"gate": "speculated"}, "--gate weights speculated experts; add --execute speculated"),
    ("exact", {"gate": "routed"}, "--gate weights speculated experts"),
    ("router-pf", {"execute": "routed", "gate": "speculated"}, "--gate weights speculated experts"),
    ("on-demand", {"lookahead": 2}, "--lookahead has no effect without a predictor"),
    ("on-demand", {"candidates": 1}, "--candidates needs a predictor that ranks all experts, which 'none' does not"),
    ("exact", {"candidates": 1, "predictor": "oracle"}, "--candidates needs a predictor that ranks all experts"),
    ("exact", {"candidates": 1, "predictor": "previous-token"}, "--candidates needs a predictor"),
    (
        "exact",
        {"predictor": "estimator", "lookahead": 2},
        "--lookahead above 1 needs --predict residual or quasi-hidden",
    ),
    ("router-free", {"execute": "routed"}, "--execute routed needs the routers that --policy router-free does without"),
    ("router-free", {"gate": "routed"}, "--gate routed needs the routers that --policy router-free does without"),
    ("router-free", {"predictor": "quasi-hidden"}, "--policy router-free needs --predict estimator or hybrid"),
    ("exact", {"cache_bias": -0.5}, "--cache-bias must be a number from 0 to 10000, not -0.5"),
    ("exact", {"cache_bias": float("inf")}, "--cache-bias must be"),
    ("exact", {"cache_bias": 1e39}, "--cache-bias must be"),
    ("exact", {"cache_bias": True}, "--cache-bias must be"),
    ("est-pf", {"cache_bias": 0.5}, "--cache-bias needs --execute routed"),
    ("exact", {"miss_fill": "default-vector"}, "--miss-fill has no effect without --miss-tolerance"),
]


def test_presets() -> None:
    assert resolve("on-demand") == Policy("on-demand", predictor="none", execute="routed", gate="routed")
    assert resolve("exact") == Policy("exact", predictor="quasi-hidden", execute="routed", gate="routed")
    assert resolve("router-pf") == Policy(
        "router-pf", predictor="quasi-hidden", execute="speculated", gate="speculated"
    )
    speculating = {"est-pf": "estimator", "hybrid-pf": "hybrid", "router-free": "estimator"}
    for name, predictor in speculating.items():
        policy = resolve(name)
        assert (policy.predictor, policy.execute, policy.gate) == (predictor, "speculated", "speculated")
        assert policy.is_router_free == (name == "router-free")
    assert resolve("resident") == Policy("resident")
    assert tuple(PRESETS) == PRESET_NAMES
    for policy in PRESETS.values():
        assert (policy.lookahead, policy.candidates, policy.miss_tolerance, policy.miss_fill) == (1, 0, 0.0, "none")
        assert policy.eviction == "lru"
        assert policy.is_exact == (policy.name not in ("router-pf", *speculating))
        assert policy.is_resident == (policy.name == "resident")


def test_overrides() -> None:
    policy = resolve("exact", predictor="residual", lookahead=3, candidates=8, eviction="lfu")
    assert policy == Policy("exact", predictor="residual", lookahead=3, candidates=8, eviction="lfu")
    biased = resolve("on-demand", cache_bias=0.5)
    assert not biased.is_exact
    assert not biased.uses_default_vectors
    assert resolve("est-pf", execute="routed") == Policy("est-pf", predictor="estimator")
    tolerant = resolve("on-demand", miss_tolerance=0.05, miss_fill="default-vector")
    assert not tolerant.is_exact
    assert tolerant.uses_default_vectors
    # The documented default of --gate is the true router's weights; only the preset has the paper's.
    assert resolve("exact", execute="speculated").gate == "routed"
    assert resolve("router-pf", gate="routed").gate == "routed"
    assert resolve("router-pf", execute="routed") == Policy("router-pf", predictor="quasi-hidden")
    # Values that say "off" are no mistake, whoever passes them on.
    assert resolve("router-pf", lookahead=1, candidates=0, miss_tolerance=0, miss_fill="none") == PRESETS["router-pf"]


@pytest.mark.parametrize(("preset", "overrides", "beginning"), REFUSED)
def test_refused_in_one_line_that_names_the_option(preset: str, overrides: dict[str, Any], beginning: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve(preset, **overrides)
    assert str(caught.value).startswith(beginning)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", OPTIONS)
def test_resident_takes_no_option(field: str) -> None:
    for value in (getattr(PRESETS["resident"], field), getattr(PRESETS["router-pf"], field)):
        with pytest.raises(InputError, match=rf"^{OPTIONS[field]} has no effect with --policy resident"):
            resolve("resident", **{field: value})
    with pytest.raises(InputError, match=r"^--eviction has no effect with --policy resident"):
        Policy("resident", eviction="lfu")


def test_every_combination_is_valid_or_refused() -> None:
    """Over the whole product: what is accepted has an effect throughout, and can be said in a line."""
    accepted = 0
    for preset, predictor, execute, gate, lookahead, candidates, tolerance, fill in itertools.product(
        PRESET_NAMES,
        (None, "none", "residual", "quasi-hidden", "estimator", "previous-token", "oracle"),
        (None, "routed", "speculated"),
        (None, "routed", "speculated"),
        (None, 2),
        (None, 4),
        (None, 0.1),
        (None, "default-vector"),
    ):
        try:
            policy = resolve(
                preset,
                predictor=predictor,
                execute=execute,
                gate=gate,
                lookahead=lookahead,
                candidates=candidates,
                miss_tolerance=tolerance,
                miss_fill=fill,
            )
        except InputError:
            continue
        accepted += 1
        given = {"predictor": predictor, "execute": execute, "gate": gate, "lookahead": lookahead}
        given |= {"candidates": candidates, "miss_tolerance": tolerance, "miss_fill": fill}
        assert all(getattr(policy, field) == value for field, value in given.items() if value is not None)
        assert "\n" not in str(policy)
        if policy.execute == "speculated":
            assert policy.predictor in ("residual", "quasi-hidden", "estimator", "hybrid")
            assert (policy.candidates, policy.miss_tolerance) == (0, 0.0)
        else:
            assert gate is None
        if policy.is_resident:
            assert set(given.values()) == {None}
    assert accepted > 100


def test_without_default_vectors() -> None:
    exact = resolve("exact", lookahead=2)
    assert exact.effective(has_default_vectors=True) == (exact, None)
    policy, line = exact.effective(has_default_vectors=False)
    assert policy == Policy("exact", predictor="residual", lookahead=2)
    assert line is not None
    assert "--predict quasi-hidden runs as residual" in line
    assert "\n" not in line
    assert resolve("router-pf").effective(False)[0].predictor == "residual"
    for policy in (resolve("on-demand"), resolve("exact", predictor="residual"), resolve("resident")):
        assert policy.effective(False) == (policy, None)
    filling = resolve("exact", miss_tolerance=0.1, miss_fill="default-vector")
    with pytest.raises(InputError, match=r"^--miss-fill default-vector needs the model's default vectors"):
        filling.effective(False)
    assert filling.effective(True) == (filling, None)


@pytest.mark.parametrize(("preset", "maker"), [("est-pf", "train_estimator.py"), ("hybrid-pf", "--choose-hybrid")])
def test_trained_predictors_need_their_file(preset: str, maker: str) -> None:
    policy = resolve(preset)
    with pytest.raises(InputError, match=f"^--predict {policy.predictor} needs a file made .* by .*{maker}"):
        policy.effective(True)
    assert policy.effective(True, [policy.predictor]) == (policy, None)
    assert policy.effective(False, [policy.predictor]) == (policy, None)  # trained without them, or refused by its file


def test_description() -> None:
    assert str(resolve("resident")) == "resident"
    assert str(resolve("on-demand")) == "on-demand: predict none, execute routed, eviction lru"
    assert str(resolve("router-pf")) == (
        "router-pf: predict quasi-hidden, lookahead 1, candidates 0, execute speculated (gate speculated), eviction lru"
    )
    assert "cache bias 0.5, eviction lru" in str(resolve("exact", cache_bias=0.5))
    assert "miss tolerance 0.1 (fill none)" in str(resolve("exact", miss_tolerance=0.1))


def test_the_host_plans_where_the_link_alone_decides() -> None:
    """48 layers that route 8 of 128 experts: 384 a step."""
    spec = parse_config(read_json(CONFIGS / "qwen3-30b-a3b.json"), "config.json")
    bf16, int4 = 9_437_184, 2_506_752
    for name in ("exact", "router-pf"):
        assert should_host_plan(spec, resolve(name), 16, bf16)
        assert should_host_plan(spec, resolve(name), 383, bf16)
        assert not should_host_plan(spec, resolve(name), 383, int4), "too short to hide the host's work behind"
        assert not should_host_plan(spec, resolve(name), 384, bf16), "slots keep some of the last step's"
        assert not should_host_plan(spec, resolve(name), 16, bf16, batch=2), "two sequences share experts"
        assert not should_host_plan(spec, resolve(name), 16, RECORD_ALIGNMENT), "the host is slower than such copies"
    assert not should_host_plan(spec, resolve("on-demand"), 16, bf16), "nothing to hide behind"
    assert not should_host_plan(spec, resolve("exact", eviction="lfu"), 16, bf16), "frequent experts stay"
