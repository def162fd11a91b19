"""Work that grows with a body is not done in the event loop, where it would hold up every stream, however the body grows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from frontend import validation
from frontend.endpoints import detokenize
from frontend.tokenizer import Tokenizer
from tests.helpers.frontend_server import RunningFrontend

EVENT_LOOP = "frontend"  #: the name of the thread that the fixture's event loop runs in
MANY = 20_000


def watch(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, seen: list[tuple[str, str]]) -> None:
    """Notes the thread of every call of `owner.name`."""
    original: Callable[..., object] = getattr(owner, name)

    def noting(*args: object, **kwargs: object) -> object:
        seen.append((name, threading.current_thread().name))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, noting)


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * MANY}, "encode_chat"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 200}, "encode_chat"),
        ("/v1/completions", {"prompt": [[5]] * MANY}, "check_token_ids"),
        ("/v1/completions", {"prompt": ["a"] * 200, "max_tokens": 1}, "encode"),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * MANY}, "encode_chat"),
        ("/tokenize", {"prompt": "a " * MANY, "return_token_strs": True}, "token_strings"),
        ("/detokenize", {"tokens": [5] * MANY}, "decode"),
    ],
    ids=["messages", "a few messages", "lists of ids", "prompts", "messages to tokenize", "token strings", "ids to detokenize"],
)
def test_large_bodies_are_worked_on_in_threads(
    path: str, fields: dict[str, Any], expected: str, frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    for name in ("encode", "encode_chat", "decode", "token_strings"):
        watch(monkeypatch, Tokenizer, name, seen)
    for module in (validation, detokenize):
        watch(monkeypatch, module, "check_token_ids", seen)
    assert frontend.post(path, **fields).status_code in (200, 400)
    assert expected in {name for name, _ in seen}
    in_the_loop = {name for name, thread in seen if thread == EVENT_LOOP and name in (expected, "encode", "encode_chat")}
    assert not in_the_loop


def test_short_requests_do_not_wait_for_a_thread(frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    watch(monkeypatch, Tokenizer, "encode_chat", seen)
    assert frontend.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], max_tokens=1).status_code == 200
    assert seen == [("encode_chat", EVENT_LOOP)]


def test_a_bias_too_large_to_be_decoded_is_refused_by_name(frontend: RunningFrontend) -> None:
    response = frontend.post("/v1/completions", prompt="Hello", logit_bias={str(index): 1 for index in range(MANY)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")
