"""Every error has the same shape, a bounded size, and says nothing that a client sent."""

from __future__ import annotations

import inspect
from typing import Literal

import msgspec
import pytest

from frontend import errors
from frontend.errors import ApiError
from pagemill.messages.frontend import Rejection
from pagemill.messages.sequences import SequenceKey

KEY = SequenceKey(0, 1, 1, 0)
SAMPLES: dict[str, object] = {"str": "x" * 5000, "int": 7, "bool": True, "str | None": "field", "Rejection": Rejection(KEY, "queue_full", 1, 0)}


def made() -> list[ApiError]:
    """One of each kind, with arguments far too long."""
    found = []
    for name, make in inspect.getmembers(errors, inspect.isfunction):
        signature = inspect.signature(make)
        if make.__module__ == errors.__name__ and signature.return_annotation == "ApiError":
            found.append(make(**{name: SAMPLES[parameter.annotation] for name, parameter in signature.parameters.items()}))
        assert name
    return found


def test_every_error_has_openai_s_four_keys_and_at_most_four_kilobytes() -> None:
    assert len(made()) >= 20
    for error in made():
        detail = msgspec.json.decode(error.body)["error"]
        assert set(detail) == {"message", "type", "param", "code"}
        assert len(error.body) < 4096
        assert detail["message"]


@pytest.mark.parametrize("reason", ["exceeds_model_length", "exceeds_kv_cache"])
def test_too_long_is_said_in_the_words_by_which_proxies_know_it(reason: Literal["exceeds_model_length", "exceeds_kv_cache"]) -> None:
    """OpenAI's; LiteLLM takes anything else for just a bad request, and does not fall back to a model with more room."""
    error = errors.rejected(Rejection(KEY, reason, 900, 64))
    message = msgspec.json.decode(error.body)["error"]["message"]
    assert message.startswith("This model's maximum context length is 64 tokens, but ")
    assert "900" in message
    assert error.code == "context_length_exceeded"


@pytest.mark.parametrize("character", ["\0", "\n", '"', "\\", "é", "😀", "\u2028"])
def test_a_message_of_any_characters_stays_below_four_kilobytes(character: str) -> None:
    error = errors.invalid_value("messages", character * 5000)
    assert len(error.body) < 4096
    assert "\n" not in error.detail.message


@pytest.mark.parametrize(("status", "kind"), [(400, "invalid_request_error"), (401, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")])
def test_the_type_follows_from_the_status(status: int, kind: str) -> None:
    assert {error.detail.type for error in made() if error.status == status} == {kind}


def test_what_may_be_retried_says_when() -> None:
    retried = [error for error in made() if error.status in (429, 503) and error.code != "too_slow"]
    assert retried
    assert all("Retry-After" in error.headers for error in retried)


@pytest.mark.parametrize(("name", "said"), [("no_stop_trim", True), ("a.b[0]", True), ("<script>", False), ("x" * 65, False), ("", False), ("a\nb", False)])
def test_only_harmless_names_are_said_back(name: str, said: bool) -> None:
    assert (errors.field_name(name) == name) == said
    assert said or name == "" or name not in errors.unknown_parameter(name).detail.message


@pytest.mark.parametrize(
    ("reason", "status", "code", "said"),
    [
        ("queue_full", 429, "rate_limit_exceeded", "Too many requests"),
        ("queue_tokens", 429, "rate_limit_exceeded", "Too many requests"),
        ("queue_timeout", 429, "queue_timeout", "longer than the limit of 2.5 s"),
        ("draining", 503, "unavailable", "shutting down"),
        ("invalid", 400, "invalid_value", "refused"),
    ],
)
def test_what_the_scheduler_refuses_has_a_status_that_says_whether_to_come_again(reason: str, status: int, code: str, said: str) -> None:
    error = errors.rejected(Rejection(KEY, reason, 2600, 2500), 17)  # type: ignore[arg-type]
    assert (error.status, error.code) == (status, code)
    assert said in error.detail.message
    assert error.headers.get("Retry-After") == {429: "17", 503: "1", 400: None}[status]


@pytest.mark.parametrize(("word", "code"), [("killed_worker", "request_failed"), ("core_failed", "internal_error"), ("/secret", "generation_failed")])
def test_a_failed_sequence_is_a_500_that_asks_not_to_be_tried_again(word: str, code: str) -> None:
    error = errors.sequence_failed(word)
    assert (error.status, error.code, error.headers) == (500, code, {"x-should-retry": "false"})
    assert word not in error.detail.message
