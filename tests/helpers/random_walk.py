"""A random walk over the core: a random small world, then any events in any order, every invariant after each.

The fake worker reads every history back from its pool before it draws, so a walk also proves that no block
is overwritten while somebody needs it, that every copy brings the right bytes to the right place, and that each
request ends with exactly the tokens it would have had alone. Copies are done late, out of order, or fail. All
follows from the seed. `happened` says how often each thing worth knowing of came about, so that a walk can be
seen not to have walked past it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec

from pagemill.ids import NO_PLAN, PlanId, RowId
from pagemill.messages.control import PeerLost
from pagemill.messages.decisions import VictimKind
from pagemill.messages.frontend import AbortRequest, FinishRequest
from pagemill.messages.sequences import KvGroup, SamplingParams, SequenceKey
from pagemill.messages.worker import InstallRow, Plan, RowMissing, StepDone, TransferDone
from scheduler.core_config import CoreConfig
from scheduler.events import Effect, Event, Preempt
from scheduler.policies import load_policies
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens, slot_of

VOCAB = 32
POLICIES = sorted(load_policies())


def geometries(block_size: int) -> list[tuple[KvGroup, ...]]:
    """One full group, two, and full ones beside windows of less than a block, of one block, of one and a half; and windows alone."""
    full, half = KvGroup(), max(1, block_size // 2)
    beside_full = [(full, KvGroup(window)) for window in (half, block_size, block_size + half)]
    return [(full,), (full,), (full, full), *beside_full, (KvGroup(block_size + half), full), (KvGroup(2 * block_size + 1), KvGroup(half))]


class Walk:
    """One walk: a random small world, then random events in it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        block_size = self.random.choice((1, 2, 4, 8))
        self.driver = CoreDriver(
            CoreConfig(
                num_blocks=self.random.randint(4, self.random.choice((12, 24, 64))),
                block_size=block_size,
                groups=self.random.choice(geometries(block_size)),
                max_model_len=self.random.choice((16, 64, 256)),
                max_num_seqs=self.random.randint(1, 8),
                max_num_batched_tokens=self.random.choice((1, 3, 8, 64)),
                max_num_queued=self.random.choice((4, 8, 32)),
                scheduling_policy=self.random.choice(POLICIES),
                prefix_caching=self.random.random() < 0.8,
                num_swap_slots=self.random.choice((0, 1, 4, 16, 32, 64)),
                preemption=self.random.choice(("auto", "auto", "auto", "swap", "swap", "recompute")),
                max_plans_in_flight=self.random.choice((1, 2)),
                num_workers=self.random.choice((1, 1, 2, 3)),
                # Prices that make either way the cheaper one, and now this, now that.
                prefill_tok_s=self.random.choice((1.0, 1.0, 1e3, 1e9)),
                block_bytes=self.random.choice((1, 1 << 20)),
                # A slow link moves one block at a time.
                swap_out_bytes_s=self.random.choice((1e6, 4e9)),
                swap_in_bytes_s=self.random.choice((1e6, 4e9)),
            )
        )
        self._reads_priority = self.driver.core.policy.READS_PRIORITY
        self.longest = min(self.driver.core.config.max_model_len, self.driver.core.memory.capacity_tokens())
        self.driver.auto_transfers = self.random.random() < 0.3
        self._break_slots()
        #: Few prompt beginnings, so that prefixes are shared.
        self.stems = [[self.random.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
        self.asked: dict[SequenceKey, tuple[list[int], SamplingParams, int, int, int]] = {}
        self.ended_early: set[SequenceKey] = set()
        self.disasters: Counter[str] = Counter()
        weights: dict[Callable[[], object], float] = {
            self._add: 10,
            self.driver.turn: 38,
            self.driver.answer: 25,
            self._transfers: 15,
            self._preempt: 4,
            self._abort: 1,
            self._finish: 1,
            self._lose_row: 1,
            self._let_rows_fail: 0.3,
            self._let_rows_defer: 0.3,
            self._let_copies_fail: 0.3,
            self._let_rows_be: 0.6,
            self._stray: 0.8,
            self._say_again: 0.8,
            self._lose_worker: 0.3,
            self._restart_scheduler: 0.2,
            self._fail_core: 0.2,
        }
        if self.driver.core.config.num_workers > 1:
            weights |= {self._answer_of_one_rank: 30, self._let_ranks_disagree: 0.3}
        self._actions, self._weights = list(weights), list(weights.values())

    def run(self, num_events: int) -> int:
        driver = self.driver
        while len(driver.log) < num_events:
            self._event()
        self._let_rows_be()
        driver.auto_transfers = True
        driver.run(limit=20_000)
        self._check_outcomes()
        return len(driver.log)

    def _event(self) -> None:
        """Any of these, by weight."""
        (action,) = self.random.choices(self._actions, self._weights)
        action()

    def _lose_worker(self) -> None:
        """The worker dies; before another is ready, requests come and go."""
        driver = self.driver
        driver.lose_worker()
        for _ in range(self.random.randint(0, 3)):
            if driver.requests and self.random.random() < 0.3:
                key = self.random.choice(list(driver.requests))
                self.ended_early.add(key)
                driver.abort(key)
            else:
                self._add()
        driver.worker_back()
        self.disasters["workers lost"] += 1

    def _answer_of_one_rank(self) -> None:
        self.driver.answer_of(self.random.randrange(self.driver.core.config.num_workers))

    def _let_ranks_disagree(self) -> None:
        """One rank answers a plan otherwise than another: nothing of it is applied, and the group is replaced some time later."""
        driver, dice = self.driver, self.random
        if not driver.in_flight or driver.in_flight[0].epoch != driver.core.config.epoch:
            return
        for rank in dice.sample(range(len(driver.num_told)), len(driver.num_told)):
            if not driver.num_told[rank] and driver.distrust is None:
                driver.answer_of(rank, self._otherwise if any(driver.num_told) else lambda answer: answer)
        assert driver.distrust is not None
        for _ in range(dice.randint(0, 4)):
            assert not any(isinstance(effect, Plan) for effect in driver.turn())
            dice.choice((self._add, self._abort, self._transfers, self._preempt, driver.answer))()
        self._lose_worker()
        self.disasters["groups that disagreed"] += 1

    def _otherwise(self, answer: StepDone | RowMissing) -> StepDone | RowMissing:
        """What a rank may say that does not know what the others know."""
        dice = self.random
        if isinstance(answer, RowMissing):
            other = msgspec.structs.replace(answer, version=answer.version + 1)
            return dice.choice((other, StepDone(answer.epoch, answer.rank, answer.plan_id, (), {})))
        if not answer.results or dice.random() < 0.2:
            return RowMissing(answer.epoch, answer.rank, answer.plan_id, RowId(0), 1)
        index = dice.randrange(len(answer.results))
        result, others = answer.results[index], answer.results[:index]
        changed = [
            msgspec.structs.replace(result, version=result.version + 1),
            msgspec.structs.replace(result, token_ids=(VOCAB,)),
            msgspec.structs.replace(result, outcome="failed" if result.outcome == "accepted" else "accepted"),
        ]
        return msgspec.structs.replace(answer, results=(*others, *dice.choice([(), *((one,) for one in changed)]), *answer.results[index + 1 :]))

    def _say_again(self) -> None:
        """What a worker has said before it says once more: nobody listens."""
        driver = self.driver
        said = [event for _, event, _ in driver.log[-30:] if isinstance(event, StepDone | RowMissing | TransferDone)]
        if said:
            event, before = self.random.choice(said), driver.core.counters.num_dropped
            assert driver.handle(event) == []
            assert driver.core.counters.num_dropped > before

    def _restart_scheduler(self) -> None:
        self.driver.restart_scheduler()
        self.disasters["schedulers replaced"] += 1

    def _fail_core(self) -> None:
        """The core fails in the middle of the next event that confirms something, or plans."""
        driver, core = self.driver, self.driver.core

        def fail(*_: object) -> None:
            raise RuntimeError("planted")

        broken = self.random.choice((core.memory, core.steps))
        setattr(broken, "confirm" if broken is core.memory else "build", fail)
        driver.expects_failure = True
        driver.now += 200.0  # cores may not fail often
        for _ in range(3):
            driver.step()
            if driver.core is not core:
                self.disasters["cores failed"] += 1
                break
        else:  # nothing of the kind happened
            delattr(broken, "confirm" if broken is core.memory else "build")
        driver.expects_failure = False

    def _preempt(self) -> None:
        if self.driver.core.sequences:
            kinds: tuple[VictimKind, ...] = ("keep", "swap", "recompute")
            key = self.random.choice(list(self.driver.core.sequences))
            self.driver.handle(Preempt(key, self.random.choice(kinds), self.random.choice((0, 1, 2, 100))))

    def _abort(self) -> None:
        if self.driver.core.sequences:
            key = self.random.choice(list(self.driver.core.sequences))
            self.ended_early.add(key)
            self.driver.abort(key)

    def _finish(self) -> None:
        if self.driver.core.sequences:
            key = self.random.choice(list(self.driver.core.sequences))
            self.ended_early.add(key)
            self.driver.finish(key, self.random.randint(0, len(self.driver.outputs[key])))

    def _lose_row(self) -> None:
        rows = self.driver.worker.rows
        if rows:
            rows.pop(self.random.choice(list(rows)))

    def _let_rows_fail(self) -> None:
        self.driver.worker.fail = lambda row, version: (row + version) % 11 == 0

    def _let_rows_defer(self) -> None:
        self.driver.worker.defer = lambda row, version: (row + version) % 3 == 0

    def _break_slots(self) -> None:
        """In one world of four some slots, or all, can never be read, written, or either."""
        dice, num_slots = self.random, self.driver.core.config.num_swap_slots
        if num_slots and dice.random() < 0.25:
            broken = set(dice.sample(range(num_slots), dice.choice((1, 1 + num_slots // 2, num_slots))))
            tiers = dice.choice((("arena",), ("device",), ("arena", "device")))
            self.driver.worker.cannot_copy = lambda transfer: transfer.from_tier in tiers and slot_of(transfer) in broken

    def _let_copies_fail(self) -> None:
        self.driver.worker.fail_copy = lambda transfer: transfer.transfer_id % 5 == 0

    def _let_rows_be(self) -> None:
        self.driver.worker.fail = self.driver.worker.defer = lambda row, version: False
        self.driver.worker.fail_copy = lambda transfer: False

    def _transfers(self) -> None:
        """Some copies are done, in any order; rarely one fails. The core hears of them now or later."""
        driver, dice = self.driver, self.random
        while driver.worker.transfers and dice.random() < 0.7:
            driver.worker.carry_out(dice.choice(driver.worker.transfers), driver.core.config.epoch, ok=dice.random() < 0.95)
        dice.shuffle(driver.worker.done)
        while driver.worker.done and dice.random() < 0.8:
            driver.handle(driver.worker.done.pop(0))

    def _add(self) -> None:
        dice = self.random
        stem = dice.choice(self.stems)
        prompt = stem[: dice.randint(1, len(stem))] + [dice.randrange(VOCAB) for _ in range(dice.choice((0, 0, 1, 5)))]
        if dice.random() < 0.95:  # few that can never fit
            prompt = prompt[: max(1, self.longest * dice.randint(1, 4) // 4 - 1)]
        sampling = SamplingParams(stop_token_ids=tuple(dice.sample(range(VOCAB), dice.choice((0, 0, 1, 3)))), min_tokens=dice.choice((0, 0, 2)))
        max_tokens = dice.choice((1, 2, 8, 40))
        seed = dice.randrange(2)
        output: list[int] = []
        if dice.random() < 0.1:  # as a frontend resubmits what it had received from an earlier scheduler
            whole = expected_tokens(prompt, sampling, seed, self.longest, max_tokens, VOCAB)
            output = whole[: dice.randint(0, max(0, len(whole) - 1))]
        priority = dice.choice((0, 0, 1, 2)) if self._reads_priority else 0
        #: Frontends tokenize in parallel, and resubmit: requests do not come in the order in which they arrived.
        arrival = len(self.asked) + dice.choice((0.0, 0.0, -3.5, -100.5))
        cached = dice.random() < 0.9
        key = self.driver.add(prompt, max_tokens=max_tokens, sampling=sampling, seed=seed, priority=priority, cached=cached, output=output, arrival=arrival)
        self.asked[key] = (prompt, sampling, seed, max_tokens, len(output))

    def _stray(self) -> None:
        """Late, foreign or unknown events change nothing."""
        driver = self.driver
        before = len(driver.core.sequences)
        unknown = SequenceKey(0, 1, 10**6, 0)
        match self.random.randrange(6):
            case 0:
                driver.abort(unknown)
            case 1:
                driver.finish(unknown, 0)
            case 2:
                driver.handle(StepDone(driver.core.config.epoch - 1, 0, driver.plans[-1].plan_id if driver.plans else PlanId(1), (), {}))
            case 3:
                driver.handle(TransferDone(driver.core.config.epoch, 0, (10**6, 10**6 + 1), True, 0.1))
            case 4:
                driver.handle(PeerLost("frontend", 5, 1))
            case 5:
                nobody = self.random.choice((-1, driver.core.config.num_workers, 2**62))
                driver.handle(StepDone(driver.core.config.epoch, nobody, driver.in_flight[0].plan_id if driver.in_flight else PlanId(1), (), {}))
                for transfer in driver.core.swapping.transfers.in_flight()[:1]:
                    driver.handle(TransferDone(driver.core.config.epoch, nobody, (transfer.transfer_id,), False, 0.1))
        assert len(driver.core.sequences) == before

    def _check_outcomes(self) -> None:
        driver = self.driver
        for key, (prompt, sampling, seed, max_tokens, _) in self.asked.items():
            if key in driver.rejected:
                continue
            expected = expected_tokens(prompt, sampling, seed, self.longest, max_tokens, VOCAB)
            got = driver.outputs[key]
            if key in self.ended_early or driver.finished[key].finish_reason == "error":
                assert got == expected[: len(got)]
            else:
                assert got == expected
        pool = driver.core.memory.pool
        assert (pool.num_used, pool.num_fenced) == (0, 0), "blocks leaked"
        swap = driver.core.swapping.swap
        assert (swap.num_used, len(driver.core.swapping.transfers)) == (0, 0), "swap slots or transfers leaked"
        assert not driver.core.memory.announced(), "announcements leaked"
        assert driver.core.rows.accounted()[1] == {}, "rows leaked"

    def happened(self) -> Counter[str]:
        """What came about so far, by name."""
        core, counts = self.driver.core, Counter[str]()
        for _, event, effects in self.driver.log:
            counts["events"] += 1
            _count_event(event, counts)
            for effect in effects:
                _count_effect(effect, counts)
        for decision in core.preemption.decisions.newest(10**9):
            for victim in decision.victims:
                if victim.yielded:
                    counts[f"yielded: {victim.kind}, for {decision.reason}" + ("" if victim.was_running else ", of one that did not run")] += 1
        counts |= self.disasters
        counts["requests"] = len(self.asked)
        counts["requests refused"] = len(self.driver.rejected)
        counts["came back after yielding"] = sum(core.counters.resume_seconds.values())
        counts["copied ahead of need"] = core.swapping.transfers.num_early_copies
        counts["tokens found in the arena"] = core.swapping.num_arena_hit_tokens
        counts["tokens found on the device"] = core.memory.num_hit_tokens
        counts["tokens computed"] = core.counters.tokens_computed
        counts["tokens computed again"] = core.counters.tokens_recomputed
        counts["messages dropped"] = core.counters.num_dropped
        return counts


def _count_event(event: Event, counts: Counter[str]) -> None:
    match event:
        case StepDone():
            for result in event.results:
                counts[f"slices answered: {result.outcome}"] += 1
        case TransferDone():
            counts["copies done" if event.ok else "copies failed"] += len(event.transfer_ids)
        case RowMissing():
            counts["plans refused for a missing row"] += 1
        case AbortRequest() | FinishRequest() | Preempt():
            counts[f"events: {type(event).__name__}"] += 1
        case _:
            pass


def _count_effect(effect: Effect, counts: Counter[str]) -> None:
    match effect:
        case Plan():
            counts["plans"] += 1
            counts["plans without slices"] += not effect.slices
            counts["slices"] += len(effect.slices)
            counts["slices after a plan in flight"] += sum(piece.after_plan != NO_PLAN for piece in effect.slices)
            for transfer in effect.transfers:
                counts["copies out" if transfer.to_tier == "arena" else "copies in"] += 1
                counts["copies out that a forward waits for"] += transfer.needed_by != NO_PLAN
        case InstallRow():
            counts["rows installed"] += 1
        case _:
            pass
