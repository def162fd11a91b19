"""The event log: everything a core was told, when, and what it answered, so that a run can be run again.

A file is a sequence of length-prefixed msgpack frames: first the `CoreConfig`, then one `Record` per event.
Because the core is a pure function of its events, the log alone reproduces every plan with its rows. It
holds token ids, so it is as confidential as the prompts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pagemill.messages import Effect, Event
from scheduler.core_config import CoreConfig

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
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, 0o600)  # an existing file would keep the mode it has
        self._file = os.fdopen(descriptor, "wb")
        self._write(self._encoder.encode(config))

    def append(self, now: float, event: Event, effects: list[Effect]) -> None:
        self._write(self._encoder.encode(Record(now, event, effects)))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, frame: bytes) -> None:
        self._file.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)


def log_path(path: str, incarnation: int, number: int) -> str:
    """Where the log of core `number` of this incarnation of the scheduler goes: each has one of its own, the very first the path asked for."""
    return path if incarnation == number == 0 else f"{path}.{incarnation}.{number}"


def read_log(path: Path) -> tuple[CoreConfig, Iterator[Record]]:
    """The config and the records of a log, the latter read as they are asked for.

    A record cut short by a crash ends the log. Raises msgspec.DecodeError on a file that is no event log.
    """
    frames = _frames(path)
    first = next(frames, None)
    if first is None:
        raise msgspec.DecodeError(f"{path} is empty")
    decoder = msgspec.msgpack.Decoder(Record)
    return msgspec.msgpack.decode(first, type=CoreConfig), (decoder.decode(frame) for frame in frames)


def _frames(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(prefix := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            length = int.from_bytes(prefix, "little")
            frame = file.read(length)
            if len(frame) < length:
                return
            yield frame
