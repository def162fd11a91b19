"""Who may call what: keys on every route but a short list, and debug routes from this machine only."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.auth import ANYBODY, Authenticator, KeyRing, is_open
from frontend.endpoints import discover
from frontend.errors import ApiError

OPEN = {"/", "/static/{name}", "/livez", "/readyz", "/health", "/healthz", "/ping", "/version"}


def scope(path: str = "/v1/models", client: str | None = "127.0.0.1", **headers: str) -> dict[str, Any]:
    encoded = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http", "path": path, "method": "GET", "headers": encoded, "client": None if client is None else (client, 1234)}


def status(auth: Authenticator, **request: Any) -> int:
    try:
        auth.identify(scope(**request))
    except ApiError as error:
        return error.status
    return 200


def test_without_keys_nobody_is_asked() -> None:
    assert Authenticator([], []).identify(scope()) == ANYBODY


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "bearer two"}, 200),
        ({"x_api_key": "two"}, 200),
        ({"authorization": "Bearer wrong", "x_api_key": "one"}, 200),
        ({}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"x_api_key": ""}, 401),
        ({"authorization": "Basic one"}, 401),
        ({"authorization": "one"}, 401),
        ({"authorization": "Bearer on"}, 401),
        ({"authorization": "Bearer one two"}, 401),
        ({"authorization": "Bearer \xff\xfe"}, 401),
    ],
)
def test_a_key_is_needed_and_either_header_carries_it(headers: dict[str, str], expected: int) -> None:
    assert status(Authenticator(["one", "two"], []), **headers) == expected


def test_keys_have_different_ids_that_do_not_show_them() -> None:
    auth = Authenticator(["one", "two"], [])
    ids = {auth.identify(scope(x_api_key=key)) for key in ("one", "two")}
    assert len(ids) == 2
    assert not any(key in key_id for key in ("one", "two") for key_id in ids)


def test_the_error_says_how_to_authenticate() -> None:
    with pytest.raises(ApiError) as caught:
        Authenticator(["one"], []).identify(scope())
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"}


def test_every_comparison_is_made_even_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(shown: bytes, known: bytes) -> bool:
        compared.append(known)
        return shown == known

    monkeypatch.setattr("frontend.auth.hmac.compare_digest", compare)
    assert KeyRing(["a", "b", "c"]).identify(["a"]) is not None
    assert len(compared) == 3


def test_every_route_but_those_on_the_list_needs_a_key() -> None:
    paths = {path for endpoint in discover().values() for path in endpoint.PATHS}
    assert {path for path in paths if is_open(path)} == OPEN & paths
    assert not is_open("/no/such/route")
    assert not is_open("/static/../v1/models")
    assert not is_open("//livez")


@pytest.mark.parametrize(
    ("client", "host", "expected"),
    [
        ("127.0.0.1", "127.0.0.1:8000", 200),
        ("127.0.0.1", "localhost:8000", 200),
        ("::1", "[::1]:8000", 200),
        ("::1", "[::1]", 200),
        ("127.0.0.1", "127.0.0.1", 200),
        ("::ffff:127.0.0.1", "127.0.0.1:8000", 200),
        ("::ffff:127.0.0.1", "localhost:8000", 200),
        ("::ffff:192.0.2.7", "127.0.0.1:8000", 403),
        ("127.0.0.1", "127.0.0.1%evil.example", 403),
        ("127.0.0.1", "evil.example:8000", 403),
        ("127.0.0.1", "127.0.0.1.evil.example", 403),
        ("127.0.0.1", "localhost.evil.example:80", 403),
        ("127.0.0.1", "", 403),
        ("127.0.0.1", "localhost:evil", 403),
        ("127.0.0.1", "[::1]evil", 403),
        ("127.0.0.1", "127.0.0.1:8400@evil", 403),
        ("192.0.2.7", "127.0.0.1:8000", 403),
        (None, "127.0.0.1:8000", 403),
    ],
)
def test_debug_answers_this_machine_under_its_own_name_only(client: str | None, host: str, expected: int) -> None:
    assert status(Authenticator([], []), path="/debug/state", client=client, host=host) == expected
    assert status(Authenticator(["one"], []), path="/debug/state", client=client, host=host) == expected


def test_with_an_admin_key_debug_needs_it_from_everywhere() -> None:
    auth = Authenticator(["user"], ["admin"])
    assert status(auth, path="/debug/state", client="192.0.2.7", host="x", x_api_key="admin") == 200
    assert status(auth, path="/debug/state", host="127.0.0.1", x_api_key="user") == 401
    assert status(auth, path="/debug/state", host="127.0.0.1") == 401
    assert status(auth, x_api_key="admin") == 401
    with pytest.raises(ApiError, match="A valid admin key is required"):
        auth.identify(scope(path="/debug/state", host="127.0.0.1"))
