"""The promise of --deterministic, and its proof at start-up.

The promise: a sequence's tokens and log probabilities are bit-equal whatever else is in the batch,
however its prompt is chunked, cached or recomputed. It holds because every operation computes a row by
itself: packed linears and attention by kernels whose order of sums depends on nothing but the row
(`workers.linear`, `workers.kernels`), the rest row by row; sums over ranks are added up in rank order
(`workers.parallel`). Linears that choose their kernel by the number
of rows (oneDNN's bfloat16) do not promise it, so the mode decides how they are packed.

The proof runs on the weights that will serve, because a promise about numerics is worth what was tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import structlog
import torch
from torch import Tensor

from workers import linear, simd
from workers.compiled_attention import covers
from workers.kernels.paged_attention import paged_attention
from workers.kv_cache import KvCache, KvSpec, LayerCache
from workers.linear import PackedLinear
from workers.parallel import ALONE, TensorParallel

Mode = Literal["auto", "on", "off"]
#: Batch sizes tried: alone, around the tile heights of kernels, and a prefill.
_SIZES = (1, 2, 3, 5, 7, 8, 16, 31, 33, 70)
#: Tokens of the prompt that attention is tried on, and the longest window: rows at its end must have pieces of it behind them.
_PROMPT, _LONGEST_WINDOW = 600, 270
_DEPENDS = "results depend on the batch in"
log = structlog.get_logger()


class NotDeterministic(RuntimeError):
    """The mode was asked for and cannot be had; the message says what is in its way."""


def wanted(mode: Mode, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether to pack linears for it; asked before weights are loaded. "auto" takes it where it costs nothing, and only CPUs promise it."""
    if device.type != "cpu":
        return False
    free = dtype != torch.bfloat16 or not linear.multiplies_bfloat16()
    return mode == "on" or (mode == "auto" and free)


def settle(mode: Mode, linears: Iterable[tuple[str, PackedLinear]], spec: KvSpec | None = None, parallel: TensorParallel = ALONE, hidden_size: int = 0) -> bool:
    """Tries the loaded weights, attention over blocks as in `spec`, and sums of rows over ranks: True if every bit agrees, on every rank.

    If one does not: raises NotDeterministic in mode "on", else logs it and returns False. All ranks come to the same end.
    """
    if mode == "off":
        return False
    sums_agree = is_sum_row_independent(parallel, hidden_size)
    obstacle = _first_obstacle(linears, spec) if sums_agree else f"{_DEPENDS} sums over ranks"
    if not parallel.exchange(torch.tensor([not obstacle], dtype=torch.int64)).all():
        obstacle = obstacle or f"{_DEPENDS} another rank"
    if not obstacle:
        return True
    if mode == "on":
        raise NotDeterministic(f"{obstacle}; run without --deterministic")
    log.warning("deterministic_off", reason=obstacle)
    return False


def _first_obstacle(linears: Iterable[tuple[str, PackedLinear]], spec: KvSpec | None) -> str:
    """What keeps the promise from being given, "" if nothing does."""
    tried: set[tuple[int, int, torch.dtype]] = set()
    for name, packed in linears:
        shape = (packed.out_features, packed.in_features, packed.dtype)
        if shape not in tried and not is_row_independent(packed):
            return f"{_DEPENDS} {name} ({packed.out_features} x {packed.in_features})"
        tried.add(shape)
    if spec is None:
        return ""
    return _uncompiled_attention(spec) or ("" if is_attention_row_independent(spec) else f"{_DEPENDS} attention")


def _uncompiled_attention(spec: KvSpec) -> str:
    """Why attention is left to plain torch, which promises no equal bits, "" if it is not."""
    head_dim = spec.layers[0].key.shape[-1]
    if covers("cpu", spec.block_size, head_dim):
        return ""
    if head_dim % simd.LANES:
        return f"the compiled attention needs heads whose size is a multiple of {simd.LANES}, and this model's have {head_dim}"
    return f"the compiled attention needs a --block-size that is a multiple of {simd.LANES}, not {spec.block_size}"


def is_row_independent(packed: PackedLinear) -> bool:
    """Whether rows give the same bits alone, in batches of several sizes, and moved to other places."""
    rows = torch.randn((max(_SIZES), packed.in_features), generator=torch.Generator().manual_seed(1)).to(packed.dtype)
    together = packed(rows)
    order = torch.arange(len(rows)).roll(13)
    return torch.equal(packed(rows[order]), together[order]) and all(torch.equal(packed(rows[-size:]), together[-size:]) for size in _SIZES)


def is_sum_row_independent(parallel: TensorParallel, hidden_size: int) -> bool:
    """Whether sums over ranks give the same bits alone and in batches of several sizes. Every rank must ask."""
    rows = torch.randn((max(_SIZES), hidden_size), generator=torch.Generator().manual_seed(parallel.rank))
    together = parallel.reduce(rows.clone())
    sums = [parallel.reduce(rows[-size:].clone()) for size in _SIZES]  # all of them: who stopped at a difference would leave the others waiting
    return all(torch.equal(each, together[-len(each) :]) for each in sums)


def is_attention_row_independent(spec: KvSpec) -> bool:
    """Whether the last rows of a prompt give the same bits in one prefill, in chunks, and with batch mates, in every group of layers."""
    cache = KvCache(spec, num_blocks=-(-_PROMPT // spec.block_size) + 1).layer(0)
    windows = {min(group.window, _LONGEST_WINDOW) for group in spec.groups}
    return all(_is_row_independent_behind(cache, window) for window in sorted(windows))


def _is_row_independent_behind(cache: LayerCache, window: int) -> bool:
    _, kv_heads, block_size, head_dim = cache.key.shape
    if not covers("cpu", block_size, head_dim):
        return False
    generator = torch.Generator().manual_seed(1)
    for part in (cache.key, cache.value):
        part.copy_(torch.randn(part.shape, generator=generator))
    query = torch.randn((_PROMPT, 3 * kv_heads, head_dim), generator=generator).to(cache.key.dtype)
    table = torch.randperm(-(-_PROMPT // block_size), generator=generator).int()[None]

    def attend(rows: Tensor, lengths: list[tuple[int, int]]) -> Tensor:
        starts = torch.tensor([0, *(count for count, _ in lengths)]).cumsum(0).int()
        contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32)
        return paged_attention(rows, cache, starts, contexts, table.expand(len(lengths), -1).contiguous(), head_dim**-0.5, window)

    together = attend(query, [(_PROMPT, _PROMPT)])
    chunked = attend(torch.cat((query[593:], query[:301])), [(7, _PROMPT), (301, 301)])
    alone = attend(query[-1:], [(1, _PROMPT)])
    return torch.equal(chunked, torch.cat((together[593:], together[:301]))) and torch.equal(alone, together[-1:])
