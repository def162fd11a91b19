"""A launcher with children of chosen habits: `python -m tests.helpers.fake_launcher [FLAGS] KIND:HABIT ...`.

It keeps an arena, which workers are given, and a directory, which schedulers are given. On SIGHUP it reads a log level
and a number of sequences from the file `--reload`, or refuses if there is none.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from pagemill import injection, telemetry
from pagemill.arena_file import kept_arena, kept_directory
from pagemill.config import SchedulerConfig
from pagemill.errors import UsageError
from pagemill.ids import NONE
from pagemill.launcher import EXIT_GRACE_S, ChildDied, Launcher, Reloaded
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
    max_queued_tokens=1024,
    step_timeout_s=30.0,
    step_timeout_s_per_token=0.1,
    check_invariants=False,
    event_log="",
    log_format="json",
    log_level="info",
)

ARENA_BYTES = 2**20


def main() -> int:
    parser = ArgumentParser()
    parser.add_argument("--ready-timeout", type=float, default=60.0)
    parser.add_argument("--silence-limit", type=float, default=10.0)
    parser.add_argument("--start-limit", type=float, default=60.0)
    parser.add_argument("--restart-limit", type=int, default=5)
    parser.add_argument("--drain-timeout", type=float, default=5.0)
    parser.add_argument("--exit-grace", type=float, default=EXIT_GRACE_S)
    parser.add_argument("--inject", action="append", default=[])
    parser.add_argument("--reload", type=Path, default=None)
    parser.add_argument("children", nargs="+", metavar="KIND:HABIT")
    arguments = parser.parse_args()
    telemetry.configure("launcher", "json", "info")
    injection.arm(arguments.inject, incarnation=0, kind="launcher")
    with run_directory() as directory, kept_arena(ARENA_BYTES) as arena_fd, kept_directory() as directory_fd:
        specs = make_specs(arguments.children, arena_fd, directory_fd)
        launcher = Launcher(
            specs,
            directory=directory,
            token=b"t",
            ready_timeout_s=arguments.ready_timeout,
            restart_limit=arguments.restart_limit,
            drain_timeout_s=arguments.drain_timeout,
            observer=LogReporter(),
            injections=tuple(arguments.inject),
            reload=make_reload(arguments.reload, specs) if arguments.reload is not None else None,
            silence_limit_s=arguments.silence_limit,
            start_limit_s=arguments.start_limit,
            exit_grace_s=arguments.exit_grace,
        )
        try:
            launcher.run()
        except ChildDied as death:
            print(f"pagemill: {death}", file=sys.stderr)
            return 1
        except UsageError as error:
            print(f"pagemill: {error}", file=sys.stderr)
            return 2
    return 0


def make_specs(children: Sequence[str], arena_fd: int, directory_fd: int) -> list[ProcessSpec]:
    specs: list[ProcessSpec] = []
    for kind, habit in (child.split(":") for child in children):
        specs.append(
            ProcessSpec(
                kind,  # type: ignore[arg-type]  # the test names one
                index=sum(spec.kind == kind for spec in specs),
                command=(sys.executable, "-m", "tests.helpers.fake_child", kind, habit),
                environment=dict(os.environ),
                config=CONFIG,
                arena_fd=arena_fd if kind == "worker" else NONE,
                directory_fd=directory_fd if kind == "scheduler" else NONE,
            )
        )
    return specs


def make_reload(path: Path, specs: Sequence[ProcessSpec]) -> Callable[[], Reloaded]:
    def reload() -> Reloaded:
        if not path.exists():
            raise UsageError("there is nothing to read")
        log_level, max_num_seqs, restart_limit = path.read_text().split()
        config = msgspec.structs.replace(CONFIG, log_level=log_level, max_num_seqs=int(max_num_seqs))
        return Reloaded(
            specs=[replace(spec, config=config) for spec in specs],
            restart_limit=int(restart_limit),
            drain_timeout_s=3.0,
            changed=("log_level",),
            needs_restart=("model",),
        )

    return reload


if __name__ == "__main__":
    sys.exit(main())
