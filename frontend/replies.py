"""A reply from a generation, streamed or buffered: the same deltas, the same ends, two ways to write them.

An endpoint brings a `ReplyFormat`, which knows its JSON; this file knows the order of things. Streams: the first chunk
of each choice, chunks of text, a chunk of its own for each finish, one for usage, `[DONE]`. Everything that is ready
goes out in one write. Nothing is sent before the first tokens are there, so that whatever the scheduler refuses is still
an ordinary error; a request that waits longer gets its stream, and comments to keep it alive. A buffered reply ends its
request as soon as it is too large, or certain to become so.
This module must not know JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend import sse
from frontend.choice import Delta, Finish, TokenEntry
from frontend.errors import ApiError, internal_error
from frontend.generation import TOKENS_A_TURN, ClientGoneError, Generation
from frontend.overload import Load
from frontend.request_context import context_of
from frontend.validation import GenerationRequest
from frontend.whole_reply import Outcome, Pieces, WholeReply
from pagemill.ids import pack_ids
from pagemill.messages.sequences import TokenLogprobs
from pagemill.telemetry import get_logger

#: An idle stream carries a comment this often, for proxies that drop silent connections.
KEEP_ALIVE_S = 15.0
#: A stream begins after this time even if nothing has been generated.
PATIENCE_S = 10.0
#: An id outside of every vocabulary, which is shown as an empty text.
_SHORTEST_TOKEN = 2**31 - 1

log = get_logger("frontend.replies")


class ReplyFormat(Protocol):
    """How one endpoint writes. Chunks are JSON texts; `generation` gives the counts for usage."""

    def first(self, choice: int, generation: Generation) -> bytes | None: ...

    def text(self, delta: Delta, generation: Generation) -> bytes: ...

    def finish(self, choice: int, finish: Finish, generation: Generation) -> bytes: ...

    def usage(self, generation: Generation) -> bytes | None: ...

    def logprobs(self, entries: Sequence[TokenEntry]) -> msgspec.Struct | None: ...

    def whole(self, outcomes: list[Outcome], generation: Generation) -> Pieces: ...


async def reply(request: Request, wanted: GenerationRequest, generation: Generation, form: ReplyFormat) -> Response:
    """The response to a running generation, which is closed when the response has ended. Raises ApiError or ClientGoneError."""
    generation.on_overflow = context_of(request).cut_connection
    if not wanted.stream:
        load = context_of(request).load
        async with _watched(request.receive, generation):
            if generation.num_certain_tokens:
                load.expect(generation.num_certain_tokens * _least_bytes_a_token(form, max(0, wanted.sampling.num_logprobs)))
            return WholeReply(form.whole(await _gather(generation, form, load), generation))
    async with _watched(request.receive, generation) as watch:
        deltas = await generation.deltas(PATIENCE_S)
        watch.keep = True
    return EventStream(generation, form, deltas)


async def _gather(generation: Generation, form: ReplyFormat, load: Load) -> list[Outcome]:
    """All choices to their ends. Raises ApiError if the reply becomes too large to be held."""
    outcomes = [Outcome(form.logprobs(())) for _ in generation.choices]
    num_bytes = 0
    at_least = 1 if generation.may_end_by_text else TOKENS_A_TURN  # to be woken for each token costs more than to read it
    while not generation.finished:
        for delta in await generation.deltas(at_least=at_least):
            num_bytes += outcomes[delta.choice].add(delta, form.logprobs(delta.entries))
        load.gather(num_bytes)
    return outcomes


def _least_bytes_a_token(form: ReplyFormat, num_top: int) -> int:
    """What a token takes up in a reply however short its text is, with so many others beside it: nothing where no logprobs are shown."""
    shortest = TokenEntry(_SHORTEST_TOKEN, 0, TokenLogprobs(0.0, pack_ids([_SHORTEST_TOKEN] * num_top), bytes(4 * num_top)))
    return Outcome(form.logprobs(())).add(Delta(0, "", (shortest,), 1), form.logprobs((shortest,)))


class EventStream(Response):
    """Server-sent events of one generation, which has already given its first deltas."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, form: ReplyFormat, deltas: list[Delta]) -> None:
        super().__init__(headers=sse.HEADERS, media_type=self.media_type)
        del self.headers["content-length"]
        self._generation = generation
        self._form = form
        self._deltas = deltas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _watched(receive, self._generation):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._events():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        generation, form = self._generation, self._form
        chunks = [chunk for index in range(len(generation.choices)) if (chunk := form.first(index, generation)) is not None]
        try:
            yield sse.events([*chunks, *self._chunks(self._deltas)]) or sse.KEEP_ALIVE
            while not generation.finished:
                deltas = await generation.deltas(KEEP_ALIVE_S)
                chunks = list(self._chunks(deltas))
                if chunks or not deltas:
                    yield sse.events(chunks) or sse.KEEP_ALIVE
            usage = form.usage(generation)
            yield sse.events([usage] if usage is not None else []) + sse.DONE
        except ApiError as error:
            yield self._last_events(error)
        except ClientGoneError:
            raise
        except Exception:
            log.exception("stream_failed", request_id=generation.record.request_id)
            yield self._last_events(internal_error())

    def _last_events(self, error: ApiError) -> bytes:
        """The status has been sent, so that events alone tell the client, and the record alone the operator."""
        self._generation.record.cut_short(error.code, error.status)
        return sse.events([error.body]) + sse.DONE

    def _chunks(self, deltas: list[Delta]) -> Iterator[bytes]:
        for delta in deltas:
            if delta.text or delta.entries:
                yield self._form.text(delta, self._generation)
            if delta.finish is not None:
                yield self._form.finish(delta.choice, delta.finish, self._generation)


class _Watch:
    """`keep`: the generation goes on after the watch ends."""

    keep = False


@asynccontextmanager
async def _watched(receive: Receive, generation: Generation) -> AsyncIterator[_Watch]:
    """Ends the generation as soon as the client goes away, and in any case at the end of the block."""
    watch = _Watch()
    task = asyncio.create_task(_wait_for_disconnect(receive, generation))
    try:
        yield watch
    finally:
        task.cancel()
        if not watch.keep:
            generation.close()


async def _wait_for_disconnect(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.client_gone()
