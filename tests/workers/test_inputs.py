"""The tensors of a step, checked against sums done by hand and against a slow restatement."""

from __future__ import annotations

import random

import pytest
import torch
from msgspec.structs import replace

from pagemill.ids import BEHIND, pack_ids
from pagemill.messages.sequences import KvGroup
from tests.helpers.plans import install, piece
from workers.inputs import StepInputs, build_inputs
from workers.rows import Row, RowBounds

CPU = torch.device("cpu")


def bounds(block_size: int) -> RowBounds:
    return RowBounds(vocab_size=1000, num_blocks=500, block_size=block_size, max_model_len=1000, groups=(KvGroup(),))


def test_a_mixed_step_by_hand() -> None:
    rows = [
        Row(install(0, [10, 11, 12, 13, 14], [7, 3]), bounds(4)),  # prefill from 3 on
        Row(install(1, [20, 21, 22, 23, 24, 25, 26, 27, 28], [1, 0, 2]), bounds(4)),  # decode at 8
        Row(install(2, [30, 31], [5]), bounds(4)),  # whole prompt, not sampling
    ]
    inputs = build_inputs([piece(0, 3, 2), piece(1, 8, 1), piece(2, 0, 2, sample=False)], rows, bounds(4), CPU)
    assert inputs.token_ids.tolist() == [13, 14, 28, 30, 31]
    assert inputs.positions.tolist() == [3, 4, 8, 0, 1]
    assert inputs.groups[0].slot_mapping.tolist() == [7 * 4 + 3, 3 * 4, 2 * 4, 5 * 4, 5 * 4 + 1]
    assert inputs.query_start.tolist() == [0, 2, 3, 5]
    assert inputs.context_lens.tolist() == [5, 9, 2]
    assert inputs.groups[0].block_tables.tolist() == [[7, 3, 0], [1, 0, 2], [5, 0, 0]]
    assert inputs.sample_rows.tolist() == [1, 2]


def test_types_are_those_that_kernels_expect() -> None:
    inputs = build_inputs([piece(0, 0, 2)], [Row(install(0, [1, 2], [3]), bounds(4))], bounds(4), CPU)
    wide = (inputs.token_ids, inputs.positions, inputs.groups[0].slot_mapping, inputs.sample_rows)
    narrow = (inputs.query_start, inputs.context_lens, inputs.groups[0].block_tables)
    assert {tensor.dtype for tensor in wide} == {torch.int64}
    assert {tensor.dtype for tensor in narrow} == {torch.int32}
    assert all(tensor.is_contiguous() for tensor in wide + narrow)


def test_blocks_taken_ahead_are_not_in_the_table() -> None:
    inputs = build_inputs([piece(0, 0, 4)], [Row(install(0, [1, 2, 3, 4], [3, 9, 9]), bounds(4))], bounds(4), CPU)
    assert inputs.groups[0].block_tables.tolist() == [[3]]


def test_slots_beyond_32_bits_are_exact() -> None:
    limits = RowBounds(vocab_size=10, num_blocks=2**31 - 1, block_size=256, max_model_len=1000, groups=(KvGroup(),))
    inputs = build_inputs([piece(0, 0, 1)], [Row(install(0, [1], [2**31 - 2]), limits)], limits, CPU)
    assert inputs.groups[0].slot_mapping.tolist() == [(2**31 - 2) * 256]


def test_each_group_has_its_own_tables_and_slots() -> None:
    limits = RowBounds(vocab_size=1000, num_blocks=500, block_size=4, max_model_len=1000, groups=(KvGroup(), KvGroup(window=5)))
    first = replace(install(0, list(range(11)), []), block_tables=(pack_ids([7, 3, 9]), pack_ids([BEHIND, 4, 5])))
    second = replace(install(1, [1, 2, 3], []), block_tables=(pack_ids([1]), pack_ids([2])))
    inputs = build_inputs([piece(0, 9, 2), piece(1, 0, 3)], [Row(first, limits), Row(second, limits)], limits, CPU)
    full, window = inputs.groups
    assert full.block_tables.tolist() == [[7, 3, 9], [1, 0, 0]]
    assert window.block_tables.tolist() == [[0, 4, 5], [2, 0, 0]], "what lies behind a window has no number of its own"
    assert full.slot_mapping.tolist() == [9 * 4 + 1, 9 * 4 + 2, 4, 5, 6]
    assert window.slot_mapping.tolist() == [5 * 4 + 1, 5 * 4 + 2, 8, 9, 10]


def test_of_a_window_only_the_blocks_in_reach_are_copied_however_many_the_row_still_has() -> None:
    limits = RowBounds(vocab_size=1000, num_blocks=500, block_size=4, max_model_len=1000, groups=(KvGroup(), KvGroup(window=5)))
    blocks = list(range(1, 26))
    row = Row(replace(install(0, [1] * 100, []), block_tables=(pack_ids(blocks), pack_ids(blocks))), limits)
    full, window = build_inputs([piece(0, 90, 10)], [row], limits, CPU).groups
    assert full.block_tables.tolist() == [blocks]
    assert window.block_tables.tolist() == [[0] * 21 + blocks[21:]], "position 90 looks back to 86, which lies in block 21"
    assert window.slot_mapping.tolist() == full.slot_mapping.tolist() == [*range(23 * 4 + 2, 26 * 4)]


def restated(inputs: StepInputs, slices: list[tuple[int, int]], tokens: list[list[int]], tables: list[list[int]], block_size: int) -> None:
    at = 0
    for index, (start, count) in enumerate(slices):
        for position in range(start, start + count):
            assert inputs.token_ids[at] == tokens[index][position]
            assert inputs.positions[at] == position
            assert inputs.groups[0].slot_mapping[at] == tables[index][position // block_size] * block_size + position % block_size
            at += 1
        assert inputs.query_start[index + 1] == at
        assert inputs.context_lens[index] == start + count
    assert len(inputs.token_ids) == at


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_equal_the_slow_restatement(seed: int) -> None:
    draw = random.Random(seed)
    block_size = draw.choice([1, 2, 4, 16])
    tokens, tables, slices = [], [], []
    free = list(range(500))
    draw.shuffle(free)
    for _ in range(draw.randrange(1, 6)):
        length = draw.randrange(1, 60)
        tokens.append([draw.randrange(1000) for _ in range(length)])
        tables.append([free.pop() for _ in range(-(-length // block_size))])
        start = draw.randrange(length)
        slices.append((start, draw.randrange(1, length - start + 1)))
    rows = [Row(install(index, history, table), bounds(block_size)) for index, (history, table) in enumerate(zip(tokens, tables, strict=True))]
    pieces = [piece(index, start, count, sample=False) for index, (start, count) in enumerate(slices)]
    restated(build_inputs(pieces, rows, bounds(block_size), CPU), slices, tokens, tables, block_size)
