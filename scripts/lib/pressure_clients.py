"""Clients of the pressure scenarios: all at once, held back by an oracle, jobs with bursts between, conversations.

Each draws its tokens and times from a seed and nothing else, so that every policy and engine is asked the same; what
an engine answers becomes part of a conversation, as it does for people. Must not know what is measured.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagemill.kv_groups import peak_blocks
from pagemill.messages.sequences import SequenceKey
from scripts.lib.engine import Engine
from scripts.lib.workloads import Request, TokenSource, Workload

JOBS, BURSTS = "jobs", "bursts"
FIRST_TURNS, FOLLOW_UPS = "first turns", "follow-ups"
#: Priorities: lower goes first.
HIGH, LOW = 0, 1


class AllAtOnce:
    """Every request in the first moment."""

    def __init__(self, requests: Sequence[Request], group: str = "requests", priority: int = 0) -> None:
        self.groups: dict[str, list[SequenceKey]] = {group: []}
        self._waiting = deque(requests)
        self._group, self._priority = group, priority

    def ask(self, engine: Engine) -> float:
        while self._waiting:
            self._add(engine)
        return math.inf

    def _add(self, engine: Engine) -> None:
        request = self._waiting.popleft()
        self.groups[self._group].append(engine.add(request.prompt_ids, max_tokens=request.num_output_tokens, priority=self._priority))


class Reserving(AllAtOnce):
    """An oracle's admission: it knows how long each request will become, and lets it in when that much is nobody's."""

    def ask(self, engine: Engine) -> float:
        config = engine.core.config

        def blocks_of(num_tokens: int) -> int:
            return peak_blocks(config.groups, num_tokens, config.block_size, config.max_num_batched_tokens)

        promised = sum(blocks_of(sequence.num_prompt_tokens + sequence.limits.max_tokens) for sequence in engine.core.sequences.values())
        while self._waiting:
            promised += blocks_of(self._waiting[0].num_tokens)
            if promised > config.num_blocks:
                break
            self._add(engine)
        return math.inf


class JobsAndBursts:
    """Jobs that nobody waits for, and bursts of urgent requests, one each time the jobs have decoded so many more tokens.

    The first comes when all jobs decode, a later one when the one before has ended.
    """

    def __init__(self, jobs: Workload, burst: Workload, num_bursts: int, tokens_between: int, seed: int, vocab_size: int) -> None:
        self._jobs = AllAtOnce(jobs.requests(seed, vocab_size), JOBS, LOW)
        self.groups: dict[str, list[SequenceKey]] = {**self._jobs.groups, BURSTS: []}
        self._bursts = deque(burst.requests(seed + 1 + number, vocab_size) for number in range(num_bursts))
        self._tokens_between = tokens_between * jobs.num_requests  #: of all jobs together
        self._wanted = self._tokens_between

    def ask(self, engine: Engine) -> float:
        self._jobs.ask(engine)
        if self._bursts and self._is_due(engine):
            for request in self._bursts.popleft():
                self.groups[BURSTS].append(engine.add(request.prompt_ids, max_tokens=request.num_output_tokens, priority=HIGH))
            self._wanted += self._tokens_between
        return math.inf

    def _is_due(self, engine: Engine) -> bool:
        decoded = [len(engine.outputs[key].token_ids) for key in self.groups[JOBS]]
        return min(decoded) > 0 and sum(decoded) >= self._wanted and all(engine.outputs[key].finish_reason for key in self.groups[BURSTS])


@dataclass(frozen=True)
class Talk:
    """What conversations look like: lengths in tokens, times in seconds."""

    num_sessions: int = 12
    num_start: int = 3000  #: of the first prompt
    num_added: int = 400  #: by each follow-up
    num_answered: int = 32
    num_turns: int = 7  #: follow-ups
    num_in_flight: int = 2
    mean_think_s: float = 2.0  #: exponential, between an answer and the next turn; 0: the sessions take turns in a fixed order

    @property
    def longest(self) -> int:
        """Tokens of a session after its last answer."""
        return self.num_start + self.num_turns * (self.num_added + self.num_answered) + self.num_answered


@dataclass
class _Session:
    tokens: list[int]
    turns: deque[list[int]]  #: what follow-ups add
    thinks: deque[float]
    key: SequenceKey | None = None  #: of the turn under way
    group: str = FIRST_TURNS
    due_at: float = field(default=-math.inf)


class Conversations:
    """Sessions that take turns; who is ready and has waited longest goes next, so many at a time."""

    def __init__(self, talk: Talk, seed: int, vocab_size: int) -> None:
        self.groups: dict[str, list[SequenceKey]] = {FIRST_TURNS: [], FOLLOW_UPS: []}
        self._talk = talk
        tokens, thinking = TokenSource(seed, vocab_size), random.Random(seed)
        self._ready: deque[_Session] = deque()  #: thinking, or waiting for others; longest first
        self._busy: list[_Session] = []
        for _ in range(talk.num_sessions):
            turns = deque(tokens.take(talk.num_added) for _ in range(talk.num_turns))
            thinks = deque(thinking.expovariate(1 / talk.mean_think_s) if talk.mean_think_s else 0.0 for _ in range(talk.num_turns))
            self._ready.append(_Session(tokens.take(talk.num_start), turns, thinks))

    def ask(self, engine: Engine) -> float:
        for session in [session for session in self._busy if session.key is not None and engine.outputs[session.key].finish_reason]:
            self._busy.remove(session)
            self._listen(engine, session)
        self._ready = deque(sorted(self._ready, key=lambda session: session.due_at))
        while self._ready and len(self._busy) < self._talk.num_in_flight:
            if self._ready[0].due_at > engine.clock():
                return self._ready[0].due_at
            self._speak(engine, self._ready.popleft())
        return math.inf

    def _speak(self, engine: Engine, session: _Session) -> None:
        session.key = engine.add(session.tokens, max_tokens=self._talk.num_answered)
        self.groups[session.group].append(session.key)
        session.group = FOLLOW_UPS
        self._busy.append(session)

    def _listen(self, engine: Engine, session: _Session) -> None:
        """Takes the answer and, if there is a turn left, prepares it."""
        if session.key is None or not session.turns:
            return
        answer = engine.outputs[session.key]
        session.tokens += [*answer.token_ids, *session.turns.popleft()]
        session.due_at = answer.token_times[-1] + session.thinks.popleft()
        self._ready.append(session)
