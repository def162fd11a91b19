"""The directory in which one server's processes meet: fresh, private, short-named, and gone afterwards.

It holds the sockets of the scheduler with its peers, and the file through which ranks that are several find each other.

A server that is killed cannot tidy up, so the next one does: a directory whose owner no longer holds its
lock belongs to nobody. The lock is the kernel's and dies with the launcher; children never inherit it.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagemill.errors import UsageError
from pagemill.messages.wire import ProcessKind

_PREFIX = "pagemill-run-"
_RENDEZVOUS = "ranks."
#: Of processes that a scheduler meets on sockets, which are named after them.
_SOCKET_INITIALS = "wf"
#: sun_path holds 108 bytes including the terminating zero.
_MAX_SOCKET_PATH_BYTES = 107


@contextmanager
def run_directory() -> Iterator[str]:
    """Makes the directory (mode 0700, under TMPDIR), yields its path, removes it. Raises UsageError."""
    parent = Path(tempfile.gettempdir())
    sweep(parent)
    try:
        path, lock = _make_locked(parent)
    except OSError as error:
        raise UsageError(f"cannot make a directory for sockets in {parent}: {error.strerror}; set TMPDIR") from None
    try:
        yield str(path)
    finally:
        _remove(path)
        os.close(lock)


def socket_address(directory: str, kind: ProcessKind, index: int, incarnation: int, scheduler_incarnation: int) -> str:
    """The address on which a scheduler meets this peer, named by both: a socket outlives neither. Raises UsageError if it is too long for one."""
    path = f"{directory}/{kind[0]}{index}.{incarnation}.{scheduler_incarnation}"
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise UsageError(f"the path of a socket may have {_MAX_SOCKET_PATH_BYTES} bytes, but {path} has {len(os.fsencode(path))}; set TMPDIR to a shorter one")
    return f"ipc://{path}"


def remove_sockets(directory: str, scheduler_incarnation: int) -> None:
    """Removes what a scheduler that was killed could not."""
    try:
        for path in Path(directory).glob(f"[{_SOCKET_INITIALS}]*.*.{scheduler_incarnation}"):
            path.unlink(missing_ok=True)
    except OSError:  # there may be no descriptor left to look with; they go with the directory
        pass


def rendezvous_path(directory: str, incarnation: int) -> str:
    """Where the ranks of one incarnation of the workers find each other: a file that the first of them makes, and that no other group may see."""
    return f"{directory}/{_RENDEZVOUS}{incarnation}"


def remove_rendezvous(directory: str, incarnation: int) -> None:
    """After the last of these ranks."""
    Path(rendezvous_path(directory, incarnation)).unlink(missing_ok=True)


def sweep(parent: Path) -> None:
    """Removes this user's run directories whose servers are dead."""
    for path in parent.glob(_PREFIX + "*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # gone meanwhile, or not a directory
            continue
        if _lock(descriptor):
            _remove(path)
        os.close(descriptor)


def _make_locked(parent: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Between the two lines another server may have swept the unlocked directory: then it has lost its name.
        if _lock(descriptor) and path.exists():
            return path, descriptor
        os.close(descriptor)


def _remove(path: Path) -> None:
    """What servers make, then the directory; one that holds anything else was never ours and stays."""
    try:
        for entry in os.scandir(path):
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISSOCK(mode) or (stat.S_ISREG(mode) and entry.name.startswith(_RENDEZVOUS)):
                os.unlink(entry.path)
        path.rmdir()
    except OSError:
        pass


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
