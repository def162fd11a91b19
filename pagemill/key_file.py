"""What is a key in a file of keys: the same for the server, which takes all of them, and for its clients, which take the first.

One key per line. Blank lines and those that begin with # say nothing.
Pure: it must not know where a text comes from, nor what a key opens.
"""

from __future__ import annotations

from collections.abc import Iterator


def numbered_keys(text: str) -> Iterator[tuple[int, str]]:
    """(number of its line, key), in the order of the file."""
    for number, line in enumerate(text.splitlines(), start=1):
        key = line.strip()
        if key and not key.startswith("#"):
            yield number, key
