"""`pagemill explain`: why requests of a running server had to yield, to whom, and at what price.

Fetches the planner's newest decisions and tells them in words, or as JSON for programs. Only fetching, choosing and
printing: the words are `preemption_report`'s.
"""

from __future__ import annotations

import argparse
import json
import sys

import msgspec
from rich.console import Console
from rich.text import Text

from pagemill.chat_client import ChatClient, ChatError, read_key
from pagemill.errors import UsageError
from pagemill.messages.decisions import VictimKind
from pagemill.options import OneLineParser
from pagemill.preemption_report import MAX_DECISIONS, Line, PreemptionReport, concerns, heading, paragraph, summary

#: Decisions that are told where no number is given: what a terminal's history holds without effort.
DEFAULT_LIMIT = 20

_KEY_FLAG = "--admin-key-file"
_REQUEST_HELP = "only decisions about one request; ID is the id in its reply (chatcmpl-... or cmpl-...), not an X-Request-Id that its client chose"
_STYLES: dict[VictimKind | None, str] = {None: "", "keep": "dim", "swap": "green", "recompute": "yellow"}


def main(argv: list[str]) -> int:
    """Exit code 0, also if nobody had to yield; 1 if there is no server or it refuses."""
    arguments = _parser().parse_args(argv)
    if not 1 <= arguments.limit <= MAX_DECISIONS:
        raise UsageError(f"--limit accepts a whole number from 1 to {MAX_DECISIONS}; not {arguments.limit}")
    client = ChatClient(arguments.url, read_key(arguments.admin_key_file, _KEY_FLAG))
    try:
        report, num_known = _fetch(client, arguments.limit, arguments.request)
    except ChatError as error:
        print(f"pagemill explain: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    elif report.decisions:
        _print(report, num_known)
    elif arguments.request:
        print(f"None of the decisions that the server still keeps is about {arguments.request!a}.")
    else:
        print("No decision yet: so far nobody had to yield.")
    return 0


def _fetch(client: ChatClient, limit: int, request_id: str) -> tuple[PreemptionReport, int]:
    """The newest `limit` decisions, of one request if it is named: then all that the server keeps are searched. And how many there are."""
    try:
        content = client.get(f"/debug/preemptions?limit={MAX_DECISIONS if request_id else limit}")
        report = msgspec.json.decode(content, type=PreemptionReport)
    except ChatError as error:
        raise ChatError(_reason(error, client.url), error.status) from error
    except msgspec.MsgspecError as error:
        raise ChatError(f"The server at {client.url} answers as no Pagemill of this version does.") from error
    if not request_id:
        return report, max((decision.number for decision in report.decisions), default=0)
    chosen = [decision for decision in report.decisions if concerns(decision, request_id)]
    return msgspec.structs.replace(report, decisions=chosen[-limit:]), len(chosen)


def _reason(error: ChatError, url: str) -> str:
    match error.status:
        case 401:
            return f"Debug routes of this server want an admin key: use {_KEY_FLAG} FILE or the variable PAGEMILL_API_KEY."
        case 403:
            return f"Debug routes answer on the server's own machine only; from elsewhere, start it with {_KEY_FLAG} and give a key of that file here."
        case 404:
            return f"The server at {url} has no /debug/preemptions: it is no Pagemill, or an older one."
        case _:
            return str(error)


def _print(report: PreemptionReport, num_known: int) -> None:
    """A paragraph for each decision, then the summary: the newest and the sum stand where a terminal stops."""
    console = Console(soft_wrap=True)
    for decision in report.decisions:
        console.print(Text(heading(decision, report.now_s), "bold"))
        for line in paragraph(decision):
            console.print(_styled(line))
        console.print()
    for line in summary(report, num_known):
        console.print(_styled(line))


def _styled(line: Line) -> Text:
    return Text(line.text, _STYLES[line.kind])


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="pagemill explain",
        description="Say why requests of a running server had to yield to others: who was looked at, at what price, and what became of them.",
        allow_abbrev=False,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument(_KEY_FLAG, default="", metavar="FILE", help="file with an admin key of the server (also the variable PAGEMILL_API_KEY)")
    parser.add_argument("--limit", type=int, default=DEFAULT_LIMIT, metavar="N", help="newest decisions that are told (default: %(default)s)")
    parser.add_argument("--request", default="", metavar="ID", help=_REQUEST_HELP)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return parser
