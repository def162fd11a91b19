"""Whether this process takes another request now, and when a refused one should come again.

A request is judged when its head is there, before its body is read, parsed or tokenized: at ten times the load, nine
requests of ten must cost next to nothing. The scheduler's queue is the truth that all frontends share. Its last snapshot,
what this process had sent that was not in there yet, and what it has handed over and seen started since, say how full it
is; how fast it empties says when to come again. Large bodies are bounded together, in bytes, and so is what is held of
replies: what is gathered to be sent whole, and what waits to be read. Work is spread over turns of the event loop, so that
a burst of requests delays neither probes nor streams. Must not know HTTP, nor what a request asks for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from frontend.errors import bodies_full, queue_full, replies_full, reply_too_large
from pagemill.messages.frontend import SchedulerReady, StatsSnapshot
from pagemill.telemetry import get_logger

#: Bodies larger than a connection buffers anyway may hold this much together.
MAX_BODY_BYTES_HELD = 64 * 1024 * 1024
SMALL_BODY_BYTES = 64 * 1024
#: What may be held of one reply and of all together; of small ones in any case.
MAX_REPLY_BYTES = 256 * 1024 * 1024
MAX_REPLY_BYTES_HELD = 512 * 1024 * 1024
SMALL_REPLY_BYTES = 1024 * 1024
#: How far back the throughput is measured, and the least that says anything.
WINDOW_S = 30.0
_LEAST_S = 0.5
MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60
#: Requests that are begun in one turn of the event loop.
_REQUESTS_A_TURN = 8
#: While requests are refused, the log says so this often.
REPORT_INTERVAL_S = 5.0

log = get_logger("frontend.overload")

Clock = Callable[[], float]


class Overload:
    """One per frontend process. Hears of the scheduler what the metrics hear (`SchedulerObserver`)."""

    def __init__(self, max_num_queued: int, clock: Clock = time.monotonic) -> None:
        self.max_num_queued = max_num_queued  #: sequences that may wait for the scheduler
        self.num_unheard: Callable[[], int] = lambda: 0  #: sequences that were on their way to the scheduler when it took its last snapshot
        self.body_bytes = 0  #: of bodies that are being read or tokenized
        self.reply_bytes = 0  #: of replies that are being gathered or sent whole, and of output that waits to be read
        self.pacer = Pacer()  #: of requests that are about to send a body, which wait for their turn to be begun
        self._num_preparing = 0  #: requests between their last byte and the scheduler
        self._num_seats = 0  #: sequences that can run at once
        self._num_free_seats = 0
        self._num_waiting = 0  #: at the last snapshot, or on their way then
        self._num_moved = 0  #: sequences of this process that came to wait since, less those that wait no longer
        self._throughput = Throughput()
        self._num_refused = 0  #: that the log does not know of yet
        self._last_report = float("-inf")
        self._clock = clock

    # --- requests -----------------------------------------------------------------------------------------

    def open(self) -> Load:
        """For every request that arrives, before anything is known of it."""
        return Load(self)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for the scheduler, as far as is known here."""
        return max(0, self._num_waiting + self._num_moved)

    def retry_after_s(self) -> int:
        """Whole seconds until what waits now will have been started, at the pace measured while others waited."""
        rate = self._throughput.sequences_s
        seconds = self.num_waiting / rate if rate else 0.0
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, math.ceil(seconds)))

    @property
    def is_full(self) -> bool:
        """Whoever wants to generate something now is refused. Those who wait for their turn will take the room that is left."""
        return self.num_waiting + self._num_preparing + self.pacer.num_waiting >= self.max_num_queued + self._num_free_seats

    def require_room(self) -> None:
        """For whoever is about to send a body. Raises ApiError (429) if there is no room for what would become of it."""
        if self.is_full:
            self._num_refused += 1
            raise queue_full(self.retry_after_s())

    # --- what each load reports ---------------------------------------------------------------------------

    def began_preparing(self) -> None:
        self._num_preparing += 1

    def ended_preparing(self) -> None:
        self._num_preparing -= 1

    def joined_queue(self, num_sequences: int) -> None:
        """They have been handed over, and wait for the scheduler to start them."""
        self._num_moved += num_sequences

    def left_queue(self, num_sequences: int) -> None:
        """They have been started, or have ended."""
        self._num_moved -= num_sequences

    def require_body_room(self, num_bytes: int) -> None:
        """For a body that has so many bytes by now, which count already. Raises ApiError (429)."""
        if num_bytes > SMALL_BODY_BYTES and self.body_bytes > MAX_BODY_BYTES_HELD:
            self._num_refused += 1
            raise bodies_full(self.retry_after_s())

    def require_reply_size(self, num_bytes: int) -> None:
        """For a reply that will have at least so many bytes. Raises ApiError (400)."""
        if num_bytes > MAX_REPLY_BYTES:
            raise reply_too_large(MAX_REPLY_BYTES)

    def require_reply_room(self, num_bytes: int) -> None:
        """For a reply that has so many bytes by now, which count already. Raises ApiError (400, 429)."""
        self.require_reply_size(num_bytes)
        if not self._has_reply_room(num_bytes):
            raise replies_full(self.retry_after_s())

    def has_unread_room(self, num_bytes: int) -> bool:
        """For output of one request that waits to be read and has so many bytes by now, which count already."""
        return num_bytes <= MAX_REPLY_BYTES and self._has_reply_room(num_bytes)

    def _has_reply_room(self, num_bytes: int) -> bool:
        return num_bytes <= SMALL_REPLY_BYTES or self.reply_bytes <= MAX_REPLY_BYTES_HELD

    # --- the scheduler ------------------------------------------------------------------------------------

    def scheduler_ready(self, message: SchedulerReady) -> None:
        self._num_seats = message.max_num_seqs
        self._num_free_seats = 0 if self.num_waiting else message.max_num_seqs

    def scheduler_lost(self) -> None:
        """What waited goes on waiting, and no seat is free until the next scheduler says so."""
        self._num_free_seats = 0

    def snapshot(self, message: StatsSnapshot) -> None:
        """Where nobody waits, seats are free for the next that come."""
        self._num_waiting, self._num_moved = message.num_waiting + self.num_unheard(), 0
        num_held = message.num_waiting + message.num_running + message.num_preempted
        self._num_free_seats = max(0, self._num_seats - num_held) if message.num_waiting == 0 else 0
        finished = sum(count for reason, count in message.sequences_finished.items() if reason not in ("rejected", "handed_on"))
        now = self._clock()
        self._throughput.note(now, finished, others_wait=message.num_waiting > 0)
        if self._num_refused and now - self._last_report >= REPORT_INTERVAL_S:
            log.warning("requests_refused", refused=self._num_refused, waiting=self.num_waiting, retry_after_s=self.retry_after_s())
            self._num_refused, self._last_report = 0, now


class Load:
    """What one request weighs on this process. Whoever opened it closes it, which takes everything back."""

    __slots__ = ("_is_preparing", "_num_body_bytes", "_num_queued", "_num_reply_bytes", "_num_unread_bytes", "_overload")

    def __init__(self, overload: Overload) -> None:
        self._overload = overload
        self._num_body_bytes = 0
        self._num_reply_bytes = 0
        self._num_unread_bytes = 0
        self._num_queued = 0
        self._is_preparing = False

    def admit(self) -> None:
        """Called before its body is read. Raises ApiError (429) if there is no room for it."""
        self._overload.require_room()

    def hold(self, num_bytes: int) -> None:
        """So many bytes of its body are here. Raises ApiError (429) if that is too much together with others."""
        self._overload.body_bytes += num_bytes - self._num_body_bytes
        self._num_body_bytes = num_bytes
        self._overload.require_body_room(num_bytes)

    def prepare(self) -> None:
        """Its body is complete and about to be parsed. Raises ApiError (429) if the queue is full by now."""
        if not self._is_preparing:
            self._overload.require_room()
            self._is_preparing = True
            self._overload.began_preparing()

    def submitted(self, num_sequences: int) -> None:
        """It has become sequences, which wait; its body is needed no longer."""
        self._num_queued += num_sequences
        self._overload.joined_queue(num_sequences)
        self._prepared()

    def started(self) -> None:
        """One of its sequences has its first output, or has ended without any."""
        if self._num_queued > 0:
            self._num_queued -= 1
            self._overload.left_queue(1)

    def gather(self, num_bytes: int) -> None:
        """So many bytes of a reply that is to be sent whole are here. Raises ApiError (400, 429) if that is too much, alone or together with others."""
        self._overload.reply_bytes += num_bytes - self._num_reply_bytes
        self._num_reply_bytes = num_bytes
        self._overload.require_reply_room(num_bytes)

    def expect(self, num_bytes: int) -> None:
        """A reply that is to be sent whole will have at least so many bytes. Raises ApiError (400) if that is too much already."""
        self._overload.require_reply_size(num_bytes)

    def hold_unread(self, num_bytes: int) -> bool:
        """So many bytes of output wait to be read. False if that is too much, alone or together with others."""
        self._overload.reply_bytes += num_bytes - self._num_unread_bytes
        self._num_unread_bytes = num_bytes
        return self._overload.has_unread_room(num_bytes)

    def close(self) -> None:
        """It has been answered, or nobody waits for the answer."""
        self._overload.left_queue(self._num_queued)
        self._overload.reply_bytes -= self._num_reply_bytes + self._num_unread_bytes
        self._num_queued = self._num_reply_bytes = self._num_unread_bytes = 0
        self._prepared()

    def _prepared(self) -> None:
        self._overload.body_bytes -= self._num_body_bytes
        self._num_body_bytes = 0
        if self._is_preparing:
            self._overload.ended_preparing()
            self._is_preparing = False


class Throughput:
    """Sequences that end per second while others wait: when nobody waits, few end because few come."""

    def __init__(self) -> None:
        self._last: tuple[float, int, bool] | None = None  #: time, sequences ended so far, whether others waited
        self._spans: deque[tuple[float, float, int]] = deque()  #: when it ended, how long it was, sequences that ended
        self._seconds = 0.0
        self._num_ended = 0

    @property
    def sequences_s(self) -> float:
        """0.0 while nothing is known. Where not one has ended, the time in which it did not is the measure."""
        return max(1, self._num_ended) / self._seconds if self._seconds >= _LEAST_S else 0.0

    def note(self, now: float, num_ended: int, *, others_wait: bool) -> None:
        """`num_ended` is a counter, which begins anew with a scheduler."""
        if self._last is not None:
            since, before, waited = self._last
            if waited and num_ended >= before:
                self._add(now, now - since, num_ended - before)
        self._last = (now, num_ended, others_wait)
        while self._spans and self._spans[0][0] < now - WINDOW_S:
            _, seconds, ended = self._spans.popleft()
            self._seconds = self._seconds - seconds if self._spans else 0.0
            self._num_ended -= ended

    def _add(self, now: float, seconds: float, ended: int) -> None:
        self._spans.append((now, seconds, ended))
        self._seconds += seconds
        self._num_ended += ended


class Pacer:
    """Lets only some requests begin in each turn of the event loop, in order of arrival; what else is due goes between."""

    def __init__(self, width: int = _REQUESTS_A_TURN) -> None:
        self.num_waiting = 0
        self._width = width
        self._num_begun = 0  #: in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Returns at once unless many came at once."""
        if self._num_begun < self._width and not self._waiting:
            self._begin(1)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self.num_waiting += 1
        try:
            await future
        finally:
            self.num_waiting -= 1

    def _begin(self, count: int) -> None:
        if self._num_begun == 0:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._num_begun += count

    def _next_turn(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < self._width:
            future = self._waiting.popleft()
            if not future.done():  # whoever waited may have been cancelled
                future.set_result(None)
                self._begin(1)
