"""A worker without a model, which notices every mistake in what it is told.

Its KV pool holds the names of prefixes instead of tensors. Computing a position writes there what all tokens up to it
come to, and reads all positions that it attends to back through the row's block tables (in a group with a window no
more than those), so a wrong block, a missing token, a stale row or an overwritten prefix shows at once. The token drawn is a pure function of the history
and the seed: whatever the scheduling, a request must end with the tokens `expected_tokens` gives.

Transfers that no forward waits for stay pending until `carry_out` is told to do one, in any order that the
protocol allows, so that a test decides how late a copy is. A failed copy leaves rubbish at its destination.
Where it stands for several ranks, each of them tells of each copy; of one that failed only one rank says so.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagemill.ids import NO_PLAN, unpack_ids
from pagemill.messages.sequences import KvGroup, SamplingParams
from pagemill.messages.worker import InstallRow, Plan, RowMissing, RowResult, Slice, StepDone, Transfer, TransferDone


@dataclass
class Row:
    version: int
    token_ids: array[int]
    tables: list[array[int]]
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    prefixes: list[int] = field(default_factory=list)  #: by position, a hash of all tokens up to it
    drawn: tuple[int, int] = (-1, -1)  #: the last plan that drew a token, and the token
    is_behind: bool = False  #: a plan that named it was not carried out for it: it lacks what that plan told it, or computed


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

    def __init__(
        self, num_blocks: int, block_size: int, groups: Sequence[KvGroup] = (KvGroup(),), *, vocab_size: int = 32, num_slots: int = 0, num_ranks: int = 1
    ) -> None:
        self.block_size = block_size
        self.num_ranks = num_ranks
        self.vocab_size = vocab_size
        self.rows: dict[int, Row] = {}
        #: By block: at each offset the prefix that ends there, its position and its group.
        self.pool = [[(-1, -1, -1)] * block_size for _ in range(num_blocks)]
        self.arena = [[(-1, -1, -1)] * block_size for _ in range(num_slots)]
        self.transfers: list[Transfer] = []  #: ordered and not carried out
        self.done: list[TransferDone] = []  #: carried out and not yet told
        self.told_before_plan: dict[int, int] = {}  #: transfer that a forward waited for -> its plan, whose answer comes after
        self.fail_copy: Callable[[Transfer], bool] = lambda transfer: False  #: of those
        self.cannot_copy: Callable[[Transfer], bool] = lambda transfer: False  #: of all, whenever they are carried out
        self.groups = tuple(groups)
        self.num_positions = 0
        self.epoch = 0
        self.fail: Callable[[int, int], bool] = lambda row, version: False
        self.defer: Callable[[int, int], bool] = lambda row, version: False

    def meet(self, epoch: int) -> None:
        """A newer epoch is a new core, which knows nothing of rows and transfers."""
        if epoch > self.epoch:
            self.epoch = epoch
            self.rows.clear()
            self.transfers.clear()
            self.done.clear()
            self.told_before_plan.clear()

    def install(self, message: InstallRow) -> None:
        tables = [unpack_ids(table) for table in message.block_tables]
        self.rows[message.row] = Row(message.version, unpack_ids(message.token_ids), tables, message.sampling, message.seed, message.num_prompt_tokens)

    def run(self, plan: Plan) -> StepDone | RowMissing:
        self.transfers += plan.transfers
        broken = self._hurry(plan)
        for piece in plan.slices:
            if piece.row not in self.rows or self.rows[piece.row].version != piece.version:
                for other in plan.slices:
                    if other.row in self.rows:
                        self.rows[other.row].is_behind = True
                return RowMissing(plan.epoch, 0, plan.plan_id, piece.row, piece.version)
        for row in plan.released_rows:
            if all(piece.row != row for piece in plan.slices):
                self.rows.pop(row, None)
        for piece in plan.slices:
            held = self.rows[piece.row]
            read_from = [max(0, piece.start - group.window + 1) // self.block_size if group.window else 0 for group in self.groups]
            tables = zip(held.tables, piece.new_block_ids, read_from, strict=True)
            held.is_behind |= any(broken & {*table[first:], *unpack_ids(new)} for table, new, first in tables)
        results = [result for piece in plan.slices if (result := self._run_slice(piece, plan.plan_id)) is not None]
        return StepDone(plan.epoch, 0, plan.plan_id, tuple(results), {"forward": 0.0})

    def _hurry(self, plan: Plan) -> set[int]:
        """Does what the forward waits for. Returns the blocks that were to arrive and did not."""
        broken: set[int] = set()
        for transfer in [transfer for transfer in plan.transfers if transfer.needed_by == plan.plan_id]:
            ok = self.carry_out(transfer, plan.epoch, ok=not self.fail_copy(transfer))
            self.told_before_plan[transfer.transfer_id] = plan.plan_id
            if not ok and transfer.to_tier == "device":
                broken.add(transfer.to_id)
        return broken

    def carry_out(self, transfer: Transfer, epoch: int, *, ok: bool = True) -> bool:
        """Does one pending transfer, after those before it that name its block or its slot. False if that fails."""
        place = self.transfers.index(transfer)
        for earlier in self.transfers[:place]:
            if {_block(earlier), _slot(earlier)} & {_block(transfer), _slot(transfer)}:
                self.carry_out(earlier, epoch)
        self.transfers.remove(transfer)
        ok = ok and not self.cannot_copy(transfer)
        source = self.pool[transfer.from_id] if transfer.from_tier == "device" else self.arena[transfer.from_id]
        content = list(source) if ok else [(-2, -2, -2)] * self.block_size
        (self.arena if transfer.to_tier == "arena" else self.pool)[transfer.to_id] = content
        failed_on = -1 if ok else transfer.transfer_id % self.num_ranks
        self.done += [TransferDone(epoch, rank, (transfer.transfer_id,), rank != failed_on, 1e-6) for rank in range(self.num_ranks)]
        return ok

    def _run_slice(self, piece: Slice, plan_id: int) -> RowResult | None:
        row = self.rows[piece.row]
        row.token_ids.extend(unpack_ids(piece.new_token_ids))
        for table, new in zip(row.tables, piece.new_block_ids, strict=True):
            table.extend(unpack_ids(new))
        if piece.after_plan != NO_PLAN:
            if row.drawn[0] != piece.after_plan:
                return RowResult(piece.row, piece.version, "deferred", (), (), "")
            row.token_ids.append(row.drawn[1])
        if row.is_behind:
            return self._compute_rubbish(piece, row)
        if self.fail(piece.row, piece.version):
            row.is_behind = True
            return RowResult(piece.row, piece.version, "failed", (), (), "planted failure")
        self.num_positions += piece.num_tokens
        end = piece.start + piece.num_tokens
        self._write(piece, row)
        self._read_back(piece, row)
        if not piece.sample:
            return None
        assert end == len(row.token_ids), "sampling before the last known token"
        if self.defer(piece.row, piece.version):
            return RowResult(piece.row, piece.version, "deferred", (), (), "")
        token = draw(row.token_ids, row.seed, self.vocab_size)
        row.drawn = (plan_id, token)
        return RowResult(piece.row, piece.version, "accepted", (token,), (), "")

    def _write(self, piece: Slice, row: Row) -> None:
        for token in row.token_ids[len(row.prefixes) :]:
            row.prefixes.append(hash((row.prefixes[-1] if row.prefixes else 0, token)))
        for group, table in enumerate(row.tables):
            for position in range(piece.start, piece.start + piece.num_tokens):
                block = table[position // self.block_size]
                assert block >= 0, f"row {piece.row} position {position}: no block in group {group}"
                self.pool[block][position % self.block_size] = (row.prefixes[position], position, group)

    def _compute_rubbish(self, piece: Slice, row: Row) -> RowResult:
        """The row does not know what the scheduler thinks it knows: what it computes and answers must not be used."""
        for table in row.tables:
            for position in range(piece.start, min(piece.start + piece.num_tokens, len(table) * self.block_size)):
                if table[position // self.block_size] >= 0:
                    self.pool[table[position // self.block_size]][position % self.block_size] = (-3, -3, -3)
        return RowResult(piece.row, piece.version, "failed", (), (), "a row out of step")

    def _read_back(self, piece: Slice, row: Row) -> None:
        for number, (group, table) in enumerate(zip(self.groups, row.tables, strict=True)):
            first = max(0, piece.start - group.window + 1) if group.window else 0
            for position in range(first, piece.start + piece.num_tokens):
                block = table[position // self.block_size]
                assert block >= 0, f"row {piece.row} position {position}: group {number} has given it up"
                found, wanted = self.pool[block][position % self.block_size], (row.prefixes[position], position, number)
                assert found == wanted, f"row {piece.row} position {position}: KV of {found}, not of {wanted}"


def _block(transfer: Transfer) -> tuple[str, int]:
    return ("block", transfer.from_id if transfer.from_tier == "device" else transfer.to_id)


def _slot(transfer: Transfer) -> tuple[str, int]:
    return ("slot", slot_of(transfer))


def slot_of(transfer: Transfer) -> int:
    """The place in the arena that it reads or writes."""
    return transfer.from_id if transfer.from_tier == "arena" else transfer.to_id
