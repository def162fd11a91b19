"""Whatever decodes may be wrong in every number: it never raises, never becomes an index, and concerns no other row.

Pool and slots lie between guards, so that a write beside them is seen, and what a message may not do is compared byte by byte.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest
import torch
from torch import Tensor

from pagemill.ids import BEHIND, NO_PLAN, PlanId, RowId, pack_ids
from pagemill.messages.sequences import SamplingParams
from pagemill.messages.worker import InstallRow, Plan, RowMissing, SchedulerToWorker, Slice, StepDone, Transfer, TransferDone
from scripts.lib.offline import offline_config
from tests.helpers.plans import copy_in, copy_out, install, piece, plan
from tests.helpers.tiny_model import VOCAB_SIZE, tiny_checkpoint
from workers import kv_cache
from workers.kv_cache import KvCache
from workers.loader import Loaded, load
from workers.pages import allocate
from workers.process import Worker
from workers.rows import INVALID_INPUT, RowBounds, RowTable
from workers.runner import Runner
from workers.swapper import Swapper

NUM_BLOCKS, NUM_SLOTS, BLOCK_SIZE, MAX_MODEL_LEN = 16, 6, 4, 48
GUARD_BYTES = 2**16
PATTERN = 0xA5
#: Of all sizes at which something could wrap or be cut off.
NUMBERS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 5, 7, 15, 16, 17, 47, 48, 49, 511, 512, 2**31 - 1, 2**31, 2**32, 2**62, 2**63)
Made = TypeVar("Made", InstallRow, SamplingParams, Slice, Transfer)
DECODER: msgspec.msgpack.Decoder[SchedulerToWorker] = msgspec.msgpack.Decoder(SchedulerToWorker)


class Bench:
    """A worker whose memory has guards on either side."""

    def __init__(self, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
        self._guards: list[Tensor] = []
        with monkeypatch.context() as patch:
            patch.setattr(kv_cache, "allocate", self._guarded)
            cache = KvCache(loaded.runner.kv_cache.spec, NUM_BLOCKS)
        self.blocks, self.slots = cache.blocks, self._guarded(NUM_SLOTS * 4096).view(NUM_SLOTS, 4096)
        self.blocks.zero_()
        self.swapper = Swapper(cache, self.slots)
        rows = RowTable(RowBounds(VOCAB_SIZE, NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, loaded.ready.groups))
        self.worker = Worker(Runner(loaded.runner.model, cache, self.swapper, rows, torch.device("cpu")), rank=0, epoch=1)

    def send(self, message: SchedulerToWorker) -> list[Any]:
        """As it arrives: over the wire, where not everything gets through."""
        return list(self.worker.handle(DECODER.decode(msgspec.msgpack.encode(message))))

    def check_guards(self) -> None:
        assert all(bool((guard == PATTERN).all()) for guard in self._guards), "something was written beside the pool or the slots"

    def _guarded(self, size_bytes: int) -> Tensor:
        memory = allocate(size_bytes + 2 * GUARD_BYTES).fill_(PATTERN)
        self._guards += [memory[:GUARD_BYTES], memory[-GUARD_BYTES:]]
        return memory[GUARD_BYTES:-GUARD_BYTES]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(offline_config(str(tiny_checkpoint("llama")), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS))


@pytest.fixture
def bench(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(loaded, monkeypatch)
    yield bench
    bench.swapper.close()
    bench.check_guards()


# --- one thing wrong -------------------------------------------------------------------------------------

ROW = install(0, [5, 6, 7, 8, 9], [1, 2])
SLICE = piece(0, 0, 5)

BAD_ROWS: dict[str, dict[str, Any]] = {
    "no prompt": {"num_prompt_tokens": 0},
    "prompt past the history": {"num_prompt_tokens": 6},
    "seed below zero": {"seed": -1},
    "token past the vocabulary": {"token_ids": pack_ids([5, 6, VOCAB_SIZE, 8, 9])},
    "negative token": {"token_ids": pack_ids([5, 6, -1, 8, 9])},
    "half a token": {"token_ids": pack_ids([5, 6, 7, 8, 9])[:-2]},
    "no table": {"block_tables": ()},
    "two tables": {"block_tables": (pack_ids([1, 2]), pack_ids([3, 4]))},
    "block past the pool": {"block_tables": (pack_ids([1, NUM_BLOCKS]),)},
    "negative block": {"block_tables": (pack_ids([-1, 2]),)},
    "half a block": {"block_tables": (pack_ids([1, 2])[:-1],)},
    "too few blocks": {"block_tables": (pack_ids([1]),)},
    "biased token past the vocabulary": {"sampling": SamplingParams(logit_bias=((2**31, 1.0),))},
    "negative stop token": {"sampling": SamplingParams(stop_token_ids=(-1,), min_tokens=9)},
    "nothing to draw from": {"sampling": SamplingParams(min_p=float("inf"))},
}
BAD_SLICES: dict[str, dict[str, Any]] = {
    "negative start": {"start": -1, "num_tokens": 6},
    "start far out": {"start": 2**62},
    "no tokens": {"num_tokens": 0},
    "fewer than no tokens": {"start": 5, "num_tokens": -5},
    "more tokens than known": {"num_tokens": 6},
    "as many tokens as fit into a word": {"num_tokens": 2**63},
    "new token past the vocabulary": {"num_tokens": 6, "new_token_ids": pack_ids([VOCAB_SIZE])},
    "half a new token": {"num_tokens": 6, "new_token_ids": b"\1\0"},
    "new block past the pool": {"new_block_ids": (pack_ids([NUM_BLOCKS]),)},
    "negative new block": {"new_block_ids": (pack_ids([-(2**31)]),)},
    "blocks for two groups": {"new_block_ids": (b"", b"")},
    "past the blocks": {"num_tokens": 9, "new_token_ids": pack_ids([1] * 4)},
    "past the longest context": {"start": 0, "num_tokens": 49, "new_token_ids": pack_ids([1] * 44), "new_block_ids": (pack_ids([1] * 11),)},
    "sample in the middle": {"num_tokens": 3},
}


def check_fails_alone(bench: Bench, row: InstallRow, bad: Slice) -> None:
    """The row fails, no byte of the pool changes but those of the row beside it, and that one gets what it always gets."""
    bench.send(install(1, [5, 6, 7], [3]))
    (alone,) = bench.send(plan(piece(1, 0, 3), plan_id=1))
    before = bench.blocks.clone()
    bench.send(row)
    (reply,) = bench.send(plan(bad, piece(1, 0, 3), plan_id=2))
    assert isinstance(reply, StepDone)
    results = {result.row: result for result in reply.results}
    assert (results[RowId(0)].outcome, results[RowId(0)].error) == ("failed", INVALID_INPUT)
    assert results[RowId(1)] == alone.results[0]
    assert torch.equal(bench.blocks, before)


@pytest.mark.parametrize("wrong", BAD_ROWS)
def test_a_wrong_row_is_not_computed(bench: Bench, wrong: str) -> None:
    check_fails_alone(bench, msgspec.structs.replace(ROW, **BAD_ROWS[wrong]), SLICE)


@pytest.mark.parametrize("wrong", BAD_SLICES)
def test_a_wrong_slice_is_not_computed(bench: Bench, wrong: str) -> None:
    check_fails_alone(bench, ROW, msgspec.structs.replace(SLICE, **BAD_SLICES[wrong]))


def test_the_row_and_the_slice_that_are_changed_above_are_right(bench: Bench) -> None:
    bench.send(ROW)
    (reply,) = bench.send(plan(SLICE))
    assert reply.results[0].outcome == "accepted"
    assert bench.blocks[[1, 2]].any()


@pytest.mark.parametrize("needed_by", [NO_PLAN, PlanId(1)], ids=["background", "urgent"])
@pytest.mark.parametrize(("block", "slot"), [(-(2**63), -(2**63)), (-1, -1), (NUM_BLOCKS, NUM_SLOTS), (2**31, 2**31), (2**63, 2**63)])
def test_a_transfer_of_what_does_not_exist_is_refused(bench: Bench, block: int, slot: int, needed_by: PlanId) -> None:
    blocks, slots = bench.blocks.clone(), bench.slots.clone()
    wrong = [
        copy_out(1, block, 0, needed_by=needed_by),
        copy_out(2, 0, slot, needed_by=needed_by),
        copy_in(3, slot, 0, needed_by=needed_by),
        copy_in(4, 0, block, needed_by=needed_by),
        Transfer(5, "device", 0, "device", 1, needed_by),
        Transfer(6, "arena", 0, "arena", 1, needed_by),
    ]
    *dones, step = bench.send(plan(transfers=wrong))
    assert isinstance(step, StepDone)
    assert {(transfer_id, done.ok) for done in dones for transfer_id in done.transfer_ids} == {(number, False) for number in range(1, 7)}
    assert torch.equal(bench.blocks, blocks)
    assert torch.equal(bench.slots, slots)


# --- anything wrong --------------------------------------------------------------------------------------


class Corrupter:
    """Draws messages that are right in part. Everything follows from the seed."""

    def __init__(self, seed: int, num_groups: int) -> None:
        self._draw = random.Random(seed)
        self._num_groups = num_groups
        self._last = 0  #: number of a plan, a version or a transfer
        self._epoch = 1
        self._versions: dict[int, int] = {}  #: of the rows, as they were sent last

    def message(self) -> SchedulerToWorker:
        self._epoch += self._draw.random() < 0.02
        made = self._install() if self._draw.random() < 0.3 else self._plan()
        return msgspec.structs.replace(made, epoch=self._epoch - (self._draw.random() < 0.05))

    def _next(self) -> int:
        self._last += 1
        return self._last

    def _number(self) -> int:
        return self._draw.choice(NUMBERS)

    def _packed(self) -> bytes:
        """Ids as they should be, as they should not, or no ids at all."""
        kind = self._draw.random()
        if kind < 0.6:
            return pack_ids([self._draw.randrange(NUM_BLOCKS) for _ in range(self._draw.randrange(6))])
        if kind < 0.9:
            return pack_ids([number for number in self._draw.choices(NUMBERS, k=4) if -(2**31) <= number < 2**31])
        return self._draw.randbytes(self._draw.randrange(14))

    def _mostly(self, right: Made, **wrong: Callable[[], Any]) -> Made:
        """With some of its fields replaced."""
        return msgspec.structs.replace(right, **{name: make() for name, make in wrong.items() if self._draw.random() < 0.06})

    def _tables(self) -> tuple[bytes, ...]:
        return tuple(self._packed() for _ in range(self._draw.choice((self._num_groups, self._draw.randrange(self._num_groups + 2)))))

    def _install(self) -> InstallRow:
        number = self._draw.randrange(3)
        self._versions[number] = self._next()
        row = install(number, [self._draw.randrange(VOCAB_SIZE) for _ in range(9)], [], version=self._versions[number])
        row = msgspec.structs.replace(row, block_tables=tuple(self._right_table() for _ in range(self._num_groups)))
        changes = {"row": self._number, "version": self._number, "seed": self._number, "num_prompt_tokens": self._number}
        return self._mostly(row, token_ids=self._packed, block_tables=self._tables, sampling=self._sampling, **changes)

    def _right_table(self) -> bytes:
        """Four blocks, of which the first may be behind a window if there is one."""
        num_behind = self._num_groups > 1 and self._draw.random() < 0.1
        return pack_ids([BEHIND] * num_behind + self._draw.sample(range(NUM_BLOCKS), 4 - num_behind))

    def _sampling(self) -> SamplingParams:
        def real() -> float:
            return self._draw.choice((0.0, 0.5, 1.0, 2.0, -1.0, 1e300, float("nan"), float("inf"), float("-inf")))

        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        changes: dict[str, Callable[[], Any]] = {
            **dict.fromkeys(names, real),
            **dict.fromkeys(("top_k", "num_logprobs", "min_tokens"), self._number),
            "logit_bias": lambda: ((self._number(), real()),),
            "stop_token_ids": lambda: (self._number(), self._number()),
        }
        return self._mostly(SamplingParams(), **changes)

    def _slice(self) -> Slice:
        number, count = self._draw.randrange(3), self._draw.choice((1, 4, 5, 9, 9))
        right = piece(number, 0, count, version=self._versions.get(number, 1), sample=count == 9)
        right = msgspec.structs.replace(right, new_block_ids=(b"",) * self._num_groups)
        numbers = dict.fromkeys(("row", "version", "start", "num_tokens", "after_plan"), self._number)
        return self._mostly(right, new_token_ids=self._packed, new_block_ids=self._tables, **numbers)

    def _transfer(self) -> Transfer:
        make = self._draw.choice((copy_out, copy_in))
        right = make(self._next(), self._draw.randrange(NUM_SLOTS), self._draw.randrange(NUM_SLOTS))
        return self._mostly(right, **dict.fromkeys(("transfer_id", "from_id", "to_id", "needed_by"), self._number))

    def _plan(self) -> Plan:
        slices = tuple(self._slice() for _ in range(self._draw.randrange(4)))
        transfers = tuple(self._transfer() for _ in range(self._draw.randrange(3)))
        released = [self._number()] if self._draw.random() < 0.1 else []
        return plan(*slices, plan_id=self._next(), transfers=transfers, released=released)


def send_and_check(bench: Bench, message: SchedulerToWorker) -> list[Any]:
    """Nothing, or the answer to a plan behind what has been copied."""
    replies = bench.send(message)
    if isinstance(message, InstallRow):
        assert replies == []
    elif replies:
        *dones, answer = replies
        assert all(isinstance(done, TransferDone) for done in dones)
        assert isinstance(answer, StepDone | RowMissing)
        assert (answer.epoch, answer.plan_id) == (message.epoch, message.plan_id)
    return replies


@pytest.fixture
def benches(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Bench]]:
    """Makes one with a model of this kind."""
    made: list[Bench] = []

    def make(kind: str) -> Bench:
        model = loaded if kind == "llama" else load(offline_config(str(tiny_checkpoint(kind)), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS))
        made.append(Bench(model, monkeypatch))
        return made[-1]

    yield make
    for bench in made:
        bench.swapper.close()


@pytest.mark.parametrize(("kind", "num_groups", "seed"), [*(("llama", 1, seed) for seed in range(5)), *(("hybrid", 3, seed) for seed in range(3))])
def test_any_message_is_answered_or_dropped(benches: Callable[[str], Bench], kind: str, num_groups: int, seed: int) -> None:
    bench, corrupter = benches(kind), Corrupter(seed, num_groups)
    outcomes: set[str] = set()
    for _ in range(400):
        for reply in send_and_check(bench, corrupter.message()):
            outcomes |= {result.outcome for result in reply.results} if isinstance(reply, StepDone) else {type(reply).__name__}
    bench.check_guards()
    assert {"accepted", "failed", "RowMissing", "TransferDone"} <= outcomes, "the messages were not wrong, or not right, enough to prove anything"
    bench.send(msgspec.structs.replace(ROW, epoch=1000, block_tables=ROW.block_tables * num_groups))
    (reply,) = bench.send(plan(msgspec.structs.replace(SLICE, new_block_ids=(b"",) * num_groups), epoch=1000))
    assert reply.results[0].outcome == "accepted", "the worker goes on"


@pytest.mark.parametrize("seed", range(4))
def test_frames_with_a_flipped_bit_are_dropped_or_answered(bench: Bench, seed: int) -> None:
    draw = random.Random(seed)
    num_decoded = 0
    for number in range(1, 400):
        row = msgspec.structs.replace(ROW, version=number)
        step = plan(msgspec.structs.replace(SLICE, version=number), plan_id=number, transfers=[copy_out(1, 2, 3)])
        for frame in map(bytearray, map(msgspec.msgpack.encode, (row, step))):
            frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)
            try:
                damaged = DECODER.decode(frame)
            except msgspec.MsgspecError:  # what a channel drops
                continue
            num_decoded += 1
            bench.worker.handle(damaged)
    assert num_decoded > 100
