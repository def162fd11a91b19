"""The wire contract: every message that crosses a process border, one module for each pair of processes that talk.

    frontend    frontend <-> scheduler          sequences               parts that several directions have in common
    worker      scheduler <-> worker            debug_state, decisions  parts that are also shown to operators
    control     launcher <-> children           wire                    what makes a struct a message, and the handshake

Rules. Each direction is one tagged union, at the end of its module. All structs are frozen and, but for those shown to
operators, positional. Bulk integers travel as packed native int32 (`pagemill.ids`), bulk floats as packed native float32. No
pickle anywhere. Everything to or from a worker, and every message to a frontend, carries the scheduler's *epoch*: an older one
is dropped and counted, never asserted on. Requests from frontends are idempotent and carry none.

These modules import msgspec, ids and each other: they must not know any process.
"""
