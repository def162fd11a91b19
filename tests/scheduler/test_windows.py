"""Groups with windows: what is behind them is given up at once, and nothing that anybody still needs ever is."""

from __future__ import annotations

import pytest

from pagemill.ids import BEHIND, BlockId, unpack_ids
from pagemill.messages.sequences import KvGroup, SamplingParams, SequenceKey
from pagemill.messages.worker import InstallRow, TransferDone
from scheduler.events import Preempt
from scheduler.sequence import Sequence
from scheduler.windows import Windows
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens

VOCAB = 32
FULL = KvGroup()
#: Blocks of four: a window of six reaches two blocks back from a border.
SIXES = (FULL, KvGroup(6))


def prompt(num_tokens: int, stem: int = 0) -> list[int]:
    return [(stem * 7 + i * 3 + i // 5) % VOCAB for i in range(num_tokens)]


def driver_of(groups: tuple[KvGroup, ...] = SIXES, **numbers: object) -> CoreDriver:
    return CoreDriver(None, **({"num_blocks": 64, "block_size": 4, "groups": groups, "max_model_len": 512} | numbers))


def run_to(driver: CoreDriver, key: SequenceKey, num_computed: int) -> Sequence:
    """Steps until so many positions of the sequence are computed."""
    sequence = driver.core.sequences[key]
    while sequence.num_computed_tokens < num_computed:
        assert driver.step()
    return sequence


def check_all(driver: CoreDriver, asked: dict[SequenceKey, tuple[list[int], int]]) -> None:
    for key, (tokens, max_tokens) in asked.items():
        assert driver.outputs[key] == expected_tokens(tokens, SamplingParams(), 0, driver.core.longest, max_tokens, VOCAB)


def shape(sequence: Sequence) -> list[str]:
    """Each table in letters: behind the window, in the arena, on the device."""
    return ["".join("b" if block == BEHIND else "a" if block < 0 else "d" for block in table.ids) for table in sequence.tables]


@pytest.mark.parametrize("windows", [(0,), (1,), (6,), (0, 6, 9, 6), (4, 1)])
def test_entries_pass_a_window_exactly_when_it_was_said_that_the_next_ones_would(windows: tuple[int, ...]) -> None:
    groups = tuple(map(KvGroup, windows))
    driver, arithmetic = driver_of(groups), Windows(groups, 4)
    sequence = driver.core.sequences[driver.add(prompt(80))]
    for table in sequence.tables:
        table.extend(map(BlockId, range(20)))
    next_at = arithmetic.passes_next_at(0)
    for num_computed in range(1, 81):
        passed = list(arithmetic.passed(sequence, num_computed))
        assert bool(passed) == (num_computed == next_at)
        for group, num_behind in passed:
            sequence.tables[group].leave_behind(num_behind)
        if passed:
            next_at = arithmetic.passes_next_at(num_computed)
    assert [arithmetic.way_back(sequence, num_tokens) for num_tokens in (0, 80)] == [0, 80]


# --- what is given up ------------------------------------------------------------------------------------


def test_blocks_behind_the_window_are_given_back_when_the_positions_before_which_they_lie_are_acknowledged() -> None:
    driver = driver_of(max_num_batched_tokens=8)
    key = driver.add(prompt(30), max_tokens=9)
    sequence = run_to(driver, key, 8)
    assert shape(sequence) == ["dd", "dd"]
    driver.turn()
    assert shape(sequence) == ["dddd", "dddd"], "what is being computed reads them"
    driver.answer()
    assert shape(sequence) == ["dddd", "bbdd"]
    assert driver.core.memory.pool.num_cached == 2, "as cached ones"
    run_to(driver, key, 30)
    assert shape(sequence) == ["dddddddd", "bbbbbddd"], "the end of the last full block still looks back to the first of these"
    driver.run()
    check_all(driver, {key: (prompt(30), 9)})


@pytest.mark.parametrize(("window", "kept"), [(1, 1), (2, 2), (4, 2), (5, 2), (6, 3), (9, 3)])
def test_a_sequence_keeps_what_the_end_of_its_last_full_block_looks_back_to(window: int, kept: int) -> None:
    driver = driver_of((FULL, KvGroup(window)), max_num_batched_tokens=3)
    key = driver.add(prompt(31), max_tokens=4)
    sequence = run_to(driver, key, 31)
    assert shape(sequence)[1] == "b" * (8 - kept) + "d" * kept


def test_a_chunk_longer_than_the_window_needs_blocks_for_all_of_it_and_keeps_few() -> None:
    driver = driver_of((KvGroup(6),), max_num_batched_tokens=40)
    key = driver.add(prompt(40), max_tokens=2)
    driver.turn()
    assert shape(driver.core.sequences[key]) == ["d" * 10]
    driver.answer()
    assert shape(driver.core.sequences[key]) == ["b" * 8 + "dd"]


def test_the_next_step_of_a_plan_in_flight_finds_all_it_reads() -> None:
    driver = driver_of(max_plans_in_flight=2, max_num_batched_tokens=7)
    asked = {driver.add(prompt(29, stem), max_tokens=25): (prompt(29, stem), 25) for stem in range(3)}
    driver.worker.defer = lambda row, version: driver.worker.num_positions % 5 == 0
    for _ in range(60):
        driver.step()
    driver.worker.defer = lambda row, version: False
    driver.run()
    check_all(driver, asked)


def test_what_was_left_behind_is_overwritten_before_anything_else_and_not_saved() -> None:
    driver = driver_of(num_blocks=30, num_swap_slots=64, max_num_batched_tokens=4)
    driver.add(prompt(17, 3), max_tokens=1)
    driver.run()
    pool = driver.core.memory.pool
    assert [pool.is_expendable(block) for block in pool.oldest_cached(30)] == [True, True] + [False] * 6
    long = driver.add(prompt(60), max_tokens=1)
    passed: set[bytes] = set()
    while long not in driver.finished:
        passed |= {key for key, block in pool.index.entries().items() if pool.is_expendable(block)}
        driver.step()
    assert len(passed) > 10
    assert not passed & set(driver.core.swapping.swap.index.entries())
    again = driver.add(prompt(20, 3), max_tokens=1)
    driver.run()
    assert driver.finished[again].num_cached_tokens == 16, "thirty blocks have been written since, and the prefix is still there"


def test_what_was_found_once_is_kept_as_long_as_any_other_when_windows_have_passed() -> None:
    driver = driver_of()
    driver.add(prompt(17, 3), max_tokens=1)
    driver.run()
    driver.add(prompt(17, 3) + prompt(30), max_tokens=1)
    driver.run()
    pool = driver.core.memory.pool
    expendable = [key for key, block in pool.index.entries().items() if pool.is_expendable(block)]
    assert len(expendable) == 2 + 5, "two before what was found, and what the second has computed itself and left behind"


# --- prefixes --------------------------------------------------------------------------------------------


def test_a_follow_up_finds_the_whole_of_what_was_said_before_and_takes_over_only_the_last_window() -> None:
    driver = driver_of()
    first = driver.add(prompt(30), max_tokens=7)
    driver.run()
    tokens = prompt(30) + driver.outputs[first] + [1, 2, 3]
    second = driver.add(tokens, max_tokens=1)
    driver.turn()
    assert shape(driver.core.sequences[second]) == ["d" * 10, "bbbbbbbddd"], "nine blocks were found"
    driver.run()
    assert driver.finished[second].num_cached_tokens == 36
    check_all(driver, {second: (tokens, 1)})


def test_without_the_last_window_a_shorter_prefix_is_found_or_none() -> None:
    for lost, num_found in ((6, 24), (7, 28), (5, 32)):
        driver = driver_of()
        driver.add(prompt(33), max_tokens=1)
        driver.run()
        pool = driver.core.memory.pool
        keys = [key for key in pool.index.entries() if len(key) > 32]
        pool.forget(pool.index.find(keys[lost]))  # type: ignore[arg-type]
        second = driver.add(prompt(33), max_tokens=1)
        driver.run()
        assert driver.finished[second].num_cached_tokens == num_found


def test_a_hit_is_forgotten_when_what_is_there_changes() -> None:
    driver = driver_of()
    driver.add(prompt(33), max_tokens=1)
    driver.run()
    driver.add(prompt(33), max_tokens=1)
    waiting, memory = driver.core.queues.waiting[0], driver.core.memory
    found = memory.adoptable(waiting)
    assert memory.adoptable(waiting) == found
    assert len(found) == 8 + 2
    memory.pool.forget(found[7])
    assert found[7] not in memory.adoptable(waiting)


def test_what_is_told_of_a_row_says_which_blocks_are_behind() -> None:
    driver = driver_of()
    driver.add(prompt(33), max_tokens=1)
    driver.run()
    driver.add(prompt(33), max_tokens=1)
    (install,) = [effect for effect in driver.turn() if isinstance(effect, InstallRow)]
    full, window = (list(unpack_ids(table)) for table in install.block_tables)
    assert min(full) >= 0
    assert window[:6] == [BEHIND] * 6
    assert min(window[6:]) >= 0


def test_one_that_waits_for_another_takes_over_what_it_has_computed_whatever_its_windows_passed() -> None:
    driver = driver_of(num_blocks=200, max_num_batched_tokens=16)
    tokens = [prompt(100) + prompt(5, stem) for stem in (3, 4)]
    asked = {driver.add(own, max_tokens=3): (own, 3) for own in tokens}
    driver.run()
    check_all(driver, asked)
    second = list(asked)[1]
    assert driver.finished[second].num_cached_tokens == 100
    assert driver.worker.num_positions < 100 + 2 * 10


def test_a_failed_sequence_leaves_nothing_that_others_could_find_behind_its_windows_either() -> None:
    driver = driver_of(max_num_batched_tokens=8)
    key = driver.add(prompt(30), max_tokens=9)
    run_to(driver, key, 24)
    assert driver.core.memory.pool.num_cached > 0
    driver.worker.fail = lambda row, version: True
    driver.run()
    assert driver.finished[key].finish_reason == "error"
    assert not len(driver.core.memory.pool.index)
    assert driver.core.memory.pool.num_free == 64


def test_conversations_come_back_whole_from_the_arena_though_the_pool_holds_one_and_a_half() -> None:
    """Blocks that windows have passed neither push out what is wanted again nor take slots of the arena from it."""
    groups = (FULL, *[KvGroup(16)] * 5)
    one = 75 + 5 * 20  # of 300 tokens, computed 64 at a time
    driver = driver_of(groups, num_blocks=one * 3 // 2, num_swap_slots=4 * one, max_num_batched_tokens=64, preemption="swap")
    talks = [prompt(200, stem) for stem in range(4)]
    for turn in range(4):
        for talk in talks:
            before = len(talk)
            talk += prompt(9, turn)
            key = driver.add(talk, max_tokens=5)
            driver.run()
            check_all(driver, {key: (talk, 5)})
            talk += driver.outputs[key]
            assert turn == 0 or driver.finished[key].num_cached_tokens == (before - 1) // 4 * 4
    assert driver.core.swapping.num_arena_hit_tokens > 2 * 4 * 200


# --- going back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [SIXES, (KvGroup(6), FULL), (KvGroup(3), KvGroup(9))])
@pytest.mark.parametrize("kind", ["swap", "recompute"])
@pytest.mark.parametrize("num_blocks", [1, 2, 5, 100])
def test_a_sequence_that_yields_goes_on_with_the_same_tokens(groups: tuple[KvGroup, ...], kind: str, num_blocks: int) -> None:
    driver = driver_of(groups, num_swap_slots=64, max_num_batched_tokens=16)
    key = driver.add(prompt(30), max_tokens=30)
    for _ in range(6):
        run_to(driver, key, driver.core.sequences[key].num_computed_tokens + 4)
        driver.handle(Preempt(key, kind, num_blocks))  # type: ignore[arg-type]
    driver.run()
    check_all(driver, {key: (prompt(30), 30)})


def test_giving_up_the_last_block_costs_what_is_in_it_and_a_full_one_before_it_everything() -> None:
    driver = driver_of(prefix_caching=False)
    key = driver.add(prompt(30), max_tokens=30)
    sequence = run_to(driver, key, 30)
    swapping = driver.core.swapping
    for num_blocks, first in ((2, 28), (3, 0)):
        tail = swapping.tail(sequence, num_blocks, {})
        offer = driver.core.preemption._offer(sequence, num_blocks, {})
        assert (len(tail.entries), offer.num_tokens) == (num_blocks, 30 - first)
        assert offer.recompute_s == pytest.approx(driver.core.prefill.seconds(first, 30))
    driver.handle(Preempt(key, "recompute", 3))
    driver.turn()
    assert driver.core.preemption.decisions.newest(1)[0].victims[0].freed == len(sequence.tables[0]) + 3
    driver.run()
    check_all(driver, {key: (prompt(30), 30)})


def test_what_is_behind_is_never_offered() -> None:
    driver = driver_of(prefix_caching=False)
    sequence = run_to(driver, driver.add(prompt(30), max_tokens=30), 30)
    pool = driver.core.memory.pool
    while pool.num_obtainable:
        pool.allocate()
    tail = driver.core.swapping.tail(sequence, 100, {})
    assert len(tail.entries) == tail.num_freed == 8 + 3


@pytest.mark.parametrize("groups", [SIXES, (KvGroup(6), FULL)])
def test_positions_that_move_are_counted_by_a_group_that_keeps_them_all(groups: tuple[KvGroup, ...]) -> None:
    driver = driver_of(groups, num_swap_slots=64)
    key = driver.add(prompt(30), max_tokens=30)
    run_to(driver, key, 30)
    driver.handle(Preempt(key, "swap", 100))
    driver.turn()
    assert driver.core.swapping.num_moved_tokens == 30


def test_slots_behind_the_window_are_given_back_when_a_plan_that_was_in_flight_is_done() -> None:
    driver = driver_of(num_swap_slots=64, max_num_batched_tokens=8, max_plans_in_flight=2, prefix_caching=False)
    driver.auto_transfers = False
    key = driver.add(prompt(40), max_tokens=3)
    sequence = run_to(driver, key, 16)
    assert sequence.num_planned_tokens == 8
    driver.handle(Preempt(key, "swap", 100))
    driver.turn()
    assert shape(sequence) == ["aaaaaa", "bbaaaa"]
    assert len(sequence.slots[1]) == 4
    driver.answer()
    assert shape(sequence) == ["aaaaaa", "bbbbaa"]
    assert len(sequence.slots[1]) == 2
    driver.auto_transfers = True
    while driver.worker.transfers:
        driver.worker.carry_out(driver.worker.transfers[0], driver.core.config.epoch)
    driver.run()
    check_all(driver, {key: (prompt(40), 3)})


def test_a_copy_that_is_lost_costs_everything_where_windows_have_passed() -> None:
    driver = driver_of(num_swap_slots=64, prefix_caching=False)
    key = driver.add(prompt(30), max_tokens=30)
    run_to(driver, key, 30)
    driver.auto_transfers = False
    driver.handle(Preempt(key, "swap", 100))
    driver.turn()
    sequence = driver.core.sequences[key]
    driver.handle(TransferDone(driver.core.config.epoch, 0, (driver.worker.transfers[0].transfer_id,), False, 0.1))
    assert sequence.num_computed_tokens in (0, 28)
    driver.auto_transfers = True
    for transfer in list(driver.worker.transfers):
        driver.worker.carry_out(transfer, driver.core.config.epoch)
    driver.run()
    check_all(driver, {key: (prompt(30), 30)})


# --- how much there is room for --------------------------------------------------------------------------


def test_a_pool_holds_longer_sequences_where_only_some_layers_look_back_all_the_way() -> None:
    for groups, num_blocks, capacity in (
        ((FULL,), 12, 48),
        ((FULL, FULL), 12, 24),
        (SIXES, 12, 36),
        ((FULL, *[KvGroup(6)] * 2), 12, 24),
        ((KvGroup(6),), 2, 8),
    ):
        assert driver_of(groups, num_blocks=num_blocks).core.memory.capacity_tokens() == capacity
    assert driver_of((KvGroup(6), KvGroup(6)), num_blocks=6).core.longest == 512, "no length is too long for windows alone"


@pytest.mark.parametrize("groups", [SIXES, (KvGroup(4), FULL, KvGroup(9)), (KvGroup(6), KvGroup(3))])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_the_longest_sequence_that_is_taken_can_be_computed_whatever_the_chunk(groups: tuple[KvGroup, ...], chunk: int) -> None:
    driver = driver_of(groups, num_blocks=14, max_num_batched_tokens=chunk, max_model_len=100)
    longest = driver.core.longest
    refused, taken = driver.add(prompt(longest), max_tokens=1), driver.add(prompt(longest - 1), max_tokens=5)
    other = driver.add(prompt(9, 3), max_tokens=5)
    driver.run()
    assert driver.rejected[refused].required == longest + 1
    check_all(driver, {taken: (prompt(longest - 1), 5), other: (prompt(9, 3), 5)})


def test_one_that_only_decodes_is_promised_no_room_for_chunks() -> None:
    driver = driver_of((FULL, *[KvGroup(33)] * 5), num_blocks=400, max_num_batched_tokens=64)
    memory = driver.core.memory
    key = driver.add(prompt(100), max_tokens=9)
    sequence = driver.core.sequences[key]
    assert memory.num_awaited_blocks(sequence) == 25 + 5 * min(25, 8 + 17)
    assert memory.num_awaited_blocks(sequence, frugal=True) == 25 + 5 * 9
    run_to(driver, key, 100)
    assert memory.num_awaited_blocks(sequence) == 26 + 5 * 9
    assert sequence.num_table_blocks == 25 + 5 * 8


def test_what_windows_no_longer_reach_is_hardly_ever_held() -> None:
    driver = driver_of((FULL, KvGroup(8)), snapshot_interval_s=0.0)
    key = driver.add(prompt(20), max_tokens=16)
    held = dead = 0
    while key not in driver.finished:
        driver.step()
        last = driver.snapshots[-1]
        held, dead = held + last.blocks_used, dead + last.blocks_dead
        assert last.slot_utilization > 0
    assert 0 < dead < 0.05 * held, "only where a block is full but for its last position"
