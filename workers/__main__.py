"""Entry of a worker process: load the model, say so, serve plans. Started by the launcher, not by hand."""

from __future__ import annotations

import gc
import os

from pagemill import injection
from pagemill.child import Child, enter
from pagemill.config import WorkerConfig
from pagemill.messages import NONE, Progress

#: The model's threads can take every core for whole steps; those who answer clients and plan the next step go first.
_NICENESS = 5


def main() -> None:
    child = enter("worker", WorkerConfig)
    if child.config.device == "cpu":
        os.nice(_NICENESS)  # before there are threads, which inherit it
    run(child)


def run(child: Child[WorkerConfig]) -> None:
    from workers.loader import load  # torch loads only now: the process is titled, logged and watched first
    from workers.model_config import ModelRefused
    from workers.probe import DeviceFault
    from workers.process import serve

    def report(phase: str, fraction: float, detail: str) -> None:
        child.say(Progress(phase=phase, fraction=fraction, detail=detail))

    injection.disarm()  # loading tries out forwards and copies: those are not the ones that faults are meant for
    try:
        loaded = load(child.config, report, child.start.arena_fd)
    except ModelRefused as error:
        child.fail(str(error))
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
