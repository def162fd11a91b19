"""The KV pool of one worker: bytes in blocks, and the strided views kernels read in place.

A block is `block_bytes` opaque bytes that hold a run of tokens for all layers, so that one block moves
between tiers with one copy. `KvSpec` says what lies where inside a block; only kernels and `KvCache`
interpret it. Seen by a layer, keys and values always have the shape [num_blocks, kv_heads, block_size,
head_dim]; the strides say how they lie in memory (on the CPU a key block is stored transposed, so that
sixteen positions of one dimension are neighbours and fill vector registers).

Which block belongs to whom is not known here; ids come from the scheduler and are checked by the caller.
"""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from workers.pages import ALIGNMENT_BYTES, allocate


class View(msgspec.Struct, frozen=True):
    """One tensor inside a block."""

    offset: int  #: bytes from the start of the block, a multiple of ALIGNMENT_BYTES
    shape: tuple[int, ...]
    strides: tuple[int, ...]  #: in elements
    dtype: torch.dtype


class LayerViews(msgspec.Struct, frozen=True):
    """Where one layer's keys and values lie; layers that share KV have equal views."""

    key: View
    value: View


class Group(msgspec.Struct, frozen=True):
    """Layers that share a block table."""

    layers: tuple[int, ...]
    kind: Literal["full", "window", "state"]
    tokens_per_block: int
    window: int = 0  #: tokens a layer looks back; 0 unless kind is "window"


class KvSpec(msgspec.Struct, frozen=True):
    """The content of a block. `layers[i]` belongs to decoder layer i."""

    groups: tuple[Group, ...]
    layers: tuple[LayerViews, ...]
    block_bytes: int


class LayerCache(NamedTuple):
    """One layer's part of the pool: strided views of shape [num_blocks, kv_heads, block_size, head_dim]."""

    key: Tensor
    value: Tensor


def full_attention_spec(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: str = "cpu") -> KvSpec:
    """The spec of a model whose layers all attend to the whole context."""
    shape = (num_kv_heads, block_size, head_dim)
    plain = (block_size * head_dim, head_dim, 1)
    transposed = (block_size * head_dim, 1, block_size)
    view_bytes = _aligned(prod(shape) * dtype.itemsize)
    layers = tuple(
        LayerViews(
            key=View(2 * layer * view_bytes, shape, transposed if device == "cpu" else plain, dtype),
            value=View((2 * layer + 1) * view_bytes, shape, plain, dtype),
        )
        for layer in range(num_layers)
    )
    group = Group(layers=tuple(range(num_layers)), kind="full", tokens_per_block=block_size)
    return KvSpec(groups=(group,), layers=layers, block_bytes=2 * num_layers * view_bytes)


class KvCache:
    """Owns the pool: `num_blocks` blocks of `spec.block_bytes`, contiguous. The memory is not initialised."""

    def __init__(self, spec: KvSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        #: [num_blocks, block_bytes] uint8: what transfers copy.
        size_bytes = num_blocks * spec.block_bytes
        memory = allocate(size_bytes) if torch.device(device).type == "cpu" else torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.blocks = memory.view(num_blocks, spec.block_bytes)
        self._layers = tuple(LayerCache(self._view(views.key), self._view(views.value)) for views in spec.layers)

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    def _view(self, view: View) -> Tensor:
        pool, size = self.blocks.view(-1).view(view.dtype), view.dtype.itemsize
        strides = (self.spec.block_bytes // size, *view.strides)
        return pool.as_strided((self.num_blocks, *view.shape), strides, pool.storage_offset() + view.offset // size)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
