"""The metrics of a real server: what clients were told is what is counted, and the counts balance."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.helpers.server import Server, wait_for


@pytest.fixture
def server(plain_server: Server) -> Server:
    return plain_server


def call(server: Server, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    payload = None if body is None else json.dumps(body)
    connection.request(method, path, payload, {"Content-Type": "application/json", **(headers or {})})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


class Scrape:
    """One look at /metrics."""

    def __init__(self, server: Server) -> None:
        families = list(parse_text(call(server, "GET", "/metrics")[1].decode()))
        self._samples = [sample for family in families for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over samples of this name that carry these labels; 0 if there is none."""
        return sum(sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items())


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    response, content = call(server, "POST", "/v1/completions", {"prompt": "Once upon a time", "temperature": 0, **fields})
    assert response.status == 200, content
    return dict(json.loads(content))


def begin_and_leave(server: Server) -> None:
    """Reads the first bytes of an endless stream, then hangs up."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data:")
    response.close()
    connection.close()


def test_tokens_told_to_clients_are_the_tokens_counted(server: Server) -> None:
    before = Scrape(server)
    usages = [complete(server, max_tokens=length, n=n)["usage"] for length, n in ((5, 1), (9, 2))]
    after = Scrape(server)

    def grown(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    assert grown("pagemill_generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages) == 23
    assert grown("pagemill_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert grown("pagemill_choices_finished_total", reason="length") == 3
    assert grown("pagemill_time_to_first_token_seconds_count") == 2
    assert grown("pagemill_inter_token_latency_seconds_count") == 4 + 2 * 8
    assert grown("vllm:generation_tokens_total") == 23
    drawn = before("pagemill_tokens_generated_total") + 23
    wait_for(lambda: Scrape(server)("pagemill_tokens_generated_total") >= drawn, 5.0, lambda: "the scheduler's count lags")


def test_cached_tokens_are_counted_and_the_rest_is_computed(server: Server) -> None:
    prompt = list(range(10, 90))
    before = Scrape(server)
    usages = [complete(server, prompt=prompt, max_tokens=2)["usage"] for _ in range(2)]
    after = Scrape(server)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached >= 64
    assert after("pagemill_prompt_tokens_total", source="cached") - before("pagemill_prompt_tokens_total", source="cached") == cached
    assert after("pagemill_prompt_tokens_total") - before("pagemill_prompt_tokens_total") == 160


def test_received_is_finished_plus_refused_plus_in_flight_whatever_happened(server: Server) -> None:
    complete(server, max_tokens=3)
    call(server, "POST", "/v1/completions", {"prompt": 7.5})
    call(server, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 10_000_000})
    call(server, "POST", "/v1/nowhere", {})
    call(server, "DELETE", "/v1/models")
    aborted = Scrape(server)("pagemill_choices_finished_total", reason="abort")
    begin_and_leave(server)
    wait_for(lambda: Scrape(server)("pagemill_choices_finished_total", reason="abort") == aborted + 1, 20.0, lambda: "the abort is not counted")
    scrape = Scrape(server)
    ended = scrape("pagemill_requests_finished_total") + scrape("pagemill_requests_refused_total")
    assert scrape("pagemill_requests_received_total") == ended + scrape("pagemill_requests_in_flight")
    assert scrape("pagemill_requests_in_flight") == 1  # this scrape itself
    assert scrape("pagemill_requests_refused_total", reason="context_length_exceeded", status="400") >= 1
    assert scrape("pagemill_requests_refused_total", endpoint="unmatched", status="404") >= 1
    assert scrape("pagemill_requests_finished_total", reason="abort", endpoint="/v1/completions") >= 1


def test_gauges_are_right_soon_after_the_last_request_without_any_traffic(server: Server) -> None:
    begin_and_leave(server)

    def settled() -> bool:
        scrape = Scrape(server)
        return scrape("pagemill_sequences") == 0 and scrape("pagemill_kv_blocks", state="used") == 0

    wait_for(settled, 20.0, lambda: "blocks or sequences still show")
    scrape = Scrape(server)
    assert scrape("pagemill_kv_blocks") == 64
    state = json.loads(call(server, "GET", "/debug/state")[1])
    shown = {name: scrape("pagemill_kv_blocks", state=name) for name in ("free", "cached", "used")}
    assert shown == {name: state["blocks"][name] for name in shown}


def test_every_request_has_one_line_without_its_prompt(server: Server) -> None:
    response, _ = call(server, "POST", "/v1/completions", {"prompt": "a very secret prompt", "max_tokens": 3, "temperature": 0})
    assert response.status == 200
    call(server, "POST", "/v1/completions", {"prompt": 7.5})

    def lines() -> list[dict[str, Any]]:
        return [line for line in server.events("request_finished") if line["endpoint"] == "/v1/completions"]

    wait_for(lambda: lines()[-1]["status"] == 400, 10.0, lambda: "the refusal has no line")
    refused, finished = lines()[-1], lines()[-2]
    assert refused["refused"] == "invalid_value"
    assert (finished["status"], finished["output_tokens"], finished["finish_reasons"]) == (200, 3, ["length"])
    assert 0 < finished["ttft_ms"] <= finished["e2e_ms"]
    assert "secret" not in server.log


def test_unknown_fields_are_counted_in_total_and_named_in_the_log_once(server: Server) -> None:
    before = Scrape(server)("pagemill_unknown_request_fields_total")
    for _ in range(2):
        complete(server, max_tokens=1, no_stop_trim=True)
    assert Scrape(server)("pagemill_unknown_request_fields_total") - before == 2
    assert [line["field"] for line in server.events("unknown_request_field")].count("no_stop_trim") == 1


def test_head_and_openmetrics_are_answered(server: Server) -> None:
    head, content = call(server, "HEAD", "/metrics")
    assert (head.status, content) == (200, b"")
    response, content = call(server, "GET", "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"})
    assert response.headers["Content-Type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(content.decode())}  # type: ignore[no-untyped-call]
    assert {"vllm:num_requests_waiting", "pagemill_kv_blocks", "pagemill_step_seconds"} <= names


def test_native_metrics_of_a_server_that_worked_pass_promtool(server: Server) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    complete(server, max_tokens=3)
    lines = call(server, "GET", "/metrics")[1].decode().splitlines(keepends=True)
    native = "".join(line for line in lines if "vllm:" not in line)
    result = subprocess.run([promtool, "check", "metrics"], input=native, text=True, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
