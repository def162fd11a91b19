"""Workloads are a function of their seed and have the lengths they promise."""

from __future__ import annotations

from statistics import median

import pytest

from scripts.lib.report import paired_ratio, percentiles
from scripts.lib.workloads import Workload, mean_tokens, mixed_lengths, shared_prefix, uneven_outputs


def test_a_workload_is_read_as_it_is_written() -> None:
    assert str(Workload.parse("8:128:16")) == "8:128:16"
    (first, *_), (same, *_), (other, *_) = (Workload.parse("2:30:4").requests(seed, 500) for seed in (1, 1, 2))
    assert first == same != other
    assert (len(first.prompt_ids), first.num_output_tokens) == (30, 4)
    assert all(100 <= token < 500 for token in first.prompt_ids)


@pytest.mark.parametrize("text", ["", "1:2", "1:2:3:4", "1:0:3", "a:b:c"])
def test_what_is_no_workload_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"n:in:out|invalid literal"):
        Workload.parse(text)


def test_uneven_outputs_are_clipped_around_their_median() -> None:
    outputs = [request.num_output_tokens for request in uneven_outputs(2000, 3, 500, num_prompt_tokens=1)]
    assert (min(outputs), max(outputs)) == (8, 512)
    assert 58 <= median(outputs) <= 70


@pytest.mark.parametrize(("num_requests", "seed"), [(20, 1), (100, 1), (101, 7)])
def test_mixed_lengths_have_the_mean_that_was_asked_for(num_requests: int, seed: int) -> None:
    requests = mixed_lengths(num_requests, seed, 500)
    assert mean_tokens(requests) == 400
    assert [len(request.prompt_ids) for request in requests].count(2000) == -(-num_requests // 20)


def test_mixed_lengths_refuse_a_mean_that_long_prompts_alone_exceed() -> None:
    with pytest.raises(ValueError, match="no room"):
        mixed_lengths(20, 1, 500, mean=150)


def test_a_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    first, second = (request.prompt_ids for request in shared_prefix(2, 1, 40_000, num_shared=50, num_own=10, num_output_tokens=1))
    assert first[:50] == second[:50]
    assert first[50:] != second[50:]
    assert len(first) == len(second) == 60


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([5.0, 1.0, 3.0, 2.0, 4.0], (0, 20, 50, 90, 100)) == {"p0": 1.0, "p20": 1.0, "p50": 3.0, "p90": 5.0, "p100": 5.0}
    assert percentiles([]) == {}


def test_a_paired_ratio_is_unmoved_by_one_slow_pair() -> None:
    assert paired_ratio([2.0, 20.0, 2.2], [1.0, 10.0, 1.0]) == 2.0
