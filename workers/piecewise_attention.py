"""Attention over the paged pool in plain torch and in bounded memory: what runs where there is no compiled kernel.

It computes what `workers.kernels.paged_attention` says, with no more scratch than `scratch_bytes`, however long contexts and
chunks are. Queries are taken in pieces, of consecutive sequences that have equally many rows: the decodes of a step are a few
batches, a chunk is one of its own. Each walks its context in pieces of positions, which begin at multiples of their size
whoever else is in the batch, and keeps a running softmax in float32:

    top' = max(top, scores)    sum' = sum * e^(top - top') + e^(scores - top')    mixed likewise, with the values

Nothing asks a device for a number: where sequences begin and end is known on the host. On CUDA it is some twenty launches a
piece, which a fused kernel would make one. It promises no equal bits, for libraries multiply as the size of a batch suggests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workers.kv_cache import LayerCache

#: Where a running maximum begins: below every score, and yet a number.
_LOWEST = torch.finfo(torch.float32).min


class Pieces(NamedTuple):
    """How much is computed at once."""

    rows: int = 512  #: query tokens
    sequences: int = 16
    positions: int = 1024  #: of the context of each of these sequences

    def whole_blocks(self, block_size: int) -> int:
        """Positions of a piece that is made of blocks."""
        return max(1, self.positions // block_size) * block_size


@dataclass(frozen=True)
class _Batch:
    """Consecutive sequences of equally many rows."""

    first: int  #: sequence
    contexts: Sequence[int]
    row: int  #: the first of the first sequence
    num_rows: int  #: of each sequence


@dataclass(frozen=True)
class _Sight:
    """What the n rows of each of B sequences see: positions from `begin` to before `end`, [B, n] int64. Both rise from row to row."""

    begin: Tensor
    end: Tensor
    first: int  #: position that any row sees
    last: int  #: the end of what any row sees

    def hidden(self, positions: Tensor) -> Tensor:
        """[B, n, K] bool: what a row does not see of `positions` [K]."""
        hidden = positions < self.begin[..., None]
        hidden |= positions >= self.end[..., None]
        return hidden

    def unread(self, positions: Tensor) -> Tensor:
        """[B, K] bool: what no row of a sequence sees, where the pool may hold anything."""
        return (positions < self.begin[:, :1]) | (positions >= self.end[:, -1:])


def scratch_bytes(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, itemsize: int, pieces: Pieces | None = None) -> int:
    """What `attend` holds at most at any moment, besides its result."""
    pieces = pieces or Pieces()
    positions = pieces.whole_blocks(block_size)
    # Keys or values in the order of their blocks and in float32; who may read them, and the ids of blocks.
    gathered = pieces.sequences * positions * (num_kv_heads * head_dim * (itemsize + 4) + 24)
    # Scores, and which of them count.
    scored = pieces.rows * positions * (num_heads * 4 + 4)
    # Queries, the running mixture and what is added to it; maxima and sums, old and new.
    running = pieces.rows * num_heads * (head_dim * 16 + 32)
    return gathered + scored + running


def attend(
    query: Tensor,
    cache: LayerCache,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int = 0,
    *,
    pieces: Pieces | None = None,
) -> Tensor:
    """As `paged_attention.reference`. `query_start` and `context_lens` should lie on the host, all else where the pool is."""
    pieces = pieces or Pieces()
    out = torch.empty_like(query)
    for batch in _batches(query_start.tolist(), context_lens.tolist(), pieces):
        count, num_rows = len(batch.contexts), batch.num_rows
        tables = block_tables[batch.first : batch.first + count]
        rows = slice(batch.row, batch.row + count * num_rows)
        queries, results = (x[rows].view(count, num_rows, *query.shape[1:]) for x in (query, out))
        for row in range(0, num_rows, pieces.rows):
            stop = min(row + pieces.rows, num_rows)
            sight = _sight([context - num_rows + stop for context in batch.contexts], stop - row, window, query.device)
            results[:, row:stop] = _attend_piece(queries[:, row:stop], cache, tables, sight, scale, pieces.whole_blocks(cache.key.shape[2]))
    return out


def _batches(query_start: Sequence[int], contexts: Sequence[int], pieces: Pieces) -> Iterator[_Batch]:
    first = 0
    while first < len(contexts):
        num_rows = query_start[first + 1] - query_start[first]
        most = max(1, min(pieces.sequences, pieces.rows // max(1, num_rows), len(contexts) - first))
        count = 1
        while count < most and query_start[first + count + 1] - query_start[first + count] == num_rows:
            count += 1
        yield _Batch(first, contexts[first : first + count], query_start[first], num_rows)
        first += count


def _sight(ends: Sequence[int], num_rows: int, window: int, device: torch.device) -> _Sight:
    """Of rows of which the last ones of each sequence see up to `ends`."""
    end = torch.tensor(ends).to(device, non_blocking=True)[:, None] + torch.arange(1 - num_rows, 1, device=device)
    begin = (end - window).clamp_min_(0) if window else torch.zeros_like(end)
    return _Sight(begin, end, max(0, min(ends) - num_rows + 1 - window) if window else 0, max(ends))


def _attend_piece(query: Tensor, cache: LayerCache, tables: Tensor, sight: _Sight, scale: float, step: int) -> Tensor:
    """Queries [B, n, Hq, D] to results in float32, `step` positions of the context at a time."""
    count, num_rows, _, head_dim = query.shape
    kv_heads = cache.key.shape[1]
    # The rows of the heads that share keys lie behind one another: [B, Hkv, G * n, D].
    queries = query.view(count, num_rows, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).reshape(count, kv_heads, -1, head_dim).float() * scale
    running = _Running(queries)
    for begin in range(sight.first // step * step, sight.last, step):
        running.add(queries, cache, tables, sight, range(begin, min(begin + step, sight.last)))
    return running.mean().view(count, kv_heads, -1, num_rows, head_dim).permute(0, 3, 1, 2, 4).reshape(query.shape)


class _Running:
    """The softmax of each row over the positions so far, and the mixture of their values."""

    def __init__(self, queries: Tensor) -> None:
        self._mixed = torch.zeros_like(queries)
        self._top = queries.new_full((*queries.shape[:-1], 1), _LOWEST)
        self._total = torch.zeros_like(self._top)

    def add(self, queries: Tensor, cache: LayerCache, tables: Tensor, sight: _Sight, span: range) -> None:
        """Goes on over a span of positions that begins with a block. What it allocates on the way is free again when it returns."""
        block_size = cache.key.shape[2]
        block_ids = tables[:, span.start // block_size : -(-span.stop // block_size)]
        positions = torch.arange(span.start, span.start + block_ids.shape[1] * block_size, device=tables.device)
        unread = sight.unread(positions)
        block_ids = block_ids.masked_fill(unread.view(*block_ids.shape, block_size).all(-1), 0)
        scores = queries @ _gather(cache.key, block_ids).transpose(2, 3)  # [B, Hkv, G * n, K]
        hidden = sight.hidden(positions)[:, None, None]  # [B, 1, 1, n, K]
        scores.view(*scores.shape[:2], -1, *hidden.shape[3:]).masked_fill_(hidden, float("-inf"))
        top = torch.maximum(self._top, scores.amax(-1, keepdim=True))
        weights, keep = scores.sub_(top).exp_(), self._top.sub_(top).exp_()
        # Even a weight of zero would let through what is not a number.
        values = _gather(cache.value, block_ids).masked_fill_(unread[:, None, :, None], 0.0)
        self._mixed.mul_(keep).add_(weights @ values)
        self._total.mul_(keep).add_(weights.sum(-1, keepdim=True))
        self._top = top

    def mean(self) -> Tensor:
        return self._mixed.div_(self._total)


def _gather(part: Tensor, block_ids: Tensor) -> Tensor:
    """Keys or values of blocks [B, N], in the order of their positions: [B, Hkv, N * block_size, D] in float32, and no part of the pool."""
    blocks = part[block_ids].transpose(1, 2)
    return blocks.reshape(len(block_ids), part.shape[1], -1, part.shape[3]).float()
