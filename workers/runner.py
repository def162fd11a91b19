"""The runner carries out one plan's slices: bring rows up to date, forward, sample.

A plan is the same for every rank; what happens to one row never concerns another. Input out of range, a
logit that is not a number or an exception fails the rows it belongs to; when a whole step raises, its rows
run again one by one to find out which. Writing KV twice is harmless, for it is the same KV.
Knows no sockets, requests or policies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pagemill.messages import Plan, RowOutcome, RowResult, Slice, TokenLogprobs
from pagemill.telemetry import get_logger
from workers.inputs import StepInputs, build_inputs
from workers.kv_cache import KvCache
from workers.models import Model
from workers.rows import Row, RowTable
from workers.sampler import Sampled, sample
from workers.swapper import Swapper

#: Errors of `RowResult` besides `rows.INVALID_INPUT`.
STEP_FAILED = "step_failed"
NOT_FINITE = "not_finite"

Work = tuple[Slice, Row]


class Runner:
    """A loaded model with its pool and rows. One plan at a time."""

    def __init__(self, model: Model, kv_cache: KvCache, swapper: Swapper, rows: RowTable, device: torch.device) -> None:
        self.model, self.kv_cache, self.swapper, self.rows = model, kv_cache, swapper, rows
        self._device = device
        self._log = get_logger("workers.runner")

    def reset(self) -> None:
        """Forgets all rows and transfers, as for a new core."""
        self.rows.clear()
        self.swapper.reset()

    @torch.inference_mode()
    def run(self, plan: Plan) -> tuple[tuple[RowResult, ...], dict[str, float]]:
        """Results of all sampling, failed and deferred slices, and the seconds each part took. `rows.missing(plan)` must be None.

        Its transfers are not this method's: they have been started, whether or not all rows are held (`swapper.start`).
        """
        seconds = {"prepare": 0.0, "forward": 0.0, "sample": 0.0}
        started = time.perf_counter()
        work = list(zip(plan.slices, self.rows.apply(plan), strict=True))
        results = [_failed(piece, row.error) for piece, row in work if row.error]
        results += [_deferred(piece) for piece, row in work if not row.error and row.is_deferred(piece)]
        sound = [(piece, row) for piece, row in work if not (row.error or row.is_deferred(piece))]
        seconds["prepare"] += time.perf_counter() - started
        if sound:
            results += self._isolate(sound, seconds)
        rows = {piece.row: row for piece, row in work}
        for result in results:
            if result.token_ids:
                rows[result.row].drawn = (plan.plan_id, result.token_ids[-1])
        return tuple(results), seconds

    def _isolate(self, work: Sequence[Work], seconds: dict[str, float]) -> list[RowResult]:
        try:
            return self._step(work, seconds)
        except Exception:  # whatever it is, it must not reach rows that did not cause it
            self._log.exception("step_failed", rows=len(work), row_ids=[piece.row for piece, _ in work])
        if len(work) == 1:
            return [_failed(work[0][0], STEP_FAILED)]
        return [result for one in work for result in self._isolate([one], seconds)]

    def _step(self, work: Sequence[Work], seconds: dict[str, float]) -> list[RowResult]:
        times = [time.perf_counter()]
        inputs = build_inputs([piece for piece, _ in work], [row for _, row in work], self.rows.bounds.block_size, self._device)
        times.append(time.perf_counter())
        hidden = self.model(inputs, self.kv_cache)
        finite = _finite_slices(hidden, inputs)
        logits = self.model.logits(hidden[inputs.sample_rows]) if len(inputs.sample_rows) else hidden.new_empty(0, 1)
        times.append(time.perf_counter())
        results = [_failed(piece, NOT_FINITE) for (piece, _), ok in zip(work, finite, strict=True) if not ok]
        sampling = [(one, ok) for one, ok in zip(work, finite, strict=True) if one[0].sample]
        results += self._sample(logits, sampling)
        times.append(time.perf_counter())
        for part, (begin, end) in zip(("prepare", "forward", "sample"), pairwise(times), strict=True):
            seconds[part] += end - begin
        return results

    def _sample(self, logits: Tensor, sampling: Sequence[tuple[Work, bool]]) -> list[RowResult]:
        """One result per row that is still sound; `sampling` says for each row of `logits` whose it is."""
        if not sampling:
            return []
        finite = torch.isfinite(logits.amax(dim=-1)).tolist()
        chosen = [index for index, (_, ok) in enumerate(sampling) if ok and finite[index]]
        results = [_failed(piece, NOT_FINITE) for index, ((piece, _), ok) in enumerate(sampling) if ok and not finite[index]]
        if len(chosen) < len(sampling):
            logits = logits[chosen]
        rows = [sampling[index][0] for index in chosen]
        positions = [piece.start + piece.num_tokens for piece, _ in rows]
        drawn = sample(logits, [row.sampling for _, row in rows], positions, self.rows.bounds.vocab_size) if rows else []
        return results + [_accepted(piece, token) for (piece, _), token in zip(rows, drawn, strict=True)]


def _finite_slices(hidden: Tensor, inputs: StepInputs) -> list[bool]:
    """Whether every token of each slice came out as a number. The largest element is NaN if any is."""
    finite: list[bool] = torch.isfinite(hidden.amax(dim=-1)).tolist()
    borders = inputs.query_start.tolist()
    return [all(finite[start:end]) for start, end in pairwise(borders)]


def _accepted(piece: Slice, drawn: Sampled) -> RowResult:
    return _result(piece, "accepted", (drawn.token_id,), (drawn.logprobs,) if drawn.logprobs else (), "")


def _failed(piece: Slice, error: str) -> RowResult:
    return _result(piece, "failed", (), (), error)


def _deferred(piece: Slice) -> RowResult:
    return _result(piece, "deferred", (), (), "")


def _result(piece: Slice, outcome: RowOutcome, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], error: str) -> RowResult:
    return RowResult(row=piece.row, version=piece.version, outcome=outcome, token_ids=token_ids, logprobs=logprobs, error=error)
