"""Typed zmq channels: one DEALER pair per (scheduler, peer), over ipc, with a handshake.

A channel knows message types and nothing of processes' insides. Sends never block: what bounds them is
the number of plans and requests in flight, not a high-water mark, so a full socket means a stuck peer and
raises. Frames that do not decode are dropped and counted. A channel never outlives its peer: a new
incarnation of the peer is a new address and a new channel.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from pagemill import PROTOCOL_VERSION
from pagemill.messages.wire import Hello, ProcessKind

Out = TypeVar("Out")
In = TypeVar("In")

#: Longest frame a peer may send: a request of many million tokens still fits, a runaway length does not.
MAX_FRAME_BYTES = 256 * 1024 * 1024
#: Messages that an event loop takes from a channel before it looks at what else is due.
_MESSAGES_A_TURN = 4


class ChannelError(Exception):
    """The peer is stuck, is not who it should be, or speaks another protocol version."""


class Channel(Generic[Out, In]):
    """One end of a pair. `hello` is this end's own; `peer` is the kind expected at the other."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, bind: bool, hello: Hello, peer: ProcessKind, incoming: Any) -> None:
        self.num_dropped = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In | Hello] = msgspec.msgpack.Decoder(incoming | Hello)
        self._hello = hello
        self._peer_kind = peer
        self.greeted = False  #: the peer's handshake has arrived; a bound end may send only from then on
        self._after_send: Callable[[], object] | None = None
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._bound = bind
        self._address = address
        if bind:  # a bound DEALER has nowhere to send to until the peer connects: it answers the peer's Hello
            self.socket.bind(address)
        else:
            self.socket.connect(address)
            self.send_frame(self._encoder.encode(hello))

    def send(self, message: Out) -> None:
        """Sends without blocking. Raises ChannelError if the socket cannot take it."""
        self.send_frame(self._encoder.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Sends an already encoded message: a plan is encoded once for all ranks."""
        try:
            self.socket.send(frame, zmq.NOBLOCK, copy=len(frame) < 65536)
        except zmq.Again as error:
            raise ChannelError(f"channel to {self._peer_kind} is stuck") from error
        if self._after_send is not None:
            self._after_send()

    def receive(self) -> In | None:
        """The next message, or None if none is waiting. Raises ChannelError on a wrong handshake."""
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                message = self._decoder.decode(frame)
            except msgspec.MsgspecError:
                self.num_dropped += 1
                continue
            if isinstance(message, Hello):
                self._greet(message)
            elif not self.greeted:
                raise ChannelError(f"{self._peer_kind} spoke before its handshake")
            else:
                return message

    def attach(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[In], object], on_broken: Callable[[ChannelError], object]) -> None:
        """Calls `on_message` for each message from now on, in the event loop, and `on_broken` if the peer is not who it should be.

        The descriptor of a zmq socket is edge-triggered and sending may consume the edge, so it is
        drained after every send as well; a few messages in one turn of the loop, however much is sent, so
        that a peer which is faster than this process does not keep it from everything else.
        """
        is_due = False

        def drain_soon() -> None:
            nonlocal is_due
            if not is_due:
                is_due = True
                loop.call_soon(drain)

        def drain() -> None:
            nonlocal is_due
            is_due = False
            for _ in range(_MESSAGES_A_TURN):
                try:
                    message = None if self.socket.closed else self.receive()
                except ChannelError as error:
                    on_broken(error)
                    return
                if message is None:
                    return
                try:
                    on_message(message)
                except Exception:
                    drain_soon()  # or what came with it would lie until something else comes
                    raise
            drain_soon()

        loop.add_reader(self._descriptor(), drain_soon)
        self._after_send = drain_soon
        drain_soon()

    def detach(self, loop: asyncio.AbstractEventLoop) -> None:
        """The opposite of `attach`."""
        loop.remove_reader(self._descriptor())
        self._after_send = None

    def close(self) -> None:
        self.socket.close()
        if self._bound and self._address.startswith("ipc://"):  # zmq leaves the file where it is
            Path(self._address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _descriptor(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))

    def _greet(self, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ChannelError(f"{hello.kind} speaks protocol {hello.protocol_version}, this process {PROTOCOL_VERSION}: broken installation")
        if hello.kind != self._peer_kind or not hmac.compare_digest(hello.token, self._hello.token):
            raise ChannelError(f"a stranger claims to be {self._peer_kind}")
        self.greeted = True
        if self._bound:
            self.send_frame(self._encoder.encode(self._hello))
