"""Whether the operator accepts a licence that asks for it, before a model under it is fetched for the first time.

The terms are always shown. At a terminal there is a question; without one, naming the model is the answer, for whoever
writes a name into a script or a unit file has chosen it, and a server must not wait for somebody who is not there.
Must not know models or where they come from.
"""

from __future__ import annotations

import os
import sys


def accepts(terms: str) -> bool:
    """Shows one sentence on standard error and, if somebody is there, asks."""
    print(terms, file=sys.stderr, flush=True)
    if not _somebody_is_there():
        return True
    print("Fetch it under these terms? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _somebody_is_there() -> bool:
    """A terminal on both sides, and we are in its foreground: reading from the background would stop the process."""
    try:
        return sys.stdin.isatty() and sys.stderr.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):  # closed, replaced, or none at all
        return False
