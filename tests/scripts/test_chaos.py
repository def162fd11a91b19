"""What `scripts/chaos` is made of, without a server to strike: nothing that goes wrong may be missed, nor be blamed on the innocent."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from scripts.lib.chaos import Outcome
from scripts.lib.chaos_audit import Holdings, leaks
from scripts.lib.chaos_clients import RESERVED_TOKEN_IDS, Asked, Clients, make_request
from scripts.lib.chaos_faults import KINDS, Fault, FaultSource, Limits, Struck, all_faults, halt, signal_main_thread, strike
from scripts.lib.chaos_watch import LOST, RESTARTED, Report, Watch, disturb
from tests.helpers.script import load_bench
from tests.helpers.server import LogFollower, Server
from tests.helpers.tiny_model import make_tokenizer

# --- clients -------------------------------------------------------------------------------------------------

STREAMED, WHOLE = Asked(0, {"prompt": "Once"}), Asked(1, {"prompt": "Once"})
USAGE = {"prompt_tokens": 1, "completion_tokens": 2}


def choice(text: str, finish_reason: str | None = "length") -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def response(status: str, body: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", body]).encode()


def whole(text: str, usage: dict[str, int] = USAGE) -> bytes:
    return response("200 OK", json.dumps({"choices": [choice(text)], "usage": usage}))


def events(*bodies: dict[str, Any], done: bool = True) -> bytes:
    return response("200 OK", "".join(f"data: {json.dumps(body)}\n\n" for body in bodies) + ("data: [DONE]\n\n" if done else ""))


def stream(*texts: str) -> bytes:
    return events(*({"choices": [choice(text, None)]} for text in texts), {"choices": [choice("")]}, {"choices": [], "usage": USAGE})


CUT = stream("two ", "words")[:-20]


def good(asked: Asked) -> bytes:
    return stream("two ", "words") if asked.stream else whole("two words")


@asynccontextmanager
async def scripted(replies: Sequence[bytes], on_ask: Callable[[int, int], None]) -> AsyncIterator[str]:
    """A server that says these one after another, and the last again and again. `on_ask` hears the number of the request and its port."""
    num_asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        with closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(length)
            on_ask(num_asked, writer.get_extra_info("peername")[1])
            writer.write(replies[min(num_asked, len(replies) - 1)])
            num_asked += 1

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.lib.chaos_clients._RETRY_S", 0.0)


def ask_twice(asked: Asked, replies: Sequence[bytes], *, killed: Sequence[int] = ()) -> Clients:
    """Learns from the first reply and asks again until there is an answer. With the requests in `killed` goes the frontend that has them."""

    async def run() -> Clients:
        def on_ask(number: int, port: int) -> None:
            if number in killed:
                clients.excuse({port})

        async with scripted(replies, on_ask) as url:
            clients = Clients(url, [asked])
            await clients.learn()
            await clients.run(once=True)
            return clients

    return asyncio.run(run())


@pytest.mark.parametrize("asked", [STREAMED, WHOLE])
def test_an_answer_that_is_the_same_is_complete(asked: Asked) -> None:
    clients = ask_twice(asked, [good(asked)])
    assert (clients.failures, clients.outcomes, clients.num_tokens) == ([], {"completed": 1}, 2)


def test_a_stream_may_come_in_other_pieces() -> None:
    assert ask_twice(STREAMED, [good(STREAMED), stream("two words")]).failures == []


@pytest.mark.parametrize(
    ("asked", "reply", "says"),
    [
        (STREAMED, stream("two ", "wards"), "request 0 got another answer than undisturbed: choice 0 from character 5 on: 'ards' instead of 'ords'"),
        (STREAMED, stream("two ", "words", "words"), "choice 0 from character 9 on: 'words' instead of ''"),
        (STREAMED, events({"choices": []}), "choice 0 is missing"),
        (WHOLE, whole("two"), "choice 0 from character 3 on: '' instead of ' words'"),
        (WHOLE, whole("two words", {"prompt_tokens": 1, "completion_tokens": 3}), "1 and 3 tokens instead of 1 and 2"),
        (WHOLE, response("200 OK", json.dumps({"choices": [choice("two words", "stop")], "usage": USAGE})), "choice 0: same text, but"),
        (WHOLE, response("200 OK", json.dumps({"choices": [choice("two words"), {**choice(""), "index": 1}]})), "choice 1 is one too many"),
    ],
)
def test_an_answer_that_differs_is_wrong_and_says_where(asked: Asked, reply: bytes, says: str) -> None:
    clients = ask_twice(asked, [good(asked), reply])
    assert clients.outcomes == {"wrong": 1}
    assert says in clients.failures[0]


@pytest.mark.parametrize(
    ("asked", "reply", "says"),
    [
        (STREAMED, events({"error": {"message": "No.", "code": "request_failed"}}), "request_failed"),
        (STREAMED, events({"choices": [choice("two words")]}, done=False), "without [DONE]"),
        (STREAMED, CUT, "was cut off although nobody touched its frontend"),
        (WHOLE, response("500 Internal Server Error", '{"error":{"message":"Oh."}}'), "HTTP 500"),
        (WHOLE, response("503 Service Unavailable", '{"error":{"message":"Later."}}'), "HTTP 503"),
        (WHOLE, response("503 Service Unavailable", "no JSON"), "no JSON"),
        (WHOLE, b"", "was cut off although nobody touched its frontend"),
    ],
)
def test_a_request_that_gets_no_answer_is_a_failure(asked: Asked, reply: bytes, says: str) -> None:
    clients = ask_twice(asked, [good(asked), reply, good(asked)])
    assert clients.outcomes == {"failed": 1, "completed": 1}
    assert says in clients.failures[0]


@pytest.mark.parametrize("reply", [CUT, b""])
def test_a_connection_may_break_if_its_own_frontend_was_killed(reply: bytes) -> None:
    replies = [good(STREAMED), reply, good(STREAMED)]
    excused, not_excused = (ask_twice(STREAMED, replies, killed=killed) for killed in ([1], [0]))
    assert (excused.failures, excused.outcomes) == ([], {"broken": 1})
    assert not_excused.outcomes == {"failed": 1, "completed": 1}


def test_who_is_turned_away_comes_again() -> None:
    clients = ask_twice(WHOLE, [good(WHOLE), response("503 Service Unavailable", '{"error":{"message":"Later."}}', "Retry-After: 1"), good(WHOLE)])
    assert clients.outcomes == {"turned away": 1, "completed": 1}
    assert clients.failures == []


def test_clients_give_up_when_nothing_works() -> None:
    """Each of them would go on until it has an answer."""
    clients = ask_twice(WHOLE, [good(WHOLE), response("500 Internal Server Error", "{}")])
    assert clients.outcomes == {"failed": 20}


def test_requests_are_the_same_every_time_and_keep_clear_of_what_belongs_to_faults() -> None:
    requests = [make_request(number, (20, 40)) for number in range(64)]
    assert requests == [make_request(number, (20, 40)) for number in range(64)]
    assert {asked.body["max_tokens"] for asked in requests} == {20, 40}
    assert all(asked.body["logit_bias"] == {str(token_id): -100 for token_id in RESERVED_TOKEN_IDS} for asked in requests)
    tokenizer = make_tokenizer()
    assert all(set(RESERVED_TOKEN_IDS).isdisjoint(tokenizer.encode(asked.body["prompt"]).ids) for asked in requests)


# --- faults --------------------------------------------------------------------------------------------------


def drawn(seed: int, num_rounds: int) -> list[list[Fault]]:
    source = FaultSource(seed, KINDS, num_frontends=2)
    return [source.next_round() for _ in range(num_rounds)]


def test_faults_are_drawn_from_the_seed_and_all_come_before_any_comes_again() -> None:
    everything = all_faults(KINDS, 2)
    assert len(everything) == 4 * 4 + 3
    assert drawn(1, 50) == drawn(1, 50) != drawn(2, 50)
    firsts = [str(faults[0]) for faults in drawn(1, 2 * len(everything))]
    assert sorted(firsts[: len(everything)]) == sorted(firsts[len(everything) :]) == sorted(map(str, everything))


def test_of_several_ranks_each_is_struck() -> None:
    everything = all_faults(KINDS, 2, num_ranks=3)
    assert len(everything) == 4 * (3 + 1 + 2) + 3
    assert {fault.process for fault in everything if fault.kind == "kill" and fault.process_kind == "worker"} == {"worker 0", "worker 1", "worker 2"}
    drawn = [fault for _ in range(100) for fault in FaultSource(1, KINDS, 2, 3).next_round()]
    assert {fault.num_ranks for fault in drawn} == {3}


def test_what_raises_on_one_of_several_ranks_ends_them_all() -> None:
    alone, together = Fault("raise", "worker 0"), Fault("raise", "worker 0", num_ranks=2)
    assert (alone.deaths, alone.request.code) == ((0, 0), "generation_failed")
    assert (together.deaths, together.request.code) == (Fault("poison", "worker 0").deaths, "request_failed")
    assert Fault("nan", "worker 0", num_ranks=2).request == Fault("nan", "worker 0").request


def test_sometimes_another_process_dies_during_a_repair() -> None:
    doubles = [faults for faults in drawn(1, 400) if len(faults) > 1]
    assert 20 < len(doubles) < 100
    for first, second in doubles:
        assert {first.kind, second.kind} <= {"kill", "segv"}
        assert first.process_kind != second.process_kind
        assert 0 <= second.after_s <= 2


def test_a_freeze_ends_before_any_watchdog_finds_it() -> None:
    assert all(0 < fault.seconds < 1 for faults in drawn(1, 200) for fault in faults if fault.kind == "freeze")


def test_limits_are_those_of_who_finds_the_fault_and_of_what_has_to_start() -> None:
    limits = Limits(load_s=4.0, step_s=3.0)
    seen = {str(fault): limits.seen_s(fault) for fault in all_faults(("kill", "stop"), 1)}
    assert seen == {"kill worker 0": 1, "kill scheduler 0": 1, "kill frontend 0": 1, "stop worker 0": 4, "stop scheduler 0": 11, "stop frontend 0": 11}
    back = {str(fault): limits.back_s(fault) for fault in all_faults(("kill", "poison", "raise"), 1)}
    assert back == {"kill worker 0": 9, "kill scheduler 0": 9, "kill frontend 0": 2, "poison worker 0": 27, "raise worker 0": 9}
    assert replace(limits, slack_s=1.0).seen_s(Fault("kill", "worker 0")) == 2
    assert limits.beside([Fault("kill", "worker 0")]).back_s(Fault("kill", "frontend 0")) == 2 + 9
    assert limits.beside([]) == limits


def test_what_never_comes_or_comes_late_is_a_breach() -> None:
    report = Report(Fault("kill", "worker 0"))
    assert report.measure("seen", 10.0, 10.5, 1.0) == 0.5
    assert report.breaches == []
    assert report.measure("seen", 10.0, 12.0, 1.0) == 2.0
    assert report.measure("ready", 10.0, None, 1.0) is None
    assert report.breaches == ["kill worker 0: seen after 2.0 s, of 1.0 s", "kill worker 0: not ready at all"]


VICTIM = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    print("accepted", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(("kind", "ended_by"), [("kill", signal.SIGKILL), ("segv", signal.SIGSEGV)])
def test_a_strike_on_a_frontend_tells_first_whose_connections_it_takes_along(kind: str, ended_by: signal.Signals) -> None:
    excused: set[int] = set()
    with subprocess.Popen([sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        with socket.create_connection(("127.0.0.1", int(victim.stdout.readline()))) as client:
            assert victim.stdout.readline() == b"accepted\n"
            server = cast(Server, SimpleNamespace(child=lambda title: psutil.Process(victim.pid)))
            before = time.time()
            at, _ = strike(server, Fault(kind, "frontend 0"), excused.update)
            assert before <= at <= time.time()
            assert excused == {client.getsockname()[1]}
            assert victim.wait(30) == -ended_by


CROWD = """
import threading
for _ in range(4):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""


def test_a_signal_to_the_main_thread_is_no_other_threads() -> None:
    with subprocess.Popen([sys.executable, "-c", CROWD], stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"ready\n"
        halt(psutil.Process(victim.pid))
        signal_main_thread(victim.pid, signal.SIGSEGV)
        status = Path(f"/proc/{victim.pid}/status").read_text()
        victim.send_signal(signal.SIGCONT)
        assert victim.wait(30) == -signal.SIGSEGV
    pending = {name: int(signals, 16) for name, signals in re.findall(r"(SigPnd|ShdPnd):\s*(\w+)", status)}
    assert pending == {"SigPnd": 1 << signal.SIGSEGV - 1, "ShdPnd": 0}
    with pytest.raises(OSError, match=f"no SIGSEGV for process {victim.pid}"):
        signal_main_thread(victim.pid, signal.SIGSEGV)


class Patient:
    """A server that is struck in a test: it notices, repairs itself and says so, or not, as it is told."""

    def __init__(self, folder: Path, *, seen_s: float = 0.05, repaired_s: float = 0.2, is_ready_again: bool = True) -> None:
        self.process = SimpleNamespace(poll=lambda: None)
        self.url = ""
        self.clients = SimpleNamespace(num_parts=0, excuse=None)
        self._log_path = folder / "log"
        self._log_path.touch()
        self._seen_s, self._repaired_s, self._is_ready_again = seen_s, repaired_s, is_ready_again
        self._status = "200 OK"

    def follow(self) -> LogFollower:
        return LogFollower(self._log_path, 0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            self.clients.num_parts += self._status == "200 OK"
            writer.write(response(self._status, "{}"))

    def be_struck(self, *_: object) -> Struck:
        """Called in a thread."""
        at = time.time()
        self.loop.call_soon_threadsafe(self.loop.call_later, self._seen_s, self._notice)
        return Struck(at, psutil.Process())

    def _notice(self) -> None:
        self._status = "503 Service Unavailable"
        self._say(LOST)
        self.loop.call_later(self._repaired_s, self._recover)

    def _recover(self) -> None:
        self._say(RESTARTED)
        self._status = "200 OK" if self._is_ready_again else self._status

    def _say(self, event: str, child: str = "worker 0") -> None:
        line = {"timestamp": datetime.now(UTC).isoformat(), "event": event, "child": child}
        with self._log_path.open("a") as log:
            log.write(json.dumps(line) + "\n")

    async def suffer(self, limits: Limits) -> tuple[Report, Watch]:
        self.loop = asyncio.get_running_loop()
        async with await asyncio.start_server(self.serve, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            watch = Watch(cast(Server, self))
            watching = asyncio.create_task(watch.run())
            report = await disturb(cast(Server, self), watch, cast(Clients, self.clients), Fault("kill", "worker 0"), limits)
            watching.cancel()
            return report, watch


def test_ranks_that_end_together_are_one_death(tmp_path: Path) -> None:
    patient = Patient(tmp_path)
    watch = Watch(cast(Server, patient))
    for event, child in ((LOST, "worker 1"), (LOST, "worker 0"), (LOST, "frontend 0"), (RESTARTED, "worker 0"), (RESTARTED, "worker 1"), (LOST, "worker 0")):
        patient._say(event, child)
    watch._read_log()
    assert watch.deaths == Counter({"worker 1": 1, "worker 0": 1, "frontend 0": 1})
    assert watch.down == {"frontend 0", "worker 0"}


def test_what_a_repair_takes_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = Patient(tmp_path)
    monkeypatch.setattr("scripts.lib.chaos_watch.strike", patient.be_struck)
    report, watch = asyncio.run(patient.suffer(Limits(load_s=0.0, step_s=0.0, slack_s=20.0)))
    assert report.breaches == []
    assert report.seen_s is not None
    assert report.unready_s is not None
    assert report.back_s is not None
    assert 0.05 <= report.seen_s < report.seen_s + 0.2 <= report.seen_s + report.back_s
    assert watch.deaths == {"worker 0": 1}
    assert watch.down == set()


@pytest.mark.parametrize(
    ("patient", "limits", "breaches"),
    [
        ({"seen_s": 0.3}, Limits(20.0, 0.0, -0.8), ["seen after", "unready after"]),
        ({"repaired_s": 0.5}, Limits(-4.8, 0.0, 0.0), ["restarted after", "ready after", "going on after"]),
        ({"seen_s": 60.0}, Limits(-4.0, 0.0), ["not seen at all", "not unready at all", "not restarted at all", "going on after"]),
        ({"is_ready_again": False}, Limits(-5.0, 0.0), ["restarted after", "not ready at all", "not going on at all"]),
    ],
)
def test_what_takes_too_long_is_a_breach(patient: dict[str, Any], limits: Limits, breaches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    struck = Patient(tmp_path, **patient)
    monkeypatch.setattr("scripts.lib.chaos_watch.strike", struck.be_struck)
    monkeypatch.setattr("scripts.lib.chaos_watch._PATIENCE_S", 1.0)
    report, _ = asyncio.run(struck.suffer(limits))
    for breach, says in zip(report.breaches, breaches, strict=True):
        assert breach.startswith("kill worker 0: ")
        assert says in breach


# --- what is left --------------------------------------------------------------------------------------------

AT_REST = Holdings(
    sequences=0,
    blocks=0,
    swap_slots=0,
    broken_invariant="",
    titles=("frontend 0", "launcher", "scheduler 0", "worker 0"),
    zombies=0,
    orphans=0,
    descriptors={"launcher": 20, "worker 0": 15},
    shared_memory=2,
    sockets=2,
    private_bytes={"launcher": 30 * 2**20},
)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"private_bytes": {"launcher": 31 * 2**20}, "descriptors": {"launcher": 19, "worker 0": 15}}, None),
        ({"sequences": 1}, "1 sequences left"),
        ({"blocks": 3}, "3 blocks left"),
        ({"swap_slots": 2}, "2 swap slots left"),
        ({"zombies": 1}, "1 zombies left"),
        ({"orphans": 1}, "1 orphans left"),
        ({"broken_invariant": "block 3 is lost"}, "an invariant does not hold: block 3 is lost"),
        ({"titles": ("launcher",)}, "processes are launcher instead of frontend 0, launcher, scheduler 0, worker 0"),
        ({"descriptors": {"launcher": 21, "worker 0": 15}}, "launcher has 21 descriptors instead of 20"),
        ({"shared_memory": 3}, "3 pieces of shared memory instead of 2"),
        ({"shared_memory": 1}, "1 pieces of shared memory instead of 2"),
        ({"sockets": 5}, "5 sockets in its directory instead of 2"),
    ],
)
def test_whatever_is_left_is_found(changed: dict[str, Any], says: str | None) -> None:
    assert leaks(AT_REST, replace(AT_REST, **changed)) == ([] if says is None else [says])


# --- the script ----------------------------------------------------------------------------------------------


def outcome_with(breaches: list[str]) -> Outcome:
    clients = Clients("http://127.0.0.1:1", [])
    clients.outcomes.update({"completed": 40, "broken": 2})
    reports = [Report(Fault("kill", f"frontend {index}"), seen_s=0.1 * index, back_s=1.0 + index) for index in range(3)]
    return Outcome(clients, AT_REST, AT_REST, {"swap": 3.0}, seconds=10.0, num_deaths=3, reports=reports, breaches=breaches)


@pytest.mark.parametrize("breaches", [[], ["1 blocks left"]])
def test_the_script_reports_each_fault_and_the_sum_and_fails_on_a_breach(
    breaches: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = outcome_with(breaches)

    class ScriptedChaos:
        clients = outcome.clients

        def __init__(self, *_: object) -> None: ...

        async def run(self, on_round: Callable[[Sequence[Report]], None]) -> Outcome:
            on_round(outcome.reports[:2])
            on_round(outcome.reports[2:])
            return outcome

    script = load_bench("chaos")
    monkeypatch.setattr(script, "chaos_server", lambda *_: nullcontext((None, None)))
    monkeypatch.setattr(script, "Chaos", ScriptedChaos)
    assert script.main(["--seconds", "10", "--seed", "7"]) == len(breaches)
    output = capsys.readouterr()
    *faults, summary = [json.loads(line) for line in output.out.splitlines()]
    assert [(fault["scenario"], fault["process"], fault["in_company"], fault["seed"]) for fault in faults] == [
        ("kill", "frontend 0", True, 7),
        ("kill", "frontend 1", True, 7),
        ("kill", "frontend 2", False, 7),
    ]
    assert summary["recovery_s"] == {"kill frontend": {"faults": 3, "seen_s": {"p50": 0.1, "p100": 0.2}, "back_s": {"p50": 2.0, "p100": 3.0}}}
    assert (summary["completed"], summary["broken_connections"], summary["wrong"], summary["breaches"]) == (40, 2, 0, breaches)
    assert all(breach in output.err for breach in breaches)
