"""Sampling: filters against transformers, the random numbers against Triton's, and the drawn distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tritonmoe.errors import InputError
from tritonmoe.generation.sampling import SamplingParams, sample, uniform

HUGE = 1 << 20


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    assert sample(torch.tensor([0.0, 3.0, 3.0, 1.0]), SamplingParams(), [], 5) == 1


def test_uniform_is_philox() -> None:
    """Known answer of Random123 for Philox-4x32-10: zero key and counter give 0x6627e8d5 as the first word."""
    assert uniform(0, 0) == pytest.approx(0x6627E8D5 * 4.6566127342e-10, rel=1e-7)
    draws = [uniform(7, i) for i in range(4000)]
    assert 0 <= min(draws) < 0.01
    assert 0.99 < max(draws) < 1
    assert np.mean(draws) == pytest.approx(0.5, abs=0.02)
    assert uniform(7, 3) != uniform(8, 3)
    assert uniform(1 << 40, 3) != uniform(0, 3)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0])
    params = SamplingParams(temperature=0.7, seed=3)
    count = 4000
    drawn = np.bincount([sample(logits, params, [], i) for i in range(count)], minlength=4) / count
    expected = (logits / 0.7).softmax(-1).numpy()
    assert np.abs(drawn - expected).max() < 4 * math.sqrt(0.25 / count)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.0, "top_p": 0.0001},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3},
        {"temperature": 1.0, "top_k": HUGE},
    ],
)
def test_filters_keep_what_transformers_keeps(options: dict[str, Any]) -> None:
    """Every candidate transformers leaves is drawn with its probability, and no other one."""
    pytest.importorskip("transformers")
    from transformers.generation import logits_process as hf

    torch.manual_seed(0)
    logits, history = 3 * torch.randn(50), [1, 4, 4, 9]
    scores = logits[None].clone()
    if "repetition_penalty" in options:
        scores = hf.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"])(torch.tensor([history]), scores)
    scores = scores / options["temperature"]
    if "top_k" in options:
        scores = hf.TopKLogitsWarper(options["top_k"])(torch.tensor([history]), scores)
    if "top_p" in options:
        scores = hf.TopPLogitsWarper(options["top_p"])(torch.tensor([history]), scores)
    if "min_p" in options:
        scores = hf.MinPLogitsWarper(options["min_p"])(torch.tensor([history]), scores)
    expected = scores[0].double().softmax(-1).numpy()
    count = 3000
    params = SamplingParams(**options, seed=11)
    drawn = np.bincount([sample(logits, params, history, i) for i in range(count)], minlength=50) / count
    assert not drawn[expected == 0].any()
    assert np.abs(drawn - expected).max() < 4 * math.sqrt(0.25 / count)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"max_new_tokens": 0},
        {"max_new_tokens": 10**12},
        {"max_new_tokens": True},
        {"seed": -1},
        {"stop": ("",)},
        {"stop": "text"},
    ],
)
def test_bad_values_are_refused_by_option_name(options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**options)
    assert next(iter(options)).replace("_", "-") in str(caught.value)
