"""Entry of a worker process: load the model, say so, serve plans. Started by the launcher, not by hand."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence

from pagemill import injection
from pagemill.child import Child, enter
from pagemill.config import WorkerConfig
from pagemill.ids import NONE
from pagemill.messages.control import Progress
from pagemill.telemetry import get_logger

#: The model's threads can take every core for whole steps; those who answer clients and plan the next step go first.
_NICENESS = 5


def main() -> None:
    child = enter("worker", WorkerConfig)
    if child.config.device == "cpu":
        # Before there are threads that compute, for they inherit both.
        os.nice(_NICENESS)
        stay_on(child.config.cpus)
    run(child)


def stay_on(cpus: Sequence[int]) -> None:
    """Runs on these processors alone, so that ranks which compute at the same time do not take turns on one. None: on any."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # they were taken away since the launcher looked: slower, not wrong
        get_logger("workers").warning("not_pinned", cpus=cpus, reason=error.strerror)


def run(child: Child[WorkerConfig]) -> None:
    from workers.loader import load  # torch loads only now: the process is titled, logged and watched first
    from workers.model_config import ModelRefused
    from workers.parallel import PeerRankLost
    from workers.probe import DeviceFault
    from workers.process import end_without, serve

    def report(phase: str, fraction: float, detail: str) -> None:
        child.say(Progress(phase=phase, fraction=fraction, detail=detail))

    injection.disarm()  # loading tries out forwards and copies: those are not the ones that faults are meant for
    try:
        loaded = load(child.config, report, child.start.arena_fd, child.start.rendezvous)
    except ModelRefused as error:
        child.refuse(str(error))
    except PeerRankLost as lost:
        end_without(child, lost)
        return
    if child.start.arena_fd != NONE:
        os.close(child.start.arena_fd)  # the mapping keeps the memory
    # What is loaded stays: the collector need not walk through all of torch, neither while serving nor at exit.
    gc.collect()
    gc.freeze()
    injection.arm(child.start.injections, kind=child.start.kind, incarnation=child.start.incarnation)
    injection.reach("worker.loaded")
    try:
        serve(child, loaded)
    except DeviceFault as fault:
        child.fail(str(fault))


if __name__ == "__main__":
    main()
