"""A licence is always shown, and asked about only where somebody can answer."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from contextlib import closing

import pytest

from pagemill.licence import accepts

CODE = "import sys; from pagemill.licence import accepts; sys.exit(0 if accepts('the terms') else 3)"
#: The command with a model whose fetching asks in the middle, and then goes on.
FETCHING = """
import sys
from types import SimpleNamespace
from pagemill import models_command

def resolve(name, progress, consent):
    progress("fetch", 0.0, "before")
    accepted = consent("the terms")
    progress("fetch", 1.0, "behind")
    return SimpleNamespace(path="accepted" if accepted else "refused")

models_command.resolve = resolve
models_command.main(["fetch", "tiny"])
"""

#: A session of its own whose terminal this is: only then is it in the foreground.
FOREGROUND = "import os, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"


class Terminal:
    """A process in the foreground of a terminal of its own, as somebody who sits there sees it."""

    def __init__(self, code: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm"}
        self.process = subprocess.Popen([sys.executable, "-c", FOREGROUND + code], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.shown = b""

    def see(self, awaited: bytes) -> None:
        deadline = time.monotonic() + 30
        while awaited not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if self.is_written_to(1.0):
                self.shown += os.read(self._ours, 1024)

    def is_written_to(self, within_s: float) -> bool:
        return bool(select.select([self._ours], [], [], within_s)[0])

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_without_a_terminal_the_terms_are_shown_and_nobody_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert accepts("the terms")
    assert capsys.readouterr().err == "the terms\n"


@pytest.mark.parametrize(
    ("answer", "code"), [(b"y\n", 0), (b"YES\n", 0), (b"n\n", 3), (b"\n", 3), (b"\x04", 3)], ids=["y", "YES", "n", "nothing", "end of file"]
)
def test_at_a_terminal_the_answer_counts(answer: bytes, code: int) -> None:
    with closing(Terminal(CODE)) as terminal:
        terminal.see(b"[y/N] ")
        terminal.type(answer)
        assert terminal.process.wait(timeout=60) == code
    assert b"the terms" in terminal.shown


def test_a_bar_of_progress_stands_still_while_somebody_is_asked() -> None:
    with closing(Terminal(FETCHING)) as terminal:
        terminal.see(b"[y/N] ")
        assert not terminal.is_written_to(within_s=0.3)  # a bar is drawn ten times a second
        terminal.type(b"y\n")
        terminal.see(b"accepted")
        assert terminal.process.wait(timeout=60) == 0
    shown = terminal.shown
    assert shown.index(b"before") < shown.index(b"[y/N]") < shown.index(b"behind")


def test_in_the_background_of_a_terminal_nobody_is_asked() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        assert process.wait(timeout=60) == 0
        assert b"[y/N]" not in os.read(ours, 1024)
    os.close(ours)
