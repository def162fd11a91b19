"""A worker's rows: what it remembers of each running sequence between plans.

A row is a cache, a pure function of the messages it was sent, and may be dropped at any time: the core
answers `RowMissing` by installing it again. Every integer that will become an index is range-checked
here, once, when it arrives. A value out of range makes the row unsound, which fails its slices and
nothing else; nothing that arrives makes this file raise. In a KV group with a window the table may begin with
entries that are `BEHIND` it; whatever a slice reads or writes must be a block. Rows know no tensors, no policies and no requests.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pagemill.ids import BEHIND, NONE, PlanId, RowId, num_ids
from pagemill.kv_groups import first_live_block
from pagemill.messages.sequences import KvGroup, SamplingParams
from pagemill.messages.worker import InstallRow, Plan, Slice
from workers.sampler import SamplingRow

#: An error of `RowResult`: what was sent does not fit the model, the pool or the history.
INVALID_INPUT = "invalid_input"


@dataclass(frozen=True)
class RowBounds:
    """What ids and positions are checked against."""

    vocab_size: int
    num_blocks: int
    block_size: int
    max_model_len: int
    groups: tuple[KvGroup, ...]  #: each with a block table of its own


class Row:
    """One sequence's place. `error` is empty while everything it was sent is in range, and never becomes so again."""

    __slots__ = ("block_tables", "drawn", "error", "num_behind", "sampling", "version")

    def __init__(self, message: InstallRow, bounds: RowBounds) -> None:
        self.version = message.version
        self.error = ""
        self.sampling = SamplingRow(message.sampling, message.seed, array("i"), message.num_prompt_tokens)
        self.block_tables = tuple(array("i") for _ in message.block_tables)  #: one per KV group
        self.num_behind = [0] * len(self.block_tables)  #: of each table, how many entries it begins with that are no blocks
        self.drawn: tuple[PlanId, int] = (PlanId(NONE), NONE)  #: the last plan that drew a token here, and the token
        self._extend(self.token_ids, message.token_ids, bounds.vocab_size)
        self._extend_tables(message.block_tables, bounds)
        if len(message.block_tables) != len(bounds.groups) or not 0 < message.num_prompt_tokens <= len(self.token_ids):
            self.error = INVALID_INPUT
        if not _in_range(message.sampling, message.seed, bounds.vocab_size):
            self.error = INVALID_INPUT

    @property
    def token_ids(self) -> array[int]:
        """The known history, prompt first."""
        return self.sampling.token_ids

    def is_deferred(self, piece: Slice) -> bool:
        """Whether the slice starts from a token that was never drawn: then there is nothing to compute, and nothing wrong with the row."""
        return piece.after_plan not in (NONE, self.drawn[0])

    def apply(self, piece: Slice, bounds: RowBounds) -> None:
        """Appends what `piece` brings, then checks what it asks for. A deferred slice brings its blocks, but asks for nothing."""
        self._extend(self.token_ids, piece.new_token_ids, bounds.vocab_size)
        self._extend_tables(piece.new_block_ids, bounds)
        if self.is_deferred(piece):
            return
        if piece.after_plan != NONE:
            self.token_ids.append(self.drawn[1])
        covered = min((len(table) for table in self.block_tables), default=0) * bounds.block_size
        end = piece.start + piece.num_tokens
        if piece.start < 0 or piece.num_tokens < 1 or end > min(len(self.token_ids), bounds.max_model_len, covered):
            self.error = INVALID_INPUT
        if piece.sample and end != len(self.token_ids):  # the token drawn would not be the next one
            self.error = INVALID_INPUT
        if any(self.num_behind) and not self._holds_all_from(piece.start, bounds):
            self.error = INVALID_INPUT

    def _holds_all_from(self, position: int, bounds: RowBounds) -> bool:
        """Whether every entry that is read by computing `position` is a block."""
        return all(behind <= first_live_block(group, position, bounds.block_size) for group, behind in zip(bounds.groups, self.num_behind, strict=False))

    def _extend_tables(self, packed: Sequence[bytes], bounds: RowBounds) -> None:
        if packed and len(packed) != len(self.block_tables):
            self.error = INVALID_INPUT
        for index, (group, table, ids) in enumerate(zip(bounds.groups, self.block_tables, packed, strict=False)):
            behind = _num_behind(ids) if group.window else 0
            if behind:  # where a found prefix reaches further than a window, what was known before it lies behind as well
                self.num_behind[index] = len(table) + behind
                table[:] = array("i", [BEHIND]) * self.num_behind[index]
            self._extend(table, ids[behind * table.itemsize :], bounds.num_blocks)

    def _extend(self, target: array[int], packed: bytes, bound: int) -> None:
        if not packed:
            return
        if len(packed) % target.itemsize == 0:
            ids = np.frombuffer(packed, dtype=np.int32)
            if ids.min() >= 0 and ids.max() < bound:
                target.frombytes(packed)
                return
        self.error = INVALID_INPUT


class RowTable:
    """All rows of a worker, by number. They belong to one epoch of the scheduler."""

    def __init__(self, bounds: RowBounds) -> None:
        self.bounds = bounds
        self._rows: dict[RowId, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def install(self, message: InstallRow) -> bool:
        """Replaces an older version of the number; False if what is there is as new, for then the message came late or twice.

        An unsound row is installed as well: it fails its slices.
        """
        held = self._rows.get(message.row)
        if held is not None and held.version >= message.version:
            return False
        self._rows[message.row] = Row(message, self.bounds)
        return True

    def missing(self, plan: Plan) -> Slice | None:
        """The first slice whose (row, version) is not held; then nothing of the plan may be applied."""
        for piece in plan.slices:
            row = self._rows.get(piece.row)
            if row is None or row.version != piece.version:
                return piece
        return None

    def apply(self, plan: Plan) -> list[Row]:
        """Brings the rows up to date and returns one per slice. `missing` must have returned None."""
        rows = []
        for piece in plan.slices:
            row = self._rows[piece.row]
            row.apply(piece, self.bounds)
            rows.append(row)
        named = {piece.row for piece in plan.slices}
        if len(named) < len(rows):
            self._refuse_repeated(plan.slices)
        self._release(plan.released_rows, named)
        return rows

    def clear(self) -> None:
        self._rows.clear()

    def _refuse_repeated(self, slices: Sequence[Slice]) -> None:
        """A row may have one slice in a plan: of two it is not said which comes first."""
        for row, times in Counter(piece.row for piece in slices).items():
            if times > 1:
                self._rows[row].error = INVALID_INPUT

    def _release(self, rows: Iterable[RowId], named: set[RowId]) -> None:
        for row in rows:
            if row not in named:
                self._rows.pop(row, None)


def _num_behind(packed: bytes) -> int:
    """How many entries `packed` begins with that lie behind a window."""
    is_block = np.frombuffer(packed, dtype=np.int32, count=num_ids(packed)) != BEHIND
    return int(is_block.argmax()) if is_block.any() else len(is_block)


def _in_range(sampling: SamplingParams, seed: int, vocab_size: int) -> bool:
    """Whether ids are ids, numbers are numbers, and the filters leave at least one token to draw."""
    ids = [*sampling.stop_token_ids, *(token_id for token_id, _ in sampling.logit_bias)]
    numbers = [
        sampling.temperature,
        sampling.top_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        *(bias for _, bias in sampling.logit_bias),
    ]
    return (
        0 <= seed < 2**64
        and all(0 <= token_id < vocab_size for token_id in ids)
        and all(map(math.isfinite, numbers))
        and 0 <= sampling.min_p <= 1
        and sampling.repetition_penalty > 0
    )
