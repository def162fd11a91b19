"""The prefix index: one key, one block."""

from __future__ import annotations

import pytest

from kvstore.prefix_index import PrefixIndex
from pagemill.ids import BlockId


def test_the_first_block_of_a_key_wins() -> None:
    index = PrefixIndex[BlockId]()
    assert index.insert(b"k", BlockId(1))
    assert not index.insert(b"k", BlockId(2))
    assert index.find(b"k") == 1
    assert BlockId(2) not in index


def test_a_block_stands_for_one_prefix_only() -> None:
    index = PrefixIndex[BlockId]()
    index.insert(b"k", BlockId(1))
    with pytest.raises(ValueError, match="another prefix"):
        index.insert(b"l", BlockId(1))


def test_a_run_ends_at_the_first_key_without_a_block() -> None:
    index = PrefixIndex[BlockId]()
    for number, key in enumerate((b"a", b"b", b"d")):
        index.insert(key, BlockId(number))
    assert index.find_run([b"a", b"b", b"c", b"d"]) == [0, 1]
    assert index.find_run([b"c"]) == []


def test_removing_forgets_both_directions_and_is_idempotent() -> None:
    index = PrefixIndex[BlockId]()
    index.insert(b"k", BlockId(1))
    index.remove(BlockId(1))
    index.remove(BlockId(1))
    assert index.find(b"k") is None
    assert index.key_of(BlockId(1)) is None
    assert len(index) == 0
