"""`pagemill chat`: talk to a running server in the terminal.

With a terminal on stdin it is a conversation: replies stream, Ctrl-C stops the reply (not the program),
Ctrl-D leaves. Without one, stdin is one prompt and stdout gets one reply, for scripts.
What a model says is cleaned of control characters before it reaches a terminal.
It must not know HTTP (`chat_client`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from pagemill.chat_client import ChatClient, ChatError, Message, ReplyStats, read_key
from pagemill.errors import UsageError
from pagemill.options import OneLineParser

POLL_S = 0.3

HELP = """\
/system [TEXT]  show or set the system prompt
/reset          begin a new conversation
/stats          show tokens/s and cached tokens after each reply, or stop doing so
/save FILE      write the conversation to a file (.json: as messages, otherwise as text)
/help           this list
Ctrl-C stops a reply, Ctrl-D leaves. A line that ends with \\ goes on in the next one."""

#: ESC and its relatives could move the cursor, set the title or answer questions in a terminal's name.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


class Conversation:
    """The messages so far, and the settings that go with every request."""

    def __init__(self, client: ChatClient, model: str, system: str, sampling: dict[str, Any]) -> None:
        self._client = client
        self._sampling = sampling
        self.model = model
        self.system = system
        self.messages: list[Message] = []

    def reset(self) -> None:
        self.messages = []

    def all_messages(self) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.messages

    def reply(self, prompt: str, console: Console) -> ReplyStats:
        """Prints the reply while it comes. An interrupted reply stays in the conversation as far as it came."""
        self.messages.append({"role": "user", "content": prompt})
        stats = ReplyStats(begun=time.monotonic())
        pieces: list[str] = []
        stream = self._client.stream({"model": self.model, "messages": self.all_messages(), **self._sampling}, stats)
        try:
            for text in stream:
                pieces.append(text)
                console.file.write(text.translate(_CONTROLS) if console.is_terminal else text)
                console.file.flush()
        finally:
            stream.close()
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
                console.file.write("\n")
                console.file.flush()
            else:
                self.messages.pop()
        return stats

    def save(self, path: Path) -> None:
        if path.suffix == ".json":
            text = json.dumps({"model": self.model, "messages": self.all_messages()}, ensure_ascii=False, indent=2)
        else:
            text = "\n\n".join(f"{message['role']}:\n{message['content']}" for message in self.all_messages())
        path.write_text(text + "\n", encoding="utf-8")


class Terminal:
    """The conversation with a person: reads lines, carries out commands, shows replies.

    Ctrl-C ends a prompt or a reply once. Whoever presses it again before that is done loses no conversation.
    """

    def __init__(self, conversation: Conversation, console: Console, show_stats: bool) -> None:
        self._conversation = conversation
        self._console = console
        self._show_stats = show_stats
        self._last: ReplyStats | None = None

    def run(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._say(f"{self._conversation.model}. /help lists commands; Ctrl-D leaves.")
        while True:
            try:
                with _interruptible(signal.default_int_handler):
                    line = _read_prompt(self._console).strip()
            except EOFError:
                self._console.print()
                return 0
            except KeyboardInterrupt:
                self._console.print()
                self._say("Ctrl-D leaves.")
                continue
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._exchange(line)

    def _exchange(self, prompt: str) -> None:
        try:
            with _interruptible(_interrupt_once):
                self._last = self._conversation.reply(prompt, self._console)
        except KeyboardInterrupt:
            self._say("stopped")
        except ChatError as error:
            self._complain(str(error))
        else:
            ended = " · cut off at the longest length allowed" if self._last.finish_reason == "length" else ""
            if self._show_stats or ended:
                self._say(f"{self._last}{ended}")
        self._console.print()

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match name:
            case "/help" | "/?":
                self._say(HELP)
            case "/reset":
                self._conversation.reset()
                self._say("A new conversation.")
            case "/system":
                self._conversation.system = argument or self._conversation.system
                self._say(f"System prompt: {self._conversation.system or 'none'}")
            case "/stats":
                self._show_stats = not self._show_stats
                last = f" The last reply: {self._last}." if self._last is not None else ""
                self._say(f"Statistics are {'on' if self._show_stats else 'off'}.{last}")
            case "/save":
                self._save(argument)
            case "/quit" | "/exit":
                self._say("Ctrl-D leaves.")
            case _:
                self._complain(f"{name} is no command; /help lists them.")

    def _save(self, argument: str) -> None:
        if not argument:
            self._complain("Give a file: /save FILE")
            return
        try:
            self._conversation.save(Path(argument).expanduser())
        except OSError as error:
            self._complain(f"{argument} could not be written: {error.strerror}")
        else:
            self._say(f"Saved to {argument}.")

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)

    def _complain(self, text: str) -> None:
        self._console.print(text, style="red", markup=False, highlight=False)


@contextmanager
def _interruptible(on_interrupt: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Ctrl-C does this inside, and nothing outside."""
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """What follows from it is not interrupted again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.default_int_handler(number, frame)


def _read_prompt(console: Console) -> str:
    r"""One message; a line that ends with a backslash goes on. Styles stand between \1 and \2 so that readline doesn't count them."""
    styled = console.is_terminal and not console.no_color
    prompt = "\1\x1b[1;36m\2> \1\x1b[0m\2" if styled else "> "
    lines = [input(prompt)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("  "))
    return "\n".join(lines)


def _keep_history() -> None:
    """Line editing, and a history that outlives the program, where the platform has them."""
    try:
        import atexit
        import readline
    except ImportError:
        return
    home = Path(os.environ.get("PAGEMILL_HOME") or Path.home() / ".cache" / "pagemill")
    path = home / "chat_history"
    try:
        home.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
        readline.set_history_length(1000)
    except OSError:
        return
    atexit.register(readline.write_history_file, path)


def _wait_until_ready(client: ChatClient, notices: Console) -> None:
    """Returns when the server takes requests, showing how far it is."""
    if client.loading() is None:
        return
    with notices.status("The server is starting") as status:
        while (loading := client.loading()) is not None:
            percent = f"{loading.fraction:.0%}" if loading.fraction is not None and loading.fraction >= 0 else ""
            parts = [part for part in (loading.phase, percent, loading.detail) if part]
            status.update(f"The server is starting: {' · '.join(parts)}" if parts else "The server is starting")
            time.sleep(POLL_S)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="pagemill chat",
        description="Chat with a running server. With a pipe on stdin: one prompt in, one reply out.",
        allow_abbrev=False,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key-file", default="", metavar="FILE", help="file with the key (also the variable PAGEMILL_API_KEY)")
    parser.add_argument("--model", default="", help="which model, if the server has several")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument("--temperature", type=float, help="0 always takes the likeliest token")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest tokens that together reach this share")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest reply (default: as long as the server allows)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same replies")
    parser.add_argument("--stats", action="store_true", help="show tokens/s, time to first token and cached tokens after each reply")
    return parser


def main(argv: list[str]) -> int:
    """Exit code 0 after a conversation or a reply, 1 if there is no server or it refuses or breaks off, 130 after Ctrl-C in a pipe."""
    arguments = _parser().parse_args(argv)
    sampling = {name: value for name in ("temperature", "top_p", "max_tokens", "seed") if (value := getattr(arguments, name)) is not None}
    notices = Console(stderr=True)
    client = ChatClient(arguments.url, read_key(arguments.api_key_file, "--api-key-file"))
    try:
        _wait_until_ready(client, notices)
        conversation = Conversation(client, arguments.model or client.first_model(), arguments.system, sampling)
        console = Console(soft_wrap=True)
        if sys.stdin.isatty():
            _keep_history()
            return Terminal(conversation, console, arguments.stats).run()
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise UsageError("stdin is empty: give a prompt")
        stats = conversation.reply(prompt, console)
        if arguments.stats:
            notices.print(str(stats), highlight=False)
        return 0
    except ChatError as error:
        print(f"pagemill chat: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read the reply left; so does it
        return 1
