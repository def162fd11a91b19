"""Framing of server-sent events. Pure; must not know what the events say."""

from __future__ import annotations

from collections.abc import Iterable

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
#: A comment: it keeps proxies from dropping an idle stream, and clients skip it.
KEEP_ALIVE = b": keep-alive\n\n"


def events(payloads: Iterable[bytes]) -> bytes:
    """One event per payload, which must not contain a line break (JSON has none)."""
    return b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
