"""A request that is being generated: the one source of deltas for streamed and buffered replies alike.

A `Generation` is the sink of all sequences of one request. Outputs queue up until the reply's writer takes them. A writer
that stays away (its client does not read) makes its own request end, never memory grow; one that comes again and again
may be as late as it likes, while there is memory for what waits (`frontend.overload`). While a process restarts no
outputs come, and a reader sees a pause. Whoever starts a generation closes it: what still runs is then aborted. One reader
at a time.
This module must not know HTTP or the shape of replies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from frontend.choice import Choice, Delta
from frontend.engine import Engine
from frontend.errors import ApiError, internal_error, rejected, sequence_failed, too_far_behind, too_slow_reader
from frontend.overload import Load
from frontend.request_metrics import RequestRecord
from pagemill.messages.frontend import AddRequest, Rejection, SequenceOutput
from pagemill.messages.sequences import SequenceKey
from pagemill.telemetry import get_logger

#: What may come for each sequence while the reader is away: some hundreds of tokens, beside what the connection buffers.
MAX_UNSEEN_BYTES = 192 * 1024
#: What an output takes up in memory, each of its tokens, and the logprobs of one beside their arrays.
_OUTPUT_BYTES = 336
_TOKEN_BYTES = 32
_LOGPROBS_BYTES = 180
#: Tokens that one reader turns into text and JSON in one turn of the event loop: up to 2 ms, with twenty logprobs each.
TOKENS_A_TURN = 64

log = get_logger("frontend.generation")


class ClientGoneError(Exception):
    """Nobody is there to answer."""


class Generation:
    """All choices of all prompts of one request, in one queue of events. `choices[i]` belongs to the sequence of choice i."""

    def __init__(
        self,
        engine: Engine,
        record: RequestRecord,
        load: Load,
        choices: Sequence[Choice],
        num_prompt_tokens: int,
        n: int,
        *,
        num_certain_tokens: int = 0,
        log_texts: bool = False,
    ) -> None:
        self.record = record
        self.choices = choices
        self.num_prompt_tokens = num_prompt_tokens  #: of all prompts, each counted once
        self.num_certain_tokens = num_certain_tokens  #: of all choices: only a failure can make them fewer
        self.on_overflow: Callable[[], None] = lambda: None  #: called when the reader is too slow; set by who can cut the connection
        self._engine = engine
        self._load = load
        self._n = n
        self._keys: tuple[SequenceKey, ...] = ()
        self._begun: set[int] = set()  #: choices whose first output has arrived
        self._cached = [0] * len(choices)
        self._make_error: Callable[[], ApiError | ClientGoneError] | None = None  #: what the reader is told; kept itself, it would refer to its reader
        self._event = asyncio.Event()  #: there is something for the reader
        self._waiting: deque[SequenceOutput] = deque()  #: for the reader
        self._num_waiting_bytes = 0
        self._num_waiting_tokens = 0
        self._num_wanted_tokens = 1  #: fewer do not wake the reader
        self._num_unseen_bytes = 0  #: of what has come since the reader was last here
        self._is_absence_suspected = False  #: it will be looked at in the next turn
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

    async def deltas(self, timeout_s: float | None = None, *, at_least: int = 1) -> list[Delta]:
        """What is new, as much as a turn of the event loop allows; nothing if time ran out first. Raises ApiError or ClientGoneError.

        Whoever shows nothing before the end may sleep until so many tokens have come (of all choices, up to `TOKENS_A_TURN`), or an end.
        """
        self._num_wanted_tokens = at_least
        self._num_unseen_bytes = 0
        if self._event.is_set():
            await asyncio.sleep(0)  # others go first
        else:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
            except TimeoutError:
                return []
        self._num_unseen_bytes = 0
        if self._make_error is not None and not self._waiting:
            raise self._make_error()
        deltas = list(self._take_some())
        self._load.hold_unread(self._num_waiting_bytes)
        if not self._waiting and self._make_error is None:
            self._event.clear()
        return deltas

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    @property
    def may_end_by_text(self) -> bool:
        """The scheduler goes on until a reader has seen the text."""
        return any(choice.may_end_by_text for choice in self.choices)

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Of prompts, each counted once: the first choice of each says what the cache held."""
        return sum(self._cached[:: self._n])

    def _take_some(self) -> Iterator[Delta]:
        num_tokens = 0
        while self._waiting and num_tokens < TOKENS_A_TURN:
            output = self._waiting.popleft()
            self._num_waiting_bytes -= _size(output)
            self._num_waiting_tokens -= len(output.token_ids)
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
        if output.key.choice not in self._begun:
            self._begun.add(output.key.choice)
            self._load.started()
        self.record.observe(output.key.choice, output)
        if output.finish_reason == "error":
            log.error("sequence_failed", request_id=self.record.request_id, error=output.error)
            self._fail(partial(sequence_failed, output.error))
            return
        self._cached[output.key.choice] = max(self._cached[output.key.choice], output.num_cached_tokens)
        self._waiting.append(output)
        size = _size(output)
        self._num_waiting_bytes += size
        self._num_unseen_bytes += size
        self._num_waiting_tokens += len(output.token_ids)
        if self._num_waiting_tokens >= self._num_wanted_tokens or output.finish_reason is not None:
            self._event.set()
        if not self._load.hold_unread(self._num_waiting_bytes):
            self._give_up(too_far_behind)
        elif self._is_much_unseen and not self._is_absence_suspected:
            # A burst that arrived at once is no fault of the reader, which could not run meanwhile: it goes first.
            self._is_absence_suspected = True
            asyncio.get_running_loop().call_soon(self._look_for_reader)

    def rejected(self, rejection: Rejection) -> None:
        self._load.started()
        self._fail(partial(rejected, rejection, self._engine.room.retry_after_s()))

    def failed(self) -> None:
        self._fail(internal_error)

    @property
    def _is_much_unseen(self) -> bool:
        return self._num_unseen_bytes > MAX_UNSEEN_BYTES * len(self.choices)

    def _look_for_reader(self) -> None:
        """Whoever has not come by now stands before a connection that takes nothing, and cannot be told."""
        self._is_absence_suspected = False
        if self._is_much_unseen and self._make_error is None:
            self._give_up(too_slow_reader)
            self.on_overflow()

    def _give_up(self, make_error: Callable[[], ApiError]) -> None:
        log.warning("reader_too_slow", request_id=self.record.request_id, waiting_bytes=self._num_waiting_bytes, unseen_bytes=self._num_unseen_bytes)
        self._forget()
        self._fail(make_error)

    def _fail(self, make_error: Callable[[], ApiError | ClientGoneError]) -> None:
        """One sequence's failure is the whole request's; the first failure stands."""
        self._make_error = self._make_error or make_error
        self._event.set()
        self._engine.abort(self._keys)

    def _forget(self) -> None:
        """What waits for the reader is for nobody."""
        self._waiting.clear()
        self._num_waiting_bytes = self._num_waiting_tokens = self._num_unseen_bytes = 0
        self._load.hold_unread(0)


def _size(output: SequenceOutput) -> int:
    """Bytes that an output takes up, roughly."""
    size = _OUTPUT_BYTES + _TOKEN_BYTES * len(output.token_ids)
    for logprobs in output.logprobs:
        size += _LOGPROBS_BYTES + len(logprobs.top_ids) + len(logprobs.top_logprobs)
    return size
