"""The waiting room: sequences that are taken while there is no scheduler, and that none has been given yet.

A scheduler bounds its own queue; while none is there, this is the queue, and it is bounded alike: in sequences, prompt
tokens and bytes, and in how long each may wait. Sequences that a scheduler was given once are not here: they have
been admitted, and wait in `Engine` for whoever goes on with them. Pure; must not know channels, nor clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from frontend.errors import queue_full
from frontend.in_flight import LiveSequence
from pagemill.ids import num_ids
from pagemill.messages.frontend import AddRequest, Rejection
from pagemill.messages.sequences import SequenceKey

#: What all waiting sequences may take up together, not counting Python's own objects.
MAX_BYTES = 64 * 1024 * 1024
#: What one stop token id or logit bias of a request takes up, roughly.
_ENTRY_BYTES = 64
#: The shortest wait that a scheduler is told of: 0 would mean that there is no limit.
_LEAST_WAIT_S = 0.001


@dataclass(slots=True)
class _Guest:
    sequence: LiveSequence
    num_tokens: int
    num_bytes: int
    since: float


class WaitingRoom:
    """One per frontend, in its engine."""

    def __init__(self, max_num_sequences: int, max_num_tokens: int) -> None:
        self.max_num_sequences = max_num_sequences
        self.max_num_tokens = max_num_tokens
        self.retry_after_s: Callable[[], int] = lambda: 1  #: when to come again for whoever finds it full
        self._guests: dict[SequenceKey, _Guest] = {}  #: in order of arrival
        self._num_tokens = 0
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._guests)

    def admit(self, sequences: Sequence[LiveSequence], now: float) -> None:
        """All of them or none. Raises ApiError (429) if they do not fit; one request may be as large as it likes while nobody else waits."""
        guests = [_guest(sequence, now) for sequence in sequences]
        num_tokens = self._num_tokens + sum(guest.num_tokens for guest in guests)
        num_bytes = self._num_bytes + sum(guest.num_bytes for guest in guests)
        is_too_much = bool(self._guests) and (num_tokens > self.max_num_tokens or num_bytes > MAX_BYTES)
        if is_too_much or len(self._guests) + len(guests) > self.max_num_sequences:
            raise queue_full(self.retry_after_s())
        for guest in guests:
            self._enter(guest)

    def keep(self, sequence: LiveSequence, now: float) -> None:
        """One that was about to be given to a scheduler which is gone: it is here, and no limit stands against it."""
        if sequence.key not in self._guests:
            self._enter(_guest(sequence, now))

    def leave(self, key: SequenceKey) -> None:
        """It has gone to a scheduler, or has ended. Whoever is not here is passed over."""
        guest = self._guests.pop(key, None)
        if guest is not None:
            self._num_tokens -= guest.num_tokens
            self._num_bytes -= guest.num_bytes

    def shortened(self, request: AddRequest, now: float) -> AddRequest:
        """The request as a scheduler is to have it: it may wait there for what is left of its time."""
        guest, limits = self._guests.get(request.key), request.limits
        if guest is None or limits.max_queue_s <= 0:
            return request
        left_s = max(_LEAST_WAIT_S, limits.max_queue_s - (now - guest.since))
        return msgspec.structs.replace(request, limits=msgspec.structs.replace(limits, max_queue_s=left_s))

    def expired(self, now: float) -> list[Rejection]:
        """Those that have waited for longer than they said, whatever they wait for. They are still here."""
        rejections: list[Rejection] = []
        for key, guest in self._guests.items():
            limit_s = guest.sequence.request.limits.max_queue_s
            if 0 < limit_s <= now - guest.since:
                rejections.append(Rejection(key, "queue_timeout", round(1000 * (now - guest.since)), round(1000 * limit_s)))
        return rejections

    def _enter(self, guest: _Guest) -> None:
        self._guests[guest.sequence.key] = guest
        self._num_tokens += guest.num_tokens
        self._num_bytes += guest.num_bytes


def _guest(sequence: LiveSequence, now: float) -> _Guest:
    request = sequence.request
    num_entries = len(request.sampling.logit_bias) + len(request.sampling.stop_token_ids)
    num_bytes = len(request.prompt_ids) + len(request.prefix_keys) + _ENTRY_BYTES * num_entries
    return _Guest(sequence, num_ids(request.prompt_ids), num_bytes, now)
