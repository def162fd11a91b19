"""Rows are a pure function of what was sent, and nothing out of range becomes an index."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from pagemill.ids import BEHIND, PlanId, pack_ids
from pagemill.messages.sequences import KvGroup, SamplingParams
from pagemill.messages.worker import InstallRow, Slice
from tests.helpers.plans import install, piece, plan
from workers.rows import INVALID_INPUT, Row, RowBounds, RowTable

BOUNDS = RowBounds(vocab_size=100, num_blocks=8, block_size=4, max_model_len=24, groups=(KvGroup(),))
#: A window of five positions: computing position p needs what lies from p - 4 on.
HYBRID = replace(BOUNDS, groups=(KvGroup(), KvGroup(window=5)))


def table_with(*messages: InstallRow) -> RowTable:
    table = RowTable(BOUNDS)
    for message in messages:
        table.install(message)
    return table


def test_a_row_holds_what_was_installed() -> None:
    row = Row(install(0, [1, 2, 3], [7, 5], num_prompt_tokens=2, seed=9), BOUNDS)
    assert row.error == ""
    assert row.token_ids == array("i", [1, 2, 3])
    assert row.block_tables == (array("i", [7, 5]),)
    assert (row.sampling.seed, row.sampling.num_prompt_tokens) == (9, 2)


def test_slices_extend_history_and_tables() -> None:
    table = table_with(install(0, [1, 2, 3], [7]))
    (row,) = table.apply(plan(piece(0, 3, 2, new_tokens=[4, 5], new_blocks=[2])))
    assert row.error == ""
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert row.block_tables[0].tolist() == [7, 2]


def test_a_row_sent_in_pieces_equals_one_installed_whole() -> None:
    pieces = table_with(install(0, [1, 2, 3], [7]))
    pieces.apply(plan(piece(0, 3, 1, new_tokens=[4])))
    (grown,) = pieces.apply(plan(piece(0, 4, 1, new_tokens=[5], new_blocks=[2])))
    (whole,) = table_with(install(0, [1, 2, 3, 4, 5], [7, 2], num_prompt_tokens=3)).apply(plan(piece(0, 4, 1)))
    assert (grown.token_ids, grown.block_tables) == (whole.token_ids, whole.block_tables)
    assert grown.sampling == whole.sampling


@pytest.mark.parametrize("wanted", [piece(1, 0, 3), piece(0, 0, 3, version=2)], ids=["unknown number", "other version"])
def test_an_unknown_row_is_missing(wanted: Slice) -> None:
    assert table_with(install(0, [1, 2, 3], [7])).missing(plan(piece(0, 0, 3), wanted)) is wanted


def test_known_rows_are_not_missing() -> None:
    assert table_with(install(0, [1], [7]), install(1, [1], [3])).missing(plan(piece(0, 0, 1), piece(1, 0, 1))) is None


def test_released_rows_are_dropped_unless_the_plan_uses_them() -> None:
    table = table_with(install(0, [1], [7]), install(1, [1], [3]))
    table.apply(plan(piece(1, 0, 1), released=[0, 1, 5]))
    assert len(table) == 1
    assert table.missing(plan(piece(1, 0, 1))) is None


def test_a_reused_number_forgets_its_former_holder() -> None:
    table = table_with(install(0, [1, 2, 3], [7]), install(0, [9], [3], version=2))
    (row,) = table.apply(plan(piece(0, 0, 1, version=2)))
    assert (row.token_ids.tolist(), row.block_tables[0].tolist()) == ([9], [3])


@pytest.mark.parametrize(
    "message",
    [
        install(0, [1, 100], [7]),
        install(0, [1, -1], [7]),
        install(0, [1, 2], [8]),
        install(0, [1, 2], [-1]),
        install(0, [1, 2], [7], num_prompt_tokens=3),
        install(0, [1, 2], [7], num_prompt_tokens=0),
        install(0, [], [7]),
        install(0, [1, 2], [7], seed=2**64),
        install(0, [1, 2], [7], seed=-1),
        install(0, [1, 2], [7], sampling=SamplingParams(stop_token_ids=(100,), min_tokens=1)),
        install(0, [1, 2], [7], sampling=SamplingParams(stop_token_ids=(-1,))),
        install(0, [1, 2], [7], sampling=SamplingParams(logit_bias=((100, 1.0),))),
        install(0, [1, 2], [7], sampling=SamplingParams(logit_bias=((1, math.nan),))),
        install(0, [1, 2], [7], sampling=SamplingParams(temperature=math.inf)),
        install(0, [1, 2], [7], sampling=SamplingParams(top_p=math.nan)),
        install(0, [1, 2], [7], sampling=SamplingParams(min_p=1.5)),
        install(0, [1, 2], [7], sampling=SamplingParams(min_p=math.nan)),
        install(0, [1, 2], [7], sampling=SamplingParams(repetition_penalty=0.0)),
        install(0, [1, 2], [7], sampling=SamplingParams(presence_penalty=-math.inf)),
        msgspec.structs.replace(install(0, [1, 2], [7]), token_ids=b"\1\0\0"),
        msgspec.structs.replace(install(0, [1, 2], [7]), block_tables=(b"\1\0\0\0\0",)),
        msgspec.structs.replace(install(0, [1, 2], [7]), block_tables=()),
        msgspec.structs.replace(install(0, [1, 2], [7]), block_tables=(pack_ids([7]), pack_ids([6]))),
    ],
)
def test_whatever_is_out_of_range_in_a_row_fails_that_row_alone(message: InstallRow) -> None:
    table = table_with(message, install(1, [1, 2], [3]))
    no_news = msgspec.structs.replace(piece(0, 0, 1, sample=False), new_block_ids=())
    bad, good = table.apply(plan(no_news, piece(1, 0, 2)))
    assert (bad.error, good.error) == (INVALID_INPUT, "")


@pytest.mark.parametrize("version", [3, 2], ids=["sent twice", "sent late"])
def test_a_row_is_replaced_only_by_a_newer_version(version: int) -> None:
    table = table_with(install(0, [1, 2, 3], [7], version=3))
    table.apply(plan(piece(0, 3, 1, version=3, new_tokens=[4])))
    assert not table.install(install(0, [9], [2], version=version))
    (row,) = table.apply(plan(piece(0, 3, 1, version=3)))
    assert (row.error, row.token_ids.tolist()) == ("", [1, 2, 3, 4])
    assert table.install(install(0, [9], [2], version=4))


def test_two_slices_of_one_row_in_a_plan_fail_both() -> None:
    table = table_with(install(0, [1, 2, 3], [7]), install(1, [1, 2], [3]))
    first, second, other = table.apply(plan(piece(0, 0, 2, sample=False), piece(0, 2, 1), piece(1, 0, 2)))
    assert (first.error, second.error, other.error) == (INVALID_INPUT, INVALID_INPUT, "")


@pytest.mark.parametrize(
    "bad_piece",
    [
        piece(0, -1, 2, sample=False),
        piece(0, 0, 0, sample=False),
        piece(0, 0, -1, sample=False),
        piece(0, 1, 3),
        piece(0, 3, 1, new_tokens=[100]),
        piece(0, 3, 1, new_tokens=[-1]),
        piece(0, 3, 1, new_tokens=[4], new_blocks=[8]),
        piece(0, 3, 2, new_tokens=[4, 5]),
        piece(0, 0, 2, sample=True),
        msgspec.structs.replace(piece(0, 2, 1), new_block_ids=(b"", b"")),
    ],
    ids=["negative start", "no token", "negative count", "past the history", "token too large", "token negative", "block too large",
         "past the blocks", "sample before the end", "two tables for one group"],
)  # fmt: skip
def test_whatever_is_out_of_range_in_a_slice_fails_that_row_alone(bad_piece: Slice) -> None:
    table = table_with(install(0, [1, 2, 3], [7]), install(1, [1, 2], [3]))
    bad, good = table.apply(plan(bad_piece, piece(1, 0, 2)))
    assert (bad.error, good.error) == (INVALID_INPUT, "")


def test_a_position_past_the_model_length_fails() -> None:
    table = table_with(install(0, [1] * 25, list(range(7))))
    (row,) = table.apply(plan(piece(0, 24, 1)))
    assert row.error == INVALID_INPUT


def test_the_token_of_an_earlier_plan_can_be_named_by_that_plan() -> None:
    table = table_with(install(0, [1, 2, 3], [7]))
    (row,) = table.apply(plan(piece(0, 0, 3), plan_id=4))
    row.drawn = (PlanId(4), 42)
    (row,) = table.apply(plan(piece(0, 3, 1, after_plan=PlanId(4)), plan_id=5))
    assert row.error == ""
    assert row.token_ids.tolist() == [1, 2, 3, 42]


def test_a_slice_whose_token_was_never_drawn_is_deferred_and_leaves_the_row_sound() -> None:
    table = table_with(install(0, [1, 2, 3], [7]))
    waiting = piece(0, 3, 1, after_plan=PlanId(4), new_blocks=[2])
    (row,) = table.apply(plan(waiting, plan_id=5))
    assert row.is_deferred(waiting)
    assert (row.error, row.token_ids.tolist()) == ("", [1, 2, 3])
    assert row.block_tables[0].tolist() == [7, 2], "blocks are the row's, whatever becomes of the slice"
    after_it = piece(0, 4, 1, after_plan=PlanId(5))
    table.apply(plan(after_it, plan_id=6))
    assert row.is_deferred(after_it), "what follows a deferred slice is deferred as well"
    literal = piece(0, 3, 2, new_tokens=[4, 5])
    table.apply(plan(literal, plan_id=7))
    assert (row.error, row.token_ids.tolist(), row.is_deferred(literal)) == ("", [1, 2, 3, 4, 5], False)


def test_a_token_is_that_of_the_plan_named_and_of_no_earlier_one() -> None:
    table = table_with(install(0, [1, 2, 3], [7]))
    (row,) = table.apply(plan(piece(0, 0, 3), plan_id=4))
    row.drawn = (PlanId(4), 42)
    late = piece(0, 3, 1, after_plan=PlanId(5))
    table.apply(plan(late, plan_id=6))
    assert row.is_deferred(late)
    assert row.token_ids.tolist() == [1, 2, 3]


def test_a_deferred_slice_out_of_range_fails_as_any_other() -> None:
    (row,) = table_with(install(0, [1, 2, 3], [7])).apply(plan(piece(0, 3, 1, after_plan=PlanId(4), new_blocks=[8])))
    assert row.error == INVALID_INPUT


def hybrid_row(full: Sequence[int], window: Sequence[int], num_tokens: int = 20) -> Row:
    message = install(0, [1] * num_tokens, [])
    return Row(msgspec.structs.replace(message, block_tables=(pack_ids(list(full)), pack_ids(list(window)))), HYBRID)


def hybrid_piece(start: int, num_tokens: int, *new_blocks: Sequence[int]) -> Slice:
    return msgspec.structs.replace(piece(0, start, num_tokens, sample=False), new_block_ids=tuple(pack_ids(list(ids)) for ids in new_blocks))


@pytest.mark.parametrize(
    ("start", "num_behind", "error"),
    [(8, 1, ""), (7, 1, INVALID_INPUT), (11, 1, ""), (12, 2, ""), (11, 2, INVALID_INPUT), (16, 3, ""), (0, 1, INVALID_INPUT), (-1, 1, INVALID_INPUT)],
)
def test_only_what_lies_behind_the_window_of_a_slice_may_be_gone(start: int, num_behind: int, error: str) -> None:
    row = hybrid_row([0, 1, 2, 3, 4], [BEHIND] * num_behind + [5, 6, 7, 5, 6][num_behind:])
    row.apply(hybrid_piece(start, 2), HYBRID)
    assert row.error == error
    assert row.num_behind == [0, num_behind]


@pytest.mark.parametrize(
    ("full", "window"),
    [
        ([BEHIND, 1, 2, 3, 4], [0, 5, 6, 7, 5]),
        ([0, 1, 2, 3, 4], [5, BEHIND, 6, 7, 5]),
        ([0, 1, 2, 3, 4], [BEHIND, 5, BEHIND, 7, 5]),
        ([0, 1, 2, 3, 4], [-3, 5, 6, 7, 5]),
        ([0, 1, 2, 3, 4], [-1, 5, 6, 7, 5]),
        ([0, 1, 2, 3, 4], [BEHIND, 5, 6, 7, 8]),
        ([0, 1, 2, 3, 4], [BEHIND] * 5),
        ([0, 1, 2, 3, 4], [BEHIND] * 3 + [5]),
    ],
    ids=["in a full group", "behind a block", "again", "another number", "no block", "past the pool", "nothing but", "too few"],
)
def test_whatever_else_is_no_block_fails(full: list[int], window: list[int]) -> None:
    row = hybrid_row(full, window)
    row.apply(hybrid_piece(19, 1), HYBRID)
    assert row.error == INVALID_INPUT


def test_tables_of_a_window_grow_as_others_do_and_may_begin_late() -> None:
    row = hybrid_row([0, 1], [], num_tokens=16)
    row.apply(hybrid_piece(12, 3, [2, 3], [BEHIND, BEHIND, 4, 5]), HYBRID)
    assert (row.error, row.num_behind) == ("", [0, 2])
    assert row.block_tables[1].tolist() == [BEHIND, BEHIND, 4, 5]
    row.apply(hybrid_piece(15, 1, [], [BEHIND]), HYBRID)
    assert row.error == INVALID_INPUT, "nothing can be behind the window and ahead of what is being computed"


def test_a_prefix_found_later_leaves_what_was_known_before_it_behind() -> None:
    row = hybrid_row([0, 1], [5, 6])
    row.apply(hybrid_piece(16, 1, [2, 3, 4], [BEHIND, 7, 5]), HYBRID)
    assert row.num_behind == [0, 3]
    assert row.block_tables[1].tolist() == [BEHIND, BEHIND, BEHIND, 7, 5]
    assert row.block_tables[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("tables", [(), (pack_ids([0]),), (pack_ids([0]), pack_ids([BEHIND]), pack_ids([BEHIND])), (pack_ids([0]), pack_ids([BEHIND]) + b"\1")])
def test_tables_that_are_not_those_of_the_groups_fail_without_raising(tables: tuple[bytes, ...]) -> None:
    row = Row(msgspec.structs.replace(install(0, [1] * 3, []), block_tables=tables), HYBRID)
    row.apply(hybrid_piece(0, 3), HYBRID)
    assert row.error == INVALID_INPUT
