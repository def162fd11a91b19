"""gelu_tanh_and_mul: the gated activation of GeGLU on the merged projection, GELU in its tanh form.

gate_up [T, 2F], gate first -> gelu(gate) * up [T, F], computed in float32, rounded once
gelu(x) = x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers import simd
from workers.kernels import Case
from workers.native import FIRST_ARGUMENT, Body, NativeKernel, log_reference_once, num_threads_for
from workers.simd import FLOAT32

NAME = "gelu_tanh_and_mul"
#: -2 u / ln 2 = x * (_LINEAR + _CUBIC * x^2)
_LINEAR = -2 * math.sqrt(2 / math.pi) * math.log2(math.e)
_CUBIC = 0.044715 * _LINEAR


def reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.device.type != "cpu" or width % simd.LANES:
        log_reference_once(NAME, gate_up.device.type)
        return reference(gate_up)
    gate_up = gate_up.contiguous()
    out = torch.empty((rows, width), dtype=gate_up.dtype)
    _ACTIVATE((simd.KINDS[out.dtype],), num_threads_for(rows * width), gate_up.data_ptr(), out.data_ptr(), rows, width)
    return out


def _build(kind: int) -> Body:
    size = 4 if kind == FLOAT32 else 2

    def activate(arguments: int) -> None:
        at = arguments + FIRST_ARGUMENT
        gate_up, out, rows, width = simd.read_int64(at), simd.read_int64(at + 8), simd.read_int64(at + 16), simd.read_int64(at + 24)
        one, linear, cubic = simd.splat(1.0), simd.splat(_LINEAR), simd.splat(_CUBIC)
        while True:
            row = simd.claim(arguments)
            if row >= rows:
                return
            gates, target = gate_up + row * 2 * width * size, out + row * width * size
            ups = gates + width * size
            for i in range(0, width * size, simd.LANES * size):
                gate = simd.load(gates + i, kind)
                exponent = simd.times(gate, simd.fma(simd.times(gate, gate), cubic, linear))
                # The bound keeps exp2 in range; the quotient is zero in float32 long before.
                power = simd.exp2(simd.minimum(exponent, simd.splat(126.0)))
                simd.store(target + i, simd.times(simd.divide(gate, simd.add(one, power)), simd.load(ups + i, kind)), kind)

    return activate


_ACTIVATE = NativeKernel(NAME, _build)


def compile_for(dtype: torch.dtype) -> None:
    _ACTIVATE.compile(simd.KINDS[dtype])


def _case(rows: int, width: int, dtype: torch.dtype, spread: float, tolerance: float) -> Case:
    def arguments() -> tuple[Tensor]:
        return ((torch.randn((rows, 2 * width), generator=torch.Generator().manual_seed(rows)) * spread).to(dtype),)

    return Case(f"{rows}x{width}-{dtype}-spread{spread}", arguments, tolerance)


CASES = [
    _case(rows, width, dtype, spread, tolerance)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3))
    for rows, width, spread in ((1, 16, 1.0), (3, 1536, 30.0), (70, 512, 1.0), (2, 40, 1.0))
]
