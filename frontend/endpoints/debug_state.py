"""GET /debug/state: the scheduler's sequences, blocks and invariants, as it sees them now."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.services import Services

PATHS = ("/debug/state",)
METHODS = ("GET",)


async def handle(request: Request, services: Services) -> Response:
    services.readiness.require()
    return Response(msgspec.json.encode(await services.engine.debug_state()), media_type="application/json")
