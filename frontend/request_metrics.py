"""What one HTTP request cost in time and tokens: one record per request, stamped where the process meets the world.

The ledger opens a record when a request arrives and closes it when its response has ended, whatever the
end was; between the two, the code that serves the request stamps it. Every duration that is reported
anywhere is derived here, from those stamps and one injected clock. The ledger hands a finished record to
its observer (metrics) and writes the one access line of the request.
It must not know HTTP libraries, prometheus or text: a prompt never comes near a record.

    record = ledger.open(method="POST", endpoint="/v1/completions", request_id="cmpl-1")
    record.describe(stream=True, n=1, max_tokens=64, num_prompt_tokens=12)
    record.observe(choice=0, output)          # for every SequenceOutput
    ledger.close(record, status=200)          # in a finally: a disconnect ends here as well
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import structlog
from structlog.typing import FilteringBoundLogger

from pagemill.messages.frontend import SequenceOutput
from pagemill.messages.sequences import FinishReason

Clock = Callable[[], float]
#: How a request ended: its worst finish reason, "done" where nothing was generated, "refused" if it was turned away.
Outcome = Literal["done", "stop", "length", "abort", "error", "refused"]

#: The client went away before a response began (the status that nginx made customary).
CLIENT_CLOSED = 499

#: Answers of these are not worth a line each: probes and scrapes come every few seconds.
QUIET_ENDPOINTS = frozenset({"/livez", "/readyz", "/health", "/healthz", "/ping", "/metrics", "/version", "/static/{name}"})

#: Names of unknown fields that are remembered in order to warn once, and characters of each: clients choose them, so both are bounded.
MAX_REMEMBERED_NAMES = 1000
MAX_NAME_CHARACTERS = 64

#: Worst last. A finish reason that is not the client's wish outweighs the others of the same request.
_SEVERITY: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")

#: Reason of a refusal for which the code that refused named none.
_REFUSALS = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    503: "unavailable",
}


@dataclass(slots=True)
class ChoiceTimes:
    """Token times of one choice (one sequence). Times are of the ledger's clock."""

    first_token: float
    last_token: float
    num_tokens: int = 0
    #: Seconds between consecutive tokens: `num_tokens - 1` of them. Tokens that arrive together share their gap.
    gaps: array[float] = field(default_factory=lambda: array("d"))
    finish_reason: FinishReason | None = None

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (n - 1) of this choice; None below two tokens."""
        if self.num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request from arrival to the end of its response. Owned by the ledger that opened it."""

    method: str
    endpoint: str  #: the route's pattern, never the path as sent: it becomes a label
    request_id: str
    arrival: float
    clock: Clock
    stream: bool = False
    n: int = 1
    max_tokens: int | None = None  #: None: this request generates nothing
    num_prompts: int = 1
    num_prompt_tokens: int = 0  #: of all prompts of the request, each counted once however many choices it has
    num_unknown_fields: int = 0
    submitted: float | None = None  #: when its sequences went to the scheduler
    choices: dict[int, ChoiceTimes] = field(default_factory=dict)
    refusal: str | None = None  #: from the fixed catalogue of error codes
    has_failed: bool = False  #: by the server's fault, which the status may not show
    status: int = 0  #: 0 until closed
    end: float | None = None
    _cached: dict[int, int] = field(default_factory=dict)
    _preemptions: dict[int, int] = field(default_factory=dict)
    _queue_s: float = 0.0

    # --- stamps -------------------------------------------------------------------------------------------

    def describe(self, *, stream: bool, n: int, max_tokens: int, num_prompt_tokens: int, num_prompts: int = 1) -> None:
        """Called once the request is understood and about to be submitted: all that precedes is not model time."""
        self.stream, self.n, self.max_tokens = stream, n, max_tokens
        self.num_prompts, self.num_prompt_tokens = num_prompts, num_prompt_tokens
        self.submitted = self.clock()

    def observe(self, choice: int, output: SequenceOutput) -> None:
        """Stamps the new tokens of one choice, and takes over what the scheduler counted for it."""
        self.tokens(choice, len(output.token_ids))
        self._cached[choice] = output.num_cached_tokens
        self._preemptions[choice] = output.num_preemptions
        self._queue_s = max(self._queue_s, output.queue_s)
        if output.finish_reason is not None:
            self.finish(choice, output.finish_reason)

    def tokens(self, choice: int, num_new: int) -> None:
        """`num_new` tokens of a choice exist now. What comes after its end (a stop string was found) doesn't count."""
        times = self.choices.get(choice)
        if num_new <= 0 or (times is not None and times.finish_reason is not None):
            return
        now = self.clock()
        if times is None:
            self.choices[choice] = ChoiceTimes(now, now, num_new, array("d", bytes(8 * (num_new - 1))))
            return
        times.gaps.extend([(now - times.last_token) / num_new] * num_new)
        times.num_tokens += num_new
        times.last_token = now

    def finish(self, choice: int, reason: FinishReason, keep: int | None = None) -> None:
        """A choice ended, after its first `keep` tokens if a stop string was found behind them. The first call stands."""
        times = self.choices.get(choice)
        if times is None:
            now = self.clock()
            times = self.choices[choice] = ChoiceTimes(now, now)
        if times.finish_reason is not None:
            return
        times.finish_reason = reason
        if keep is not None and keep < times.num_tokens:
            del times.gaps[max(0, keep - 1) :]
            times.num_tokens = keep
            times.last_token = times.first_token + sum(times.gaps)

    def refuse(self, code: str) -> None:
        """The request is turned away with this error code; the first one stands."""
        self.refusal = self.refusal or code

    def cut_short(self, code: str, status: int) -> None:
        """A response that has begun ends with this error. `status` is what it would have had before; the client has another."""
        self.has_failed = status == 500
        self.refuse(code)

    # --- what follows from them ---------------------------------------------------------------------------

    @property
    def generates(self) -> bool:
        return self.max_tokens is not None

    @property
    def num_output_tokens(self) -> int:
        return sum(times.num_tokens for times in self.choices.values())

    @property
    def num_cached_tokens(self) -> int:
        """Of the first choice of each prompt: the others share what that one computed, and the prompt counts once."""
        return sum(cached for choice, cached in self._cached.items() if choice % self.n == 0)

    @property
    def num_preemptions(self) -> int:
        return sum(self._preemptions.values())

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """One per choice that ended, in order of choices."""
        return [times.finish_reason for _, times in sorted(self.choices.items()) if times.finish_reason is not None]

    @property
    def outcome(self) -> Outcome:
        """Exactly one per closed request: the sum over outcomes and what is in flight is what arrived."""
        if self.has_failed:
            return "error"
        if self.num_output_tokens == 0 and (self.refusal is not None or (self.status >= 400 and self.status != CLIENT_CLOSED)):
            return "refused" if self.status < 500 or self.status == 503 else "error"
        if self.status == CLIENT_CLOSED:
            return "abort"
        if self.status >= 500:
            return "error"
        if not self.generates:
            return "done"
        if len(self.finish_reasons) < self.n * self.num_prompts:
            return "abort"
        return max(self.finish_reasons, key=_SEVERITY.index)

    @property
    def reason(self) -> str:
        """The label that goes with the outcome: a code of refusal, or the outcome itself."""
        if self.outcome == "refused":
            return self.refusal or _REFUSALS.get(self.status, "invalid_request")
        return self.outcome

    @property
    def first_token(self) -> float | None:
        return min((times.first_token for times in self.choices.values() if times.num_tokens), default=None)

    @property
    def last_token(self) -> float | None:
        return max((times.last_token for times in self.choices.values() if times.num_tokens), default=None)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def e2e_s(self) -> float | None:
        return None if self.end is None else self.end - self.arrival

    @property
    def queue_s(self) -> float | None:
        """From the scheduler's door to the first slice; None if no sequence came that far."""
        return self._queue_s if self._cached else None

    @property
    def prefill_s(self) -> float | None:
        """From the first slice to the first token."""
        if self.first_token is None or self.submitted is None:
            return None
        return max(0.0, self.first_token - self.submitted - self._queue_s)

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        if self.first_token is None or self.last_token is None:
            return None
        return self.last_token - self.first_token

    @property
    def tpot_s(self) -> float | None:
        """Mean over choices of (E2E - TTFT) / (n - 1)."""
        values = [value for times in self.choices.values() if (value := times.tpot_s) is not None]
        return sum(values) / len(values) if values else None


class RequestObserver(Protocol):
    """What the ledger tells: each record once when it arrives and once, complete, when it has ended."""

    def request_received(self, record: RequestRecord) -> None: ...

    def request_finished(self, record: RequestRecord) -> None: ...


class RequestLedger:
    """Opens and closes records. Every record it opened is closed exactly once; closing again changes nothing."""

    def __init__(self, observer: RequestObserver, clock: Clock = time.monotonic) -> None:
        self._observer = observer
        self._clock = clock
        self._log: FilteringBoundLogger = structlog.get_logger("frontend.request")
        self._known_names: set[str] = set()
        self._open: set[RequestRecord] = set()

    @property
    def num_in_flight(self) -> int:
        return len(self._open)

    @property
    def is_generating(self) -> bool:
        """A request was handed to the scheduler, and its response has not ended."""
        return any(record.generates for record in self._open)

    def open(self, *, method: str, endpoint: str, request_id: str) -> RequestRecord:
        record = RequestRecord(method=method, endpoint=endpoint, request_id=request_id, arrival=self._clock(), clock=self._clock)
        self._open.add(record)
        self._observer.request_received(record)
        return record

    def close(self, record: RequestRecord, status: int) -> None:
        """The response has ended, or never began (`CLIENT_CLOSED`). Observes and logs the record."""
        if record.end is not None:
            return
        record.status = status
        record.end = self._clock()
        self._open.discard(record)
        self._observer.request_finished(record)
        self._write_line(record)

    def unknown_fields(self, record: RequestRecord, names: Iterable[str]) -> None:
        """Counts fields that nobody knows, and warns once per name, which is cut: routers add their own to every request."""
        for name in (name[:MAX_NAME_CHARACTERS] for name in names):
            record.num_unknown_fields += 1
            if name in self._known_names or len(self._known_names) >= MAX_REMEMBERED_NAMES:
                continue
            self._known_names.add(name)
            self._log.warning("unknown_request_field", field=name, endpoint=record.endpoint, request_id=record.request_id)

    def _write_line(self, record: RequestRecord) -> None:
        probed = record.endpoint in QUIET_ENDPOINTS and (record.status < 400 or record.status == 503)
        quiet = probed or record.status == 429  # of these `frontend.overload` says how many there were
        if quiet and not self._log.is_enabled_for(logging.DEBUG):
            return
        fields: dict[str, object] = {
            "request_id": record.request_id,
            "method": record.method,
            "endpoint": record.endpoint,
            "status": record.status,
            "e2e_ms": _milliseconds(record.e2e_s),
        }
        if record.outcome == "refused":
            fields["refused"] = record.reason
        if record.generates:
            fields |= {
                "stream": record.stream,
                "n": record.n,
                "prompt_tokens": record.num_prompt_tokens,
                "cached_tokens": record.num_cached_tokens,
                "output_tokens": record.num_output_tokens,
                "finish_reasons": record.finish_reasons,
                "outcome": record.outcome,
                "preemptions": record.num_preemptions,
                "queue_ms": _milliseconds(record.queue_s),
                "ttft_ms": _milliseconds(record.ttft_s),
                "tpot_ms": _milliseconds(record.tpot_s),
            }
        write = self._log.debug if quiet else self._log.error if record.outcome == "error" else self._log.info
        write("request_finished", **fields)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
