"""HTTP on a socket of its own, of which a test decides how it is read and when it is closed."""

from __future__ import annotations

import json
import socket
from contextlib import suppress

from tests.helpers.fake_scheduler import DEADLINE_S


def connect(port: int, *, receive_buffer: int | None = None) -> socket.socket:
    """`receive_buffer` bytes: a small one takes little unless it is read."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(DEADLINE_S)
    connection.connect(("127.0.0.1", port))
    return connection


def post_raw(port: int, path: str, body: dict[str, object], *, receive_buffer: int | None = None) -> socket.socket:
    data = json.dumps(body).encode()
    connection = connect(port, receive_buffer=receive_buffer)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    """Everything up to the connection's end, be it orderly or a reset."""
    received = bytearray()
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            received += piece
    return bytes(received)
