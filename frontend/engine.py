"""The frontend's side of the scheduler: hands sequences over, and brings each output to whoever waits for it.

One channel to one scheduler. Outputs go to the sink that was registered with their sequence; outputs of an older epoch
and of unknown sequences are dropped and counted. When the scheduler is gone every sink is told, once.
Owns the routing table: a sequence is in it from `add` until its last output, its finish or its abort.
This module must not know text, HTTP or what an output means.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import zmq

from frontend.errors import ApiError, scheduler_lost
from frontend.readiness import Readiness
from pagemill.channels import Channel, ChannelError
from pagemill.messages import (
    AbortRequest,
    AddRequest,
    DebugState,
    DebugStateQuery,
    DebugStateReply,
    DecisionsQuery,
    DecisionsReply,
    FinishReason,
    FinishRequest,
    FrontendToScheduler,
    Hello,
    Rejection,
    SchedulerReady,
    SchedulerToFrontend,
    SequenceKey,
    SequenceOutput,
    StatsSnapshot,
    StepOutput,
)
from pagemill.telemetry import get_logger

log = get_logger("frontend.engine")

Reply = TypeVar("Reply", DebugStateReply, DecisionsReply)


class Sink(Protocol):
    """What takes the outputs of a request's sequences. Called in the event loop; must not block or raise."""

    def output(self, output: SequenceOutput) -> None: ...

    def rejected(self, rejection: Rejection) -> None: ...

    def failed(self, error: ApiError) -> None: ...


class SchedulerObserver(Protocol):
    """Who else wants the scheduler's numbers."""

    def scheduler_ready(self, message: SchedulerReady) -> None: ...

    def snapshot(self, message: StatsSnapshot) -> None: ...


class Engine:
    """One per frontend process; lives in its event loop."""

    def __init__(self, hello: Hello, readiness: Readiness, observer: SchedulerObserver, on_ready: Callable[[], None] = lambda: None) -> None:
        self.num_dropped = 0  #: outputs of an older epoch or of no sequence known here
        self._hello = hello
        self._readiness = readiness
        self._observer = observer
        self._on_ready = on_ready
        self._epoch = -1
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel: Channel[FrontendToScheduler, SchedulerToFrontend] | None = None
        self._sinks: dict[SequenceKey, Sink] = {}
        self._requests = itertools.count(1)
        self._queries = itertools.count(1)
        self._replies: dict[int, asyncio.Future[DebugStateReply | DecisionsReply]] = {}  #: by query, while somebody waits
        self._idle = asyncio.Event()
        self._idle.set()

    # --- the scheduler comes and goes ---------------------------------------------------------------------

    def connect(self, address: str) -> None:
        """Meets a scheduler at its address; a former one is forgotten."""
        self.disconnect()
        channel: Channel[FrontendToScheduler, SchedulerToFrontend] = Channel(
            self._context, address, bind=False, hello=self._hello, peer="scheduler", incoming=SchedulerToFrontend
        )
        channel.attach(asyncio.get_running_loop(), self._receive)
        self._channel = channel

    def disconnect(self) -> None:
        """The scheduler is gone, or is to be forgotten: what it was to answer fails."""
        if self._channel is None:
            return
        self._channel.detach(asyncio.get_running_loop())
        self._channel.close()
        self._channel = None
        self._readiness.scheduler_lost()
        for sink in set(self._sinks.values()):
            sink.failed(scheduler_lost())
        self._sinks.clear()
        self._idle.set()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(scheduler_lost())

    def close(self) -> None:
        """Ends the channel and its context; nothing can be sent afterwards."""
        self.disconnect()
        self._context.destroy(linger=0)

    # --- requests -----------------------------------------------------------------------------------------

    def new_request(self) -> int:
        """A number no other request of this process has."""
        return next(self._requests)

    def key(self, request: int, choice: int) -> SequenceKey:
        return SequenceKey(frontend=self._hello.index, incarnation=self._hello.incarnation, request=request, choice=choice)

    def add(self, sequences: Iterable[AddRequest], sink: Sink) -> None:
        """Hands sequences to the scheduler. Raises ApiError (503) if it is gone."""
        for sequence in sequences:
            self._send(sequence)
            self._sinks[sequence.key] = sink
            self._idle.clear()

    def finish(self, key: SequenceKey, reason: FinishReason, keep: int) -> None:
        """The frontend found the end of a sequence after `keep` output tokens. Nothing happens if it has ended."""
        if self._forget(key):
            self._try_send(FinishRequest(key=key, reason=reason, keep=keep))

    def abort(self, keys: Iterable[SequenceKey]) -> None:
        """Nobody wants these sequences any more. Those that have ended are passed over."""
        for key in keys:
            if self._forget(key):
                self._try_send(AbortRequest(key=key))

    def end_all(self) -> None:
        """Aborts every sequence and tells its sink that the scheduler ended it."""
        for key, sink in list(self._sinks.items()):
            self.abort([key])
            sink.output(_aborted(key))

    @property
    def num_sequences(self) -> int:
        return len(self._sinks)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no sequence is left; False if time ran out before."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def debug_state(self, timeout_s: float = 5.0) -> DebugState:
        """The scheduler's own view of itself. Raises ApiError (503) if it does not answer in time."""
        reply = await self._ask(DebugStateQuery(query=next(self._queries)), DebugStateReply, timeout_s)
        return reply.state

    async def decisions(self, limit: int, timeout_s: float = 5.0) -> DecisionsReply:
        """The planner's newest decisions, oldest first, and its clock. Raises ApiError (503) if the scheduler does not answer in time."""
        return await self._ask(DecisionsQuery(query=next(self._queries), limit=limit), DecisionsReply, timeout_s)

    async def _ask(self, query: DebugStateQuery | DecisionsQuery, kind: type[Reply], timeout_s: float) -> Reply:
        future: asyncio.Future[DebugStateReply | DecisionsReply] = asyncio.get_running_loop().create_future()
        self._replies[query.query] = future
        try:
            self._send(query)
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise scheduler_lost() from None
        finally:
            del self._replies[query.query]
        assert isinstance(reply, kind)
        return reply

    # --- messages -----------------------------------------------------------------------------------------

    def _send(self, message: FrontendToScheduler) -> None:
        if self._channel is None:
            raise scheduler_lost()
        try:
            self._channel.send(message)
        except ChannelError as error:
            log.error("scheduler_stuck", error=str(error))
            self.disconnect()
            raise scheduler_lost() from error

    def _try_send(self, message: FrontendToScheduler) -> None:
        """For what needs no reply: if the scheduler is gone, so is the sequence."""
        try:
            self._send(message)
        except ApiError:
            pass

    def _forget(self, key: SequenceKey) -> bool:
        known = self._sinks.pop(key, None) is not None
        if not self._sinks:
            self._idle.set()
        return known

    def _receive(self, message: SchedulerToFrontend) -> None:
        match message:
            case StepOutput():
                self._step_output(message)
            case SchedulerReady():
                self._epoch = message.epoch
                self._readiness.scheduler_ready(message)
                self._observer.scheduler_ready(message)
                self._on_ready()
            case StatsSnapshot():
                self._readiness.note_snapshot(message)
                self._observer.snapshot(message)
            case DebugStateReply() | DecisionsReply():
                reply = self._replies.get(message.query)
                if reply is not None and not reply.done():
                    reply.set_result(message)

    def _step_output(self, message: StepOutput) -> None:
        if message.epoch < self._epoch:
            self.num_dropped += len(message.outputs) + len(message.rejections)
            return
        for output in message.outputs:
            sink = self._sinks.get(output.key)
            if sink is None:
                self.num_dropped += 1
                continue
            if output.finish_reason is not None:
                self._forget(output.key)
            sink.output(output)
        for rejection in message.rejections:
            sink = self._sinks.get(rejection.key)
            if sink is None or not self._forget(rejection.key):
                self.num_dropped += 1
                continue
            sink.rejected(rejection)


def _aborted(key: SequenceKey) -> SequenceOutput:
    """A last output that carries nothing but the end. `first_index` is set so that it never looks like a gap."""
    return SequenceOutput(
        key=key,
        first_index=0,
        token_ids=(),
        logprobs=(),
        finish_reason="abort",
        stop_token_id=-1,
        num_cached_tokens=0,
        num_preemptions=0,
        queue_s=0.0,
        error="",
    )
