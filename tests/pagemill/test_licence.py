"""A licence is always shown, and asked about only where somebody can answer."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from pagemill.licence import accepts

CODE = "import sys; from pagemill.licence import accepts; sys.exit(0 if accepts('the terms') else 3)"


def test_without_a_terminal_the_terms_are_shown_and_nobody_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert accepts("the terms")
    assert capsys.readouterr().err == "the terms\n"


@pytest.mark.parametrize(
    ("answer", "code"), [(b"y\n", 0), (b"YES\n", 0), (b"n\n", 3), (b"\n", 3), (b"\x04", 3)], ids=["y", "YES", "n", "nothing", "end of file"]
)
def test_at_a_terminal_the_answer_counts(answer: bytes, code: int) -> None:
    ours, theirs = pty.openpty()
    # A session of its own whose terminal this is: only then is it in the foreground.
    command = f"import os, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); {CODE}"
    with subprocess.Popen([sys.executable, "-c", command], stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True) as process:
        os.close(theirs)
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(ours, 1024)
        os.write(ours, answer)
        assert process.wait(timeout=60) == code
    os.close(ours)
    assert b"the terms" in shown


def test_in_the_background_of_a_terminal_nobody_is_asked() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        assert process.wait(timeout=60) == 0
        assert b"[y/N]" not in os.read(ours, 1024)
    os.close(ours)
