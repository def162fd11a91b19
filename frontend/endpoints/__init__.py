"""One file per endpoint; adding a file adds the endpoint.

A module here has `PATHS` (patterns as starlette writes them), `METHODS`, and `handle`, which answers one request or
raises an `ApiError`. Who may call is decided before (`frontend.auth`: a key on every route that is not on its list).
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

from starlette.requests import Request
from starlette.responses import Response

from frontend.services import Services


class Endpoint(Protocol):
    """What a module of this folder offers. GET answers HEAD as well."""

    PATHS: tuple[str, ...]
    METHODS: tuple[str, ...]

    async def handle(self, request: Request, services: Services) -> Response: ...


def discover() -> dict[str, Endpoint]:
    """Every endpoint by the name of its file. Raises TypeError if a file lacks a part, ValueError if two claim one path."""
    found: dict[str, Endpoint] = {}
    owner: dict[str, str] = {}
    for module_info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        missing = [name for name in ("PATHS", "METHODS", "handle") if not hasattr(module, name)]
        if missing:
            raise TypeError(f"{module.__name__} is no endpoint: it lacks {', '.join(missing)}")
        for path in module.PATHS:
            if owner.setdefault(path, module_info.name) != module_info.name:
                raise ValueError(f"{path} is claimed by {owner[path]} and by {module_info.name}")
        found[module_info.name] = cast(Endpoint, module)
    return found
