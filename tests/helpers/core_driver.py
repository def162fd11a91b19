"""Drives a `SchedulerCore` with a `FakeWorker` and a fake clock, checking every invariant after every event."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pagemill.keys import prefix_keys, root_key
from pagemill.messages import (
    AbortRequest,
    AddRequest,
    Effect,
    Event,
    FinishRequest,
    InstallRow,
    Limits,
    Plan,
    Rejection,
    RowMissing,
    SamplingParams,
    SequenceKey,
    SequenceOutput,
    StatsSnapshot,
    StepDone,
    StepOutput,
    Turn,
    pack_ids,
)
from scheduler.core import SchedulerCore
from scheduler.core_config import CoreConfig
from scheduler.invariants import check
from tests.helpers.fake_worker import FakeWorker

ROOT = root_key(b"model", b"", b"domain")


class CoreDriver:
    """One core, one worker, one client. `outputs` and `finished` are what the client has received."""

    def __init__(self, config: CoreConfig | None = None, **numbers: object) -> None:
        self.core = SchedulerCore(config or CoreConfig(**numbers))  # type: ignore[arg-type]
        config = self.core.config
        self.worker = FakeWorker(config.num_blocks, config.block_size, config.num_groups, num_slots=config.num_swap_slots)
        self.now = 0.0
        self.outputs: dict[SequenceKey, list[int]] = {}
        self.finished: dict[SequenceKey, SequenceOutput] = {}
        self.rejected: dict[SequenceKey, Rejection] = {}
        self.snapshots: list[StatsSnapshot] = []
        self.in_flight: list[StepDone | RowMissing] = []  #: answers the core has not been given yet, oldest first
        self.auto_transfers = True  #: background copies are done as soon as their plan is; else `transfer` does them
        self.plans: list[Plan] = []
        self.log: list[tuple[float, Event, list[Effect]]] = []
        self._next_request = 0

    def handle(self, event: Event) -> list[Effect]:
        self.now += 0.01
        effects = self.core.handle(event, self.now)
        self.log.append((self.now, event, effects))
        check(self.core)
        for effect in effects:
            match effect:
                case InstallRow():
                    self.worker.install(effect)
                case Plan():
                    assert len(self.in_flight) < self.core.config.max_plans_in_flight
                    self.plans.append(effect)
                    self.in_flight.append(self.worker.run(effect))
                    while self.auto_transfers and self.worker.transfers:
                        self.worker.carry_out(self.worker.transfers[0], effect.epoch)
                case StepOutput():
                    self._receive(effect)
                case StatsSnapshot():
                    self.snapshots.append(effect)
        return effects

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
    ) -> SequenceKey:
        """Adds a request and returns its key. Requests arrive in the order in which they are added unless `arrival` is given."""
        self._next_request += 1
        key = SequenceKey(frontend, 1, self._next_request, 0)
        keys = prefix_keys(root, array("i", prompt), self.core.config.block_size) if cached else b""
        self.outputs[key] = list(output)
        self.handle(
            AddRequest(
                key=key,
                request_id=f"r{self._next_request}",
                prompt_ids=pack_ids(list(prompt)),
                output_ids=pack_ids(list(output)),
                sampling=sampling or SamplingParams(),
                limits=Limits(max_tokens),
                seed=seed,
                priority=priority,
                arrival=float(self._next_request) if arrival is None else arrival,
                root=root if cached else b"",
                prefix_keys=keys,
            )
        )
        return key

    def abort(self, key: SequenceKey) -> None:
        self.handle(AbortRequest(key))

    def finish(self, key: SequenceKey, keep: int) -> None:
        self.handle(FinishRequest(key, "stop", keep))

    def turn(self) -> list[Effect]:
        return self.handle(Turn())

    def answer(self) -> bool:
        """Lets the oldest plan in flight be done. False if there is none."""
        if not self.in_flight:
            return False
        answer = self.in_flight.pop(0)
        for done in [done for done in self.worker.done if self.worker.told_before_plan.get(done.transfer_ids[0]) == answer.plan_id]:
            self.worker.done.remove(done)
            self.handle(done)
        self.handle(answer)
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
        for rejection in message.rejections:
            self.rejected[rejection.key] = rejection
