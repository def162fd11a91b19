"""A real server from start to end: what is bound, who runs, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pagemill.arena_file import ARENA_NAME
from tests.helpers.server import ROOT, Server, running_server, title_of, wait_for
from tests.helpers.tiny_model import tiny_model_path

KEY = "sk-lifecycle-secret"
TITLES = ["pagemill: frontend 0", "pagemill: scheduler 0", "pagemill: worker 0"]


def get(url: str, key: str = "") -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def listening_ports(processes: list[psutil.Process]) -> set[int]:
    return {found.laddr.port for process in processes for found in process.net_connections(kind="tcp") if found.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys"


@pytest.fixture(scope="module")
def server(run_folder: Path, key_file: Path) -> Iterator[Server]:
    """One with keys and a directory of its own, for what can be seen without ending it; then it is ended."""
    key_file.write_text(KEY + "\n")
    environment = {"TMPDIR": str(run_folder), "PAGEMILL_API_KEY": KEY + "-too"}
    with running_server("--api-key-file", str(key_file), "--served-model-name", "tiny", "tiny-too", env=environment) as started:
        yield started


def test_processes_are_titled(server: Server) -> None:
    assert title_of(server.pid) == "pagemill: launcher"
    assert sorted(title_of(child.pid) for child in server.children()) == TITLES


def test_the_only_listener_is_the_api_port(server: Server) -> None:
    assert listening_ports([psutil.Process(server.pid), *server.children()]) == {server.port}


def test_a_ready_server_says_so(server: Server) -> None:
    assert get(f"{server.url}/readyz")[0] == 200
    status, body = get(f"{server.url}/v1/models", KEY)
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "tiny")


def test_both_kinds_of_key_are_taken_and_asked_for(server: Server) -> None:
    assert get(f"{server.url}/v1/models")[0] == 401
    assert get(f"{server.url}/v1/models", KEY + "-too")[0] == 200


def test_a_hangup_signal_changes_the_keys_of_a_running_server(server: Server, key_file: Path) -> None:
    def is_taken(key: str) -> bool:
        return get(f"{server.url}/v1/models", key)[0] == 200

    children = {child.pid for child in server.children()}
    try:
        key_file.write_text(KEY + "-new\n")
        os.kill(server.pid, signal.SIGHUP)
        wait_for(lambda: is_taken(KEY + "-new"), 30, lambda: server.log)
        assert not is_taken(KEY)
        key_file.write_text("")
        os.kill(server.pid, signal.SIGHUP)
        assert "holds no key" in server.wait_for_event("reload_refused")["reason"]
        assert is_taken(KEY + "-new")
    finally:
        key_file.write_text(KEY + "\n")
        os.kill(server.pid, signal.SIGHUP)
    wait_for(lambda: is_taken(KEY), 30, lambda: server.log)
    assert {child.pid for child in server.children()} == children


def test_keys_show_nowhere(server: Server) -> None:
    processes = [psutil.Process(server.pid), *server.children()]
    for process in processes:
        assert KEY.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    for child in server.children():
        assert KEY.encode() not in Path(f"/proc/{child.pid}/environ").read_bytes()
    assert KEY not in server.log


@pytest.mark.usefixtures("server")
def test_sockets_lie_in_a_private_directory(run_folder: Path) -> None:
    (directory,) = run_folder.glob("pagemill-run-*")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_ISSOCK(path.stat().st_mode) for path in directory.iterdir()} == {True}


def test_memory_is_planned_before_anything_is_started(server: Server) -> None:
    names = [json.loads(line)["event"] for line in server.log.splitlines() if line.startswith("{")]
    assert names.index("listening") < names.index("memory_planned") < names.index("ready")


def arena_mappings(pid: int) -> list[dict[str, int]]:
    """What each mapping of an arena in this process takes, in KiB."""
    found: list[dict[str, int]] = []
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = f"/memfd:{ARENA_NAME}" in line
            found += [{}] if ours else []
        elif ours and line.endswith("kB"):
            name, size, _ = line.split()
            found[-1][name] = int(size)
    return found


def open_arenas(pid: int) -> list[str]:
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return [target for target in links if ARENA_NAME in target]


def test_the_launcher_keeps_the_arena_and_the_worker_alone_maps_it_all_of_it_resident(server: Server) -> None:
    planned = next(json.loads(line) for line in server.log.splitlines() if '"memory_planned"' in line)
    assert planned["swap_bytes"] > 0
    mapped = {title_of(pid): arena_mappings(pid) for pid in (server.pid, *(child.pid for child in server.children()))}
    (mapping,) = mapped.pop("pagemill: worker 0")
    assert mapping["Size:"] == mapping["Rss:"] == planned["swap_bytes"] // 1024
    assert mapped == {"pagemill: launcher": [], "pagemill: frontend 0": [], "pagemill: scheduler 0": []}
    assert [len(open_arenas(pid)) for pid in (server.pid, server.child("worker 0").pid)] == [1, 1], "the worker's is the mapping's own"
    assert [open_arenas(server.child(f"{kind} 0").pid) for kind in ("frontend", "scheduler")] == [[], []]


@pytest.fixture(scope="module")
def bare() -> Iterator[Server]:
    """One that does without what others have: no memory to swap to, and no restarts."""
    with running_server("--swap-memory", "0", "--restart-limit", "0") as started:
        yield started


def test_without_swap_memory_there_is_no_arena(bare: Server) -> None:
    assert open_arenas(bare.pid) == open_arenas(bare.child("worker 0").pid) == []


def test_without_restarts_the_death_of_a_worker_stops_everything_and_is_named(bare: Server) -> None:
    """Ends the server of the test before. Scheduler and frontend: tests/e2e/test_recovery.py, tests/pagemill/test_launcher.py."""
    bare.child("worker 0").kill()
    assert bare.wait() == 1
    assert json.loads(bare.log.splitlines()[-1])["reason"] == "worker 0 was killed by SIGKILL"
    assert bare.leftovers() == []


def test_the_port_is_bound_and_answers_503_with_the_phase_until_ready_then_sigterm_ends_it(tmp_path: Path) -> None:
    with running_server(wait=False, env={"TMPDIR": str(tmp_path)}) as server:
        url = server.url
        status, body = get(f"{url}/readyz")  # waits for the frontend, which comes long before the worker
        assert status == 503
        loading = json.loads(body)
        assert loading["status"] == "loading"
        assert loading["phase"]
        assert 0 <= loading["progress"] <= 1
        assert get(f"{url}/livez")[0] == 200
        server.wait_until_ready()
        assert get(f"{url}/readyz")[0] == 200
        server.children()
        began = time.monotonic()
        server.process.terminate()
        assert server.wait() == 0
        assert time.monotonic() - began < 10
        assert server.leftovers() == []
        assert list(tmp_path.iterdir()) == []
        assert "Traceback" not in server.log


def test_sigterm_while_loading_ends_it() -> None:
    with running_server(wait=False) as server:
        server.child("worker 0")
        server.process.terminate()
        assert server.wait() == 0
        assert server.leftovers() == []


@pytest.fixture(scope="module")
def other() -> Iterator[Server]:
    """One beside the first."""
    with running_server() as started:
        yield started


def test_two_servers_run_at_once_and_a_taken_port_is_refused(server: Server, other: Server) -> None:
    assert server.port != other.port
    assert [get(f"{one.url}/readyz")[0] for one in (server, other)] == [200, 200]
    refused = serve(str(tiny_model_path()), "--port", str(server.port))
    assert refused.returncode == 2
    says = rf"pagemill: port {server.port} on 127\.0\.0\.1 is in use by process {server.pid} \(.*\); choose another with --port\n"
    assert re.fullmatch(says, refused.stderr)


def test_ctrl_c_ends_it_and_no_other(server: Server, other: Server) -> None:
    """Ends the server of the tests before."""
    server.children()
    began = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0
    assert time.monotonic() - began < 20
    assert server.leftovers() == []
    assert get(f"{other.url}/readyz")[0] == 200


def test_nothing_survives_sigkill_of_the_launcher(other: Server) -> None:
    """Ends the other one."""
    assert len(other.children()) == 3
    other.process.kill()
    other.wait()
    wait_for(lambda: not other.leftovers(), 5, lambda: f"still there: {other.leftovers()}")


@pytest.mark.parametrize(
    ("argv", "says"),
    [  # one for each place that looks at options: tests/pagemill has them all
        (["--max-model-len", "1000000"], "--max-model-len 1000000 is more than the"),
        (["--port", "70000"], "--port accepts a number, from 0 to 65535"),
        (["--scheduling-policy", "lifo"], "--scheduling-policy accepts one of fcfs, priority, static"),
        (["--swap-memory", "100TB"], "--swap-memory asks for 93132.3 GiB, but"),
        (["--host", "0.0.0.0"], "would let others in without a key"),
        (["--tensor-parallel-size", "3"], "8 attention heads, 4 KV heads and an intermediate size of 160 cannot be divided among 3 ranks"),
    ],
)
def test_what_cannot_work_ends_in_one_line_with_exit_code_2(argv: list[str], says: str) -> None:
    refused = serve(str(tiny_model_path()), "--port", "0", *argv)
    assert refused.returncode == 2
    last = refused.stderr.splitlines()[-1]
    assert last.startswith("pagemill: ")
    assert says in last


def serve(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagemill", "serve", "--log-level", "error", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, env=dict(os.environ), check=False)
