"""Every error has the same shape, a bounded size, and says nothing that a client sent."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from frontend import errors
from frontend.errors import ApiError
from pagemill.messages import Rejection, SequenceKey

KEY = SequenceKey(0, 1, 1, 0)
SAMPLES: dict[str, object] = {"str": "x" * 5000, "int": 7, "str | None": "field", "Rejection": Rejection(KEY, "queue_full", 1, 0)}


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
