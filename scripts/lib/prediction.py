"""What `bench_pressure` printed, read back: with what it was called, what its machine costs, and what came out.

The last line carries settings and costs, so that the scenario can be built again and run on a simulated CPU; without
a file the defaults stand for a small machine and the default model. Must not know how anything is run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from scripts.lib.costs import CpuCost, LinkCost
from scripts.lib.pressure import PressureError
from scripts.lib.pressure_scenarios import POLICIES, Shape

#: `bench_pressure` without a file: what it passes to every core.
CPU_LIMITS = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_plans_in_flight": 1, "block_size": 16}
#: Of its model.
CPU_BLOCK_BYTES = 737_280
CPU_LINK = LinkCost(out_bytes_s=7e9, in_bytes_s=7e9, both_share=0.5, per_block_s=30e-6, compute_share=0.25)


class Settings(msgspec.Struct, frozen=True):
    """What `bench_pressure` was called with."""

    scenario: str
    shape: Shape
    policies: tuple[str, ...] = POLICIES
    limits: dict[str, int] = msgspec.field(default_factory=CPU_LIMITS.copy)


class Costs(msgspec.Struct, frozen=True):
    """What it measured of the machine."""

    step: CpuCost = CpuCost()
    link: LinkCost = CPU_LINK
    block_bytes: int = CPU_BLOCK_BYTES


class Line(msgspec.Struct, frozen=True):
    """One line of what it printed, with the fields that matter here; the last line alone has settings and costs."""

    scenario: str
    policy: str = ""
    figures: dict[str, float] = {}
    settings: Settings | None = None
    costs: Costs | None = None


def read_measured(path: Path) -> tuple[Settings, Costs, dict[tuple[str, str], dict[str, float]]]:
    """Settings, costs, and the figures of each case, averaged over its runs. Raises PressureError."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    last = None
    for text in path.read_text().splitlines():
        try:
            last = msgspec.convert(json.loads(text), Line)
        except (json.JSONDecodeError, msgspec.ValidationError) as error:
            raise PressureError(f"{path} is nothing that bench_pressure printed: {error}") from error
        if last.figures:
            found.setdefault((last.scenario, last.policy), []).append(last.figures)
    if last is None or last.settings is None or last.costs is None:
        raise PressureError(f"{path} has no last line with settings and costs")
    return last.settings, last.costs, {case: _mean(figures) for case, figures in found.items()}


def _mean(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(one[name] for one in figures) / len(figures) for name in figures[0]}
