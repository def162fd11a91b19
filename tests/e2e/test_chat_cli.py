"""`pagemill chat` as people and scripts use it: as a process, with a terminal and without one."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.fake_openai import FakeOpenAI, fake_openai
from tests.helpers.server import ROOT, Server, wait_for

#: Before a key is pressed again.
PATIENCE_S = 5.0
AT_A_PROMPT = re.compile(r"> (\x1b\[[0-9;?]*[A-Za-z])*$")


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    with fake_openai() as server:
        yield server


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PAGEMILL_API_KEY"}
    return {**kept, "PAGEMILL_HOME": str(home), "TERM": "xterm", "COLUMNS": "200"}


def pipe(url: str, home: Path, *flags: str, prompt: str = "Hello", **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagemill", "chat", "--url", url, *flags]
    return subprocess.run(command, input=prompt, capture_output=True, text=True, cwd=ROOT, env=environment(home) | extra, timeout=60, check=False)


class Terminal:
    """The program on a pseudo-terminal."""

    def __init__(self, url: str, home: Path, *flags: str) -> None:
        self._fd, child = pty.openpty()
        command = [sys.executable, "-m", "pagemill", "chat", "--url", url, *flags]
        self.process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, cwd=ROOT, env=environment(home), start_new_session=True)
        os.close(child)
        os.set_blocking(self._fd, False)
        self.shown = ""

    def see(self, text: str, times: int = 1) -> None:
        self.look_until(lambda: self.shown.count(text) >= times, repr(text))

    def look_until(self, seen: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            self.read()
            return seen()

        wait_for(look, 60.0, lambda: f"{what} is not shown:\n{self.shown}")

    def read(self) -> None:
        """Adds what has been shown meanwhile."""
        try:
            self.shown += os.read(self._fd, 65536).decode(errors="replace")
        except (BlockingIOError, OSError):
            pass

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_prompt(self) -> None:
        """Ctrl-C at a prompt, which answers with another. One that comes just before readline waits for keys is heard with the next only."""
        prompts, again_at = self.shown.count("> "), 0.0

        def look() -> bool:
            nonlocal again_at
            self.read()
            if self.shown.count("> ") > prompts:
                return True
            if time.monotonic() >= again_at:
                self.interrupt()
                again_at = time.monotonic() + PATIENCE_S
            return False

        wait_for(look, 60.0, lambda: f"the prompt does not answer:\n{self.shown}")

    def leave(self) -> int:
        """Types Ctrl-D at a prompt, again if it is not heard: before readline reads it, the terminal would take the character and lose it."""
        again_at = 0.0

        def look() -> bool:
            nonlocal again_at
            self.read()
            if AT_A_PROMPT.search(self.shown) and time.monotonic() >= again_at:
                self.type("\x04")
                again_at = time.monotonic() + PATIENCE_S
            return self.process.poll() is not None

        wait_for(look, 60.0, lambda: f"it does not end:\n{self.shown}")
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(fake: FakeOpenAI, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(fake.url, tmp_path)
    try:
        yield opened
    finally:
        opened.close()


def test_one_prompt_from_a_pipe_gives_one_reply(fake: FakeOpenAI, tmp_path: Path) -> None:
    result = pipe(fake.url, tmp_path, "--system", "Be brief.", "--temperature", "0", "--seed", "7", prompt="How are you?\n")
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello there.\n", "")
    request = fake.requests[0]
    assert request["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How are you?"}]
    assert (request["temperature"], request["seed"], request["model"]) == (0, 7, "tiny-chat")


def test_a_longest_length_is_asked_for_only_if_one_was_given(fake: FakeOpenAI, tmp_path: Path) -> None:
    pipe(fake.url, tmp_path)
    pipe(fake.url, tmp_path, "--max-tokens", "7")
    assert [request.get("max_tokens", "none") for request in fake.requests] == ["none", 7]


def test_statistics_go_beside_the_reply_not_into_it(fake: FakeOpenAI, tmp_path: Path) -> None:
    result = pipe(fake.url, tmp_path, "--stats")
    assert result.stdout == "Hello there.\n"
    assert "2 tokens" in result.stderr
    assert "16 cached" in result.stderr


def test_without_a_server_one_line_says_how_to_start_one(tmp_path: Path) -> None:
    result = pipe("http://127.0.0.1:9", tmp_path)
    assert result.returncode == 1
    assert result.stderr == "pagemill chat: No server answers at http://127.0.0.1:9. Start one with: pagemill serve\n"


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_an_address_that_is_none_is_refused_in_one_line(url: str, tmp_path: Path) -> None:
    result = pipe(url, tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_an_empty_prompt_is_a_usage_error(fake: FakeOpenAI, tmp_path: Path) -> None:
    assert pipe(fake.url, tmp_path, prompt=" \n").returncode == 2
    assert not fake.requests


def test_a_key_comes_from_a_file_or_the_environment(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.key = "secret"
    refused = pipe(fake.url, tmp_path)
    assert refused.returncode == 1
    assert "--api-key-file" in refused.stderr
    file = tmp_path / "key"
    file.write_text("# mine\nsecret\n")
    assert pipe(fake.url, tmp_path, "--api-key-file", str(file)).stdout == "Hello there.\n"
    assert pipe(fake.url, tmp_path, PAGEMILL_API_KEY="secret").stdout == "Hello there.\n"


def test_a_refusal_is_told_in_the_servers_words(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.refusal = (400, "context_length_exceeded", "This is too long.")
    result = pipe(fake.url, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "pagemill chat: This is too long.\n")


def test_an_error_in_the_stream_ends_with_a_line_and_a_code(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.break_after = 1
    result = pipe(fake.url, tmp_path)
    assert (result.returncode, result.stdout) == (1, "Hello \n")
    assert result.stderr == "pagemill chat: The worker died.\n"


def test_a_reply_that_a_stopping_server_broke_off_is_not_taken_for_a_whole_one(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.finish_reason = "abort"
    result = pipe(fake.url, tmp_path)
    assert (result.returncode, result.stdout) == (1, "Hello there.\n")
    assert result.stderr == "pagemill chat: The server broke the reply off before it was complete.\n"


def test_a_reply_that_was_broken_off_is_called_so_and_stays_in_the_conversation(fake: FakeOpenAI, terminal: Terminal) -> None:
    fake.finish_reason = "abort"
    terminal.see("> ")
    terminal.type("First\n")
    terminal.see("The server broke the reply off before it was complete.")
    fake.finish_reason = "stop"
    terminal.type("Second\n")
    terminal.see("Hello there.", times=2)
    assert [message["content"] for message in fake.requests[1]["messages"]] == ["First", "Hello there.", "Second"]
    assert terminal.leave() == 0


def test_a_server_that_still_loads_is_waited_for_with_its_progress(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.loading = {"status": "loading", "phase": "weights", "progress": 0.42, "detail": "113 of 270 MB"}
    terminal = Terminal(fake.url, tmp_path)
    try:
        terminal.see("weights · 42% · 113 of 270 MB")
        fake.loading = None
        terminal.see("> ")
        assert terminal.leave() == 0
    finally:
        terminal.close()


def test_interrupting_stops_the_reply_and_not_the_program(fake: FakeOpenAI, terminal: Terminal) -> None:
    fake.endless, fake.pace_s = True, 0.01
    terminal.see("> ")
    terminal.type("Go on\n")
    terminal.see("there.Hello")
    terminal.interrupt()
    terminal.see("stopped")
    wait_for(lambda: fake.num_disconnects, 60.0, lambda: "the connection is still open")
    fake.endless = False
    terminal.type("And now?\n")
    terminal.see("> ", times=3)
    roles = [message["role"] for message in fake.requests[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert fake.requests[1]["messages"][1]["content"].startswith("Hello there.Hello")
    terminal.interrupt_prompt()
    terminal.see("Ctrl-D leaves.", times=2)
    assert terminal.leave() == 0


def test_interrupting_over_and_over_ends_the_reply_and_not_the_program(fake: FakeOpenAI, terminal: Terminal) -> None:
    fake.endless, fake.pace_s = True, 0.01
    terminal.see("> ")
    terminal.type("Go on\n")
    terminal.see("there.Hello")
    for _ in range(100):
        terminal.interrupt()
        terminal.read()
    terminal.see("stopped")
    assert terminal.leave() == 0


def test_commands_change_the_conversation(fake: FakeOpenAI, terminal: Terminal, tmp_path: Path) -> None:
    terminal.see("> ")
    terminal.type("/system Be brief.\n")
    terminal.see("System prompt: Be brief.")
    terminal.type("First \\\nline\n")
    terminal.see("Hello there.")
    terminal.type("/stats\n")
    terminal.see("Statistics are on. The last reply: 2 tokens")
    terminal.type(f"/save {tmp_path}/talk.json\n")
    terminal.see("Saved to")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [message["content"] for message in saved["messages"]] == ["Be brief.", "First \nline", "Hello there."]
    terminal.type("/reset\n")
    terminal.see("A new conversation.")
    terminal.type("Again\n")
    terminal.see("16 cached", times=2)
    assert [message["content"] for message in fake.requests[1]["messages"]] == ["Be brief.", "Again"]
    terminal.type("/nonsense\n")
    terminal.see("is no command")
    assert terminal.leave() == 0


def test_control_sequences_of_a_reply_never_reach_the_terminal(fake: FakeOpenAI, terminal: Terminal) -> None:
    fake.reply = "a\x1b]0;title\x07b\x9b31mc\r"
    terminal.see("> ")
    terminal.type("Hello\n")
    terminal.see("a\N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}31mc\N{REPLACEMENT CHARACTER}")


def test_a_real_server_answers_in_the_pipe(plain_server: Server, tmp_path: Path) -> None:
    flags = ("--temperature", "0", "--max-tokens", "12", "--stats")
    first = pipe(plain_server.url, tmp_path, *flags)
    assert (first.returncode, pipe(plain_server.url, tmp_path, *flags).stdout) == (0, first.stdout)
    assert first.stdout.strip()
    assert "12 tokens" in first.stderr
