"""A request that is being generated: the one source of deltas for streamed and buffered replies alike.

A `Generation` is the sink of all sequences of one request. Outputs queue up per sequence until the reply's writer takes
them; a writer that never comes (a client that does not read) makes its own request end, never memory grow. Whoever
starts a generation closes it: what still runs is then aborted. One reader at a time.
This module must not know HTTP or the shape of replies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from frontend.choice import Choice, Delta
from frontend.engine import Engine
from frontend.errors import ApiError, generation_failed, internal_error, rejected, too_slow_reader
from frontend.request_metrics import RequestRecord
from pagemill.messages import AddRequest, Rejection, SequenceKey, SequenceOutput
from pagemill.telemetry import get_logger

#: What may wait for a reader, per sequence.
MAX_QUEUED_OUTPUTS = 256
MAX_QUEUED_BYTES = 1024 * 1024

log = get_logger("frontend.generation")


class ClientGoneError(Exception):
    """Nobody is there to answer."""


class _Inbox:
    """Outputs of one sequence that wait for the reader, and how far they go."""

    __slots__ = ("num_bytes", "num_received", "outputs")

    def __init__(self) -> None:
        self.outputs: deque[SequenceOutput] = deque()
        self.num_bytes = 0
        self.num_received = 0  #: output tokens, taken ones included

    @property
    def overflows(self) -> bool:
        return len(self.outputs) > MAX_QUEUED_OUTPUTS or self.num_bytes > MAX_QUEUED_BYTES


class Generation:
    """All choices of all prompts of one request, in one queue of events. `choices[i]` belongs to the sequence of choice i."""

    def __init__(self, engine: Engine, record: RequestRecord, choices: Sequence[Choice], num_prompt_tokens: int, n: int, *, log_texts: bool = False) -> None:
        self.record = record
        self.choices = choices
        self.num_prompt_tokens = num_prompt_tokens  #: of all prompts, each counted once
        self.on_overflow: Callable[[], None] = lambda: None  #: called when the reader is too slow; set by who can cut the connection
        self._engine = engine
        self._n = n
        self._keys: tuple[SequenceKey, ...] = ()
        self._inboxes = [_Inbox() for _ in choices]
        self._cached = [0] * len(choices)
        self._error: ApiError | ClientGoneError | None = None
        self._event = asyncio.Event()
        self._overflow_check_due = False
        self._texts: list[list[str]] | None = [[] for _ in choices] if log_texts else None

    def start(self, sequences: Sequence[AddRequest]) -> None:
        """Hands the sequences to the scheduler. Raises ApiError if there is none."""
        self._keys = tuple(sequence.key for sequence in sequences)
        self._engine.add(sequences, self)

    def close(self) -> None:
        """Ends what still runs. May be called at any time and more than once."""
        self._engine.abort(self._keys)

    def client_gone(self) -> None:
        """The client went away: its sequences end now, and the reader is told."""
        self._fail(ClientGoneError())

    # --- the reader's side --------------------------------------------------------------------------------

    async def deltas(self, timeout_s: float | None = None) -> list[Delta]:
        """Everything that is new, at least one delta; nothing if time ran out first. Raises ApiError or ClientGoneError."""
        if not self._event.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
            except TimeoutError:
                return []
        self._event.clear()
        deltas = [self._take(index, output) for index, inbox in enumerate(self._inboxes) if inbox.outputs for output in self._drain(inbox)]
        if self._error is not None and not deltas:
            self._event.set()
            raise self._error
        if self._error is not None:
            self._event.set()  # to be raised by the next call, after what came before it
        return [delta for delta in deltas if delta is not None]

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

    def _drain(self, inbox: _Inbox) -> list[SequenceOutput]:
        outputs = list(inbox.outputs)
        inbox.outputs.clear()
        inbox.num_bytes = 0
        return outputs

    def _take(self, index: int, output: SequenceOutput) -> Delta | None:
        choice = self.choices[index]
        if choice.finish is not None:
            return None  # tokens that were on their way when a stop string was found
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
        fresh = _without_known(output, inbox.num_received)
        if fresh is None:
            log.error("output_gap", request_id=self.record.request_id, expected=inbox.num_received, received=output.first_index)
            self._fail(internal_error())
            return
        if fresh.finish_reason == "error":
            log.error("sequence_failed", request_id=self.record.request_id, error=fresh.error)
            self.record.observe(output.key.choice, fresh)
            self._fail(generation_failed())
            return
        self.record.observe(output.key.choice, fresh)
        inbox.num_received += len(fresh.token_ids)
        self._cached[output.key.choice] = max(self._cached[output.key.choice], fresh.num_cached_tokens)
        inbox.outputs.append(fresh)
        inbox.num_bytes += _size(fresh)
        self._event.set()
        if inbox.overflows and not self._overflow_check_due:
            # A burst that arrived at once is no fault of the reader, which could not run meanwhile: it goes first.
            self._overflow_check_due = True
            asyncio.get_running_loop().call_soon(self._check_overflow)

    def rejected(self, rejection: Rejection) -> None:
        self._fail(rejected(rejection))

    def failed(self, error: ApiError) -> None:
        self._fail(error)

    def _check_overflow(self) -> None:
        self._overflow_check_due = False
        if not any(inbox.overflows for inbox in self._inboxes):
            return
        log.warning("reader_too_slow", request_id=self.record.request_id, queued_bytes=sum(inbox.num_bytes for inbox in self._inboxes))
        for inbox in self._inboxes:
            self._drain(inbox)
        self._fail(too_slow_reader())
        self.on_overflow()

    def _fail(self, error: ApiError | ClientGoneError) -> None:
        """One sequence's failure is the whole request's; the first failure stands."""
        self._error = self._error or error
        self._event.set()
        self.close()


def _without_known(output: SequenceOutput, num_received: int) -> SequenceOutput | None:
    """`output` less the tokens that were received before; None if some in between are missing."""
    num_known = num_received - output.first_index
    if num_known == 0 or not output.token_ids:
        return output
    if num_known < 0:
        return None
    return SequenceOutput(
        key=output.key,
        first_index=num_received,
        token_ids=output.token_ids[num_known:],
        logprobs=output.logprobs[num_known:],
        finish_reason=output.finish_reason,
        stop_token_id=output.stop_token_id,
        num_cached_tokens=output.num_cached_tokens,
        num_preemptions=output.num_preemptions,
        queue_s=output.queue_s,
        error=output.error,
    )


def _size(output: SequenceOutput) -> int:
    """Bytes that an output holds, roughly."""
    size = 64 + 8 * len(output.token_ids)
    for logprobs in output.logprobs:
        size += 64 + len(logprobs.top_ids) + len(logprobs.top_logprobs)
    return size
