"""Faults that strike the processes of a running server, and what each of them may cost.

`strike` does it and tells when. Deaths are at once; a `stop` is found by whoever watches the process; a `freeze` ends by
itself before that. Others are requests that no worker can compute, each with a token of its own (`REQUESTS`). Must not
know what the clients see.
"""

from __future__ import annotations

import ctypes
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import psutil

from scripts.lib.chaos_clients import RESERVED_TOKEN_IDS
from tests.helpers.server import Server, client_ports


class BadRequest(NamedTuple):
    """A request that fails alone, with this code."""

    token_id: int  #: in its prompt, and in no other
    fault: str  #: for `--inject`
    code: str
    deaths: tuple[int, int] = (0, 0)  #: of workers until the culprit is known, at least and at most


def _bad_request(token_id: int, point: str, action: str, code: str) -> BadRequest:
    return BadRequest(token_id, f"{point}={action}~{token_id}", code)


_POISON, _RAISE, _NAN = RESERVED_TOKEN_IDS
REQUESTS = {
    # It dies twice alone, and before that once in company, unless it has none.
    "poison": _bad_request(_POISON, "worker.forward", "kill", "request_failed")._replace(deaths=(2, 3)),
    "raise": _bad_request(_RAISE, "worker.forward", "raise", "generation_failed"),
    "nan": _bad_request(_NAN, "worker.logits", "corrupt", "generation_failed"),
}
SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP, "freeze": signal.SIGSTOP}
KINDS = (*SIGNALS, *REQUESTS)
#: Shorter than any watchdog's patience.
FREEZE_S = (0.1, 0.8)
#: A watchdog kills frontends and schedulers that are silent for so long.
HEARTBEAT_S = 10.0
#: Between two looks at a process that is being stopped.
_STOP_LOOK_S = 0.001
_LIBC = ctypes.CDLL(None, use_errno=True)
#: Chance that another process dies while the first is being repaired, and when.
_DOUBLE, _DOUBLE_S = 0.25, (0.0, 2.0)


@dataclass(frozen=True)
class Fault:
    """`process` is a title, for example `worker 0`: of several ranks any, and the whole group dies with it."""

    kind: str
    process: str
    seconds: float = 0.0  #: until a freeze ends
    after_s: float = 0.0  #: since the first fault of the same round
    num_ranks: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.process}"

    @property
    def process_kind(self) -> str:
        return self.process.partition(" ")[0]

    @property
    def request(self) -> BadRequest:
        """What is asked, if its kind is one of `REQUESTS`. Of several ranks none can try a step again in which another may have raised."""
        found, fatal = REQUESTS[self.kind], REQUESTS["poison"]
        return found._replace(code=fatal.code, deaths=fatal.deaths) if self.kind == "raise" and self.num_ranks > 1 else found

    @property
    def deaths(self) -> tuple[int, int]:
        """How many it causes, at least and at most."""
        if self.kind in REQUESTS:
            return self.request.deaths
        return (0, 0) if self.kind == "freeze" else (1, 1)


@dataclass(frozen=True)
class Limits:
    """Seconds within which a fault is noticed and repaired."""

    load_s: float  #: of a start of the whole server, undisturbed
    step_s: float  #: before a worker counts as hung, at most
    slack_s: float = 0.0  #: for a machine that has more to do
    company_s: float = 0.0  #: for what else is being repaired, which the victim of this fault may need

    def seen_s(self, fault: Fault) -> float:
        """Until the launcher knows."""
        if fault.kind != "stop":
            return 1.0 + self.slack_s
        return 1.0 + self.slack_s + (self.step_s if fault.process_kind == "worker" else HEARTBEAT_S)

    def back_s(self, fault: Fault) -> float:
        """From then on, until everything is as before."""
        repair_s = 2.0 if fault.process_kind == "frontend" else self.load_s + 5.0
        return self.slack_s + self.company_s + max(1, fault.deaths[1]) * repair_s

    def beside(self, others: Iterable[Fault]) -> Limits:
        """Of a fault that comes with others."""
        return replace(self, company_s=sum(self.back_s(other) for other in others))


def all_faults(kinds: Iterable[str], num_frontends: int, num_ranks: int = 1) -> list[Fault]:
    """Each kind for each process that it can strike."""
    workers = [f"worker {rank}" for rank in range(num_ranks)]
    processes = [*workers, "scheduler 0", *(f"frontend {index}" for index in range(num_frontends))]
    return [Fault(kind, process, num_ranks=num_ranks) for kind in kinds for process in processes if kind in SIGNALS or process == "worker 0"]


class FaultSource:
    """Rounds of faults drawn from a seed: one, or a death and soon after that of another process.

    Each kind and process comes once, in random order, before any comes again.
    """

    def __init__(self, seed: int, kinds: Sequence[str], num_frontends: int, num_ranks: int = 1) -> None:
        self._draw = random.Random(seed)
        self._all = all_faults(kinds, num_frontends, num_ranks)
        self._left: list[Fault] = []

    def next_round(self) -> list[Fault]:
        first = self._take()
        if first.kind not in ("kill", "segv") or self._draw.random() >= _DOUBLE:
            return [first]
        others = [fault for fault in self._all if fault.kind in ("kill", "segv") and fault.process_kind != first.process_kind]
        if not others:
            return [first]
        other = self._draw.choice(others)
        return [first, replace(other, after_s=self._draw.uniform(*_DOUBLE_S))]

    def _take(self) -> Fault:
        if not self._left:
            self._left = self._draw.sample(self._all, len(self._all))
        fault = self._left.pop()
        return replace(fault, seconds=self._draw.uniform(*FREEZE_S)) if fault.kind == "freeze" else fault


class Struck(NamedTuple):
    at: float  #: by the wall clock
    process: psutil.Process


def strike(server: Server, fault: Fault, excuse: Callable[[set[int]], None]) -> Struck:
    """Strikes with a signal. `excuse` hears which connections a frontend takes with it. Not for a kind of `REQUESTS`.

    Blocks until there is such a process.
    """
    process = server.child(fault.process)
    if fault.process_kind == "frontend" and fault.kind != "freeze":
        halt(process)  # so that nothing is accepted between the look and the end
        excuse(client_ports(process.pid))
    at = time.time()
    if fault.kind == "segv":
        signal_main_thread(process.pid, SIGNALS[fault.kind])
        thaw(process)  # or the signal waits as the process does
    else:
        process.send_signal(SIGNALS[fault.kind])
    return Struck(at, process)


def halt(process: psutil.Process) -> None:
    """Returns once it stands still, or is gone."""
    process.send_signal(signal.SIGSTOP)
    try:
        while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            time.sleep(_STOP_LOOK_S)
    except psutil.NoSuchProcess:
        pass


def signal_main_thread(pid: int, number: signal.Signals) -> None:
    """To a stopped process's main thread, which then does nothing more once it is thawed.

    A signal to the process would be any thread's: while that one dies of it, the main thread goes on and accepts
    connections that nobody has looked at. Raises OSError.
    """
    if _LIBC.tgkill(pid, pid, number):
        raise OSError(ctypes.get_errno(), f"no {number.name} for process {pid}")


def thaw(process: psutil.Process) -> None:
    """SIGCONT, if there is still something to thaw."""
    try:
        process.send_signal(signal.SIGCONT)
    except psutil.NoSuchProcess:
        pass
