"""The KV pool of one worker: bytes in blocks, and the strided views kernels read in place.

A block is `block_bytes` opaque bytes that hold a run of tokens for all layers of one group, so that one block
moves between tiers with one copy; a block may serve any group. `KvSpec` says what lies where inside a block; only
kernels and `KvCache` interpret it. Seen by a layer, keys and values always have the shape [num_blocks, kv_heads, block_size,
head_dim]; the strides say how they lie in memory (on the CPU a key block is stored transposed, so that
sixteen positions of one dimension are neighbours and fill vector registers).

Which block belongs to whom is not known here; ids come from the scheduler and are checked by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from pagemill.kv_groups import group_layers, kv_groups
from pagemill.messages.sequences import KvGroup
from workers.pages import ALIGNMENT_BYTES, allocate


class View(msgspec.Struct, frozen=True):
    """One tensor inside a block."""

    offset: int  #: bytes from the start of the block, a multiple of ALIGNMENT_BYTES
    shape: tuple[int, ...]
    strides: tuple[int, ...]  #: in elements
    dtype: torch.dtype


class LayerViews(msgspec.Struct, frozen=True):
    """Where one layer's keys and values lie: in the blocks of its group, at these places."""

    group: int
    key: View
    value: View


class KvSpec(msgspec.Struct, frozen=True):
    """The content of a block. `layers[i]` belongs to decoder layer i."""

    groups: tuple[KvGroup, ...]
    layers: tuple[LayerViews, ...]
    block_bytes: int  #: the same for all groups
    block_size: int


class LayerCache(NamedTuple):
    """One layer's part of the pool: strided views of shape [num_blocks, kv_heads, block_size, head_dim]."""

    key: Tensor
    value: Tensor
    group: int = 0  #: whose block tables say where in it a sequence lies
    window: int = 0  #: see KvGroup


def attention_spec(windows: Sequence[int], num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: str = "cpu") -> KvSpec:
    """The spec of a model with one decoder layer for each of `windows`: how far it looks back, 0 for the whole context."""
    shape = (num_kv_heads, block_size, head_dim)
    plain = (block_size * head_dim, head_dim, 1)
    transposed = (block_size * head_dim, 1, block_size)
    view_bytes = _aligned(prod(shape) * dtype.itemsize)
    groups = group_layers(windows)
    views = {
        layer: LayerViews(
            group=group,
            key=View(2 * place * view_bytes, shape, transposed if device == "cpu" else plain, dtype),
            value=View((2 * place + 1) * view_bytes, shape, plain, dtype),
        )
        for group, layers in enumerate(groups)
        for place, layer in enumerate(layers)
    }
    return KvSpec(
        groups=kv_groups(windows),
        layers=tuple(views[layer] for layer in range(len(windows))),
        block_bytes=2 * max(map(len, groups)) * view_bytes,
        block_size=block_size,
    )


def full_attention_spec(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: str = "cpu") -> KvSpec:
    """The spec of a model whose layers all attend to the whole context."""
    return attention_spec([0] * num_layers, num_kv_heads, head_dim, block_size, dtype, device)


class KvCache:
    """Owns the pool: `num_blocks` blocks of `spec.block_bytes`, contiguous. The memory is not initialised."""

    def __init__(self, spec: KvSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        #: [num_blocks, block_bytes] uint8: what transfers copy.
        size_bytes = num_blocks * spec.block_bytes
        memory = allocate(size_bytes) if torch.device(device).type == "cpu" else torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.blocks = memory.view(num_blocks, spec.block_bytes)
        self._layers = tuple(LayerCache(self._view(views.key), self._view(views.value), views.group, spec.groups[views.group].window) for views in spec.layers)

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    def _view(self, view: View) -> Tensor:
        pool, size = self.blocks.view(-1).view(view.dtype), view.dtype.itemsize
        strides = (self.spec.block_bytes // size, *view.strides)
        return pool.as_strided((self.num_blocks, *view.shape), strides, pool.storage_offset() + view.offset // size)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
