"""A reply that is sent whole: gathered delta by delta, encoded on the way, and sent in pieces.

A reply with logprobs may have a hundred megabytes. To encode that at its end, or to join it, would hold up every other
client: so each delta's logprobs are encoded when they come, and what has been encoded is copied by blocks only.
This module must not know the fields of any reply.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Iterator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.choice import Delta, Finish

#: What is sent in one turn of the event loop.
BLOCK_BYTES = 64 * 1024

#: What a character takes up while a text is gathered.
_BYTES_A_CHARACTER = 4

#: Consecutive parts of a JSON text.
Pieces = Iterable[bytes | bytearray]

encoder = msgspec.json.Encoder()


class GrowingObject:
    """A JSON object whose lists grow. Begins as one struct; of each further one of its type the lists are appended."""

    def __init__(self, beginning: msgspec.Struct) -> None:
        values = {name: getattr(beginning, name) for name in beginning.__struct_fields__}
        self._lists = {name: bytearray(encoder.encode(value)[:-1]) for name, value in values.items() if isinstance(value, list)}  #: still open
        self._others = encoder.encode({name: value for name, value in values.items() if name not in self._lists})

    def add(self, part: msgspec.Struct) -> int:
        """The number of bytes by which it grew."""
        num_bytes = 0
        for name, encoded in self._lists.items():
            items = encoder.encode(getattr(part, name))[1:-1]
            if items:
                encoded += b"," + items if len(encoded) > 1 else items
                num_bytes += 1 + len(items)
        return num_bytes

    def pieces(self) -> Pieces:
        pieces: Pieces = (self._others,)
        for name, encoded in self._lists.items():
            pieces = with_field(pieces, name, (encoded, b"]"))
        return pieces


class Outcome:
    """One choice, gathered from its deltas. `logprobs` is what a choice without tokens would show; None if none are shown."""

    __slots__ = ("_logprobs", "_text", "finish")

    def __init__(self, logprobs: msgspec.Struct | None) -> None:
        self._text = io.StringIO()
        self._logprobs = None if logprobs is None else GrowingObject(logprobs)
        self.finish: Finish | None = None

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def encoded_logprobs(self) -> Pieces:
        return (b"null",) if self._logprobs is None else self._logprobs.pieces()

    def add(self, delta: Delta, logprobs: msgspec.Struct | None) -> int:
        """The number of bytes that this takes up."""
        self.finish = delta.finish
        num_bytes = _BYTES_A_CHARACTER * self._text.write(delta.text)
        if self._logprobs is not None and logprobs is not None and delta.entries:
            num_bytes += self._logprobs.add(logprobs)
        return num_bytes


class WholeReply(Response):
    """JSON in pieces, with its length in front."""

    media_type = "application/json"

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = list(pieces)
        self._num_bytes = sum(map(len, self._pieces))
        super().__init__(headers={"Content-Length": str(self._num_bytes)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        num_left = self._num_bytes
        for block in _blocks(self._pieces):
            num_left -= len(block)
            await send({"type": "http.response.body", "body": block, "more_body": num_left > 0})
            if num_left:
                await asyncio.sleep(0)  # streams and probes go on between two blocks


def with_field(encoded: Pieces, name: str, value: Pieces) -> Pieces:
    """A JSON object, the last of whose pieces closes it, and one field more."""
    *beginning, last = encoded
    yield from beginning
    yield last[:-1]
    yield f'{"" if last == b"{}" else ","}"{name}":'.encode()
    yield from value
    yield b"}"


def array(items: Iterable[Pieces]) -> Iterator[bytes | bytearray]:
    separator = b"["
    for item in items:
        yield separator
        yield from item
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _blocks(pieces: Pieces) -> Iterator[bytes]:
    block = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), BLOCK_BYTES):
            block += piece[start : start + BLOCK_BYTES]
            if len(block) >= BLOCK_BYTES:
                yield bytes(block)
                block.clear()
    if block:
        yield bytes(block)
