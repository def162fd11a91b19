"""The control socketpair between the launcher and each child: one frame, one message.

Inherited, never named, so nobody else can speak on it. End of file is the other side's death, in either
direction. SOCK_SEQPACKET keeps message borders, so no framing is needed.
"""

from __future__ import annotations

import socket
from typing import Any, Generic, TypeVar

import msgspec

Out = TypeVar("Out")
In = TypeVar("In")

#: Fits the default socket buffer of Linux (208 KiB); only `Start` comes near a kilobyte.
MAX_FRAME_BYTES = 128 * 1024


class ControlSocket(Generic[Out, In]):
    """One end. `receive` blocks unless the socket is non-blocking and returns None at end of file."""

    def __init__(self, end: socket.socket, incoming: Any) -> None:
        self.socket = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)

    def send(self, message: Out) -> bool:
        """False if the other side is gone."""
        try:
            self.socket.send(self._encoder.encode(message), socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> In | None:
        """The next message, or None if the other side is gone. Raises BlockingIOError as the socket's mode says."""
        try:
            frame = self.socket.recv(MAX_FRAME_BYTES)
        except ConnectionResetError:
            return None
        return self._decoder.decode(frame) if frame else None

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()


def control_pair() -> tuple[socket.socket, socket.socket]:
    """(launcher's end, child's end)."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
