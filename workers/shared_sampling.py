"""Drawing tokens where ranks share the vocabulary: what `workers.sampler` draws from whole logits, bit for bit.

Bias, penalties, masks, temperature and noise are each id's own affair. So every rank scores its ids, and the ranks
show each other their best: the highest score wins, the lowest id on a tie. What top-k, top-p, min-p and log
probabilities leave depends on all ids: the logits of such rows, and of no others, are gathered first.

All ranks must call this alike, with logits of which they know together that they are numbers. All get the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.gumbel import best_of, noise_key
from workers.sampler import Floats, Sampled, SamplingRow, adjusted, is_greedy, is_plain_greedy, needs_all_ids, relative, sample

#: The best of some ids: (value, id).
_Best = tuple[float, int]


@dataclass(frozen=True)
class Share:
    """The ids of the vocabulary that one rank has, and its ways to the others."""

    first_id: int
    gather: Callable[[Tensor], Tensor]  #: logits of this rank's ids to those of all
    exchange: Callable[[Tensor], Tensor]  #: a few numbers [n] to those of all ranks [size, n]


def sample_shared(logits: Tensor, rows: Sequence[SamplingRow], positions: Sequence[int], vocab_size: int, share: Share) -> list[Sampled]:
    """As `sampler.sample`, of this rank's share of the logits [N, share]."""
    whole = [index for index, row in enumerate(rows) if needs_all_ids(row.params)]
    single = [index for index, row in enumerate(rows) if not needs_all_ids(row.params)]
    drawn: dict[int, Sampled] = {}
    if whole:
        gathered = share.gather(logits[whole])
        drawn |= zip(whole, sample(gathered, [rows[i] for i in whole], [positions[i] for i in whole], vocab_size), strict=True)
    if single:
        known = logits[single] if whole else logits
        known = known[:, : max(0, vocab_size - share.first_id)]
        token_ids = _draw(known, [rows[i] for i in single], [positions[i] for i in single], share)
        drawn |= {index: Sampled(token_id, None) for index, token_id in zip(single, token_ids, strict=True)}
    return [drawn[index] for index in range(len(rows))]


def _draw(known: Tensor, rows: Sequence[SamplingRow], positions: Sequence[int], share: Share) -> list[int]:
    """One id for each row. The ranks meet once for their best ids, and once more if there is noise to add."""
    if all(is_plain_greedy(row, position) for row, position in zip(rows, positions, strict=True)):
        return [token_id for _, token_id in _winners(_highest(known, share.first_id), share)]
    values = [adjusted(raw, row, position, share.first_id) for raw, row, position in zip(known.cpu().numpy(), rows, positions, strict=True)]
    best = _winners([_best(each, share.first_id) for each in values], share)
    token_ids = [token_id for _, token_id in best]
    noisy = [index for index, row in enumerate(rows) if not is_greedy(row.params) and best[index][0] > -math.inf]
    if noisy:
        scored = [_best_with_noise(values[i], best[i][0], rows[i], positions[i], share.first_id) for i in noisy]
        for index, (_, token_id) in zip(noisy, _winners(scored, share), strict=True):
            token_ids[index] = token_id
    return token_ids


def _winners(own: Sequence[_Best], share: Share) -> list[_Best]:
    """Of each row the best over all ranks, whose ids rise with their rank: the first of equal ones has the lowest id."""
    shown = torch.tensor(own, dtype=torch.float64)  # exact for ids as for scores
    ranks: NDArray[np.float64] = share.exchange(shown.view(-1)).numpy().reshape(-1, len(own), 2)
    winners = ranks[ranks[:, :, 0].argmax(axis=0), np.arange(len(own))]
    return [(value, int(token_id)) for value, token_id in winners.tolist()]


def _highest(known: Tensor, first_id: int) -> list[_Best]:
    """The best id of each row; of no ids, one that never wins."""
    if not known.shape[1]:
        return [(-math.inf, first_id)] * len(known)
    values, indices = known.max(dim=-1)
    return [(value, first_id + index) for value, index in zip(values.tolist(), indices.tolist(), strict=True)]


def _best(values: Floats, first_id: int) -> _Best:
    index = int(values.argmax()) if len(values) else 0
    return (float(values[index]) if len(values) else -math.inf, first_id + index)


def _best_with_noise(values: Floats, best: float, row: SamplingRow, position: int, first_id: int) -> _Best:
    scores = relative(values, best, row.params.temperature)
    index, score = best_of(scores, np.arange(first_id, first_id + len(scores)), noise_key(row.seed, position))
    return (score, first_id + index)
