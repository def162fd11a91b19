"""Costs agree with what can be worked out by hand, and a fit finds the numbers that made the times."""

from __future__ import annotations

import random

import pytest

from scripts.lib.costs import CpuCost, GpuCost, StepCost, Work, prefill_tok_s


def decodes(count: int, context: int) -> list[Work]:
    return [Work(context - 1, 1, True)] * count


def test_a_position_attends_to_itself_and_all_before() -> None:
    assert Work(0, 1, True).num_attended == 1
    assert Work(0, 4, True).num_attended == 1 + 2 + 3 + 4
    assert Work(10, 3, False).num_attended == 11 + 12 + 13
    assert Work(0, 7, True).num_attended == Work(0, 3, False).num_attended + Work(3, 4, True).num_attended


@pytest.mark.parametrize(
    ("rows", "context", "bound_ms", "good_ms"),
    [(1, 1024, 3.52, 4.65), (32, 1024, 4.49, 5.79), (256, 1024, 12.85, 15.85), (32, 8192, 11.48, 14.01), (1, 32768, 4.49, 5.78), (32, 32768, 35.45, 42.2)],
)
def test_decode_on_the_gpu_takes_what_its_memory_needs(rows: int, context: int, bound_ms: float, good_ms: float) -> None:
    """Weights and KV over the memory rate, or the projections over the matrix rate: worked out by hand for these."""
    assert 1000 * GpuCost().of(decodes(rows, context)) == pytest.approx(bound_ms, rel=0.01)
    assert 1000 * GpuCost.well_made().of(decodes(rows, context)) == pytest.approx(good_ms, rel=0.02)


@pytest.mark.parametrize(("num_tokens", "rate"), [(1024, 55_100), (8192, 46_400), (32_768, 30_000), (131_072, 12_500)])
def test_prefill_on_the_gpu_slows_down_with_length(num_tokens: int, rate: float) -> None:
    assert prefill_tok_s(GpuCost(), num_tokens) == pytest.approx(rate, rel=0.01)


def test_a_prompt_costs_the_same_attention_in_chunks_as_at_once() -> None:
    cost = GpuCost(weight_bytes=0.0, flop_per_logits=0.0)
    chunks = [Work(start, 512, False) for start in range(0, 4096, 512)]
    assert sum(cost.of([chunk]) for chunk in chunks) == pytest.approx(cost.of([Work(0, 4096, False)]))


def test_the_least_cost_is_a_step_and_its_tokens() -> None:
    assert StepCost(0.5, 0.25).of([Work(0, 3, True), Work(9, 1, True)]) == 0.5 + 4 * 0.25


def test_a_fit_finds_the_costs_that_made_the_times() -> None:
    draw = random.Random(1)
    cost = CpuCost(step_s=0.03, row_s=0.003, token_s=0.002, read_s=5e-7, pair_s=2e-7)
    steps = [decodes(draw.randint(1, 16), draw.randint(1, 4000)) for _ in range(10)] + [[Work(draw.randint(0, 4000), 512, False)] for _ in range(10)]
    found = CpuCost.fitted([(works, cost.of(works)) for works in steps])
    for name in ("step_s", "row_s", "token_s", "read_s", "pair_s"):
        assert getattr(found, name) == pytest.approx(getattr(cost, name), rel=1e-6)


def test_a_fit_has_no_negative_costs() -> None:
    """Steps that get shorter with the context, as a noisy machine may say."""
    samples = [(decodes(1, context), 0.1 - context * 1e-6) for context in (10, 100, 1000, 4000)]
    found = CpuCost.fitted(samples)
    assert min(found.step_s, found.row_s, found.token_s, found.read_s, found.pair_s) >= 0
    assert found.of(decodes(1, 100)) == pytest.approx(0.1, rel=0.05)
