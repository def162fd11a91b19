"""What things cost, learned from what was reported."""

from __future__ import annotations

import pytest

from scheduler.rates import LinkRate, PrefillRate, num_pairs


def test_the_link_starts_with_what_was_measured_and_follows_what_is_reported() -> None:
    rate = LinkRate(1000.0)
    assert rate.seconds(500) == 0.5
    for _ in range(100):
        rate.measure(3000, 1.0)
    assert rate.bytes_s == pytest.approx(3000.0, rel=1e-3)
    assert (rate.total_bytes, rate.total_seconds) == (300_000, 100.0)


def test_one_outlier_moves_the_link_a_little_only() -> None:
    rate = LinkRate(1000.0)
    rate.measure(10_000, 1.0)
    assert 1000 < rate.bytes_s < 2000


def test_an_unmeasurably_short_copy_counts_as_bytes_only_and_no_arena_has_a_finite_price() -> None:
    rate = LinkRate(0.0)
    rate.measure(10, 0.0)
    assert (rate.total_bytes, rate.bytes_s) == (10, 1.0)
    assert rate.seconds(3) == 3.0


def test_pairs_are_what_each_position_looks_at() -> None:
    assert num_pairs(0, 4) == 1 + 2 + 3 + 4
    assert num_pairs(10, 12) == 11 + 12
    assert num_pairs(5, 5) == num_pairs(7, 5) == 0


@pytest.mark.parametrize(("a", "b"), [(1e-3, 0.0), (1e-3, 1e-6), (2e-5, 3e-8)])
def test_prefill_recovers_what_a_position_and_a_pair_cost(a: float, b: float) -> None:
    rate = PrefillRate(100.0)
    for step in range(400):
        first, length = (step * 37) % 4000, 64 + (step * 13) % 448
        pairs = num_pairs(first, first + length)
        rate.measure(length, pairs, length, a * length + b * pairs)
    for first, last in ((0, 100), (3000, 3100), (0, 8000)):
        assert rate.seconds(first, last) == pytest.approx(a * (last - first) + b * num_pairs(first, last), rel=1e-2)
    assert rate.tokens_s == pytest.approx(1 / a, rel=2e-2)


def test_a_long_context_costs_more_per_position() -> None:
    rate = PrefillRate(1000.0)
    for first in (0, 1000, 2000, 3000) * 20:
        pairs = num_pairs(first, first + 256)
        rate.measure(256, pairs, 256, 1e-3 * 256 + 1e-6 * pairs)
    assert rate.seconds(8000, 8100) > 2 * rate.seconds(0, 100)


@pytest.mark.parametrize(
    ("num_tokens", "step_tokens", "seconds"), [(31, 31, 1.0), (64, 128, 1.0), (64, 64, 0.0)], ids=["few tokens", "mostly decode", "no time"]
)
def test_steps_that_tell_nothing_of_prefill_change_nothing(num_tokens: int, step_tokens: int, seconds: float) -> None:
    rate = PrefillRate(1000.0)
    rate.measure(num_tokens, num_pairs(0, num_tokens), step_tokens, seconds)
    assert rate.seconds(0, 1000) == pytest.approx(1.0)


def test_a_fit_that_makes_no_sense_falls_back_to_the_mean() -> None:
    rate = PrefillRate(1000.0)
    for first in (0, 4000) * 200:  # long contexts that cost less
        rate.measure(100, num_pairs(first, first + 100), 100, 0.2 if first == 0 else 0.1)
    assert rate.per_pair_s == 0.0
    assert rate.seconds(0, 100) == pytest.approx(0.15, rel=0.05)
