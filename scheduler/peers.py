"""The scheduler's channels: one for each worker and each frontend that exists now, as the launcher tells.

A peer that cannot be reached or breaks the protocol is told of, not dealt with: `on_lost` for a frontend, `on_unusable`
for a worker. What a frontend says of another's sequences is dropped and counted. Must not know what else the messages mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq

from pagemill.channels import Channel, ChannelError
from pagemill.messages.control import PeerLost, PeerUp
from pagemill.messages.frontend import AddRequest, DebugStateQuery, DecisionsQuery, FrontendToScheduler, SchedulerReady, SchedulerToFrontend, StatsSnapshot
from pagemill.messages.wire import Hello
from pagemill.messages.worker import SchedulerToWorker, WorkerToScheduler
from pagemill.telemetry import get_logger

log = get_logger("scheduler.peers")

WorkerChannel = Channel[SchedulerToWorker, WorkerToScheduler]
FrontendChannel = Channel[SchedulerToFrontend, FrontendToScheduler]


class Peers:
    """Owns the sockets. Sends never block."""

    def __init__(self, hello: Hello, poller: zmq.Poller) -> None:
        #: Told of a frontend that is gone or stuck, whatever the launcher has noticed yet. Its channel is closed.
        self.on_lost: Callable[[PeerLost], None] = lambda peer: None
        #: Told of a worker that is alive and of no use, and why.
        self.on_unusable: Callable[[int, str], None] = lambda rank, reason: None
        self._hello, self._poller = hello, poller
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._workers: dict[int, WorkerChannel] = {}
        self._frontends: dict[int, FrontendChannel] = {}
        self._incarnations: dict[tuple[str, int], int] = {}  #: by kind and index
        self._num_heard: dict[int, int] = {}  #: frontend -> its `AddRequest`s since its channel exists
        self._told: dict[int, int] = {}  #: frontend -> the epoch of which it has been told that it is ready
        self._num_dropped = 0  #: by channels that are closed, and of what frontends said of others' sequences

    # --- come and go -----------------------------------------------------------------------------------

    def connect(self, peer: PeerUp) -> None:
        """Binds the address at which the peer will be met. A former incarnation of it is forgotten."""
        if peer.kind == "worker":
            self._close(self._workers.pop(peer.index, None))
            worker: WorkerChannel = Channel(self._context, peer.address, bind=True, hello=self._hello, peer="worker", incoming=WorkerToScheduler)
            self._workers[peer.index] = worker
            self._poller.register(worker.socket, zmq.POLLIN)
        elif peer.kind == "frontend":
            self._close_frontend(peer.index)
            frontend: FrontendChannel = Channel(self._context, peer.address, bind=True, hello=self._hello, peer="frontend", incoming=FrontendToScheduler)
            self._frontends[peer.index] = frontend
            self._num_heard[peer.index] = 0
            self._poller.register(frontend.socket, zmq.POLLIN)
        self._incarnations[peer.kind, peer.index] = peer.incarnation

    def disconnect(self, peer: PeerLost) -> bool:
        """Closes the channel to a peer that is gone; false if its successor is here already."""
        if self._incarnations.get((peer.kind, peer.index)) != peer.incarnation:
            return False
        if peer.kind == "frontend":
            self._close_frontend(peer.index)
        elif peer.kind == "worker":
            self._close(self._workers.pop(peer.index, None))
        return True

    def incarnation(self, kind: str, index: int) -> int:
        return self._incarnations[kind, index]

    def close(self) -> None:
        self._context.destroy(linger=0)

    # --- in --------------------------------------------------------------------------------------------

    def from_workers(self) -> Iterator[tuple[int, WorkerToScheduler]]:
        for rank, channel in list(self._workers.items()):
            try:
                while not channel.socket.closed and (message := channel.receive()) is not None:
                    yield rank, message
            except ChannelError as error:
                log.error("worker_unusable", rank=rank, error=str(error))
                self._close(self._workers.pop(rank, None))
                self.on_unusable(rank, str(error))

    def from_frontends(self) -> Iterator[tuple[int, FrontendToScheduler]]:
        for index, channel in list(self._frontends.items()):
            try:
                while not channel.socket.closed and (message := channel.receive()) is not None:
                    self._num_heard[index] += isinstance(message, AddRequest)
                    if self._is_own(index, message):
                        yield index, message
                    else:
                        self._num_dropped += 1
            except ChannelError as error:
                self._drop(index, str(error))

    def _is_own(self, index: int, message: FrontendToScheduler) -> bool:
        """It concerns a sequence of the frontend that sent it, or none."""
        key = None if isinstance(message, DebugStateQuery | DecisionsQuery) else message.key
        return key is None or (key.frontend, key.incarnation) == (index, self._incarnations["frontend", index])

    # --- out -------------------------------------------------------------------------------------------

    def send_workers(self, message: SchedulerToWorker) -> None:
        """The same bytes to every rank."""
        frame = self._encoder.encode(message)
        for rank, channel in list(self._workers.items()):
            try:
                channel.send_frame(frame)
            except ChannelError as error:
                self.on_unusable(rank, str(error))

    def send_frontend(self, index: int, message: SchedulerToFrontend) -> None:
        """To one that is there; one that does not take it is dropped."""
        channel = self._frontends.get(index)
        if channel is None:
            return
        try:
            channel.send(message)
        except ChannelError as error:
            self._drop(index, str(error))

    def send_snapshot(self, snapshot: StatsSnapshot) -> None:
        """To each frontend that knows of a core, with how much of what it has sent is counted in there."""
        for index in self.told():
            self.send_frontend(index, msgspec.structs.replace(snapshot, requests_heard=self._num_heard.get(index, 0)))

    def untold(self, epoch: int) -> list[int]:
        """Frontends that have greeted and have not been told that this epoch is ready."""
        return [index for index, channel in self._frontends.items() if channel.greeted and self._told.get(index) != epoch]

    def tell_ready(self, index: int, ready: SchedulerReady) -> None:
        self._told[index] = ready.epoch
        self.send_frontend(index, ready)

    def told(self) -> list[int]:
        """Frontends that know of this scheduler."""
        return sorted(self._told)

    def take_dropped(self) -> int:
        """Frames that could not be decoded and were dropped, since the last call."""
        channels: list[Channel[Any, Any]] = [*self._workers.values(), *self._frontends.values()]
        dropped, self._num_dropped = self._num_dropped + sum(channel.num_dropped for channel in channels), 0
        for channel in channels:
            channel.num_dropped = 0
        return dropped

    def _drop(self, index: int, reason: str) -> None:
        log.warning("frontend_dropped", index=index, reason=reason)
        self._close_frontend(index)
        self.on_lost(PeerLost("frontend", index, self._incarnations["frontend", index], reason))

    def _close_frontend(self, index: int) -> None:
        self._told.pop(index, None)
        self._close(self._frontends.pop(index, None))

    def _close(self, channel: Channel[Any, Any] | None) -> None:
        if channel is not None:
            self._num_dropped += channel.num_dropped
            self._poller.unregister(channel.socket)
            channel.close()
