"""paged_attention: causal attention that reads the pool in place, for prefill, chunks and decode alike.

    query [T, Hq, D], cache (see LayerCache), query_start [S + 1] int32, context_lens [S] int32,
    block_tables [S, max_blocks] int32, scale, window -> [T, Hq, D]

Sequence s owns the query rows query_start[s] to query_start[s + 1]; they are the last of its
context_lens[s] tokens, whose keys and values are stored as far as a row looks back. A row at position p
computes, for each head h and its key-value head g = h // (Hq / Hkv),

    out[h] = sum over j = first ... p of softmax_j(scale * query[h] . key[g, j]) * value[g, j]

with first = 0, or max(0, p - window + 1) if there is a window (one of 0 positions is none). Nothing before the
windows of its rows is read, neither of the pool nor of the block table.

`workers.compiled_attention` computes it on the CPU. Where it does not run, on CUDA above all,
`workers.piecewise_attention` does the same in plain torch, in bounded memory but in many launches. The reference
holds all scores at once: it is what both are tested against.

Ids and lengths out of range are the caller's to refuse.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers import compiled_attention, piecewise_attention
from workers.kernels import Case
from workers.kv_cache import KvCache, LayerCache, full_attention_spec
from workers.native import log_reference_once

NAME = "paged_attention"


def reference(query: Tensor, cache: LayerCache, query_start: Tensor, context_lens: Tensor, block_tables: Tensor, scale: float, window: int = 0) -> Tensor:
    out = torch.empty_like(query)
    num_heads, head_dim = query.shape[1:]
    kv_heads, block_size = cache.key.shape[1:3]
    for i, context in enumerate(context_lens.tolist()):
        first, last = int(query_start[i]), int(query_start[i + 1])
        # The oldest position that the first row sees, and the first of its block.
        oldest = max(0, context - (last - first) - window + 1) if window else 0
        begin = oldest - oldest % block_size
        table = block_tables[i, begin // block_size : -(-context // block_size)].long()
        blocks = (part[table].transpose(0, 1).reshape(kv_heads, -1, head_dim) for part in (cache.key, cache.value))
        key, value = (part[:, oldest - begin : context - begin].float().repeat_interleave(num_heads // kv_heads, 0) for part in blocks)
        scores = (query[first:last].float().transpose(0, 1) @ key.transpose(1, 2)) * scale
        columns = torch.arange(oldest, context, device=query.device)
        positions = torch.arange(context - (last - first), context, device=query.device)[:, None]
        visible = (columns <= positions) & (columns > positions - (window or context))
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[first:last] = (weights @ value).transpose(0, 1).to(out.dtype)
    return out


def paged_attention(query: Tensor, cache: LayerCache, query_start: Tensor, context_lens: Tensor, block_tables: Tensor, scale: float, window: int = 0) -> Tensor:
    if compiled_attention.covers(query.device.type, *cache.key.shape[2:]):
        return compiled_attention.attend(query, cache, query_start, context_lens, block_tables, scale, window)
    log_reference_once(NAME, query.device.type)
    return piecewise_attention.attend(query, cache, query_start, context_lens, block_tables, scale, window)


def scratch_bytes(device: str, num_heads: int, cache: tuple[int, int, int], dtype: torch.dtype) -> int:
    """A device's memory to leave free for one call, whatever the step; `cache` is (KV heads, block size, head size). A CPU's is not so scarce."""
    kv_heads, block_size, head_dim = cache
    if device == "cpu":
        return 0
    return piecewise_attention.scratch_bytes(num_heads, kv_heads, head_dim, block_size, dtype.itemsize)


def compile_for(dtype: torch.dtype) -> None:
    compiled_attention.compile_for(dtype)


def _case(
    name: str, lengths: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, block_size: int, window: int, *, dtype: torch.dtype, tolerance: float
) -> Case:
    """`lengths` are (query rows, context) per sequence; what nobody may read are NaN in the pool and absurd ids in tables; block ids are shuffled."""

    def arguments() -> tuple[Tensor | LayerCache | float, ...]:
        generator = torch.Generator().manual_seed(len(lengths))
        widths = [-(-context // block_size) for _, context in lengths]
        cache = KvCache(full_attention_spec(2, heads[1], head_dim, block_size, dtype), num_blocks=sum(widths) + 3)
        pool = cache.layer(1)
        ids = torch.randperm(sum(widths) + 3, generator=generator).int()
        tables = torch.full((len(lengths), max(widths) + 1), 10**6, dtype=torch.int32)
        pool.key.fill_(math.nan)
        pool.value.fill_(math.nan)
        for i, (rows, context) in enumerate(lengths):
            oldest = max(0, context - rows - window + 1) if window else 0
            first = oldest // block_size
            tables[i, first : widths[i]] = ids[sum(widths[:i]) + first : sum(widths[: i + 1])]
            for j in range(oldest, context):
                for part in (pool.key, pool.value):
                    part[tables[i, j // block_size], :, j % block_size] = torch.randn((heads[1], head_dim), generator=generator).to(dtype)
        starts = torch.tensor([0, *(rows for rows, _ in lengths)]).cumsum(0).int()
        query = torch.randn((int(starts[-1]), heads[0], head_dim), generator=generator).to(dtype)
        return query, pool, starts, torch.tensor([c for _, c in lengths], dtype=torch.int32), tables, head_dim**-0.5, window

    seen = f"-window{window}" if window else ""
    return Case(f"{name}-{heads[0]}/{heads[1]}x{head_dim}-blocks{block_size}{seen}-{dtype}", arguments, tolerance)


CASES = [
    _case(*shape, dtype=dtype, tolerance=tolerance)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3))
    for shape in (
        ("decode", [(1, 1), (1, 15), (1, 16), (1, 17), (1, 300)], (9, 3), 64, 16, 0),
        ("decode-alone", [(1, 600)], (9, 3), 64, 16, 0),
        ("prefill", [(40, 40)], (9, 3), 64, 16, 0),
        ("chunk", [(37, 300)], (7, 1), 32, 32, 0),
        ("mixed", [(1, 5), (20, 270), (3, 3), (1, 70)], (4, 4), 128, 16, 0),
        ("wide-group", [(5, 33)], (64, 1), 16, 16, 0),
        ("small-blocks", [(3, 10), (1, 9)], (2, 1), 64, 4, 0),
        ("decode", [(1, 5), (1, 40), (1, 41), (1, 257), (1, 296), (1, 700)], (9, 3), 64, 16, 40),
        ("decode-alone", [(1, 900)], (4, 1), 256, 16, 512),
        ("prefill", [(300, 300)], (4, 1), 32, 16, 40),
        ("chunk", [(90, 700)], (7, 1), 32, 32, 250),
        ("mixed", [(1, 5), (20, 270), (3, 3), (1, 70), (60, 600)], (4, 4), 128, 16, 17),
        ("itself-alone", [(5, 33), (1, 257)], (64, 1), 16, 16, 1),
        ("small-blocks", [(3, 10), (1, 9)], (2, 1), 64, 4, 3),
    )
]
