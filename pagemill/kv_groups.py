"""Which layers share a block table, and how many blocks a sequence needs where layers look back differently far. Pure arithmetic.

Layers that see the whole context need every block. Layers with a window of w positions need, to compute position p,
the keys and values of p - w + 1 to p: blocks that lie wholly before that are behind the window, and free. The
launcher plans memory with this, the scheduler accounts with it, workers check what they are sent against it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from pagemill.messages.sequences import KvGroup


class PoolCapacity(NamedTuple):
    """What a KV pool holds if all its sequences are of one length."""

    tokens: int  #: places for them, in whole blocks
    sequences: float


def group_layers(windows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The layers of each group, those that see everything first; `windows[i]` is the window of decoder layer i, 0 for none.

    Layers of a group are of one kind, and all groups are as large as the kind that has the fewest layers, so that
    blocks of all groups have the same bytes. The last group of a kind may be smaller: then it leaves bytes unused.
    """
    kinds = {window: [layer for layer, its_own in enumerate(windows) if its_own == window] for window in sorted(set(windows))}
    size = min(map(len, kinds.values()))
    return tuple(tuple(layers[first : first + size]) for layers in kinds.values() for first in range(0, len(layers), size))


def kv_groups(windows: Sequence[int]) -> tuple[KvGroup, ...]:
    """The groups that `group_layers` makes, in its order."""
    return tuple(KvGroup(window=windows[layers[0]]) for layers in group_layers(windows))


def first_live_block(group: KvGroup, position: int, block_size: int) -> int:
    """The index of the first block that computing `position`, or any position after it, reads."""
    return max(0, position - group.window + 1) // block_size if group.window else 0


def peak_blocks(groups: Sequence[KvGroup], num_tokens: int, block_size: int, chunk: int) -> int:
    """Blocks over all groups that a sequence of `num_tokens` positions holds at most, computed `chunk` positions at a time."""
    return sum(_peak_blocks(group, num_tokens, block_size, chunk) for group in groups)


def longest_sequence(groups: Sequence[KvGroup], num_blocks: int, block_size: int, limit: int) -> int:
    """The most positions, up to `limit`, that one sequence can have in a pool of so many blocks, computed one at a time if need be."""
    return bisect_right(range(limit + 1), num_blocks, key=lambda num_tokens: peak_blocks(groups, num_tokens, block_size, chunk=1)) - 1


def pool_capacity(groups: Sequence[KvGroup], num_blocks: int, block_size: int, num_tokens: int) -> PoolCapacity:
    """What so many blocks hold of sequences of `num_tokens` positions, computed one at a time if need be.

    Every position takes a place in each group without a window, but only the last ones take one in a group with a window.
    """
    one_sequence, whole = peak_blocks(groups, num_tokens, block_size, chunk=1), -(-num_tokens // block_size)
    return PoolCapacity(tokens=num_blocks * block_size * whole // one_sequence, sequences=num_blocks / one_sequence)


def _peak_blocks(group: KvGroup, num_tokens: int, block_size: int, chunk: int) -> int:
    whole = -(-num_tokens // block_size)
    if not group.window:
        return whole
    # A run of this many positions, wherever it begins within a block.
    in_use = group.window - 1 + chunk
    return min(whole, (in_use + block_size - 2) // block_size + 1)
