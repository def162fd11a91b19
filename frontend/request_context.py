"""What the application knows of a request before its endpoint sees it; travels in the ASGI scope.

This module must not know endpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Scope

from frontend.overload import Load
from frontend.request_metrics import RequestRecord

_SCOPE_KEY = "pagemill.context"


@dataclass(frozen=True, slots=True)
class RequestContext:
    record: RequestRecord
    load: Load
    key_id: str  #: of the API key; "" where none is asked for
    cut_connection: Callable[[], None]  #: drops the connection without waiting for what is unsent


def attach(scope: Scope, context: RequestContext) -> None:
    scope[_SCOPE_KEY] = context


def context_of(request: Request) -> RequestContext:
    context = request.scope[_SCOPE_KEY]
    assert isinstance(context, RequestContext)
    return context
