"""The runner carries out one plan's slices: bring rows up to date, forward, sample.

A plan is the same for every rank; what happens to one row never concerns another. Input out of range, a
logit that is not a number or an exception fails the rows it belongs to: what did not come out right in a step
is tried once more, each row alone, for a neighbour or a passing fault may have been the cause. Writing KV twice
is harmless, for it is the same KV. When nothing comes out right any more, it is not the rows: `DeviceFault`.
Knows no sockets, requests or policies.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pagemill import injection
from pagemill.messages import Plan, RowOutcome, RowResult, Slice, TokenLogprobs
from pagemill.telemetry import get_logger
from workers.inputs import StepInputs, build_inputs
from workers.kv_cache import KvCache
from workers.models import Model
from workers.probe import DeviceFault, probe_row
from workers.rows import Row, RowTable
from workers.sampler import Sampled, sample
from workers.swapper import Swapper

#: Errors of `RowResult` besides `rows.INVALID_INPUT`.
STEP_FAILED = "step_failed"
NOT_FINITE = "not_finite"

Work = tuple[Slice, Row]
#: A row's result, or None: it was computed and does not sample.
Outcome = RowResult | None


class Runner:
    """A loaded model with its pool and rows. One plan at a time."""

    def __init__(self, model: Model, kv_cache: KvCache, swapper: Swapper, rows: RowTable, device: torch.device) -> None:
        self.model, self.kv_cache, self.swapper, self.rows = model, kv_cache, swapper, rows
        self._device = device
        self._log = get_logger("workers.runner")

    def reset(self) -> None:
        """Forgets all rows and transfers, as for a new core. What lies in the pool stays: the core may know of it."""
        self.rows.clear()
        self.swapper.reset()

    @torch.inference_mode()
    def run(self, plan: Plan) -> tuple[tuple[RowResult, ...], dict[str, float]]:
        """Results of all sampling, failed and deferred slices, and the seconds each part took. `rows.missing(plan)` must be None.

        Its transfers are not this method's: they have been started, whether or not all rows are held (`swapper.start`).
        Raises DeviceFault.
        """
        seconds = {"prepare": 0.0, "forward": 0.0, "sample": 0.0}
        started = time.perf_counter()
        work = list(zip(plan.slices, self.rows.apply(plan), strict=True))
        results = [_failed(piece, row.error) for piece, row in work if row.error]
        results += [_deferred(piece) for piece, row in work if not row.error and row.is_deferred(piece)]
        sound = [(piece, row) for piece, row in work if not (row.error or row.is_deferred(piece))]
        seconds["prepare"] += time.perf_counter() - started
        if sound:
            results += self._compute(sound, seconds)
        rows = {piece.row: row for piece, row in work}
        for result in results:
            if result.token_ids:
                rows[result.row].drawn = (plan.plan_id, result.token_ids[-1])
        return tuple(results), seconds

    def _compute(self, work: Sequence[Work], seconds: dict[str, float]) -> list[RowResult]:
        outcomes = self._attempt(work, seconds)
        for index, outcome in enumerate(outcomes):
            if _is_failure(outcome):
                outcomes[index : index + 1] = self._attempt([work[index]], seconds)
        if all(map(_is_failure, outcomes)):
            self._probe()
        return [outcome for outcome in outcomes if outcome is not None]

    def _attempt(self, work: Sequence[Work], seconds: dict[str, float]) -> list[Outcome]:
        try:
            return self._step(work, self.kv_cache, seconds)
        except Exception:  # whatever it is, it must not reach rows that did not cause it
            self._log.exception("step_failed", rows=len(work), row_ids=[piece.row for piece, _ in work])
        return [_failed(piece, STEP_FAILED) for piece, _ in work]

    def _probe(self) -> None:
        """No row came out right. Either each has a fault of its own, or there is no sense in going on: then raises DeviceFault."""
        try:
            (outcome,) = self._step([probe_row(self.rows.bounds)], KvCache(self.kv_cache.spec, 1, self._device), {})
        except Exception as error:
            raise DeviceFault(f"nothing can be computed any more: {type(error).__name__}: {error}") from error
        if _is_failure(outcome):
            raise DeviceFault("all rows came out as not a number")

    def _step(self, work: Sequence[Work], kv_cache: KvCache, seconds: dict[str, float]) -> list[Outcome]:
        """One outcome for each row, in their order. Changes no row, so that it may be done again."""
        times = [time.perf_counter()]
        inputs = build_inputs([piece for piece, _ in work], [row for _, row in work], self.rows.bounds.block_size, self._device)
        times.append(time.perf_counter())
        injection.reach("worker.forward", _Histories(row for _, row in work))
        hidden = self.model(inputs, kv_cache)
        finite = _finite_slices(hidden, inputs)
        logits = self.model.logits(hidden[inputs.sample_rows]) if len(inputs.sample_rows) else hidden.new_empty(0, 1)
        times.append(time.perf_counter())
        outcomes: list[Outcome] = [None if ok else _failed(piece, NOT_FINITE) for (piece, _), ok in zip(work, finite, strict=True)]
        sampling = [index for index, (piece, _) in enumerate(work) if piece.sample]
        drawn = self._draw(logits, [(*work[index], finite[index]) for index in sampling])
        for index, result in zip(sampling, drawn, strict=True):
            outcomes[index] = result
        times.append(time.perf_counter())
        for part, (begin, end) in zip(("prepare", "forward", "sample"), pairwise(times), strict=True):
            seconds[part] = seconds.get(part, 0.0) + end - begin
        return outcomes

    def _draw(self, logits: Tensor, sampling: Sequence[tuple[Slice, Row, bool]]) -> list[RowResult]:
        """One result for each row of `logits`; `sampling` says whose it is, and whether it came from numbers."""
        if not sampling:
            return []
        if injection.reach("worker.logits", _Histories(row for _, row, _ in sampling)):
            logits = torch.full_like(logits, torch.nan)
        finite = torch.isfinite(logits.amax(dim=-1)).tolist()
        chosen = [index for index, (_, _, ok) in enumerate(sampling) if ok and finite[index]]
        results = [_failed(piece, NOT_FINITE) for piece, _, _ in sampling]
        if not chosen:
            return results
        if len(chosen) < len(sampling):
            logits = logits[chosen]
        rows = [sampling[index] for index in chosen]
        positions = [piece.start + piece.num_tokens for piece, _, _ in rows]
        drawn = sample(logits, [row.sampling for _, row, _ in rows], positions, self.rows.bounds.vocab_size)
        for index, token in zip(chosen, drawn, strict=True):
            results[index] = _accepted(sampling[index][0], token)
        return results


class _Histories:
    """All tokens of some rows, gone through only when somebody asks."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = rows

    def __contains__(self, token_id: object) -> bool:
        self._rows = list(self._rows)
        return any(token_id in row.token_ids for row in self._rows)


def _finite_slices(hidden: Tensor, inputs: StepInputs) -> list[bool]:
    """Whether every token of each slice came out as a number. The largest element is NaN if any is."""
    finite: list[bool] = torch.isfinite(hidden.amax(dim=-1)).tolist()
    borders = inputs.query_start.tolist()
    return [all(finite[start:end]) for start, end in pairwise(borders)]


def _is_failure(outcome: Outcome) -> bool:
    return outcome is not None and outcome.outcome == "failed"


def _accepted(piece: Slice, drawn: Sampled) -> RowResult:
    return _result(piece, "accepted", (drawn.token_id,), (drawn.logprobs,) if drawn.logprobs else (), "")


def _failed(piece: Slice, error: str) -> RowResult:
    return _result(piece, "failed", (), (), error)


def _deferred(piece: Slice) -> RowResult:
    return _result(piece, "deferred", (), (), "")


def _result(piece: Slice, outcome: RowOutcome, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], error: str) -> RowResult:
    return RowResult(row=piece.row, version=piece.version, outcome=outcome, token_ids=token_ids, logprobs=logprobs, error=error)
