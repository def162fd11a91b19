"""Bad requests over HTTP, against the fake scheduler: refused before anything reaches it, and the next request works."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.helpers.bad_requests import ANY, BAD_REQUESTS, CHAT, GOOD_REQUESTS, HELLO, BadRequest, as_stream, is_stream_variant_needed
from tests.helpers.disclosure import disclosed
from tests.helpers.frontend_server import RunningFrontend

JSON = {"Content-Type": "application/json"}


def check(response: httpx.Response, case: BadRequest) -> None:
    assert (response.status_code, response.headers["content-type"]) == (case.status, "application/json")
    assert len(response.content) < 4096
    assert disclosed(response.text) == []
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == case.code
    assert case.param is ANY or error["param"] == case.param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("case", BAD_REQUESTS, ids=lambda case: case.name)
def test_bad_requests_are_refused_by_name_streamed_or_not(case: BadRequest, frontend: RunningFrontend) -> None:
    check(frontend.client.post(case.path, content=case.body, headers=JSON), case)
    if is_stream_variant_needed(case):
        check(frontend.client.post(case.path, content=as_stream(case), headers=JSON), case)
    assert frontend.scheduler.received == []
    assert frontend.post(CHAT, messages=HELLO, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "text",
    ["no /home/user/model", "<Foo object at 0x7f0011223344>", "ValueError: x", 'File "x"', "Expected `int`: msgspec", "/usr/lib/x"],
)
def test_what_comes_from_inside_would_be_noticed(text: str) -> None:
    assert disclosed(text)
    assert disclosed("'logit_bias./v1/x' must be below 512; see /v1/models or 0xff.") == []


@pytest.mark.parametrize(("name", "path", "body"), GOOD_REQUESTS, ids=[name for name, _, _ in GOOD_REQUESTS])
def test_good_requests_at_the_edge_are_served(name: str, path: str, body: dict[str, Any], frontend: RunningFrontend) -> None:
    response = frontend.client.post(path, content=json.dumps(body), headers=JSON)
    assert response.status_code == 200, response.text
    assert all(choice["finish_reason"] == "length" for choice in response.json()["choices"])
