"""What tests of `scripts/chaos` say in place of a server: an answer as it goes over the wire, and what a server at rest holds."""

from __future__ import annotations

from scripts.lib.chaos_audit import Holdings


def response(status: str, body: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", body]).encode()


AT_REST = Holdings(
    sequences=0,
    blocks=0,
    swap_slots=0,
    broken_invariant="",
    titles=("frontend 0", "launcher", "scheduler 0", "worker 0"),
    zombies=0,
    orphans=0,
    descriptors={"launcher": 20, "worker 0": 15},
    shared_memory=2,
    sockets=2,
    private_bytes={"launcher": 30 * 2**20},
)
