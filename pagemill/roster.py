"""Who lives: starts children, gives each its incarnation, introduces it to its peers, and tells them of its end.

Workers and frontends each meet the scheduler on a socket of their own, named by both incarnations, and hear of each
other only through it; but frontends are told of every end, because they answer for the server's health. Must not decide
who is to live, and knows neither time nor signals.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.injection import reach
from pagemill.messages.control import LauncherToChild, PeerLost, PeerReady, PeerUp, Reload
from pagemill.messages.wire import ProcessKind
from pagemill.process import Process, ProcessSpec, encode_config
from pagemill.run_directory import remove_rendezvous, remove_sockets, rendezvous_path, socket_address

Place = tuple[ProcessKind, int]


class Roster:
    """The children of one server, each in its place: a kind and an index."""

    def __init__(self, specs: Sequence[ProcessSpec], *, directory: str, token: bytes, injections: tuple[str, ...]) -> None:
        self._specs: dict[Place, ProcessSpec] = {(spec.kind, spec.index): spec for spec in specs}
        self._directory = directory
        self._token = token
        self._injections = injections
        self._incarnations: dict[Place, int] = {}  #: the latest of each place; workers are only ever started together
        self._living: list[Process] = []  #: in the order in which they were started

    def living(self, *kinds: ProcessKind) -> list[Process]:
        """Those of these kinds, or all, in the order in which they were started."""
        return [process for process in self._living if process.alive and (not kinds or process.kind in kinds)]

    def missing(self, *kinds: ProcessKind) -> list[Place]:
        """The places of these kinds, or all, that nobody fills, in the order of the specs."""
        filled = {(process.kind, process.index) for process in self.living()}
        return [place for place in self._specs if place not in filled and (not kinds or place[0] in kinds)]

    def is_ready(self) -> bool:
        """Every place is filled by somebody who can do its work."""
        return not self.missing() and all(process.ready for process in self.living())

    def has_group(self, incarnation: int) -> bool:
        """All workers are there, and of this incarnation."""
        return not self.missing("worker") and all(worker.incarnation == incarnation for worker in self.living("worker"))

    def find(self, kind: ProcessKind, index: int, incarnation: int) -> Process | None:
        wanted = (kind, index, incarnation)
        return next((process for process in self.living(kind) if (process.kind, process.index, process.incarnation) == wanted), None)

    def tell(self, message: LauncherToChild, *kinds: ProcessKind) -> None:
        for process in self.living(*kinds):
            process.send(message)

    def spawn(self, place: Place) -> Process:
        """Starts the next incarnation. Raises OSError."""
        incarnation = self._next_incarnation(place)
        process = Process(
            self._specs[place],
            incarnation=incarnation,
            token=self._token,
            injections=self._injections,
            rendezvous=rendezvous_path(self._directory, incarnation) if place[0] == "worker" and self._has_ranks else "",
        )
        self._incarnations[place] = incarnation
        self._living.append(process)
        reach("launcher.spawned")
        if process.kind == "scheduler":
            for peer in self.living("worker", "frontend"):
                self._introduce(process, peer)
        else:
            for scheduler in self.living("scheduler"):
                self._introduce(scheduler, process)
        return process

    def note_ready(self, process: Process) -> None:
        """It can do its work. The scheduler has to know of a worker that does not only exist."""
        process.ready = True
        if process.kind == "worker":
            self.tell(_ready_peer(process), "scheduler")

    def remove(self, process: Process, reason: str) -> None:
        """After its end."""
        self._living.remove(process)
        reach("launcher.buried")
        lost = PeerLost(kind=process.kind, index=process.index, incarnation=process.incarnation, reason=reason)
        self.tell(lost, "scheduler", "frontend")
        if process.kind == "scheduler":
            self.tell(lost, "worker")
            remove_sockets(self._directory, process.incarnation)
        if process.kind == "worker" and self._has_ranks and not self.living("worker"):
            remove_rendezvous(self._directory, process.incarnation)

    def reconfigure(self, specs: Sequence[ProcessSpec]) -> None:
        """Gives the living and all that follow their new configs; for the same places as before."""
        self._specs = {(spec.kind, spec.index): spec for spec in specs}
        for process in self.living():
            process.send(Reload(encode_config(self._specs[process.kind, process.index].config)))

    @property
    def _has_ranks(self) -> bool:
        """There are several workers, which have to find each other."""
        return sum(kind == "worker" for kind, _ in self._specs) > 1

    def _next_incarnation(self, place: Place) -> int:
        """A worker has that of the group it joins, which is a new one if nobody of it lives: what ranks of two groups computed would not fit together."""
        is_worker = place[0] == "worker"
        if is_worker and (group := self.living("worker")):
            return group[0].incarnation
        places = [other for other in self._specs if other[0] == "worker"] if is_worker else [place]
        return max(self._incarnations.get(other, -1) for other in places) + 1

    def _introduce(self, scheduler: Process, peer: Process) -> None:
        address = socket_address(self._directory, peer.kind, peer.index, peer.incarnation, scheduler.incarnation)
        for one, other in ((scheduler, peer), (peer, scheduler)):
            one.send(PeerUp(kind=other.kind, index=other.index, incarnation=other.incarnation, address=address))
        if peer.kind == "worker" and peer.ready:
            scheduler.send(_ready_peer(peer))


def _ready_peer(process: Process) -> PeerReady:
    return PeerReady(kind=process.kind, index=process.index, incarnation=process.incarnation)
