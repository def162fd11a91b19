"""The whole engine in one process, without sockets or HTTP: the real core drives one worker, real or simulated.

For benchmarks and for tests of what both do together. The core plans as far ahead as it may, and the worker gets
plan k+1 when the core has learned what became of plan k: the order of the server, with only the wire missing.
Must not know what kind of worker it has: see `offline` for one with a model and `simulation` for one that only counts.

    key = engine.add(prompt_ids, max_tokens=64)
    engine.run()
    engine.outputs[key].token_ids
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from pagemill.keys import prefix_keys, root_key
from pagemill.messages.decisions import VictimKind
from pagemill.messages.frontend import AbortRequest, AddRequest, SequenceOutput, StatsSnapshot, StepOutput
from pagemill.messages.sequences import FinishReason, Limits, SamplingParams, SequenceKey, TokenLogprobs
from pagemill.messages.worker import InstallRow, Plan, RowMissing, SchedulerToWorker, StepDone, TransferDone, WorkerToScheduler
from scheduler.core import SchedulerCore
from scheduler.events import Distrust, Effect, Event, Preempt, Turn
from scheduler.invariants import check

GREEDY = SamplingParams(temperature=0.0)
#: Everything here is one tenant's.
_ROOT = root_key(b"offline", b"", b"")


class AnyWorker(Protocol):
    """What the engine asks of a worker, real or not."""

    def handle(self, message: SchedulerToWorker) -> Sequence[WorkerToScheduler]:
        """The answers to one message, in order; the last one to a plan is its acknowledgement."""

    def poll(self) -> Sequence[TransferDone]:
        """What has been done in the background."""


@dataclass
class Output:
    """What one sequence has produced so far. Times are the engine's clock."""

    added_at: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.added_at

    @property
    def gaps_s(self) -> list[float]:
        """Between consecutive tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


class Engine:
    """One core, one worker, one client. `pass_time` lets the clock reach a given time, or less if there may be news before."""

    def __init__(
        self, core: SchedulerCore, worker: AnyWorker, clock: Callable[[], float], pass_time: Callable[[float], None], *, check_invariants: bool = False
    ) -> None:
        self.core, self.worker, self.clock = core, worker, clock
        self.outputs: dict[SequenceKey, Output] = {}
        self.seconds: dict[str, float] = {}  #: of the worker's steps, by part
        self.core_s = 0.0  #: spent in the core
        self.copy_s = 0.0  #: spent copying, in the background or not
        self.num_steps = 0
        self.num_plans_in_flight = 0
        self.transfers: set[int] = set()  #: ids of those in flight
        self.snapshot: StatsSnapshot | None = None  #: the newest
        self._pass_time = pass_time
        self._check_invariants = check_invariants
        self._outbox: deque[InstallRow | Plan] = deque()  #: decided by the core, not yet known to the worker

    @property
    def num_preemptions(self) -> int:
        """Of all sequences so far."""
        return sum(output.num_preemptions for output in self.outputs.values())

    def add(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        priority: int = 0,
        prefix_caching: bool = True,
    ) -> SequenceKey:
        """Adds one sequence. Raises ValueError if the core refuses it."""
        key = SequenceKey(frontend=0, incarnation=1, request=len(self.outputs), choice=0)
        prompt = array("i", prompt_ids)
        self.outputs[key] = Output(self.clock())
        self._handle(
            AddRequest(
                key=key,
                request_id=f"offline-{key.request}",
                prompt_ids=prompt.tobytes(),
                output_ids=b"",
                sampling=sampling,
                limits=Limits(max_tokens),
                seed=seed,
                priority=priority,
                arrival=float(key.request),
                root=_ROOT if prefix_caching else b"",
                prefix_keys=prefix_keys(_ROOT, prompt, self.core.config.block_size) if prefix_caching else b"",
            )
        )
        return key

    def abort(self, key: SequenceKey) -> None:
        self._handle(AbortRequest(key))

    def preempt(self, key: SequenceKey, kind: VictimKind, num_blocks: int) -> None:
        """Makes a running sequence yield that many blocks at the next turn, at most all it can."""
        self._handle(Preempt(key, kind, num_blocks))

    def plan(self) -> bool:
        """The first half of a step: plans as far ahead as the core may. False if there is no plan after that."""
        self._receive(self.worker.poll())
        while self.num_plans_in_flight < self.core.config.max_plans_in_flight:
            before = self.num_plans_in_flight
            self._handle(Turn())
            if self.num_plans_in_flight == before:
                break
        return self.num_plans_in_flight > 0

    def apply(self) -> None:
        """The second half: lets the worker carry out the oldest plan and gives the core the results."""
        num_done = self.num_steps
        while self.num_steps == num_done:
            if not self._outbox:
                raise RuntimeError("no plan is in flight")
            self._receive(self.worker.handle(self._outbox.popleft()))

    def wait(self, until: float = math.inf) -> None:
        """Lets time pass until a transfer is done or the clock says `until`."""
        if not self.transfers and math.isinf(until):
            raise RuntimeError("nothing is under way that could end")
        while not (done := self.worker.poll()) and self.clock() < until:
            self._pass_time(until)
        self._receive(done)

    def step(self, until: float = math.inf) -> bool:
        """A plan and its results; or a wait, if only transfers are under way or something is going to happen at `until`.

        False if there is nothing to do and nothing to wait for.
        """
        if self.plan():
            self.apply()
        elif self.transfers or not math.isinf(until):
            self.wait(until)
        else:
            return False
        return True

    def run(self) -> None:
        """Steps until every sequence has finished. Raises RuntimeError if the core stops planning before that."""
        while self.step():
            pass
        self.require_idle()

    def require_idle(self) -> None:
        """Raises RuntimeError if sequences are left."""
        if self.core.sequences:
            raise RuntimeError(f"{len(self.core.sequences)} sequences are left and the core plans nothing")

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, sampling: SamplingParams = GREEDY) -> list[list[int]]:
        """Runs all prompts at once and returns their output token ids."""
        keys = [self.add(prompt, max_tokens=max_tokens, sampling=sampling) for prompt in prompts]
        self.run()
        return [self.outputs[key].token_ids for key in keys]

    def _receive(self, messages: Sequence[WorkerToScheduler]) -> None:
        """Gives the core what the worker said."""
        for message in messages:
            if isinstance(message, StepDone | RowMissing):
                self.num_steps += 1
                self.num_plans_in_flight -= 1
                for part, seconds in message.seconds.items() if isinstance(message, StepDone) else ():
                    self.seconds[part] = self.seconds.get(part, 0.0) + seconds
            elif isinstance(message, TransferDone):
                self.transfers.difference_update(message.transfer_ids)
                self.copy_s += message.seconds
            else:
                raise RuntimeError(f"the worker says {message!r} out of turn")
            self._handle(message)

    def _handle(self, event: Event) -> None:
        started = self.clock()
        effects = self.core.handle(event, started)
        self.core_s += self.clock() - started
        if self._check_invariants:
            check(self.core)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case InstallRow() | Plan():
                self._outbox.append(effect)
                if isinstance(effect, Plan):
                    self.num_plans_in_flight += 1
                    self.transfers.update(transfer.transfer_id for transfer in effect.transfers)
            case StepOutput():
                if effect.rejections:
                    raise ValueError(f"the core refused a sequence: {effect.rejections[0]}")
                for output in effect.outputs:
                    self._take(output)
            case StatsSnapshot():
                self.snapshot = effect
            case Distrust():
                raise RuntimeError(effect.reason)

    def _take(self, message: SequenceOutput) -> None:
        output = self.outputs[message.key]
        if message.first_index != len(output.token_ids):
            raise RuntimeError(f"{message.key}: output {message.first_index} follows {len(output.token_ids)} tokens")
        output.token_ids += message.token_ids
        output.logprobs += message.logprobs
        output.token_times += [self.clock()] * len(message.token_ids)
        output.finish_reason, output.error = message.finish_reason, message.error
        output.num_cached_tokens, output.num_preemptions = message.num_cached_tokens, message.num_preemptions
