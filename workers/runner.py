"""The runner carries out one plan's slices: bring rows up to date, forward, sample.

A plan is the same for every rank; what happens to one row never concerns another. Input out of range, a
logit that is not a number or an exception fails the rows it belongs to: what did not come out right in a step
is tried once more, each row alone, for a neighbour or a passing fault may have been the cause. Writing KV twice
is harmless, for it is the same KV. When nothing comes out right any more, it is not the rows: `DeviceFault`.

Ranks compute together, so they try again together: what came out as numbers they tell each other. An exception
nobody else knows of; where there are several ranks it is a `DeviceFault`. Knows no sockets, requests or policies.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pagemill import injection
from pagemill.messages.sequences import TokenLogprobs
from pagemill.messages.worker import Plan, RowOutcome, RowResult, Slice
from pagemill.telemetry import get_logger
from workers.inputs import StepInputs, build_inputs
from workers.kv_cache import KvCache
from workers.models import Model
from workers.parallel import ALONE, PeerRankLost, TensorParallel
from workers.probe import DeviceFault, probe_row
from workers.rows import Row, RowTable
from workers.sampler import Sampled, sample
from workers.shared_sampling import Share, sample_shared
from workers.swapper import Swapper

#: Errors of `RowResult` besides `rows.INVALID_INPUT`.
STEP_FAILED = "step_failed"
NOT_FINITE = "not_finite"

Work = tuple[Slice, Row]
#: A row's result, or None: it was computed and does not sample.
Outcome = RowResult | None


class Runner:
    """A loaded model with its pool and rows. One plan at a time, and the same on all ranks."""

    def __init__(self, model: Model, kv_cache: KvCache, swapper: Swapper, rows: RowTable, device: torch.device, parallel: TensorParallel = ALONE) -> None:
        self.model, self.kv_cache, self.swapper, self.rows = model, kv_cache, swapper, rows
        self.parallel = parallel
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
        Raises DeviceFault and PeerRankLost.
        """
        seconds = {"prepare": 0.0, "forward": 0.0, "sample": 0.0}
        started, met_s = time.perf_counter(), self.parallel.met_s
        work = list(zip(plan.slices, self.rows.apply(plan), strict=True))
        results = [_failed(piece, row.error) for piece, row in work if row.error]
        results += [_deferred(piece) for piece, row in work if not row.error and row.is_deferred(piece)]
        sound = [(piece, row) for piece, row in work if not (row.error or row.is_deferred(piece))]
        seconds["prepare"] += time.perf_counter() - started
        if sound:
            results += self._compute(sound, seconds)
        if self.parallel.size > 1:
            seconds["reduce"] = self.parallel.met_s - met_s
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
        except PeerRankLost:
            raise
        except Exception as error:  # whatever it is, it must not reach rows that did not cause it
            self._log.exception("step_failed", rows=len(work), row_ids=[piece.row for piece, _ in work])
            if self.parallel.size > 1:  # the other ranks are in the middle of the step, and cannot begin it again
                raise DeviceFault(f"a step failed on one of {self.parallel.size} ranks: {type(error).__name__}: {error}") from error
        return [_failed(piece, STEP_FAILED) for piece, _ in work]

    def _probe(self) -> None:
        """No row came out right. Either each has a fault of its own, or there is no sense in going on: then raises DeviceFault."""
        try:
            (outcome,) = self._step([probe_row(self.rows.bounds)], KvCache(self.kv_cache.spec, 1, self._device), {})
        except PeerRankLost:
            raise
        except Exception as error:
            raise DeviceFault(f"nothing can be computed any more: {type(error).__name__}: {error}") from error
        if _is_failure(outcome):
            raise DeviceFault("all rows came out as not a number")

    def _step(self, work: Sequence[Work], kv_cache: KvCache, seconds: dict[str, float]) -> list[Outcome]:
        """One outcome for each row, in their order. Changes no row, so that it may be done again."""
        times = [self._own_s()]
        inputs = build_inputs([piece for piece, _ in work], [row for _, row in work], self.rows.bounds, self._device)
        times.append(self._own_s())
        injection.reach("worker.forward", _Histories(row for _, row in work))
        hidden = self.model(inputs, kv_cache)
        sampling = [index for index, (piece, _) in enumerate(work) if piece.sample]
        logits = self.model.logits(hidden[inputs.sample_rows]) if sampling else hidden.new_empty(0, 1)
        if sampling and injection.reach("worker.logits", _Histories(work[index][1] for index in sampling)):
            logits = torch.full_like(logits, torch.nan)
        finite = self._finite(hidden, logits, inputs, sampling)
        times.append(self._own_s())
        outcomes: list[Outcome] = [None if ok else _failed(piece, NOT_FINITE) for (piece, _), ok in zip(work, finite, strict=True)]
        chosen = [place for place, index in enumerate(sampling) if finite[index]]
        drawn = self._draw(logits if len(chosen) == len(sampling) else logits[chosen], [work[sampling[place]] for place in chosen])
        for place, token in zip(chosen, drawn, strict=True):
            index = sampling[place]
            outcomes[index] = _accepted(work[index][0], token)
        times.append(self._own_s())
        for part, (begin, end) in zip(("prepare", "forward", "sample"), pairwise(times), strict=True):
            seconds[part] = seconds.get(part, 0.0) + end - begin
        return outcomes

    def _own_s(self) -> float:
        """A clock that stands still while ranks meet."""
        return time.perf_counter() - self.parallel.met_s

    def _finite(self, hidden: Tensor, logits: Tensor, inputs: StepInputs, sampling: Sequence[int]) -> list[bool]:
        """Whether everything of each slice came out as a number, on every rank. `sampling` says whose the rows of `logits` are.

        The largest element is NaN if any is.
        """
        largest = torch.cat((hidden.amax(dim=-1).float(), logits.amax(dim=-1))).cpu()
        if self.parallel.size > 1:
            largest = self.parallel.exchange(largest).amax(dim=0)
        numbers: list[bool] = torch.isfinite(largest).tolist()
        finite = [all(numbers[start:end]) for start, end in pairwise(inputs.query_start.tolist())]
        for place, index in enumerate(sampling, start=len(hidden)):
            finite[index] &= numbers[place]
        return finite

    def _draw(self, logits: Tensor, work: Sequence[Work]) -> list[Sampled]:
        """A token for each row of `logits`; `work` says whose it is."""
        if not work:
            return []
        rows = [row.sampling for _, row in work]
        positions = [piece.start + piece.num_tokens for piece, _ in work]
        if self.parallel.size == 1:
            return sample(logits, rows, positions, self.rows.bounds.vocab_size)
        head = self.model.head
        return sample_shared(logits, rows, positions, self.rows.bounds.vocab_size, Share(head.first_id, head.gather, self.parallel.exchange))


class _Histories:
    """All tokens of some rows, gone through only when somebody asks."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = rows

    def __contains__(self, token_id: object) -> bool:
        self._rows = list(self._rows)
        return any(token_id in row.token_ids for row in self._rows)


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
