"""The simulated worker and link: every time here is worked out by hand."""

from __future__ import annotations

from itertools import count

import pytest

from pagemill.ids import NO_PLAN, PlanId, RowId, SeqId
from pagemill.messages.sequences import SamplingParams
from pagemill.messages.worker import InstallRow, Plan, Slice, StepDone, Transfer, TransferDone, WorkerToScheduler
from scripts.lib.costs import LinkCost, StepCost
from scripts.lib.simulation import SimulatedWorker

BLOCK_BYTES = 100
#: A block takes one second out and half a second in; both together each take twice as long.
LINK = LinkCost(out_bytes_s=100.0, in_bytes_s=200.0, both_share=0.5, per_block_s=0.0, compute_share=0.0)
#: Every step takes ten seconds.
TEN_SECONDS = StepCost(per_step_s=10.0, per_token_s=0.0)


class Planner:
    """Writes plans by hand; transfers are numbered as they are made."""

    def __init__(self, cost: StepCost = TEN_SECONDS, link: LinkCost = LINK) -> None:
        self.worker = SimulatedWorker(cost, link, BLOCK_BYTES)
        self._transfer_ids, self._plan_ids = count(1), count(1)

    def out(self, block: int, slot: int, needed_by: int = NO_PLAN) -> Transfer:
        return Transfer(next(self._transfer_ids), "device", block, "arena", slot, PlanId(needed_by))

    def bring_in(self, slot: int, block: int, needed_by: int = NO_PLAN) -> Transfer:
        return Transfer(next(self._transfer_ids), "arena", slot, "device", block, PlanId(needed_by))

    def run(self, *transfers: Transfer, slices: tuple[Slice, ...] = ()) -> list[WorkerToScheduler]:
        return list(self.worker.handle(Plan(1, PlanId(next(self._plan_ids)), slices, transfers, ())))

    def install(self, row: int, seq_id: int) -> None:
        self.worker.handle(InstallRow(1, RowId(row), 1, SeqId(seq_id), SamplingParams(), 0, 1, b"", (b"",)))

    def wait(self) -> tuple[float, list[int]]:
        """When the next copies end, and which."""
        self.worker.pass_time(float("inf"), "idle")
        return self.worker.now, ids(self.worker.poll())


def ids(messages: object) -> list[int]:
    assert isinstance(messages, list)
    return [number for message in messages if isinstance(message, TransferDone) for number in message.transfer_ids]


def piece(row: int, start: int, num_tokens: int, *, sample: bool = True) -> Slice:
    return Slice(RowId(row), 1, start, num_tokens, sample, b"", NO_PLAN, (b"",))


def step_of(messages: list[WorkerToScheduler]) -> StepDone:
    assert isinstance(messages[-1], StepDone)
    return messages[-1]


def test_copies_go_on_one_after_another_while_nothing_is_computed() -> None:
    planner = Planner()
    assert ids(planner.run(planner.out(1, 1), planner.out(2, 2))) == []
    assert planner.worker.now == 0.0
    assert planner.wait() == (1.0, [1])
    assert planner.wait() == (2.0, [2])


def test_both_directions_share_the_link_until_one_is_done() -> None:
    planner = Planner()
    planner.run(planner.out(1, 1), planner.bring_in(2, 2))
    assert planner.wait() == (1.0, [2])  # at half its rate; the copy out has moved half of its block meanwhile
    assert planner.wait() == (1.5, [1])


def test_a_forward_waits_only_for_what_its_plan_needs() -> None:
    planner = Planner()
    planner.install(0, 7)
    done = planner.run(planner.out(1, 1, needed_by=1), *(planner.out(block, block) for block in range(2, 20)), slices=(piece(0, 0, 1),))
    assert planner.worker.now == 11.0
    assert step_of(done).seconds == {"swap_wait": 1.0, "forward": 10.0}
    assert ids(done) == list(range(1, 12))  # what was copied beside the forward is told before the step is


def test_what_a_forward_needs_goes_before_what_nobody_waits_for() -> None:
    planner = Planner()
    planner.install(0, 7)
    planner.run(*(planner.out(block, block) for block in range(50)))
    done = planner.run(planner.out(60, 60, needed_by=2), slices=(piece(0, 0, 1),))
    assert step_of(done).seconds["swap_wait"] == 1.0
    assert ids(done)[0] == 51


def test_a_transfer_does_not_overtake_an_earlier_one_of_its_slot_or_block() -> None:
    planner = Planner()
    planner.run(planner.out(1, 1), planner.out(2, 2), planner.bring_in(2, 3), planner.out(3, 4))
    times = [planner.wait() for _ in range(4)]
    assert times == [(1.0, [1]), (2.0, [2]), (2.5, [3]), (3.5, [4])]


def test_an_urgent_transfer_takes_along_what_it_must_not_overtake() -> None:
    planner = Planner()
    planner.install(0, 7)
    background = [planner.out(block, block) for block in range(20)]
    planner.run(*background, planner.out(30, 30), planner.bring_in(30, 31))
    done = planner.run(planner.out(31, 32, needed_by=2), slices=(piece(0, 0, 1),))
    out, into = (message for message in done if isinstance(message, TransferDone))
    assert (out.transfer_ids[:2], into.transfer_ids) == ((21, 23), (22,))
    assert step_of(done).seconds["swap_wait"] == 2.5


def test_a_busy_copy_engine_takes_its_share_of_the_compute() -> None:
    planner = Planner(link=LinkCost(100.0, 200.0, 0.5, 0.0, compute_share=0.5))
    planner.install(0, 7)
    done = planner.run(*(planner.out(block, block) for block in range(4)), slices=(piece(0, 0, 1),))
    assert planner.worker.now == 12.0  # four seconds at half speed
    assert step_of(done).seconds == {"swap_wait": 0.0, "forward": 12.0}


def test_starting_a_copy_costs_something_too() -> None:
    planner = Planner(link=LinkCost(100.0, 100.0, 1.0, per_block_s=0.25, compute_share=0.0))
    planner.run(planner.out(1, 1), planner.bring_in(2, 2))
    now, done = planner.wait()
    assert sorted(done) == [1, 2]
    assert now == pytest.approx(1.25)


def test_seconds_say_what_they_were_spent_copying() -> None:
    planner = Planner()
    planner.install(0, 7)
    done = planner.run(planner.out(1, 1), planner.out(2, 2), planner.bring_in(3, 3), slices=(piece(0, 0, 1),))
    out, into = (message for message in done if isinstance(message, TransferDone))
    assert (out.transfer_ids, into.transfer_ids) == ((1, 2), (3,))
    assert out.seconds == pytest.approx(2.5)  # the first half of the first beside the other direction
    assert into.seconds == pytest.approx(1.0)


def test_time_goes_to_decode_prefill_recompute_and_the_link() -> None:
    planner = Planner(StepCost(per_step_s=0.0, per_token_s=1.0))
    planner.install(0, 7)
    planner.install(1, 8)
    planner.run(slices=(piece(0, 0, 8),))
    planner.run(slices=(piece(0, 8, 1), piece(1, 0, 4)))
    planner.install(2, 7)
    planner.run(planner.bring_in(1, 1, needed_by=3), slices=(piece(2, 0, 10),))  # nine of these were computed before
    planner.worker.pass_time(40.0, "idle")
    assert planner.worker.seconds == pytest.approx({"decode": 1.0, "prefill": 8 + 4 + 1, "recompute": 9.0, "link": 0.5, "idle": 16.5})
    assert sum(planner.worker.seconds.values()) == planner.worker.now == 40.0


def test_a_plan_without_slices_takes_no_time() -> None:
    planner = Planner()
    assert step_of(planner.run()).seconds == {"swap_wait": 0.0, "forward": 0.0}
    assert planner.worker.now == 0.0


def test_waiting_for_nothing_is_refused() -> None:
    with pytest.raises(RuntimeError, match="nothing is under way"):
        SimulatedWorker(TEN_SECONDS, LINK, BLOCK_BYTES).pass_time(float("inf"), "idle")
