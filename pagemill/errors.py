"""What an operator did that cannot work, in one line. Knows nothing of what was tried."""

from __future__ import annotations

#: Exit code of the program, and of any process of it, that could not work as it was asked to.
REFUSED_CODE = 2


class UsageError(Exception):
    """Ends the program with exit code 2 and its message as one line: what is wrong and which flag changes it."""
