"""The launcher with children that do no work: readiness, deaths, restarts up to a limit, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.server import ROOT, wait_for
from tests.helpers.started_launcher import GOOD, Start


def test_who_does_not_listen_is_killed(start: Start) -> None:
    fake = start("--exit-grace", "1", "frontend:good", "worker:stuck", "scheduler:deaf")
    fake.wait_for_event("ready")
    fake.process.terminate()
    assert fake.wait() == 0
    assert sorted(line["child"] for line in fake.events("process_killed")) == ["scheduler 0", "worker 0"]
    assert fake.living() == []


def test_who_takes_a_while_to_end_is_not_killed(start: Start) -> None:
    fake = start("frontend:good", "worker:late", "scheduler:good")
    fake.wait_for_event("ready")
    fake.process.terminate()
    assert fake.wait() == 0
    assert fake.events("process_killed") == []


@pytest.mark.parametrize(
    ("habit", "says"),
    [
        ("fail", "pagemill: worker 0: the model is made of cheese"),
        ("quit", "pagemill: worker 0 ended unasked"),
    ],
)
def test_a_child_that_ends_stops_everything_and_is_named(start: Start, habit: str, says: str) -> None:
    fake = start("frontend:good", f"worker:{habit}", "scheduler:good")
    assert fake.wait() == 1
    assert fake.log.splitlines()[-1] == says
    assert list(fake.run_directories.iterdir()) == []


def test_a_child_that_cannot_do_what_was_asked_is_no_death_but_a_wrong_request(start: Start) -> None:
    fake = start("frontend:good", "worker:refuse", "scheduler:good")
    assert fake.wait() == 2
    assert fake.log.splitlines()[-1] == "pagemill: worker 0: the model is made of cheese"
    assert list(fake.run_directories.iterdir()) == []


def test_during_a_drain_whatever_streams_need_is_repaired_and_frontends_are_not(start: Start) -> None:
    fake = start("--drain-timeout", "100", "--silence-limit", "3", "frontend:good", "frontend:deaf", "worker:good", "scheduler:good")
    fake.wait_for_event("ready")
    fake.process.terminate()
    fake.wait_for_event("drain")
    fake.child("worker 0").kill()
    fake.wait_for_event("process_restarted")
    fake.child("scheduler 0").suspend()
    fake.wait_for_event("process_restarted", count=2)
    assert fake.lost() == ["worker 0 was killed by SIGKILL", "scheduler 0 did not respond for 3 s"]
    fake.child("frontend 1").kill()
    assert fake.wait() == 0, "when the last frontend has ended nobody waits for the rest of the time"
    assert [line["timeout_s"] for line in fake.events("drain") if line["process"].startswith("frontend")] == [100.0, 100.0]
    assert sorted(line["process"] for line in fake.events("started")[4:]) == ["scheduler-0", "worker-0"]
    assert len(fake.lost()) == 2
    assert fake.living() == []


def test_one_death_more_than_is_allowed_ends_a_drain(start: Start) -> None:
    fake = start("--exit-grace", "1", "--restart-limit", "0", "--drain-timeout", "100", "frontend:deaf", "worker:good", "scheduler:good")
    fake.wait_for_event("ready")
    fake.process.terminate()
    fake.wait_for_event("drain")
    fake.child("worker 0").kill()
    assert fake.wait() == 1
    assert fake.log.splitlines()[-1] == "pagemill: worker 0 was killed by SIGKILL"
    assert [line["timeout_s"] for line in fake.events("drain") if line["process"] == "frontend-0"] == [100.0, 0.0], "what is left gets an end"
    assert fake.living() == []


def test_another_signal_ends_a_drain_at_once(start: Start) -> None:
    fake = start("--drain-timeout", "100", "frontend:deaf", "worker:good", "scheduler:good")
    fake.wait_for_event("ready")
    fake.process.terminate()
    fake.wait_for_event("drain")

    def has_ended() -> bool:
        fake.process.terminate()  # signals that follow each other at once are one
        return fake.process.poll() is not None

    wait_for(has_ended, 30, lambda: fake.log)
    assert fake.wait() == 0
    assert fake.living() == []


def test_without_restarts_the_first_death_ends_everything(start: Start) -> None:
    fake = start("--restart-limit", "0", *GOOD)
    fake.wait_for_event("ready")
    fake.child("frontend 0").send_signal(signal.SIGSEGV)
    assert fake.wait() == 1
    assert fake.log.splitlines()[-1] == "pagemill: frontend 0 was killed by SIGSEGV"
    assert fake.living() == []


def test_one_death_more_than_is_allowed_ends_everything_and_says_so(start: Start) -> None:
    fake = start("--restart-limit", "1", *GOOD)
    fake.wait_for_event("ready")
    fake.child("frontend 0").kill()
    fake.wait_for_event("server_ready")
    fake.child("scheduler 0").kill()
    assert fake.wait() == 1
    assert fake.log.splitlines()[-1] == "pagemill: scheduler 0 was killed by SIGKILL: more deaths than --restart-limit 1 allows in ten minutes"
    assert fake.living() == []


def test_what_does_not_become_ready_again_is_a_death_and_runs_into_the_limit(start: Start) -> None:
    fake = start("--restart-limit", "1", "--ready-timeout", "5", "frontend:good", "worker:slow_again", "scheduler:good")
    fake.wait_for_event("ready")
    fake.child("worker 0").kill()
    assert fake.wait(60) == 1
    assert fake.log.splitlines()[-1] == "pagemill: worker 0 was not ready after 5 s: more deaths than --restart-limit 1 allows in ten minutes"


def test_who_stops_saying_that_it_is_alive_is_replaced(start: Start) -> None:
    fake = start("--exit-grace", "1", "--silence-limit", "2.5", "frontend:good", "worker:stuck", "scheduler:good")
    fake.wait_for_event("ready")
    for kind in ("frontend", "scheduler"):
        fake.child(f"{kind} 0").suspend()
    fake.wait_for_event("server_ready")
    assert sorted(fake.lost()) == [f"{kind} 0 did not respond for 2 s" for kind in ("frontend", "scheduler")], "a worker may be silent"


def test_a_launcher_that_was_itself_stopped_holds_no_silence_against_anybody(start: Start) -> None:
    fake = start("--silence-limit", "3", *GOOD)
    fake.wait_for_event("ready")
    everybody = [psutil.Process(fake.process.pid), *fake.children()]
    for process in everybody:
        process.suspend()
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began > 4.5, 10, lambda: "the clock stands still")
    everybody[0].resume()
    for process in everybody[1:]:
        process.resume()
    fake.child("frontend 0").kill()  # to see that it is at work again
    fake.wait_for_event("server_ready")
    assert fake.lost() == ["frontend 0 was killed by SIGKILL"]


def test_who_talks_nonsense_is_replaced(start: Start) -> None:
    fake = start("frontend:good", "worker:nonsense", "scheduler:good")
    fake.wait_for_event("ready")
    fake.child("worker 0").send_signal(signal.SIGUSR1)
    fake.wait_for_event("server_ready")
    (lost,) = fake.lost()
    assert lost.startswith("worker 0 spoke nonsense on its control socket: MessagePack data is malformed")


def test_who_is_not_ready_in_time_is_named(start: Start) -> None:
    fake = start("--ready-timeout", "4", "frontend:slow", "worker:slow", "scheduler:good")
    assert fake.wait() == 1
    assert fake.log.splitlines()[-1] == "pagemill: worker 0 was not ready after 4 s"
    assert fake.events("ready") == []


def test_a_scheduler_that_waits_for_a_worker_is_not_blamed_for_it(start: Start) -> None:
    fake = start("--ready-timeout", "5", "frontend:slow", "worker:good", "scheduler:waiting")
    fake.wait_for_event("process_ready")
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began > 6.5, 20, lambda: "the clock stands still")
    fake.child("scheduler 0").send_signal(signal.SIGUSR1)
    assert fake.wait() == 1
    assert fake.log.splitlines()[-1] == "pagemill: worker 0 did not finish its step, says scheduler"


def test_a_scheduler_is_not_ready_with_workers_who_have_ended(start: Start) -> None:
    fake = start("frontend:good", "worker:good", "scheduler:lying")
    fake.wait_for_event("ready")
    fake.child("worker 0").kill()
    fake.wait_for_event("lied", count=2)
    fake.process.terminate()
    assert fake.wait() == 0
    assert fake.events("server_ready") == []


def test_what_the_system_does_not_let_us_start_is_tried_again(start: Start) -> None:
    fake = start("frontend:good", "worker:good", "worker:good", "scheduler:good")
    fake.wait_for_event("ready")
    launcher = psutil.Process(fake.process.pid)
    limits = launcher.rlimit(psutil.RLIMIT_NOFILE)
    launcher.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
    fake.child("worker 0").kill()
    fake.wait_for_event("start_failed", count=2)
    launcher.rlimit(psutil.RLIMIT_NOFILE, limits)
    fake.wait_for_event("server_ready")
    assert {(line["child"], line["reason"]) for line in fake.events("start_failed")} == {("worker 0", "Too many open files")}
    assert fake.lost() == ["worker 0 was killed by SIGKILL", "worker 1 was ended with worker 0"]


def test_a_rank_that_dies_before_the_other_could_be_started_is_one_more_death(start: Start) -> None:
    fake = start("frontend:good", "worker:good", "worker:good", "scheduler:good")
    fake.wait_for_event("ready")
    launcher = psutil.Process(fake.process.pid)
    limits = launcher.rlimit(psutil.RLIMIT_NOFILE)
    launcher.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
    fake.child("worker 0").kill()
    fake.wait_for_event("start_failed")
    launcher.rlimit(psutil.RLIMIT_NOFILE, (lowest_limit_with_room_for(5, fake.process.pid), limits[1]))  # one start takes these, and keeps two
    wait_for(lambda: any(line["child"] == "worker 1" for line in fake.events("start_failed")), 60, lambda: fake.log)
    fake.wait_for_event("started", count=5)
    fake.child("worker 0").kill()
    fake.wait_for_event("process_lost", count=3)
    launcher.rlimit(psutil.RLIMIT_NOFILE, limits)
    fake.wait_for_event("server_ready")
    assert fake.lost() == ["worker 0 was killed by SIGKILL", "worker 1 was ended with worker 0", "worker 0 was killed by SIGKILL"]
    assert [line["deaths"] for line in fake.events("process_lost")] == [1, 1, 2], "one for each incarnation, complete or not"
    started = [(line["process"], line["incarnation"]) for line in fake.events("started") if line["process"].startswith("worker")]
    assert sorted(started) == [("worker-0", 0), ("worker-0", 1), ("worker-0", 2), ("worker-1", 0), ("worker-1", 2)]


def lowest_limit_with_room_for(count: int, pid: int) -> int:
    """The limit of descriptors under which the process can open `count` more."""
    used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return [fd for fd in range(len(used) + count) if fd not in used][count - 1] + 1


def test_what_can_not_be_started_for_long_ends_the_server(start: Start) -> None:
    fake = start("--start-limit", "2", *GOOD)
    fake.wait_for_event("ready")
    launcher = psutil.Process(fake.process.pid)
    launcher.rlimit(psutil.RLIMIT_NOFILE, (3, launcher.rlimit(psutil.RLIMIT_NOFILE)[1]))
    fake.child("frontend 0").kill()
    assert fake.wait() == 1
    assert fake.log.splitlines()[-1] == "pagemill: frontend 0 could not be started for 2 s: Too many open files"
    assert fake.living() == []


@pytest.mark.parametrize("point", ["launcher.spawned", "launcher.buried"])
def test_a_launcher_that_dies_between_a_childs_end_and_its_replacement_leaves_nothing(start: Start, point: str) -> None:
    fake = start("--inject", f"{point}=kill@{4 if point == 'launcher.spawned' else 1}", *GOOD)
    fake.wait_for_event("ready")
    fake.child("worker 0").kill()
    assert fake.wait() == -signal.SIGKILL
    wait_for(lambda: not fake.living(), 5, lambda: f"still there: {fake.living()}")


def test_what_goes_wrong_in_the_launcher_ends_everything(start: Start) -> None:
    fake = start("--inject", "launcher.buried=raise", *GOOD)
    fake.wait_for_event("ready")
    fake.child("worker 0").kill()
    assert fake.wait() == 1
    assert "InjectedFault: launcher.buried" in fake.log
    assert fake.living() == []


def test_nothing_survives_the_death_of_the_launcher(start: Start) -> None:
    fake = start("frontend:good", "worker:stuck", "scheduler:deaf")
    fake.wait_for_event("ready")
    assert len(fake.living()) == 3
    fake.process.kill()
    fake.wait()
    wait_for(lambda: not fake.living(), 5, lambda: f"still there: {fake.living()}")


def test_the_launcher_loads_neither_zmq_nor_torch_nor_tokenizers() -> None:
    code = "import sys, pagemill.serve, pagemill.model_store; print(sorted({'zmq', 'torch', 'tokenizers', 'transformers'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
