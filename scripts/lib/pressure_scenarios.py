"""The pressure scenarios: which engines are asked for what, and what the answers are compared in.

A scenario is a list of cases, one for each policy and budget, each with the limits of its core and its client. The
policies differ in nothing else: auto and swap have swap space, recompute has none, and the oracle is what none of
them can be: an unlimited pool where the question is latency, admission that knows every final length where it is
throughput. `scale` shrinks lengths and times, not numbers of requests. Must not know what runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from pagemill.kv_groups import peak_blocks
from pagemill.messages.sequences import KvGroup
from scripts.lib.pressure import SNAPSHOT_ALWAYS, Client, Measured
from scripts.lib.pressure_clients import BURSTS, FOLLOW_UPS, AllAtOnce, Conversations, JobsAndBursts, Reserving, Talk
from scripts.lib.report import median_interval, percentiles
from scripts.lib.workloads import Workload

AUTO, SWAP, RECOMPUTE, ORACLE = POLICIES = ("auto", "swap", "recompute", "oracle")
#: What the others are compared with: one part of a scenario, with nothing else there.
ALONE = "alone"

#: (label, policy) -> the runs of it, in order.
Runs = Mapping[tuple[str, str], Sequence[Measured]]
Ratios = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Case:
    """One run: a new engine with these limits, and a client for a vocabulary of so many tokens."""

    label: str
    policy: str
    workload: str
    limits: dict[str, object]
    client: Callable[[int], Client]


class Scenario(Protocol):
    """`num_blocks` and `num_swap_slots` are the most that any case takes."""

    num_blocks: int
    num_swap_slots: int

    def cases(self, policies: Sequence[str]) -> list[Case]: ...

    def figures(self, measured: Measured) -> dict[str, float]:
        """What this scenario is about; a prediction is compared in these."""

    def ratios(self, runs: Runs) -> Ratios:
        """By label."""


@dataclass(frozen=True)
class Shape:
    """What every scenario is cut to."""

    scale: float = 1.0
    seed: int = 1
    block_size: int = 16
    num_swap_slots: int = 0  #: 0: as many as all requests could ever need
    mixes: tuple[str, ...] = ("32:256:384", "16:2048:512")  #: of `Steady`, before scaling
    budgets: tuple[float, ...] = (100.0, 50.0, 25.0, 12.5)  #: of `Steady`, in percent; the largest is what shares are of
    groups: tuple[KvGroup, ...] = (KvGroup(),)  #: of the model
    chunk: int = 512  #: tokens of one step

    def tokens(self, number: int) -> int:
        return max(1, round(number * self.scale))

    def workload(self, num_requests: int, num_prompt: int, num_output: int) -> Workload:
        return Workload(num_requests, self.tokens(num_prompt), self.tokens(num_output))

    def blocks(self, workload: Workload) -> int:
        """What its requests hold in the end."""
        return workload.num_requests * self.blocks_of(workload.num_prompt_tokens + workload.num_output_tokens)

    def blocks_of(self, num_tokens: int) -> int:
        """What one sequence holds at most."""
        return peak_blocks(self.groups, num_tokens, self.block_size, self.chunk)

    def limits(self, policy: str, num_blocks: int, num_swap_slots: int, **more: object) -> dict[str, object]:
        """Of a core. Whatever is no policy of ours has no swap space."""
        slots = (self.num_swap_slots or num_swap_slots) if policy in (AUTO, SWAP) else 0
        preemption = policy if policy in (AUTO, SWAP) else RECOMPUTE
        return {"num_blocks": num_blocks, "num_swap_slots": slots, "preemption": preemption} | SNAPSHOT_ALWAYS | more


class Steady:
    """Requests of one kind, all at once, on a budget that is a share of what they need."""

    def __init__(self, shape: Shape) -> None:
        self._shape, self.budgets = shape, shape.budgets
        asked = [Workload.parse(mix) for mix in shape.mixes]
        self.mixes = [shape.workload(mix.num_requests, mix.num_prompt_tokens, mix.num_output_tokens) for mix in asked]
        self.num_blocks = max(shape.blocks(mix) for mix in self.mixes)
        self.num_swap_slots = shape.num_swap_slots or self.num_blocks

    def budget_blocks(self, mix: Workload, budget: float) -> int:
        """Never less than one request needs."""
        needed = self._shape.blocks(mix)
        return max(round(needed * budget / 100), needed // mix.num_requests)

    def cases(self, policies: Sequence[str]) -> list[Case]:
        return [self._case(mix, budget, policy) for mix in self.mixes for budget in self.budgets for policy in policies]

    def _case(self, mix: Workload, budget: float, policy: str) -> Case:
        limits = self._shape.limits(policy, self.budget_blocks(mix, budget), self._shape.blocks(mix))
        kind = Reserving if policy == ORACLE else AllAtOnce
        return Case(_at(mix, budget), policy, str(mix), limits, lambda vocab_size: kind(mix.requests(self._shape.seed, vocab_size)))

    def figures(self, measured: Measured) -> dict[str, float]:
        return {"output_tok_s": measured.output_tok_s}

    def ratios(self, runs: Runs) -> Ratios:
        rates = {case: median(run.output_tok_s for run in runs[case]) for case in runs}
        ratios: Ratios = {}
        for mix in self.mixes:
            for budget in self.budgets:
                here = {policy: rate for (label, policy), rate in rates.items() if label == _at(mix, budget)}
                whole = {policy: rate for (label, policy), rate in rates.items() if label == _at(mix, max(self.budgets))}
                shares = {f"{policy}_of_its_most": here[policy] / whole[policy] for policy in whole}
                ratios[_at(mix, budget)] = over(here, ORACLE) | over(here, RECOMPUTE) | shares
        return ratios


class Bursts:
    """Jobs that decode on long contexts, and bursts of urgent requests that need the whole pool."""

    LABEL, JOBS_ALONE, BURST_ALONE = "jobs and bursts", "jobs alone", "one burst alone"

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._jobs, self._burst = shape.workload(8, 4000, 256), shape.workload(8, 4000, 32)
        self._num_bursts, self._between = 5, shape.tokens(40)
        self._pool = max(shape.blocks(self._jobs), shape.blocks(self._burst))
        self.num_blocks = shape.blocks(self._jobs) + shape.blocks(self._burst)
        self.num_swap_slots = shape.num_swap_slots or shape.blocks(self._jobs)

    def cases(self, policies: Sequence[str]) -> list[Case]:
        alone = self._limits(ALONE, self.num_blocks)
        seed = self._shape.seed
        return [
            Case(self.JOBS_ALONE, ALONE, str(self._jobs), alone, lambda vocab_size: AllAtOnce(self._jobs.requests(seed, vocab_size), "jobs")),
            Case(self.BURST_ALONE, ALONE, str(self._burst), alone, lambda vocab_size: AllAtOnce(self._burst.requests(seed + 1, vocab_size), BURSTS)),
            *(self._case(policy) for policy in policies),
        ]

    def _case(self, policy: str) -> Case:
        limits = self._limits(policy, self.num_blocks if policy == ORACLE else self._pool)
        workload = f"{self._jobs}+{self._num_bursts}*{self._burst}"
        seed = self._shape.seed
        return Case(self.LABEL, policy, workload, limits, lambda size: JobsAndBursts(self._jobs, self._burst, self._num_bursts, self._between, seed, size))

    def _limits(self, policy: str, num_blocks: int) -> dict[str, object]:
        return self._shape.limits(policy, num_blocks, self.num_swap_slots, scheduling_policy="priority")

    def figures(self, measured: Measured) -> dict[str, float]:
        return {"seconds": measured.seconds} | _percentiles("burst_ttft", measured.ttft_s.get(BURSTS, ()))

    def ratios(self, runs: Runs) -> Ratios:
        """`lost_s` is what the jobs took longer than alone, less what the bursts take alone."""
        jobs, burst = (runs[label, ALONE] for label in (self.JOBS_ALONE, self.BURST_ALONE))
        own_s = median(run.seconds for run in jobs) + self._num_bursts * median(run.seconds for run in burst)
        policies = [policy for label, policy in runs if label == self.LABEL]
        lost = {policy: median(run.seconds for run in runs[self.LABEL, policy]) - own_s for policy in policies}
        idle = _percentiles("ttft", [time for run in burst for time in run.ttft_s[BURSTS]])
        ratios: dict[str, float] = {f"{policy}_lost_s": seconds for policy, seconds in lost.items()}
        if RECOMPUTE in lost and lost[RECOMPUTE] > 0:
            ratios |= {f"{policy}_lost_over_recompute": seconds / lost[RECOMPUTE] for policy, seconds in lost.items() if policy != RECOMPUTE}
        for policy in policies:
            busy = _percentiles("ttft", [time for run in runs[self.LABEL, policy] for time in run.ttft_s[BURSTS]])
            ratios |= {f"{policy}_{name}_over_idle": busy[name] / idle[name] for name in busy}
        return {self.LABEL: ratios}


class Talking:
    """Conversations in a pool that holds only some of them; an answer begins when what it follows is there again."""

    def __init__(self, shape: Shape, talk: Talk, num_fitting: float = 4) -> None:
        self._shape, self._talk = shape, talk
        self._workload = f"{talk.num_sessions}:{talk.num_start}+{talk.num_turns}*{talk.num_added}:{talk.num_answered}"
        self._num_fitting = num_fitting
        self.num_blocks = talk.num_sessions * shape.blocks_of(talk.longest) + 1
        self._pool = int(num_fitting * shape.blocks_of(talk.longest))
        self.num_swap_slots = shape.num_swap_slots or self.num_blocks
        self._label = f"pool of {self._pool} blocks"

    @classmethod
    def conversations(cls, shape: Shape) -> Talking:
        """Two turns in flight, people think between."""
        talk = Talk(num_start=shape.tokens(3000), num_added=shape.tokens(400), num_answered=shape.tokens(32), mean_think_s=2.0 * shape.scale)
        return cls(shape, talk)

    @classmethod
    def converse(cls, shape: Shape) -> Talking:
        """One turn at a time in a fixed order, as a program of peers drives them."""
        talk = Talk(num_start=shape.tokens(3000), num_added=shape.tokens(100), num_answered=1, num_in_flight=1, mean_think_s=0.0)
        return cls(shape, talk)

    @classmethod
    def long(cls, shape: Shape) -> Talking:
        """As `converse`, with four contexts so long that the pool holds one and a half of them."""
        talk = Talk(4, shape.tokens(30_000), shape.tokens(100), num_answered=1, num_turns=2, num_in_flight=1, mean_think_s=0.0)
        return cls(shape, talk, num_fitting=1.5)

    @property
    def talk(self) -> Talk:
        return self._talk

    @property
    def pool_tokens(self) -> int:
        """Of contexts as long as these become, in whole blocks."""
        size = self._shape.block_size
        return int(self._num_fitting * -(-self._talk.longest // size) * size)

    def cases(self, policies: Sequence[str]) -> list[Case]:
        return [self._case(policy) for policy in policies]

    def _case(self, policy: str) -> Case:
        limits = self._shape.limits(policy, self.num_blocks if policy == ORACLE else self._pool, self.num_swap_slots)
        return Case(self._label, policy, self._workload, limits, lambda vocab_size: Conversations(self._talk, self._shape.seed, vocab_size))

    def figures(self, measured: Measured) -> dict[str, float]:
        return _percentiles("follow_up_ttft", measured.ttft_s[FOLLOW_UPS])

    def ratios(self, runs: Runs) -> Ratios:
        """Times over the oracle's: smaller is better."""
        times = {policy: self._times(measured) for (_, policy), measured in runs.items()}
        ratios: dict[str, float] = {f"{policy}_{name}_s": value for policy, found in times.items() for name, value in found.items()}
        if ORACLE in times:
            ratios |= {f"{policy}_{name}_over_oracle": value / times[ORACLE][name] for policy, found in times.items() for name, value in found.items()}
        return {self._label: ratios}

    def _times(self, measured: Sequence[Measured]) -> dict[str, float]:
        return _percentiles("ttft", [time for run in measured for time in run.ttft_s[FOLLOW_UPS]])


class Unpressed:
    """The same requests with and without swap space where memory suffices, in pairs whose order alternates."""

    LABEL, ON, OFF = "no pressure", AUTO, RECOMPUTE

    def __init__(self, shape: Shape, num_pairs: int = 10) -> None:
        self._shape, self._num_pairs = shape, num_pairs
        self._workload = shape.workload(16, 128, 64)
        self.num_blocks = 2 * shape.blocks(self._workload)
        self.num_swap_slots = shape.num_swap_slots or self.num_blocks

    def cases(self, policies: Sequence[str]) -> list[Case]:
        """`policies` do not matter here: what is compared is swap space or none."""
        pair = [self._case(self.ON), self._case(self.OFF)]
        return [case for number in range(self._num_pairs) for case in (pair if number % 2 else reversed(pair))]

    def _case(self, policy: str) -> Case:
        limits = self._shape.limits(policy, self.num_blocks, self.num_swap_slots)
        return Case(self.LABEL, policy, str(self._workload), limits, lambda size: AllAtOnce(self._workload.requests(self._shape.seed, size)))

    def figures(self, measured: Measured) -> dict[str, float]:
        waited_s = measured.step_s.get("swap_wait", 0.0)
        return {
            "output_tok_s": measured.output_tok_s,
            "core_share": measured.core_s / measured.seconds,
            "copy_share": (measured.copy_s + waited_s) / measured.seconds,
        }

    def ratios(self, runs: Runs) -> Ratios:
        on, off = (runs[self.LABEL, policy] for policy in (self.ON, self.OFF))
        lost = [with_swap.seconds / without.seconds - 1.0 for with_swap, without in zip(on, off, strict=True)]
        low, high = median_interval(lost)
        shares = {name: median(self.figures(run)[name] for run in on) for name in ("core_share", "copy_share")}
        return {self.LABEL: {"pairs": len(lost), "loss": median(lost), "loss_95_low": low, "loss_95_high": high} | shares}


#: By the name that people call them by.
SCENARIOS: dict[str, Callable[[Shape], Scenario]] = {
    "steady": Steady,
    "bursts": Bursts,
    "conversations": Talking.conversations,
    "converse": Talking.converse,
    "long": Talking.long,
    "no-pressure": Unpressed,
}


def over(values: Mapping[str, float], reference: str) -> dict[str, float]:
    """Each value over that of the reference, if that is there."""
    if reference not in values:
        return {}
    return {f"{name}_over_{reference}": value / values[reference] for name, value in values.items() if name != reference}


def _at(mix: Workload, budget: float) -> str:
    return f"{mix} at {budget:g} %"


def _percentiles(name: str, times: Sequence[float]) -> dict[str, float]:
    return {f"{name}_{rank}": value for rank, value in percentiles(times, (50, 99)).items()}
