"""Rotary position embedding: the frequencies of each kind in the spec."""

from __future__ import annotations

import math

import torch

from tritonmoe.model.spec import RopeSpec, YarnSpec


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """Radians per position of each rotated pair, float32 [dim / 2] (arXiv 2104.09864; YaRN arXiv 2309.00071)."""
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    frequencies = 1.0 / spec.theta**exponent
    if spec.yarn is None:
        return frequencies / spec.linear_factor
    interpolated = frequencies / spec.yarn.factor
    ramp = _yarn_ramp(spec, spec.yarn)
    return interpolated * ramp + frequencies * (1.0 - ramp)


def _yarn_ramp(spec: RopeSpec, yarn: YarnSpec) -> torch.Tensor:
    """0 where a pair turns often enough over the original context to extrapolate, 1 where it is interpolated."""

    def pair_with(turns: float) -> float:
        ratio = yarn.original_max_position / (turns * 2 * math.pi)
        return spec.dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low if high != low else 0.001
    return ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
