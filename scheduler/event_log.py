"""The event log: everything a core was told, when, and what it answered, so that a run can be run again.

A file is a sequence of length-prefixed msgpack frames: first the `CoreConfig`, then one `Record` per event.
Because the core is a pure function of its events, the log alone reproduces every plan with its rows. It
holds token ids, so it is as confidential as the prompts.

    EventLog    one file, of one core          EventLogs    those of a scheduler, core after core
    read_log    a file back
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from pagemill.telemetry import get_logger
from scheduler.core_config import CoreConfig
from scheduler.events import Effect, Event

log = get_logger("scheduler.event_log")

_LENGTH_BYTES = 4


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One call of `SchedulerCore.handle`."""

    now: float
    event: Event
    effects: list[Effect]


class EventLog:
    """Writes a log. The file is readable by its owner only; an existing one is replaced."""

    def __init__(self, path: str, config: CoreConfig) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._file = os.fdopen(_open_private(path), "wb")
        self._write(self._encoder.encode(config))

    def append(self, now: float, event: Event, effects: list[Effect]) -> None:
        self._write(self._encoder.encode(Record(now, event, effects)))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, frame: bytes) -> None:
        self._file.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)


def _open_private(path: str) -> int:
    """A descriptor. Raises OSError, also where the mode of an existing file cannot be changed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # an existing file would keep the mode it has
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class EventLogs:
    """A log for each core of one scheduler: the first goes to `path`, each later one has a name of its own. Without a path there are none.

    A log that cannot be written ends, for that is no reason to stop serving; the next core gets its own again.
    """

    def __init__(self, path: str, incarnation: int, first_epoch: int) -> None:
        self._path, self._incarnation, self._first_epoch = path, incarnation, first_epoch
        self._log: EventLog | None = None

    def begin(self, config: CoreConfig) -> None:
        """A core is about to get its first event."""
        self.close()
        if self._path:
            number = config.epoch - self._first_epoch
            with self._may_end():
                self._log = EventLog(self._path if self._incarnation == number == 0 else f"{self._path}.{self._incarnation}.{number}", config)

    def append(self, now: float, event: Event, effects: list[Effect]) -> None:
        if self._log is not None:
            with self._may_end():
                self._log.append(now, event, effects)

    def flush(self) -> None:
        if self._log is not None:
            with self._may_end():
                self._log.flush()

    def close(self) -> None:
        if self._log is not None:
            with self._may_end():
                self._log.close()
            self._log = None

    @contextmanager
    def _may_end(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.error("event_log_ended", error=error.strerror)
            ended, self._log = self._log, None
            if ended is not None:
                with suppress(OSError):  # closed all the same, without what could not be written
                    ended.close()


def read_log(path: Path) -> tuple[CoreConfig, Iterator[Record]]:
    """The config and the records of a log, the latter read as they are asked for.

    A record cut short by a crash ends the log. Raises msgspec.DecodeError on a file that is no event log.
    """
    frames = _frames(path)
    first = next(frames, None)
    if first is None:
        raise msgspec.DecodeError(f"{path} is no event log" if path.stat().st_size else f"{path} is empty")
    try:
        config = msgspec.msgpack.decode(first, type=CoreConfig)
    except msgspec.DecodeError as error:
        raise msgspec.DecodeError(f"{path} is no event log of this version: {error}") from error
    decoder = msgspec.msgpack.Decoder(Record)
    return config, (decoder.decode(frame) for frame in frames)


def _frames(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(prefix := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            length = int.from_bytes(prefix, "little")
            frame = file.read(length)
            if len(frame) < length:
                return
            yield frame
