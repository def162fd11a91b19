"""The ASGI application: one request from its first header to its record.

Every request gets an id, a record and a load, is matched to an endpoint, must be allowed to call it, and is answered by it;
what is refused or fails on the way becomes an error in OpenAI's shape. The order is fixed: who may not call learns nothing,
not even which routes exist; `OPTIONS`, which browsers send without a key, is answered alike for every path. What the head
of a request is refused for is said before anything is begun for it, for that must cost next to nothing (`refusal`).
Requests with bodies that come at once begin a few at a time; all others go before them.
This module must not know what endpoints do.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Message, Receive, Scope, Send

from frontend import body, request_context
from frontend.endpoints import Endpoint
from frontend.errors import ApiError, internal_error, method_not_allowed, route_not_found, too_many_connections
from frontend.generation import ClientGoneError
from frontend.overload import Load
from frontend.request_context import RequestContext
from frontend.request_metrics import CLIENT_CLOSED, QUIET_ENDPOINTS, RequestRecord
from frontend.services import Services
from pagemill.telemetry import get_logger

#: The key in a scope's `extensions` under which the HTTP server offers to drop the connection.
ABORT_EXTENSION = "pagemill.abort"
#: The key under which it says that it holds more connections than it should, of which this is one.
SURPLUS_EXTENSION = "pagemill.surplus"
UNMATCHED = "unmatched"

#: The answer to `OPTIONS`, whatever the path.
_ALL_METHODS = "GET, HEAD, OPTIONS, POST"

_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

log = get_logger("frontend.app")


@dataclass(frozen=True, slots=True)
class Route:
    """One path of one endpoint. `pattern` names it in records and metrics."""

    pattern: str
    regex: re.Pattern[str]
    methods: frozenset[str]
    endpoint: Endpoint

    @property
    def takes_body(self) -> bool:
        """Whoever can only post has something to say, for which there must be room."""
        return "GET" not in self.methods


@dataclass(frozen=True, slots=True)
class Refusal:
    """The whole answer to a request of which only the head has been looked at."""

    error: ApiError
    request_id: str


class Application:
    """One per frontend process."""

    def __init__(self, services: Services, endpoints: Mapping[str, Endpoint]) -> None:
        self._services = services
        self.routes = [_route(path, endpoint) for endpoint in endpoints.values() for path in endpoint.PATHS]
        self._literal_routes = {route.pattern: route for route in self.routes if "{" not in route.pattern}

    def refusal(self, scope: Scope) -> Refusal | None:
        """What a request hears that is refused for its head; it is on record then, and goes no further. None if it must be heard."""
        route, _ = self._match(scope["path"])
        if scope["method"] in ("HEAD", "OPTIONS"):
            return None  # their answers have no body
        try:
            self._examine(scope, route)
        except ApiError as error:
            record = self._open(scope, route)
            record.refuse(error.code)
            self._services.ledger.close(record, error.status)
            # Its traceback would refer to the frames that hold it, which only a full look for garbage would find.
            return Refusal(error.with_traceback(None), _client_id(scope) or record.request_id)
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served here, not {scope['type']}")
        route, params = self._match(scope["path"])
        record = self._open(scope, route)
        load = self._services.overload.open()
        out = _Out(send, _client_id(scope) or record.request_id)
        try:
            if route is not None and route.takes_body and not self._services.overload.is_full:
                await self._services.overload.pacer.turn()  # a refusal is no work, and the sooner it is given the fewer connections pile up
            response = await self._respond({**scope, "path_params": params}, receive, record, load, route)
            await response(scope, receive, out)
        except ClientGoneError:
            pass
        except Exception:
            log.exception("response_failed", request_id=record.request_id)
            if out.status == 0:
                await _error_response(internal_error())(scope, receive, out)
            else:
                raise  # the server cuts the connection: the client must not take half a reply for a whole one
        finally:
            load.close()
            self._services.ledger.close(record, out.status or CLIENT_CLOSED)

    def _open(self, scope: Scope, route: Route | None) -> RequestRecord:
        return self._services.ledger.open(method=scope["method"], endpoint=_pattern(route), request_id=secrets.token_hex(16))

    def _match(self, path: str) -> tuple[Route | None, dict[str, Any]]:
        literal = self._literal_routes.get(path)
        if literal is not None:
            return literal, {}
        for route in self.routes:
            match = route.regex.fullmatch(path)
            if match is not None:
                return route, match.groupdict()
        return None, {}

    async def _respond(self, scope: Scope, receive: Receive, record: RequestRecord, load: Load, route: Route | None) -> Response:
        """The endpoint's response, or the one that says why there is none. Raises ClientGoneError."""
        try:
            if scope["method"] == "OPTIONS":
                _refuse_surplus(scope, route)
                return Response(status_code=204, headers={"Allow": _ALL_METHODS})
            route, key_id = self._examine(scope, route)
            request_context.attach(scope, RequestContext(record, load, key_id, _connection_cutter(scope)))
            return await route.endpoint.handle(Request(scope, receive), self._services)
        except ApiError as error:
            record.refuse(error.code)
            return _error_response(error)
        except ClientGoneError:
            raise
        except Exception:
            log.exception("request_failed", request_id=record.request_id)
            return _error_response(internal_error())

    def _examine(self, scope: Scope, route: Route | None) -> tuple[Route, str]:
        """Everything that a head can be refused for, in order. The route and the id of the caller's key; raises ApiError."""
        _refuse_surplus(scope, route)
        key_id = self._services.authenticator.identify(scope)
        if route is None:
            raise route_not_found()
        if scope["method"] not in route.methods:
            raise method_not_allowed(_allowed(route))
        if route.takes_body:
            self._services.require_text()
            body.check_head(Headers(scope=scope))
            self._services.overload.require_room()
        return route, key_id


class _Out:
    """Passes messages to the client, puts the request id on the response, and remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 0  #: 0 until the response has begun

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-Id"] = self._request_id
        await self._send(message)


def _route(path: str, endpoint: Endpoint) -> Route:
    regex, _, _ = compile_path(path)
    methods = frozenset(endpoint.METHODS)
    return Route(path, regex, methods | {"HEAD"} if "GET" in methods else methods, endpoint)


def _refuse_surplus(scope: Scope, route: Route | None) -> None:
    """Connections that are too many may ask short questions only. Raises ApiError (503) for others."""
    if _pattern(route) not in QUIET_ENDPOINTS and _extensions(scope).get(SURPLUS_EXTENSION, False):
        raise too_many_connections()


def _pattern(route: Route | None) -> str:
    return UNMATCHED if route is None else route.pattern


def _allowed(route: Route) -> str:
    return ", ".join(sorted(route.methods | {"OPTIONS"}))


def _error_response(error: ApiError) -> Response:
    return Response(error.body, error.status, headers=error.headers, media_type="application/json")


def _client_id(scope: Scope) -> str | None:
    """The client's own id for the request, if it is fit to be said back. It names nothing in here."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _CLIENT_ID.fullmatch(given) else None


def _connection_cutter(scope: Scope) -> Callable[[], None]:
    cut: Callable[[], None] = _extensions(scope).get(ABORT_EXTENSION, lambda: None)
    return cut


def _extensions(scope: Scope) -> Mapping[str, Any]:
    """What the HTTP server offers beyond the protocol; nothing where it is another one."""
    return scope.get("extensions") or {}
