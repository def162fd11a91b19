"""Cells: small random scenarios in which nobody may notice that memory runs out.

A cell is a pure function of its number and a `Scale`: who asks for what and when, how large pool and arena are, how
prompts are cut, who is made to yield. What is asked comes from a catalogue that many cells share, so prompts have
beginnings in common, and what the model answers to each sequence alone need be computed only once.
Must not know engines; `equality` runs cells and compares.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pagemill.ids import NONE
from pagemill.keys import choice_seed
from pagemill.kv_groups import peak_blocks
from pagemill.messages.decisions import VictimKind
from pagemill.messages.sequences import KvGroup, SamplingParams

Pressure = Literal["none", "some", "hard"]
Arena = Literal["none", "tiny", "ample"]
Policy = Literal["auto", "swap", "recompute"]
Prices = Literal["measured", "swap is cheap", "recompute is cheap"]

#: More tokens than all prompts of a cell together.
UNLIMITED = 4096
BUDGETS = (1, 7, 16, 64, UNLIMITED)
MAX_FORCED = 10
#: Prompt tokens per second that the planner believes in until it has measured some.
PREFILL_TOK_S: dict[Prices, float | None] = {"measured": None, "swap is cheap": 1.0, "recompute is cheap": 1e9}
#: Ids that every tokenizer has and that are neither special nor rare.
_TOKEN_IDS = range(3, 500)
#: So many of them are often drawn before an output ends by itself.
_NUM_STOP_IDS = 40

#: Every axis with its values, as `Cell.places` names them.
AXES: dict[str, tuple[object, ...]] = {
    "pressure": ("none", "some", "hard"),
    "arena": ("none", "tiny", "ample"),
    "--preemption": ("auto", "swap", "recompute"),
    "prices": ("measured", "swap is cheap", "recompute is cheap"),
    "forced preemptions": tuple(range(MAX_FORCED + 1)),
    "tokens of a step": (1, 7, 16, 64, "all"),
    "plans in flight": (1, 2),
    "prefix caching": ("on", "off"),
    "warm-up": ("yes", "no"),
    "late copies": ("yes", "no"),
    "late news of copies": ("yes", "no"),
    "temperature": (0.0, 0.7, 1.3),
    "penalties": ("yes", "no"),
    "logit bias": ("yes", "no"),
    "stop ids": ("yes", "no"),
    "choices": (1, 2, 3),
    "log probabilities": ("none", 0, 1, 2, 3),
}


@dataclass(frozen=True)
class Scale:
    """How large cells are, and what they need: for a model that is fast, or for one that is slow."""

    block_size: int = 16
    num_blocks: int = 128  #: of the loaded pool, for each KV group: no cell needs more
    num_swap_slots: int = 128  #: of the arena, for each KV group
    stem_tokens: int = 64  #: prompts begin with part of a stem
    output_tokens: tuple[int, ...] = (1, 3, 8, 8, 17, 17)  #: some are longer than a block
    num_requests: int = 24  #: of a catalogue
    cells_per_catalogue: int = 100
    max_requests: int = 5  #: of a cell; some have several choices
    num_threads: int = 1  #: 0: as many as torch takes


#: For a model that computes a step in a millisecond, and for one that takes twenty.
TINY = Scale()
SLOW = Scale(
    num_threads=0,
    num_blocks=48,
    num_swap_slots=48,
    stem_tokens=40,
    output_tokens=(1, 3, 4, 6, 9),
    num_requests=6,
    cells_per_catalogue=50,
    max_requests=3,
)


#: For one whose windows are of 512 tokens: half of the prompts are longer.
LONG = dataclasses.replace(SLOW, num_blocks=64, num_swap_slots=64, stem_tokens=576, num_requests=4)


@dataclass(frozen=True)
class Asked:
    """One sequence: what its tokens are a function of."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """Prompt and output, if it does not end before."""
        return len(self.prompt_ids) + self.max_tokens


@dataclass(frozen=True)
class Request:
    """A prompt with n choices, which the frontend makes n sequences of."""

    asked: tuple[Asked, ...]
    prefix_caching: bool

    @property
    def places(self) -> dict[str, object]:
        """Its value on each axis of requests."""
        sampling = self.asked[0].sampling
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        return {
            "temperature": sampling.temperature,
            "penalties": _yes(penalties != (1.0, 0.0, 0.0)),
            "logit bias": _yes(sampling.logit_bias),
            "stop ids": _yes(sampling.stop_token_ids),
            "choices": len(self.asked),
            "log probabilities": "none" if sampling.num_logprobs == NONE else sampling.num_logprobs,
        }


@dataclass(frozen=True)
class Arrival:
    """A request comes after so many steps, and its client may go away after so many more."""

    request: Request
    at_step: int
    stays_steps: int | None = None


@dataclass(frozen=True)
class Forced:
    """Somebody is made to yield, so many steps after the one before."""

    steps_later: int
    kind: VictimKind
    num_blocks: int
    whom: float  #: which of those running, from 0 to 1


@dataclass(frozen=True)
class Cell:
    """One scenario."""

    number: int
    warm_up: tuple[Request, ...]  #: one after another, before the others come
    arrivals: tuple[Arrival, ...]
    forced: tuple[Forced, ...]
    pressure: Pressure
    num_blocks: int
    arena: Arena
    num_swap_slots: int
    preemption: Policy
    prices: Prices
    budget: int  #: tokens of a step
    max_num_seqs: int
    max_plans_in_flight: int
    prefix_caching: bool
    late_copies: bool  #: copies in the background take long
    late_news: bool  #: that they are done is known some steps later

    @property
    def requests(self) -> list[Request]:
        return [*self.warm_up, *(arrival.request for arrival in self.arrivals)]

    @property
    def asked(self) -> Iterator[Asked]:
        """Every sequence."""
        for request in self.requests:
            yield from request.asked

    @property
    def axes(self) -> dict[str, object]:
        """Its value on each axis of cells."""
        return {
            "pressure": self.pressure,
            "arena": self.arena,
            "--preemption": self.preemption,
            "prices": self.prices,
            "forced preemptions": len(self.forced),
            "tokens of a step": "all" if self.budget == UNLIMITED else self.budget,
            "plans in flight": self.max_plans_in_flight,
            "prefix caching": "on" if self.prefix_caching else "off",
            "warm-up": _yes(self.warm_up),
            "late copies": _yes(self.late_copies),
            "late news of copies": _yes(self.late_news),
        }

    @property
    def places(self) -> Counter[str]:
        """`axis: value` for all axes of the cell and of its requests."""
        return Counter(f"{axis}: {value}" for axes in (self.axes, *(request.places for request in self.requests)) for axis, value in axes.items())


def every_place() -> list[str]:
    """All that `Cell.places` may name."""
    return [f"{axis}: {value}" for axis, values in AXES.items() for value in values]


class CellSource:
    """Draws cells of one scale, for a model with these KV groups. The catalogue of the last one is kept."""

    def __init__(self, scale: Scale, groups: tuple[KvGroup, ...] = (KvGroup(),)) -> None:
        self.scale, self.groups = scale, groups
        self._catalogue: tuple[int, list[Request]] = (NONE, [])

    def cell(self, number: int) -> Cell:
        """The cell of this number, the same each time."""
        draw = random.Random(f"cell {number}")
        catalogue = self._requests(number // self.scale.cells_per_catalogue)
        budget = draw.choice(BUDGETS)
        most = self.scale.max_requests
        if budget <= 7:  # such small steps are many
            catalogue = sorted(catalogue, key=lambda request: len(request.asked[0].prompt_ids))[: len(catalogue) // 2]
            most = max(1, most // 2)
        arrivals = tuple(_arrival(draw, draw.choice(catalogue)) for _ in range(draw.randint(1, most)))
        warm_up = tuple(draw.sample(catalogue, draw.choice((0, 0, 1, 2) if budget > 1 else (0, 0, 0, 1))))
        pressure: Pressure = draw.choice(("none", "some", "some", "hard"))
        arena: Arena = draw.choice(("none", "tiny", "ample", "ample"))
        return Cell(
            number=number,
            warm_up=warm_up,
            arrivals=arrivals,
            forced=tuple(_forced(draw) for _ in range(draw.choice((0, *range(MAX_FORCED + 1))))),
            pressure=pressure,
            num_blocks=self._num_blocks(draw, pressure, warm_up, arrivals),
            arena=arena,
            num_swap_slots={"none": 0, "tiny": draw.randint(1, 4), "ample": self.scale.num_swap_slots * len(self.groups)}[arena],
            preemption=draw.choice(("auto", "auto", "swap", "recompute")),
            prices=draw.choice(("measured", "swap is cheap", "recompute is cheap")),
            budget=budget,
            max_num_seqs=draw.choice((1, 2, 8, 8, 8)),
            max_plans_in_flight=draw.choice((1, 2)),
            prefix_caching=draw.random() < 0.8,
            late_copies=draw.random() < 0.3,
            late_news=draw.random() < 0.3,
        )

    def _num_blocks(self, draw: random.Random, pressure: Pressure, warm_up: tuple[Request, ...], arrivals: tuple[Arrival, ...]) -> int:
        """The longest sequence always fits, or it would end before it should."""
        if pressure == "none":
            return self.scale.num_blocks * len(self.groups)
        needs = [self._blocks_for(arrival.request) for arrival in arrivals]
        longest = max([*needs, *map(self._blocks_for, warm_up)])
        if pressure == "hard":
            return longest + draw.randint(0, 1)
        together = sum(need * len(arrival.request.asked) for need, arrival in zip(needs, arrivals, strict=True))
        return max(longest, int(together * draw.uniform(0.4, 0.8)))

    def _blocks_for(self, request: Request) -> int:
        """For one choice."""
        return peak_blocks(self.groups, request.asked[0].num_tokens, self.scale.block_size, chunk=1)

    def _requests(self, number: int) -> list[Request]:
        if self._catalogue[0] != number:
            draw = random.Random(f"catalogue {number}")
            stems = [draw.choices(_TOKEN_IDS, k=self.scale.stem_tokens) for _ in range(3)]
            self._catalogue = (number, [self._request(draw, stems) for _ in range(self.scale.num_requests)])
        return self._catalogue[1]

    def _request(self, draw: random.Random, stems: list[list[int]]) -> Request:
        size, longest = self.scale.block_size, self.scale.stem_tokens
        border = size * draw.randint(0, longest // size)
        stem = draw.choice(stems)[: max(1, border + draw.choice((-1, 0, 0, 1, size // 2)))]
        prompt_ids = (*stem, *draw.choices(_TOKEN_IDS, k=draw.choice((0, 0, 1, 4, size + 3))))
        sampling, seed = _sampling(draw), draw.getrandbits(64)
        max_tokens = draw.choice(self.scale.output_tokens)
        num_choices = draw.choice((1, 1, 1, 1, 2, 3))
        asked = tuple(Asked(prompt_ids, sampling, choice_seed(seed, choice), max_tokens) for choice in range(num_choices))
        return Request(asked, prefix_caching=draw.random() < 0.9)


def _arrival(draw: random.Random, request: Request) -> Arrival:
    stays_steps = draw.randint(0, 30) if draw.random() < 0.08 else None
    return Arrival(request, draw.choice((0, 0, 1, 5, 20)), stays_steps)


def _forced(draw: random.Random) -> Forced:
    kind: VictimKind = draw.choice(("swap", "swap", "recompute", "keep"))
    return Forced(draw.choice((1, 1, 2, 4, 8)), kind, draw.choice((0, 1, 2, UNLIMITED)), draw.random())


def _sampling(draw: random.Random) -> SamplingParams:
    penalises, biases, stops = draw.random() < 0.3, draw.random() < 0.25, draw.random() < 0.4
    return SamplingParams(
        temperature=draw.choice((0.0, 0.0, 0.7, 1.3)),
        top_p=draw.choice((1.0, 1.0, 0.8)),
        top_k=draw.choice((0, 0, 20)),
        min_p=draw.choice((0.0, 0.0, 0.05)),
        repetition_penalty=draw.choice((1.2, 1.0)) if penalises else 1.0,
        presence_penalty=draw.choice((0.5, -0.5, 0.0)) if penalises else 0.0,
        frequency_penalty=draw.choice((0.7, 0.3)) if penalises else 0.0,
        logit_bias=tuple((token_id, draw.uniform(-8.0, 8.0)) for token_id in draw.sample(_TOKEN_IDS, 3)) if biases else (),
        num_logprobs=draw.choice((NONE, 0, 1, 2, 3)),
        min_tokens=draw.choice((0, 0, 3)) if stops else 0,
        stop_token_ids=tuple(draw.sample(_TOKEN_IDS, _NUM_STOP_IDS)) if stops else (),
    )


def _yes(condition: object) -> str:
    return "yes" if condition else "no"
