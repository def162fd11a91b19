"""The frontend's side of the scheduler: hands sequences over, and brings each output to whoever waits for it.

One channel to one scheduler at a time. A sequence is live from `add` until its last output, its finish or its abort, and
outlives the scheduler it was given to: when that is lost its sink hears nothing and waits, and the next scheduler is sent
everything that is live once more. Outputs of an older epoch and of unknown sequences are dropped and counted.
Owns the table of live sequences. This module must not know text, HTTP or what an output means.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import zmq

from frontend.errors import scheduler_silent
from frontend.in_flight import LiveSequence, Sink
from frontend.readiness import Readiness
from frontend.waiting_room import WaitingRoom
from pagemill.channels import Channel, ChannelError
from pagemill.injection import reach
from pagemill.messages.debug_state import DebugState
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
from pagemill.messages.sequences import FinishReason, SequenceKey
from pagemill.messages.wire import Hello
from pagemill.telemetry import get_logger

#: How often the waiting room is searched for sequences that have waited too long.
_LOOK_S = 0.25

log = get_logger("frontend.engine")

Reply = TypeVar("Reply", DebugStateReply, DecisionsReply)


class SchedulerObserver(Protocol):
    """Who else wants the scheduler's numbers."""

    def scheduler_ready(self, message: SchedulerReady) -> None: ...

    def scheduler_lost(self) -> None: ...

    def snapshot(self, message: StatsSnapshot) -> None: ...


class Engine:
    """One per frontend process; lives in its event loop."""

    def __init__(
        self, hello: Hello, readiness: Readiness, observers: Sequence[SchedulerObserver], room: WaitingRoom, *, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        self.room = room  #: of sequences that come while there is no scheduler
        self._hello = hello
        self._readiness = readiness
        self._observers = observers
        self._on_ready = on_ready
        self._epoch = -1
        self._num_dropped = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel: Channel[FrontendToScheduler, SchedulerToFrontend] | None = None
        self._num_sent = 0  #: `AddRequest`s, on this channel
        self._num_heard = 0  #: of them, at the last snapshot
        self._met = False  #: the scheduler at the channel's other end has said that it is ready, and has been sent what is live
        self._live: dict[SequenceKey, LiveSequence] = {}  #: in order of arrival
        self._requests = itertools.count(1)
        self._queries = itertools.count(1)
        self._replies: dict[int, asyncio.Future[DebugStateReply | DecisionsReply]] = {}  #: by query, while somebody waits
        self._idle = asyncio.Event()
        self._idle.set()
        self._look: asyncio.TimerHandle | None = None  #: into the room, for those whose time is over

    # --- the scheduler comes and goes ---------------------------------------------------------------------

    def connect(self, address: str) -> None:
        """Meets a scheduler at its address; a former one is forgotten."""
        self.disconnect()
        channel: Channel[FrontendToScheduler, SchedulerToFrontend] = Channel(
            self._context, address, bind=False, hello=self._hello, peer="scheduler", incoming=SchedulerToFrontend
        )
        channel.attach(asyncio.get_running_loop(), self._receive, self._give_up)
        self._channel = channel
        self._num_sent = self._num_heard = 0

    def _give_up(self, error: ChannelError) -> None:
        """What is at the other end is not the scheduler of this run."""
        log.error("scheduler_unusable", error=str(error))
        self.disconnect()

    def disconnect(self) -> None:
        """The scheduler is gone, or is to be forgotten. Sequences wait for the next one, queries fail."""
        if self._channel is None:
            return
        self._channel.detach(asyncio.get_running_loop())
        self._channel.close()
        self._num_dropped += self._channel.num_dropped
        self._channel, self._met = None, False
        self._readiness.scheduler_forgotten()
        for observer in self._observers:
            observer.scheduler_lost()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(scheduler_silent())

    def close(self) -> None:
        """Ends the channel and its context; nothing can be sent afterwards."""
        self.disconnect()
        if self._look is not None:
            self._look.cancel()
        self._context.destroy(linger=0)

    def _scheduler_ready(self, message: SchedulerReady) -> None:
        if message.epoch < self._epoch:
            self._num_dropped += 1
            return
        self._epoch = message.epoch
        if not self._met:
            self._met = True
            self._resubmit()
        self._readiness.scheduler_ready(message)
        for observer in self._observers:
            observer.scheduler_ready(message)
        self._on_ready()

    def _resubmit(self) -> None:
        """Sends everything that is live to a scheduler that knows none of it. One that cannot be sent fails alone."""
        if self._live:
            log.info("sequences_resubmitted", sequences=len(self._live), epoch=self._epoch)
        for sequence in list(self._live.values()):
            if sequence.key not in self._live:
                continue  # it ended with another one of its request
            try:
                reach("frontend.resubmit")
                self._send_sequence(sequence, sequence.again())
            except Exception:
                log.exception("resubmission_failed", request_id=sequence.request.request_id)
                sequence.sink.failed()

    # --- requests -----------------------------------------------------------------------------------------

    def new_request(self) -> int:
        """A number no other request of this process has."""
        return next(self._requests)

    def key(self, request: int, choice: int) -> SequenceKey:
        return SequenceKey(frontend=self._hello.index, incarnation=self._hello.incarnation, request=request, choice=choice)

    def add(self, requests: Iterable[AddRequest], sink: Sink) -> None:
        """Hands sequences to the scheduler, or keeps them for the next one. Raises ApiError (429) if too much waits for it already."""
        sequences = [LiveSequence(request, sink) for request in requests]
        if not self._met:
            self.room.admit(sequences, asyncio.get_running_loop().time())
            self._look_soon()
        reach("frontend.submit")
        for sequence in sequences:
            self._live[sequence.key] = sequence
            self._idle.clear()
        if self._met:
            for sequence in sequences:
                self._send_sequence(sequence, sequence.request)
            reach("frontend.submitted")

    def finish(self, key: SequenceKey, reason: FinishReason, keep: int) -> None:
        """The frontend found the end of a sequence after `keep` output tokens. Nothing happens if it has ended."""
        if key in self._live:
            reach("frontend.finish")
            self._forget(key)
            self._send(FinishRequest(key=key, reason=reason, keep=keep))

    def abort(self, keys: Iterable[SequenceKey]) -> None:
        """Nobody wants these sequences any more. Those that have ended are passed over."""
        for key in keys:
            if self._forget(key) is None:
                continue
            try:
                reach("frontend.abort")
            except Exception:  # this is where clean-up ends: the scheduler must hear of it whatever goes wrong
                log.exception("abort_disturbed", request=key.request)
            self._send(AbortRequest(key=key))

    def end_all(self) -> None:
        """Aborts every sequence and tells its sink that the server ended it."""
        for sequence in list(self._live.values()):
            self.abort([sequence.key])
            sequence.sink.output(sequence.aborted())

    @property
    def num_sequences(self) -> int:
        return len(self._live)

    @property
    def num_unheard(self) -> int:
        """Sequences that were on their way to the scheduler when it took its last snapshot."""
        return self._num_sent - self._num_heard

    @property
    def num_dropped(self) -> int:
        """Messages of an older epoch, of no sequence known here, or that do not decode."""
        return self._num_dropped + (self._channel.num_dropped if self._channel is not None else 0)

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
            if not self._send(query):
                raise scheduler_silent()
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise scheduler_silent() from None
        finally:
            del self._replies[query.query]
        if not isinstance(reply, kind):
            raise scheduler_silent()
        return reply

    # --- messages -----------------------------------------------------------------------------------------

    def _send(self, message: FrontendToScheduler) -> bool:
        """False if there is no scheduler that knows our sequences; what is live is sent to the next one, what has ended need not be."""
        if self._channel is None or not self._met:
            return False
        try:
            self._channel.send(message)
        except ChannelError as error:
            log.error("scheduler_stuck", error=str(error))
            self.disconnect()
            return False
        return True

    def _send_sequence(self, sequence: LiveSequence, request: AddRequest) -> None:
        """Where that fails, the next scheduler is given it."""
        now = asyncio.get_running_loop().time()
        if self._send(self.room.shortened(request, now)):
            self._num_sent += 1
            sequence.sent = True
            self.room.leave(sequence.key)
        elif not sequence.sent:
            self.room.keep(sequence, now)
            self._look_soon()

    def _look_soon(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._look_into_room)

    def _look_into_room(self) -> None:
        """Ends those that have waited for too long, again and again as long as anybody waits."""
        self._look = None
        for rejection in self.room.expired(asyncio.get_running_loop().time()):
            if rejection.key in self._live:  # not ended with another one of its request
                self._reject(rejection)
        if self.room:
            self._look_soon()

    def _forget(self, key: SequenceKey) -> LiveSequence | None:
        sequence = self._live.pop(key, None)
        self.room.leave(key)
        if not self._live:
            self._idle.set()
        return sequence

    def _receive(self, message: SchedulerToFrontend) -> None:
        match message:
            case StepOutput():
                self._step_output(message)
            case SchedulerReady():
                self._scheduler_ready(message)
            case StatsSnapshot():
                self._num_heard = message.requests_heard
                self._readiness.note_snapshot(message)
                for observer in self._observers:
                    observer.snapshot(message)
            case DebugStateReply() | DecisionsReply():
                reply = self._replies.get(message.query)
                if reply is not None and not reply.done():
                    reply.set_result(message)

    def _step_output(self, message: StepOutput) -> None:
        if message.epoch < self._epoch or message.frontend != self._hello.index:
            self._num_dropped += len(message.outputs) + len(message.rejections)
            return
        self._epoch = message.epoch
        for output in message.outputs:
            sequence = self._live.get(output.key)
            if sequence is None:
                self._num_dropped += 1
            else:
                self._deliver(sequence, output)
        for rejection in message.rejections:
            self._reject(rejection)

    def _reject(self, rejection: Rejection) -> None:
        sequence = self._forget(rejection.key)
        if sequence is None:
            self._num_dropped += 1
            return
        try:
            sequence.sink.rejected(rejection)
        except Exception:
            log.exception("rejection_failed", request_id=sequence.request.request_id)
            sequence.sink.failed()

    def _deliver(self, sequence: LiveSequence, output: SequenceOutput) -> None:
        """Whatever goes wrong with one output is its own request's misfortune."""
        try:
            reach("frontend.output", output.token_ids)
            fresh = sequence.take(output)
            if fresh is None:
                log.error("output_gap", request_id=sequence.request.request_id, received=output.first_index)
                sequence.sink.failed()
                return
            if fresh.finish_reason is not None:
                self._forget(output.key)
            sequence.sink.output(fresh)
        except Exception:
            log.exception("output_failed", request_id=sequence.request.request_id)
            sequence.sink.failed()
