"""One choice of a reply: the tokens of one sequence become text, piece by piece.

Detokenizing, stop strings, hidden tokens and logprobs meet here and nowhere else, so a streamed reply and a buffered one
cannot differ. A choice is fed the outputs of its sequence in order and gives a `Delta` for each; after its finish it
takes nothing more. Pure; must not know the scheduler, HTTP or the shape of replies.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from frontend.detokenizer import Detokenizer
from frontend.stop_strings import StopStrings
from frontend.token_bytes import TokenBytes
from pagemill.ids import NONE
from pagemill.messages.frontend import SequenceOutput
from pagemill.messages.sequences import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What a request wants to see of its output."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False  #: a stop string, or a stop token's text, stays in the text
    skip_special_tokens: bool = True
    min_tokens: int = 0  #: text of the first so many tokens is not searched for stop strings
    stop_token_ids: frozenset[int] = frozenset()  #: those that the request named itself
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token whose logprobs are shown, and where its text begins in the choice's text."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a choice. `stop_reason` is the stop string or the id of the stop token, where the request named it."""

    reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one output added to a choice. `keep` is set if a stop string ended it: so many tokens belong to the reply."""

    choice: int
    text: str
    entries: tuple[TokenEntry, ...]
    num_tokens: int  #: output tokens of this choice so far
    finish: Finish | None = None
    keep: int | None = None


@dataclass(slots=True)
class _Pending:
    """A token whose text has not been handed on completely."""

    entry: TokenEntry
    end: int = field(default=0)  #: where its text ends in the detokenized text, which may run ahead of what is handed on


class Choice:
    """The state of one choice. `finish` is set once, by its last delta. `begins_text`: its text does not continue the prompt's."""

    def __init__(self, index: int, token_bytes: TokenBytes, options: TextOptions, *, begins_text: bool = True) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish: Finish | None = None
        self._options = options
        self._detokenizer = Detokenizer(token_bytes, options.skip_special_tokens, begins_text=begins_text)
        self._stops = StopStrings(options.stops, options.include_stop)
        self._num_detokenized = 0  #: characters
        self._num_emitted = 0  #: characters
        self._pending: deque[_Pending] = deque()

    @property
    def may_end_by_text(self) -> bool:
        """Not only by its tokens, which the scheduler sees as well."""
        return bool(self._options.stops)

    def feed(self, output: SequenceOutput) -> Delta:
        """Takes the next tokens of the sequence, and its end if it has come."""
        pieces: list[str] = []
        hidden = len(output.token_ids) - 1 if output.stop_token_id != NONE and not self._options.include_stop else NONE
        for position, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if position == hidden:
                break
            pieces.append(self._feed_token(token_id, output.logprobs[position] if self._options.logprobs and output.logprobs else None))
            if self._stops.matched is not None:
                return self._stopped_by_string(pieces)
        if output.finish_reason is None:
            return self._delta(pieces)
        pieces.append(self._hand_on(self._detokenizer.flush()))
        if self._stops.matched is not None:
            return self._stopped_by_string(pieces)
        pieces.append(self._stops.flush())
        stop_reason = output.stop_token_id if output.stop_token_id in self._options.stop_token_ids else None
        self.finish = Finish(output.finish_reason, stop_reason)
        return self._delta(pieces)

    def _feed_token(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
        text = self._detokenizer.feed(token_id)
        if logprobs is not None:
            entry = TokenEntry(token_id, self._num_detokenized, logprobs)
            self._pending.append(_Pending(entry, self._num_detokenized + len(text)))
        self._num_detokenized += len(text)
        return self._hand_on(text)

    def _hand_on(self, text: str) -> str:
        return text if self.num_tokens <= self._options.min_tokens else self._stops.feed(text)

    def _stopped_by_string(self, pieces: list[str]) -> Delta:
        self.finish = Finish("stop", self._stops.matched)
        return self._delta(pieces, keep=self.num_tokens)

    def _delta(self, pieces: list[str], keep: int | None = None) -> Delta:
        text = "".join(pieces)
        self._num_emitted += len(text)
        return Delta(self.index, text, tuple(self._release()), self.num_tokens, self.finish, keep)

    def _release(self) -> list[TokenEntry]:
        """Entries whose text has been handed on; at the end also the one that a stop string cut."""
        released = []
        while self._pending and (self._pending[0].end <= self._num_emitted or self._is_cut(self._pending[0])):
            released.append(self._pending.popleft().entry)
        return released

    def _is_cut(self, pending: _Pending) -> bool:
        return self.finish is not None and pending.entry.offset < self._num_emitted
