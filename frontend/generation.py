"""A request that is being generated: the one source of deltas for streamed and buffered replies alike.

A `Generation` is the sink of all sequences of one request. Outputs queue up per sequence until the reply's writer takes
them; a writer that never comes (a client that does not read) makes its own request end, never memory grow. While a
process restarts no outputs come, and a reader sees a pause. Whoever starts a generation closes it: what still runs is
then aborted. One reader at a time.
This module must not know HTTP or the shape of replies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from frontend.choice import Choice, Delta
from frontend.engine import Engine
from frontend.errors import ApiError, internal_error, rejected, sequence_failed, too_slow_reader
from frontend.overload import Load
from frontend.request_metrics import RequestRecord
from pagemill.messages.frontend import AddRequest, Rejection, SequenceOutput
from pagemill.messages.sequences import SequenceKey
from pagemill.telemetry import get_logger

#: What may wait for a reader, per sequence.
MAX_QUEUED_OUTPUTS = 256
MAX_QUEUED_BYTES = 1024 * 1024
#: What a reader takes ahead of its own work, of all sequences together; beyond it the queues fill.
MAX_TAKEN_OUTPUTS = 65_536
#: Tokens that one reader turns into text and JSON in one turn of the event loop: up to 2 ms, with twenty logprobs each.
_TOKENS_A_TURN = 64

log = get_logger("frontend.generation")


class ClientGoneError(Exception):
    """Nobody is there to answer."""


class _Inbox:
    """Outputs of one sequence that wait for the reader."""

    __slots__ = ("num_bytes", "outputs", "started")

    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self.num_bytes = 0
        self.started = False  #: its first output has arrived

    @property
    def overflows(self) -> bool:
        return len(self.outputs) > MAX_QUEUED_OUTPUTS or self.num_bytes > MAX_QUEUED_BYTES

    def drain(self) -> list[SequenceOutput]:
        outputs, self.outputs, self.num_bytes = self.outputs, [], 0
        return outputs


class Generation:
    """All choices of all prompts of one request, in one queue of events. `choices[i]` belongs to the sequence of choice i."""

    def __init__(
        self, engine: Engine, record: RequestRecord, load: Load, choices: Sequence[Choice], num_prompt_tokens: int, n: int, *, log_texts: bool = False
    ) -> None:
        self.record = record
        self.choices = choices
        self.num_prompt_tokens = num_prompt_tokens  #: of all prompts, each counted once
        self.on_overflow: Callable[[], None] = lambda: None  #: called when the reader is too slow; set by who can cut the connection
        self._engine = engine
        self._load = load
        self._n = n
        self._keys: tuple[SequenceKey, ...] = ()
        self._inboxes = [_Inbox() for _ in choices]
        self._cached = [0] * len(choices)
        self._make_error: Callable[[], ApiError | ClientGoneError] | None = None  #: what the reader is told; kept itself, it would refer to its reader
        self._event = asyncio.Event()
        self._taken: deque[SequenceOutput] = deque()  #: by the reader out of the inboxes, in order for each choice
        self._overflow_check_due = False
        self._texts: list[list[str]] | None = [[] for _ in choices] if log_texts else None

    def start(self, sequences: Sequence[AddRequest]) -> None:
        """Hands the sequences over. Raises ApiError if they are refused; whatever it raises, none of them is left behind."""
        self._keys = tuple(sequence.key for sequence in sequences)
        try:
            self._engine.add(sequences, self)
        except BaseException:
            self.close()
            raise
        self._load.submitted(len(sequences))

    def close(self) -> None:
        """Ends what still runs; nobody reads any more. May be called at any time and more than once."""
        self._forget()
        self._engine.abort(self._keys)

    def client_gone(self) -> None:
        """The client went away: its sequences end now, and the reader is told."""
        self._forget()
        self._fail(ClientGoneError)

    # --- the reader's side --------------------------------------------------------------------------------

    async def deltas(self, timeout_s: float | None = None) -> list[Delta]:
        """What is new, as much as a turn of the event loop allows; nothing if time ran out first. Raises ApiError or ClientGoneError."""
        if self._taken or self._event.is_set():
            self._empty_inboxes()
            await asyncio.sleep(0)  # others go first
        else:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
            except TimeoutError:
                return []
            self._empty_inboxes()
        if self._make_error is not None:
            self._event.set()  # to be raised once what came before it has been given
            if not self._taken:
                raise self._make_error()
        return list(self._take_some())

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Of prompts, each counted once: the first choice of each says what the cache held."""
        return sum(self._cached[:: self._n])

    def _empty_inboxes(self) -> None:
        """The reader has come for what waits, however much of it has to wait for its next turns."""
        self._event.clear()
        if len(self._taken) < MAX_TAKEN_OUTPUTS:
            for inbox in self._inboxes:
                self._taken += inbox.drain()

    def _take_some(self) -> Iterator[Delta]:
        num_tokens = 0
        while self._taken and num_tokens < _TOKENS_A_TURN:
            output = self._taken.popleft()
            if self.choices[output.key.choice].finish is None:  # else it was on its way when a stop string was found
                num_tokens += len(output.token_ids)
                yield self._take(output.key.choice, output)

    def _take(self, index: int, output: SequenceOutput) -> Delta:
        choice = self.choices[index]
        delta = choice.feed(output)
        if delta.keep is not None:
            self.record.finish(index, "stop", delta.keep)
            self._engine.finish(output.key, "stop", delta.keep)
        if self._texts is not None:
            self._texts[index].append(delta.text)
            if delta.finish is not None:
                log.info("choice_finished", request_id=self.record.request_id, choice=index, text="".join(self._texts[index]))
        return delta

    # --- the engine's side --------------------------------------------------------------------------------

    def output(self, output: SequenceOutput) -> None:
        inbox = self._inboxes[output.key.choice]
        if not inbox.started:
            inbox.started = True
            self._load.started()
        self.record.observe(output.key.choice, output)
        if output.finish_reason == "error":
            log.error("sequence_failed", request_id=self.record.request_id, error=output.error)
            self._fail(partial(sequence_failed, output.error))
            return
        self._cached[output.key.choice] = max(self._cached[output.key.choice], output.num_cached_tokens)
        inbox.outputs.append(output)
        inbox.num_bytes += _size(output)
        self._event.set()
        if inbox.overflows and not self._overflow_check_due:
            # A burst that arrived at once is no fault of the reader, which could not run meanwhile: it goes first.
            self._overflow_check_due = True
            asyncio.get_running_loop().call_soon(self._check_overflow)

    def rejected(self, rejection: Rejection) -> None:
        self._load.started()
        self._fail(partial(rejected, rejection, self._engine.room.retry_after_s()))

    def failed(self) -> None:
        self._fail(internal_error)

    def _check_overflow(self) -> None:
        self._overflow_check_due = False
        if self._make_error is not None or not any(inbox.overflows for inbox in self._inboxes):
            return
        log.warning("reader_too_slow", request_id=self.record.request_id, queued_bytes=sum(inbox.num_bytes for inbox in self._inboxes))
        self._forget()
        self._fail(too_slow_reader)
        self.on_overflow()

    def _fail(self, make_error: Callable[[], ApiError | ClientGoneError]) -> None:
        """One sequence's failure is the whole request's; the first failure stands."""
        self._make_error = self._make_error or make_error
        self._event.set()
        self._engine.abort(self._keys)

    def _forget(self) -> None:
        """What waits for the reader is for nobody."""
        self._taken.clear()
        for inbox in self._inboxes:
            inbox.drain()


def _size(output: SequenceOutput) -> int:
    """Bytes that an output holds, roughly."""
    size = 64 + 8 * len(output.token_ids)
    for logprobs in output.logprobs:
        size += 64 + len(logprobs.top_ids) + len(logprobs.top_logprobs)
    return size
