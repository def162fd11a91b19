"""Who may call what: API keys on every route, but for a short list that is open to everybody.

Deny is the default: a new route needs a key without anybody thinking of it. Keys are compared as digests, all of them
each time, so neither their bytes nor their place in the list shows in the time taken. Debug routes have keys of their
own, and without any they answer to this machine only, and only if the browser that calls was not led here by a foreign
name (DNS rebinding). This module must not know what the routes do.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

from frontend.errors import debug_forbidden, invalid_api_key
from pagemill.loopback import is_loopback

#: Everything that answers without a key: probes, the version, the chat page and what that page loads.
OPEN_PATHS = frozenset({"/", "/livez", "/readyz", "/health", "/healthz", "/ping", "/version"})
OPEN_FOLDER = "/static/"
DEBUG_FOLDER = "/debug/"

#: `name`, `name:port`, `[v6]`, `[v6]:port` and nothing else.
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[^:@/%\[\]]+))(?::[0-9]{1,5})?")

#: The identity of everybody where no key is asked for.
ANYBODY = ""


class KeyRing:
    """Keys, kept as digests only. An empty ring asks for no key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def identify(self, candidates: Sequence[str]) -> str | None:
        """The id of the key that one of `candidates` is, or None. Compares every pair, whatever it found before."""
        found = None
        for candidate in candidates:
            digest = _digest(candidate)
            for known in self._digests:
                if hmac.compare_digest(digest, known):
                    found = known.hex()
        return found


class Authenticator:
    """Decides about one request from its scope."""

    def __init__(self, api_keys: Iterable[str], admin_keys: Iterable[str]) -> None:
        self._api_keys = KeyRing(api_keys)
        self._admin_keys = KeyRing(admin_keys)

    def identify(self, scope: Scope) -> str:
        """The id of the caller's key, `ANYBODY` where none is needed. Raises ApiError (401 or 403)."""
        path: str = scope["path"]
        headers = Headers(scope=scope)
        if path.startswith(DEBUG_FOLDER):
            return self._identify_admin(scope, headers)
        if not self._api_keys or is_open(path):
            return ANYBODY
        key_id = self._api_keys.identify(_presented(headers))
        if key_id is None:
            raise invalid_api_key()
        return key_id

    def _identify_admin(self, scope: Scope, headers: Headers) -> str:
        if self._admin_keys:
            key_id = self._admin_keys.identify(_presented(headers))
            if key_id is None:
                raise invalid_api_key(of_admin=True)
            return key_id
        client = scope.get("client")
        if client is None or not _is_loopback(client[0]) or not _is_loopback(_host_name(headers.getlist("host"))):
            raise debug_forbidden()
        return ANYBODY


def is_open(path: str) -> bool:
    """Whether a path answers without a key. `..` never does: what a router makes of it is not for us to guess."""
    return path in OPEN_PATHS or (path.startswith(OPEN_FOLDER) and ".." not in path)


def _presented(headers: Headers) -> list[str]:
    """The keys a request shows; an empty one is none."""
    shown = [headers.get("x-api-key", "").strip()]
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        shown.append(credentials.strip())
    return [key for key in shown if key]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _host_name(hosts: list[str]) -> str:
    """The name in the one Host header, without the port and the brackets of IPv6; "" if there is not one plain name."""
    found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    return found["v6"] or found["name"] if found else ""


def _is_loopback(name: str) -> bool:
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return is_loopback(name)
    except ValueError:
        return False
