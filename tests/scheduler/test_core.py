"""The core as a table of events and what they must lead to."""

from __future__ import annotations

import msgspec
import pytest

from pagemill.messages import AddRequest, InstallRow, KvGroup, PeerLost, Plan, SamplingParams, StepDone, StepOutput, TokenLogprobs, Turn, unpack_ids
from scheduler.core import SchedulerCore
from scheduler.core_config import CoreConfig
from scheduler.sequence import Sequence, Status
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens

VOCAB = 32


def prompt(num_tokens: int, stem: int = 0) -> list[int]:
    return [(stem * 7 + i * 3) % VOCAB for i in range(num_tokens)]


def expected(driver: CoreDriver, tokens: list[int], max_tokens: int, sampling: SamplingParams | None = None) -> list[int]:
    longest = min(driver.core.config.max_model_len, driver.core.memory.capacity_tokens())
    return expected_tokens(tokens, sampling or SamplingParams(), 0, longest, max_tokens, VOCAB)


def test_a_core_is_built_in_one_line_and_has_nothing_to_do() -> None:
    effects = SchedulerCore().handle(Turn(), 0.0)
    assert not any(isinstance(effect, Plan) for effect in effects)


def test_a_request_runs_to_its_length() -> None:
    driver = CoreDriver()
    key = driver.add(prompt(5), max_tokens=4)
    driver.run()
    assert driver.outputs[key] == expected(driver, prompt(5), 4)
    assert driver.finished[key].finish_reason == "length"


def test_only_a_turn_emits_a_plan_and_only_one_is_in_flight() -> None:
    driver = CoreDriver()
    driver.add(prompt(5))
    assert not driver.plans
    driver.turn()
    driver.turn()
    assert len(driver.plans) == 1
    driver.answer()
    assert len(driver.plans) == 1


def test_the_row_is_installed_once_and_then_extended_by_slices() -> None:
    driver = CoreDriver(block_size=4)
    driver.add(prompt(4), max_tokens=6)
    effects = driver.turn()
    install = next(effect for effect in effects if isinstance(effect, InstallRow))
    plan = next(effect for effect in effects if isinstance(effect, Plan))
    assert list(unpack_ids(install.token_ids)) == prompt(4)
    assert (plan.slices[0].start, plan.slices[0].num_tokens, plan.slices[0].sample) == (0, 4, True)
    driver.answer()
    effects = driver.turn()
    assert not any(isinstance(effect, InstallRow) for effect in effects)
    (piece,) = driver.plans[-1].slices
    assert list(unpack_ids(piece.new_token_ids)) == expected(driver, prompt(4), 1)
    assert len(unpack_ids(piece.new_block_ids[0])) == 1
    driver.answer()
    driver.turn()
    assert driver.plans[-1].slices[0].new_block_ids == (b"",)


@pytest.mark.parametrize("budget", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 49])
def test_a_prompt_in_chunks_gives_the_same_tokens(budget: int, length: int) -> None:
    driver = CoreDriver(max_num_batched_tokens=budget)
    key = driver.add(prompt(length), max_tokens=3)
    driver.run()
    assert driver.outputs[key] == expected(driver, prompt(length), 3)


def test_running_decodes_come_before_prefill_chunks() -> None:
    driver = CoreDriver(max_num_batched_tokens=8)
    driver.add(prompt(4), max_tokens=20)
    driver.step()
    driver.add(prompt(100, stem=1), max_tokens=1)
    driver.step()
    shares = [piece.num_tokens for piece in driver.plans[-1].slices]
    assert shares == [1, 7]


def test_decodes_come_first_also_while_the_head_computes_a_long_prompt() -> None:
    driver = CoreDriver(max_num_batched_tokens=8, scheduling_policy="priority")
    driver.add(prompt(4), max_tokens=20, priority=1)
    driver.step()
    driver.add(prompt(100, stem=1), max_tokens=1, priority=0)
    for _ in range(5):
        driver.step()
        assert sorted(piece.num_tokens for piece in driver.plans[-1].slices) == [1, 7]


def test_the_head_computes_even_if_decodes_could_take_the_whole_budget() -> None:
    driver = CoreDriver(max_num_batched_tokens=2, scheduling_policy="priority")
    late = [driver.add(prompt(1, stem), max_tokens=50, priority=1) for stem in range(2)]
    driver.step()
    urgent = driver.add(prompt(6), max_tokens=1, priority=0)
    for _ in range(8):
        driver.step()
    assert urgent in driver.finished
    assert not any(key in driver.finished for key in late)


def test_the_head_starts_before_a_long_prefill_behind_it_goes_on() -> None:
    driver = CoreDriver(max_num_batched_tokens=8, scheduling_policy="priority")
    driver.add(prompt(200), max_tokens=1, priority=1)
    driver.step()
    urgent = driver.add(prompt(6, stem=1), max_tokens=1, priority=0)
    driver.step()
    assert urgent in driver.finished
    assert [piece.num_tokens for piece in driver.plans[-1].slices] == [6, 2]


def test_a_head_that_the_policy_keeps_out_takes_nothing_from_those_inside() -> None:
    driver = CoreDriver(max_num_batched_tokens=1, scheduling_policy="static")
    inside = driver.add(prompt(2), max_tokens=5, arrival=2.0)
    for _ in range(3):
        driver.step()
    head = driver.add(prompt(2, stem=1), max_tokens=5, arrival=1.0)
    assert driver.run(limit=50) == 3 + 6
    assert inside in driver.finished
    assert head in driver.finished


def test_no_step_exceeds_the_token_budget_or_the_seats() -> None:
    driver = CoreDriver(max_num_batched_tokens=10, max_num_seqs=3)
    for stem in range(9):
        driver.add(prompt(7, stem), max_tokens=5)
    driver.run()
    assert max(sum(piece.num_tokens for piece in plan.slices) for plan in driver.plans) <= 10
    assert max(len(plan.slices) for plan in driver.plans) <= 3
    assert len(driver.finished) == 9


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_stop_ids_end_a_sequence_once_min_tokens_are_out(min_tokens: int) -> None:
    driver = CoreDriver()
    sampling = SamplingParams(stop_token_ids=tuple(range(VOCAB)), min_tokens=min_tokens)
    key = driver.add(prompt(5), max_tokens=10, sampling=sampling)
    driver.run()
    last = driver.finished[key]
    assert (last.finish_reason, len(driver.outputs[key])) == ("stop", max(1, min_tokens))
    assert last.stop_token_id == driver.outputs[key][-1]


def test_the_model_length_ends_a_sequence_with_length() -> None:
    driver = CoreDriver(max_model_len=10)
    key = driver.add(prompt(6), max_tokens=100)
    driver.run()
    assert (len(driver.outputs[key]), driver.finished[key].finish_reason) == (4, "length")


def test_a_prompt_that_finds_only_part_of_its_blocks_computes_that_part() -> None:
    """Two groups: five obtainable blocks are two positions' worth of blocks, not five."""
    driver = CoreDriver(num_blocks=40, block_size=1, groups=(KvGroup(), KvGroup()), max_num_batched_tokens=4, prefix_caching=False)
    first = driver.add(prompt(3), max_tokens=17)
    driver.step()
    second = driver.add(prompt(12, stem=1), max_tokens=4)
    driver.run()
    assert driver.outputs[first] == expected(driver, prompt(3), 17)
    assert driver.outputs[second] == expected(driver, prompt(12, stem=1), 4)


def test_a_sequence_that_fills_the_pool_ends_with_length_and_the_queue_moves_on() -> None:
    driver = CoreDriver(num_blocks=4, block_size=4)
    long = driver.add(prompt(10), max_tokens=100)
    short = driver.add(prompt(3, stem=1), max_tokens=2)
    driver.run()
    assert (len(driver.outputs[long]), driver.finished[long].finish_reason) == (6, "length")
    assert driver.outputs[short] == expected(driver, prompt(3, stem=1), 2)


@pytest.mark.parametrize(
    ("config", "length", "reason", "numbers"),
    [
        (CoreConfig(max_model_len=8), 8, "exceeds_model_length", (9, 8)),
        (CoreConfig(num_blocks=4, block_size=4), 16, "exceeds_kv_cache", (17, 16)),
    ],
)
def test_what_can_never_fit_is_refused_with_both_numbers(config: CoreConfig, length: int, reason: str, numbers: tuple[int, int]) -> None:
    driver = CoreDriver(config)
    refused = driver.add(prompt(length))
    accepted = driver.add(prompt(length - 1), max_tokens=1)
    driver.run()
    rejection = driver.rejected[refused]
    assert (rejection.reason, (rejection.required, rejection.available)) == (reason, numbers)
    assert accepted in driver.finished


def test_a_full_queue_refuses_the_next_request() -> None:
    driver = CoreDriver(max_num_queued=2)
    keys = [driver.add(prompt(3, stem)) for stem in range(3)]
    assert [driver.rejected[key].reason if key in driver.rejected else None for key in keys] == [None, None, "queue_full"]


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt_ids": b""},
        {"prefix_keys": b"short"},
        {"prompt_ids": bytes(34), "output_ids": bytes(2)},
        {"output_ids": bytes(4 * 8)},
    ],
    ids=["no prompt", "wrong keys", "half a token", "nothing left to generate"],
)
def test_a_malformed_request_is_refused_and_changes_nothing(bad: dict[str, bytes]) -> None:
    driver = CoreDriver(block_size=4)
    driver.add(prompt(9), max_tokens=8)
    request = driver.log[-1][1]
    assert isinstance(request, AddRequest)
    other = msgspec.structs.replace(request.key, request=99)
    driver.handle(msgspec.structs.replace(request, key=other, **bad))
    assert driver.rejected[other].reason == "invalid"
    assert list(driver.core.sequences) == [request.key]


def test_adding_a_request_twice_changes_nothing() -> None:
    driver = CoreDriver()
    driver.add(prompt(5), max_tokens=2)
    driver.handle(driver.log[0][1])
    assert len(driver.core.sequences) == 1
    driver.run()


def test_a_resubmitted_request_continues_behind_the_outputs_received() -> None:
    driver = CoreDriver()
    whole = expected(driver, prompt(5), 6)
    key = driver.add(prompt(5), max_tokens=6, output=whole[:4])
    driver.run()
    assert driver.outputs[key] == whole


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_frees_everything_at_the_latest_with_the_plan_in_flight(in_flight: bool) -> None:
    driver = CoreDriver()
    key = driver.add(prompt(40), max_tokens=50)
    driver.step()
    if in_flight:
        driver.turn()
    driver.abort(key)
    pool = driver.core.memory.pool
    assert pool.num_fenced == pool.num_used == (3 if in_flight else 0)
    driver.answer()
    assert (pool.num_used, len(driver.core.sequences)) == (0, 0)
    assert key not in driver.finished
    driver.run()


def test_finishing_keeps_the_first_tokens_and_says_nothing_more() -> None:
    driver = CoreDriver()
    key = driver.add(prompt(5), max_tokens=50)
    for _ in range(4):
        driver.step()
    driver.finish(key, 2)
    driver.run()
    assert len(driver.outputs[key]) == 4
    assert driver.core.memory.pool.num_used == 0


def test_a_lost_frontend_takes_its_own_requests_with_it_and_no_others() -> None:
    driver = CoreDriver()
    driver.add(prompt(5), max_tokens=50)
    driver.step()
    driver.handle(PeerLost("frontend", 0, 2))
    driver.handle(PeerLost("frontend", 1, 1))
    driver.handle(PeerLost("worker", 0, 1))
    assert len(driver.core.sequences) == 1
    driver.handle(PeerLost("frontend", 0, 1))
    assert not driver.core.sequences
    driver.answer()


def test_a_failed_row_fails_its_request_only() -> None:
    driver = CoreDriver()
    keys = [driver.add(prompt(5, stem), max_tokens=3) for stem in range(3)]
    driver.step()
    driver.worker.fail = lambda row, version: row == 1
    driver.step()
    driver.worker.fail = lambda row, version: False
    driver.run()
    assert [driver.finished[key].finish_reason for key in keys] == ["length", "error", "length"]
    assert driver.finished[keys[1]].error == "planted failure"


def answer_with(driver: CoreDriver, **changes: object) -> None:
    """Lets the plan in flight be answered by one result that was tampered with."""
    (done,) = driver.in_flight
    assert isinstance(done, StepDone)
    results = tuple(msgspec.structs.replace(result, **changes) for result in done.results)
    driver.in_flight = [msgspec.structs.replace(done, results=results)]
    driver.answer()


@pytest.mark.parametrize("missing", ["result", "token"])
def test_a_step_without_the_token_it_was_to_draw_fails_the_request(missing: str) -> None:
    driver = CoreDriver()
    key = driver.add(prompt(5), max_tokens=3)
    driver.turn()
    answer_with(driver, **({"row": 7} if missing == "result" else {"token_ids": ()}))
    assert (driver.finished[key].finish_reason, driver.finished[key].error) == ("error", "no token")
    assert driver.core.memory.pool.num_used == 0


def test_a_deferred_row_draws_from_the_same_position_in_the_next_step() -> None:
    driver = CoreDriver(block_size=4)
    key = driver.add(prompt(5), max_tokens=6)
    driver.worker.defer = lambda row, version: True
    driver.step()
    assert driver.outputs[key] == []
    driver.turn()
    (piece,) = driver.plans[-1].slices
    assert (piece.start, piece.num_tokens, piece.sample) == (4, 1, True)
    driver.worker.defer = lambda row, version: False
    driver.answer()
    driver.run()
    assert driver.outputs[key] == expected(driver, prompt(5), 6)


def test_of_several_tokens_those_behind_the_end_are_dropped_with_their_logprobs() -> None:
    driver = CoreDriver()
    key = driver.add(prompt(5), max_tokens=9, sampling=SamplingParams(stop_token_ids=(2,)))
    driver.turn()
    logprobs = tuple(TokenLogprobs(-float(number), b"", b"") for number in range(3))
    answer_with(driver, token_ids=(1, 2, 3), logprobs=logprobs)
    last = driver.finished[key]
    assert (last.token_ids, last.logprobs, last.stop_token_id) == ((1, 2), logprobs[:2], 2)


def test_a_missing_row_is_installed_again_and_nothing_is_lost() -> None:
    driver = CoreDriver(block_size=4)
    keys = [driver.add(prompt(5, stem), max_tokens=8) for stem in range(3)]
    for _ in range(3):
        driver.step()
    driver.worker.rows.clear()
    driver.run()
    for stem, key in enumerate(keys):
        assert driver.outputs[key] == expected(driver, prompt(5, stem), 8)
    installs = [effect.row for _, _, effects in driver.log for effect in effects if isinstance(effect, InstallRow)]
    assert sorted(installs) == [0, 0, 1, 1, 2, 2]


def test_outputs_of_one_step_travel_in_one_message() -> None:
    driver = CoreDriver()
    for stem in range(4):
        driver.add(prompt(5, stem))
    driver.turn()
    driver.answer()
    messages = [effect for effect in driver.log[-1][2] if isinstance(effect, StepOutput)]
    assert [len(message.outputs) for message in messages] == [4]


def test_each_frontend_is_told_of_its_own_sequences() -> None:
    driver = CoreDriver(max_model_len=10)
    keys = [driver.add(prompt(5, frontend), max_tokens=1, frontend=frontend) for frontend in (1, 0)]
    refused = driver.add(prompt(10), frontend=1)
    assert [effect.frontend for effect in driver.log[-1][2] if isinstance(effect, StepOutput)] == [1]
    assert refused in driver.rejected
    driver.step()
    messages = [effect for effect in driver.log[-1][2] if isinstance(effect, StepOutput)]
    assert [(message.frontend, [output.key for output in message.outputs]) for message in messages] == [(0, [keys[1]]), (1, [keys[0]])]


def test_workers_are_told_which_rows_they_may_forget() -> None:
    driver = CoreDriver()
    first = driver.add(prompt(5), max_tokens=1)
    driver.add(prompt(5, stem=1), max_tokens=4)
    driver.step()
    assert first in driver.finished
    driver.turn()
    assert driver.plans[-1].released_rows == (0,)
    driver.answer()
    driver.add(prompt(5, stem=2), max_tokens=1)
    driver.step()
    driver.add(prompt(5, stem=3), max_tokens=1)
    driver.turn()
    assert not driver.plans[-1].released_rows, "row 0 was installed anew with this plan"


def test_a_row_number_is_reused_only_after_its_plan_is_acknowledged() -> None:
    driver = CoreDriver()
    first = driver.add(prompt(5), max_tokens=50)
    driver.step()
    driver.turn()
    driver.abort(first)
    assert driver.core.rows.accounted()[0] == []
    driver.answer()
    assert driver.core.rows.accounted()[0] == [0]


def test_an_illegal_move_raises_with_the_story() -> None:
    driver = CoreDriver()
    driver.add(prompt(3))
    (sequence,) = driver.core.sequences.values()
    assert isinstance(sequence, Sequence)
    with pytest.raises(ValueError, match="waiting to preempted"):
        sequence.move_to(Status.PREEMPTED)


def test_snapshots_are_sent_at_most_every_interval_and_also_when_idle() -> None:
    driver = CoreDriver(snapshot_interval_s=0.1, idle_snapshot_interval_s=1.0)
    driver.add(prompt(3), max_tokens=40)
    driver.run()
    busy = len(driver.snapshots)
    assert 2 <= busy <= 1 + driver.now / 0.1
    for _ in range(250):
        driver.turn()
    assert 2 <= len(driver.snapshots) - busy <= 4
    last = driver.snapshots[-1]
    assert last.blocks_free + last.blocks_cached + last.blocks_used == last.blocks_total
    assert (last.num_running, last.tokens_generated) == (0, 40)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_snapshot_counts_what_was_computed_shared_and_planned(num_groups: int) -> None:
    driver = CoreDriver(block_size=4, groups=(KvGroup(),) * num_groups, snapshot_interval_s=0.0)
    driver.add(prompt(9), max_tokens=2)
    driver.run()
    driver.add(prompt(9), max_tokens=1)
    driver.turn()
    last = driver.snapshots[-1]
    assert (last.prefix_query_tokens, last.prefix_hit_tokens) == (18, 8)
    assert (last.tokens_computed, last.tokens_recomputed) == (9 + 1 + 1, 0)
    assert last.steps_with_tokens == {16: 1, 1: 2}
    assert (last.num_running, last.blocks_used, last.slot_utilization) == (1, 3 * num_groups, 9 / 12)
    driver.abort(next(iter(driver.core.sequences)))
    driver.turn()
    assert (driver.snapshots[-1].blocks_used, driver.snapshots[-1].slot_utilization) == (3 * num_groups, 0.0)


def test_the_time_in_the_queue_ends_with_the_first_slice() -> None:
    driver = CoreDriver(max_num_seqs=1)
    keys = [driver.add(prompt(5, stem), max_tokens=2) for stem in range(2)]
    driver.run()
    # the clock of the driver moves by 0.01 s with each event
    assert [round(driver.finished[key].queue_s, 3) for key in keys] == [0.02, 0.05]


# --- limits of the queue -----------------------------------------------------------------------------------


def test_a_sequence_that_waits_too_long_to_be_started_is_refused() -> None:
    driver = CoreDriver(max_num_seqs=1)
    running = driver.add([1, 2, 3], max_tokens=100, max_queue_s=0.05)
    driver.turn()
    waiting, patient = driver.add([4, 5], max_queue_s=0.5), driver.add([6, 7])
    driver.now += 0.4
    driver.turn()
    assert not driver.rejected
    driver.now += 0.2
    driver.turn()
    assert {key: (rejection.reason, rejection.available) for key, rejection in driver.rejected.items()} == {waiting: ("queue_timeout", 500)}
    assert driver.rejected[waiting].required >= 500
    driver.run()
    assert set(driver.finished) == {running, patient}


def test_time_in_the_queue_goes_on_over_a_loss_of_workers() -> None:
    driver = CoreDriver(max_num_seqs=1)
    driver.add([1, 2, 3], max_tokens=100)
    driver.turn()
    waiting = driver.add([4, 5], max_queue_s=0.5)
    driver.now += 0.4
    driver.lose_worker()
    driver.now += 0.2
    driver.worker_back()
    driver.turn()
    assert driver.rejected[waiting].reason == "queue_timeout"


def test_prompt_tokens_that_wait_are_bounded() -> None:
    driver = CoreDriver(max_num_seqs=1, max_queued_tokens=10)
    driver.add([1, 2, 3], max_tokens=5)
    driver.turn()
    first, second, third = driver.add([1] * 30), driver.add([2]), driver.add([3] * 9)
    assert first not in driver.rejected, "the first in the queue is taken whatever its length"
    assert {key: (rejection.reason, rejection.required, rejection.available) for key, rejection in driver.rejected.items()} == {
        second: ("queue_tokens", 31, 10),
        third: ("queue_tokens", 39, 10),
    }
    driver.run()
    assert driver.core.queues.num_waiting_tokens == 0


def test_kv_of_a_sequence_that_failed_is_found_by_nobody() -> None:
    driver = CoreDriver(block_size=4, num_swap_slots=8)
    key = driver.add(list(range(1, 14)), max_tokens=9)
    driver.step()
    assert len(driver.core.memory.pool.index) == 3
    driver.worker.fail = lambda row, version: True
    driver.step()
    assert driver.finished[key].finish_reason == "error"
    assert len(driver.core.memory.pool.index) == 0
    driver.worker.fail = lambda row, version: False
    again = driver.add(list(range(1, 14)), max_tokens=9)
    driver.run()
    assert driver.finished[again].num_cached_tokens == 0
