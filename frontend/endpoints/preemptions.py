"""GET /debug/preemptions: the planner's newest decisions with the prices they were made at, and what they have cost so far.

`limit` says how many, oldest of them first. `pagemill explain` tells the same in words.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.errors import invalid_value
from frontend.services import Services
from pagemill.preemption_report import DEFAULT_DECISIONS, MAX_DECISIONS, PreemptionReport

PATHS = ("/debug/preemptions",)
METHODS = ("GET",)


async def handle(request: Request, services: Services) -> Response:
    limit = _limit(request.query_params.getlist("limit"))
    services.readiness.require()
    reply = await services.engine.decisions(limit)
    last = services.metrics.last_snapshot
    if last is None:
        report = PreemptionReport(reply.now_s, reply.decisions)
    else:
        report = PreemptionReport(reply.now_s, reply.decisions, last.preemptions, last.swapped_bytes, last.swap_seconds)
    return Response(msgspec.json.encode(report), media_type="application/json")


def _limit(given: Sequence[str]) -> int:
    """Raises ApiError (400) unless it is absent, or one plain number in range."""
    if not given:
        return DEFAULT_DECISIONS
    text = given[0]
    if len(given) == 1 and text.isascii() and text.isdigit() and len(text) <= len(str(MAX_DECISIONS)) and 1 <= int(text) <= MAX_DECISIONS:
        return int(text)
    raise invalid_value("limit", f"'limit' must be one integer from 1 to {MAX_DECISIONS}.")
