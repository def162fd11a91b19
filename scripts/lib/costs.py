"""What steps and copies cost a worker that is only simulated: seconds as a function of what a step computes.

A step is a list of `Work`, one for each slice. `StepCost` is the least that tells a step from a token, `CpuCost` is
fitted to measurements, `GpuCost` is derived from the constants of a card and a model.
`LinkCost` is the way between device and arena, the same for all. Pure functions; they know no worker and no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class Work(NamedTuple):
    """`num_tokens` positions from `start` on, each of which attends to all before it."""

    start: int
    num_tokens: int
    sample: bool

    @property
    def num_attended(self) -> int:
        """Pairs of a position and one it attends to, itself included."""
        return self.num_tokens * self.start + self.num_tokens * (self.num_tokens + 1) // 2

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1


class Cost(Protocol):
    """Seconds that a step takes while nothing is copied."""

    def of(self, works: Sequence[Work]) -> float: ...


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step: what it costs to run at all, and what each token adds. The defaults suit a small model on a few cores."""

    per_step_s: float = 0.020
    per_token_s: float = 0.001

    def of(self, works: Sequence[Work]) -> float:
        return self.per_step_s + self.per_token_s * sum(work.num_tokens for work in works)


@dataclass(frozen=True)
class CpuCost:
    """A CPU, where every row and token costs compute and attention reads what it attends to.

        t = step + row * decodes + token * (tokens of prefills) + read * (positions that decodes attend to)
                 + pair * (pairs of positions in prefills)

    The defaults were fitted to SmolLM2-135M in float32 on two cores of an AMD Zen 3, the fastest of four passes.
    """

    step_s: float = 0.033
    row_s: float = 0.0045
    token_s: float = 0.0027
    read_s: float = 1.1e-5
    pair_s: float = 5.4e-7

    @staticmethod
    def terms(works: Sequence[Work]) -> tuple[float, ...]:
        """What the five numbers are multiplied with, in their order."""
        decodes = [work for work in works if work.is_decode]
        prefills = [work for work in works if not work.is_decode]
        return (
            1.0,
            len(decodes),
            sum(work.num_tokens for work in prefills),
            sum(work.num_attended for work in decodes),
            sum(work.num_attended for work in prefills),
        )

    @classmethod
    def fitted(cls, samples: Sequence[tuple[Sequence[Work], float]]) -> CpuCost:
        """Least squares over relative errors of steps and their seconds; what would come out negative costs nothing."""
        seconds = np.array([seconds for _, seconds in samples])
        terms = np.array([cls.terms(works) for works, _ in samples]) / seconds[:, None]
        sizes = np.maximum(np.linalg.norm(terms, axis=0), 1e-30)  # brought to one size, for their units are orders of magnitude apart
        kept = list(range(terms.shape[1]))
        while True:
            found = np.linalg.lstsq(terms[:, kept] / sizes[kept], np.ones(len(samples)), rcond=None)[0]
            if found.min() >= 0:
                break
            del kept[int(found.argmin())]
        numbers = np.zeros(terms.shape[1])
        numbers[kept] = found / sizes[kept]
        return cls(*numbers.tolist())

    def of(self, works: Sequence[Work]) -> float:
        numbers = (self.step_s, self.row_s, self.token_s, self.read_s, self.pair_s)
        return sum(number * term for number, term in zip(numbers, self.terms(works), strict=True))


@dataclass(frozen=True)
class GpuCost:
    """A card that either moves bytes or multiplies, whichever takes longer; the defaults are Llama-3.1-8B in bfloat16 on one H200.

        linear    = max(weight bytes / memory rate, (FLOP per token * tokens + FLOP per logits * sampled rows) / matrix rate)
        decode    = KV bytes of all positions that decodes attend to / KV rate
        attention = FLOP per pair * pairs of positions in prefills / attention rate
        t         = linear + decode + attention + other

    A weight is read once in a step, however many rows use it: 15.01 GB with the output layer, without the input
    embedding. 8.03 G parameters less both embeddings are 6.98 G, two FLOP each per token; logits are 2 * 0.525 GFLOP a
    row. A pair of positions costs 4 * 4,096 * 32 = 524,288 FLOP (scores and weighted sum, over all layers), which for a
    prompt of n tokens is 262,144 n per token. KV is 2 * 32 layers * 8 heads * 128 * 2 bytes = 131,072 a token.
    """

    weight_bytes: float = 15.01e9
    flop_per_token: float = 13.96e9
    flop_per_logits: float = 1.05e9
    flop_per_pair: float = 524_288.0
    kv_bytes_per_token: int = 131_072
    memory_bytes_s: float = 4.3e12
    kv_bytes_s: float = 4.3e12
    matrix_flop_s: float = 790e12
    attention_flop_s: float = 550e12
    other_s: float = 0.0

    @classmethod
    def well_made(cls) -> GpuCost:
        """What a good engine reaches: weights at 80 % and KV at 85 % of the memory rate, 620 TFLOP/s, 0.25 ms of everything else."""
        return cls(memory_bytes_s=0.80 * 4.3e12, kv_bytes_s=0.85 * 4.3e12, matrix_flop_s=620e12, other_s=0.25e-3)

    def of(self, works: Sequence[Work]) -> float:
        decodes = [work for work in works if work.is_decode]
        prefills = [work for work in works if not work.is_decode]
        flop = self.flop_per_token * sum(work.num_tokens for work in works) + self.flop_per_logits * sum(work.sample for work in works)
        linear = max(self.weight_bytes / self.memory_bytes_s, flop / self.matrix_flop_s)
        decode = self.kv_bytes_per_token * sum(work.num_attended for work in decodes) / self.kv_bytes_s
        attention = self.flop_per_pair * sum(work.num_attended for work in prefills) / self.attention_flop_s
        return linear + decode + attention + self.other_s


@dataclass(frozen=True)
class LinkCost:
    """Copies between device and arena; each direction has an engine of its own, and both share what the link carries.

    The defaults are PCIe 5.0 x16 with pieces of some MiB: 50 GB/s one way, 42 each both ways together, and a copy
    takes 1.2 % of the card's memory rate from what is being computed.
    """

    out_bytes_s: float = 50e9
    in_bytes_s: float = 50e9
    both_share: float = 0.84  #: of its rate that each direction keeps while the other is busy
    per_block_s: float = 2e-6  #: what starting one copy costs
    compute_share: float = 0.012  #: of the compute that each busy direction takes


def prefill_tok_s(cost: Cost, num_tokens: int = 512) -> float:
    """The rate a worker would measure in warm-up, at the start of a prompt."""
    return num_tokens / cost.of([Work(0, num_tokens, True)])
