"""Every state of small worlds, explored: the laws hold in all of them, and a planted fault is found.

`scripts/model_check` explores larger ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from pagemill.messages.frontend import AbortRequest
from pagemill.messages.sequences import SequenceKey
from scheduler.core import SchedulerCore
from scheduler.events import Preempt, Turn
from scripts.lib.core_snapshot import Snapshot
from scripts.lib.core_state import Outlook, state_key
from scripts.lib.model_check import Explorer, LawBroken, World
from scripts.lib.model_worlds import suite_worlds

WORLDS = {world.name: world for world in suite_worlds()}
GROW, GROW_BESIDE_A_WINDOW, WINDOW, FAILING = (
    WORLDS[name] for name in ("grow", "grow, a window", "two that grow, a window, two plans", "two that grow, copies fail")
)


@pytest.mark.parametrize("world", WORLDS.values(), ids=list(WORLDS))
def test_no_state_is_dead_or_out_of_balance_and_no_run_is_endless(world: World) -> None:
    report = Explorer(world, twins_every=40).explore()
    assert report.is_complete
    assert report.num_twins > 50
    assert report.num_transitions > report.num_states > 1000
    assert report.num_final > 0
    assert min(report.chosen.get(name, 0) for name in ("swap", "recompute", "fetch a prefix", "compute a prefix")) > 0


def _head_without_claim_on_idle_blocks(core: SchedulerCore) -> None:
    core.preemption._holders = lambda needy: []  # type: ignore[method-assign]


def _blocks_of_the_aborted_stay(core: SchedulerCore) -> None:
    core.memory.release = lambda sequence, fence: None  # type: ignore[method-assign]


def _windows_do_not_matter_on_the_way_back(core: SchedulerCore) -> None:
    core.memory.windows.way_back = lambda sequence, num_tokens: num_tokens  # type: ignore[method-assign]


def _nothing_is_left_behind(core: SchedulerCore) -> None:
    core.memory.leave_behind = lambda sequence, num_tokens: None  # type: ignore[method-assign]


def _what_cannot_be_read_keeps_its_name(core: SchedulerCore) -> None:
    core.swapping.swap.distrust = lambda slot: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("world", "plant", "story"),
    [
        (GROW, _head_without_claim_on_idle_blocks, "nothing can happen any more"),
        (GROW, _blocks_of_the_aborted_stay, "references"),
        (GROW_BESIDE_A_WINDOW, _head_without_claim_on_idle_blocks, "nothing can happen any more"),
        (WINDOW, _windows_do_not_matter_on_the_way_back, "that a window reaches"),
        (WINDOW, _nothing_is_left_behind, "behind a window"),
        (FAILING, _what_cannot_be_read_keeps_its_name, "lie on or behind a cycle"),
    ],
)
def test_a_planted_fault_is_found_and_told_with_the_way_there(world: World, plant: Callable[[SchedulerCore], None], story: str) -> None:
    explorer = Explorer(world)
    plant(explorer.core)
    with pytest.raises(LawBroken, match=story) as broken:
        explorer.explore()
    assert "arrive 0 → " in str(broken.value)


def test_states_that_do_not_behave_alike_and_are_taken_for_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_places(core: SchedulerCore, _: Outlook) -> bytes:
        """How far everything is, and not where its KV lies."""
        sequences = [(sequence.seq_id, sequence.status, sequence.num_tokens, sequence.num_computed_tokens) for sequence in core.queues]
        return repr((core._next_seq_id, sequences, [plan.plan_id - core._next_plan_id for plan in core.plans], len(core.swapping.transfers))).encode()

    monkeypatch.setattr("scripts.lib.model_check.state_key", without_places)
    explorer = Explorer(replace(GROW, requests=GROW.requests[:2]), twins_every=1)
    with pytest.raises(LawBroken, match="states taken for one lead to different ones"):
        explorer.explore()


def test_a_run_that_never_gets_anywhere_is_found() -> None:
    """Who has computed a position gives it up in the next turn: there is always something to do, and it never ends."""
    config = msgspec.structs.replace(GROW.config, max_num_batched_tokens=1)
    explorer = Explorer(replace(GROW, requests=(replace(GROW.requests[1], is_cached=False),), config=config))
    planner, queues, begin = explorer.core.preemption, explorer.core.queues, explorer.core.preemption.begin

    def begin_with_a_preemption(now: float, step: int) -> None:
        begin(now, step)
        for sequence in list(queues.running):
            planner.force(Preempt(sequence.key, "recompute", 100), sequence)

    planner.begin = begin_with_a_preemption  # type: ignore[method-assign]
    with pytest.raises(LawBroken, match=r"states are dead|lie on or behind a cycle"):
        explorer.explore(5000)


def test_a_snapshot_takes_the_core_back_whatever_happened_since() -> None:
    core = SchedulerCore(GROW.config)
    for number in range(3):
        core.handle(GROW.event(number), 0.0)
    core.handle(Turn(), 0.0)
    snapshot, key = Snapshot(core), state_key(core)
    seen = {key}
    for request in range(3):
        core.handle(AbortRequest(SequenceKey(0, 1, request, 0)), 0.0)
        seen.add(state_key(core))
    assert len(seen) == 4, "each abort is another state"
    snapshot.restore()
    assert state_key(core) == key


def test_states_that_differ_in_names_and_past_only_are_one() -> None:
    keys = []
    for num_before in (0, 2):
        core = SchedulerCore(GROW.config)
        for _ in range(num_before):  # takes blocks, rows and plan numbers out of their first order
            for block in [core.memory.pool.allocate() for _ in range(3)]:
                core.memory.pool.release(block)
            core._next_plan_id += 5
        for number in range(2):
            core.handle(GROW.event(number), 0.0)
        core.handle(Turn(), 0.0)
        keys.append(state_key(core))
    assert keys[0] == keys[1]


def test_what_nobody_asks_for_again_makes_no_difference_unless_it_is_saved() -> None:
    keys: dict[tuple[bool, bool], list[bytes]] = {}
    for content in (b"one", b"another"):
        core = SchedulerCore(GROW.config)
        for pool in (core.memory.pool, core.swapping.swap):
            number = pool.allocate()
            pool.index.insert(content, number)  # type: ignore[arg-type]
            pool.release(number)  # type: ignore[arg-type]
        for is_wanted in (False, True):
            for saves in (False, True):
                outlook = Outlook([b"one", b"another"] if is_wanted else [], saves)
                keys.setdefault((is_wanted, saves), []).append(state_key(core, outlook))
    assert {case for case, (one, another) in keys.items() if one == another} == {(False, False)}
