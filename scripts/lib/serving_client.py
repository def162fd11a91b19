"""A client of the HTTP API that stamps every token: one record per request, and the numbers made of them.

TTFT: sent to first token. ITL: gap between consecutive chunks with tokens, once per chunk. TPOT: (E2E - TTFT) over the
tokens after the first. E2E: sent to the end of the stream. Must not know how load is generated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from scripts.lib.report import percentiles
from scripts.lib.workloads import Request


class Usage(msgspec.Struct, frozen=True):
    completion_tokens: int


class Chunk(msgspec.Struct, frozen=True):
    """What we read of a stream's chunk; with continuous usage every chunk counts the tokens so far."""

    usage: Usage | None = None


@dataclass
class Record:
    """One request as the client saw it. Times are `time.perf_counter()`."""

    sent_at: float
    token_times: list[float] = field(default_factory=list)  #: when each chunk with new tokens came
    num_tokens: int = 0
    ended_at: float = 0.0
    error: str = ""  #: "": completed

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.sent_at

    @property
    def e2e_s(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def tpot_s(self) -> float:
        """0 for a request of one token, which has no time per further token."""
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


async def complete(client: httpx.AsyncClient, model: str, request: Request) -> Record:
    """Streams one completion of exactly `num_output_tokens` greedy tokens. Never raises: a failure is in the record."""
    body = {
        "model": model,
        "prompt": request.prompt_ids,
        "max_tokens": request.num_output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    record = Record(time.perf_counter())
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                record.error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"
                return record
            async for line in response.aiter_lines():
                _take(record, line)
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.ended_at = time.perf_counter()
    if not record.error and record.num_tokens != request.num_output_tokens:
        record.error = f"{record.num_tokens} tokens instead of {request.num_output_tokens}"
    return record


def _take(record: Record, line: str) -> None:
    if not line.startswith("data: {"):
        return
    usage = msgspec.json.decode(line[len("data: ") :], type=Chunk).usage
    if usage is not None and usage.completion_tokens > record.num_tokens:
        record.num_tokens = usage.completion_tokens
        record.token_times.append(time.perf_counter())


@dataclass(frozen=True)
class ServiceLevel:
    """What a good request keeps. Infinite: not asked for."""

    ttft_s: float = float("inf")
    tpot_s: float = float("inf")

    def is_met(self, record: Record) -> bool:
        return not record.error and record.ttft_s <= self.ttft_s and record.tpot_s <= self.tpot_s


def summary(records: Sequence[Record], seconds: float, level: ServiceLevel) -> Mapping[str, object]:
    """Rates over the whole run and percentiles over completed requests, in milliseconds."""
    completed = [record for record in records if not record.error]
    num_good = sum(level.is_met(record) for record in records)
    gaps = [later - earlier for record in completed for earlier, later in zip(record.token_times, record.token_times[1:], strict=False)]
    return {
        "completed": len(completed),
        "failed": len(records) - len(completed),
        "request_s": len(completed) / seconds,
        "goodput_request_s": num_good / seconds,
        "good_share": num_good / len(records),
        "ttft_ms": _milliseconds([record.ttft_s for record in completed]),
        "itl_ms": _milliseconds(gaps),
        "tpot_ms": _milliseconds([record.tpot_s for record in completed if record.num_tokens > 1]),
        "e2e_ms": _milliseconds([record.e2e_s for record in completed]),
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    return percentiles([1000 * value for value in seconds])
