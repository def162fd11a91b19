"""Drives a core whose copies are done only when the test says so, and shows where the KV of a sequence is."""

from __future__ import annotations

from pagemill.ids import NONE
from pagemill.messages.decisions import VictimKind
from pagemill.messages.sequences import SamplingParams, SequenceKey
from pagemill.messages.worker import Plan, Transfer
from scheduler.events import Preempt
from scheduler.sequence import Sequence
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens

VOCAB = 32

#: Swapping is always the cheaper way unless a test says otherwise.
SLOW_PREFILL = 1.0


def prompt(length: int, stem: int = 0) -> list[int]:
    return [(stem * 11 + i * 3 + i // 8) % VOCAB for i in range(length)]


def expected(tokens: list[int], max_tokens: int, longest: int = 1000) -> list[int]:
    return expected_tokens(tokens, SamplingParams(), 0, longest, max_tokens, VOCAB)


#: A block takes longer than a forward would wait for, so it comes beside the forwards.
SLOW_LINK = 5e7


def manual_driver(**numbers: object) -> CoreDriver:
    """One seat, and copies are done only when the test says so."""
    defaults: dict[str, object] = {
        "num_blocks": 20,
        "block_size": 4,
        "num_swap_slots": 16,
        "prefill_tok_s": SLOW_PREFILL,
        "max_num_seqs": 1,
        "scheduling_policy": "priority",
    }
    driver = CoreDriver(None, **defaults | numbers)
    driver.auto_transfers = False
    return driver


def preempt(driver: CoreDriver, key: SequenceKey, kind: VictimKind = "swap", num_blocks: int = 100) -> tuple[Transfer, ...]:
    """Makes it yield, and an urgent request takes its seat until `let_back`. Returns the copies ordered."""
    before = len(driver.plans)
    driver.add([VOCAB - 1, number_of(driver)], max_tokens=30, priority=-1)
    driver.handle(Preempt(key, kind, num_blocks))
    driver.turn()
    return tuple(transfer for plan in driver.plans[before:] for transfer in plan.transfers)


def number_of(driver: CoreDriver) -> int:
    return len(driver.outputs)


def let_back(driver: CoreDriver) -> None:
    """The urgent request goes, and with the next turn the preempted sequence may come back."""
    while driver.answer():
        pass
    for key, sequence in list(driver.core.sequences.items()):
        if sequence.priority < 0:
            driver.abort(key)


def finish_all(driver: CoreDriver) -> None:
    let_back(driver)
    driver.auto_transfers = True
    carry_out_all(driver)
    driver.run()


def out_of(transfers: tuple[Transfer, ...]) -> list[int]:
    return [transfer.from_id for transfer in transfers if transfer.to_tier == "arena"]


def carry_out_all(driver: CoreDriver, *, ok: bool = True) -> None:
    while driver.worker.transfers:
        driver.worker.carry_out(driver.worker.transfers[0], driver.core.config.epoch, ok=ok)
    driver.tell_transfers()


def sequence_of(driver: CoreDriver, key: SequenceKey) -> Sequence:
    return driver.core.sequences[key]


def places(driver: CoreDriver, key: SequenceKey) -> str:
    """For each block of the sequence: d on the device, a in the arena, > arriving."""
    sequence = sequence_of(driver, key)
    return "".join("a" if block == NONE else ">" if (0, index) in sequence.arriving else "d" for index, block in enumerate(sequence.tables[0]))


def assert_nothing_held(driver: CoreDriver) -> None:
    core = driver.core
    assert (core.memory.pool.num_used, core.swapping.swap.num_used, len(core.swapping.transfers)) == (0, 0, 0)


def start(driver: CoreDriver, tokens: list[int], max_tokens: int = 20, steps: int = 1) -> SequenceKey:
    key = driver.add(tokens, max_tokens=max_tokens, priority=1)
    for _ in range(steps):
        driver.step()
    return key


def come_back_at_once(driver: CoreDriver) -> tuple[SequenceKey, Plan]:
    """A preempted sequence whose copies take little of a step, and the plan that brings it back."""
    key = start(driver, prompt(14))
    preempt(driver, key)
    carry_out_all(driver)
    let_back(driver)
    driver.turn()
    return key, driver.plans[-1]
