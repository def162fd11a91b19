"""Sampling on shares of the vocabulary: the same tokens and log probabilities, to the bit, as from whole logits."""

from __future__ import annotations

import math
import random
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor

from pagemill.messages.sequences import SamplingParams
from tests.helpers.rank_threads import RankThread, on_all_ranks
from workers.sampler import Sampled, SamplingRow, sample
from workers.shared_sampling import Share, sample_shared

PADDED_SIZE, VOCAB_SIZE = 107, 90
PROMPT_LENGTH = 12
#: Where shares begin. In the last of each only padding is left.
BORDERS = {2: [0, 92, PADDED_SIZE], 3: [0, 1, 90, PADDED_SIZE], 4: [0, 30, 60, 92, PADDED_SIZE], 5: [0, 20, 40, 64, 80, PADDED_SIZE]}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1e-4},
    {"temperature": 0.7, "top_p": 0.6},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.0, "top_p": 0.5, "top_k": 3},
    {"temperature": 0.0, "num_logprobs": 4},
    {"temperature": 1.0, "num_logprobs": 0},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 1.1, "repetition_penalty": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.9, "presence_penalty": 1.5, "top_k": 4},
    {"temperature": 0.0, "logit_bias": ((0, 3.0), (31, 4.0), (89, 5.0), (95, 100.0))},
    {"temperature": 1.0, "logit_bias": ((29, 4.0), (61, -100.0))},
    {"temperature": 0.0, "min_tokens": 40, "stop_token_ids": tuple(range(0, 90, 2))},
    {"temperature": 1.0, "min_tokens": 40, "stop_token_ids": tuple(range(45))},
]


def make_rows(count: int, seed: int = 0) -> list[SamplingRow]:
    draw = random.Random(seed)
    histories = [[draw.randrange(VOCAB_SIZE) for _ in range(PROMPT_LENGTH + 20)] for _ in range(count)]
    return [SamplingRow(SamplingParams(**KINDS[i % len(KINDS)]), draw.getrandbits(64), array("i", histories[i]), PROMPT_LENGTH) for i in range(count)]


def make_logits(count: int, seed: int = 0) -> Tensor:
    return torch.randn((count, PADDED_SIZE), generator=torch.Generator().manual_seed(seed)) * 2


def drawn_by(size: int, logits: Tensor, rows: list[SamplingRow], ranks: list[RankThread] | None = None) -> list[Sampled]:
    """What all ranks draw alike."""
    positions = [len(row.token_ids) for row in rows]

    def draw(rank: RankThread) -> list[Sampled]:
        if ranks is not None:
            ranks.append(rank)
        first, end = BORDERS[size][rank.rank : rank.rank + 2]
        share = Share(first, lambda part: rank.gather(part, PADDED_SIZE), rank.exchange)
        return sample_shared(logits[:, first:end], rows, positions, VOCAB_SIZE, share)

    drawn = on_all_ranks(size, draw)
    assert all(each == drawn[0] for each in drawn)
    return drawn[0]


def drawn_by_one(logits: Tensor, rows: list[SamplingRow]) -> list[Sampled]:
    return sample(logits, rows, [len(row.token_ids) for row in rows], VOCAB_SIZE)


@pytest.mark.parametrize("size", BORDERS)
def test_every_kind_of_row_draws_what_it_draws_from_whole_logits(size: int) -> None:
    for seed in range(12):
        rows, logits = make_rows(3 * len(KINDS), seed), make_logits(3 * len(KINDS), seed)
        assert drawn_by(size, logits, rows) == drawn_by_one(logits, rows)


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda kind: "-".join(KINDS[kind]))
def test_rows_of_one_kind_alone_do_so_too(kind: int) -> None:
    rows, logits = make_rows(8 * len(KINDS))[kind :: len(KINDS)], make_logits(8, kind)
    assert drawn_by(3, logits, rows) == drawn_by_one(logits, rows)


@pytest.mark.parametrize("size", BORDERS)
def test_of_equal_scores_the_lowest_id_wins_across_ranks(size: int) -> None:
    logits = torch.zeros(3, PADDED_SIZE)
    logits[1, [0, 89]] = 5.0
    logits[2, [25, 62, 88]] = 5.0
    greedy = [SamplingRow(SamplingParams(temperature=0.0), 0, array("i", [1]), 1)] * 3
    biased = SamplingRow(SamplingParams(temperature=0.0, logit_bias=((70, 1.0),)), 0, array("i", [1]), 1)
    assert [drawn.token_id for drawn in drawn_by(size, logits, greedy)] == [0, 0, 25]
    assert [drawn.token_id for drawn in drawn_by(size, logits, [biased, *greedy[1:]])] == [70, 0, 25]


def test_impossible_ids_are_never_drawn_even_if_a_rank_has_no_others() -> None:
    logits = torch.full((40, PADDED_SIZE), -math.inf)
    logits[:, 61] = -3.0
    rows = make_rows(40)
    assert drawn_by(4, logits, rows) == drawn_by_one(logits, rows)


def test_a_row_without_any_possible_id_draws_what_it_draws_from_whole_logits() -> None:
    params: dict[str, Any] = {"min_tokens": 40, "stop_token_ids": tuple(range(VOCAB_SIZE))}
    rows = [SamplingRow(SamplingParams(temperature=temperature, **params), 3, array("i", [1]), 1) for temperature in (0.0, 1.0)]
    logits = make_logits(2)
    assert drawn_by(3, logits, rows) == drawn_by_one(logits, rows)


def test_only_rows_that_need_all_ids_are_gathered() -> None:
    rows, ranks = make_rows(len(KINDS)), list[RankThread]()
    drawn_by(2, make_logits(len(rows)), rows, ranks)
    needy = [kind for kind in KINDS if "num_logprobs" in kind or (kind["temperature"] and kind.keys() & {"top_p", "top_k", "min_p"})]
    assert [rank.num_rows_gathered for rank in ranks] == [len(needy)] * 2


@pytest.mark.parametrize(("kind", "meetings"), [({"temperature": 0.0}, 1), ({"temperature": 0.0, "presence_penalty": 1.0}, 1), ({"temperature": 1.0}, 2)])
def test_ranks_meet_once_for_the_best_and_once_more_for_noise(kind: dict[str, Any], meetings: int) -> None:
    rows, ranks = [SamplingRow(SamplingParams(**kind), 0, array("i", [1, 2]), 1)] * 5, list[RankThread]()
    drawn_by(2, make_logits(5), rows, ranks)
    assert [(rank.num_exchanges, rank.num_rows_gathered) for rank in ranks] == [(meetings, 0)] * 2
