"""The noise: its definition, its distribution, and a compiled draw that agrees with the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.gumbel import best_of, draw, mix, noise, noise_key

UINT64 = st.integers(0, 2**64 - 1)


def test_mix_is_the_finaliser_of_splitmix64() -> None:
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # first output of the published generator with seed 0
    assert mix(2 * 0x9E3779B97F4A7C15 % 2**64) == 0x6E789E6AA1B965F4


@settings(max_examples=60)
@given(seed=UINT64, position=st.integers(0, 2**20), spread=st.sampled_from([0.0, 0.01, 1.0, 30.0]), count=st.integers(1, 300))
def test_draw_is_the_argmax_of_score_plus_noise(seed: int, position: int, spread: float, count: int) -> None:
    scores = np.random.default_rng(count).normal(size=count) * spread
    token_ids = np.sort(np.random.default_rng(count).choice(150_000, size=count, replace=False)).astype(np.int64)
    key = noise_key(seed, position)
    sums = [score + noise(key, int(token_id)) for score, token_id in zip(scores, token_ids, strict=True)]
    assert draw(scores, token_ids, key) == int(np.argmax(sums))


def test_draw_skips_minus_infinity() -> None:
    scores, token_ids = np.full(50, -math.inf), np.arange(50, dtype=np.int64)
    scores[17] = -1e6
    assert all(draw(scores, token_ids, mix(i)) == 17 for i in range(50))


def test_noise_follows_the_gumbel_distribution_along_each_of_its_arguments() -> None:
    for samples in (
        [noise(noise_key(seed, 7), 42) for seed in range(4000)],
        [noise(noise_key(1, position), 42) for position in range(4000)],
        [noise(noise_key(1, 7), token_id) for token_id in range(4000)],
    ):
        uniform = np.sort(np.exp(-np.exp(-np.array(samples))))
        distance = np.abs(uniform - (np.arange(4000) + 0.5) / 4000).max()
        assert distance < 1.63 / math.sqrt(4000)  # Kolmogorov-Smirnov, 1 %


def test_streams_of_neighbouring_seeds_positions_and_ids_are_uncorrelated() -> None:
    grid = np.array([[[noise(noise_key(seed, position), token_id) for token_id in range(16)] for position in range(16)] for seed in range(16)])
    for axis in range(3):
        rolled = np.roll(grid, 1, axis=axis)
        assert abs(np.corrcoef(grid.ravel(), rolled.ravel())[0, 1]) < 0.06


@settings(max_examples=40)
@given(key=UINT64, border=st.integers(0, 200))
def test_the_best_of_parts_is_the_best_of_all(key: int, border: int) -> None:
    scores, token_ids = np.random.default_rng(border).normal(size=200), np.arange(200, dtype=np.int64)
    parts = [best_of(scores[:border], token_ids[:border], key), best_of(scores[border:], token_ids[border:], key)]
    (low, low_total), (high, high_total) = parts
    whole, total = best_of(scores, token_ids, key)
    assert whole == (border + high if high_total > low_total else low)
    assert total == max(low_total, high_total)
    assert total == pytest.approx(scores[whole] + noise(key, whole), rel=1e-14)
