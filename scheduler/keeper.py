"""The keeper of the core: every sequence survives the core and the workers that computed it.

    workers are lost       the core is given up; its sequences are kept, judged (`suspicion`), and wait
    workers are ready      a new core, of a new epoch, gets them back in the order in which they arrived
    the core fails         an exception or a broken invariant: the request that the event names fails, a new core gets
                           the others at once and computes all KV again, because the old books cannot be trusted

While there is no core, requests are still taken and ended here. What a frontend was not sent is not part of a
sequence's history, so nothing is ever sent twice or skipped. A request that was found to kill workers is not taken
again (`convictions`). Pure like the core: events and times in, effects out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from pagemill.ids import NONE, num_ids
from pagemill.injection import reach
from pagemill.messages.control import Drain, PeerLost
from pagemill.messages.frontend import AbortRequest, AddRequest, FinishRequest, Rejection, SequenceOutput, StatsSnapshot, StepOutput
from pagemill.messages.sequences import SequenceKey
from scheduler.convictions import Convictions
from scheduler.core import SchedulerCore
from scheduler.core_config import CoreConfig
from scheduler.counters import snapshot
from scheduler.events import Adopt, Effect, Event, Revive, Suspicion, Turn
from scheduler.held_sequences import HeldSequences
from scheduler.invariants import check
from scheduler.sequence import Sequence
from scheduler.suspicion import judge

#: Errors of `SequenceOutput`.
KILLED_WORKER = "killed_worker"
CORE_FAILED = "core_failed"
#: A core that fails this often in this time does so because of something that a new core does not cure.
_MAX_REBUILDS = 5
_REBUILD_WINDOW_S = 600.0
#: Failures on the results of one sequence that make it the cause.
_FAILURES_ON_ONE = 2
#: Events that are told when a core fails.
_NUM_RECENT = 64


class CoreKeeper:
    """Owns the core. `on_core` is told of each new one before its first event, `on_event` of all that it handles, `on_failure` why one was given up."""

    def __init__(self, epoch: int, *, max_num_held: int, max_tokens_held: int = 1 << 62, check_invariants: bool = False) -> None:
        """The limits are for sequences that arrive while there is no core, and for the prompt tokens of all that wait then."""
        self.core: SchedulerCore | None = None
        self.epoch = epoch  #: of the core, or of the next one
        self.recent: deque[str] = deque(maxlen=_NUM_RECENT)  #: what happened last, without texts and tokens
        self.on_core: Callable[[SchedulerCore], None] = lambda core: None
        self.on_event: Callable[[float, Event, list[Effect]], None] = lambda now, event, effects: None
        self.on_failure: Callable[[Exception], None] = lambda error: None
        self._unsent: list[Effect] = []  #: of an event that the core has handled, while its books are checked
        self._failed_on: dict[SequenceKey, int] = {}  #: sequences on whose results a core has failed, and how often
        self.num_explained = 0  #: deaths of workers whose causes are found
        self._convictions = Convictions()
        self._num_refused = 0  #: of requests known to kill workers, that the present core has not heard of
        self._max_num_held, self._max_tokens_held = max_num_held, max_tokens_held
        self._check_invariants = check_invariants
        self._held = HeldSequences()  #: while there is no core
        self._drain: Drain | None = None
        self._failures: deque[float] = deque()
        self._finished: dict[str, int] = {}  #: sequences that have ended while there was no core, by reason

    @property
    def num_sequences(self) -> int:
        return len(self._held) if self.core is None else len(self.core.sequences)

    def held(self) -> list[Revive]:
        """Sequences that wait for workers."""
        return self._held.revives()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What the core says to the event. Raises whatever the core raised if it fails too often."""
        if isinstance(event, Drain):
            self._drain = event  # the next core is to know it too
        if isinstance(event, AddRequest) and self._convictions.names(event, now):
            return [self._refuse_convicted(event)]
        if self.core is None:
            return self._handle_without_core(event, now)
        self.recent.append(_describe(event))
        try:
            reach("scheduler.core")
            return self._pass_on(self.core, event, now)
        except Exception as error:  # whatever it is, it must not reach requests that did not cause it
            return self._rebuild(event, error, now)

    def audit(self, now: float) -> list[Effect]:
        """Checks the books of the core, and rebuilds it if they do not balance."""
        if self.core is None:
            return []
        try:
            check(self.core)
        except Exception as error:
            return self._rebuild(None, error, now)
        return []

    def workers_ready(self, config: CoreConfig, adopt: Adopt | None, now: float) -> list[Effect]:
        """All workers can work: a core, with what is left of KV and of sequences."""
        return self._build(config, adopt or Adopt((), ()), now)

    def workers_lost(self, now: float) -> list[Effect]:
        """The workers are gone, with the pool and all that was in flight."""
        if self.core is None:
            return []
        core, effects = self._give_up()
        suspicions, causes = judge(core.plans)
        self.num_explained += sum(suspicions[seq_id].deaths for seq_id in causes)
        revived = [_revive(sequence, suspicions.get(sequence.seq_id, sequence.suspicion)) for sequence in core.sequences.values()]
        for sequence, revive in zip(core.sequences.values(), revived, strict=True):
            if sequence.seq_id in causes:
                self._convictions.add(revive.request, suspicions[sequence.seq_id].end, now)
        for sequence, revive in zip(core.sequences.values(), revived, strict=True):
            if sequence.seq_id in causes or self._convictions.names(revive.request, now):  # its equals need not be tried
                effects.append(self._failed(core.config.epoch, sequence.key, sequence.num_emitted_tokens, KILLED_WORKER))
            else:
                self._held.add(revive)
        return effects

    # --- inside ----------------------------------------------------------------------------------------

    def _pass_on(self, core: SchedulerCore, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        try:
            effects = self._unsent = core.handle(event, now)
        finally:  # above all the event that the core dies of: a replay dies of it too
            self.on_event(now, event, effects)
        if self._check_invariants:
            check(core)
        self._unsent = []
        return [self._counted(effect) if isinstance(effect, StatsSnapshot) else effect for effect in effects] if self._num_refused else effects

    def _build(self, config: CoreConfig, adopt: Adopt, now: float) -> list[Effect]:
        core = self.core = SchedulerCore(msgspec.structs.replace(config, epoch=self.epoch))
        self.on_core(core)
        effects: list[Effect] = []
        adopt = msgspec.structs.replace(adopt, sequences_received=sum(self._finished.values()), sequences_finished=self._finished)
        self._finished = {}
        events: list[Event] = [event for event in (adopt, *self._held.take(), self._drain) if event is not None]
        for event in events:
            effects += self._pass_on(core, event, now)
        return effects

    def _rebuild(self, event: Event | None, error: Exception, now: float) -> list[Effect]:
        self._failures.append(now)
        while now - self._failures[0] > _REBUILD_WINDOW_S:
            self._failures.popleft()
        self.on_failure(error)
        if len(self._failures) > _MAX_REBUILDS:
            raise error
        told, self._unsent = [effect for effect in self._unsent if isinstance(effect, StepOutput)], []
        core, last = self._give_up()
        effects: list[Effect] = [*told, *last, *core.take_outputs()]
        for sequence in core.sequences.values():
            self._held.add(_revive(sequence, sequence.suspicion))
        if isinstance(event, AddRequest | FinishRequest | AbortRequest):
            named = self._held.pop(event.key)
            num_emitted = num_ids(named.request.output_ids) if named is not None else 0
            if named is not None or isinstance(event, AddRequest):
                effects.append(self._failed(core.config.epoch, event.key, num_emitted, CORE_FAILED))
        culprit = core.results.current
        if culprit is not None and culprit in self._held:
            self._failed_on[culprit] = self._failed_on.get(culprit, 0) + 1
            if self._failed_on[culprit] >= _FAILURES_ON_ONE and (named := self._held.pop(culprit)) is not None:
                effects.append(self._failed(core.config.epoch, culprit, num_ids(named.request.output_ids), CORE_FAILED))
        return effects + self._build(core.config, Adopt((), (), core_rebuilds=1), now)

    def _give_up(self) -> tuple[SchedulerCore, list[Effect]]:
        """The core is no more. Its last numbers are told, for the next one counts from zero."""
        core = self.core
        assert core is not None
        self.core = None
        self.epoch += 1
        self._failed_on = {key: count for key, count in self._failed_on.items() if key in core.sequences}
        last = snapshot(core.config, core.queues, core.memory, core.swapping, core.preemption.decisions, core.counters, len(core.suspects))
        handed_on = last.sequences_finished | {"handed_on": len(core.sequences)}
        last = self._counted(msgspec.structs.replace(last, num_waiting=0, num_running=0, num_preempted=0, sequences_finished=handed_on))
        self._num_refused = 0
        return core, [last]

    def _counted(self, snapshot: StatsSnapshot) -> StatsSnapshot:
        """With the sequences that have come and ended without the core."""
        finished = snapshot.sequences_finished
        received = snapshot.sequences_received + self._num_refused
        return msgspec.structs.replace(
            snapshot, sequences_received=received, sequences_finished=finished | {"error": finished.get("error", 0) + self._num_refused}
        )

    def _refuse_convicted(self, request: AddRequest) -> StepOutput:
        num_received = num_ids(request.output_ids)
        if self.core is None:
            return self._failed(self.epoch, request.key, num_received, KILLED_WORKER)
        self._num_refused += 1
        return _error(self.epoch, request.key, num_received, KILLED_WORKER)

    def _failed(self, epoch: int, key: SequenceKey, num_emitted: int, error: str) -> StepOutput:
        self._count_end("error")
        return _error(epoch, key, num_emitted, error)

    # --- without a core --------------------------------------------------------------------------------

    def _handle_without_core(self, event: Event, now: float) -> list[Effect]:
        match event:
            case AddRequest():
                return self._hold(event, now)
            case FinishRequest():
                self._end([event.key], event.reason)
            case AbortRequest():
                self._end([event.key], "abort")
            case PeerLost(kind="frontend"):
                self._end([key for key in self._held if (key.frontend, key.incarnation) == (event.index, event.incarnation)], "abort")
            case Turn():
                return self._expire(now)
            case _:
                pass  # of a core that is gone
        return []

    def _hold(self, request: AddRequest, now: float) -> list[Effect]:
        if request.key in self._held:
            return []
        if self._drain is not None and not request.resubmitted:
            return self._refuse(Rejection(request.key, "draining", 0, 0))
        if len(self._held) >= self._max_num_held and not request.resubmitted:
            return self._refuse(Rejection(request.key, "queue_full", len(self._held) + 1, self._max_num_held))
        num_tokens = num_ids(request.prompt_ids) + self._held.num_waiting_tokens
        if len(self._held) and num_tokens > self._max_tokens_held and not request.resubmitted:
            return self._refuse(Rejection(request.key, "queue_tokens", num_tokens, self._max_tokens_held))
        self._held.add(Revive(request, now, -1.0, 0, 0, has_prefilled=False, has_decoded=False, suspicion=None))
        return []

    def _expire(self, now: float) -> list[Effect]:
        """Those that have never been started may not wait for longer than they said, whatever they wait for."""
        effects: list[Effect] = []
        for revive in self._held.pop_expired(now):
            waited_ms, limit_ms = round(1000 * (now - revive.added_at)), round(1000 * revive.request.limits.max_queue_s)
            effects += self._refuse(Rejection(revive.request.key, "queue_timeout", waited_ms, limit_ms))
        return effects

    def _refuse(self, rejection: Rejection) -> list[Effect]:
        self._count_end("rejected")
        return [StepOutput(rejection.key.frontend, self.epoch, (), (rejection,))]

    def _end(self, keys: list[SequenceKey], reason: str) -> None:
        for key in keys:
            if self._held.pop(key) is not None:
                self._count_end(reason)

    def _count_end(self, reason: str) -> None:
        self._finished[reason] = self._finished.get(reason, 0) + 1


def _revive(sequence: Sequence, suspicion: Suspicion | None) -> Revive:
    """The sequence as its next core is told of it: what its frontend was sent, and nothing of where its KV was."""
    num_known = sequence.num_prompt_tokens + sequence.num_emitted_tokens
    num_keys = sequence.num_prompt_tokens // sequence.block_size
    request = AddRequest(
        key=sequence.key,
        request_id=sequence.request_id,
        prompt_ids=sequence.token_ids[: sequence.num_prompt_tokens].tobytes(),
        output_ids=sequence.token_ids[sequence.num_prompt_tokens : num_known].tobytes(),
        sampling=sequence.sampling,
        limits=sequence.limits,
        seed=sequence.seed,
        priority=sequence.priority,
        arrival=sequence.order[1],
        root=sequence.root,
        prefix_keys=b"".join(sequence.keys[:num_keys]),
        resubmitted=True,
    )
    return Revive(
        request=request,
        added_at=sequence.added_at,
        queue_s=sequence.queue_s,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        has_prefilled=sequence.has_prefilled,
        has_decoded=sequence.has_decoded,
        suspicion=suspicion,
    )


def _error(epoch: int, key: SequenceKey, num_emitted: int, error: str) -> StepOutput:
    output = SequenceOutput(
        key=key,
        first_index=num_emitted,
        token_ids=(),
        logprobs=(),
        finish_reason="error",
        stop_token_id=NONE,
        num_cached_tokens=0,
        num_preemptions=0,
        queue_s=0.0,
        error=error,
    )
    return StepOutput(key.frontend, epoch, (output,), ())


def _describe(event: Event) -> str:
    """Kind and ids, for the log."""
    numbers = [f"{name}={getattr(event, name)}" for name in ("plan_id", "transfer_ids", "row", "key") if hasattr(event, name)]
    return " ".join([type(event).__name__, *numbers])
