"""Clients ask when they should, what is measured adds up, and scenarios compare what they say they compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pagemill.messages.sequences import KvGroup, SequenceKey
from pagemill.messages.worker import SchedulerToWorker, StepDone, WorkerToScheduler
from scripts.lib.costs import LinkCost, StepCost
from scripts.lib.pressure import SNAPSHOT_ALWAYS, Measured, PressureError, measure
from scripts.lib.pressure_clients import BURSTS, FIRST_TURNS, FOLLOW_UPS, JOBS, AllAtOnce, Conversations, JobsAndBursts, Reserving, Talk
from scripts.lib.pressure_scenarios import POLICIES, SCENARIOS, Bursts, Case, Scenario, Shape, Steady, Talking, Unpressed
from scripts.lib.simulation import SimulatedEngine, SimulatedWorker
from scripts.lib.workloads import Request, Workload

VOCAB_SIZE = 500
SMALL = Shape(scale=0.02, block_size=4)


def engine_with(num_blocks: int, **limits: object) -> SimulatedEngine:
    fixed: dict[str, object] = {"block_size": 4, "num_blocks": num_blocks, **SNAPSHOT_ALWAYS}
    return SimulatedEngine(StepCost(1.0, 0.0), LinkCost(), check_invariants=True, **(fixed | limits))


class Asked(SimulatedEngine):
    """Keeps the prompts that were added."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(StepCost(), LinkCost(), check_invariants=True, block_size=4, num_blocks=num_blocks, **SNAPSHOT_ALWAYS)
        self.asked: list[list[int]] = []

    def add(self, prompt_ids: Sequence[int], **options: Any) -> SequenceKey:
        self.asked.append(list(prompt_ids))
        return super().add(prompt_ids, **options)


def run_case(case: Case) -> Measured:
    limits = {"block_size": 4, "block_bytes": 100_000, "max_num_batched_tokens": 512} | case.limits
    engine = SimulatedEngine(StepCost(0.010, 0.002), LinkCost(1e9, 1e9, 0.5, 0.0, 0.1), check_invariants=False, **limits)
    return measure(engine, case.client(VOCAB_SIZE))


def run_all(scenario: Scenario, policies: tuple[str, ...] = POLICIES) -> dict[tuple[str, str], list[Measured]]:
    runs: dict[tuple[str, str], list[Measured]] = {}
    for case in scenario.cases(policies):
        runs.setdefault((case.label, case.policy), []).append(run_case(case))
    return runs


def requests(*lengths: tuple[int, int]) -> list[Request]:
    """Of prompts that have nothing in common."""
    return [Request([number] * num_prompt, num_output) for number, (num_prompt, num_output) in enumerate(lengths)]


# --- measuring -----------------------------------------------------------------------------------------------


def test_what_is_measured_is_what_happened() -> None:
    """Two requests side by side: one step draws the first tokens of both."""
    measured = measure(engine_with(64), AllAtOnce(requests((5, 4), (5, 2))))
    assert (measured.seconds, measured.num_steps) == (4.0, 4)
    assert measured.output_tok_s == 6 / 4
    assert [len(output) for output in measured.outputs] == [4, 2]
    assert measured.gaps_s == [1.0] * 4
    assert measured.ttft_s == {"requests": [1.0, 1.0]}
    assert measured.occupancy.num_running == 1.5  # two for two steps, then one
    assert measured.fields()["itl_ms"] == {"p50": 1000.0, "p99": 1000.0, "max": 1000.0}


def test_a_swap_shows_in_bytes_tokens_and_occupancy() -> None:
    engine = engine_with(12, num_swap_slots=50, block_bytes=1000, preemption="swap", prefix_caching=False)
    measured = measure(engine, AllAtOnce(requests(*[(9, 20)] * 4)))
    fields = measured.fields()
    assert measured.snapshot.tokens_recomputed == 0
    assert sum(measured.snapshot.preemptions.values()) == engine.num_preemptions > 0
    assert measured.snapshot.swapped_bytes["in"] % 1000 == 0
    assert measured.snapshot.swapped_bytes["in"] > 0
    assert measured.thrash == measured.snapshot.tokens_moved / measured.snapshot.tokens_computed > 0
    assert fields["arena_occupancy"]["held"] > 0  # type: ignore[index]
    assert fields["arena_occupancy"]["most"] <= 1  # type: ignore[index]


def test_a_request_that_fails_makes_the_measurement_void() -> None:
    class Failing(SimulatedWorker):
        def handle(self, message: SchedulerToWorker) -> list[WorkerToScheduler]:
            said = list(super().handle(message))
            if said and isinstance(said[-1], StepDone):
                said[-1] = replace_results(said[-1])
            return said

    engine = engine_with(64)
    engine.worker = Failing(StepCost(), LinkCost(), 1)
    with pytest.raises(PressureError, match="ended with error: planted"):
        measure(engine, AllAtOnce(requests((5, 4))))


def replace_results(done: StepDone) -> StepDone:
    results = tuple(type(result)(result.row, result.version, "failed", (), (), "planted") for result in done.results)
    return StepDone(done.epoch, done.rank, done.plan_id, results, done.seconds)


# --- clients -------------------------------------------------------------------------------------------------


def test_an_oracle_admits_only_what_it_can_let_finish() -> None:
    """Each needs five blocks in the end and two at first, so twelve blocks hold two of them."""
    measured = measure(engine_with(12), Reserving(requests(*[(8, 12)] * 4)))
    assert measured.snapshot.preemptions == {}
    assert measured.occupancy.num_running <= 2
    assert measured.num_steps == 24


def test_bursts_come_when_the_jobs_have_decoded_so_much_more() -> None:
    engine = engine_with(200, scheduling_policy="priority")
    client = JobsAndBursts(Workload(2, 8, 20), Workload(3, 8, 2), num_bursts=3, tokens_between=5, seed=1, vocab_size=VOCAB_SIZE)
    measure(engine, client)
    jobs = [engine.outputs[key] for key in client.groups[JOBS]]
    assert len(jobs) == 2
    started = sorted({engine.outputs[key].added_at for key in client.groups[BURSTS]})
    decoded = [sum(time <= start for job in jobs for time in job.token_times) for start in started]
    assert decoded == [10, 20, 30]
    assert len(client.groups[BURSTS]) == 9


def test_conversations_take_turns_think_between_and_never_exceed_what_is_in_flight() -> None:
    talk = Talk(num_sessions=3, num_start=8, num_added=4, num_answered=2, num_turns=3, num_in_flight=2, mean_think_s=5.0)
    engine = engine_with(200)
    client = Conversations(talk, 1, VOCAB_SIZE)
    measure(engine, client)
    assert (len(client.groups[FIRST_TURNS]), len(client.groups[FOLLOW_UPS])) == (3, 9)
    outputs = list(engine.outputs.values())
    assert max(sum(other.added_at <= output.added_at < other.token_times[-1] for other in outputs) for output in outputs) == 2
    assert engine.simulated.seconds["idle"] > 0
    longest = max(engine.outputs[key].num_cached_tokens for key in client.groups[FOLLOW_UPS])
    assert longest >= talk.longest - talk.num_added - 2 * talk.num_answered - 4  # the answers before are part of the prompt


def test_without_thinking_sessions_take_turns_in_a_fixed_order() -> None:
    talk = Talk(num_sessions=3, num_start=8, num_added=4, num_answered=1, num_turns=2, num_in_flight=1, mean_think_s=0.0)
    engine = Asked(200)
    measure(engine, Conversations(talk, 1, VOCAB_SIZE))
    first_ids = [prompt[0] for prompt in engine.asked]
    assert first_ids == first_ids[:3] * 3
    assert engine.simulated.seconds["idle"] == 0


# --- scenarios -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_case_takes_more_than_its_scenario_says(name: str) -> None:
    scenario = SCENARIOS[name](SMALL)
    cases = scenario.cases(POLICIES)
    assert max(number for case in cases if isinstance(number := case.limits["num_blocks"], int)) <= scenario.num_blocks
    assert max(number for case in cases if isinstance(number := case.limits["num_swap_slots"], int)) == scenario.num_swap_slots
    for case in cases:
        assert (case.limits["num_swap_slots"] == 0) == (case.limits["preemption"] == "recompute")


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_runs_under_every_policy_and_has_ratios(name: str) -> None:
    scenario = SCENARIOS[name](SMALL)
    runs = run_all(scenario)
    for measured in (run for several in runs.values() for run in several):
        assert all(math.isfinite(figure) for figure in scenario.figures(measured).values())
    ratios = scenario.ratios(runs)
    assert ratios
    assert all(math.isfinite(ratio) for several in ratios.values() for ratio in several.values())


def test_at_full_size_the_scenarios_are_what_they_promise() -> None:
    steady, bursts, talking = Steady(Shape()), Bursts(Shape()), Talking.conversations(Shape())
    assert [str(mix) for mix in steady.mixes] == ["32:256:384", "16:2048:512"]
    assert [steady.budget_blocks(steady.mixes[1], budget) for budget in steady.budgets] == [2560, 1280, 640, 320]
    assert {case.limits["num_blocks"] for case in bursts.cases(["auto"]) if case.policy == "auto"} == {8 * 266}
    assert talking.talk == Talk(12, 3000, 400, 32, 7, 2, 2.0)
    assert talking.pool_tokens == 4 * -(-talking.talk.longest // 16) * 16
    assert Talking.converse(Shape()).talk == Talk(12, 3000, 100, 1, 7, 1, 0.0)
    long = Talking.long(Shape())
    assert (long.talk.num_sessions, long.talk.num_start) == (4, 30_000)
    assert long.pool_tokens == pytest.approx(1.5 * long.talk.longest, abs=16)


def test_a_window_makes_the_budget_of_a_long_context_small() -> None:
    full, hybrid = Talking.long(Shape()), Talking.long(Shape(groups=(KvGroup(), KvGroup(window=512))))
    windowed_blocks = -(-(511 + 512 - 1) // 16) + 1
    assert hybrid.num_blocks == full.num_blocks + 4 * windowed_blocks


def test_steady_compares_rates_at_equal_budgets_and_each_with_its_most() -> None:
    scenario = Steady(replace(SMALL, scale=0.1, mixes=("16:100:300",), budgets=(100.0, 25.0)))
    runs = run_all(scenario)
    whole, quarter = (scenario.ratios(runs)[f"16:10:30 at {budget} %"] for budget in (100, 25))
    assert whole["auto_of_its_most"] == whole["oracle_of_its_most"] == 1.0
    assert whole["auto_over_oracle"] == pytest.approx(1.0, rel=0.05)
    assert quarter["auto_of_its_most"] < 1.0
    assert all(not run.snapshot.preemptions for (_, policy), several in runs.items() for run in several if policy == "oracle")
    rates = {policy: runs["16:10:30 at 25 %", policy][0].output_tok_s for policy in POLICIES}
    assert quarter["auto_over_recompute"] == pytest.approx(rates["auto"] / rates["recompute"])


def test_bursts_compare_what_jobs_lose_beyond_the_bursts_own_work() -> None:
    scenario = Bursts(replace(SMALL, scale=0.05))
    runs = run_all(scenario)
    own = runs["jobs alone", "alone"][0].seconds + 5 * runs["one burst alone", "alone"][0].seconds
    ratios = scenario.ratios(runs)["jobs and bursts"]
    for policy in POLICIES:
        assert ratios[f"{policy}_lost_s"] == pytest.approx(runs["jobs and bursts", policy][0].seconds - own)
    assert runs["jobs and bursts", "recompute"][0].snapshot.tokens_recomputed > 0
    assert ratios["auto_lost_over_recompute"] == pytest.approx(ratios["auto_lost_s"] / ratios["recompute_lost_s"])
    assert ratios["auto_ttft_p50_over_idle"] > 0


def test_conversations_compare_follow_ups_with_an_unlimited_pool() -> None:
    scenario = Talking.conversations(replace(SMALL, scale=0.05))
    runs = run_all(scenario)
    (ratios,) = scenario.ratios(runs).values()
    assert ratios["oracle_ttft_p50_over_oracle"] == 1.0
    assert ratios["recompute_ttft_p50_over_oracle"] > ratios["auto_ttft_p50_over_oracle"]


def test_pairs_without_pressure_alternate_and_lose_nothing_where_copies_are_free() -> None:
    scenario = Unpressed(SMALL, num_pairs=4)
    assert [case.policy for case in scenario.cases(())] == ["recompute", "auto", "auto", "recompute"] * 2
    ratios = scenario.ratios(run_all(scenario))["no pressure"]
    assert ratios["pairs"] == 4
    assert ratios["loss_95_low"] <= ratios["loss"] <= ratios["loss_95_high"]
    assert ratios["loss"] == pytest.approx(0.0, abs=0.02)


def test_requests_are_the_same_for_every_policy() -> None:
    def prompts(case: Case) -> list[list[int]]:
        engine = Asked(1000)
        case.client(VOCAB_SIZE).ask(engine)
        return engine.asked

    auto, swap = (prompts(case) for case in Steady(replace(SMALL, budgets=(100.0,), mixes=("4:500:300",))).cases(["auto", "swap"]))
    assert auto == swap
    assert len(auto) == 4
