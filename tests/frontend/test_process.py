"""The frontend as a process of its own: obeys a launcher's control socket, serves on an inherited listening socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from pagemill.config import FrontendConfig
from pagemill.control import ControlSocket, control_pair
from pagemill.messages.control import Alive, ChildToLauncher, Drain, Failed, LauncherToChild, PeerLost, PeerUp, Progress, Ready, Reload, Start
from pagemill.messages.frontend import AddRequest
from tests.helpers.event_stream import Stream, parse
from tests.helpers.fake_scheduler import TOKEN, FakeScheduler, Step, logprobs_of
from tests.helpers.frontend_server import frontend_config
from tests.helpers.raw_http import connect, post_raw, read_to_end

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TIMEOUT_S = 30.0
#: More than any buffer on the way takes.
LARGE: dict[str, Any] = {"messages": HELLO, "n": 16, "max_tokens": 400, "logprobs": True, "top_logprobs": 20}
#: An upload may last for ever, and connections get no time at all once the server closes, which is after that of a drain.
LIMITS = {"body.BODY_TIMEOUT_S": 3600, "http_server.SHUTDOWN_TIMEOUT_S": 0}


@dataclass
class Process:
    """A frontend process and the launcher's end of its control socket."""

    process: subprocess.Popen[bytes]
    control: ControlSocket[LauncherToChild, ChildToLauncher]
    client: httpx.Client

    def receive(self) -> ChildToLauncher | None:
        """The next message but for signs of life."""
        while isinstance(message := self.control.receive(), Alive):
            pass
        return message

    def meet(self, scheduler: FakeScheduler, incarnation: int = 0) -> None:
        self.control.send(PeerUp("scheduler", 0, incarnation, scheduler.address))

    def wait_for_status(self, path: str, status: int) -> httpx.Response:
        while (response := self.client.get(path)).status_code != status:
            pass
        return response

    def wait_for_signs_of_life(self) -> None:
        """Two from now on, between which there is time to end."""
        self.control.socket.setblocking(False)
        with suppress(BlockingIOError):
            while self.control.receive() is not None:
                pass
        self.control.socket.settimeout(TIMEOUT_S)
        for _ in range(2):
            assert isinstance(self.control.receive(), Alive)

    def stream(self) -> StreamReader:
        return StreamReader(f"{self.client.base_url}{CHAT}")

    def begin_upload(self) -> socket.socket:
        """Of a body that is waited for and does not come."""
        connection = connect(self.port)
        connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n" % CHAT.encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 100 ")
        return connection

    @property
    def port(self) -> int:
        return self.client.base_url.port or 0


class StreamReader(threading.Thread):
    """Reads one stream in a thread of its own."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._begun = threading.Event()
        self._received: list[str] = []
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json={"messages": HELLO, "stream": True}, timeout=TIMEOUT_S) as response:
            for piece in response.iter_text():
                self._received.append(piece)
                self._begun.set()

    def wait_for_begin(self) -> None:
        assert self._begun.wait(TIMEOUT_S)

    def result(self) -> Stream:
        self.join(TIMEOUT_S)
        return parse("".join(self._received))


@contextmanager
def frontend_process(
    config: FrontendConfig, injections: tuple[str, ...] = (), index: int = 0, constants: Mapping[str, float] | None = None
) -> Iterator[Process]:
    """`constants` of the frontend's modules have other values in there."""
    changes = "; ".join(f"frontend.{name} = {value!r}" for name, value in (constants or {}).items())
    code = f"import frontend.__main__, frontend.body, frontend.http_server, frontend.whole_reply; {changes}; frontend.__main__.main()"
    ours, theirs = control_pair()
    ours.settimeout(TIMEOUT_S)
    listener = socket.create_server(("127.0.0.1", 0))
    process = subprocess.Popen(
        [sys.executable, "-P", *(("-c", code) if constants else ("-m", "frontend")), "--control-fd", str(theirs.fileno())],
        pass_fds=(theirs.fileno(), listener.fileno()),
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    control: ControlSocket[LauncherToChild, ChildToLauncher] = ControlSocket(ours, ChildToLauncher)
    control.send(Start("frontend", index, 0, 0, TOKEN, raw(config), listener.fileno(), injections=injections))
    port = listener.getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:
            yield Process(process, control, client)
    finally:
        listener.close()
        ours.close()
        process.kill()
        process.wait()


def raw(config: FrontendConfig) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(config))


def begun(_: AddRequest) -> list[Step]:
    """One token, then nothing for ever."""
    return [Step((40,)), *[Step()] * 1_000_000]


def at_once(request: AddRequest) -> list[Step]:
    """All tokens in one output, with much beside each."""
    number = request.limits.max_tokens
    return [Step((40,) * number, "length", logprobs=(logprobs_of(-1.0, dict.fromkeys(range(20), -1.0)),) * number)]


@contextmanager
def unread_reply(constants: Mapping[str, float], *, stream: bool = False) -> Iterator[tuple[Process, socket.socket, bytes]]:
    """A draining frontend, and a client that has read the beginning of a large reply which had its end before. Once the server closes, no time is left."""
    with FakeScheduler(at_once) as scheduler, frontend_process(frontend_config(), constants=LIMITS | dict(constants)) as frontend:
        frontend.meet(scheduler)
        assert isinstance(frontend.receive(), Ready)
        with frontend.begin_upload(), post_raw(frontend.port, CHAT, LARGE | {"stream": stream}, receive_buffer=4096) as connection:
            begin = connection.recv(64)
            scheduler.wait_idle()
            frontend.control.send(Drain(timeout_s=3600.0))
            assert frontend.wait_for_status("/readyz", 503).json() == {"status": "draining"}
            yield frontend, connection, begin


def test_it_serves_before_it_is_ready_and_drains_with_a_last_chunk() -> None:
    with FakeScheduler(begun) as scheduler, frontend_process(frontend_config()) as frontend:
        frontend.control.send(Progress("weights", 0.5, ""))
        assert frontend.client.get("/readyz").status_code == 503  # the port answers at once
        frontend.meet(scheduler)
        assert isinstance(frontend.receive(), Ready)
        assert frontend.client.get("/readyz").status_code == 200
        reader = frontend.stream()
        reader.wait_for_begin()
        frontend.control.send(Drain(timeout_s=0.2))
        stream = reader.result()
        assert frontend.process.wait(TIMEOUT_S) == 0
        assert (stream.done, stream.finish_reasons()) == (True, ["abort"])
        scheduler.wait_idle()


def test_running_requests_may_finish_in_the_time_given() -> None:
    with FakeScheduler() as scheduler, frontend_process(frontend_config()) as frontend:
        frontend.meet(scheduler)
        assert isinstance(frontend.receive(), Ready)
        scheduler.gate.clear()
        answers: list[httpx.Response] = []
        url = f"{frontend.client.base_url}{CHAT}"
        waiting = threading.Thread(target=lambda: answers.append(httpx.post(url, json={"messages": HELLO, "max_tokens": 2}, timeout=TIMEOUT_S)))
        waiting.start()
        scheduler.wait_for(AddRequest)
        frontend.control.send(Drain(timeout_s=TIMEOUT_S))
        while frontend.client.get("/readyz").json() != {"status": "draining"}:
            pass
        refused = frontend.client.post(CHAT, json={"messages": HELLO})
        assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (503, "1", "close")
        assert frontend.client.get("/readyz").headers["connection"] == "close"
        scheduler.gate.set()
        waiting.join(TIMEOUT_S)
        assert answers[0].json()["choices"][0]["finish_reason"] == "length"
        assert frontend.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize(
    ("stream", "constants"),
    [(True, {}), (False, {}), (False, {"whole_reply.BLOCK_BYTES": 1 << 30})],
    ids=["streamed", "buffered", "handed over at once"],
)
def test_a_slow_client_has_all_the_time_of_a_drain_and_an_upload_has_none(stream: bool, constants: dict[str, float]) -> None:
    with unread_reply(constants, stream=stream) as (frontend, connection, begin):
        frontend.wait_for_signs_of_life()
        reply = begin + read_to_end(connection)
        assert frontend.process.wait(TIMEOUT_S) == 0
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    if stream:
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert f"content-length: {len(body)}\r\n".encode() in head + b"\r\n"
        assert len(json.loads(body)["choices"]) == LARGE["n"]


def test_a_second_drain_leaves_a_slow_client_no_more_time_than_it_says() -> None:
    with unread_reply({}) as (frontend, connection, _):
        frontend.control.send(Drain(timeout_s=0.0))
        assert frontend.process.wait(TIMEOUT_S) == 0
        assert not read_to_end(connection).endswith(b"}")


def test_a_drain_does_not_wait_for_a_client_that_takes_nothing() -> None:
    with unread_reply({"http_server.WRITE_TIMEOUT_S": 1.0}) as (frontend, _, _):
        assert frontend.process.wait(TIMEOUT_S) == 0


def test_a_drain_without_a_scheduler_ends_with_last_chunks_when_its_time_is_over() -> None:
    with FakeScheduler(begun) as scheduler, frontend_process(frontend_config()) as frontend:
        frontend.meet(scheduler)
        assert isinstance(frontend.receive(), Ready)
        reader = frontend.stream()
        reader.wait_for_begin()
        frontend.control.send(PeerLost("scheduler", 0, 0, "was killed by SIGKILL"))
        assert "SIGKILL" not in frontend.wait_for_status("/readyz", 503).text
        frontend.control.send(Drain(timeout_s=0.2))
        stream = reader.result()
        assert frontend.process.wait(TIMEOUT_S) == 0
        assert (stream.done, stream.finish_reasons()) == (True, ["abort"])


def test_a_drain_that_is_cut_short_runs_out_of_time_once(capfd: pytest.CaptureFixture[str]) -> None:
    with FakeScheduler(begun) as scheduler, frontend_process(frontend_config(log_level="info")) as frontend:
        frontend.meet(scheduler)
        assert isinstance(frontend.receive(), Ready)
        reader = frontend.stream()
        reader.wait_for_begin()
        with suppress(OSError):  # it may have ended before the second
            for _ in range(2):
                frontend.control.send(Drain(timeout_s=0.0))
        assert reader.result().finish_reasons() == ["abort"]
        assert frontend.process.wait(TIMEOUT_S) == 0
    assert capfd.readouterr().err.count("drain_timed_out") == 1


def test_a_stream_goes_on_with_the_next_scheduler_and_the_process_says_ready_once() -> None:
    rest = [Step((40,)), Step((41,), "length")]
    with FakeScheduler(begun) as first, FakeScheduler(lambda _: list(rest), epoch=2) as second, frontend_process(frontend_config()) as frontend:
        frontend.meet(first)
        assert isinstance(frontend.receive(), Ready)
        reader = frontend.stream()
        reader.wait_for_begin()
        frontend.control.send(PeerLost("scheduler", 0, 0, "was killed by SIGKILL"))
        restarting = {"status": "restarting", "detail": "The scheduler is restarting."}
        assert frontend.wait_for_status("/readyz", 503).json() == restarting
        frontend.meet(second, incarnation=1)
        frontend.wait_for_status("/readyz", 200)
        assert reader.result().finish_reasons() == ["length"]
        assert 'pagemill_restarts_total{process="scheduler"} 1.0' in frontend.client.get("/metrics").text
        assert isinstance(frontend.control.receive(), Alive)


def test_the_end_of_a_worker_is_a_503_until_the_scheduler_is_ready_again() -> None:
    with FakeScheduler() as scheduler, frontend_process(frontend_config()) as frontend:
        frontend.meet(scheduler)
        assert isinstance(frontend.receive(), Ready)
        frontend.control.send(PeerLost("frontend", 1, 0, "was killed by SIGKILL"))
        frontend.control.send(PeerLost("worker", 0, 0, "RuntimeError: /secret/path"))
        response = frontend.wait_for_status("/health", 503)
        assert response.json() == {"status": "restarting", "detail": "A worker is restarting."}
        assert frontend.client.post(CHAT, json={"messages": HELLO, "max_tokens": 2}).status_code == 200  # taken all the same
        scheduler.rebuild()
        frontend.wait_for_status("/health", 200)
        text = frontend.client.get("/metrics").text
        for kind, count in (("worker", 1), ("frontend", 1), ("scheduler", 0)):
            assert f'pagemill_restarts_total{{process="{kind}"}} {count}.0' in text


def test_keys_limits_and_log_level_change_while_it_serves() -> None:
    config = frontend_config(api_keys=("old",))
    with FakeScheduler() as scheduler, frontend_process(config) as frontend:
        frontend.meet(scheduler)
        assert isinstance(frontend.receive(), Ready)

        def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return frontend.client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}, headers=headers).status_code

        assert (status("old"), status("new")) == (200, 401)
        frontend.control.send(Reload(raw(msgspec.structs.replace(config, api_keys=("new",), max_queue_time_s=9, model_names=("other",)))))
        while status("new") != 200:
            pass
        assert status("old") == 401
        assert scheduler.requests()[-1].limits.max_queue_s == 9.0
        names = [model["id"] for model in frontend.client.get("/v1/models", headers={"x-api-key": "new"}).json()["data"]]
        assert names == list(config.model_names)  # needs a restart


def test_it_shows_that_its_event_loop_turns() -> None:
    with frontend_process(frontend_config()) as frontend:
        for _ in range(3):
            assert isinstance(frontend.control.receive(), Alive)


def test_a_scrape_of_one_frontend_shows_the_others(tmp_path: Path) -> None:
    config = frontend_config(num_frontends=2)
    schedulers = [FakeScheduler(index=index, directory=tmp_path) for index in range(2)]
    with ExitStack() as stack:
        frontends = [stack.enter_context(frontend_process(config, index=index)) for index in range(2)]
        for scheduler, frontend in zip(schedulers, frontends, strict=True):
            stack.enter_context(scheduler)
            frontend.meet(scheduler)
            assert isinstance(frontend.receive(), Ready)
        assert frontends[0].client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200
        for frontend in frontends:
            lines = frontend.client.get("/metrics").text.splitlines()
            received = [line for line in lines if line.startswith("pagemill_requests_received_total") and f'endpoint="{CHAT}"' in line]
            assert received == [f'pagemill_requests_received_total{{endpoint="{CHAT}",frontend="0"}} 1.0']
            assert len([line for line in lines if line.startswith("process_open_fds{")]) == 2
        frontends[0].process.kill()
        frontends[0].process.wait(TIMEOUT_S)
        assert 'frontend="0"' not in frontends[1].client.get("/metrics").text


def test_the_launcher_s_death_ends_it() -> None:
    with FakeScheduler() as scheduler, frontend_process(frontend_config()) as frontend:
        frontend.meet(scheduler)
        assert isinstance(frontend.receive(), Ready)
        frontend.control.close()
        assert frontend.process.wait(TIMEOUT_S) is not None


@pytest.mark.parametrize("point", ["control.peer_up", "control.ready"])
def test_a_fault_in_what_the_launcher_relies_on_ends_the_process(point: str) -> None:
    with FakeScheduler() as scheduler, frontend_process(frontend_config(), (f"{point}=raise",)) as frontend:
        frontend.meet(scheduler)
        assert isinstance(frontend.receive(), Failed)
        assert frontend.process.wait(TIMEOUT_S) == 1


@pytest.mark.parametrize("point", ["frontend.request", "frontend.submit", "frontend.submitted", "frontend.output"])
def test_a_fault_may_kill_the_process(point: str) -> None:
    with FakeScheduler() as scheduler, frontend_process(frontend_config(), (f"{point}=kill",)) as frontend:
        frontend.meet(scheduler)
        assert isinstance(frontend.receive(), Ready)
        with pytest.raises(httpx.TransportError):
            frontend.client.post(CHAT, json={"messages": HELLO})
        assert frontend.process.wait(TIMEOUT_S) == -signal.SIGKILL


def test_a_model_without_a_known_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with frontend_process(frontend_config(model_path=str(tmp_path))) as frontend:
        failed = frontend.receive()
        assert isinstance(failed, Failed)
        assert "tokenizer.json" in failed.message
        assert frontend.process.wait(TIMEOUT_S) == 1


def test_it_never_loads_torch() -> None:
    code = (
        "import sys, json, asyncio, frontend.process, frontend.endpoints as e; from pathlib import Path; from frontend.tokenizer import Tokenizer; "
        "e.discover(); Tokenizer(Path(sys.argv[1])); print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"
    )
    command = [sys.executable, "-c", code, frontend_config().model_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})
    assert json.loads(done.stdout) == []
