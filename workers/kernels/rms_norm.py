"""rms_norm: scale each row by its root mean square; also with the residual added first.

    x [T, H], weight [H], eps -> x / sqrt(mean(x^2) + eps) * weight, computed in float32, rounded once
    add_rms_norm: residual [T, H] += x in place, then the norm of the sum

A row is summed in an order of its own, whatever the number of rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from workers import simd
from workers.kernels import Case
from workers.native import Body, NativeKernel, argument_reader, float32_bits, log_reference_once, num_threads_for
from workers.simd import FLOAT32

NAME = "rms_norm"


def reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    rows, width = x.shape
    if x.device.type != "cpu" or width % simd.LANES:
        log_reference_once(NAME, x.device.type)
        return reference(x, weight, eps, residual)
    x = x.contiguous()
    out = torch.empty_like(x)
    kind = simd.KINDS[x.dtype]
    residual_at = 0 if residual is None else residual.data_ptr()
    _NORM(
        (kind, simd.KINDS[weight.dtype]), num_threads_for(rows * width),
        *_Arguments(x=x.data_ptr(), residual=residual_at, weight=weight.data_ptr(), out=out.data_ptr(), rows=rows, width=width, eps=float32_bits(eps)),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to residual (contiguous) in place and returns the norm of the sum."""
    return rms_norm(x, weight, eps, residual)


class _Arguments(NamedTuple):
    x: int
    residual: int  #: 0: none
    weight: int
    out: int
    rows: int
    width: int
    eps: int  #: the bits of a float32


_read = argument_reader(_Arguments)


def _build(kind: int, weight_kind: int) -> Body:
    size = 4 if kind == FLOAT32 else 2
    weight_size = 4 if weight_kind == FLOAT32 else 2

    def norm(arguments: int) -> None:
        given = _read(arguments)
        width, eps = given.width, simd.float32_from_bits(given.eps)
        while True:
            row = simd.claim(arguments) * width * size
            if row >= given.rows * width * size:
                return
            source = given.x + row
            squares = simd.splat(0.0)
            for i in range(0, width, simd.LANES):
                value = simd.load(given.x + row + i * size, kind)
                if given.residual != 0:
                    simd.store(given.residual + row + i * size, simd.add(value, simd.load(given.residual + row + i * size, kind)), kind)
                    value = simd.load(given.residual + row + i * size, kind)
                squares = simd.fma(value, value, squares)
            if given.residual != 0:
                source = given.residual + row
            factor = simd.splat(1.0 / math.sqrt(simd.sum_lanes(squares) / width + eps))
            for i in range(0, width, simd.LANES):
                scaled = simd.times(simd.load(source + i * size, kind), factor)
                simd.store(given.out + row + i * size, simd.times(scaled, simd.load(given.weight + i * weight_size, weight_kind)), kind)

    return norm


_NORM = NativeKernel(NAME, _build)


def compile_for(dtype: torch.dtype) -> None:
    _NORM.compile(simd.KINDS[dtype], simd.KINDS[dtype])
    if dtype != torch.float32:
        _NORM.compile(simd.KINDS[dtype], FLOAT32)  # weights that are one plus what the checkpoint holds


def _case(rows: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype, with_residual: bool, tolerance: float) -> Case:
    def arguments() -> tuple[Tensor | float | None, ...]:
        generator = torch.Generator().manual_seed(rows * width)
        x, weight, residual = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, width), (width,), (rows, width)))
        return x, weight.to(weight_dtype), 1e-5, residual if with_residual else None

    return Case(f"{rows}x{width}-{dtype}-{'add' if with_residual else 'plain'}-weight-{weight_dtype}", arguments, tolerance)


CASES = [
    _case(rows, width, dtype, weight_dtype, with_residual, tolerance)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3))
    for weight_dtype in dict.fromkeys((dtype, torch.float32))
    for rows, width in ((1, 16), (3, 576), (130, 576), (2, 40))
    for with_residual in (False, True)
]
