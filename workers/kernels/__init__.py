"""Operations of the forward pass, one file each: maths, plain torch reference, compiled kernel, cases.

To add one, write `kernels/NAME.py` with what `Kernel` asks for; it is discovered and its cases run.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch


@dataclass(frozen=True)
class Case:
    """One row of a kernel's table of tests."""

    name: str
    #: Fresh, seeded arguments; kernel and reference may write into them, and then these are compared too.
    arguments: Callable[[], tuple[Any, ...]]
    #: The largest allowed |kernel - reference|, relative to the largest |reference|.
    tolerance: float


class Kernel(Protocol):
    """What a module of this package offers. `NAME` is also the name of its public function."""

    NAME: str
    CASES: Sequence[Case]
    reference: Callable[..., Any]

    def compile_for(self, dtype: torch.dtype) -> None:
        """Compiles, or finds in the cache, what a model of this type runs on the CPU."""
        ...


def discover() -> dict[str, Kernel]:
    """Every kernel of this package by name; raises if two share one."""
    kernels: dict[str, Kernel] = {}
    for info in pkgutil.iter_modules(__path__):
        module = cast(Kernel, importlib.import_module(f"{__name__}.{info.name}"))
        if kernels.setdefault(module.NAME, module) is not module:
            raise ValueError(f"two kernels are named {module.NAME}")
    return kernels
