"""The application around its endpoints: routes, methods, ids, errors, readiness."""

from __future__ import annotations

import gzip

import httpx
import pytest

from frontend.app import Application
from frontend.endpoints import discover
from pagemill.messages.control import Progress
from tests.helpers.fake_scheduler import FakeScheduler
from tests.helpers.frontend_server import RunningFrontend, running_frontend

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
ERROR_KEYS = {"message", "type", "param", "code"}


def check_error(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == ERROR_KEYS
    assert error["code"] == code


def test_unknown_routes_and_methods_are_refused_in_the_api_s_shape(frontend: RunningFrontend) -> None:
    check_error(frontend.client.get("/nope"), 404, "not_found")
    check_error(frontend.client.get("/v1/chat/completions/"), 404, "not_found")
    response = frontend.client.get(CHAT)
    check_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "OPTIONS, POST"
    check_error(frontend.client.post("/v1/models"), 405, "method_not_allowed")


def test_options_and_head_are_answered(frontend: RunningFrontend) -> None:
    response = frontend.client.options(CHAT)
    assert (response.status_code, response.content) == (204, b"")
    assert "POST" in response.headers["allow"]
    response = frontend.client.head("/v1/models")
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(("given", "echoed"), [("abc-1.2_3", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False), ("ä", False)])
def test_a_client_s_request_id_is_echoed_if_it_is_harmless(given: str, echoed: bool, frontend: RunningFrontend) -> None:
    headers = [(b"X-Request-Id", given.encode("latin-1"))]
    shown = [frontend.client.get("/version", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert (shown == [given, given]) == echoed
    assert echoed or shown[0] != shown[1]


def test_requests_with_the_same_id_are_told_apart(frontend: RunningFrontend) -> None:
    for _ in range(2):
        frontend.client.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "request_id": None}, headers={"X-Request-Id": "same"})
    first, second = frontend.scheduler.requests()
    assert first.key != second.key
    assert "same" not in (first.request_id, second.request_id)
    assert first.request_id != second.request_id


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_bodies_must_be_json_and_not_too_large(path: str, frontend: RunningFrontend) -> None:
    check_error(frontend.client.post(path, content="a=b", headers={"Content-Type": "application/x-www-form-urlencoded"}), 415, "unsupported_media_type")
    packed = frontend.client.post(path, content=gzip.compress(b"{}"), headers={"Content-Type": "application/json", "Content-Encoding": "gzip"})
    check_error(packed, 415, "unsupported_content_encoding")
    check_error(frontend.client.post(path, content=b"x" * (9 * 1024 * 1024)), 413, "too_large")
    assert frontend.client.get("/health").status_code == 200


def test_an_exception_in_an_endpoint_is_a_500_without_details(frontend: RunningFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    async def explode(*_: object) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr("frontend.endpoints.version.handle", explode)
    response = frontend.client.get("/version")
    check_error(response, 500, "internal_error")
    assert "secret" not in response.text


def test_models_are_listed_and_found_under_every_name(frontend: RunningFrontend) -> None:
    listed = frontend.client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny", "org/tiny-alias"]
    assert {model["max_model_len"] for model in listed["data"]} == {512}
    assert frontend.client.get("/v1/models/org/tiny-alias").json() == listed["data"][1]
    check_error(frontend.client.get("/v1/models/other"), 404, "model_not_found")
    assert frontend.post(CHAT, model="org/tiny-alias", messages=HELLO, max_tokens=1).json()["model"] == "org/tiny-alias"


def test_text_becomes_ids_and_text_again(frontend: RunningFrontend) -> None:
    reply = frontend.post("/tokenize", prompt="Hello 😀", return_token_strs=True).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == 512
    assert frontend.post("/tokenize", content="Hello 😀").json()["tokens"] == reply["tokens"]
    assert frontend.post("/detokenize", tokens=reply["tokens"]).json() == {"prompt": "Hello 😀"}


@pytest.mark.parametrize("field", ["prompt", "content", "messages"])
def test_a_text_of_more_tokens_than_can_be_turned_into_text_again_is_not_turned_into_tokens(field: str, frontend: RunningFrontend) -> None:
    text = "0123456789" * 200_000
    response = frontend.post("/tokenize", **{field: [{"role": "user", "content": text}] if field == "messages" else text})
    check_error(response, 400, "invalid_value")
    assert response.json()["error"]["param"] == field


def test_messages_become_the_ids_that_a_chat_sends(frontend: RunningFrontend) -> None:
    tokens = frontend.post("/tokenize", messages=HELLO).json()["tokens"]
    frontend.post(CHAT, messages=HELLO, max_tokens=1)
    (request,) = frontend.scheduler.requests()
    assert len(request.prompt_ids) == 4 * len(tokens)
    shorter = frontend.post("/tokenize", messages=HELLO, add_generation_prompt=False).json()["tokens"]
    assert tokens[: len(shorter)] == shorter != tokens


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HELLO}, {"prompt": "a", "content": "b"}, {"prompt": 5}, {"messages": []}])
def test_tokenize_wants_one_thing(body: dict[str, object], frontend: RunningFrontend) -> None:
    assert frontend.post("/tokenize", **body).status_code == 400


@pytest.mark.parametrize("tokens", [None, [512], [-1], ["1"], [2**70]])
def test_detokenize_wants_ids_of_the_vocabulary(tokens: object, frontend: RunningFrontend) -> None:
    assert frontend.post("/detokenize", tokens=tokens).status_code == 400


def test_the_scheduler_s_state_is_shown_to_this_machine(frontend: RunningFrontend) -> None:
    state = frontend.client.get("/debug/state").json()
    assert state["blocks"] == {"total": 4, "free": 4, "cached": 0, "used": 0}
    assert state["swap_slots"] == {"total": 8, "free": 1, "cached": 2, "held": 5}
    assert state["invariants"] == {"ok": True, "error": None}
    check_error(frontend.client.get("/debug/state", headers={"Host": "evil.example"}), 403, "forbidden")


def test_unknown_fields_are_served_and_counted_but_refused_by_the_strict() -> None:
    with running_frontend() as frontend:
        assert frontend.post(CHAT, messages=HELLO, max_tokens=1, no_stop_trim=True, other=1).status_code == 200
        assert "pagemill_unknown_request_fields_total 2.0" in frontend.client.get("/metrics").text
    with running_frontend(strict_request=True) as frontend:
        response = frontend.post(CHAT, messages=HELLO, max_tokens=1, no_stop_trim=True)
        check_error(response, 400, "unknown_parameter")
        assert response.json()["error"]["param"] == "no_stop_trim"
        assert frontend.post(CHAT, messages=HELLO, max_tokens=1, user="me").status_code == 200


def test_keys_guard_the_api_and_split_the_prefix_cache() -> None:
    with running_frontend(api_keys=("one", "two")) as frontend:
        check_error(frontend.post(CHAT, messages=HELLO), 401, "invalid_api_key")
        check_error(frontend.client.get("/no/such/route"), 401, "invalid_api_key")
        check_error(frontend.client.get("/metrics"), 401, "invalid_api_key")
        assert frontend.client.get("/health").status_code == frontend.client.get("/version").status_code == 200
        for key in ("one", "two", "one"):
            frontend.client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}, headers={"Authorization": f"Bearer {key}"})
        first, second, third = (request.root for request in frontend.scheduler.requests())
        assert first == third != second


def test_options_needs_no_key_and_does_not_tell_which_routes_exist() -> None:
    with running_frontend(api_keys=("one",), admin_keys=("two",)) as frontend:
        answers = [frontend.client.options(path) for path in (CHAT, "/v1/models", "/v1/models/x", "/livez", "/debug/state", "/debug/other", "/no/such/route")]
    assert {answer.status_code for answer in answers} == {204}
    assert len({answer.headers["allow"] for answer in answers}) == 1


def test_a_shared_prefix_cache_has_one_root_and_without_cache_there_is_none() -> None:
    with running_frontend(api_keys=("one", "two"), shared_prefix_cache=True) as frontend:
        for key in ("one", "two"):
            frontend.client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}, headers={"x-api-key": key})
        assert len({request.root for request in frontend.scheduler.requests()}) == 1
    with running_frontend(prefix_caching=False) as frontend:
        frontend.post(CHAT, messages=HELLO, max_tokens=1)
        (request,) = frontend.scheduler.requests()
        assert (request.root, request.prefix_keys) == (b"", b"")


def test_priority_passes_where_the_policy_reads_it() -> None:
    with running_frontend(priority_allowed=True) as frontend:
        frontend.post(CHAT, messages=HELLO, max_tokens=1, priority=-3)
        (request,) = frontend.scheduler.requests()
        assert request.priority == -3


def test_before_it_is_ready_the_server_says_how_far_it_is() -> None:
    with running_frontend(FakeScheduler(ready=False)) as frontend:
        frontend.services.readiness.note_progress(Progress(phase="weights", fraction=0.42, detail="2 of 5"))
        response = frontend.client.get("/health")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json() == {"status": "loading", "phase": "weights", "progress": 0.42, "detail": "2 of 5"}
        assert frontend.client.get("/livez").status_code == 200
        response = frontend.post(CHAT, messages=HELLO)
        check_error(response, 503, "unavailable")
        assert "weights, 42%" in response.json()["error"]["message"]
        assert response.headers["retry-after"] == "1"
        check_error(frontend.client.get("/v1/models"), 503, "unavailable")
        frontend.scheduler.become_ready()
        frontend.wait_ready()
        assert frontend.post(CHAT, messages=HELLO, max_tokens=1).status_code == 200


def test_each_file_of_the_folder_is_one_endpoint_with_paths_of_its_own() -> None:
    endpoints = discover()
    assert {"chat_completions", "completions", "models", "health", "tokenize", "detokenize", "version", "debug_state", "preemptions"} <= set(endpoints)
    paths = [path for endpoint in endpoints.values() for path in endpoint.PATHS]
    assert len(paths) == len(set(paths))
    assert all(path.startswith("/") for path in paths)


@pytest.mark.parametrize("endpoint", discover().values(), ids=list(discover()))
def test_endpoints_answer_bad_bodies_without_failing(endpoint: object, frontend: RunningFrontend) -> None:
    for path in endpoint.PATHS:  # type: ignore[attr-defined]
        for body in (b"", b"[1]", b"{", b"\xff", b'{"model":5}'):
            response = frontend.client.post(path.replace("{", "").replace("}", ""), content=body, headers={"Content-Type": "application/json"})
            assert response.status_code < 500


def test_the_application_serves_http_only() -> None:
    application = Application.__new__(Application)
    with pytest.raises(RuntimeError, match="websocket"):
        application({"type": "websocket"}, None, None).send(None)  # type: ignore[arg-type]


def test_a_path_with_a_line_break_at_its_end_is_another_path(frontend: RunningFrontend) -> None:
    assert frontend.client.get("/v1/models%0a").status_code == 404
