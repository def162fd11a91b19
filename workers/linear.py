"""PackedLinear: y = x W^T + b with the weight packed once for the machine it runs on.

On a CPU the weight lies in panels of `LANES` output features, [panels, in, LANES], and is multiplied in
float32 by the kernel below. It is held in the narrowest type that represents it exactly: the values of a
bfloat16 checkpoint take two bytes under float32 too, which halves the time of a step that reads each
weight once. An element of the result is the sum of short chains of multiply-adds, the same whatever the
number of rows, so batches of any size give equal bits. Short ones, because what a chain loses grows with its length:
one over the whole depth puts the default model's logits three times as far from their exact values.

Where the CPU multiplies bfloat16 itself, oneDNN's kernels win unless determinism is asked for: they
differ by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from workers import matrix_product, simd
from workers.native import Body, NativeKernel, argument_reader, num_threads_for
from workers.pages import allocate
from workers.simd import FLOAT32

#: Products that are added one after another before a new sum begins. With half as many the rest of the model loses more.
_CHAIN = 128
#: Bytes of panels that one item of work reads: they stay in the second-level cache while all rows pass.
_ITEM_BYTES = 192 * 1024
#: Items per thread, so that a thread that lost its core delays the others little.
_ITEMS_PER_THREAD = 8


class PackedLinear:
    """weight [out, in], bias [out] or None; calls map x [T, in] to [T, out] in the weight's dtype.

    The weight given is not kept: what is held is a packed copy of `weight_bytes` bytes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, deterministic: bool) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.weight_bytes = weight.nbytes
        if weight.device.type != "cpu":
            self._multiply = _plain(weight, bias)
        elif weight.dtype == torch.bfloat16 and not deterministic and multiplies_bfloat16():
            self._multiply = _onednn(weight, bias)
        else:
            panels = pack(weight)
            self.weight_bytes = panels.nbytes
            self._multiply = _panels(panels, bias, self.out_features, weight.dtype)
            MULTIPLY.compile(simd.KINDS[panels.dtype])

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x)


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _plain(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _onednn(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _panels(panels: Tensor, bias: Tensor | None, out_features: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    wide_bias = None if bias is None else bias.float()
    return lambda x: multiply(x, panels, out_features, wide_bias).to(dtype)


def pack(weight: Tensor) -> Tensor:
    """[out, in] -> [panels, in, LANES] in the narrowest type that holds every value exactly, padded with zeros."""
    out_features, depth = weight.shape
    exact = (d for d in (torch.bfloat16, torch.float16) if torch.equal(weight.to(d).to(weight.dtype), weight))
    num_panels = -(-out_features // simd.LANES)
    padded = torch.zeros((num_panels * simd.LANES, depth), dtype=next(exact, torch.float32))
    padded[:out_features] = weight
    panels = allocate(padded.nbytes).view(padded.dtype).view(num_panels, depth, simd.LANES)
    return panels.copy_(padded.view(num_panels, simd.LANES, depth).transpose(1, 2))


def multiply(x: Tensor, panels: Tensor, out_features: int, bias: Tensor | None) -> Tensor:
    """x [T, in] times packed panels, in float32: [T, out]."""
    x = x.float().contiguous()
    num_panels, depth, lanes = panels.shape
    y = torch.empty((x.shape[0], num_panels * lanes), dtype=torch.float32)
    if bias is not None:
        y[:, :out_features] = bias
    threads = num_threads_for(panels.numel())
    width = max(1, min(_ITEM_BYTES // (depth * lanes * panels.itemsize), num_panels // (_ITEMS_PER_THREAD * threads)))
    MULTIPLY(
        (simd.KINDS[panels.dtype],), threads,
        *_Arguments(
            x=x.data_ptr(), weight=panels.data_ptr(), y=y.data_ptr(), y_row=num_panels * lanes * 4,
            rows=x.shape[0], depth=depth, panels=num_panels, width=width, accumulate=bias is not None,
        ),
    )  # fmt: skip
    return y if y.shape[1] == out_features else y[:, :out_features].contiguous()


class _Arguments(NamedTuple):
    x: int
    weight: int
    y: int
    y_row: int  #: bytes from one to the next
    rows: int
    depth: int
    panels: int
    width: int  #: panels of an item of work
    accumulate: int  #: whether to add to what y holds


_read = argument_reader(_Arguments)


def _build(kind: int) -> Body:
    element_bytes = 4 if kind == FLOAT32 else 2

    def multiply_panels(arguments: int) -> None:
        """x [rows, depth], weight [panels, depth, LANES], y [rows, panels * LANES]; an item is `width` panels."""
        given = _read(arguments)
        depth, width = given.depth, given.width
        panel_bytes = depth * simd.LANES * element_bytes
        tiles = (given.rows + matrix_product.TILE_ROWS - 1) // matrix_product.TILE_ROWS
        while True:
            first = simd.claim(arguments) * width
            if first >= given.panels:
                return
            for tile in range(tiles):
                row, end = given.rows * tile // tiles, given.rows * (tile + 1) // tiles
                matrix_product.multiply(
                    kind, _CHAIN, end - row, min(width, given.panels - first), depth,
                    given.x + row * depth * 4, depth * 4,
                    given.weight + first * panel_bytes, panel_bytes, simd.LANES * element_bytes,
                    given.y + row * given.y_row + first * simd.VECTOR_BYTES, given.y_row, given.accumulate,
                )  # fmt: skip

    return multiply_panels


MULTIPLY = NativeKernel("linear", _build)
