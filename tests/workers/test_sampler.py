"""The sampler against direct formulas: supports, distributions, penalties, log probabilities, independence of the batch."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagemill.ids import unpack_ids
from pagemill.messages.sequences import SamplingParams
from workers.sampler import MIN_LOGPROB, Floats, Sampled, SamplingRow, adjusted, sample

#: 99.9 % point of the chi-square distribution by degrees of freedom.
CHI_SQUARE = {3: 16.27, 7: 24.32, 9: 27.88}
LOGITS = torch.tensor([1.5, -0.5, 2.0, 0.0, 1.0, -2.0, 0.7, -1.0, 1.9, 0.3])


def row(seed: int = 0, history: list[int] | None = None, num_prompt_tokens: int = 1, **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, array("i", history or [0]), num_prompt_tokens)


def draws(logits: Tensor, count: int, **params: Any) -> list[int]:
    """One draw for each of `count` seeds, all in one batch."""
    rows = [row(seed, **params) for seed in range(count)]
    return [s.token_id for s in sample(logits.expand(count, -1), rows, [1] * count, logits.shape[-1])]


def softmax(logits: Tensor) -> list[float]:
    return [float(p) for p in logits.double().softmax(-1)]


def chi_square(drawn: list[int], probabilities: dict[int, float]) -> float:
    assert set(drawn) <= set(probabilities)
    counts = Counter(drawn)
    return sum((counts[i] - len(drawn) * p) ** 2 / (len(drawn) * p) for i, p in probabilities.items())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    probabilities = dict(enumerate(softmax(LOGITS / temperature)))
    assert chi_square(draws(LOGITS, 4000, temperature=temperature), probabilities) < CHI_SQUARE[9]


def test_draws_over_positions_of_one_seed_follow_the_softmax_too() -> None:
    drawn = sample(LOGITS.expand(4000, -1), [row(seed=9)] * 4000, range(1, 4001), 10)
    assert chi_square([s.token_id for s in drawn], dict(enumerate(softmax(LOGITS)))) < CHI_SQUARE[9]


def test_top_k_keeps_exactly_the_k_best_with_their_proportions() -> None:
    best = [2, 8, 0, 4]
    probabilities = dict(zip(best, softmax(LOGITS[best]), strict=True))
    assert chi_square(draws(LOGITS, 3000, top_k=4), probabilities) < CHI_SQUARE[3]


def test_top_k_keeps_the_lowest_ids_of_a_tie() -> None:
    assert set(draws(torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5]), 300, top_k=2)) == {1, 2}


@pytest.mark.parametrize("top_k", [0, 10, 11, 1000])
def test_top_k_of_nothing_or_everything_changes_no_draw(top_k: int) -> None:
    assert draws(LOGITS, 200, top_k=top_k) == draws(LOGITS, 200)


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, 1), (0.24, 1), (0.5, 2), (0.9, 6), (0.9999999, 10)])
def test_top_p_keeps_the_shortest_run_that_holds_the_mass(top_p: float, kept: int) -> None:
    ordered = np.sort(softmax(LOGITS))[::-1]
    assert kept == 1 + int(np.count_nonzero(np.cumsum(ordered) < top_p))
    assert set(draws(LOGITS, 3000, top_p=top_p, temperature=1.0)) <= set(np.argsort(-LOGITS.numpy(), kind="stable")[:kept].tolist())
    assert len(set(draws(LOGITS, 3000, top_p=top_p))) == kept


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    best = [2, 8, 0, 4]
    renormalised = softmax(LOGITS[best])
    assert sum(renormalised[:2]) < 0.7 < sum(renormalised[:3])
    assert set(draws(LOGITS, 1000, top_k=4, top_p=0.7)) == {2, 8, 0}


def test_top_p_on_a_large_flat_vocabulary_agrees_with_a_full_sort() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 0.5
    probabilities = logits.double().softmax(-1).numpy()
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    nucleus = set(order[before < 0.3].tolist())
    drawn = draws(logits, 600, top_p=0.3)
    assert set(drawn) <= nucleus
    assert len(set(drawn)) > 300


def test_min_p_keeps_ids_relative_to_the_best() -> None:
    probabilities = np.array(softmax(LOGITS / 0.8))
    kept = set(np.flatnonzero(probabilities >= 0.2 * probabilities.max()).tolist())
    assert set(draws(LOGITS, 2000, min_p=0.2, temperature=0.8)) == kept
    assert set(draws(LOGITS, 50, min_p=1.0)) == {2}


def test_min_p_acts_before_top_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1]).log()
    # min-p leaves 0.5 and 0.3, of which 0.5 / 0.8 = 0.625 exceeds top-p; over all four 0.5 would not.
    assert set(draws(logits, 300, min_p=0.5, top_p=0.6)) == {0}
    assert set(draws(logits, 300, top_p=0.6)) == {0, 1}


@pytest.mark.parametrize("temperature", [1e-5, 3e-5, 3e-4, 1e-3])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_tiny_temperatures_draw_the_best(temperature: float, filters: dict[str, float]) -> None:
    logits = torch.tensor([-40000.0, 30000.0, 29999.0, 12.0])
    assert set(draws(logits, 50, temperature=temperature, **filters)) == {1}


def test_greedy_takes_the_lowest_id_of_a_tie_with_and_without_log_probabilities() -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    assert draws(logits, 2, temperature=0.0) == [1, 1]
    assert draws(logits, 2, temperature=9e-6, num_logprobs=2) == [1, 1]


def test_ids_behind_the_tokenizer_are_never_drawn() -> None:
    logits = torch.zeros(1, 20)
    logits[:, 12:] = 50
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0, "num_logprobs": 3}]
    for params in kinds:
        drawn = sample(logits, [row(**params)], [1], 12)[0]
        assert drawn.token_id < 12
        if drawn.logprobs:
            assert max(unpack_ids(drawn.logprobs.top_ids)) < 12
            assert drawn.logprobs.logprob == pytest.approx(-math.log(12))


def test_penalties_agree_with_the_formula() -> None:
    history = [2, 2, 5, 8, 8, 8, 0]
    penalised = row(history=history, num_prompt_tokens=3, temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.25)
    expected = LOGITS.clone()
    for token_id in {2, 5, 8, 0}:
        expected[token_id] = expected[token_id] / 1.3 if expected[token_id] > 0 else expected[token_id] * 1.3
    for token_id, count in Counter(history[3:]).items():
        expected[token_id] -= 0.4 + 0.25 * count
    for position in range(7, 300):
        plain = sample(expected[None], [row()], [position], 10)
        assert sample(LOGITS[None], [penalised], [position], 10) == plain


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "presence_penalty": 0.4},
    {"presence_penalty": -0.3, "frequency_penalty": 0.25},
    {"repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": 1 / 3},
]


def penalised_anew(raw: Floats, row: SamplingRow, first_id: int) -> Floats:
    """What penalties are, from the history alone."""
    params, values, history = row.params, raw.copy(), np.array(row.token_ids, dtype=np.int64) - first_id
    ours = (history >= 0) & (history < len(values))
    seen = np.unique(history[ours])
    values[seen] = np.where(values[seen] > 0, values[seen] / params.repetition_penalty, values[seen] * params.repetition_penalty)
    used, counts = np.unique(history[row.num_prompt_tokens :][ours[row.num_prompt_tokens :]], return_counts=True)
    values[used] -= counts * params.frequency_penalty + params.presence_penalty
    return values


@pytest.mark.parametrize("params", PENALTIES, ids="-".join)
def test_a_growing_row_is_penalised_to_the_bit_as_one_that_was_just_installed(params: dict[str, Any]) -> None:
    generator = np.random.default_rng(1)
    raw = (generator.standard_normal(500) * 3).astype(np.float32)
    history = generator.integers(0, 500, 700).tolist()
    grown = row(history=history[:300], num_prompt_tokens=290, **params)
    for length in range(300, 700):
        installed = row(history=history[:length], num_prompt_tokens=290, **params)
        for first_id, end in ((0, 500), (0, 130), (130, 131), (131, 500), (500, 500)):
            expected = penalised_anew(raw[first_id:end], installed, first_id)
            assert adjusted(raw[first_id:end], grown, length, first_id).tobytes() == expected.tobytes()
            assert adjusted(raw[first_id:end], installed, length, first_id).tobytes() == expected.tobytes()
        grown.token_ids.append(history[length])


def test_logit_bias_bans_and_forces_and_ignores_ids_out_of_range() -> None:
    assert draws(LOGITS, 1, temperature=0.0, logit_bias=((2, -100.0), (10**6, 5.0), (-3, 5.0))) == [8]
    assert set(draws(LOGITS, 100, logit_bias=((5, 100.0),))) == {5}


def test_stop_ids_are_masked_until_min_tokens_and_not_longer() -> None:
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (2, 8, 10**6)}
    histories = [[0, 0], [0, 0, 7], [0, 0, 7, 7]]
    drawn = [sample(LOGITS[None], [row(history=h, num_prompt_tokens=2, **params)], [len(h)], 10)[0].token_id for h in histories]
    assert drawn == [0, 0, 2]


def test_log_probabilities_are_of_the_raw_logits_and_ordered() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -5.0]])
    drawn = sample(logits, [row(temperature=0.0, num_logprobs=3, logit_bias=((4, 100.0),))], [1], 5)[0]
    assert drawn.token_id == 4
    assert drawn.logprobs is not None
    expected = logits[0].double().log_softmax(-1)
    assert drawn.logprobs.logprob == pytest.approx(float(expected[4]), abs=1e-6)
    assert list(unpack_ids(drawn.logprobs.top_ids)) == [1, 3, 2]
    assert np.frombuffer(drawn.logprobs.top_logprobs, dtype=np.float32) == pytest.approx(expected[[1, 3, 2]].numpy(), abs=1e-6)


@pytest.mark.parametrize("num_logprobs", [0, 1, 4, 5, 20])
def test_number_of_top_log_probabilities_is_bounded_by_the_vocabulary(num_logprobs: int) -> None:
    drawn = sample(torch.zeros(1, 5), [row(num_logprobs=num_logprobs)], [1], 5)[0]
    assert drawn.logprobs is not None
    assert list(unpack_ids(drawn.logprobs.top_ids)) == list(range(min(num_logprobs, 5)))


def test_log_probabilities_are_finite() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -3e38]])
    drawn = sample(logits, [row(temperature=0.0, num_logprobs=3, logit_bias=((1, -math.inf),))], [1], 3)[0]
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprob == MIN_LOGPROB
    assert np.isfinite(np.frombuffer(drawn.logprobs.top_logprobs, dtype=np.float32)).all()


def test_draws_are_reproducible_and_seeds_and_positions_differ() -> None:
    flat = torch.zeros(1000)
    assert draws(flat, 50) == draws(flat, 50)
    assert len(set(draws(flat, 50))) > 40
    over_positions = [sample(flat[None], [row(seed=3)], [position], 1000)[0].token_id for position in range(50)]
    assert len(set(over_positions)) > 40


def test_seeds_use_all_64_bits() -> None:
    flat = torch.zeros(1, 50_000)
    seeds = [0, 1, 2**31, 2**32, 2**63, 2**64 - 1]
    assert len({sample(flat, [row(seed=seed)], [1], 50_000)[0].token_id for seed in seeds}) == len(seeds)


def test_rows_do_not_know_their_batch_mates() -> None:
    logits = torch.randn((12, 300), generator=torch.Generator().manual_seed(2)) * 2
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.05}, {"temperature": 0.0}, {"repetition_penalty": 1.5}]
    rows = [row(seed=i, history=[i, 5, 7], num_logprobs=4, **kinds[i % len(kinds)]) for i in range(12)]
    solo = [sample(logits[i : i + 1], [rows[i]], [3], 290)[0] for i in range(12)]
    assert sample(logits, rows, [3] * 12, 290) == solo
    order = list(reversed(range(12)))
    assert sample(logits[order], [rows[i] for i in order], [3] * 12, 290) == [solo[i] for i in order]


def test_logits_and_history_are_left_as_they_were() -> None:
    logits, history = LOGITS[None].clone(), [1, 2, 3]
    changed = row(history=history, repetition_penalty=1.5, logit_bias=((1, 3.0),), top_k=3)
    sample(logits, [changed], [3], 10)
    assert torch.equal(logits[0], LOGITS)
    changed.token_ids.append(4)
    assert list(changed.token_ids) == [1, 2, 3, 4]


def test_no_rows_give_no_samples() -> None:
    empty: list[Sampled] = sample(torch.empty(0, 10), [], [], 10)
    assert empty == []
