"""What several ranks cost: where the time of their steps goes, by the log of a run, and how large the plans are that they get.

A step lasts from one plan to the next. Of this each rank computes, reduces (which ends when the last rank has come), and
waits for the others to have the plan; what is left is the scheduler's: planning, encoding, and the way there and back. With
one plan in flight the parts add up to the step. Must not know how the run came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, cast

import msgspec

from pagemill.messages.worker import Plan, StepDone
from scheduler.event_log import Record
from scheduler.peers import Peers, WorkerChannel
from scripts.lib.decoding_core import answer, decoding_core, next_plan

#: Parts of `StepDone.seconds` in which a rank does nothing of its own.
_REDUCE, _AGREE = "reduce", "agree"
_BLOCK_SIZE = 16


@dataclass
class Step:
    """One plan in which every sequence decodes."""

    num_slices: int
    planned_at: float
    ended_at: float = 0.0  #: when the next one was planned
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)  #: by rank, by part


def decode_steps(log: Iterable[Record], num_sequences: int) -> list[Step]:
    """Those in which so many sequences decode, and which another plan follows."""
    steps: list[Step] = []
    by_plan: dict[int, Step] = {}
    for record in log:
        event = record.event
        if isinstance(event, StepDone) and event.plan_id in by_plan:
            by_plan[event.plan_id].seconds[event.rank] = event.seconds
        for plan in (effect for effect in record.effects if isinstance(effect, Plan)):
            if steps:
                steps[-1].ended_at = record.now
            decodes = all(piece.num_tokens == 1 for piece in plan.slices)
            steps.append(Step(len(plan.slices) if decodes else 0, record.now))
            by_plan[plan.plan_id] = steps[-1]
    return [step for step in steps[:-1] if step.num_slices == num_sequences]


def parts_ms(steps: Sequence[Step]) -> dict[str, float]:
    """Milliseconds of a step by part: each the median over steps of the mean over ranks."""
    found: dict[str, list[float]] = {"step": [], "compute": [], "reduce": [], "wait": [], "scheduler": []}
    for step in steps:
        whole = step.ended_at - step.planned_at
        reduces = [parts.get(_REDUCE, 0.0) for parts in step.seconds.values()]
        busy = fmean(sum(parts.values()) for parts in step.seconds.values())
        agree = fmean(parts.get(_AGREE, 0.0) for parts in step.seconds.values())
        found["step"].append(whole)
        found["compute"].append(busy - fmean(reduces) - agree)
        found["reduce"].append(min(reduces))  # the rank that comes last waits for nobody
        found["wait"].append(fmean(reduces) - min(reduces) + agree)
        found["scheduler"].append(whole - busy)
    return {f"{part}_ms": 1000 * median(values) for part, values in found.items()}


def plan_bytes(num_sequences: int, context: int) -> float:
    """Bytes of the plan of a step in which so many sequences of so many tokens decode; the mean over the steps that fill one block."""
    core, encoder = decoding_core(num_sequences, context, _BLOCK_SIZE), msgspec.msgpack.Encoder()
    total = 0
    for step in range(1, _BLOCK_SIZE + 1):
        plan = next_plan(core, float(step))
        if len(plan.slices) != num_sequences:
            raise RuntimeError(f"{len(plan.slices)} of {num_sequences} sequences decode in one step")
        total += len(encoder.encode(plan))
        answer(core, plan, step)
    return total / _BLOCK_SIZE


class _CountingEncoder:
    """Encodes like the one it stands for."""

    def __init__(self) -> None:
        self.num_encoded = 0
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: object) -> bytes:
        self.num_encoded += 1
        return self._encoder.encode(message)


class _Rank:
    """The scheduler's end of a channel, which keeps what is sent."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send_frame(self, frame: bytes) -> None:
        self.frames.append(frame)


def encodings_per_plan(num_ranks: int, num_plans: int = 3) -> float:
    """How often the scheduler's sender encodes a plan that it sends to so many ranks. Raises RuntimeError if they are sent different bytes."""
    peers = Peers(hello=cast(Any, None), poller=cast(Any, None))
    try:
        encoder, ranks = _CountingEncoder(), [_Rank() for _ in range(num_ranks)]
        peers._encoder = cast(msgspec.msgpack.Encoder, encoder)
        peers._workers = {rank: cast(WorkerChannel, channel) for rank, channel in enumerate(ranks)}
        for plan in _plans(num_plans):
            peers.send_workers(plan)
        if any(rank.frames != ranks[0].frames or len(rank.frames) != num_plans for rank in ranks):
            raise RuntimeError("ranks were sent different plans")
        return encoder.num_encoded / num_plans
    finally:
        peers.close()


def _plans(count: int) -> Iterator[Plan]:
    core = decoding_core(2, 32)
    for step in range(1, count + 1):
        plan = next_plan(core, float(step))
        yield plan
        answer(core, plan, step)
