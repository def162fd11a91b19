"""A real server as a subprocess, for black-box tests: `with running_server("--num-blocks", "64") as server:`.

Takes a free port, speaks JSON in its log, and is gone afterwards with all its children, whatever the test
did. Must not know anything of the server that a stranger could not see.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.helpers.tiny_model import tiny_model_path

ROOT = Path(__file__).resolve().parents[2]
TITLE_PREFIX = "pagemill: "
Result = TypeVar("Result")


class Server:
    """A started `pagemill serve`."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.process = process
        self._log_path = log_path
        self._seen: set[int] = set()  #: pids of children that existed at some time

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`, known from the moment the port is bound."""
        return str(self.wait_for_event("listening")["url"])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        """Everything written to stdout and stderr so far."""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's structured lines of this name. Others are not even parsed: whoever waits looks at a long log many times."""
        named = f'"{name}"'
        lines = [json.loads(line) for line in self.log.splitlines() if named in line and line.startswith("{") and line.endswith("}")]
        return [line for line in lines if line.get("event") == name]

    def wait_for_event(self, name: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """The first line of this name. Fails if the server ends before it comes."""

        def look() -> dict[str, Any] | None:
            ended = self.process.poll() is not None
            found = self.events(name)
            if not found and ended:
                raise AssertionError(f"the server ended with code {self.process.returncode} before {name!r}:\n{self.log}")
            return found[0] if found else None

        return wait_for(look, timeout_s, lambda: f"no {name!r} in the log:\n{self.log}")

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        self.wait_for_event("ready", timeout_s)

    def children(self) -> list[psutil.Process]:
        """The living processes that the launcher started."""
        try:
            found = [child for child in psutil.Process(self.pid).children(recursive=True) if _status(child) not in ("", psutil.STATUS_ZOMBIE)]
        except psutil.NoSuchProcess:
            return []
        self._seen.update(child.pid for child in found)
        return found

    def child(self, title: str) -> psutil.Process:
        """The child whose title is `pagemill: TITLE`, for example `worker 0`."""

        def look() -> psutil.Process | None:
            return next((child for child in self.children() if title_of(child.pid) == TITLE_PREFIX + title), None)

        return wait_for(look, 30.0, lambda: f"no process is titled {title!r}")

    def processes(self) -> dict[str, int]:
        """The pids of the living children by title, for example `worker 0`. One that is just being started has no title yet."""
        pids = [child.pid for child in self.children()]
        return {title.removeprefix(TITLE_PREFIX): pid for pid in pids if (title := title_of(pid)).startswith(TITLE_PREFIX)}

    def zombies(self) -> list[int]:
        """Children that have ended and that nobody has reaped."""
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True) if _status(child) == psutil.STATUS_ZOMBIE]

    def follow(self) -> LogFollower:
        """Reads what is logged from now on."""
        return LogFollower(self._log_path, self._log_path.stat().st_size)

    def wait(self, timeout_s: float = 20.0) -> int:
        """The exit code, once the server has ended."""
        return self.process.wait(timeout_s)

    def leftovers(self) -> list[int]:
        """Children seen earlier that still live."""
        return [pid for pid in self._seen if _is_ours(pid)]

    def orphans(self) -> list[int]:
        """Processes of the server's session that the launcher has lost sight of."""
        known = {self.pid, *(child.pid for child in psutil.Process(self.pid).children(recursive=True))}
        return [pid for pid in psutil.pids() if pid not in known and _session_of(pid) == self.pid and _is_ours(pid)]

    def close(self) -> None:
        """Ends the server if it still runs, then whatever it left behind."""
        self.children()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in self.leftovers():
            os.kill(pid, signal.SIGKILL)


class LogFollower:
    """The structured lines of a log that is being written, each once."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._offset = offset

    def read(self) -> list[dict[str, Any]]:
        """The events since the last call; a line that is not whole yet comes with the next."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines() if line.startswith(b"{") and line.endswith(b"}")]


@contextmanager
def running_server(
    *flags: str,
    model: str | Path | None = None,
    wait: bool = True,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> Iterator[Server]:
    """Starts a server with the tiny model (or `model`), waits until it is ready (unless told not to), and ends it."""
    swap = "--swap-memory", "16MiB"  # much for the tiny model; to populate what it would get by itself takes longer than to load it
    command = [sys.executable, "-m", "pagemill", "serve", str(model or tiny_model_path()), "--port", "0", "--log-format", "json", *swap, *flags]
    environment = {name: value for name, value in os.environ.items() if name != "PAGEMILL_API_KEY"} | dict(env or {})
    with tempfile.TemporaryDirectory(prefix="serve-test-") as folder:
        log_path = Path(folder) / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        server = Server(process, log_path)
        try:
            if wait:
                server.wait_until_ready(timeout_s)
            yield server
        finally:
            server.close()


def wait_for(look: Callable[[], Result | None], timeout_s: float, explain: Callable[[], str]) -> Result:
    """The first truthy result of `look`, polled; AssertionError with `explain()` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        if found := look():
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {explain()}")
        time.sleep(0.02)


def title_of(pid: int) -> str:
    """What `ps` shows, "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def open_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def private_bytes(pid: int) -> int:
    """Anonymous memory, swapped out or not: what a leak of the process's own making adds to."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(1024 * int(line[1]) for line in lines if line[0] in ("RssAnon:", "VmSwap:"))


def shared_memory(pid: int) -> set[str]:
    """Each memfd or POSIX shared memory that the process has open or mapped, as `inode name`."""
    found: set[str] = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, _, _, _, inode, *path = line.split(maxsplit=5)
        if path and path[0].startswith(("/memfd:", "/dev/shm/")):
            found.add(f"{inode} {path[0].removesuffix(' (deleted)')}")
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target, status = os.readlink(descriptor), descriptor.stat()
        except OSError:  # closed meanwhile
            continue
        if target.startswith(("/memfd:", "/dev/shm/")):
            found.add(f"{status.st_ino} {target.removesuffix(' (deleted)')}")
    return found


def client_ports(pid: int) -> set[int]:
    """The other ends of the TCP connections that the process has accepted."""
    return {connection.raddr.port for connection in psutil.Process(pid).net_connections(kind="tcp") if connection.raddr}


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _status(process: psutil.Process) -> str:
    """Empty if it is gone."""
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return ""


def _is_ours(pid: int) -> bool:
    """Lives, is no zombie, and is not a stranger who got the same pid."""
    try:
        return title_of(pid).startswith(TITLE_PREFIX) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
