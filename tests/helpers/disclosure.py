"""What no client may learn from an error: where files lie, addresses in memory, and what exceptions say.

Must not know which errors there are.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Parts of texts that come from inside: paths, addresses, tracebacks, names of Python's and libraries' exceptions.
_INSIDE = re.compile(
    r"(?<![\w.])/(?:home|root|tmp|usr|var|opt|proc|dev|etc|work|srv|mnt)/"
    r"|0x[0-9a-fA-F]{6,}|Traceback|File \"|line \d+, in |site-packages|\.py\b"
    r"|<[\w.]+ object|\b(?:[A-Z]\w*)?(?:Error|Exception)\b|msgspec|starlette|uvicorn|asyncio"
)


def disclosed(text: str) -> list[str]:
    """What of a text that went to a client comes from inside the server."""
    found = [match.group() for match in _INSIDE.finditer(text)]
    return found + [inside for inside in (str(ROOT), sys.prefix, os.uname().nodename) if len(inside) > 3 and inside in text]
