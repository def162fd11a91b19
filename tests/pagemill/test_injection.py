"""Faults at named points: parsed strictly, armed by incarnation, and nothing at all without the flag."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import structlog

from pagemill import injection
from pagemill.errors import UsageError
from pagemill.injection import POINTS, InjectedFault, arm, parse_fault, reach
from tests.helpers.server import ROOT

POINT = "worker.forward"
OTHER = "worker.plan"


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    injection.disarm()


def strikes(times: int, token_ids: tuple[int, ...] = ()) -> list[int]:
    """At which times of reaching the point `raise` strikes."""
    struck = []
    for time_of_reaching in range(1, times + 1):
        try:
            reach(POINT, token_ids)
        except InjectedFault:
            struck.append(time_of_reaching)
    return struck


def test_without_faults_every_point_does_nothing() -> None:
    assert [reach(point) for point in POINTS] == [False] * len(POINTS)


@pytest.mark.parametrize(
    ("fault", "incarnation", "struck"),
    [
        ("raise@2#1", 0, []),
        ("raise@2#1", 1, [2]),
        ("raise@*#1", 2, []),
        ("raise~7#1", 1, [1, 2, 3, 4]),
        ("raise", 0, [1]),
        ("raise@3", 0, [3]),
        ("raise@*", 0, [1, 2, 3, 4]),
        ("raise", 1, []),
        ("raise@3", 1, []),
        ("raise@*", 1, [1, 2, 3, 4]),
        ("raise~7", 1, [1, 2, 3, 4]),
        ("raise~8", 0, []),
    ],
)
def test_a_fault_strikes_when_it_was_asked_to(fault: str, incarnation: int, struck: list[int]) -> None:
    arm([f"{POINT}={fault}"], incarnation=incarnation)
    assert not reach(OTHER)
    assert strikes(4, token_ids=(6, 7)) == struck


def test_a_fault_for_one_kind_of_process_leaves_the_others_alone() -> None:
    for kind, struck in (("worker", [1]), ("scheduler", [])):
        arm([f"worker/{POINT}=raise"], incarnation=0, kind=kind)
        assert strikes(2) == struck


def test_what_strikes_is_logged() -> None:
    arm([f"{POINT}=corrupt@2"], incarnation=0)
    with structlog.testing.capture_logs() as lines:
        assert [reach(POINT) for _ in range(3)] == [False, True, False]
    assert lines == [{"event": "fault_injected", "log_level": "warning", "point": POINT, "action": "corrupt", "times_reached": 2}]


def test_several_faults_of_one_point_each_have_their_time_and_are_replaced_by_the_next_arming() -> None:
    arm([f"{POINT}=raise@2", f"{POINT}=corrupt", f"{POINT}=raise@4"], incarnation=0)
    assert reach(POINT)
    assert strikes(3) == [1, 3]
    arm([], incarnation=0)
    assert strikes(4) == []


def test_a_pause_takes_as_long_as_it_says() -> None:
    arm([f"{POINT}=pause:0.05"], incarnation=0)
    began = time.monotonic()
    assert not reach(POINT)
    assert time.monotonic() - began >= 0.05


def test_a_leak_grows_with_every_strike() -> None:
    arm([f"{POINT}=leak:2@*"], incarnation=0)
    before = sum(map(len, injection._leaked))
    for _ in range(3):
        reach(POINT)
    assert sum(map(len, injection._leaked)) - before == 3 * 2048
    injection._leaked.clear()


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("segv", signal.SIGSEGV)])
def test_a_process_dies_of_its_own_hand(action: str, number: signal.Signals) -> None:
    code = f"from pagemill.injection import arm, reach; arm(['{POINT}={action}'], incarnation=0); reach('{POINT}'); print('alive')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == -number
    assert "alive" not in ended.stdout


@pytest.mark.parametrize(
    "text",
    [
        "worker.forward",
        "worker.forward=",
        "worker.nowhere=kill",
        "worker.forward=explode",
        "worker.forward=kill@0",
        "worker.forward=kill@",
        "worker.forward=kill@1~2",
        "worker.forward=kill:1",
        "worker.forward=pause",
        "worker.forward=pause:1.2.3",
        "worker.forward=leak",
        " worker.forward=kill",
        "cook/worker.forward=kill",
        "worker.forward=kill#",
        "worker.forward=kill#1@2",
    ],
)
def test_what_is_no_fault_is_refused_with_the_ways_to_write_one(text: str) -> None:
    actions = "pause:SECONDS, leak:KILOBYTES, raise, stop, kill, segv, corrupt"
    says = f"--inject accepts [KIND/]POINT=ACTION[@N|@*|~TOKEN][#INCARNATION], where an action is one of {actions}; not {text!r}"
    with pytest.raises(UsageError, match=f"^{re.escape(says)}$"):
        parse_fault(text)


def test_every_point_stands_somewhere_in_the_process_it_is_named_after_and_nowhere_else() -> None:
    homes = {
        "frontend": {"frontend"},
        "scheduler": {"scheduler", "kvstore"},
        "worker": {"workers"},
        "transfer": {"workers"},
        "control": {"pagemill"},
        "launcher": {"pagemill"},
    }
    folders = {folder for home in homes.values() for folder in home}
    sources = {folder: "".join(path.read_text() for path in (ROOT / folder).rglob("*.py")) for folder in folders}
    places = {(folder, point) for folder, source in sources.items() for point in re.findall(r"\breach\(\s*\"([^\"]+)\"", source)}
    assert {point for _, point in places} == set(POINTS)
    assert [place for place in places if place[0] not in homes[place[1].partition(".")[0]]] == []
