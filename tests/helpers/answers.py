"""Asking /v1/completions and keeping all that can be seen of the answer, so that two answers can be compared bit for bit.

Streamed or not, an `Answer` is the same. Whatever is no answer is an exception: `RequestFailed` where the server said
no, `ConnectionBroken` where it said nothing more. Must not know why anybody asks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Choice:
    """All that a client sees of one choice."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, part: dict[str, Any]) -> None:
        self.text += part["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            getattr(self, name).extend((part["logprobs"] or {}).get(name) or ())
        self.finish_reason = part["finish_reason"] or self.finish_reason
        self.stop_reason = part.get("stop_reason") or self.stop_reason


@dataclass
class Answer:
    choices: dict[int, Choice] = field(default_factory=dict)
    num_prompt_tokens: int = 0  #: as billed
    num_completion_tokens: int = 0

    def add(self, body: dict[str, Any]) -> None:
        """A whole answer, or one event of a stream. Raises RequestFailed for an error."""
        if "error" in body:
            raise RequestFailed(httpx.codes.OK, body["error"])
        for part in body["choices"]:
            self.choices.setdefault(part["index"], Choice()).add(part)
        if usage := body.get("usage"):
            self.num_prompt_tokens, self.num_completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]


class RequestFailed(Exception):
    """An error in place of an answer, or after its beginning. `status` is 200 for the latter."""

    def __init__(self, status: int, error: dict[str, Any], retry_after: str = "") -> None:
        super().__init__(f"HTTP {status}: {error}")
        self.status = status
        self.error = error
        self.retry_after = retry_after


class ConnectionBroken(Exception):
    """The connection ended before the answer did. `port` is the client's end of it, 0 if there never was one."""

    def __init__(self, port: int, reason: str) -> None:
        super().__init__(f"from port {port}: {reason}")
        self.port = port


async def ask(client: httpx.AsyncClient, body: dict[str, Any], *, stream: bool, on_part: Callable[[], None] = lambda: None) -> Answer:
    """The answer to one request. `on_part` is called for each event of a stream, and for a whole answer once."""
    port = 0
    asked = body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})

    async def note_port(event: str, info: dict[str, Any]) -> None:
        nonlocal port
        if event == "connection.connect_tcp.complete":
            port = info["return_value"].get_extra_info("client_addr")[1]

    try:
        async with client.stream("POST", "/v1/completions", json=asked, extensions={"trace": note_port}) as response:
            if response.status_code != httpx.codes.OK:
                raise RequestFailed(response.status_code, _error_of(await response.aread()), response.headers.get("Retry-After", ""))
            answer = Answer()
            if stream:
                await _read_stream(response, answer, on_part)
            else:
                answer.add(json.loads(await response.aread()))
                on_part()
            return answer
    except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
        raise ConnectionBroken(port, f"{type(error).__name__}: {error}") from error


async def _read_stream(response: httpx.Response, answer: Answer, on_part: Callable[[], None]) -> None:
    is_done = False
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            is_done = True
        elif line.startswith("data: "):
            answer.add(json.loads(line.removeprefix("data: ")))
            on_part()
    if not is_done:
        raise RequestFailed(response.status_code, {"message": "The stream ended without [DONE]."})


def _error_of(content: bytes) -> dict[str, Any]:
    try:
        error: dict[str, Any] = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return {"message": content.decode(errors="replace")[:200]}
    return error
