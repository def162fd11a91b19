"""GET /version."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.services import Services
from pagemill import __version__

PATHS = ("/version",)
METHODS = ("GET",)


async def handle(request: Request, services: Services) -> Response:
    return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")
