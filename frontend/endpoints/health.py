"""Probes: /livez says that this process answers, the others that requests can be served, and what is missing if not."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.readiness import StatusReport
from frontend.services import Services

PATHS = ("/livez", "/readyz", "/health", "/healthz", "/ping")
METHODS = ("GET", "POST")


async def handle(request: Request, services: Services) -> Response:
    alive_is_enough = request.scope["path"] == "/livez"
    report = StatusReport("ok") if alive_is_enough else services.readiness.report()
    ready = alive_is_enough or services.readiness.state == "ready"
    headers = {"Cache-Control": "no-store"} | ({} if ready else {"Retry-After": "1"})
    if report.status == "draining":
        headers["Connection"] = "close"
    return Response(msgspec.json.encode(report), 200 if ready else 503, headers=headers, media_type="application/json")
