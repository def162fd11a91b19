"""A server that speaks the API as far as the command line's clients need it, with scripted replies: no model, no scheduler.

For what a real server can't be made to do on demand: load for as long as a test wants, ask for a key, refuse, break off.
It runs in a thread of the test's process; everything it was asked stands in `requests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).parents[2] / "frontend" / "static"


@dataclass
class FakeOpenAI:
    """What it will do, changed by the test at any time, and what it saw."""

    url: str = ""
    loading: dict[str, Any] | None = None  #: body of 503 while set
    key: str = ""
    reply: str = "Hello there."
    pace_s: float = 0.0  #: between pieces
    endless: bool = False  #: says the reply again and again
    refusal: tuple[int, str, str] | None = None  #: status, code, message
    break_after: int | None = None  #: pieces before an error event
    finish_reason: str = "stop"  #: of a reply that came to its end
    preemptions: bytes = b'{"now_s":1.0,"decisions":[]}'  #: body of /debug/preemptions
    limits: list[str] = field(default_factory=list)  #: asked of it
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_disconnects: int = 0

    def reset(self) -> None:
        """As new, at the same address."""
        vars(self).update(vars(FakeOpenAI(url=self.url)))

    async def readyz(self, request: Request) -> Response:
        if self.loading is not None:
            return JSONResponse(self.loading, 503)
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return self._denied(request) or JSONResponse({"object": "list", "data": [{"id": "tiny-chat", "object": "model", "max_model_len": 8192}]})

    async def chat(self, request: Request) -> Response:
        denied = self._denied(request)
        if denied is not None:
            return denied
        if self.refusal is not None:
            return _error(*self.refusal)
        body = await request.json()
        self.requests.append(body)
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def debug_preemptions(self, request: Request) -> Response:
        self.limits.append(request.query_params.get("limit", ""))
        if self.refusal is not None:
            return _error(*self.refusal)
        return self._denied(request) or Response(self.preemptions, media_type="application/json")

    async def page(self, request: Request) -> Response:
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html", headers={"Content-Security-Policy": "default-src 'self'"})

    def _denied(self, request: Request) -> Response | None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return _error(401, "invalid_api_key", "Invalid API key.")
        return None

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        pieces = self.reply.replace(" ", " \0").split("\0")
        usage = {"prompt_tokens": 20, "completion_tokens": 0, "total_tokens": 20, "prompt_tokens_details": {"cached_tokens": 16}}
        try:
            yield ": keep-alive\n\n"
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
            number = 0
            while self.endless or number < len(pieces):
                if number == self.break_after:
                    yield _event({"error": {"message": "The worker died.", "type": "server_error", "param": None, "code": "engine_error"}})
                    break
                await asyncio.sleep(self.pace_s)
                usage = {**usage, "completion_tokens": number + 1, "total_tokens": 21 + number}
                choice = {"index": 0, "delta": {"content": pieces[number % len(pieces)]}, "finish_reason": None}
                yield _event({"choices": [choice], "usage": usage})
                number += 1
            else:
                yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]})
                yield _event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_disconnects += 1
            raise


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps({'id': 'chatcmpl-1', 'object': 'chat.completion.chunk', 'created': 1, 'model': 'tiny-chat', **data})}\n\n"


def _error(status: int, code: str, message: str) -> Response:
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}, status, headers)


@contextlib.contextmanager
def fake_openai() -> Iterator[FakeOpenAI]:
    fake = FakeOpenAI()
    routes = [
        Route("/", fake.page),
        Route("/readyz", fake.readyz),
        Route("/v1/models", fake.models),
        Route("/debug/preemptions", fake.debug_preemptions),
        Route("/v1/chat/completions", fake.chat, methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started, "the scripted server did not start"
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
