"""The console script `pagemill`: subcommands, exit codes, nothing else.

What a subcommand needs is imported inside it, so that `--help` and a wrong flag answer at once.
Exit codes: 0 done or stopped as asked, 1 something died or failed, 2 it could not work as asked.
"""

from __future__ import annotations

import argparse
import sys

from pagemill import __version__
from pagemill.config import ServeOptions
from pagemill.errors import REFUSED_CODE, UsageError
from pagemill.options import OneLineParser, add_serve_arguments, refuse_unknown, resolve_options


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run(argv)
    except UsageError as error:
        print(f"pagemill: {error}", file=sys.stderr)
        return REFUSED_CODE
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str]) -> int:
    if argv[:1] == ["chat"]:  # has a command line of its own
        from pagemill import chat

        return chat.main(argv[1:])
    if argv[:1] == ["explain"]:
        from pagemill import explain_command

        return explain_command.main(argv[1:])
    if argv[:1] == ["models"]:
        return _models(argv[1:])
    arguments, unknown = _parser().parse_known_args(argv)
    match arguments.command:
        case "serve":
            refuse_unknown(unknown)
            from pagemill import serve

            def read_options() -> ServeOptions:
                return resolve_options(vars(arguments))

            return serve.main(read_options(), read_options)
        case _:
            if unknown:
                raise UsageError(f"pagemill version takes no arguments; not {unknown[0]}")
            print(f"pagemill {__version__}")
            return 0


def _models(argv: list[str]) -> int:
    from pagemill import models_command
    from pagemill.model_download import ModelError

    try:
        return models_command.main(argv)
    except ModelError as error:
        raise UsageError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="pagemill", description="LLM inference server for long contexts under memory pressure.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pagemill {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=OneLineParser)
    serve = commands.add_parser(
        "serve",
        usage="pagemill serve [MODEL] [flags]",
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve a model over an OpenAI-compatible HTTP API, with a chat page at /.",
        epilog="Counts accept 32k (32000) and 32K (32768), sizes 512MiB and 2GB. Files win over defaults, flags over files.",
        allow_abbrev=False,
    )
    add_serve_arguments(serve)
    commands.add_parser("models", help="list the models that are known and cached, or fetch one", add_help=False)
    commands.add_parser("chat", help="chat with a running server in the terminal", add_help=False)
    commands.add_parser("explain", help="say why a running server's requests had to yield to others", add_help=False)
    commands.add_parser("version", help="print the version")
    return parser
