"""Drawing tokens: one pure function of logits, sampling parameters, seed, position and history.

Per row, in this order: logit bias, penalties, mask of stop ids before `min_tokens`, division by the
temperature, min-p, top-k, top-p (each over what the one before left, renormalised), then the argmax of
score + Gumbel noise (`workers.gumbel`). Every row is computed by itself with a fixed order of sums, so
batch mates change no bit. Log probabilities are those of the raw logits.

The sampler keeps no state but what rows hold of their history (`workers.token_counts`), and knows no request; who
may draw, and with what parameters, was decided before.
Where ranks share the vocabulary, `workers.shared_sampling` does the same with the parts that are public here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagemill.ids import NONE
from pagemill.messages.sequences import GREEDY_TEMPERATURE, SamplingParams, TokenLogprobs
from workers.gumbel import draw, noise_key
from workers.token_counts import TokenCounts

#: What a log probability is never below, for -inf is not JSON.
MIN_LOGPROB = -9999.0
#: How far below the best score candidates for top-p are looked for, until they hold enough of the mass.
_TOP_P_DEPTHS = (4.0, 8.0, 16.0, math.inf)

Floats = NDArray[np.float32]


class SamplingRow(msgspec.Struct):
    """What sampling needs to know about one row; belongs to the worker's row."""

    params: SamplingParams
    seed: int  #: unsigned 64 bit
    token_ids: array[int]  #: the whole known history, prompt first; grows with the row
    num_prompt_tokens: int
    counts: TokenCounts = msgspec.field(default_factory=TokenCounts)  #: of `token_ids`, as far as penalties have asked


class Sampled(msgspec.Struct, frozen=True):
    token_id: int
    logprobs: TokenLogprobs | None  #: None unless asked for


def sample(logits: Tensor, rows: Sequence[SamplingRow], positions: Sequence[int], vocab_size: int) -> list[Sampled]:
    """Draws one token for each row of logits [N, V] (float32, finite or -inf).

    `positions[i]` is the absolute position the token will stand at. Ids from `vocab_size` (the
    tokenizer's) on are never drawn. The logits are not changed.
    """
    known = logits[:, :vocab_size]
    if all(is_plain_greedy(row, position) for row, position in zip(rows, positions, strict=True)):
        return [Sampled(int(token_id), None) for token_id in known.argmax(-1).tolist()]
    values: Floats = known.cpu().numpy()
    return [_sample_row(raw, row, position) for raw, row, position in zip(values, rows, positions, strict=True)]


def _sample_row(raw: Floats, row: SamplingRow, position: int) -> Sampled:
    params = row.params
    token_id = _draw(adjusted(raw, row, position), params, noise_key(row.seed, position))
    logprobs = None if params.num_logprobs == NONE else _logprobs(raw, token_id, params.num_logprobs)
    return Sampled(token_id, logprobs)


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_TEMPERATURE


def is_plain_greedy(row: SamplingRow, position: int) -> bool:
    """Whether the row's token is the argmax of the raw logits and nothing else is asked."""
    return is_greedy(row.params) and row.params.num_logprobs == NONE and not _adjusts(row, position)


def needs_all_ids(params: SamplingParams) -> bool:
    """Whether more is asked than an argmax of what each id scores by itself."""
    return params.num_logprobs != NONE or (_filters(params) and not is_greedy(params))


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _masks_stops(row: SamplingRow, position: int) -> bool:
    return bool(row.params.stop_token_ids) and position - row.num_prompt_tokens < row.params.min_tokens


def _adjusts(row: SamplingRow, position: int) -> bool:
    return bool(row.params.logit_bias) or _penalises(row.params) or _masks_stops(row, position)


def adjusted(raw: Floats, row: SamplingRow, position: int, first_id: int = 0) -> Floats:
    """The logits, of the ids from `first_id` on, with bias, penalties and the mask of stop ids."""
    if not _adjusts(row, position):
        return raw
    params, values = row.params, raw.copy()
    for token_id, bias in params.logit_bias:
        if 0 <= token_id - first_id < len(values):
            values[token_id - first_id] += bias
    if _penalises(params):
        _penalise(values, row, first_id)
    if _masks_stops(row, position):
        values[[token_id - first_id for token_id in params.stop_token_ids if 0 <= token_id - first_id < len(values)]] = -math.inf
    return values


def _penalise(values: Floats, row: SamplingRow, first_id: int) -> None:
    """Repetition over prompt and output: divides what is positive, multiplies the rest. Presence and frequency over output."""
    params, counts = row.params, row.counts
    counts.count(row.token_ids, row.num_prompt_tokens)
    indices = np.array(counts.token_ids, dtype=np.int64) - first_id
    held = (indices >= 0) & (indices < len(values))
    seen, num_written = indices[held], np.array(counts.num_written, dtype=np.int64)[held]
    old = values[seen]
    values[seen] = np.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    written = num_written > 0
    values[seen[written]] -= num_written[written] * params.frequency_penalty + params.presence_penalty


def _draw(values: Floats, params: SamplingParams, key: int) -> int:
    best = int(values.argmax())
    if is_greedy(params) or values[best] == -math.inf:
        return best
    scores = relative(values, float(values[best]), params.temperature)
    if not _filters(params):
        return draw(scores, np.arange(len(scores)), key)
    token_ids = _kept(scores, params)
    return int(token_ids[draw(scores[token_ids], token_ids, key)])


def relative(values: Floats, best: float, temperature: float) -> NDArray[np.float64]:
    """Scores relative to that of the best id, so that a tiny temperature overflows for no id that could win."""
    scores: NDArray[np.float64] = (values.astype(np.float64) - best) / temperature
    return scores


def _filters(params: SamplingParams) -> bool:
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def _kept(scores: NDArray[np.float64], params: SamplingParams) -> NDArray[np.int64]:
    """The ids, rising, that min-p, top-k and top-p leave; scores are relative to the best, which is always kept."""
    floor = math.log(params.min_p) if params.min_p > 0 else -math.inf
    if 0 < params.top_k < len(scores):
        floor = max(floor, np.partition(scores, -params.top_k)[-params.top_k])
        token_ids = _highest(scores, np.flatnonzero(scores >= floor), params.top_k)
        return _nucleus(scores, token_ids, float(np.exp(scores[token_ids]).sum()), params.top_p)
    if params.top_p < 1:
        return _nucleus_from(scores, floor, params.top_p)
    return np.flatnonzero(scores >= floor)


def _nucleus_from(scores: NDArray[np.float64], floor: float, top_p: float) -> NDArray[np.int64]:
    """Top-p over all scores from `floor` on, sorting no more of them than it must."""
    weights = np.exp(scores)
    mass = float(weights[scores >= floor].sum())
    for depth in _TOP_P_DEPTHS:
        token_ids = np.flatnonzero(scores >= max(floor, -depth))
        if -depth <= floor or float(weights[token_ids].sum()) >= top_p * mass:
            break
    return _nucleus(scores, token_ids, mass, top_p)


def _nucleus(scores: NDArray[np.float64], token_ids: NDArray[np.int64], mass: float, top_p: float) -> NDArray[np.int64]:
    """The fewest of `token_ids` that hold `top_p` of the mass, at least one."""
    if top_p >= 1:
        return token_ids
    weights = np.exp(np.sort(scores[token_ids])[::-1])
    before = np.cumsum(weights) - weights
    return _highest(scores, token_ids, max(1, int(np.count_nonzero(before < top_p * mass))))


def _highest(scores: NDArray[np.float64], token_ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The `count` ids of the highest scores, rising; of a tie at the border the lowest ids."""
    if count >= len(token_ids):
        return token_ids
    candidates = scores[token_ids]
    border = np.partition(candidates, -count)[-count]
    kept = candidates > border
    kept[np.flatnonzero(candidates == border)[: count - np.count_nonzero(kept)]] = True
    highest: NDArray[np.int64] = token_ids[kept]
    return highest


def _best_first(scores: Floats, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """By falling score; `token_ids` rise, so a tie keeps the lowest id first."""
    ordered: NDArray[np.int64] = token_ids[np.argsort(-scores[token_ids], kind="stable")]
    return ordered


def _logprobs(raw: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    best = float(raw.max())
    normaliser = best + math.log(float(np.exp(raw - np.float32(best)).sum(dtype=np.float64)))
    top_ids = np.empty(0, dtype=np.int64)
    if num_top > 0:
        floor = np.partition(raw, -num_top)[-num_top] if num_top < len(raw) else -math.inf
        top_ids = _best_first(raw, np.flatnonzero(raw >= floor))[:num_top]
    top = np.maximum(raw[top_ids].astype(np.float64) - normaliser, MIN_LOGPROB)
    return TokenLogprobs(
        logprob=max(float(raw[token_id]) - normaliser, MIN_LOGPROB),
        top_ids=top_ids.astype(np.int32).tobytes(),
        top_logprobs=top.astype(np.float32).tobytes(),
    )
