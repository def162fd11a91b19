"""Children that do no work: what each is given, of whom it hears, and who takes the place of the dead."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from pagemill.ids import NONE
from tests.helpers.server import wait_for
from tests.helpers.started_launcher import GOOD, Start, StartedLauncher


def test_children_hear_of_each_other_and_not_of_the_terminal(start: Start) -> None:
    fake = start(*GOOD)
    fake.wait_for_event("peer_up", count=4)
    addresses: dict[str, set[str]] = {}
    for line in fake.events("peer_up"):
        addresses.setdefault(line["process"], set()).add(line["address"])
    assert addresses["scheduler-0"] == addresses["worker-0"] | addresses["frontend-0"]
    assert len(addresses["scheduler-0"]) == 2

    fake.wait_for_event("progress_passed_on", count=2)
    passed_on = fake.events("progress_passed_on")
    assert {line["process"] for line in passed_on} == {"frontend-0"}
    assert {line["detail"] for line in passed_on} == {"half of worker", "half of scheduler"}

    groups = {os.getpgid(child.pid) for child in fake.children()}
    assert len(groups) == 3
    assert os.getpgid(fake.process.pid) not in groups


def test_the_arena_reaches_workers_and_the_directory_schedulers_and_neither_goes_further(start: Start) -> None:
    fake = start(*GOOD)
    fake.wait_for_event("started", count=3)
    told = {line["process"]: line for line in fake.events("started")}
    for name, owner in (("arena", "worker-0"), ("directory", "scheduler-0")):
        assert {process: len(line["open"][name]) for process, line in told.items()} == {"worker-0": 0, "frontend-0": 0, "scheduler-0": 0} | {owner: 1}
        assert told[owner]["open"][name] == [told[owner]["given"][name]]
        assert {line["given"][name] for process, line in told.items() if process != owner} == {NONE}
    assert [line["inheritable"] for line in told.values()] == [[], [], []]


def test_a_dead_worker_is_replaced_with_its_whole_group_and_all_who_have_to_know_are_told(start: Start) -> None:
    fake = start("--restart-limit", "1", "frontend:good", "worker:good", "worker:good", "scheduler:good")
    fake.wait_for_event("ready")
    fake.child("worker 1").kill()
    fake.wait_for_event("server_ready")
    assert fake.lost() == ["worker 1 was killed by SIGKILL", "worker 0 was ended with worker 1"]
    assert {(line["deaths"], line["restart_limit"]) for line in fake.events("process_lost")} == {(1, 1)}, "one death, however many workers"
    restarted = {line["child"]: line["seconds"] for line in fake.events("process_restarted")}
    assert sorted(restarted) == ["worker 0", "worker 1"]
    assert all(0 < seconds < 60 for seconds in restarted.values())

    order = [line["event"] for line in fake.lines() if line.get("child") == "scheduler 0" or line["event"] == "server_ready"]
    assert order[-2:] == ["process_ready", "server_ready"], "the server is ready when the scheduler has met all new workers"

    fake.wait_for_event("peer_up", count=10)
    for peer in ("scheduler-0", "frontend-0"):
        lost = [(line["kind"], line["index"], line["incarnation"], line["reason"]) for line in fake.events("peer_lost") if line["process"] == peer]
        assert lost == [("worker", 1, 0, fake.lost()[0]), ("worker", 0, 0, fake.lost()[1])]
    assert addresses_of(fake, "scheduler-0") == ["f0.0.0", "w0.0.0", "w0.1.0", "w1.0.0", "w1.1.0"]
    assert [addresses_of(fake, f"worker-{index}") for index in (0, 1)] == [["w0.0.0", "w0.1.0"], ["w1.0.0", "w1.1.0"]]
    started = [(line["process"], line["incarnation"], line["epoch"]) for line in fake.events("started")]
    assert sorted(started[4:]) == [("worker-0", 1, 0), ("worker-1", 1, 0)]


def test_ranks_meet_at_a_place_of_their_own_in_each_incarnation_and_die_one_death(start: Start) -> None:
    fake = start("--restart-limit", "2", "frontend:good", *["worker:good"] * 3, "scheduler:good")
    fake.wait_for_event("ready")
    assert [line["child"] for line in fake.events("process_ready") if line["child"].startswith("worker")] == ["workers 0-2"]
    (first,) = places(fake, incarnation=0)
    assert Path(first).exists()

    fake.child("worker 1").kill()
    fake.wait_for_event("server_ready")
    assert sorted(fake.lost()[1:]) == ["worker 0 was ended with worker 1", "worker 2 was ended with worker 1"]
    assert {line["deaths"] for line in fake.events("process_lost")} == {1}
    assert sorted(line["child"] for line in fake.events("process_restarted")) == ["worker 0", "worker 1", "worker 2"]

    fake.process.send_signal(signal.SIGSTOP)  # it is to see both at once
    for rank in (2, 0):
        fake.child(f"worker {rank}").kill()
    fake.process.send_signal(signal.SIGCONT)
    fake.wait_for_event("server_ready", count=2)
    assert {line["deaths"] for line in fake.events("process_lost")[3:]} == {2}, "two that fall together are one death as well"
    started = [(line["process"], line["incarnation"]) for line in fake.events("started") if line["process"].startswith("worker")]
    assert sorted(started) == [(f"worker-{rank}", incarnation) for rank in range(3) for incarnation in range(3)]
    paths = [first, *places(fake, incarnation=1), *places(fake, incarnation=2)]
    assert len(set(paths)) == 3
    assert [Path(path).exists() for path in paths] == [False, False, True]

    fake.process.terminate()
    assert fake.wait() == 0
    assert list(fake.run_directories.iterdir()) == []


def places(fake: StartedLauncher, incarnation: int) -> set[str]:
    """Where workers of this incarnation are to meet."""
    return {line["rendezvous"] for line in fake.events("started") if line["process"].startswith("worker") and line["incarnation"] == incarnation}


def test_one_worker_has_nobody_to_meet(start: Start) -> None:
    fake = start(*GOOD)
    fake.wait_for_event("ready")
    assert [line["rendezvous"] for line in fake.events("started")] == [""] * 3


def test_the_progress_of_ranks_is_shown_and_passed_on_as_one(start: Start) -> None:
    fake = start("frontend:good", "worker:good", "worker:good", "scheduler:good")
    fake.wait_for_event("ready")
    shown = [(line["child"], line["fraction"]) for line in fake.events("loading") if line["child"].startswith("worker")]
    assert shown == [("workers 0-1", 0.25), ("workers 0-1", 0.5)]
    fake.wait_for_event("progress_passed_on", count=3)
    assert {line["detail"] for line in fake.events("progress_passed_on")} == {"half of scheduler", "", "half of worker"}


def addresses_of(fake: StartedLauncher, process: str) -> list[str]:
    """What it was told of its peers, without the folder."""
    return sorted(line["address"].rpartition("/")[2] for line in fake.events("peer_up") if line["process"] == process)


def test_a_dead_scheduler_is_replaced_and_meets_everybody_anew(start: Start) -> None:
    fake = start("frontend:good", "frontend:good", "worker:good", "scheduler:good")
    fake.wait_for_event("ready")
    fake.child("scheduler 0").send_signal(signal.SIGSEGV)
    fake.wait_for_event("server_ready")
    assert fake.lost() == ["scheduler 0 was killed by SIGSEGV"]
    fake.wait_for_event("peer_up", count=12)
    for process, name in (("frontend-0", "f0"), ("frontend-1", "f1"), ("worker-0", "w0")):
        assert addresses_of(fake, process) == [f"{name}.0.0", f"{name}.0.1"]
        (lost,) = [line for line in fake.events("peer_lost") if line["process"] == process]
        assert (lost["kind"], lost["incarnation"], lost["reason"]) == ("scheduler", 0, fake.lost()[0])
    epochs = [line["epoch"] for line in fake.events("started") if line["process"] == "scheduler-0"]
    assert epochs == [1 << 20, 2 << 20]


def test_a_scheduler_is_told_which_workers_have_loaded(start: Start) -> None:
    fake = start("frontend:good", "worker:good", "worker:good", "scheduler:good")
    fake.wait_for_event("peer_ready", count=2)
    fake.wait_for_event("ready")
    fake.child("scheduler 0").kill()
    fake.wait_for_event("server_ready")
    fake.wait_for_event("peer_ready", count=4)
    fake.child("worker 1").kill()
    fake.wait_for_event("server_ready", count=2)
    fake.wait_for_event("peer_ready", count=6)
    told = [(line["process"], line["kind"], line["index"], line["incarnation"]) for line in fake.events("peer_ready")]
    assert [sorted(told[start : start + 2]) for start in (0, 2, 4)] == [
        [("scheduler-0", "worker", index, incarnation) for index in (0, 1)] for incarnation in (0, 0, 1)
    ]


def test_a_dead_frontend_is_replaced_and_its_like_serve_on(start: Start) -> None:
    fake = start("frontend:good", "frontend:good", "worker:good", "scheduler:good")
    fake.wait_for_event("ready")
    fake.child("frontend 1").kill()
    fake.wait_for_event("server_ready")
    assert fake.lost() == ["frontend 1 was killed by SIGKILL"]
    assert {line["process"] for line in fake.events("peer_lost")} == {"scheduler-0", "frontend-0"}
    fake.wait_for_event("peer_up", count=8)
    assert addresses_of(fake, "frontend-1") == ["f1.0.0", "f1.1.0"]
    assert addresses_of(fake, "worker-0") == ["w0.0.0"]


def test_all_die_at_once_and_all_come_back(start: Start) -> None:
    fake = start(*GOOD)
    fake.wait_for_event("ready")
    descriptors = psutil.Process(fake.process.pid).num_fds()
    for child in fake.children():
        child.kill()
    fake.wait_for_event("server_ready")
    assert sorted(fake.lost()) == [f"{kind} 0 was killed by SIGKILL" for kind in ("frontend", "scheduler", "worker")]
    wait_for(lambda: {"f0.1.1", "w0.1.1"} <= set(addresses_of(fake, "scheduler-0")), 60, lambda: fake.log)
    assert psutil.Process(fake.process.pid).num_fds() == descriptors
    assert len(psutil.Process(fake.process.pid).children()) == 3


def test_whom_the_scheduler_calls_stuck_is_replaced_if_it_is_still_the_same(start: Start) -> None:
    fake = start("frontend:good", "worker:stuck", "scheduler:good")
    fake.wait_for_event("ready")
    fake.child("frontend 0").send_signal(signal.SIGUSR1)  # that is no business of a frontend
    fake.child("scheduler 0").send_signal(signal.SIGUSR1)
    fake.wait_for_event("server_ready")
    fake.wait_for_event("peer_up", count=4)  # the scheduler knows of the new one
    fake.child("scheduler 0").send_signal(signal.SIGUSR1)
    fake.wait_for_event("server_ready", count=2)
    assert fake.lost() == ["worker 0 did not finish its step, says scheduler"] * 2
    assert [line["incarnation"] for line in fake.events("started") if line["process"] == "worker-0"] == [0, 1, 2]


def test_a_hangup_signal_gives_new_configs_to_the_living_and_to_those_that_follow(start: Start, tmp_path: Path) -> None:
    fake = start("--reload", str(tmp_path / "reload"), *GOOD)
    fake.wait_for_event("ready")
    fake.process.send_signal(signal.SIGHUP)
    fake.wait_for_event("reload_refused")
    assert fake.events("reload") == []

    (tmp_path / "reload").write_text("debug 7 0")
    fake.process.send_signal(signal.SIGHUP)
    fake.wait_for_event("debugging", count=3)
    assert {(line["process"], line["max_num_seqs"]) for line in fake.events("reload")} == {("frontend-0", 7), ("worker-0", 7), ("scheduler-0", 7)}
    assert [line["changed"] for line in fake.events("reloaded")] == [["log_level"]]
    assert [line["needs_restart"] for line in fake.events("reload_incomplete")] == [["model"]]

    (tmp_path / "reload").write_text("debug 8 1")
    fake.process.send_signal(signal.SIGHUP)
    fake.wait_for_event("reloaded", count=2)
    fake.child("worker 0").kill()
    fake.wait_for_event("server_ready")  # the limit was 0 for a while
    assert fake.events("started")[-1]["max_num_seqs"] == 8
    fake.process.terminate()
    assert fake.wait() == 0
    assert fake.events("drain")[0]["timeout_s"] == 3.0
