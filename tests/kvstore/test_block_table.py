"""Block tables: packed ids and truncation from the tail."""

from __future__ import annotations

import pytest

from kvstore.block_table import BlockTable, blocks_for
from pagemill.messages import BlockId, unpack_ids


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for_rounds_up(num_tokens: int, expected: int) -> None:
    assert blocks_for(num_tokens, 16) == expected


def test_packed_ids_are_what_was_appended() -> None:
    table = BlockTable()
    for block in (7, 3, 2**31 - 1):
        table.append(BlockId(block))
    assert list(unpack_ids(table.packed())) == [7, 3, 2**31 - 1]
    assert list(unpack_ids(table.packed(2))) == [2**31 - 1]
    assert table.packed(3) == b""


def test_truncation_returns_the_tail_last_first() -> None:
    table = BlockTable()
    for block in range(5):
        table.append(BlockId(block))
    assert table.truncate(2) == [4, 3, 2]
    assert list(table) == [0, 1]
    assert table.truncate(2) == []
