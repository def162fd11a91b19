"""A launcher with children that do no work, as a subprocess: what it logs, who lives, and how it ends.

Must not know which habits there are (`fake_child`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.server import ROOT, title_of, wait_for

#: One of each kind, without vices.
GOOD = ("frontend:good", "worker:good", "scheduler:good")


class StartedLauncher:
    """A started `tests.helpers.fake_launcher`."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], stderr: int | None = None) -> None:
        self._log = folder / "log"
        self.run_directories = folder / "run"
        self.run_directories.mkdir()
        environment = {**os.environ, "TMPDIR": str(self.run_directories)}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.fake_launcher", *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if stderr is None else stderr,
                start_new_session=True,
            )
        self._children: dict[int, psutil.Process] = {}

    @property
    def log(self) -> str:
        return self._log.read_text()

    def lines(self) -> list[dict[str, Any]]:
        """Those of the log that are structured and complete."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{") and line.endswith("}")]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["event"] == name]

    def wait_for_event(self, name: str, count: int = 1) -> None:
        wait_for(lambda: len(self.events(name)) >= count, 60, lambda: f"no {name} in:\n{self.log}")
        self.children()

    def children(self) -> list[psutil.Process]:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self._children[child.pid] = child
        return list(self._children.values())

    def child(self, name: str) -> psutil.Process:
        """The living one of this name, for example `worker 0`."""
        return next(child for child in self.children() if title_of(child.pid) == f"pagemill: {name}" and child.status() != psutil.STATUS_ZOMBIE)

    def lost(self) -> list[str]:
        """How children ended that were replaced."""
        return [line["reason"] for line in self.events("process_lost")]

    def living(self) -> list[str]:
        return [title_of(child.pid) for child in self._children.values() if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    def wait(self, timeout_s: float = 30) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """Ends it if it still runs; its children end with it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


Start = Callable[..., StartedLauncher]
