"""Which addresses reach this machine only. Must not know sockets."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Of a numeric address; an IPv4 address in IPv6 clothes is what it wears underneath. Raises ValueError for anything else."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
