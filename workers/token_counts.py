"""Which ids a history holds and how often each was written, kept so that a step pays for its new tokens alone.

Penalties ask for it at every step of a row, and a history only grows: what has been counted stays so. Whoever
counts the same history again counts nothing. Knows no parameters and no logits.
"""

from __future__ import annotations

from array import array

import msgspec


class TokenCounts(msgspec.Struct):
    """One row's. Belongs to the worker's row and ends with it: a row whose history became another one is a new row."""

    num_counted: int = 0  #: tokens at the beginning of the history that are in here
    #: Each id of prompt and output once, in the order in which they first appeared.
    token_ids: array[int] = msgspec.field(default_factory=lambda: array("i"))
    #: How often each of `token_ids` stands in the output.
    num_written: array[int] = msgspec.field(default_factory=lambda: array("i"))
    _places: dict[int, int] = msgspec.field(default_factory=dict)  #: where an id stands in both

    def count(self, history: array[int], num_prompt_tokens: int) -> None:
        """Brings this up to date with a history that begins with what was counted before."""
        new = [token_id for token_id in dict.fromkeys(history[self.num_counted :]) if token_id not in self._places]
        self._places.update(zip(new, range(len(self.token_ids), len(self.token_ids) + len(new)), strict=True))
        self.token_ids.extend(new)
        self.num_written.extend([0] * len(new))
        for token_id in history[max(self.num_counted, num_prompt_tokens) :]:
            self.num_written[self._places[token_id]] += 1
        self.num_counted = len(history)
