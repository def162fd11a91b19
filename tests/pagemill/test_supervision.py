"""When the launcher gives up: on repairing, and on waiting."""

from __future__ import annotations

from pagemill.supervision import TICK_S, WINDOW_S, Attempts, Patience, RestartLimit


class Clock:
    """Stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_as_many_deaths_as_the_limit_are_repaired_and_no_more() -> None:
    limit = RestartLimit(2, Clock())
    assert [limit.allows_another() for _ in range(4)] == [True, True, False, False]
    assert not RestartLimit(0, Clock()).allows_another()


def test_deaths_are_forgiven_after_the_window() -> None:
    clock = Clock()
    limit = RestartLimit(1, clock)
    assert limit.allows_another()
    clock.now += WINDOW_S - 1
    assert limit.num_deaths == 1
    clock.now += 1
    assert limit.num_deaths == 0
    assert limit.allows_another()
    assert not limit.allows_another()


def test_what_fails_is_attempted_again_after_a_pause_and_not_for_ever() -> None:
    clock = Clock()
    attempts = Attempts(1.0, 10.0, clock)
    assert attempts.is_due()
    assert attempts.failed()
    assert not attempts.is_due()
    clock.now += 1
    assert attempts.is_due()
    clock.now += 8.9
    assert attempts.failed()
    attempts.succeeded()
    clock.now += 1
    assert attempts.failed(), "the time counts from the first failure since it last succeeded"
    clock.now += 10
    assert not attempts.failed()


def test_deaths_whose_cause_was_found_do_not_count() -> None:
    limit = RestartLimit(3, Clock())
    for _ in range(3):
        assert limit.allows_another()
    limit.forgive(2)
    assert limit.num_deaths == 1
    assert limit.allows_another()
    limit.forgive(100)
    assert limit.num_deaths == 0


def test_a_limit_that_is_raised_counts_for_the_next_death() -> None:
    limit = RestartLimit(0, Clock())
    assert not limit.allows_another()
    limit.limit = 2
    assert limit.allows_another()


def test_who_gives_no_sign_exhausts_patience_and_who_does_starts_it_anew() -> None:
    clock = Clock()
    patience: Patience[str] = Patience(3.0, clock)
    patience.begin("silent")
    patience.begin("talkative")
    patience.renew("stranger")
    found = []
    for _ in range(3):
        clock.now += TICK_S
        patience.renew("talkative")
        patience.begin("silent")  # begun before: that changes nothing
        found.append(patience.exhausted())
    assert found == [[], [], ["silent"]]
    patience.end("silent")
    assert patience.exhausted() == []


def test_one_who_was_away_himself_begins_anew_with_everybody() -> None:
    clock = Clock()
    patience: Patience[str] = Patience(3.0, clock)
    patience.begin("a")
    clock.now += 100
    assert patience.exhausted() == []
    for _ in range(2):
        clock.now += TICK_S
        assert patience.exhausted() == []
    clock.now += TICK_S
    assert patience.exhausted() == ["a"]


def test_a_somewhat_late_look_is_no_absence() -> None:
    clock = Clock()
    patience: Patience[str] = Patience(2.5, clock)
    patience.begin("a")
    clock.now += TICK_S + 1.9
    assert patience.exhausted() == ["a"]
