"""Compiles what a worker runs on the CPU before it says it is ready, in sight of whoever waits.

The first start on a machine takes several seconds for it, later ones find everything in the cache.
Packed linears compile their own kernel when a weight is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from workers import gumbel, kernels


def compile_kernels(dtype: torch.dtype, device: str = "cpu") -> Iterator[tuple[float, str]]:
    """Compiles one kernel after another; yields the share done and the name of the next before each. Tokens are drawn on the CPU whatever the device."""
    pending: list[tuple[str, Callable[[], None]]] = [("gumbel", gumbel.compile_draw)]
    on_cpu = kernels.discover() if device == "cpu" else {}
    for name, kernel in on_cpu.items():
        pending.append((name, lambda kernel=kernel: kernel.compile_for(dtype)))  # type: ignore[misc]
    for i, (name, compile_one) in enumerate(pending):
        yield i / len(pending), name
        compile_one()
