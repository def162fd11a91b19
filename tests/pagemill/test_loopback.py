"""Addresses of this machine, however they are written."""

from __future__ import annotations

import pytest

from pagemill.loopback import is_loopback


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::1%lo", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("::", False),
    ],
)
def test_loopback_is_recognised_in_every_dress(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_names_are_no_addresses() -> None:
    with pytest.raises(ValueError, match="localhost"):
        is_loopback("localhost")
