"""What benchmarks ask of an engine: requests of random tokens, drawn from a seed and nothing else.

The same workload and seed give the same requests for every engine, policy and run. Must not know engines.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

#: Ids below are mostly special tokens and bytes; ids above this are not in every vocabulary.
FIRST_TOKEN_ID = 100
END_TOKEN_ID = 40_000


@dataclass(frozen=True)
class Request:
    """A prompt and exactly how many tokens to generate."""

    prompt_ids: list[int]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + self.num_output_tokens


@dataclass(frozen=True)
class Workload:
    """`n:in:out`: n requests at once, each of `in` random prompt tokens and exactly `out` output tokens."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Raises ValueError, so that argparse refuses what is no workload."""
        numbers = [int(part) for part in text.split(":")]
        if len(numbers) != 3 or min(numbers) < 1:
            raise ValueError(f"a workload is n:in:out, three positive numbers; not {text!r}")
        return cls(*numbers)

    @property
    def num_tokens(self) -> int:
        """Of each request."""
        return self.num_prompt_tokens + self.num_output_tokens

    def __str__(self) -> str:
        return f"{self.num_requests}:{self.num_prompt_tokens}:{self.num_output_tokens}"

    def requests(self, seed: int, vocab_size: int) -> list[Request]:
        tokens = TokenSource(seed, vocab_size)
        return [Request(tokens.take(self.num_prompt_tokens), self.num_output_tokens) for _ in range(self.num_requests)]


class TokenSource:
    """Random token ids that every vocabulary of `vocab_size` has."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._random = random.Random(seed)
        self._end = min(END_TOKEN_ID, vocab_size)
        self._first = min(FIRST_TOKEN_ID, self._end - 1)

    def take(self, count: int) -> list[int]:
        return [self._random.randrange(self._first, self._end) for _ in range(count)]


def uneven_outputs(num_requests: int, seed: int, vocab_size: int, *, num_prompt_tokens: int = 64, median: int = 64, longest: int = 512) -> list[Request]:
    """Outputs as people's are: clip(lognormal(median, sigma 1), 8, longest), all from one seed."""
    lengths, tokens = random.Random(seed), TokenSource(seed, vocab_size)
    outputs = [int(min(longest, max(8, median * lengths.lognormvariate(0.0, 1.0)))) for _ in range(num_requests)]
    return [Request(tokens.take(num_prompt_tokens), output) for output in outputs]


def mixed_lengths(
    num_requests: int, seed: int, vocab_size: int, *, mean: int = 400, long_prompt: int = 2000, long_every: int = 20, num_output_tokens: int = 64
) -> list[Request]:
    """Many short prompts and every `long_every`-th of `long_prompt` tokens; prompt and output together are `mean` long on average."""
    num_long = len(range(0, num_requests, long_every))
    num_short = num_requests - num_long
    num_short_tokens = num_requests * (mean - num_output_tokens) - num_long * long_prompt
    if num_short_tokens < 2 * num_short:
        raise ValueError(f"{num_long} prompts of {long_prompt} tokens among {num_requests} leave no room for short ones at a mean of {mean}")
    usual, num_longer = divmod(num_short_tokens, num_short)
    lengths, tokens = random.Random(seed), TokenSource(seed, vocab_size)
    offsets = [lengths.randint(-(usual // 2), usual // 2) for _ in range(num_short // 2)]
    # As far above as below, so that the mean is exactly what was asked for.
    balanced = (*offsets, *(0 for _ in range(num_short % 2)), *(-offset for offset in reversed(offsets)))
    short = iter([usual + offset + (index < num_longer) for index, offset in enumerate(balanced)])
    prompts = [long_prompt if index % long_every == 0 else next(short) for index in range(num_requests)]
    return [Request(tokens.take(length), num_output_tokens) for length in prompts]


def shared_prefix(num_requests: int, seed: int, vocab_size: int, *, num_shared: int, num_own: int, num_output_tokens: int) -> list[Request]:
    """All prompts begin with the same `num_shared` tokens and go on with `num_own` of their own."""
    tokens = TokenSource(seed, vocab_size)
    prefix = tokens.take(num_shared)
    return [Request([*prefix, *tokens.take(num_own)], num_output_tokens) for _ in range(num_requests)]


def mean_tokens(requests: Sequence[Request]) -> float:
    """Of prompt and output together."""
    return sum(request.num_tokens for request in requests) / len(requests)
