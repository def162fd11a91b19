"""A worker without a model, which notices every mistake in what it is told.

Its KV pool holds token ids instead of tensors. Computing a position writes the token there; before it
draws, it reads the sequence's whole history back through the row's block table, so a wrong block, a missing
token, a stale row or an overwritten prefix shows at once. The token drawn is a pure function of the history
and the seed: whatever the scheduling, a request must end with the tokens `expected_tokens` gives.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagemill.messages import InstallRow, Plan, RowMissing, RowResult, SamplingParams, Slice, StepDone, unpack_ids


@dataclass
class Row:
    version: int
    token_ids: array[int]
    tables: list[array[int]]
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int


def draw(history: Sequence[int], seed: int, vocab_size: int) -> int:
    """The next token: a hash of everything before it."""
    digest = hashlib.blake2b(array("i", history).tobytes() + seed.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab_size


def expected_tokens(prompt: Sequence[int], sampling: SamplingParams, seed: int, longest: int, max_tokens: int, vocab_size: int) -> list[int]:
    """What the request must produce, computed without any scheduling."""
    history = list(prompt)
    output: list[int] = []
    while len(output) < max_tokens and len(history) < longest:
        token = draw(history, seed, vocab_size)
        history.append(token)
        output.append(token)
        if token in sampling.stop_token_ids and len(output) >= sampling.min_tokens:
            break
    return output


class FakeWorker:
    """Takes what a worker takes, answers what a worker answers."""

    def __init__(self, num_blocks: int, block_size: int, num_groups: int = 1, vocab_size: int = 32) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.rows: dict[int, Row] = {}
        #: By block: the token at each offset and, to tell prefixes apart, how many tokens precede it.
        self.pool = [[(-1, -1, -1)] * block_size for _ in range(num_blocks)]
        self.num_groups = num_groups
        self.num_positions = 0
        self.fail: Callable[[int, int], bool] = lambda row, version: False
        self.defer: Callable[[int, int], bool] = lambda row, version: False

    def install(self, message: InstallRow) -> None:
        tables = [unpack_ids(table) for table in message.block_tables]
        self.rows[message.row] = Row(message.version, unpack_ids(message.token_ids), tables, message.sampling, message.seed, message.num_prompt_tokens)

    def run(self, plan: Plan) -> StepDone | RowMissing:
        for piece in plan.slices:
            if piece.row not in self.rows or self.rows[piece.row].version != piece.version:
                return RowMissing(plan.epoch, 0, plan.plan_id, piece.row, piece.version)
        for row in plan.released_rows:
            if all(piece.row != row for piece in plan.slices):
                self.rows.pop(row, None)
        results = [result for piece in plan.slices if (result := self._run_slice(piece)) is not None]
        return StepDone(plan.epoch, 0, plan.plan_id, tuple(results), {"forward": 0.0})

    def _run_slice(self, piece: Slice) -> RowResult | None:
        row = self.rows[piece.row]
        row.token_ids.extend(unpack_ids(piece.new_token_ids))
        for table, new in zip(row.tables, piece.new_block_ids, strict=True):
            table.extend(unpack_ids(new))
        if self.fail(piece.row, piece.version):
            return RowResult(piece.row, piece.version, "failed", (), (), "planted failure")
        self.num_positions += piece.num_tokens
        end = piece.start + piece.num_tokens
        for group, table in enumerate(row.tables):
            for position in range(piece.start, end):
                self.pool[table[position // self.block_size]][position % self.block_size] = (row.token_ids[position], position, group)
        self._read_back(piece.row, row, end)
        if not piece.sample:
            return None
        assert end == len(row.token_ids), "sampling before the last known token"
        if self.defer(piece.row, piece.version):
            return RowResult(piece.row, piece.version, "deferred", (), (), "")
        token = draw(row.token_ids, row.seed, self.vocab_size)
        return RowResult(piece.row, piece.version, "accepted", (token,), (), "")

    def _read_back(self, number: int, row: Row, end: int) -> None:
        for group, table in enumerate(row.tables):
            for position in range(end):
                found = self.pool[table[position // self.block_size]][position % self.block_size]
                wanted = (row.token_ids[position], position, group)
                assert found == wanted, f"row {number} position {position}: KV of {found}, not of {wanted}"
