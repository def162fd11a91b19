"""A small client of the server's API on the standard library, for the terminal chat and for `pagemill explain`.

Speaks to any OpenAI-compatible server; what only this one has (progress while loading) is used where it is there.
It must not know the terminal: it returns and yields values, and raises `ChatError` with one line for people.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pagemill.errors import UsageError
from pagemill.key_file import numbered_keys

#: A reply may be silent for this long (a long prompt is read, or the queue is full) before it is given up.
REPLY_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0

Message = dict[str, str]


def read_key(path: str, flag: str) -> str:
    """The first key of a file, or of the environment where no file is given. Raises UsageError, naming the flag."""
    if not path:
        return os.environ.get("PAGEMILL_API_KEY", "").strip()
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path} can't be read") from error
    return next((key for _, key in numbered_keys(text)), "")


class ChatError(Exception):
    """What went wrong, in one line. `status` is that of the HTTP answer, 0 if there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Loading:
    """Why the server is not ready yet."""

    phase: str
    fraction: float | None
    detail: str


@dataclass
class ReplyStats:
    """What a reply cost. Token counts are the server's; without them every piece of text counts as a token."""

    begun: float
    first: float | None = None
    last: float | None = None
    num_pieces: int = 0
    num_tokens: int | None = None
    num_cached_tokens: int | None = None
    finish_reason: str = ""

    def note_text(self, now: float) -> None:
        self.first = now if self.first is None else self.first
        self.last = now
        self.num_pieces += 1

    def note_usage(self, usage: dict[str, Any]) -> None:
        self.num_tokens = usage.get("completion_tokens")
        self.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def __str__(self) -> str:
        tokens = self.num_pieces if self.num_tokens is None else self.num_tokens
        parts = [f"{tokens:,} token{'' if tokens == 1 else 's'}"]
        if self.first is not None and self.last is not None:
            if tokens > 1 and self.last > self.first:
                parts.append(f"{(tokens - 1) / (self.last - self.first):.1f} tokens/s")
            parts.append(f"first token after {self.first - self.begun:.2f} s")
        if self.num_cached_tokens is not None:
            parts.append(f"{self.num_cached_tokens:,} cached")
        return " · ".join(parts)


class ChatClient:
    """One server. Every call has a connection of its own: closing it is how a reply is stopped."""

    def __init__(self, url: str, api_key: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or not _has_good_port(parts):
            raise UsageError(f"{url!r} is no address of a server: give one like http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._netloc = parts.netloc.rpartition("@")[2]
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def loading(self) -> Loading | None:
        """Why the server can't take requests yet, None if it can. Raises ChatError if nobody answers."""
        with self._request("GET", "/readyz", timeout_s=CONNECT_TIMEOUT_S) as response:
            body = _json_object(response.read())
            if response.status != 503:
                return None  # ready, or another server, which has no such route
            if body.get("status") == "draining":
                raise ChatError(f"The server at {self.url} is shutting down.", 503)
            return Loading(str(body.get("phase", "")), body.get("progress"), str(body.get("detail", "")))

    def first_model(self) -> str:
        body = _json_object(self.get("/v1/models"))
        try:
            return str(body["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ChatError(f"The server at {self.url} lists no model.") from error

    def get(self, path: str) -> bytes:
        """The body of a good answer. Raises ChatError in the server's own words otherwise, with the status."""
        with self._request("GET", path, timeout_s=CONNECT_TIMEOUT_S) as response:
            return _checked(response)

    def stream(self, body: dict[str, Any], stats: ReplyStats) -> Generator[str, None, None]:
        """Yields the reply's text piece by piece and keeps `stats`. Closing the generator stops the reply."""
        options = {"include_usage": True, "continuous_usage_stats": True}
        payload = json.dumps({**body, "stream": True, "stream_options": options}).encode()
        with self._request("POST", "/v1/chat/completions", payload, REPLY_TIMEOUT_S) as response:
            if response.status != 200:
                _checked(response)
            for data in _events(response):
                if data == b"[DONE]":
                    if stats.finish_reason == "abort":
                        raise ChatError("The server broke the reply off before it was complete.")
                    return
                yield from _take(_json_object(data), stats)
        raise ChatError("The connection broke before the reply was complete.")

    def _request(self, method: str, path: str, payload: bytes | None = None, timeout_s: float = CONNECT_TIMEOUT_S) -> _Response:
        connection = self._make(self._netloc, timeout=timeout_s)
        try:
            connection.request(method, self._prefix + path, payload, self._headers)
            return _Response(connection, connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ChatError(f"No server answers at {self.url}. Start one with: pagemill serve") from error
        except BaseException:
            connection.close()
            raise


class _Response:
    """A response that closes its connection at the end of the `with`."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._response = response
        self.status = response.status

    def __enter__(self) -> _Response:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()
        self._connection.close()

    def read(self) -> bytes:
        return self._broken_as_error(self._response.read)

    def readline(self) -> bytes:
        return self._broken_as_error(self._response.readline)

    @staticmethod
    def _broken_as_error(read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except (OSError, http.client.HTTPException) as error:
            raise ChatError("The connection broke before the reply was complete.") from error


def _has_good_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


def _events(response: _Response) -> Iterator[bytes]:
    """The data of server-sent events; comments, which keep the connection alive, are skipped."""
    while line := response.readline():
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _take(chunk: dict[str, Any], stats: ReplyStats) -> Iterator[str]:
    if error := chunk.get("error"):
        raise ChatError(str(error.get("message", "The server failed on this request.")))
    for choice in chunk.get("choices", ()):
        if text := choice["delta"].get("content"):
            stats.note_text(time.monotonic())
            yield text
        stats.finish_reason = choice.get("finish_reason") or stats.finish_reason
    if usage := chunk.get("usage"):
        stats.note_usage(usage)


def _checked(response: _Response) -> bytes:
    """The body of a good answer. Raises ChatError with the server's own words otherwise."""
    content = response.read()
    if response.status < 400:
        return content
    if response.status == 401:
        raise ChatError("The server asks for an API key: use --api-key-file FILE or the variable PAGEMILL_API_KEY.", 401)
    error = _json_object(content).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    raise ChatError(str(message or f"The server answered {response.status}."), response.status)


def _json_object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
