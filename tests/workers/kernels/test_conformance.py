"""Every kernel gives what its reference gives, on each of its cases. A new kernel is tested on arrival."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from workers import kernels
from workers.kernels import Case, Kernel

KERNELS = kernels.discover()
CASES = [pytest.param(kernel, case, id=f"{name}-{case.name}") for name, kernel in KERNELS.items() for case in kernel.CASES]


def tensors(values: Any) -> Iterator[Tensor]:
    """The float tensors in nested tuples: results, and arguments that may have been written into."""
    if isinstance(values, Tensor) and values.is_floating_point():
        yield values
    elif isinstance(values, tuple):
        for value in values:
            yield from tensors(value)


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_kernel_agrees_with_its_reference(kernel: Kernel, case: Case) -> None:
    given, expected = case.arguments(), case.arguments()
    results = (getattr(kernel, kernel.NAME)(*given), given)
    for actual, wanted in zip(tensors(results), tensors((kernel.reference(*expected), expected)), strict=True):
        assert actual.dtype == wanted.dtype
        assert torch.equal(actual.isnan(), wanted.isnan())
        difference = (actual.double() - wanted.double()).nan_to_num().abs().max()
        assert difference <= case.tolerance * wanted.double().nan_to_num().abs().max()


def test_every_file_holds_one_kernel_with_cases() -> None:
    assert set(KERNELS) == {"paged_attention", "store_kv", "rms_norm", "rotary", "act_and_mul", "copy_blocks"}
    assert all(kernel.CASES for kernel in KERNELS.values())
