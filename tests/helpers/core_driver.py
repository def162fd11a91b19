"""Drives a `SchedulerCore`, behind its keeper, with a `FakeWorker` and a fake clock, checking every invariant after every event.

Workers can be lost and come back, the core can fail, and a scheduler can be replaced by a new one that knows only what
lies in the KV directory and what frontends send again; what the client has received must stay free of gaps throughout.
One worker stands for all ranks of a group: each says the same of a plan, in its own time and in the order of the plans.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import msgspec

from kvstore.kv_directory import directory_bytes
from pagemill.ids import pack_ids
from pagemill.keys import prefix_keys, root_key
from pagemill.messages.frontend import AbortRequest, AddRequest, FinishRequest, Rejection, SequenceOutput, StatsSnapshot, StepOutput
from pagemill.messages.sequences import Limits, SamplingParams, SequenceKey
from pagemill.messages.worker import InstallRow, Plan, RowMissing, StepDone
from scheduler.core import SchedulerCore
from scheduler.core_config import CoreConfig
from scheduler.events import Adopt, Distrust, Effect, Event, Turn
from scheduler.invariants import check
from scheduler.keeper import CoreKeeper
from scheduler.surviving_kv import SurvivingKv
from tests.helpers.fake_worker import FakeWorker

#: From one scheduler's first epoch to the next one's.
_EPOCHS = 1 << 20

Answer = StepDone | RowMissing

ROOT = root_key(b"model", b"", b"domain")


class CoreDriver:
    """One scheduler, one worker (of one or several ranks), one client. `outputs` and `finished` are what the client has received."""

    def __init__(self, config: CoreConfig | None = None, **numbers: object) -> None:
        config = self._config = config or CoreConfig(**numbers)  # type: ignore[arg-type]
        self.requests: dict[SequenceKey, AddRequest] = {}  #: what the client has asked for and has not seen the end of
        self._memory = memoryview(bytearray(directory_bytes(config.num_blocks, config.num_swap_slots)))
        self._pool_incarnation = 0
        self.failure: Exception | None = None  #: why the core failed last; only one that is expected
        self.expects_failure = False
        self.worker = self._new_worker()
        self.now = 0.0
        self.keeper = self._new_keeper(config.epoch)
        self._kv = SurvivingKv(self._memory)
        self.outputs: dict[SequenceKey, list[int]] = {}
        self.finished: dict[SequenceKey, SequenceOutput] = {}
        self.rejected: dict[SequenceKey, Rejection] = {}
        self.snapshots: list[StatsSnapshot] = []
        self.in_flight: list[Answer] = []  #: rank 0's answers, which the core has not been given by all ranks yet, oldest first
        self.num_told = [0] * config.num_workers  #: by rank, how many of these the core has been given by it
        self.distrust: Distrust | None = None  #: what the core said of the present workers
        self.auto_transfers = True  #: background copies are done as soon as their plan is; else `transfer` does them
        self.plans: list[Plan] = []
        self.log: list[tuple[float, Event, list[Effect]]] = []
        self._next_request = 0
        self.worker_back()

    @property
    def core(self) -> SchedulerCore:
        """The present one; there must be one."""
        assert self.keeper.core is not None
        return self.keeper.core

    def handle(self, event: Event) -> list[Effect]:
        self.now += 0.01
        if isinstance(event, FinishRequest | AbortRequest):
            self.requests.pop(event.key, None)
        effects = self.keeper.handle(event, self.now)
        self.log.append((self.now, event, effects))
        self._carry_out(effects)
        return effects

    # --- disasters -------------------------------------------------------------------------------------

    def lose_worker(self) -> None:
        """The worker is gone with its pool and all that was in flight. What it was writing into the arena is rubbish."""
        self._forget_answers()
        self.distrust = None
        arena = self.worker.arena
        for transfer in self.worker.transfers:
            if transfer.to_tier == "arena":
                arena[transfer.to_id] = [(-4, -4, -4)] * self._config.block_size
        worker = self._new_worker()
        worker.arena, worker.fail, worker.defer = arena, self.worker.fail, self.worker.defer
        worker.fail_copy, worker.cannot_copy = self.worker.fail_copy, self.worker.cannot_copy
        self.worker = worker
        self._pool_incarnation += 1
        self._carry_out(self.keeper.workers_lost(self.now))

    def worker_back(self) -> None:
        """Another worker is ready, and there is a core again."""
        self._carry_out(self.keeper.workers_ready(self._config, self._kv.open(self._config, self._pool_incarnation), self.now))

    def adoptable(self) -> Adopt:
        """What another scheduler would adopt now."""
        adopt = SurvivingKv(self._memory).open(self._config, self._pool_incarnation)
        assert adopt is not None
        return adopt

    def restart_scheduler(self) -> None:
        """A new scheduler: it meets the old worker, adopts what the directory says, and the client sends everything again."""
        self._forget_answers()
        self.keeper = self._new_keeper((self.keeper.epoch // _EPOCHS + 1) * _EPOCHS)
        self._kv = SurvivingKv(self._memory)
        self.worker_back()
        for key, request in list(self.requests.items()):
            self.handle(msgspec.structs.replace(request, output_ids=pack_ids(self.outputs[key]), resubmitted=True))

    def _new_worker(self) -> FakeWorker:
        config = self._config
        return FakeWorker(config.num_blocks, config.block_size, config.groups, num_slots=config.num_swap_slots, num_ranks=config.num_workers)

    def _new_keeper(self, epoch: int) -> CoreKeeper:
        keeper = CoreKeeper(epoch, max_num_held=1000)
        keeper.on_core, keeper.on_failure = lambda core: self._kv.follow(core), self._on_failure
        return keeper

    def _on_failure(self, error: Exception) -> None:
        """As the shell does it; a failure that nobody planted fails the test."""
        if not self.expects_failure:
            raise error
        self.failure = error
        self._kv.disown()

    def _forget_answers(self) -> None:
        self.in_flight.clear()
        self.num_told = [0] * self._config.num_workers

    def _carry_out(self, effects: list[Effect]) -> None:
        if self.keeper.core is not None:
            check(self.keeper.core)
        for effect in effects:
            match effect:
                case InstallRow():
                    self.worker.meet(effect.epoch)
                    self.worker.install(effect)
                case Plan():
                    self.worker.meet(effect.epoch)
                    assert sum(answer.epoch == effect.epoch for answer in self.in_flight) < self._config.max_plans_in_flight
                    self.plans.append(effect)
                    self.in_flight.append(self.worker.run(effect))
                    while self.auto_transfers and self.worker.transfers:
                        self.worker.carry_out(self.worker.transfers[0], effect.epoch)
                case StepOutput():
                    self._receive(effect)
                case StatsSnapshot():
                    self.snapshots.append(effect)
                case Distrust():
                    assert self.distrust is None, "it is said once"
                    self.distrust = effect
                    self._kv.disown()

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        priority: int = 0,
        sampling: SamplingParams | None = None,
        cached: bool = True,
        seed: int = 0,
        root: bytes = ROOT,
        output: Sequence[int] = (),
        arrival: float | None = None,
        frontend: int = 0,
        max_queue_s: float = 0.0,
    ) -> SequenceKey:
        """Adds a request and returns its key. Requests arrive in the order in which they are added unless `arrival` is given."""
        self._next_request += 1
        key = SequenceKey(frontend, 1, self._next_request, 0)
        keys = prefix_keys(root, array("i", prompt), self._config.block_size) if cached else b""
        self.outputs[key] = list(output)
        self.requests[key] = AddRequest(
            key=key,
            request_id=f"r{self._next_request}",
            prompt_ids=pack_ids(list(prompt)),
            output_ids=pack_ids(list(output)),
            sampling=sampling or SamplingParams(),
            limits=Limits(max_tokens, max_queue_s),
            seed=seed,
            priority=priority,
            arrival=float(self._next_request) if arrival is None else arrival,
            root=root if cached else b"",
            prefix_keys=keys,
        )
        self.handle(self.requests[key])
        return key

    def abort(self, key: SequenceKey) -> None:
        self.handle(AbortRequest(key))

    def finish(self, key: SequenceKey, keep: int) -> None:
        self.handle(FinishRequest(key, "stop", keep))

    def turn(self) -> list[Effect]:
        return self.handle(Turn())

    def answer(self) -> bool:
        """Lets the oldest plan in flight be done, by all ranks that have not said so. False if there is none."""
        if not self.in_flight:
            return False
        for rank in [rank for rank, num_told in enumerate(self.num_told) if not num_told]:
            self.answer_of(rank)
        return True

    def answer_of(self, rank: int, alter: Callable[[Answer], Answer] = lambda answer: answer) -> bool:
        """Lets one rank answer the oldest plan that it has not answered, as it should or otherwise. False if there is none."""
        if self.num_told[rank] == len(self.in_flight):
            return False
        answer = self.in_flight[self.num_told[rank]]
        self.num_told[rank] += 1
        if all(self.num_told):
            self.in_flight.pop(0)
            self.num_told = [num_told - 1 for num_told in self.num_told]
        told_before = self.worker.told_before_plan
        for done in [done for done in self.worker.done if done.rank == rank and told_before.get(done.transfer_ids[0]) == answer.plan_id]:
            self.worker.done.remove(done)
            self.handle(done)
        self.handle(alter(msgspec.structs.replace(answer, rank=rank)))
        return True

    def tell_transfers(self) -> bool:
        """Tells the core of all copies that are done. False if there is none."""
        told = bool(self.worker.done)
        while self.worker.done:
            self.handle(self.worker.done.pop(0))
        return told

    def step(self) -> bool:
        """One turn and its answers. False if there was nothing to do."""
        self.turn()
        told = self.tell_transfers()
        return self.answer() or told

    def run(self, limit: int = 10_000) -> int:
        """Steps until nothing is left to do; returns how many steps that took."""
        for steps in range(limit):
            if not self.step():
                if self.worker.transfers:
                    self.worker.carry_out(self.worker.transfers[0], self.core.config.epoch)
                    continue
                assert not self.core.sequences, f"stuck with {list(self.core.sequences.values())}"
                return steps
        raise AssertionError(f"still busy after {limit} steps")

    def _receive(self, message: StepOutput) -> None:
        for output in message.outputs:
            tokens = self.outputs[output.key]
            assert output.key not in self.finished, "output after the end"
            assert output.first_index == len(tokens), "a gap or a repetition in the output"
            tokens.extend(output.token_ids)
            if output.finish_reason is not None:
                self.finished[output.key] = output
                self.requests.pop(output.key, None)
        for rejection in message.rejections:
            self.rejected[rejection.key] = rejection
            self.requests.pop(rejection.key, None)


def break_core(driver: CoreDriver, name: str) -> None:
    """Its next call of `handle` for an event of this name raises."""
    core, handle = driver.core, driver.core.handle

    def failing(event: Event, now: float) -> list[Effect]:
        if type(event).__name__ == name:
            raise ZeroDivisionError("planted")
        return handle(event, now)

    core.handle = failing  # type: ignore[method-assign]
    driver.expects_failure = True
