"""act_and_mul: the gated activation on the merged projection.

gate_up [T, 2F], gate first -> f(gate) * up [T, F], computed in float32, rounded once
    silu                f(x) = x / (1 + exp(-x))
    gelu_pytorch_tanh   f(x) = x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from workers import simd
from workers.kernels import Case
from workers.native import Body, NativeKernel, argument_reader, log_reference_once, num_threads_for
from workers.simd import FLOAT32

NAME = "act_and_mul"
#: Activations by the names that checkpoints give them, and as the compiled kernel knows them.
_REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu_pytorch_tanh": partial(gelu, approximate="tanh")}
SILU, GELU_TANH = 0, 1
ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}

_MINUS_LOG2_E = -math.log2(math.e)
#: -2 u / ln 2 = x * (_LINEAR + _CUBIC * x^2)
_LINEAR = -2 * math.sqrt(2 / math.pi) * math.log2(math.e)
_CUBIC = 0.044715 * _LINEAR


def reference(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (_REFERENCES[activation](gate) * up).to(gate_up.dtype)


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.device.type != "cpu" or width % simd.LANES:
        log_reference_once(NAME, gate_up.device.type)
        return reference(gate_up, activation)
    gate_up = gate_up.contiguous()
    out = torch.empty((rows, width), dtype=gate_up.dtype)
    constants = simd.KINDS[out.dtype], ACTIVATIONS[activation]
    _ACTIVATE(constants, num_threads_for(rows * width), *_Arguments(gate_up=gate_up.data_ptr(), out=out.data_ptr(), rows=rows, width=width))
    return out


class _Arguments(NamedTuple):
    gate_up: int
    out: int
    rows: int
    width: int


_read = argument_reader(_Arguments)


def _build(kind: int, activation: int) -> Body:
    size = 4 if kind == FLOAT32 else 2

    def activate(arguments: int) -> None:
        given = _read(arguments)
        one, factor, linear, cubic = simd.splat(1.0), simd.splat(_MINUS_LOG2_E), simd.splat(_LINEAR), simd.splat(_CUBIC)
        while True:
            row = simd.claim(arguments)
            if row >= given.rows:
                return
            gates, target = given.gate_up + row * 2 * given.width * size, given.out + row * given.width * size
            ups = gates + given.width * size
            for i in range(0, given.width * size, simd.LANES * size):
                gate = simd.load(gates + i, kind)
                if activation == SILU:
                    exponent = simd.times(gate, factor)
                else:
                    exponent = simd.times(gate, simd.fma(simd.times(gate, gate), cubic, linear))
                # The bound keeps exp2 in range; the quotient is zero in float32 long before.
                power = simd.exp2(simd.minimum(exponent, simd.splat(126.0)))
                simd.store(target + i, simd.times(simd.divide(gate, simd.add(one, power)), simd.load(ups + i, kind)), kind)

    return activate


_ACTIVATE = NativeKernel(NAME, _build)


def compile_for(dtype: torch.dtype) -> None:
    for activation in ACTIVATIONS.values():
        _ACTIVATE.compile(simd.KINDS[dtype], activation)


def _case(rows: int, width: int, activation: str, dtype: torch.dtype, spread: float, tolerance: float) -> Case:
    def arguments() -> tuple[Tensor, str]:
        return (torch.randn((rows, 2 * width), generator=torch.Generator().manual_seed(rows)) * spread).to(dtype), activation

    return Case(f"{activation}-{rows}x{width}-{dtype}-spread{spread}", arguments, tolerance)


CASES = [
    _case(rows, width, activation, dtype, spread, tolerance)
    for activation in ACTIVATIONS
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3))
    for rows, width, spread in ((1, 16, 1.0), (3, 1536, 30.0), (70, 512, 1.0), (2, 40, 1.0))
]
