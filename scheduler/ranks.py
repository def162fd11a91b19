"""Sets of tensor-parallel ranks as bits of an integer: who has not answered yet. Whoever speaks twice, or is none of them, is not in it."""

from __future__ import annotations


def all_ranks(num_ranks: int) -> int:
    return (1 << num_ranks) - 1


def includes(ranks: int, rank: int) -> bool:
    """`rank` may be any number: it comes in a message."""
    return rank >= 0 and bool(ranks >> rank & 1)


def without(ranks: int, rank: int) -> int:
    """`rank` is one of them."""
    return ranks & ~(1 << rank)
