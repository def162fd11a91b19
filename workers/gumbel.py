"""Noise without state: Gumbel(seed, absolute position, token id), and the draw that uses it.

    key    = mix(seed XOR mix(position + 1))
    bits   = mix(key + (id + 1) * GOLDEN)                  all modulo 2^64
    u      = (bits >> 12 + 1/2) / 2^52                     in (0, 1), exact in float64
    noise  = -log(-log(u))

`mix` is splitmix64's finaliser, so a position's noise is the splitmix64 stream of its key, read at the
token id. The draw is the argmax of score + noise: a sample of softmax(score) that depends on nothing
else, neither on batch mates nor on which ids other filters removed. A replay draws the same tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workers import simd
from workers.native import Body, NativeKernel, argument_reader, helper

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LOG_2 = math.log(2)


def mix(x: int) -> int:
    """A bijection of 64-bit integers whose output bits each depend on every input bit."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def noise_key(seed: int, position: int) -> int:
    return mix(seed ^ mix(position + 1))


def noise(key: int, token_id: int) -> float:
    """The definition, one value at a time: what the compiled draw is tested against."""
    bits = mix(key + (token_id + 1) * _GOLDEN & _MASK)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2.0**52))


def draw(scores: NDArray[np.float64], token_ids: NDArray[np.int64], key: int) -> int:
    """The index into both arrays with the largest score + noise; the lowest on a tie. Not for empty arrays."""
    return best_of(scores, token_ids, key)[0]


def best_of(scores: NDArray[np.float64], token_ids: NDArray[np.int64], key: int) -> tuple[int, float]:
    """As `draw`, with that sum, by which the best of several parts of a vocabulary is found. Of empty arrays it is -inf."""
    index, total = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float64)
    signed = key - 2**64 if key >= 2**63 else key
    arguments = _Arguments(scores.ctypes.data, token_ids.ctypes.data, len(scores), key=signed, best=index.ctypes.data, best_score=total.ctypes.data)
    _DRAW((), 1, *arguments)
    return int(index[0]), float(total[0])


def compile_draw() -> None:
    _DRAW.compile()


@helper
def _mix(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class _Arguments(NamedTuple):
    scores: int
    token_ids: int
    num_scores: int
    key: int
    best: int  #: where its index is to be written
    best_score: int  #: where that with noise is


_read = argument_reader(_Arguments)


def _build() -> Body:
    def best(arguments: int) -> None:
        given = _read(arguments)
        key = np.uint64(given.key)
        best_value, best_index = -math.inf, 0
        for i in range(given.num_scores):
            bits = _mix(key + np.uint64(simd.read_int64(given.token_ids + i * 8) + 1) * np.uint64(_GOLDEN)) >> np.uint64(12)
            score = simd.read_float64(given.scores + i * 8)
            # -log(u) >= 1 - u, so noise <= -log(1 - u) <= log(2) * (1 + leading zeros of 1 - u): two
            # logarithms are due only for the few ids that may lead.
            from_above = np.uint64(2**52 - 1) - bits
            if score + _LOG_2 * (simd.leading_zeros(np.int64(from_above)) - 10) < best_value:
                continue
            value = score - math.log(-math.log((np.float64(bits) + 0.5) * 2.0**-52))
            if value > best_value:
                best_value, best_index = value, i
        simd.write_int64(given.best, best_index)
        simd.write_float64(given.best_score, best_value)

    return best


_DRAW = NativeKernel("gumbel_draw", _build)
