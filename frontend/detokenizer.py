"""Token ids to text, one at a time, never splitting a character.

The bytes of tokens are joined and decoded as UTF-8: an incomplete character waits for its rest (at most three bytes),
bytes that can never become one are replaced by U+FFFD at once. For every sequence of ids, the pieces joined are the
text that decoding all ids at once gives; or, of ids that continue a text, what they add to it. Pure; must not know stop strings or requests.
"""

from __future__ import annotations

import codecs

from frontend.token_bytes import TokenBytes


class Detokenizer:
    """The text of one sequence so far. Feed every id once, then flush once. `begins_text`: no text stands before it."""

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool, *, begins_text: bool = True) -> None:
        self._token_bytes = token_bytes
        self._hidden = token_bytes.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next_space = begins_text and token_bytes.strips_first_space

    def feed(self, token_id: int) -> str:
        """The text that is certain now and was not before."""
        if token_id in self._hidden:
            return ""
        data = self._token_bytes(token_id)
        if self._strip_next_space and data:
            self._strip_next_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left when no more ids come: a replacement for a character cut in half, or nothing."""
        return self._decoder.decode(b"", final=True)
