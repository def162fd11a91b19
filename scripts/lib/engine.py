"""The whole engine in one process, without sockets or HTTP: the real core drives one worker, real or simulated.

For benchmarks and for tests of what both do together. Every effect is carried out at once, so a step here
does exactly what a step of the server does, minus the wire. Must not know what kind of worker it has: see
`offline` for one with a model and `simulation` for one that only counts.

    key = engine.add(prompt_ids, max_tokens=64)
    engine.run()
    engine.outputs[key].token_ids
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagemill.keys import prefix_keys, root_key
from pagemill.messages import (
    AddRequest,
    Effect,
    Event,
    FinishReason,
    InstallRow,
    Limits,
    Plan,
    RowMissing,
    SamplingParams,
    SchedulerToWorker,
    SequenceKey,
    SequenceOutput,
    StepDone,
    StepOutput,
    TokenLogprobs,
    Turn,
    WorkerToScheduler,
)
from scheduler.core import SchedulerCore
from scheduler.invariants import check

GREEDY = SamplingParams(temperature=0.0)
#: Everything here is one tenant's.
_ROOT = root_key(b"offline", b"", b"")


class AnyWorker(Protocol):
    """What the engine asks of a worker."""

    def handle(self, message: SchedulerToWorker) -> WorkerToScheduler | None:
        """The reply to one message, if it has one."""


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


class Engine:
    """One core, one worker, one client."""

    def __init__(self, core: SchedulerCore, worker: AnyWorker, clock: Callable[[], float], *, check_invariants: bool = False) -> None:
        self.core, self.worker, self.clock = core, worker, clock
        self.outputs: dict[SequenceKey, Output] = {}
        self.seconds: dict[str, float] = {}  #: of the worker, by part
        self.num_steps = 0
        self._check_invariants = check_invariants
        self._reply: StepDone | RowMissing | None = None

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

    def plan(self) -> bool:
        """The first half of a step: plans it and lets the worker do it, while the core does not yet know the results."""
        self._handle(Turn())
        return self._reply is not None

    def apply(self) -> None:
        """The second half: gives the core the results."""
        reply, self._reply = self._reply, None
        if reply is None:
            raise RuntimeError("no plan is in flight")
        self.num_steps += 1
        if isinstance(reply, StepDone):
            for part, seconds in reply.seconds.items():
                self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self._handle(reply)

    def step(self) -> bool:
        """One plan and its results. False if there is nothing to do."""
        if not self.plan():
            return False
        self.apply()
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

    def _handle(self, event: Event) -> None:
        effects = self.core.handle(event, self.clock())
        if self._check_invariants:
            check(self.core)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, InstallRow | Plan):
            reply = self.worker.handle(effect)
            if isinstance(reply, StepDone | RowMissing):
                self._reply = reply
        elif isinstance(effect, StepOutput):
            if effect.rejections:
                raise ValueError(f"the core refused a sequence: {effect.rejections[0]}")
            for output in effect.outputs:
                self._receive(output)

    def _receive(self, message: SequenceOutput) -> None:
        output = self.outputs[message.key]
        if message.first_index != len(output.token_ids):
            raise RuntimeError(f"{message.key}: output {message.first_index} follows {len(output.token_ids)} tokens")
        output.token_ids += message.token_ids
        output.logprobs += message.logprobs
        output.token_times += [self.clock()] * len(message.token_ids)
        output.finish_reason, output.error = message.finish_reason, message.error
        output.num_cached_tokens, output.num_preemptions = message.num_cached_tokens, message.num_preemptions
