"""rotary: rotate queries and keys in place by their positions.

query [T, Hq, D], key [T, Hkv, D] (heads and dimensions contiguous, any token stride),
positions [T] int64, table [max_positions, D] float32: D / 2 cosines, then as many sines
(x1, x2) = halves of a head -> (x1 cos - x2 sin, x2 cos + x1 sin), computed in float32, rounded once
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workers import simd
from workers.kernels import Case
from workers.native import Body, NativeKernel, argument_reader, log_reference_once, num_threads_for
from workers.simd import FLOAT32

NAME = "rotary"


def reference(query: Tensor, key: Tensor, positions: Tensor, table: Tensor) -> None:
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    for x in (query, key):
        first, second = x.float().chunk(2, -1)
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))


def rotary(query: Tensor, key: Tensor, positions: Tensor, table: Tensor) -> None:
    num_tokens, query_heads, head_dim = query.shape
    in_place = all(x.stride()[1:] == (head_dim, 1) for x in (query, key))
    if query.device.type != "cpu" or head_dim % (2 * simd.LANES) or not in_place:
        log_reference_once(NAME, query.device.type)
        return reference(query, key, positions, table)
    _ROTATE(
        (simd.KINDS[query.dtype],), num_threads_for(query.numel()),
        *_Arguments(
            query=query.data_ptr(), query_stride=query.stride(0), query_heads=query_heads,
            key=key.data_ptr(), key_stride=key.stride(0), key_heads=key.shape[1],
            positions=positions.data_ptr(), table=table.data_ptr(), num_tokens=num_tokens, head_dim=head_dim,
        ),
    )  # fmt: skip


class _Arguments(NamedTuple):
    query: int
    query_stride: int  #: in elements, as that of the keys
    query_heads: int
    key: int
    key_stride: int
    key_heads: int
    positions: int
    table: int
    num_tokens: int
    head_dim: int


_read = argument_reader(_Arguments)


def _build(kind: int) -> Body:
    size = 4 if kind == FLOAT32 else 2

    def rotate(arguments: int) -> None:
        given = _read(arguments)
        head_dim, half = given.head_dim, given.head_dim // 2
        while True:
            token = simd.claim(arguments)
            if token >= given.num_tokens:
                return
            cosines = given.table + simd.read_int64(given.positions + token * 8) * head_dim * 4
            for head in range(given.query_heads + given.key_heads):
                x = given.query + (token * given.query_stride + head * head_dim) * size
                if head >= given.query_heads:
                    x = given.key + (token * given.key_stride + (head - given.query_heads) * head_dim) * size
                for i in range(0, half, simd.LANES):
                    cos, sin = simd.load(cosines + i * 4, FLOAT32), simd.load(cosines + (half + i) * 4, FLOAT32)
                    first, second = simd.load(x + i * size, kind), simd.load(x + (half + i) * size, kind)
                    simd.store(x + i * size, simd.subtract(simd.times(first, cos), simd.times(second, sin)), kind)
                    simd.store(x + (half + i) * size, simd.add(simd.times(second, cos), simd.times(first, sin)), kind)

    return rotate


_ROTATE = NativeKernel(NAME, _build)


def compile_for(dtype: torch.dtype) -> None:
    _ROTATE.compile(simd.KINDS[dtype])


def _case(num_tokens: int, query_heads: int, key_heads: int, head_dim: int, dtype: torch.dtype, tolerance: float) -> Case:
    def arguments() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(num_tokens)
        merged = torch.randn((num_tokens, query_heads + 2 * key_heads, head_dim), generator=generator).to(dtype)
        query, key, _ = merged.split((query_heads, key_heads, key_heads), dim=1)
        angles = torch.rand((100, head_dim // 2), generator=generator) * 6.28
        return query, key, torch.randint(100, (num_tokens,), generator=generator), torch.cat((angles.cos(), angles.sin()), -1)

    return Case(f"{num_tokens}x{query_heads}+{key_heads}x{head_dim}-{dtype}", arguments, tolerance)


CASES = [
    _case(*shape, dtype, tolerance)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3))
    for shape in ((1, 9, 3, 64), (5, 7, 1, 32), (130, 4, 4, 128), (3, 2, 1, 16))
]
