"""Binding the one port, and refusing what would let strangers in."""

from __future__ import annotations

import os
import socket

import pytest

from pagemill.errors import UsageError
from pagemill.listening import bind, url_of


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_port_0_takes_a_free_one_and_names_it() -> None:
    with bind("127.0.0.1", 0, has_key=False) as first, bind("localhost", 0, has_key=False) as second:
        assert url_of(first) != url_of(second)
        host, port = url_of(first).removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5):
            pass


def test_a_port_in_use_is_named_with_its_process() -> None:
    with bind("127.0.0.1", 0, has_key=False) as first:
        port = first.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} on 127\.0\.0\.1 is in use by process {os.getpid()} \(.*\); choose another with --port"):
            bind("127.0.0.1", port, has_key=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
def test_others_are_not_let_in_without_a_key(host: str) -> None:
    with pytest.raises(UsageError, match="would let others in without a key: set --api-key-file or PAGEMILL_API_KEY, or bind 127"):
        bind(host, 0, has_key=False)


def test_every_address_is_shown_as_one_that_a_browser_reaches() -> None:
    with bind("0.0.0.0", 0, has_key=True) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6_is_served_and_its_address_bracketed() -> None:
    with bind("::1", 0, has_key=False) as listener:
        assert url_of(listener).startswith("http://[::1]:")
    with bind("::", 0, has_key=True) as listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5):
        pass


@pytest.mark.parametrize("host", ["no such host", "203.0.113.7", "a" * 300])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="--host accepts an address or name of this machine"):
        bind(host, 0, has_key=True)
