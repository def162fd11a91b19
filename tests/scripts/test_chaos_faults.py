"""The faults of `scripts/chaos`: drawn from a seed, struck at the right process, each with its limits."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from scripts.lib.chaos_faults import KINDS, Fault, FaultSource, Limits, all_faults, halt, signal_main_thread, strike
from tests.helpers.server import Server


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
