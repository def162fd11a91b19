"""Block tables: packed ids and truncation from the tail."""

from __future__ import annotations

import pytest

from kvstore.block_table import BlockTable, blocks_for
from pagemill.ids import BEHIND, BlockId, unpack_ids


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


def test_entries_behind_a_window_keep_their_places_and_are_never_returned_again() -> None:
    table = BlockTable()
    table.extend([BlockId(block) for block in range(5)])
    assert table.leave_behind(2) == [0, 1]
    assert table.leave_behind(3) == [2]
    assert table.leave_behind(1) == []
    assert (list(table), list(table.live()), table.num_behind) == ([BEHIND, BEHIND, BEHIND, 3, 4], [3, 4], 3)
    assert table.truncate(4) == [4]
    assert table.truncate(2) == [3]
    assert (list(table), table.num_behind) == ([BEHIND, BEHIND], 2)
    assert (table.truncate(0), table.num_behind) == ([], 0)


def test_a_table_is_extended_by_entries_that_are_behind_only_if_all_others_are() -> None:
    table = BlockTable()
    table.append(BlockId(7))
    with pytest.raises(ValueError, match="cannot be behind"):
        table.extend_behind(1)
    assert table.leave_behind(5) == [7]
    table.extend_behind(2)
    table.append(BlockId(8))
    assert (list(table), table.num_behind) == ([BEHIND] * 3 + [8], 3)
