"""The core as a table of events and what they must lead to."""

from __future__ import annotations

import msgspec
import pytest

from pagemill.messages import AddRequest, InstallRow, PeerLost, Plan, SamplingParams, StepOutput, Turn, unpack_ids
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


def test_the_head_computes_even_if_decodes_could_take_the_whole_budget() -> None:
    driver = CoreDriver(max_num_batched_tokens=2, scheduling_policy="priority")
    late = [driver.add(prompt(1, stem), max_tokens=50, priority=1) for stem in range(2)]
    driver.step()
    urgent = driver.add(prompt(6), max_tokens=1, priority=0)
    for _ in range(8):
        driver.step()
    assert urgent in driver.finished
    assert not any(key in driver.finished for key in late)


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


@pytest.mark.parametrize("bad", ["empty", "keys"])
def test_a_malformed_request_is_refused_and_changes_nothing(bad: str) -> None:
    driver = CoreDriver(block_size=4)
    key = driver.add([] if bad == "empty" else prompt(9))
    if bad == "keys":
        request = driver.log[-1][1]
        assert isinstance(request, AddRequest)
        other = msgspec.structs.replace(request.key, request=99)
        driver.outputs[other] = []
        driver.handle(msgspec.structs.replace(request, key=other, prefix_keys=b"short"))
        key = other
    assert driver.rejected[key].reason == "invalid"


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
    driver.answer()
    pool = driver.core.memory.pool
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


def test_a_missing_row_is_installed_again_and_nothing_is_lost() -> None:
    driver = CoreDriver(block_size=4)
    keys = [driver.add(prompt(5, stem), max_tokens=8) for stem in range(3)]
    for _ in range(3):
        driver.step()
    driver.worker.rows.clear()
    driver.run()
    for stem, key in enumerate(keys):
        assert driver.outputs[key] == expected(driver, prompt(5, stem), 8)
    assert driver.core.counters.num_rows_missing == 1


def test_outputs_of_one_step_travel_in_one_message() -> None:
    driver = CoreDriver()
    for stem in range(4):
        driver.add(prompt(5, stem))
    driver.turn()
    driver.answer()
    messages = [effect for effect in driver.log[-1][2] if isinstance(effect, StepOutput)]
    assert [len(message.outputs) for message in messages] == [4]


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
