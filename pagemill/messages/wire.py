"""What makes a struct a message, and the handshake that comes before all others.

Positions instead of names, for both ends come from one distribution; whoever comes from another is refused by its `Hello`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ProcessKind = Literal["frontend", "scheduler", "worker"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A member of a direction's union: positional, tagged with its class name."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A part of a message: positional, untagged."""


class Hello(Message):
    """First message of either end of a zmq pair. A wrong token or version closes the pair."""

    token: bytes
    protocol_version: int
    kind: ProcessKind
    index: int
    incarnation: int

    def __repr__(self) -> str:
        return f"Hello({self.kind} {self.index}, incarnation {self.incarnation})"
