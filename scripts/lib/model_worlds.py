"""The small worlds of the model check: three requests over five blocks and four slots.

In each, prompts have one to four blocks and two of them share one, and there is less memory than what runs at
once comes to want: the first in the order grows and takes from those behind it, or an urgent one arrives last and
needs nearly everything. Blocks of two positions leave partly filled last blocks; blocks of one make memory tight. Where
there are windows beside the full group, blocks come and go in both, and what has passed a window cannot be gone back to.
"""

from __future__ import annotations

from typing import Any

from pagemill.messages.sequences import KvGroup
from scheduler.core_config import CoreConfig
from scripts.lib.model_check import Request, World

_GROWING = (Request("a", 4), Request("ab", 3), Request("cdef", 1))
_GROWING_IN_PAIRS = (Request("a", 8), Request("ab", 6), Request("cdef", 2))
_URGENT = (Request("ab", 3, priority=1), Request("ac", 3, priority=1), Request("def", 2))
_URGENT_IN_PAIRS = (Request("ab", 6, priority=1), Request("ac", 4, priority=1), Request("defg", 2))
#: A full group beside one that looks back to one block before the present one.
_WINDOW = (KvGroup(), KvGroup(2))
_WINDOW_IN_PAIRS = (KvGroup(), KvGroup(3))
#: Both give up what they share, in the same plan, for one that needs nearly everything.
_SHARING = (Request("abc", 3, priority=1), Request("abd", 3, priority=1), Request("efghi", 1))
_PRIVATE = (Request("a", 4, is_cached=False), Request("ab", 3), Request("ac", 2))


def suite_worlds() -> list[World]:
    """Small enough for every run of the tests."""
    return [
        _world("grow", _GROWING),
        _world("grow, two plans", _GROWING, max_plans_in_flight=2),
        _world("two that grow, copies fail", _GROWING[:2], failures=True),
        _world("two that grow, a window, two plans", _GROWING[:2], groups=_WINDOW, num_blocks=8, max_plans_in_flight=2),
        _world("grow, a window", _GROWING, groups=_WINDOW, num_blocks=8),
        _world("private", _PRIVATE, max_plans_in_flight=2, patience=True),
    ]


def all_worlds() -> list[World]:
    """Every world, the small ones first."""
    priority: dict[str, Any] = {"scheduling_policy": "priority"}
    return [
        *suite_worlds(),
        _world("two that grow, pairs, two plans", _GROWING_IN_PAIRS[:2], block_size=2, max_plans_in_flight=2),
        _world("two that grow, windows alone", _GROWING[:2], groups=_WINDOW[1:], num_blocks=3, max_plans_in_flight=2),
        _world("two that grow, a short window", _GROWING[:2], groups=(KvGroup(), KvGroup(1)), num_blocks=7, max_plans_in_flight=2),
        _world("two that grow, a window, copies fail", _GROWING[:2], groups=_WINDOW, num_blocks=8, failures=True),
        _world("two that grow, a window, pairs, two plans", _GROWING_IN_PAIRS[:2], groups=_WINDOW_IN_PAIRS, num_blocks=8, block_size=2, max_plans_in_flight=2),
        _world("private, a window", _PRIVATE[:2], groups=_WINDOW, num_blocks=7, max_plans_in_flight=2, patience=True),
        _world("grow, chunks", _GROWING, max_num_batched_tokens=2, max_plans_in_flight=2),
        _world("grow, impatient", _GROWING, patience=True, max_plans_in_flight=2),
        _world("grow, pairs, two plans", _GROWING_IN_PAIRS, block_size=2, max_plans_in_flight=2),
        _world("urgent", _URGENT, **priority),
        _world("two that share, an urgent one", _SHARING, num_blocks=6, num_swap_slots=6, **priority),
        _world("urgent, windows alone", _URGENT, groups=_WINDOW[1:], num_blocks=3, max_plans_in_flight=2, **priority),
        _world("urgent, two plans", _URGENT, max_plans_in_flight=2, **priority),
        _world("urgent, impatient", _URGENT, patience=True, max_plans_in_flight=2, **priority),
        _world("urgent, pairs", _URGENT_IN_PAIRS, block_size=2, **priority),
        _world("urgent, pairs, two plans", _URGENT_IN_PAIRS, block_size=2, max_plans_in_flight=2, **priority),
        _world("grow, copies fail", _GROWING, failures=True, max_plans_in_flight=2),
        _world("two that grow, saved when overwritten", _GROWING[:2], saves=True),
        _world("two that grow, saved when overwritten, two plans", _GROWING[:2], saves=True, max_plans_in_flight=2),
        _world("two that grow, saved when overwritten, copies fail", _GROWING[:2], saves=True, failures=True),
        _world("private, saved when overwritten, copies fail", _PRIVATE[:2], saves=True, failures=True),
        _world("grow, saved when overwritten", _GROWING, saves=True, aborts=False, max_plans_in_flight=2),
        _world("grow, a window, two plans", _GROWING, groups=_WINDOW, num_blocks=8, max_plans_in_flight=2),
    ]


def _world(
    name: str, requests: tuple[Request, ...], *, patience: bool = False, aborts: bool = True, failures: bool = False, saves: bool = False, **limits: Any
) -> World:
    defaults: dict[str, Any] = {"num_blocks": 5, "num_swap_slots": 4, "block_size": 1, "max_num_batched_tokens": 16, "max_num_seqs": 3}
    return World(name, CoreConfig(**defaults | limits), requests, patience, aborts, failures, saves)
