"""How benchmarks report: one JSON object per line on standard output, a line of ratios last.

Every line but the last has the fields that make runs of different engines comparable; whatever else a
benchmark knows stands behind them. Progress for people goes to standard error.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from statistics import median


def emit(*, bench: str, scenario: str, engine: str, policy: str, workload: str, seed: int, seconds: float, output_tok_s: float, **more: object) -> None:
    """Prints one measurement. `workload` is n:in:out where every request is alike; `seconds` is wall clock unless `simulated`."""
    fields = {"bench": bench, "scenario": scenario, "engine": engine, "policy": policy, "workload": workload, "seed": seed}
    _print(fields | {"seconds": seconds, "output_tok_s": output_tok_s} | more)


def emit_summary(bench: str, **ratios: object) -> None:
    """Prints the last line."""
    _print({"bench": bench, "scenario": "summary"} | ratios)


def note(text: str) -> None:
    """One line for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def percentiles(values: Sequence[float], ranks: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """`p50` and so on: the smallest value that at least so many percent do not exceed. Empty for no values."""
    ordered = sorted(values)
    return {f"p{rank}": ordered[max(0, -(-rank * len(ordered) // 100) - 1)] for rank in ranks} if ordered else {}


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """50th and 99th percentile, and the worst."""
    return percentiles([1000 * value for value in seconds], (50, 99, 100))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of ratios, each of two measurements made side by side, so that a busy machine slows both."""
    return median(numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True))


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Two of the values between which the median of what they were drawn from lies, with at least this confidence.

    It assumes nothing about how they are spread: each is above that median with probability one half. Where there
    are too few of them for such a promise, it is the smallest and the largest.
    """
    ordered, count = sorted(values), len(values)
    skipped, missed = 0, 2 / 2**count  # how many are left out on either side, and how likely the median is among them
    while (missed := missed + 2 * math.comb(count, skipped + 1) / 2**count) <= 1 - confidence:
        skipped += 1
    return ordered[skipped], ordered[count - 1 - skipped]


def _print(fields: dict[str, object]) -> None:
    print(json.dumps(_rounded(fields)), flush=True)


def _rounded(value: object) -> object:
    """Five significant digits say all that a benchmark knows."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value
