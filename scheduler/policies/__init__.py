"""Scheduling policies: one file each, discovered by name.

A policy says in which order sequences deserve to run and when new ones may enter. It is pure and sees
neither blocks nor the clock; who yields when memory runs out, and how, is the planner's business.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol

from scheduler.sequence import Order, Sequence


class Policy(Protocol):
    """What a file in this folder defines as the class `Policy`."""

    #: The value of --scheduling-policy.
    NAME: str
    #: Whether clients may send a priority other than 0.
    READS_PRIORITY: bool

    def key(self, sequence: Sequence) -> Order:
        """(urgency, arrival, sequence id), smaller first: a total order that never changes for a sequence.

        A sequence of smaller urgency may take blocks and seats from running ones of larger urgency.
        """

    def admits(self, num_begun: int) -> bool:
        """Whether new sequences may enter a step that begins with `num_begun` running or preempted ones."""


def load_policies() -> dict[str, type[Policy]]:
    """All policies by name. Raises ValueError if two files claim one name, TypeError if one lacks a part."""
    policies: dict[str, type[Policy]] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        policy: type[Policy] = importlib.import_module(f"{__name__}.{module.name}").Policy
        missing = [part for part in ("NAME", "READS_PRIORITY", "key", "admits") if not hasattr(policy, part)]
        if missing:
            raise TypeError(f"scheduler/policies/{module.name}.py is no policy: it lacks {', '.join(missing)}")
        if policies.setdefault(policy.NAME, policy) is not policy:
            raise ValueError(f"two scheduling policies are named {policy.NAME}")
    return policies
