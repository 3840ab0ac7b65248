"""Arithmetic of tile sizes on the host. Triton's own functions serve kernels too, for which each call takes 4 us."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, for n from 1."""
    return 1 << (n - 1).bit_length()
