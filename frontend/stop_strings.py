"""Finding stop strings in a text that arrives in pieces.

What has been handed on cannot be taken back, so a tail that may be the beginning of a stop string is held until it is
proved or disproved; nothing else is held. The stop that is complete first wins (of several that end at the same place,
the one that began first), so the result does not depend on where the pieces were cut.
Pure; must not know tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one text. After a match nothing may be fed."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that can be handed on; up to the stop string if `matched` is set afterwards."""
        if not self._stops:
            return text
        text = self._held + text
        self._held = ""
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            return text[: end if self._include_stop else start]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """What was held and is certain now, because the text is at its end."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
