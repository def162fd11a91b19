"""A launcher with children of chosen habits: `python -m tests.helpers.fake_launcher READY_TIMEOUT_S KIND:HABIT ...`.

It keeps an arena, which workers are given.
"""

from __future__ import annotations

import os
import sys

from pagemill import telemetry
from pagemill.arena_file import kept_arena
from pagemill.config import SchedulerConfig
from pagemill.launcher import ChildDied, Launcher
from pagemill.messages import NONE
from pagemill.process import ProcessSpec
from pagemill.reporting import LogReporter
from pagemill.run_directory import run_directory

CONFIG = SchedulerConfig(
    num_workers=1,
    max_num_seqs=1,
    max_num_batched_tokens=16,
    scheduling_policy="fcfs",
    prefix_caching=True,
    preemption="auto",
    max_plans_in_flight=1,
    max_num_queued=1,
    check_invariants=False,
    event_log="",
    log_format="json",
    log_level="info",
)

ARENA_BYTES = 2**20


def main() -> int:
    telemetry.configure("launcher", "json", "info")
    with run_directory() as directory, kept_arena(ARENA_BYTES) as arena_fd:
        specs = [spec_of(argument, arena_fd) for argument in sys.argv[2:]]
        launcher = Launcher(specs, directory=directory, token=b"t", ready_timeout_s=float(sys.argv[1]), observer=LogReporter())
        try:
            launcher.run()
        except ChildDied as death:
            print(f"pagemill: {death}", file=sys.stderr)
            return 1
    return 0


def spec_of(argument: str, arena_fd: int) -> ProcessSpec:
    kind, habit = argument.split(":")
    command = (sys.executable, "-m", "tests.helpers.fake_child", kind, habit)
    return ProcessSpec(kind, 0, command, dict(os.environ), CONFIG, arena_fd=arena_fd if kind == "worker" else NONE)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
