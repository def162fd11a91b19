"""`GET /` and `/static/{name}`: the chat page, served from files beside this package.

The page is a client like any other: it speaks to the public API only. Its files are known by name when the
process starts, so no path of a request ever reaches the file system. Nothing is loaded from elsewhere, and
the policy sent with every file keeps it so.
"""

from __future__ import annotations

import hashlib
from importlib import resources

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.errors import route_not_found
from frontend.services import Services

PATHS = ("/", "/static/{name}")
METHODS = ("GET",)

_MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # kept, but asked for again: an upgrade shows at once
}


class _File(msgspec.Struct, frozen=True):
    content: bytes
    media_type: str
    tag: str


def _read_files() -> dict[str, _File]:
    """The files of the page by name; anything with another suffix is not part of it."""
    found = {}
    for entry in (resources.files("frontend") / "static").iterdir():
        media_type = _MEDIA_TYPES.get("." + entry.name.rpartition(".")[2])
        if media_type is not None:
            content = entry.read_bytes()
            found[entry.name] = _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


_FILES = _read_files()


async def handle(request: Request, services: Services) -> Response:
    file = _FILES.get(request.path_params.get("name", "index.html"))
    if file is None:
        raise route_not_found()
    headers = {**_HEADERS, "ETag": file.tag}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
