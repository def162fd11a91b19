"""What this frontend waits for: each live sequence with its request, its taker, and the output tokens received so far.

A scheduler can be lost with everything it knew. What stands here is enough for the next one to go on at the very token
where the former stopped: the request as it was, and the tokens that have arrived. What the scheduler says of a sequence
beside its tokens (cached, preempted, queued) is counted from zero again by the next one; here the parts are put together.
Pure; must not know channels, schedulers or text.
"""

from __future__ import annotations

from array import array
from typing import Protocol

import msgspec

from pagemill.ids import NONE
from pagemill.messages.frontend import AddRequest, Rejection, SequenceOutput
from pagemill.messages.sequences import SequenceKey


class Sink(Protocol):
    """What takes the outputs of a request's sequences. Called in the event loop; must not block."""

    def output(self, output: SequenceOutput) -> None: ...

    def rejected(self, rejection: Rejection) -> None: ...

    def failed(self) -> None:
        """Something went wrong here that is no fault of the request."""


class LiveSequence:
    """One sequence from its `add` to its end."""

    __slots__ = ("_before", "_last", "_received", "request", "sent", "sink")

    def __init__(self, request: AddRequest, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.sent = False  #: some scheduler was given it, be it gone by now
        self._received = array("i")  #: output token ids
        self._last: SequenceOutput | None = None
        self._before: SequenceOutput | None = None  #: the last output of former schedulers

    @property
    def key(self) -> SequenceKey:
        return self.request.key

    def take(self, output: SequenceOutput) -> SequenceOutput | None:
        """The part of `output` that is new; None if tokens before it are missing."""
        num_known = len(self._received) - output.first_index
        if num_known < 0:
            return None
        if num_known > 0 and output.token_ids:
            output = msgspec.structs.replace(
                output, first_index=len(self._received), token_ids=output.token_ids[num_known:], logprobs=output.logprobs[num_known:]
            )
        if self._before is not None:
            output = _continued(output, self._before)
        self._received.extend(output.token_ids)
        self._last = output
        return output

    def again(self) -> AddRequest:
        """The request as a scheduler needs it that has never heard of it."""
        if not self.sent:
            return self.request
        self._before = self._last
        return msgspec.structs.replace(self.request, output_ids=self._received.tobytes(), resubmitted=True)

    def aborted(self) -> SequenceOutput:
        """A last output that ends it here, with the numbers that stood last."""
        last = self._last
        return SequenceOutput(
            key=self.key,
            first_index=len(self._received),
            token_ids=(),
            logprobs=(),
            finish_reason="abort",
            stop_token_id=NONE,
            num_cached_tokens=0 if last is None else last.num_cached_tokens,
            num_preemptions=0 if last is None else last.num_preemptions,
            queue_s=0.0 if last is None else last.queue_s,
            error="",
        )


def _continued(output: SequenceOutput, before: SequenceOutput) -> SequenceOutput:
    """`output` of a scheduler that took the sequence over, as if there had been one all along: its prompt was cached and queued for once only."""
    return msgspec.structs.replace(
        output,
        num_cached_tokens=before.num_cached_tokens,
        num_preemptions=before.num_preemptions + output.num_preemptions,
        queue_s=before.queue_s,
    )
