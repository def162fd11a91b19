"""A scheduler without a model: speaks the real messages on a real channel and answers with scripted tokens.

It runs in a thread of its own. A script decides from each `AddRequest` what its sequence yields; the default one counts
upwards from the prompt's length. `gate` holds sequences back so that a test decides when they go on. A script always
tells the whole sequence: what a resubmitted request has received already is skipped, as a real scheduler does.
Everything received is kept for assertions, and `wait_for` waits for a message with a deadline.
"""

from __future__ import annotations

import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq

from pagemill import PROTOCOL_VERSION
from pagemill.channels import Channel, ChannelError
from pagemill.ids import NONE, num_ids, unpack_ids
from pagemill.messages.debug_state import BlockCounts, DebugState, InvariantReport, SwapSlotCounts
from pagemill.messages.decisions import Decision, VictimPrice
from pagemill.messages.frontend import (
    AbortRequest,
    AddRequest,
    DebugStateQuery,
    DebugStateReply,
    DecisionsQuery,
    DecisionsReply,
    FinishRequest,
    FrontendToScheduler,
    Rejection,
    SchedulerReady,
    SchedulerToFrontend,
    SequenceOutput,
    StatsSnapshot,
    StepOutput,
)
from pagemill.messages.sequences import FinishReason, SequenceKey, TokenLogprobs
from pagemill.messages.wire import Hello
from pagemill.run_directory import socket_address

TOKEN = b"0123456789abcdef"
DEADLINE_S = 30.0
_IDLE_S = 0.002
#: Between steps; faster than any model, yet not so fast that no client could keep up.
_STEP_S = 0.0002

Received = TypeVar("Received")


@dataclass(frozen=True)
class Step:
    """One output of a sequence. Without `tokens` and `finish` it is nothing, and the sequence only waits a turn."""

    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int = NONE
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""
    skip: int = 0  #: added to first_index: a gap, or below zero a repetition
    cached: int = 0
    preemptions: int = 0


@dataclass
class Refuse:
    """Instead of steps: the sequence is rejected."""

    reason: str
    required: int = 0
    available: int = 0


Script = Callable[[AddRequest], list[Step] | Refuse]


def logprobs_of(logprob: float, top: dict[int, float] | None = None) -> TokenLogprobs:
    top = top or {}
    return TokenLogprobs(logprob, array("i", top.keys()).tobytes(), array("f", top.values()).tobytes())


def tokens(ids: list[int], finish: FinishReason = "length") -> list[Step]:
    """One step per id, the last of which ends the sequence."""
    return [Step((token_id,), finish if index == len(ids) - 1 else None) for index, token_id in enumerate(ids)]


def counting(request: AddRequest) -> list[Step]:
    """As many tokens as allowed, printable and different from each other."""
    start = num_ids(request.prompt_ids) + request.key.choice
    logprob = logprobs_of(-1.0, {index: -1.0 - index for index in range(request.sampling.num_logprobs)}) if request.sampling.num_logprobs != NONE else None
    steps = tokens([20 + (start + index) % 400 for index in range(request.limits.max_tokens)])
    return steps if logprob is None else [replace(step, logprobs=(logprob,)) for step in steps]


def decision(number: int = 1, victims: tuple[VictimPrice, ...] = (), **changes: Any) -> Decision:
    """One decision of the planner: the first request was to grow; who was looked at stands in `victims`."""
    fields: dict[str, Any] = {
        "number": number,
        "at_s": 100.0 + number / 4,
        "step": 10 * number,
        "reason": "growth",
        "request_id": "first",
        "seq_id": 1,
        "blocks_wanted": 1,
        "out_bytes_s": 4e9,
        "in_bytes_s": 3.5e9,
        "prefill_tok_s": 620.0,
        "backlog_bytes": 0,
        "block_bytes": 1_000_000,
        "swap_slots_left": 40,
        "victims": list(victims),
    }
    return Decision(**(fields | changes))


def victim(request_id: str = "second", **changes: Any) -> VictimPrice:
    """A running sequence that was swapped, for it was ten times cheaper."""
    fields: dict[str, Any] = {
        "request_id": request_id,
        "seq_id": 2,
        "was_running": True,
        "blocks": 12,
        "blocks_to_copy": 4,
        "tokens": 187,
        "swap_s": 0.0302,
        "recompute_s": 0.302,
        "yielded": True,
        "kind": "swap",
        "freed": 4,
    }
    return VictimPrice(**(fields | changes))


def snapshot(**changes: Any) -> StatsSnapshot:
    """The numbers of a scheduler that has done nothing, but for `changes`."""
    fields: dict[str, Any] = dict.fromkeys(StatsSnapshot.__struct_fields__, 0)
    for name in ("preemptions", "swapped_bytes", "swap_seconds", "resume_seconds", "steps_with_tokens", "step_seconds", "sequences_finished"):
        fields[name] = {}
    return StatsSnapshot(**(fields | {"epoch": 1, "slot_utilization": 1.0} | changes))


def after(steps: list[Step], num_tokens: int) -> list[Step]:
    """What is left of a script once its first `num_tokens` tokens have been received."""
    left = list(steps)
    while num_tokens and left:
        step = left[0]
        taken = min(num_tokens, len(step.tokens))
        num_tokens -= taken
        if taken < len(step.tokens):
            left[0] = replace(step, tokens=step.tokens[taken:], logprobs=step.logprobs[taken:])
        else:
            del left[0]
    return left


@dataclass
class _Live:
    request: AddRequest
    steps: list[Step]
    num_sent: int


class FakeScheduler:
    """Binds the address of frontend `index` at once; its thread runs inside the `with` block."""

    def __init__(
        self,
        script: Script = counting,
        *,
        max_model_len: int = 512,
        block_size: int = 16,
        ready: bool = True,
        epoch: int = 1,
        index: int = 0,
        directory: Path | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pagemill-")
        self.address = socket_address(self._folder.name if directory is None else str(directory), "frontend", index, 1, 1)
        self._index = index
        self.script = script
        self.epoch = epoch
        self.gate = threading.Event()  #: sequences go on while it is set
        self.gate.set()
        self.received: list[FrontendToScheduler] = []
        self.repeat_all = False  #: send every output twice
        self.decisions: list[Decision] = []  #: answers a query with the newest of these
        self.answers_queries = True
        self.burst = 1  #: steps that are sent without a pause between them
        self._geometry = SchedulerReady(epoch, max_model_len, block_size, 1000, 0, 64, False)
        self.starts_ready = ready
        self._ready = threading.Event()
        if ready:
            self._ready.set()
        self._outbox: deque[SchedulerToFrontend | bytes] = deque()
        self._live: dict[SequenceKey, _Live] = {}
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="fake scheduler", daemon=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel: Channel[SchedulerToFrontend, FrontendToScheduler] = Channel(
            self._context, self.address, bind=True, hello=self.hello("scheduler"), peer="frontend", incoming=FrontendToScheduler
        )

    @staticmethod
    def hello(kind: str) -> Hello:
        return Hello(TOKEN, PROTOCOL_VERSION, kind, 0, 1)  # type: ignore[arg-type]

    def __enter__(self) -> FakeScheduler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        self._channel.close()
        self._context.destroy(linger=0)
        self._folder.cleanup()

    def become_ready(self) -> None:
        self._ready.set()

    def send(self, message: SchedulerToFrontend | bytes) -> None:
        """Sent by the thread, after the handshake; bytes as they are."""
        self._outbox.append(message)

    def rebuild(self) -> None:
        """As after a restart of the workers: a new epoch, the same sequences."""
        self.epoch += 1
        self._geometry = msgspec.structs.replace(self._geometry, epoch=self.epoch, worker_incarnation=self._geometry.worker_incarnation + 1)
        self.send(self._geometry)

    def go_on(self, key: SequenceKey, steps: list[Step]) -> None:
        """Replaces what was left of the script of a sequence."""
        self._live[key].steps = steps

    @property
    def num_live(self) -> int:
        return len(self._live)

    def wait_for(self, kind: type[Received], matches: Callable[[Received], bool] = lambda _: True, count: int = 1) -> list[Received]:
        """The messages of this kind received so far, once there are `count` of them that match."""
        with self._changed:

            def found() -> list[Received]:
                return [message for message in self.received if isinstance(message, kind) and matches(message)]

            if not self._changed.wait_for(lambda: len(found()) >= count, DEADLINE_S):
                raise AssertionError(f"{len(found())} of {count} {kind.__name__} arrived")
            return found()

    def wait_idle(self) -> None:
        """Until no sequence is left."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._live, DEADLINE_S):
                raise AssertionError(f"{len(self._live)} sequences are still alive")

    def requests(self) -> list[AddRequest]:
        return [message for message in self.received if isinstance(message, AddRequest)]

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except ChannelError:
            pass  # the frontend hung up

    def _serve(self) -> None:
        said_ready = False
        while not self._stop.is_set():
            busy = False
            while (message := self._channel.receive()) is not None:
                busy = True
                self._handle(message)
            if self._channel.greeted and self._ready.is_set() and not said_ready:
                self._channel.send(self._geometry)
                said_ready = True
            while said_ready and self._outbox:
                outgoing = self._outbox.popleft()
                if isinstance(outgoing, bytes):
                    self._channel.send_frame(outgoing)
                else:
                    self._channel.send(outgoing)
            if self.gate.is_set() and self._live:
                busy = True
                for _ in range(self.burst):
                    self._step()
                time.sleep(_STEP_S)
            if not busy:
                time.sleep(_IDLE_S)

    def _handle(self, message: FrontendToScheduler) -> None:
        match message:
            case AddRequest():
                script = self.script(message)
                if isinstance(script, Refuse):
                    rejection = Rejection(message.key, script.reason, script.required, script.available)  # type: ignore[arg-type]
                    self._channel.send(StepOutput(self._index, self.epoch, (), (rejection,)))
                else:
                    num_received = num_ids(message.output_ids)
                    self._live.setdefault(message.key, _Live(message, after(script, num_received), num_received))
            case FinishRequest() | AbortRequest():
                self._end(message.key)
            case DebugStateQuery() | DecisionsQuery():
                self._note(message)  # first: whoever has the answer may look at once
                if self.answers_queries:
                    self._answer(message)
                return
        self._note(message)

    def _note(self, message: FrontendToScheduler) -> None:
        with self._changed:
            self.received.append(message)
            self._changed.notify_all()

    def _answer(self, query: DebugStateQuery | DecisionsQuery) -> None:
        if isinstance(query, DebugStateQuery):
            self._channel.send(DebugStateReply(query.query, self._debug_state()))
        else:
            self._channel.send(DecisionsReply(query.query, 200.0, self.decisions[-query.limit :]))

    def _step(self) -> None:
        outputs = tuple(self._outputs())
        if outputs:
            message = StepOutput(self._index, self.epoch, outputs, ())
            for _ in range(2 if self.repeat_all else 1):
                self._channel.send(message)

    def _outputs(self) -> Iterator[SequenceOutput]:
        for key, live in list(self._live.items()):
            if not live.steps:
                continue
            step = live.steps.pop(0)
            if step == Step():
                continue
            yield SequenceOutput(
                key=key,
                first_index=live.num_sent + step.skip,
                token_ids=step.tokens,
                logprobs=step.logprobs,
                finish_reason=step.finish,
                stop_token_id=step.stop_token_id,
                num_cached_tokens=step.cached,
                num_preemptions=step.preemptions,
                queue_s=0.001,
                error=step.error,
            )
            live.num_sent += len(step.tokens)
            if step.finish is not None:
                self._end(key)

    def _end(self, key: SequenceKey) -> None:
        with self._changed:
            self._live.pop(key, None)
            self._changed.notify_all()

    def _debug_state(self) -> DebugState:
        return DebugState(self.epoch, 1, 0, [], BlockCounts(4, 4, 0, 0), SwapSlotCounts(8, 1, 2, 5), InvariantReport(True, None))


def prompt_ids(request: AddRequest) -> list[int]:
    return list(unpack_ids(request.prompt_ids))
