"""Logging, the same in every process: structlog to stderr, pretty on a terminal, JSON lines otherwise.

Events are snake_case verbs with key-values; every line carries `timestamp` (UTC), `level`, `logger`,
`event` and `process`. What libraries log through the standard library takes the same way. A value cannot
forge a line (control characters are escaped) or leak a secret (fields named like one show `***`,
tracebacks carry no locals), and a log that cannot be written never stops the process.
This module must not know what is logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from typing import Any, Literal, Protocol

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LogLevel = Literal["debug", "info", "warning", "error"]

_SECRET_NAME = re.compile(r"(^|_)(api_?keys?|admin_?keys?|secret|token|authorization|password)$", re.IGNORECASE)
#: C0, DEL and C1 controls, and the two line separators of Unicode.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_ESCAPES |= {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class Logger(Protocol):
    """What the rest of the code needs of a structlog logger."""

    def debug(self, event: str, **values: object) -> object: ...
    def info(self, event: str, **values: object) -> object: ...
    def warning(self, event: str, **values: object) -> object: ...
    def error(self, event: str, **values: object) -> object: ...
    def exception(self, event: str, **values: object) -> object: ...
    def bind(self, **values: object) -> Logger: ...


def get_logger(name: str) -> Logger:
    """The logger of one module; usable before `configure`, which it then follows."""
    logger: Logger = structlog.get_logger(name)
    return logger


def configure(process: str, log_format: str, log_level: str) -> None:
    """Sets up logging of this process, or changes it. `process` is `launcher`, `frontend-0`, `scheduler-0`, `worker-0`, ..."""
    level = logging.getLevelNamesMapping()[log_level.upper()]

    def name_process(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {"process": process, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            name_process,
            redact_secrets,
            *_render(resolve_format(log_format)),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=LineLogger,
        cache_logger_on_first_use=False,  # a level that changes while serving concerns loggers that were used before
    )
    # Libraries are heard from warnings on, or all of them when debugging.
    logging.basicConfig(handlers=[_LibraryHandler()], level=level if level <= logging.DEBUG else max(level, logging.WARNING), force=True)
    logging.captureWarnings(True)


def resolve_format(log_format: str) -> Literal["console", "json"]:
    """What `auto` means here: a terminal on stderr is a person."""
    if log_format == "auto":
        return "console" if sys.stderr.isatty() else "json"
    return "json" if log_format == "json" else "console"


def redact_secrets(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Hides values by the name of their field. `num_tokens` is none; `token` and `hf_token` are."""
    return {name: "***" if _SECRET_NAME.search(name) else value for name, value in event.items()}


def escape_controls(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Keeps one event on one line of a terminal and away from its escape sequences. JSON escapes by itself."""
    return {name: value if name in ("exc_info", "exception") or not isinstance(value, str) else value.translate(_ESCAPES) for name, value in event.items()}


class LineLogger:
    """Writes each event as one line to stderr. A full disk or a closed pipe loses lines, not the process."""

    num_lost = 0  #: lines of this process that could not be written

    def __init__(self, name: str = "pagemill") -> None:
        self.name = name

    def msg(self, line: str) -> None:
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # ValueError: stderr is closed
            LineLogger.num_lost += 1

    log = debug = info = warning = warn = error = critical = exception = fatal = failure = msg


class _LibraryHandler(logging.Handler):
    """Hands records of the standard library's loggers to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        log: Callable[..., object] = structlog.get_logger(record.name).log
        log(record.levelno, record.getMessage(), exc_info=record.exc_info)


def _render(log_format: Literal["console", "json"]) -> list[Processor]:
    if log_format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    plain: Any = structlog.dev.plain_traceback  # rich tracebacks show locals: prompts and keys
    return [escape_controls, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]


def _to_json(event: EventDict, **_: object) -> str:
    """The common keys first: people read JSON logs too."""
    common = {key: event[key] for key in ("timestamp", "level", "logger", "process", "event") if key in event}
    return json.dumps({**common, **event}, default=repr)
