"""Runs requests against an engine whose memory may be too small for them, and measures what that does to them.

A `Client` says who asks for what and when; `measure` drives engine and client together until everything has
finished. Averages are by the engine's clock, so the same code measures a real engine and a simulated one. A request
that fails is an error, never a number. Must not know scenarios or policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagemill.messages.frontend import StatsSnapshot
from pagemill.messages.sequences import SequenceKey
from scripts.lib.engine import Engine
from scripts.lib.report import percentiles

#: Limits of a core that is measured: a snapshot after every turn, so that the last one tells of everything.
SNAPSHOT_ALWAYS = {"snapshot_interval_s": 0.0, "idle_snapshot_interval_s": 0.0}


class PressureError(Exception):
    """Something happened that makes the measurement void. One line."""


class Client(Protocol):
    """Who asks for what. `groups` are the sequences asked for so far, by what they are to the scenario, oldest first."""

    groups: dict[str, list[SequenceKey]]

    def ask(self, engine: Engine) -> float:
        """Adds what is due now. Returns when more will be due by the engine's clock; infinity if only progress can make it so."""


@dataclass
class Occupancy:
    """Of what there is, averaged over time; slots also at their highest."""

    num_running: float = 0.0
    slots_held: float = 0.0
    slots_cached: float = 0.0
    most_slots: int = 0

    def add(self, snapshot: StatsSnapshot, seconds: float) -> None:
        self.num_running += snapshot.num_running * seconds
        self.slots_held += snapshot.swap_slots_held * seconds
        self.slots_cached += snapshot.swap_slots_cached * seconds
        self.most_slots = max(self.most_slots, snapshot.swap_slots_held + snapshot.swap_slots_cached)


@dataclass(frozen=True)
class Measured:
    """One run from start to end."""

    seconds: float
    outputs: list[list[int]]  #: token ids of all requests, in the order in which they were asked for, groups one after another
    gaps_s: list[float]  #: between consecutive tokens, of all requests
    ttft_s: dict[str, list[float]]  #: by group
    occupancy: Occupancy  #: averages
    snapshot: StatsSnapshot  #: the last
    num_steps: int
    core_s: float
    copy_s: float
    step_s: dict[str, float]  #: of the worker, by part
    num_swap_slots: int

    @property
    def output_tok_s(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds

    @property
    def thrash(self) -> float:
        """(recomputed + moved tokens) / useful tokens."""
        last = self.snapshot
        return (last.tokens_recomputed + last.tokens_moved) / max(1, last.tokens_computed - last.tokens_recomputed)

    def fields(self) -> dict[str, object]:
        """What a report says of it besides seconds and rate. Times are milliseconds."""
        last = self.snapshot
        return {
            "requests": len(self.outputs),
            "steps": self.num_steps,
            "mean_running": self.occupancy.num_running,
            "itl_ms": {**_ms(percentiles(self.gaps_s, (50, 99))), "max": 1000 * max(self.gaps_s, default=0.0)},
            "ttft_ms": {group: _ms(percentiles(times, (50, 99))) for group, times in self.ttft_s.items()},
            "preemptions": last.preemptions,
            "swapped_bytes": last.swapped_bytes,
            "swap_seconds": last.swap_seconds,
            "tokens_recomputed": last.tokens_recomputed,
            "tokens_moved": last.tokens_moved,
            "early_copies": last.early_copies,
            "prefix_hit_tokens": last.prefix_hit_tokens,
            "arena_hit_tokens": last.arena_hit_tokens,
            "thrash": self.thrash,
            "arena_occupancy": self._arena(),
            "step_seconds": self.step_s | {"core": self.core_s},
        }

    def _arena(self) -> dict[str, float]:
        """Shares of its slots."""
        slots = max(1, self.num_swap_slots)
        occupancy = self.occupancy
        return {"held": occupancy.slots_held / slots, "cached": occupancy.slots_cached / slots, "most": occupancy.most_slots / slots}


def measure(engine: Engine, client: Client) -> Measured:
    """Lets the client ask and the engine answer until there is nothing left. The engine is new or idle. Raises PressureError."""
    started = looked = engine.clock()
    occupancy = Occupancy()
    while engine.step(client.ask(engine)):
        now = engine.clock()
        if engine.snapshot is not None:
            occupancy.add(engine.snapshot, now - looked)
        looked = now
    if engine.core.sequences:
        raise PressureError(f"{len(engine.core.sequences)} requests are left and the core plans nothing")
    keys = [key for group in client.groups.values() for key in group]
    outputs = [engine.outputs[key] for key in keys]
    for key, output in zip(keys, outputs, strict=True):
        if output.finish_reason != "length":
            raise PressureError(f"request {key.request} ended with {output.finish_reason}: {output.error or 'no error'}")
    if engine.snapshot is None:
        raise PressureError("nothing was asked for")
    seconds = max(output.token_times[-1] for output in outputs) - started
    for average in ("num_running", "slots_held", "slots_cached"):
        setattr(occupancy, average, getattr(occupancy, average) / max(looked - started, 1e-9))
    return Measured(
        seconds=seconds,
        outputs=[output.token_ids for output in outputs],
        gaps_s=[gap for output in outputs for gap in output.gaps_s],
        ttft_s={group: [engine.outputs[key].ttft_s for key in keys] for group, keys in client.groups.items()},
        occupancy=occupancy,
        snapshot=engine.snapshot,
        num_steps=engine.num_steps,
        core_s=engine.core_s,
        copy_s=engine.copy_s,
        step_s=dict(engine.seconds),
        num_swap_slots=engine.core.config.num_swap_slots,
    )


def _ms(values: dict[str, float]) -> dict[str, float]:
    return {name: 1000 * value for name, value in values.items()}
