"""Arithmetic of what is launched. Triton's functions of these names unwrap constants: 6 us a call for 0.1."""

from __future__ import annotations


def cdiv(n: int, size: int) -> int:
    """How many of that size cover n."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n, which is positive."""
    return 1 << (n - 1).bit_length()
