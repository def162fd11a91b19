"""The frontend as a process of its own: obeys a launcher's control socket, serves on an inherited listening socket."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from pagemill.config import FrontendConfig
from pagemill.control import ControlSocket, control_pair
from pagemill.messages import (
    AddRequest,
    ChildToLauncher,
    Drain,
    Failed,
    LauncherToChild,
    PeerLost,
    PeerUp,
    Progress,
    Ready,
    Start,
)
from tests.helpers.event_stream import parse
from tests.helpers.fake_scheduler import TOKEN, FakeScheduler, Step
from tests.helpers.frontend_server import frontend_config

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TIMEOUT_S = 30.0


@dataclass
class Process:
    """A frontend process and the launcher's end of its control socket."""

    process: subprocess.Popen[bytes]
    control: ControlSocket[LauncherToChild, ChildToLauncher]
    client: httpx.Client

    def receive(self) -> ChildToLauncher | None:
        return self.control.receive()


@contextmanager
def frontend_process(config: FrontendConfig, command: tuple[str, ...] = ("-m", "frontend")) -> Iterator[Process]:
    ours, theirs = control_pair()
    ours.settimeout(TIMEOUT_S)
    listener = socket.create_server(("127.0.0.1", 0))
    process = subprocess.Popen(
        [sys.executable, "-P", *command, "--control-fd", str(theirs.fileno())],
        pass_fds=(theirs.fileno(), listener.fileno()),
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    control: ControlSocket[LauncherToChild, ChildToLauncher] = ControlSocket(ours, ChildToLauncher)
    control.send(Start("frontend", 0, 1, 1, TOKEN, msgspec.Raw(msgspec.msgpack.encode(config)), listener.fileno()))
    port = listener.getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:
            yield Process(process, control, client)
    finally:
        listener.close()
        ours.close()
        process.kill()
        process.wait()


def test_it_serves_before_it_is_ready_and_drains_with_a_last_chunk() -> None:
    with FakeScheduler() as scheduler, frontend_process(frontend_config()) as frontend:
        frontend.control.send(Progress("weights", 0.5, ""))
        assert frontend.client.get("/readyz").status_code == 503  # the port answers at once
        frontend.control.send(PeerUp("scheduler", 0, 1, scheduler.address))
        assert isinstance(frontend.receive(), Ready)
        assert frontend.client.get("/readyz").status_code == 200

        scheduler.script = lambda _: [Step((40,)), *[Step()] * 1_000_000]
        received: list[str] = []

        def read() -> None:
            with httpx.stream("POST", f"{frontend.client.base_url}{CHAT}", json={"messages": HELLO, "stream": True}, timeout=TIMEOUT_S) as response:
                received.extend(response.iter_text())

        reader = threading.Thread(target=read)
        reader.start()
        scheduler.wait_for(AddRequest)
        frontend.control.send(Drain(timeout_s=0.2))
        reader.join(TIMEOUT_S)
        assert frontend.process.wait(TIMEOUT_S) == 0
        stream = parse("".join(received))
        assert (stream.done, stream.finish_reasons()) == (True, ["abort"])
        scheduler.wait_idle()


def test_running_requests_may_finish_in_the_time_given() -> None:
    with FakeScheduler() as scheduler, frontend_process(frontend_config()) as frontend:
        frontend.control.send(PeerUp("scheduler", 0, 1, scheduler.address))
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
        assert frontend.client.post(CHAT, json={"messages": HELLO}).status_code == 503
        scheduler.gate.set()
        waiting.join(TIMEOUT_S)
        assert answers[0].json()["choices"][0]["finish_reason"] == "length"
        assert frontend.process.wait(TIMEOUT_S) == 0


def test_a_lost_scheduler_makes_it_unready_and_the_launcher_s_death_ends_it() -> None:
    with FakeScheduler() as scheduler, frontend_process(frontend_config()) as frontend:
        frontend.control.send(PeerUp("scheduler", 0, 1, scheduler.address))
        assert isinstance(frontend.receive(), Ready)
        frontend.control.send(PeerLost("scheduler", 0, 1))
        while frontend.client.get("/readyz").status_code != 503:
            pass
        frontend.control.close()
        assert frontend.process.wait(TIMEOUT_S) is not None


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
