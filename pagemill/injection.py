"""Named points in the code at which a test makes a process pause, raise or die.

A point stands wherever state changes its owner, and does nothing until a fault is armed for it. Faults come from
`--inject` with the launcher's first frame (`Start.injections`), never from a client. docs/injection-points.md lists the
points, each with the test that hits it.

    POINT=ACTION          the first time the point is reached, in the first incarnation of its process
    POINT=ACTION@3        the third time
    POINT=ACTION@*        every time, in every incarnation
    POINT=ACTION~1234     every time the point is reached with token id 1234, in every incarnation
    POINT=ACTION@3#2      behind any of these: in incarnation 2 of its process, and in no other
    worker/POINT=ACTION   before any of these: in processes of this kind only, for points that several kinds reach

Actions: `pause:SECONDS` sleeps, `raise` raises `InjectedFault`, `stop` is SIGSTOP, `kill` SIGKILL and `segv` SIGSEGV to
itself; `leak:KILOBYTES` keeps that much memory for good; `corrupt` makes `reach` say so, where the caller can spoil what it
hands over. What strikes is logged. Must not know what any point is for.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Container, Sequence

import msgspec

from pagemill.errors import UsageError
from pagemill.telemetry import get_logger

#: point -> what is being handed over there. Processes reach only their own.
POINTS: dict[str, str] = {
    "frontend.request": "a request has been read and is about to be tokenized",
    "frontend.submit": "its sequences are about to go to the scheduler",
    "frontend.submitted": "they have gone",
    "frontend.output": "a step's outputs have arrived",
    "frontend.finish": "a stop string was found, and the scheduler is about to be told",
    "frontend.abort": "a client has gone, and the scheduler is about to be told",
    "frontend.resubmit": "a new scheduler is about to get what is in flight",
    "scheduler.add": "a sequence has arrived and is about to enter the core",
    "scheduler.core": "the core is about to handle an event",
    "scheduler.plan": "a plan exists and has not been sent",
    "scheduler.planned": "a plan has been sent",
    "scheduler.step_done": "a plan's acknowledgement has arrived and has not been handled",
    "scheduler.transfer_done": "a transfer's acknowledgement has arrived and has not been handled",
    "scheduler.output": "outputs exist and have not been sent",
    "scheduler.output_sent": "outputs have been sent",
    "scheduler.workers_ready": "all workers are ready and the core is about to be built",
    "scheduler.directory": "an entry of the KV directory has been cleared and not yet written",
    "worker.loaded": "weights are loaded and nobody has been told",
    "worker.install": "a row is about to be installed",
    "worker.plan": "a plan has arrived",
    "worker.forward": "a plan's forward is about to start",
    "worker.logits": "logits exist, tokens do not",
    "worker.step_done": "results exist and have not been sent",
    "worker.step_sent": "results have been sent",
    "transfer.start": "a plan's transfers are about to be queued",
    "transfer.copy": "a copy is about to be made, in its own thread",
    "transfer.copied": "a copy has been made and is not reported",
    "transfer.done": "a finished transfer is about to be reported",
    "control.peer_up": "a child has heard of a new peer",
    "control.peer_lost": "a child has heard that a peer is gone",
    "control.drain": "a child has been told to drain",
    "control.reload": "a child has been given its config anew",
    "control.ready": "a child is about to say that it is ready",
    "launcher.spawned": "a child has been started and its peers do not know",
    "launcher.buried": "a child has ended and its peers do not know",
}
#: action -> what stands behind its colon, "" if nothing does
ACTIONS: dict[str, str] = {"pause": "SECONDS", "leak": "KILOBYTES", "raise": "", "stop": "", "kill": "", "segv": "", "corrupt": ""}

_SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL, "segv": signal.SIGSEGV}
_KINDS = ("", "launcher", "frontend", "scheduler", "worker")
_FAULT = re.compile(
    r"((?P<kind>[a-z]+)/)?(?P<point>[a-z_.]+)=(?P<action>[a-z]+)(:(?P<amount>[0-9]+(\.[0-9]+)?))?"
    r"(@(?P<at>[1-9][0-9]*|\*)|~(?P<token>[0-9]+))?(#(?P<incarnation>[0-9]+))?"
)
_EVERY = -1


class InjectedFault(Exception):
    """What `raise` raises."""


class Fault(msgspec.Struct, frozen=True):
    """One armed fault. `at` is the time of reaching at which it strikes, and `incarnation` that of the process, or every one."""

    kind: str  #: of the process, "" for any
    point: str
    action: str
    amount: float  #: seconds or kilobytes, 0 where the action has none
    at: int
    token_id: int | None
    incarnation: int


_armed: dict[str, list[Fault]] = {}
_reached: dict[str, int] = {}
_leaked: list[bytes] = []


def parse_fault(text: str) -> Fault:
    """Raises UsageError."""
    match = _FAULT.fullmatch(text)
    if match is None or not _is_known(match):
        actions = ", ".join(f"{action}:{amount}" if amount else action for action, amount in ACTIONS.items())
        raise UsageError(f"--inject accepts [KIND/]POINT=ACTION[@N|@*|~TOKEN][#INCARNATION], where an action is one of {actions}; not {text!r}")
    every = match["at"] == "*" or match["token"] is not None
    return Fault(
        kind=match["kind"] or "",
        point=match["point"],
        action=match["action"],
        amount=float(match["amount"] or 0),
        at=_EVERY if every else int(match["at"] or 1),
        token_id=int(match["token"]) if match["token"] is not None else None,
        incarnation=int(match["incarnation"] or (_EVERY if every else 0)),
    )


def _is_known(match: re.Match[str]) -> bool:
    if (match["kind"] or "") not in _KINDS or match["point"] not in POINTS or match["action"] not in ACTIONS:
        return False
    return (match["amount"] is not None) == bool(ACTIONS[match["action"]])


def arm(faults: Sequence[str], *, incarnation: int, kind: str = "") -> None:
    """Arms what `--inject` asked of a process of this kind and incarnation, in place of what was armed before."""
    disarm()
    for fault in map(parse_fault, faults):
        if fault.kind in ("", kind) and fault.incarnation in (_EVERY, incarnation):
            _armed.setdefault(fault.point, []).append(fault)


def disarm() -> None:
    _armed.clear()
    _reached.clear()


def reach(point: str, token_ids: Container[int] = ()) -> bool:
    """Stands at a point. True if what is handed over there is to be spoilt, which is up to the caller."""
    if not _armed:
        return False
    faults = _armed.get(point)
    return faults is not None and _strike(point, faults, token_ids)


def _strike(point: str, faults: Sequence[Fault], token_ids: Container[int]) -> bool:
    times = _reached[point] = _reached.get(point, 0) + 1
    corrupt = False
    for fault in faults:
        if fault.token_id is not None and fault.token_id not in token_ids:
            continue
        if fault.at not in (_EVERY, times):
            continue
        get_logger("pagemill.injection").warning("fault_injected", point=point, action=fault.action, times_reached=times)
        match fault.action:
            case "pause":
                time.sleep(fault.amount)
            case "leak":
                _leaked.append(os.urandom(int(fault.amount * 1024)))
            case "raise":
                raise InjectedFault(point)
            case "corrupt":
                corrupt = True
            case _:
                os.kill(os.getpid(), _SIGNALS[fault.action])
    return corrupt
