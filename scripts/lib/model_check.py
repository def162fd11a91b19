"""A model check of the real scheduler core: every state that a small world can reach, not a sample of them.

A *world* is a core's limits and a few requests. From each state every event that could come next is tried:
the next request arrives, any request is aborted, a turn, the oldest plan is done with each row drawing a token
or its last one, any copy under way is done. Where the core asks for a price, both answers are tried, so each
victim is swapped and is recomputed, and each prefix in the arena is fetched and is not. States that differ only in
names and in what nobody will ask for again are one (`core_state`); that this hides nothing is seen by expanding
*twins* as well, states that were taken for one seen before. Three laws are checked:

    the books balance in every state (`scheduler.invariants`), and at the end nothing is held
    no state is dead: from each one, all its requests can still finish without an abort
    no state is a trap: without aborts no run goes on for ever, whatever the prices, the order of events, and the copies that fail

The third is stronger than the second and needs no fairness but that what is under way ends some day.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pagemill.ids import SeqId, pack_ids
from pagemill.keys import prefix_keys, root_key
from pagemill.messages.frontend import AbortRequest, AddRequest
from pagemill.messages.sequences import Limits, SamplingParams, SequenceKey
from pagemill.messages.worker import RowResult, StepDone, TransferDone
from scheduler import preemption
from scheduler.core import SchedulerCore
from scheduler.core_config import CoreConfig
from scheduler.events import Event, Turn
from scheduler.invariants import InvariantError, check
from scheduler.offers import Offer
from scheduler.sequence import Sequence
from scripts.lib.core_snapshot import Snapshot
from scripts.lib.core_state import Outlook, state_key

#: The token that ends a request.
LAST_TOKEN = 1
ROOT = root_key(b"model", b"", b"domain")
#: How a state was reached from another: the event, and the answers to the prices asked for.
Step = tuple[str, int, tuple[int, ...]]


@dataclass(frozen=True)
class Request:
    """`prompt` in blocks, each a name: equal beginnings are shared. Each name stands for one full block of tokens."""

    prompt: str
    max_tokens: int = 2
    is_cached: bool = True
    priority: int = 0


@dataclass(frozen=True)
class World:
    """What is explored. `patience`: sequences that do not run may take from all behind them at once, or never for that reason."""

    name: str
    config: CoreConfig
    requests: tuple[Request, ...]
    patience: bool = False
    aborts: bool = True
    failures: bool = False  #: any copy may fail, now or every time
    saves: bool = False  #: cached blocks are worth a copy before they are overwritten

    def keys(self, number: int) -> Iterator[bytes]:
        """What blocks may be called, on the device and in the arena, that hold the tokens of a request and those that it may draw."""
        sequence = Sequence(SeqId(number + 1), self.event(number), now=0.0, block_size=self.config.block_size, num_groups=len(self.config.groups))
        sequence.token_ids.extend([token_of(sequence)] * sequence.limits.max_tokens)
        for index in range(sequence.num_tokens // self.config.block_size):
            for group in range(len(self.config.groups)):
                yield sequence.copy_key(index, group)

    def event(self, number: int) -> AddRequest:
        request, size = self.requests[number], self.config.block_size
        # The last block lacks a token unless blocks have only one: so there are partly filled blocks.
        tokens = [10 * ord(block) + offset for block in request.prompt for offset in range(size)]
        prompt = tokens[: len(tokens) - (size > 1)]
        return AddRequest(
            key=SequenceKey(0, 1, number, 0),
            request_id=f"r{number}",
            prompt_ids=pack_ids(prompt),
            output_ids=b"",
            sampling=SamplingParams(stop_token_ids=(LAST_TOKEN,)),
            limits=Limits(request.max_tokens),
            seed=0,
            priority=request.priority,
            arrival=float(number),
            root=ROOT if request.is_cached else b"",
            prefix_keys=prefix_keys(ROOT, array("i", prompt), size) if request.is_cached else b"",
        )


def token_of(sequence: Sequence) -> int:
    """What a sequence draws until its last token: always the same, and no other sequence does."""
    return 2 + sequence.seq_id


class LawBroken(Exception):
    """With the way there."""


@dataclass
class Report:
    """What was found. `num_states` counts states up to names, `num_transitions` those that lead to another state."""

    num_states: int = 0
    num_transitions: int = 0
    num_final: int = 0
    num_twins: int = 0  #: expanded, and found to lead to the same states
    is_complete: bool = True
    chosen: dict[str, int] = field(default_factory=dict)  #: answers tried, by what was asked


class _Prices:
    """Answers each question of price as told, `0` where not told, and notes how many were asked."""

    def __init__(self, core: SchedulerCore, chosen: dict[str, int]) -> None:
        self.answers: tuple[int, ...] = ()
        self.num_asked = 0
        self._chosen = chosen
        self._take = core.preemption._take
        core.preemption._take = self._take_from  # type: ignore[method-assign]
        core.swapping._pays = self._pays  # type: ignore[method-assign]

    def begin(self, answers: tuple[int, ...]) -> None:
        self.answers, self.num_asked = answers, 0

    def _take_from(self, offer: Offer) -> None:
        if offer.tail.entries and offer.swap_s is not None:
            offer.swap_s, offer.recompute_s = (0.0, 1.0) if self._answer("swap", "recompute") else (1.0, 0.0)
        self._take(offer)

    def _pays(self, num_blocks: int, start: int, num_tokens: int) -> bool:
        return self._answer("fetch a prefix", "compute a prefix")

    def _answer(self, yes: str, no: str) -> bool:
        answer = self.answers[self.num_asked] if self.num_asked < len(self.answers) else 0
        self.num_asked += 1
        name = yes if answer else no
        self._chosen[name] = self._chosen.get(name, 0) + 1
        return bool(answer)


@contextmanager
def _timeless(patience: bool) -> Iterator[None]:
    """Takes the clock of steps out of play: quanta only order victims, and patience is there at once or never."""
    before = preemption._PATIENCE_STEPS, preemption._QUANTUM_STEPS
    preemption._PATIENCE_STEPS, preemption._QUANTUM_STEPS = (-(10**9) if patience else 10**9), 0
    try:
        yield
    finally:
        preemption._PATIENCE_STEPS, preemption._QUANTUM_STEPS = before


class Explorer:
    """Explores one world, depth first."""

    def __init__(self, world: World, twins_every: int = 0) -> None:
        """`twins_every`: of the transitions to states that are known, each so manyth is looked at for what it hides; 0: none."""
        self.world = world
        self._twins_every = twins_every
        self.report = Report()
        self.core = SchedulerCore(world.config)
        self.core.preemption.decisions.record = lambda decision: None  # type: ignore[method-assign]
        self._prices = _Prices(self.core, self.report.chosen)
        self.core.early_copies._is_worth_saving = lambda: world.saves  # type: ignore[method-assign]
        self._outlooks: dict[tuple[int, ...], Outlook] = {}  #: by the requests that are alive or to come
        self._numbers: dict[bytes, int] = {}  #: of states, by their keys
        self._came_from: list[tuple[int, Step]] = []
        self._from, self._to = array("I"), array("I")  #: transitions that are no aborts
        self._final: list[int] = []
        self._pending: list[tuple[int, Snapshot]] = []
        self._num_known = 0  #: transitions to states that were known
        self._twins: list[tuple[int, Step, int, Snapshot]] = []  #: how they were reached, and the number of the state that they were taken for
        self._successors: dict[int, set[tuple[str, int]]] = {}  #: by state, if there are twins: what can happen, and where it leads to

    def explore(self, max_states: int = 10**9) -> Report:
        """Raises LawBroken. With fewer states than there are, only the laws of single states are checked."""
        with _timeless(self.world.patience):
            self._reached(0, ("start", 0, ()))
            while self._pending and len(self._numbers) < max_states:
                self._expand(*self._pending.pop())
            if not self._pending:
                for twin in self._twins:
                    self._check_twin(*twin)
        report = self.report
        report.num_states, report.num_final = len(self._numbers), len(self._final)
        report.is_complete = not self._pending
        if report.is_complete:
            self._check_that_all_can_finish()
            self._check_that_no_run_is_endless()
        return report

    # --- one state -------------------------------------------------------------------------------------

    def _expand(self, number: int, snapshot: Snapshot) -> None:
        """Tries everything that can come next."""
        snapshot.restore()
        can_move, is_live = False, bool(self.core.sequences)
        successors: set[tuple[str, int]] = set()
        for step in self._steps(number, snapshot):
            target = self._reached(number, step)
            successors.add((step[0], target))
            can_move |= self._note(number, step[0], target)
        if self._twins_every:
            self._successors[number] = successors
        if is_live and not can_move:
            snapshot.restore()
            raise LawBroken(f"{self.world.name}: nothing can happen any more\n{self._story(number)}")

    def _steps(self, number: int, snapshot: Snapshot) -> Iterator[Step]:
        """All that can come next, one after the other: when it is yielded, it has happened."""
        snapshot.restore()
        for name, choice in self._events():
            answers: list[tuple[int, ...]] = [()]
            while answers:
                told = answers.pop()
                snapshot.restore()
                self._prices.begin(told)
                try:
                    self.core.handle(self._event(name, choice), 0.0)
                except Exception as error:
                    raise LawBroken(f"{self.world.name}: {error!r}\n{self._story(number)}\n{name} {choice} {told}") from error
                yield name, choice, told
                answers += [(*told, *[0] * (asked - len(told)), 1) for asked in range(len(told), self._prices.num_asked)]

    def _note(self, number: int, name: str, target: int) -> bool:
        """One transition. True if it leads to another state, and is no abort and no arrival."""
        if target == number:
            return False
        self.report.num_transitions += 1
        if name == "abort":
            return False
        self._from.append(number)
        self._to.append(target)
        return name != "arrive"

    def _check_twin(self, source: int, step: Step, number: int, snapshot: Snapshot) -> None:
        """What was taken for a known state leads to the same states as that one."""
        found = {(name, self._numbers.get(state_key(self.core, self._outlook()), -1)) for name, _, _ in self._steps(number, snapshot)}
        self.report.num_twins += 1
        if found != self._successors[number]:
            hidden = sorted(found ^ self._successors[number])
            raise LawBroken(f"{self.world.name}: states taken for one lead to different ones {hidden}\n{self._story(number)}{self._story(source)}\n{step}")

    def _reached(self, source: int, step: Step) -> int:
        """The number of the core's state. A new one is checked and noted."""
        key = state_key(self.core, self._outlook())
        number = self._numbers.get(key)
        if number is not None:
            self._num_known += 1
            if self._twins_every and self._num_known % self._twins_every == 0:
                self._twins.append((source, step, number, Snapshot(self.core)))
            return number
        number = self._numbers[key] = len(self._numbers)
        self._came_from.append((source, step))
        try:
            check(self.core)
        except InvariantError as error:
            raise LawBroken(f"{self.world.name}: {error}\n{self._story(number)}") from error
        if self._is_final():
            self._final.append(number)
            held = (self.core.memory.pool.num_used, self.core.swapping.swap.num_used)
            if held != (0, 0):
                raise LawBroken(f"{self.world.name}: blocks and slots {held} are held at the end\n{self._story(number)}")
        self._pending.append((number, Snapshot(self.core)))
        return number

    def _outlook(self) -> Outlook:
        """Content is wanted by requests that live or are to come, in as many tokens as they can have."""
        alive = (*(key.request for key in self.core.sequences), *range(self._num_arrived(), len(self.world.requests)))
        outlook = self._outlooks.get(alive)
        if outlook is None:
            wanted = frozenset(key for request in alive for key in self.world.keys(request))
            outlook = self._outlooks[alive] = Outlook(wanted, self.world.saves)
        return outlook

    def _is_final(self) -> bool:
        """All requests have come and gone, and nothing is under way."""
        core = self.core
        return self._num_arrived() == len(self.world.requests) and not core.sequences and not core.plans and not len(core.swapping.transfers)

    def _num_arrived(self) -> int:
        return self.core._next_seq_id - 1

    # --- what can happen -------------------------------------------------------------------------------

    def _events(self) -> list[tuple[str, int]]:
        core = self.core
        num_arrived, transfers = self._num_arrived(), core.swapping.transfers.in_flight()
        events = [("turn", 0)] if len(core.plans) < core.config.max_plans_in_flight else []
        if num_arrived == len(self.world.requests) and not core.sequences:
            # All have ended: in which order the rest is done makes no difference any more.
            return [("copied", transfers[0].transfer_id)] if transfers else [("step", 0)] if core.plans else events
        if num_arrived < len(self.world.requests):
            events.append(("arrive", num_arrived))
        if core.plans and all(transfer.needed_by != core.plans[0].plan_id for transfer in transfers):  # workers tell of those before
            events += [("step", choice) for choice in range(2 ** len(self._drawing()))]
        for transfer in transfers:
            events += [(outcome, transfer.transfer_id) for outcome in (("copied", "not copied") if self.world.failures else ("copied",))]
        if self.world.aborts:
            events += [("abort", key.request) for key in core.sequences]
        return events

    def _drawing(self) -> list[RowResult]:
        """Results of the oldest plan for those that draw a token and still live."""
        pieces = [slice_ for slice_ in self.core.plans[0].slices if slice_.piece.sample and slice_.piece.sequence.key in self.core.sequences]
        return [RowResult(slice_.row, slice_.row_version, "accepted", (token_of(slice_.piece.sequence),), (), "") for slice_ in pieces]

    def _event(self, name: str, choice: int) -> Event:
        epoch = self.core.config.epoch
        match name:
            case "turn":
                return Turn()
            case "arrive":
                return self.world.event(choice)
            case "abort":
                return AbortRequest(SequenceKey(0, 1, choice, 0))
            case "step":
                results = self._drawing()
                for index, ends in enumerate(f"{choice:b}".zfill(len(results))[-len(results) :] if results else ""):
                    if ends == "1":
                        results[index] = RowResult(results[index].row, results[index].version, "accepted", (LAST_TOKEN,), (), "")
                return StepDone(epoch, 0, self.core.plans[0].plan_id, tuple(results), {})
            case _:
                return TransferDone(epoch, 0, (choice,), name == "copied", 0.0)

    # --- all states ------------------------------------------------------------------------------------

    def _check_that_all_can_finish(self) -> None:
        """Backwards from the final states along all transitions but aborts."""
        num_states = len(self._numbers)
        sources: list[list[int]] = [[] for _ in range(num_states)]
        for source, target in zip(self._from, self._to, strict=True):
            sources[target].append(source)
        can_finish = bytearray(num_states)
        pending = list(self._final)
        while pending:
            state = pending.pop()
            if not can_finish[state]:
                can_finish[state] = 1
                pending += sources[state]
        dead = can_finish.find(0)
        if dead >= 0:
            raise LawBroken(f"{self.world.name}: {can_finish.count(0)} states are dead, the first of them\n{self._story(dead)}")

    def _check_that_no_run_is_endless(self) -> None:
        """Takes away states that nothing leads to, again and again: what is left lies on a cycle or behind one."""
        num_states = len(self._numbers)
        targets: list[list[int]] = [[] for _ in range(num_states)]
        num_sources = array("I", bytes(4 * num_states))
        for source, target in zip(self._from, self._to, strict=True):
            targets[source].append(target)
            num_sources[target] += 1
        pending = deque(state for state in range(num_states) if not num_sources[state])
        num_left = num_states
        while pending:
            num_left -= 1
            for target in targets[pending.popleft()]:
                num_sources[target] -= 1
                if not num_sources[target]:
                    pending.append(target)
        if num_left:
            first = next(state for state in range(num_states) if num_sources[state])
            raise LawBroken(f"{self.world.name}: {num_left} states lie on or behind a cycle, the first of them\n{self._story(first)}")

    def _story(self, number: int) -> str:
        """How a state was reached."""
        steps: list[str] = []
        while number:
            number, (name, choice, answers) = self._came_from[number]
            steps.append(f"{name} {choice}" + (f" {list(answers)}" if answers else ""))
        return " → ".join(reversed(steps)) + f"\n{list(self.core.queues)}"
