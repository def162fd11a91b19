"""The overload benchmark and the HTTP soak: their client, their arithmetic, and both against a real server for a moment."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from scripts.lib.http_load import BROKEN, Answer, Client, get, post
from scripts.lib.overload import lag, statuses
from scripts.lib.probes import probing
from scripts.lib.report import milliseconds
from scripts.lib.soak import MIB, MemoryLog, Scrape, slope
from scripts.lib.traffic import Traffic
from tests.helpers.script import SCRIPTS, read_lines
from tests.helpers.server import private_bytes, wait_for

# --- the client ----------------------------------------------------------------------------------------------

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n8\r\ndata: 0\n\r\n9\r\ndata: 10\n\r\n0\r\n\r\n"
EMPTY_CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 17\r\nConnection: close\r\ncontent-length: 0\r\n\r\n"


def answers_of(pieces: Sequence[bytes], talk: Callable[[Client], Awaitable[list[Answer]]]) -> list[Answer]:
    """What a client makes of a server that writes these pieces for every request, and hangs up after an empty one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if not pieces[-1]:
                writer.close()
                return

    async def run() -> list[Answer]:
        server = await asyncio.start_server(serve_quietly(serve), "127.0.0.1", 0)
        async with server:
            with Client(*server.sockets[0].getsockname()) as client:
                return await talk(client)

    return asyncio.run(asyncio.wait_for(run(), 30))


def serve_quietly(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> Any:
    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass  # the client has what it wanted
        finally:
            writer.close()

    return quietly


async def ask_twice(client: Client) -> list[Answer]:
    return [await client.ask(get("/x")), await client.ask(get("/x"))]


@pytest.mark.parametrize("reply", [WHOLE, CHUNKED, EMPTY_CHUNKED], ids=["length", "chunks", "no chunk"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_whole_however_it_arrives(reply: bytes, size: int) -> None:
    pieces = [reply[start : start + size] for start in range(0, len(reply), size)]
    for answer in answers_of(pieces, ask_twice):
        assert (answer.status, answer.tail) == (200, reply.partition(b"\r\n\r\n")[2])
        assert 0 < answer.first_at <= answer.ended_at
        assert answer.latency_s > 0


def test_a_refusal_says_when_to_come_again_and_the_next_request_has_another_connection() -> None:
    assert [(answer.status, answer.retry_after) for answer in answers_of([REFUSED, b""], ask_twice)] == [(429, "17")] * 2


def test_an_answer_that_breaks_off_is_broken() -> None:
    assert [answer.status for answer in answers_of([WHOLE[:-1], b""], ask_twice)] == [BROKEN, BROKEN]


def test_a_client_leaves_when_it_said_it_would() -> None:
    async def leave(client: Client) -> list[Answer]:
        return [await client.ask_and_leave(get("/x"), 0.01), await client.ask_and_leave(get("/x"), 10)]

    assert [answer.status for answer in answers_of([WHOLE[:-1]], lambda client: leave_soon(client))] == [BROKEN]
    assert [answer.status for answer in answers_of([WHOLE], leave)] == [200, 200]


async def leave_soon(client: Client) -> list[Answer]:
    return [await client.ask_and_leave(get("/x"), 0.01)]


def test_a_server_that_is_not_there_is_a_broken_answer() -> None:
    async def ask() -> int:
        with Client("127.0.0.1", 1) as client:
            return (await client.ask(get("/x"))).status

    assert asyncio.run(ask()) == BROKEN
    assert statuses([Answer(0.0), Answer(0.0, 200), Answer(0.0, 200)]) == {"200": 2, "broken": 1}
    assert milliseconds([0.001, 0.002, 0.003]) == {"p50": 2.0, "p99": 3.0, "p100": 3.0}


# --- memory and laws -----------------------------------------------------------------------------------------


def test_the_slope_is_that_of_the_line_through_the_points() -> None:
    assert slope([(0, 5), (10, 25), (20, 45)]) == pytest.approx(2.0)
    assert slope([(0, 0), (1, 2), (2, 1), (3, 3)]) == pytest.approx(0.8)
    assert slope([(3, 1), (3, 2)]) == 0.0


#: Keeps so many bytes of each request.
LEAKER = "import sys\nkept = []\nfor line in sys.stdin:\n    kept.append(bytearray(int(sys.argv[1])))\n    print(len(kept), flush=True)\n"


@pytest.mark.parametrize(("leak_bytes", "least", "most"), [(0, -2.0, 2.0), (4096, 350.0, 480.0)], ids=["sound", "leaking"])
def test_a_planted_leak_is_detected_and_soundness_is_not_mistaken_for_one(leak_bytes: int, least: float, most: float) -> None:
    memory = MemoryLog()
    command = [sys.executable, "-c", LEAKER.replace("kept.append(", "kept.append(" if leak_bytes else "kept.__init__([0]) or ("), str(leak_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(4000):
            process.stdin.write("request\n")
            process.stdin.flush()
            process.stdout.readline()
            if number % 100 == 0:
                memory.note("leaker", number, private_bytes(process.pid))
        process.stdin.close()
    assert least <= memory.slopes()["leaker"] <= most


def test_the_warm_up_does_not_count_and_short_lived_processes_are_left_out() -> None:
    memory = MemoryLog()
    for number in range(100):
        memory.note("warms up", number, 50 * MIB if number > 20 else number * MIB)
    memory.note("came late", 1, 1)
    assert memory.slopes() == {"warms up": pytest.approx(0.0)}


def laws(**changes: float) -> Iterator[str]:
    values = {"received": 10, "finished": 6, "refused": 3, "in_flight": 1, "sequences": 7, "ended": 4, "waiting": 2, "running": 1} | changes
    lines = [
        *(f'pagemill_requests_{name}_total{{endpoint="/v1/x",status="200"}} {values[name]}' for name in ("received", "finished", "refused")),
        f'pagemill_requests_in_flight{{endpoint="/v1/x"}} {values["in_flight"]}',
        f"pagemill_sequences_received_total {values['sequences']}",
        f'pagemill_sequences_finished_total{{reason="stop"}} {values["ended"]}',
        *(f'pagemill_sequences{{status="{name}"}} {values[name]}' for name in ("waiting", "running")),
    ]
    return Scrape("\n".join(lines) + "\n").broken_laws()


def test_laws_hold_or_are_named_where_they_are_broken() -> None:
    assert list(laws()) == []
    assert list(laws(in_flight=2)) == ["/v1/x: 10 received, 11 accounted for"]
    assert list(laws(running=0)) == ["sequences: 7 received, 6 accounted for"]


def test_traffic_is_drawn_from_its_seed_and_has_everything_in_it() -> None:
    asks = [Traffic(3).next() for _ in range(2)]
    assert asks[0] == asks[1]
    drawn = Traffic(3)
    kinds = {drawn.next().kind for _ in range(200)}
    assert kinds == {"completion", "chat", "choices", "stop strings", "mistake", "leaver"}


def test_wrong_answers_are_kept_and_refusals_are_nobody_s_mistake() -> None:
    traffic = Traffic(1)

    async def judge(client: Client) -> list[Answer]:
        ask = traffic.next()
        while ask.leaves_after_s is not None or ask.status != 200:
            ask = traffic.next()
        return [await traffic.perform(client, ask)]

    answers_of([WHOLE.replace(b"200", b"500")], judge)
    answers_of([REFUSED, b""], judge)
    answers_of([WHOLE], judge)
    assert (traffic.num_answered, traffic.refused, len(traffic.wrong)) == (3, 1, 1)
    assert "500 instead of 200" in traffic.wrong[0]


def test_probes_are_counted_by_path_and_refusals_apart() -> None:
    """By another process, against a server that answers at once: the sum of its figures is what this side has seen."""
    seen: Counter[str] = Counter()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            path = head.split()[1].decode()
            seen[path] += 1
            writer.write({"/refused": REFUSED.replace(b"Connection: close\r\n", b""), "/broken": WHOLE.replace(b"200", b"500")}.get(path, WHOLE))

    async def run() -> Mapping[str, Any]:
        async with await asyncio.start_server(serve_quietly(serve), "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()

            def probe() -> Mapping[str, Any]:
                with probing(host, port, ("/livez", "/broken", "/metrics"), get("/refused")) as probes:
                    wait_for(lambda: len(seen) == 4 and seen.total() >= 12, 30.0, lambda: f"{seen}")
                return probes.summary

            summary = await asyncio.to_thread(probe)
            for _ in range(20):  # turns in which a connection that was just taken is begun and ends
                await asyncio.sleep(0)
            return summary

    found = asyncio.run(asyncio.wait_for(run(), 60))
    assert found["probes_failed"] == pytest.approx(seen["/broken"], abs=1)  # one may be under way at the end
    assert found["probed_refusals"] == pytest.approx(seen["/refused"], abs=1)
    for name in ("/livez_ms", "/broken_ms", "/metrics_ms", "probed_refusals_ms"):
        assert 0 < found[name]["p50"] <= found[name]["p99"] <= found[name]["p100"]
    assert found["probe_lag_ms"]["p50"] >= 0


def test_a_process_that_is_kept_busy_is_late_and_knows_it() -> None:
    async def run() -> list[float]:
        with lag() as lags_s:
            await asyncio.sleep(0)
            busy = time.perf_counter()
            while time.perf_counter() < busy + 0.3:
                pass
            while not lags_s:
                await asyncio.sleep(0)
        return lags_s

    assert 0.2 < max(asyncio.run(run())) < 30


def test_a_request_is_framed() -> None:
    head, _, body = post("/v1/x", {"a": 1}).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/x HTTP/1.1\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body) == {"a": 1}


# --- the scripts, for a moment ---------------------------------------------------------------------------------


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout


def test_the_overload_benchmark_reports_every_phase() -> None:
    load = ("--seconds", "2", "--capacity-seconds", "1", "--prompt", "8", "--output", "4", "--max-num-seqs", "2")
    lines, totals = read_lines(run("bench_overload", *load, "--streams", "2", "--burst", "60", "--", "--num-blocks", "512"))
    assert [line["scenario"] for line in lines] == ["capacity", "10 times the capacity", "capacity", "2 streams"]
    capacity, overload, again, crowd = lines
    assert set(capacity["statuses"]) == set(again["statuses"]) == {"200"}
    assert set(overload["statuses"]) <= {"200", "429"}
    assert overload["refused_without_retry_after"] == overload["probes_failed"] == crowd["probes_failed"] == 0
    assert totals["capacity_s"] == pytest.approx([capacity["request_s"], again["request_s"]], rel=1e-3)
    assert totals["goodput_over_capacity"] == pytest.approx(2 * overload["goodput_s"] / sum(totals["capacity_s"]), rel=1e-3)
    for line in (capacity, overload, again):
        assert line["processors"].keys() == {"load", "frontend 0", "worker 0", "scheduler 0"}
        assert line["processors"]["load"] > 0
        assert line["processors"]["worker 0"] > 0
    assert (crowd["open"], crowd["broken"]) == (2, 0)
    assert sum(crowd["burst"]["statuses"].values()) == 60
    assert crowd["burst"]["statuses"]["429"] > 0
    assert crowd["body of 8 MiB"]["status"] in (400, 429), "too long a prompt, if the burst has left room to look at it"
    assert crowd["body of 27 MiB"]["status"] == 413
    assert set(totals["memory_mib"]) == {"at first", "after capacity", "after overload", "after crowd"}
    assert all(memory.keys() == {"launcher", "frontend 0", "worker 0", "scheduler 0"} for memory in totals["memory_mib"].values())


def test_the_soak_finds_nothing_wrong_with_a_sound_server() -> None:
    report = json.loads(run("soak_http", "--seconds", "5", "--capacity-seconds", "1", "--clients", "4", "--max-slope", "1e9").splitlines()[-1])
    assert (report["wrong"], report["broken_laws"], report["left_over"]) == (0, 0, [])
    assert report["requests"] > 10
    assert report["scrapes"] >= 2
    assert set(report["slope_mib_per_100k"]) == {"launcher", "frontend 0", "worker 0", "scheduler 0"}
