"""Reading a server-sent event stream of the API strictly, as a stranger would. Must not know the server's code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Stream:
    """All events of one stream."""

    chunks: list[dict[str, Any]]
    comments: int
    done: bool  #: `[DONE]` came last

    @property
    def text(self) -> str:
        return self.text_of(0)

    def text_of(self, choice: int) -> str:
        return "".join(piece(item) for item in self._choices(choice))

    def finish_reasons(self, choice: int = 0) -> list[str]:
        return [item["finish_reason"] for item in self._choices(choice) if item["finish_reason"] is not None]

    def stop_reason(self, choice: int = 0) -> object:
        return next(item["stop_reason"] for item in self._choices(choice) if item["finish_reason"] is not None)

    def logprobs(self, key: str, choice: int = 0) -> list[Any]:
        return [entry for item in self._choices(choice) if item["logprobs"] for entry in item["logprobs"][key]]

    @property
    def usage(self) -> dict[str, Any] | None:
        return self.chunks[-1].get("usage")

    @property
    def error(self) -> dict[str, Any] | None:
        return next((chunk["error"] for chunk in self.chunks if "error" in chunk), None)

    def _choices(self, index: int) -> list[dict[str, Any]]:
        return [item for chunk in self.chunks for item in chunk.get("choices", []) if item["index"] == index]


def piece(choice: dict[str, Any]) -> str:
    """The text of one choice of a chunk."""
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


def parse(body: str) -> Stream:
    """Raises AssertionError for whatever is not framed as it must be."""
    assert body.endswith("\n\n")
    chunks: list[dict[str, Any]] = []
    comments, done = 0, False
    for event in body[:-2].split("\n\n"):
        assert "\n" not in event, event
        assert not done, "an event follows [DONE]"
        if event.startswith(":"):
            comments += 1
        elif event == "data: [DONE]":
            done = True
        else:
            assert event.startswith("data: {"), event
            chunks.append(json.loads(event.removeprefix("data: ")))
    return Stream(chunks, comments, done)


def parse_response(response: httpx.Response) -> Stream:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    return parse(response.text)
