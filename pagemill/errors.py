"""What an operator did that cannot work, in one line. Knows nothing of what was tried."""

from __future__ import annotations


class UsageError(Exception):
    """Ends the program with exit code 2 and its message as one line: what is wrong and which flag changes it."""
