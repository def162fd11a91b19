"""Runs cells on a loaded model and compares every sequence, bit for bit, with what it gets alone.

The core, the worker, the copies and the arena are real. Unlike a server's, pool and arena are filled before each cell
with bytes that are no numbers, so that reading what this cell has not written shows at once; copies in the background
may be slow, and the news that they are done late. A cell that differs is a number, from which it can be made again.

    with open_bench(path, "float32", TINY) as bench:
        found = bench.run(7)
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kvstore.arena import map_region
from pagemill.arena_file import kept_arena, slot_bytes_for
from pagemill.config import Dtype
from pagemill.messages.sequences import FinishReason, TokenLogprobs
from pagemill.model_info import read_model_info
from scripts.lib.equality_cells import PREFILL_TOK_S, UNLIMITED, Asked, Cell, CellSource, Scale
from scripts.lib.equality_run import CellRun
from scripts.lib.offline import OfflineEngine, Output, offline_config
from workers.copiers import Copy, HostCopier, Places
from workers.loader import Loaded, load
from workers.swapper import Swapper
from workers.transfer_order import Direction

#: Every float made of these bytes is NaN, in float32 and in bfloat16.
_NO_NUMBER = 0xFF
#: A slow copy in the background takes at most so much longer: a few steps of a tiny model.
_LATE_S = 0.004
#: What the planner believes of the link until copies are measured.
_LINK_BYTES_S = 4e9


@dataclass(frozen=True)
class Answer:
    """What a client could see of a sequence. Two are equal if every bit is."""

    token_ids: tuple[int, ...]
    logprobs: tuple[bytes, ...]
    finish_reason: FinishReason | None
    error: str

    @classmethod
    def of(cls, output: Output) -> Answer:
        return cls(tuple(output.token_ids), tuple(map(_packed, output.logprobs)), output.finish_reason, output.error)

    def cut(self, num_tokens: int) -> Answer:
        """What had been seen of it when there were so many tokens."""
        return Answer(self.token_ids[:num_tokens], self.logprobs[:num_tokens], None, self.error)


def _packed(logprobs: TokenLogprobs) -> bytes:
    return struct.pack("<d", logprobs.logprob) + logprobs.top_ids + logprobs.top_logprobs


@dataclass(frozen=True)
class Difference:
    """One sequence of a cell that did not get what it gets alone."""

    asked: Asked
    got: Answer
    alone: Answer

    @property
    def tokens_differ(self) -> bool:
        return self.got.token_ids != self.alone.token_ids

    @property
    def num_equal_tokens(self) -> int:
        """Before the first that differs."""
        pairs = list(zip(self.got.token_ids, self.alone.token_ids, strict=False))
        return next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))

    def __str__(self) -> str:
        where = f"from output token {self.num_equal_tokens} on" if self.tokens_differ else "in log probabilities or how it ends"
        got, alone = ((answer.token_ids, answer.finish_reason, answer.error) for answer in (self.got, self.alone))
        return f"prompt of {len(self.asked.prompt_ids)} tokens, seed {self.asked.seed}: differs {where}: {got} instead of {alone}"


@dataclass
class Found:
    """What a cell has shown."""

    cell: Cell
    num_sequences: int = 0
    num_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)  #: what really took place, by kind

    def __str__(self) -> str:
        axes = ", ".join(f"{name}: {value}" for name, value in self.cell.axes.items())
        return "\n  ".join([f"cell {self.cell.number} ({axes})", *map(str, self.differences)])


class LateCopier(HostCopier):
    """Copies as the server does, but in the background only after a while."""

    def __init__(self, blocks: Tensor, slots: Tensor) -> None:
        super().__init__(blocks, slots)
        self.late_s = 0.0  #: at most
        self._draw = random.Random(1)
        self._forwards_thread = threading.current_thread()

    def start(self, direction: Direction, places: Sequence[Places], mark: object) -> Copy:
        if self.late_s and threading.current_thread() is not self._forwards_thread:
            time.sleep(self._draw.uniform(0.0, self.late_s))
        return super().start(direction, places, mark)


class Bench:
    """A loaded model, its arena, and what it answers to each sequence alone. For the thread that made it."""

    def __init__(self, loaded: Loaded, slots: Tensor, scale: Scale) -> None:
        self.loaded, self.cells = loaded, CellSource(scale, loaded.ready.groups)
        self._slots = slots
        self._blocks = loaded.runner.kv_cache.blocks
        self._copier = LateCopier(self._blocks, slots[:, : self._blocks.shape[1]])
        self._alone: dict[Asked, Answer] = {}
        loaded.runner.swapper.close()
        loaded.runner.swapper = Swapper(loaded.runner.kv_cache, slots, copier=self._copier)

    def alone(self, asked: Asked) -> Answer:
        """In one chunk, with all memory for itself, nothing cached and one plan in flight. Remembered."""
        if asked not in self._alone:
            self._spoil()
            engine = OfflineEngine(self.loaded, num_swap_slots=0, prefix_caching=False, max_num_batched_tokens=UNLIMITED)
            key = engine.add(asked.prompt_ids, max_tokens=asked.max_tokens, sampling=asked.sampling, seed=asked.seed)
            engine.run()
            self._alone[asked] = Answer.of(engine.outputs[key])
        return self._alone[asked]

    def run(self, number: int) -> Found:
        """Runs one cell. What is raised, because the core's books do not balance or a sequence never ends, says in which cell."""
        found = Found(self.cells.cell(number))
        try:
            self._run(found)
        except Exception as error:
            error.add_note(str(found))
            raise
        return found

    def close(self) -> None:
        self.loaded.runner.swapper.close()

    def _run(self, found: Found) -> None:
        cell = found.cell
        alone = {asked: self.alone(asked) for asked in cell.asked}
        self._spoil()
        self._copier.late_s = _LATE_S if cell.late_copies else 0.0
        run = CellRun(cell, OfflineEngine(self.loaded, check_invariants=False, **_limits(cell)))
        run.run()
        for asked, output, went_away in run.outcomes():
            got, expected = Answer.of(output), alone[asked]
            if went_away:
                got, expected = got.cut(len(got.token_ids)), expected.cut(len(got.token_ids))
            found.num_sequences += 1
            found.num_tokens += len(got.token_ids)
            if got != expected:
                found.differences.append(Difference(asked, got, expected))
        found.happened += run.happened()

    def _spoil(self) -> None:
        """Nothing may be left of what ran before: equal prompts would find their own KV where they expect it, whoever is to blame."""
        self._blocks.fill_(_NO_NUMBER)
        self._slots.fill_(_NO_NUMBER)


def _limits(cell: Cell) -> dict[str, object]:
    limits: dict[str, object] = {
        "num_blocks": cell.num_blocks,
        "num_swap_slots": cell.num_swap_slots,
        "preemption": cell.preemption,
        "max_num_batched_tokens": cell.budget,
        "max_num_seqs": cell.max_num_seqs,
        "max_plans_in_flight": cell.max_plans_in_flight,
        "prefix_caching": cell.prefix_caching,
        "swap_out_bytes_s": _LINK_BYTES_S,
        "swap_in_bytes_s": _LINK_BYTES_S,
    }
    prefill_tok_s = PREFILL_TOK_S[cell.prices]
    return limits if prefill_tok_s is None else limits | {"prefill_tok_s": prefill_tok_s}


@contextmanager
def open_bench(path: str, dtype: Dtype, scale: Scale, *, deterministic: Literal["on", "off"] = "on") -> Iterator[Bench]:
    """Loads the model at `path`, with an arena. Raises ModelRefused if it cannot be deterministic."""
    num_threads, num_groups = torch.get_num_threads(), len(read_model_info(Path(path)).groups)
    loaded = load(
        offline_config(
            path,
            dtype=dtype,
            deterministic=deterministic,
            block_size=scale.block_size,
            num_blocks=scale.num_blocks * num_groups,
            max_model_len=scale.num_blocks * scale.block_size,
            num_threads=scale.num_threads,
        )
    )
    slot_bytes = slot_bytes_for(loaded.ready.block_bytes)
    arena_bytes = scale.num_swap_slots * num_groups * slot_bytes
    with kept_arena(arena_bytes) as arena_fd:
        region = map_region(arena_fd, 0, arena_bytes, slot_bytes)
    bench = Bench(loaded, torch.frombuffer(region.memory, dtype=torch.uint8).view(region.num_slots, slot_bytes), scale)
    try:
        yield bench
    finally:
        bench.close()
        torch.set_num_threads(num_threads)
