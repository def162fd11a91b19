"""Preemption by recompute: who yields, and that nothing is lost by it."""

from __future__ import annotations

from pagemill.messages.sequences import SamplingParams, SequenceKey
from scheduler.events import Preempt
from scheduler.sequence import Status
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens

VOCAB = 32


def prompt(stem: int, length: int = 8) -> list[int]:
    return [(stem * 11 + i * 3) % VOCAB for i in range(length)]


def statuses(driver: CoreDriver) -> dict[SequenceKey, Status]:
    return {key: sequence.status for key, sequence in driver.core.sequences.items()}


def test_under_pressure_every_request_still_ends_with_its_own_tokens() -> None:
    driver = CoreDriver(num_blocks=12, block_size=4)
    keys = [driver.add(prompt(stem), max_tokens=30) for stem in range(6)]
    driver.run()
    for stem, key in enumerate(keys):
        assert driver.outputs[key] == expected_tokens(prompt(stem), SamplingParams(), 0, 48, 30, VOCAB)
    assert driver.core.preemption.decisions.num_preempted("recompute") > 0
    assert sum(driver.finished[key].num_preemptions for key in keys) == driver.core.preemption.decisions.num_preempted("recompute")


def test_the_last_in_the_order_yields_and_the_first_never_does() -> None:
    driver = CoreDriver(num_blocks=12, block_size=4)
    keys = [driver.add(prompt(stem), max_tokens=30) for stem in range(3)]
    while not driver.core.queues.preempted:
        driver.step()
    assert [sequence.key for sequence in driver.core.queues.preempted] == [keys[2]]
    driver.run()
    assert driver.finished[keys[0]].num_preemptions == 0


def test_preempted_sequences_resume_before_new_ones_enter() -> None:
    driver = CoreDriver(num_blocks=12, block_size=4)
    early = [driver.add(prompt(stem), max_tokens=30) for stem in range(3)]
    while not driver.core.queues.preempted:
        driver.step()
    late = driver.add(prompt(9), max_tokens=4)
    while early[2] in driver.core.sequences:
        driver.step()
        assert late not in driver.finished or early[2] in driver.finished or statuses(driver)[early[2]] is Status.RUNNING
    driver.run()


def test_what_the_prefix_index_still_holds_is_not_computed_again() -> None:
    driver = CoreDriver(num_blocks=12, block_size=4)
    driver.add(prompt(0), max_tokens=20)
    victim = driver.add(prompt(1, 20), max_tokens=20)
    driver.run()
    assert driver.finished[victim].num_cached_tokens == 0, "its own blocks are no gift of the cache"
    assert driver.core.preemption.decisions.num_preempted("recompute") == 1
    assert 0 < driver.core.counters.tokens_recomputed < 20


def test_a_more_urgent_request_takes_a_seat_from_a_less_urgent_one() -> None:
    driver = CoreDriver(max_num_seqs=2, scheduling_policy="priority")
    low = [driver.add(prompt(stem), max_tokens=40, priority=5) for stem in range(2)]
    driver.step()
    high = driver.add(prompt(7), max_tokens=3, priority=-1)
    driver.step()
    assert statuses(driver)[high] is Status.RUNNING
    assert statuses(driver)[low[1]] is Status.PREEMPTED
    driver.run()
    for stem, key in enumerate(low):
        assert driver.outputs[key] == expected_tokens(prompt(stem), SamplingParams(), 0, 8192, 40, VOCAB)


def test_what_a_victim_was_given_in_this_step_goes_to_the_others() -> None:
    driver = CoreDriver(max_num_seqs=2, max_num_batched_tokens=3, scheduling_policy="priority")
    for stem in range(2):
        driver.add(prompt(stem, 1), max_tokens=40, priority=5)
    driver.step()
    driver.add(prompt(7, 9), max_tokens=3, priority=-1)
    driver.step()
    assert [piece.num_tokens for piece in driver.plans[-1].slices] == [1, 2]


def test_a_more_urgent_request_takes_blocks_only_if_that_lets_it_in() -> None:
    driver = CoreDriver(num_blocks=8, block_size=4, scheduling_policy="priority")
    first = driver.add(prompt(0, 20), max_tokens=8, priority=0)
    low = driver.add(prompt(1, 4), max_tokens=8, priority=5)
    driver.step()
    big = driver.add(prompt(2, 20), max_tokens=2, priority=1)
    driver.step()
    assert statuses(driver)[low] is Status.RUNNING, "yielding would not have made room for the big one"
    driver.run()
    assert all(key in driver.finished for key in (first, low, big))


def test_what_the_needy_one_would_adopt_is_no_gain() -> None:
    """Yielding would free one block for it: the six of the common prefix it takes over itself."""
    driver = CoreDriver(num_blocks=15, block_size=4, scheduling_policy="priority")
    first = driver.add(prompt(0, 20), max_tokens=10, priority=0)
    common = prompt(1, 24)
    low = driver.add([*common, 1], max_tokens=8, priority=5)
    driver.step()
    needy = driver.add([*common, *prompt(2, 10)], max_tokens=2, priority=1)
    driver.step()
    assert statuses(driver)[low] is Status.RUNNING, "yielding would not have made room"
    driver.run()
    assert all(key in driver.finished for key in (first, low, needy))


def test_nobody_yields_to_a_running_one_that_would_still_lack_blocks() -> None:
    driver = CoreDriver(num_blocks=10, block_size=4)
    driver.add(prompt(0, 15), max_tokens=20)
    needy = driver.add(prompt(1, 7), max_tokens=20)
    behind = driver.add(prompt(2, 3), max_tokens=20)
    driver.step()
    assert not driver.core.preemption.extend(driver.core.sequences[needy], 7 * 4)  # five more; three are free, one can be taken
    assert statuses(driver)[behind] is Status.RUNNING
    assert driver.core.preemption.extend(driver.core.sequences[needy], 6 * 4)  # four more: the one behind yields
    assert statuses(driver)[behind] is Status.PREEMPTED


def test_equals_never_push_each_other_out() -> None:
    driver = CoreDriver(max_num_seqs=2, scheduling_policy="priority")
    for arrival in (1.0, 5.0):
        driver.add(prompt(int(arrival)), max_tokens=9, priority=1, arrival=arrival)
    driver.step()
    between = driver.add(prompt(3), max_tokens=5, priority=1, arrival=3.0)  # ahead of a running one, but no more urgent
    driver.step()
    assert statuses(driver)[between] is Status.WAITING
    driver.run()
    assert driver.core.preemption.decisions.num_preempted("recompute") == 0


def test_the_first_running_one_gets_its_blocks_even_if_those_behind_hold_only_shared_ones_and_the_head_is_kept_out() -> None:
    driver = CoreDriver(num_blocks=6, block_size=4, scheduling_policy="static")
    for stem in range(4):
        driver.add(prompt(stem, 16), arrival=float(stem))
    core = driver.core
    _, first, second, third = core.queues.waiting
    for sequence in (first, second, third):
        core.queues.move(sequence, Status.RUNNING)
        core.memory.tighten(sequence)
    assert core.memory.extend(first, 4)
    assert core.memory.extend(second, 16)
    for block in list(second.tables[0])[:3]:
        core.memory.pool.reference(block)
        third.tables[0].append(block)
    assert core.preemption.extend(first, 16)
    assert (second.status, third.status) == (Status.PREEMPTED, Status.PREEMPTED)


def test_static_batches_enter_only_when_the_last_one_has_ended() -> None:
    driver = CoreDriver(max_num_seqs=2, scheduling_policy="static")
    keys = [driver.add(prompt(stem), max_tokens=2 + 6 * (stem % 2)) for stem in range(4)]
    while keys[1] not in driver.finished:
        driver.step()
        assert statuses(driver).get(keys[2], Status.WAITING) is Status.WAITING
    driver.run()
    assert len(driver.finished) == 4


def test_a_static_batch_has_not_ended_while_any_of_it_is_preempted() -> None:
    driver = CoreDriver(max_num_seqs=3, scheduling_policy="static")
    first, *others = [driver.add(prompt(stem), max_tokens=2 if stem == 0 else 8) for stem in range(3)]
    while first not in driver.finished:
        driver.step()
    late = driver.add(prompt(3), max_tokens=2)
    for key in others:
        driver.handle(Preempt(key, "recompute", 99))
    while not set(others) <= driver.finished.keys():
        assert statuses(driver)[late] is Status.WAITING
        driver.step()
    driver.run()
    assert len(driver.finished) == 4


def test_a_sequence_without_room_parks_and_keeps_what_it_has() -> None:
    driver = CoreDriver(num_blocks=6, block_size=4, max_num_batched_tokens=8)
    head = driver.add(prompt(0, 15), max_tokens=8)
    driver.step()
    driver.step()
    tail = driver.add(prompt(1, 4), max_tokens=8)
    driver.run()
    assert driver.outputs[head] == expected_tokens(prompt(0, 15), SamplingParams(), 0, 24, 8, VOCAB)
    assert driver.outputs[tail] == expected_tokens(prompt(1, 4), SamplingParams(), 0, 24, 8, VOCAB)
