"""After the warm-up nothing is left to compile."""

from __future__ import annotations

import pytest
import torch

from workers import gumbel, kernels
from workers.native import NativeKernel
from workers.warm_up import compile_kernels


def test_warm_up_names_every_kernel_and_leaves_none_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list(compile_kernels(torch.float32))
    assert {name for _, name in seen} == {"gumbel", *kernels.discover()}
    assert [share for share, _ in seen] == sorted(share for share, _ in seen)

    def compiled_late(kernel: NativeKernel, *constants: int) -> None:
        raise AssertionError(f"{kernel.name}{constants} was not compiled")

    monkeypatch.setattr(NativeKernel, "compile", compiled_late)
    for kernel in kernels.discover().values():
        for case in kernel.CASES:
            if "float32" in case.name and "float16" not in case.name:
                getattr(kernel, kernel.NAME)(*case.arguments())
    assert gumbel.noise_key(1, 2) != gumbel.noise_key(2, 1)


def test_beside_a_device_only_the_draw_of_tokens_is_compiled() -> None:
    assert [name for _, name in compile_kernels(torch.bfloat16, "cuda")] == ["gumbel"]
