"""Suspicion: whoever kills workers is found and ended alone, and nobody else is."""

from __future__ import annotations

import pytest

from pagemill.messages.frontend import StatsSnapshot
from pagemill.messages.sequences import SamplingParams, SequenceKey
from scheduler.events import Suspicion
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    return expected_tokens(prompt, SamplingParams(), 0, 8192, max_tokens, 32)


class Deadly:
    """An engine whose worker dies whenever it is given a certain position of a certain sequence."""

    def __init__(self, **numbers: object) -> None:
        self.driver = CoreDriver(None, **({"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 16} | numbers))
        self.poison: dict[SequenceKey, int] = {}  #: sequence -> position
        self.num_deaths = 0
        self.planned: list[list[SequenceKey]] = []  #: who was in each plan

    def step(self) -> bool:
        driver = self.driver
        driver.turn()
        deadly = False
        if driver.core.plans:
            slices = [slice_.piece for slice_ in driver.core.plans[-1].slices]
            self.planned.append([piece.sequence.key for piece in slices])
            deadly = any(piece.start <= self.poison.get(piece.sequence.key, -1) < piece.start + piece.num_tokens for piece in slices)
        if deadly:
            self.die()
            return True
        told = driver.tell_transfers()
        return driver.answer() or told

    def die(self) -> None:
        self.num_deaths += 1
        self.driver.lose_worker()
        self.driver.worker_back()

    def run(self) -> None:
        for _ in range(2000):
            if not self.step() and not self.driver.core.sequences:
                return
        raise AssertionError(f"still busy: {list(self.driver.core.sequences.values())}")


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
@pytest.mark.parametrize(("position", "most_deaths"), [(0, 3), (5, 3), (37, 4), (41, 4), (44, 4)])
def test_the_request_that_kills_workers_fails_alone(position: int, most_deaths: int, max_plans_in_flight: int) -> None:
    engine = Deadly(max_plans_in_flight=max_plans_in_flight)
    prompts = [[number, 1, 2, 3, 4, 5] for number in range(6)]
    others = [engine.driver.add(prompt, max_tokens=30) for prompt in prompts]
    for _ in range(4):
        engine.step()
    poison = engine.driver.add([31] * 41, max_tokens=9)
    engine.poison[poison] = position
    late = engine.driver.add([9, 9, 9], max_tokens=5)
    engine.run()
    assert (engine.driver.finished[poison].finish_reason, engine.driver.finished[poison].error) == ("error", "killed_worker")
    assert engine.num_deaths <= most_deaths
    assert engine.driver.keeper.num_explained >= engine.num_deaths - 1, "they say nothing of the server's health"
    assert [engine.driver.outputs[key] for key in others] == [expected(prompt, 30) for prompt in prompts]
    assert engine.driver.outputs[late] == expected([9, 9, 9], 5)
    assert engine.driver.outputs[poison] == expected([31] * 41, 9)[: len(engine.driver.outputs[poison])]


def test_two_that_kill_are_both_found() -> None:
    engine = Deadly()
    innocent = engine.driver.add([1, 2, 3], max_tokens=20)
    engine.step()
    for start in (20, 21):
        engine.poison[engine.driver.add([start] * 5)] = 2
    engine.run()
    assert {key for key, output in engine.driver.finished.items() if output.finish_reason == "error"} == set(engine.poison)
    assert engine.driver.outputs[innocent] == expected([1, 2, 3], 20)


def test_a_request_that_was_found_to_kill_is_not_tried_again_nor_are_its_equals() -> None:
    engine = Deadly()
    innocent = engine.driver.add([1, 2, 3], max_tokens=30)
    engine.step()
    killers = [engine.driver.add([31] * 9) for _ in range(3)]
    engine.poison |= dict.fromkeys(killers, 4)
    engine.run()
    num_deaths = engine.num_deaths
    assert num_deaths == 3, "as many as one of them costs"
    assert [engine.driver.finished[key].error for key in killers] == ["killed_worker"] * 3

    again = engine.driver.add([31] * 9)
    assert engine.driver.finished[again].error == "killed_worker", "at once"
    other = engine.driver.add([31] * 8)
    engine.driver.lose_worker()
    without_core = engine.driver.add([31] * 9)
    assert engine.driver.finished[without_core].error == "killed_worker"
    engine.driver.worker_back()
    engine.run()
    assert engine.num_deaths == num_deaths
    assert engine.driver.outputs[innocent] == expected([1, 2, 3], 30)
    assert engine.driver.outputs[other] == expected([31] * 8, 8)


def test_those_that_are_refused_for_what_they_did_before_are_counted_once() -> None:
    engine = Deadly()
    key = engine.driver.add([31] * 9)
    engine.poison[key] = 4
    engine.run()
    for _ in range(3):
        engine.driver.add([31] * 9)
    engine.driver.now += 10
    engine.driver.turn()
    engine.driver.lose_worker()
    engine.driver.worker_back()
    engine.driver.now += 10
    engine.driver.turn()
    last: dict[int, StatsSnapshot] = {snapshot.epoch: snapshot for snapshot in engine.driver.snapshots}
    for snapshot in last.values():
        assert snapshot.sequences_received == sum(snapshot.sequences_finished.values()) + snapshot.num_waiting
    assert sum(snapshot.sequences_finished.get("error", 0) for snapshot in last.values()) == 4


def test_one_that_is_alone_is_given_a_second_chance_and_no_third() -> None:
    engine = Deadly()
    key = engine.driver.add([1, 2, 3])
    engine.poison[key] = 1
    engine.run()
    assert engine.num_deaths == engine.driver.keeper.num_explained == 2
    assert engine.driver.finished[key].error == "killed_worker"


def test_an_innocent_that_is_alone_when_a_worker_is_killed_lives() -> None:
    engine = Deadly()
    keys = [engine.driver.add([number, 2, 3], max_tokens=6) for number in range(4)]
    engine.driver.turn()
    engine.die()  # all are suspects: none had completed a step
    for _ in range(40):
        engine.driver.turn()
        if len(engine.driver.core.plans[-1].slices) == 1 and engine.driver.core.plans[-1].is_alone:
            engine.die()
            break
        engine.driver.answer()
    engine.run()
    assert [engine.driver.outputs[key] for key in keys] == [expected([number, 2, 3], 6) for number in range(4)]


def test_the_others_go_on_between_the_turns_of_suspects_and_the_newest_is_first() -> None:
    engine = Deadly()
    old = [engine.driver.add([number, 2, 3], max_tokens=200) for number in range(3)]
    for _ in range(3):
        engine.step()
    fresh = [engine.driver.add([20 + number, 2, 3], max_tokens=3) for number in range(3)]
    engine.driver.turn()
    engine.die()
    engine.planned.clear()
    for _ in range(40):
        engine.step()
    alone = [names[0] for names in engine.planned if len(names) == 1]
    assert alone[:3] == fresh[::-1], "each alone once, the newest first"
    turns = [number for number, names in enumerate(engine.planned) if len(names) == 1]
    between = engine.planned[turns[0] + 1 : turns[1]]
    assert len(between) >= 7
    assert all(set(old) <= set(names) for names in between)


def test_running_sequences_are_no_suspects_of_a_first_death() -> None:
    engine = Deadly(max_num_batched_tokens=64)
    keys = [engine.driver.add([number, 2, 3], max_tokens=40) for number in range(3)]
    for _ in range(5):
        engine.step()
    engine.driver.turn()
    engine.die()
    assert len(engine.driver.core.suspects) == 0
    engine.step()
    assert set(engine.planned[-1]) == set(keys), "all resume at once"


def test_a_suspicion_is_lifted_by_the_step_it_was_about() -> None:
    engine = Deadly()
    keys = [engine.driver.add([number, 2, 3], max_tokens=40) for number in range(2)]
    engine.driver.turn()
    engine.die()
    assert len(engine.driver.core.suspects) == 2
    for _ in range(20):
        engine.step()
    assert len(engine.driver.core.suspects) == 0
    assert set(engine.planned[-1]) == set(keys)


def test_a_suspect_that_leaves_is_forgotten() -> None:
    engine = Deadly()
    keys = [engine.driver.add([number, 2, 3]) for number in range(2)]
    engine.driver.turn()
    engine.die()
    for key in keys:
        engine.driver.abort(key)
    assert len(engine.driver.core.suspects) == 0


def test_suspects_that_share_a_prefix_do_not_wait_for_each_other() -> None:
    engine = Deadly()
    keys = [engine.driver.add([1] * 12 + [number], max_tokens=3) for number in range(3)]
    engine.driver.turn()
    engine.die()
    engine.run()
    assert [engine.driver.outputs[key] for key in keys] == [expected([1] * 12 + [number], 3) for number in range(3)]


def test_a_suspect_that_finds_no_room_lets_the_next_one_have_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Deadly()
    old, newest = (engine.driver.add([number, 2, 3], max_tokens=20) for number in range(2))
    engine.driver.turn()
    engine.die()
    core = engine.driver.core
    build_alone = core.steps.build_alone
    monkeypatch.setattr(core.steps, "build_alone", lambda suspect: [] if suspect.key == newest else build_alone(suspect))
    for _ in range(10):
        engine.step()
    assert core.sequences[old].suspicion is None
    assert core.sequences[newest].suspicion is not None
    monkeypatch.undo()
    engine.run()
    assert [engine.driver.outputs[key] for key in (old, newest)] == [expected([number, 2, 3], 20) for number in range(2)]


def test_one_that_is_alone_and_is_killed_at_different_places_is_innocent() -> None:
    engine = Deadly(max_num_batched_tokens=4)
    key = engine.driver.add([1] * 12, max_tokens=6)
    for _ in range(6):
        engine.step()
    for num_steps in (0, 0, 1, 0, 2):
        engine.driver.turn()
        engine.die()
        for _ in range(num_steps):
            engine.step()
        sequence = engine.driver.core.sequences[key]
        assert sequence.suspicion is None or sequence.suspicion.deaths_alone < 2
        engine.driver.core.suspects.discard(sequence)
        sequence.suspicion = Suspicion(12, 13, alone=False, deaths_alone=1)  # the former death was at the end
    engine.run()
    assert engine.driver.outputs[key] == expected([1] * 12, 6)
