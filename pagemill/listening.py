"""The one TCP socket of a server: bound before anything else, inherited by frontends. And who may reach it.

Must not know HTTP, nor what is served.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

import psutil

from pagemill.errors import UsageError
from pagemill.loopback import is_loopback

_BACKLOG = 2048


def bind(host: str, port: int, *, has_key: bool) -> socket.socket:
    """A listening socket. Raises UsageError if it cannot be had, or would be open to others without a key."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(f"--host accepts an address or name of this machine; not {host!r} ({error})") from None
    if not has_key and not is_loopback(str(address[0])):
        raise UsageError(f"--host {host} would let others in without a key: set --api-key-file or PAGEMILL_API_KEY, or bind 127.0.0.1")
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # `::` means every address, old ones included
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(_explain(error, host, port)) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """How a browser on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _explain(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is in use{_owner(port)}; choose another with --port"
        case errno.EACCES:
            return f"port {port} needs privileges; choose one from 1024 up with --port"
        case errno.EADDRNOTAVAIL:
            return f"--host accepts an address or name of this machine; not {host!r}"
        case _:
            return f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}"


def _owner(port: int) -> str:
    """` by process 123 (name)`, if this user may know."""
    try:
        connections = psutil.net_connections(kind="tcp")
        pids = [found.pid for found in connections if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid]
        if not pids:
            return ""
        owner = psutil.Process(pids[0])
        launcher = owner.parent()
        if owner.name().startswith("pagemill: ") and launcher is not None:  # a frontend inherited it from the one to stop
            owner = launcher if launcher.name().startswith("pagemill: ") else owner
        return f" by process {owner.pid} ({owner.name()})"
    except (psutil.Error, OSError):
        return ""
