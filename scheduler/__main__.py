"""Entry of the scheduler process. Started by the launcher, never by hand."""

from __future__ import annotations

from pagemill.child import enter
from pagemill.config import SchedulerConfig


def main() -> None:
    child = enter("scheduler", SchedulerConfig)
    from scheduler.process import SchedulerProcess  # after `enter`: the process is titled and watched first

    SchedulerProcess(child).run()


if __name__ == "__main__":
    main()
