"""store_kv: write this step's keys and values into the pool.

    key, value [T, Hkv, D] (heads and dimensions contiguous, any token stride), slot_mapping [T] int64,
    slot = block id * block_size + offset:  cache.key[block, h, offset] = key[t, h], likewise value

Slots out of range are the caller's to refuse.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workers import simd
from workers.kernels import Case
from workers.kv_cache import KvCache, LayerCache, full_attention_spec
from workers.native import Body, NativeKernel, argument_reader, inlined, log_reference_once, num_threads_for
from workers.simd import FLOAT32

NAME = "store_kv"


def reference(key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    block_size = cache.key.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    cache.key[blocks, :, offsets] = key
    cache.value[blocks, :, offsets] = value


def store_kv(key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    head_dim = key.shape[2]
    if key.device.type != "cpu" or any(x.stride()[1:] != (head_dim, 1) for x in (key, value)):
        log_reference_once(NAME, key.device.type)
        return reference(key, value, cache, slot_mapping)
    _STORE(
        (simd.KINDS[key.dtype],), num_threads_for(key.numel()),
        *_Arguments(
            key.data_ptr(), key.stride(0), *_place(cache.key), value.data_ptr(), value.stride(0), *_place(cache.value),
            num_tokens=key.shape[0], heads=key.shape[1], head_dim=head_dim, slots=slot_mapping.data_ptr(), block_size=cache.key.shape[2],
        ),
    )  # fmt: skip


def _place(part: Tensor) -> tuple[int, int, int, int, int]:
    """Address and strides."""
    by_block, by_head, by_offset, by_dimension = part.stride()
    return part.data_ptr(), by_block, by_head, by_offset, by_dimension


class _Arguments(NamedTuple):
    """Strides are in elements."""

    key: int
    key_stride: int
    cached_key: int
    key_by_block: int
    key_by_head: int
    key_by_offset: int
    key_by_dimension: int
    value: int
    value_stride: int
    cached_value: int
    value_by_block: int
    value_by_head: int
    value_by_offset: int
    value_by_dimension: int
    num_tokens: int
    heads: int
    head_dim: int
    slots: int
    block_size: int


_read = argument_reader(_Arguments)


@inlined
def _store_heads(source: int, target: int, by_head: int, by_dimension: int, heads: int, head_dim: int, kind: int) -> None:
    """Copies the heads of a token, which lie behind one another, to where the cache has them. Strides are in bytes."""
    size = 4 if kind == FLOAT32 else 2
    for head in range(heads):
        for i in range(head_dim):
            simd.copy_element(source + (head * head_dim + i) * size, target + head * by_head + i * by_dimension, kind)


def _build(kind: int) -> Body:
    size = 4 if kind == FLOAT32 else 2

    def store(arguments: int) -> None:
        given = _read(arguments)
        while True:
            token = simd.claim(arguments)
            if token >= given.num_tokens:
                return
            slot = simd.read_int64(given.slots + token * 8)
            block, offset = slot // given.block_size, slot % given.block_size
            _store_heads(
                given.key + token * given.key_stride * size,
                given.cached_key + (block * given.key_by_block + offset * given.key_by_offset) * size,
                given.key_by_head * size, given.key_by_dimension * size, given.heads, given.head_dim, kind,
            )  # fmt: skip
            _store_heads(
                given.value + token * given.value_stride * size,
                given.cached_value + (block * given.value_by_block + offset * given.value_by_offset) * size,
                given.value_by_head * size, given.value_by_dimension * size, given.heads, given.head_dim, kind,
            )  # fmt: skip

    return store


_STORE = NativeKernel(NAME, _build)


def compile_for(dtype: torch.dtype) -> None:
    _STORE.compile(simd.KINDS[dtype])


def _case(num_tokens: int, heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> Case:
    def arguments() -> tuple[Tensor | LayerCache, ...]:
        generator = torch.Generator().manual_seed(num_tokens)
        cache = KvCache(full_attention_spec(2, heads, head_dim, block_size, dtype), num_blocks=20)
        cache.blocks.zero_()
        merged = torch.randn((num_tokens, 2 * heads, head_dim), generator=generator).to(dtype)
        return merged[:, :heads], merged[:, heads:], cache.layer(1), torch.randperm(20 * block_size, generator=generator)[:num_tokens]

    return Case(f"{num_tokens}x{heads}x{head_dim}-blocks{block_size}-{dtype}", arguments, tolerance=0.0)


CASES = [_case(*shape, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16) for shape in ((1, 3, 64, 16), (7, 1, 16, 4), (200, 4, 128, 32))]
