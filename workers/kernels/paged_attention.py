"""paged_attention: causal attention that reads the pool in place, for prefill, chunks and decode alike.

    query [T, Hq, D], cache (see LayerCache), query_start [S + 1] int32, context_lens [S] int32,
    block_tables [S, max_blocks] int32, scale, window -> [T, Hq, D]

Sequence s owns the query rows query_start[s] to query_start[s + 1]; they are the last of its
context_lens[s] tokens, whose keys and values are stored as far as a row looks back. A row at position p
computes, for each head h and its key-value head g = h // (Hq / Hkv),

    out[h] = sum over j = first ... p of softmax_j(scale * query[h] . key[g, j]) * value[g, j]

with first = 0, or max(0, p - window + 1) if there is a window (one of 0 positions is none). Nothing before the
windows of its rows is read, neither of the pool nor of the block table.

The compiled kernel takes the context in pieces of `_PIECE` positions that start at multiples of it: a
softmax within each piece, and the pieces merged in order, from the first that the row sees. All of it is
float32, and none of it depends on which rows are computed together or by whom, so chunking and batching change
no bit. If there are too few rows to occupy all threads, the pieces of one row are computed side by side and
merged by a second call. Where it does not run, on CUDA above all, `workers.piecewise_attention` does the same in
plain torch, in bounded memory but in many launches. The reference holds all scores at once: it is what both are
tested against.

Ids and lengths out of range are the caller's to refuse.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from workers import matrix_product, piecewise_attention, simd
from workers.kernels import Case
from workers.kv_cache import KvCache, LayerCache, full_attention_spec
from workers.native import Body, NativeKernel, argument_places, float32_bits, helper, log_reference_once
from workers.simd import FLOAT32

NAME = "paged_attention"
#: Positions of the context that share one softmax: a multiple of every block size.
_PIECE = 256
#: Rows (query tokens times heads per key-value head) of one item of work, unless one token has more.
_ITEM_ROWS = 96
#: With fewer items than this for each thread, pieces become items of their own.
_ITEMS_PER_THREAD = 4
#: What one call computes.
_WHOLE, _PIECES, _MERGE = 0, 1, 2
#: A window that no context outgrows.
_UNLIMITED = 2**31


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
        visible = (columns <= positions) & (columns > positions - (window or _UNLIMITED))
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[first:last] = (weights @ value).transpose(0, 1).to(out.dtype)
    return out


def paged_attention(query: Tensor, cache: LayerCache, query_start: Tensor, context_lens: Tensor, block_tables: Tensor, scale: float, window: int = 0) -> Tensor:
    if not is_compiled_for(query.device.type, *cache.key.shape[2:]):
        log_reference_once(NAME, query.device.type)
        return piecewise_attention.attend(query, cache, query_start, context_lens, block_tables, scale, window)
    query = query if query.stride()[1:] == (query.shape[2], 1) else query.contiguous()
    num_tokens, num_heads, head_dim = query.shape
    kv_heads, block_size = cache.key.shape[1:3]
    item_tokens = max(1, _ITEM_ROWS // (num_heads // kv_heads))
    item_rows = item_tokens * (num_heads // kv_heads)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype)
    threads = torch.get_num_threads()
    # Each item's row count is padded to item_rows: queries, scores, results of a piece and running results, and four statistics.
    scratch = torch.empty((threads, item_rows * (3 * head_dim + _PIECE + 4)), dtype=torch.float32)
    max_pieces = -(-block_tables.shape[1] * block_size // _PIECE)
    if window:
        # As many as the positions in sight of an item's rows can touch, wherever they begin.
        max_pieces = min(max_pieces, (window + item_tokens - 1 + _PIECE - 2) // _PIECE + 1)
    num_items = kv_heads * (context_lens.shape[0] + num_tokens // item_tokens)
    splits = max_pieces > 1 and num_items < _ITEMS_PER_THREAD * threads
    partials = torch.empty((num_items * max_pieces if splits else 0, item_rows * (head_dim + 2)), dtype=torch.float32)
    run = partial(_ATTEND, (simd.KINDS[query.dtype], simd.KINDS[cache.key.dtype]), threads)
    (keys, key_block, key_head), (values, value_block, value_head) = _place(cache.key), _place(cache.value)
    arguments = _Arguments(
        mode=_PIECES if splits else _WHOLE, query=query.data_ptr(), query_stride=query.stride(0) * query.itemsize, out=out.data_ptr(),
        group=num_heads // kv_heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        keys=keys, key_block=key_block, key_head=key_head, values=values, value_block=value_block, value_head=value_head,
        query_start=query_start.data_ptr(), num_sequences=context_lens.shape[0], context_lens=context_lens.data_ptr(),
        tables=block_tables.data_ptr(), table_stride=block_tables.stride(0) * 4,
        scale=float32_bits(scale * math.log2(math.e)), window=window or _UNLIMITED,
        item_tokens=item_tokens, scratch=scratch.data_ptr(), scratch_stride=scratch.stride(0) * 4, partials=partials.data_ptr(),
    )  # fmt: skip
    run(*arguments)
    if splits:
        run(*arguments._replace(mode=_MERGE))
    return out


def is_compiled_for(device: str, block_size: int, head_dim: int) -> bool:
    """Whether the compiled kernel covers this geometry; otherwise plain torch does, which promises no equal bits."""
    return device == "cpu" and block_size % simd.LANES == 0 and head_dim % simd.LANES == 0


def scratch_bytes(device: str, num_heads: int, cache: tuple[int, int, int], dtype: torch.dtype) -> int:
    """A device's memory to leave free for one call, whatever the step; `cache` is (KV heads, block size, head size). A CPU's is not so scarce."""
    kv_heads, block_size, head_dim = cache
    if device == "cpu":
        return 0
    return piecewise_attention.scratch_bytes(num_heads, kv_heads, head_dim, block_size, dtype.itemsize)


class _Arguments(NamedTuple):
    """What the compiled kernel is called with: addresses, numbers, and strides in bytes."""

    mode: int  #: what to compute
    query: int
    query_stride: int  #: from a token to the next
    out: int
    group: int  #: query heads of a KV head
    kv_heads: int
    head_dim: int
    block_size: int
    keys: int
    key_block: int
    key_head: int
    values: int
    value_block: int
    value_head: int
    query_start: int
    num_sequences: int
    context_lens: int
    tables: int
    table_stride: int
    scale: int  #: the bits of a float32, for powers of two
    window: int
    item_tokens: int
    scratch: int
    scratch_stride: int  #: from a thread to the next
    partials: int  #: results of pieces, if these are items


_AT = argument_places(_Arguments)


def _place(part: Tensor) -> tuple[int, int, int]:
    """Address, block stride and head stride in bytes."""
    return part.data_ptr(), part.stride(0) * part.itemsize, part.stride(1) * part.itemsize


@helper
def _softmax(scores: int, hidden: int, visible: int, begin: int, computed: int, maximum_at: int, sum_at: int) -> None:
    """Turns a row's scores from `begin` to `computed` into powers of two relative to their maximum; only those from `hidden` to `visible` count.

    `begin` is a multiple of LANES.
    """
    top = simd.splat(-math.inf)
    for i in range(begin, visible, simd.LANES):
        score = simd.keep_first(simd.load(scores + i * 4, FLOAT32), visible - i, -math.inf)
        if i < hidden:
            score = simd.drop_first(score, hidden - i, -math.inf)
        top = simd.maximum(score, top)
    largest = simd.max_lanes(top)
    base, total = simd.splat(largest), simd.splat(0.0)
    for i in range(begin, computed, simd.LANES):
        power = simd.exp2(simd.subtract(simd.load(scores + i * 4, FLOAT32), base))
        power = simd.keep_first(power, visible - i, 0.0)
        if i < hidden:
            power = simd.drop_first(power, hidden - i, 0.0)
        total = simd.add(total, power)
        simd.store(scores + i * 4, power, FLOAT32)
    simd.write_float32(maximum_at, largest)
    simd.write_float32(sum_at, simd.sum_lanes(total))


@helper
def _merge(first: bool, head_dim: int, part: int, part_max: int, part_sum: int, whole: int, whole_max: int, whole_sum: int) -> None:
    """Adds a piece's result to the running one of its row; the first piece that the row sees starts it."""
    old, new = simd.read_float32(whole_max), simd.read_float32(part_max)
    largest = new if first else max(old, new)
    keep = simd.splat(0.0) if first else simd.exp2(simd.splat(old - largest))
    take = simd.exp2(simd.splat(new - largest))
    for i in range(0, head_dim * 4, simd.VECTOR_BYTES):
        scaled = simd.times(simd.load(part + i, FLOAT32), take)
        if not first:
            scaled = simd.fma(simd.load(whole + i, FLOAT32), keep, scaled)
        simd.store(whole + i, scaled, FLOAT32)
    kept = 0.0 if first else simd.read_float32(whole_sum) * simd.max_lanes(keep)
    simd.write_float32(whole_sum, kept + simd.read_float32(part_sum) * simd.max_lanes(take))
    simd.write_float32(whole_max, largest)


def _build(query_kind: int, cache_kind: int) -> Body:  # noqa: C901, PLR0915 - a kernel is one function
    query_bytes = 4 if query_kind == FLOAT32 else 2
    cache_bytes = 4 if cache_kind == FLOAT32 else 2

    def attend(arguments: int) -> None:  # noqa: C901, PLR0912, PLR0915
        mode, window = simd.read_int64(arguments + _AT.mode), simd.read_int64(arguments + _AT.window)
        query, query_stride = simd.read_int64(arguments + _AT.query), simd.read_int64(arguments + _AT.query_stride)
        out, block_size = simd.read_int64(arguments + _AT.out), simd.read_int64(arguments + _AT.block_size)
        group, kv_heads, head_dim = simd.read_int64(arguments + _AT.group), simd.read_int64(arguments + _AT.kv_heads), simd.read_int64(arguments + _AT.head_dim)
        keys, key_block, key_head = simd.read_int64(arguments + _AT.keys), simd.read_int64(arguments + _AT.key_block), simd.read_int64(arguments + _AT.key_head)
        values, value_block = simd.read_int64(arguments + _AT.values), simd.read_int64(arguments + _AT.value_block)
        value_head, query_start = simd.read_int64(arguments + _AT.value_head), simd.read_int64(arguments + _AT.query_start)
        num_sequences, context_lens = simd.read_int64(arguments + _AT.num_sequences), simd.read_int64(arguments + _AT.context_lens)
        tables, table_stride = simd.read_int64(arguments + _AT.tables), simd.read_int64(arguments + _AT.table_stride)
        scale = simd.float32_from_bits(simd.read_int64(arguments + _AT.scale))
        item_tokens, partials = simd.read_int64(arguments + _AT.item_tokens), simd.read_int64(arguments + _AT.partials)
        scratch, scratch_stride = simd.read_int64(arguments + _AT.scratch), simd.read_int64(arguments + _AT.scratch_stride)

        item_rows, row_bytes = item_tokens * group, head_dim * 4
        queries = scratch + simd.claim(arguments + 8) * scratch_stride
        scores = queries + item_rows * row_bytes
        part = scores + item_rows * _PIECE * 4
        part_max = part + item_rows * row_bytes
        part_sum = part_max + item_rows * 4
        whole = part_sum + item_rows * 4
        whole_max = whole + item_rows * row_bytes
        whole_sum = whole_max + item_rows * 4
        partial_bytes = item_rows * (row_bytes + 8)

        mine, item, piece_item = simd.claim(arguments), -1, 0
        for sequence in range(num_sequences):
            first, last = simd.read_int32(query_start + sequence * 4), simd.read_int32(query_start + sequence * 4 + 4)
            context, table = simd.read_int32(context_lens + sequence * 4), tables + sequence * table_stride
            for token in range(first, last, item_tokens):
                rows = min(item_tokens, last - token) * group
                # Where the first row's sight ends; that of each further token begins and ends one position later.
                seen = context - last + token + 1
                first_piece = max(0, seen - window) // _PIECE
                pieces = (seen + rows // group - 1 + _PIECE - 1) // _PIECE - first_piece
                for head in range(kv_heads):
                    for turn in range(pieces if mode == _PIECES else 1):
                        item += 1
                        if item != mine:
                            continue
                        mine = simd.claim(arguments)
                        head_query = query + token * query_stride + head * group * head_dim * query_bytes
                        if mode != _MERGE:
                            for row in range(rows):
                                source = head_query + row // group * query_stride + row % group * head_dim * query_bytes
                                for i in range(0, head_dim, simd.LANES):
                                    wide = simd.times(simd.load(source + i * query_bytes, query_kind), simd.splat(scale))
                                    simd.store(queries + row * row_bytes + i * 4, wide, FLOAT32)
                        for piece in range(turn, turn + 1 if mode == _PIECES else pieces):
                            start = (first_piece + piece) * _PIECE
                            if mode != _WHOLE:
                                part = partials + (piece_item + piece) * partial_bytes
                                part_max = part + item_rows * row_bytes
                                part_sum = part_max + item_rows * 4
                            for row in range(0, rows if mode != _MERGE else 0, matrix_product.TILE_ROWS):
                                height = min(matrix_product.TILE_ROWS, rows - row)
                                # Positions of this piece that the last row of the tile sees.
                                length = max(0, min(_PIECE, seen + (row + height - 1) // group - start))
                                # Positions that the first row of the tile, and so all of it, has behind its window, and the block in which they end.
                                skipped = max(0, min(length, seen + row // group - window - start))
                                begin = skipped // block_size * block_size
                                for position in range(begin, length, max(block_size, 2 * simd.LANES)):
                                    block = simd.read_int32(table + (start + position) // block_size * 4)
                                    panels, next_panel = block_size // simd.LANES, simd.LANES * cache_bytes
                                    # Two small blocks as one product, to keep more chains of additions in flight.
                                    if panels == 1 and position + block_size < length:
                                        second = simd.read_int32(table + ((start + position) // block_size + 1) * 4)
                                        panels, next_panel = 2, (second - block) * key_block
                                    matrix_product.multiply(
                                        cache_kind, height, panels, head_dim,
                                        queries + row * row_bytes, row_bytes,
                                        keys + block * key_block + head * key_head, next_panel, block_size * cache_bytes,
                                        scores + (row * _PIECE + position) * 4, _PIECE * 4, 0,
                                    )  # fmt: skip
                                for i in range(row, row + height):
                                    visible = max(0, min(_PIECE, seen + i // group - start))
                                    hidden = max(0, min(_PIECE, seen + i // group - window - start))
                                    _softmax(scores + i * _PIECE * 4, hidden, visible, begin, length, part_max + i * 4, part_sum + i * 4)
                                for position in range(begin, length, block_size):
                                    block = simd.read_int32(table + (start + position) // block_size * 4)
                                    # What lies behind the window in the first block may have been overwritten, and not with numbers.
                                    from_row = max(0, skipped - position)
                                    matrix_product.multiply(
                                        cache_kind, height, head_dim // simd.LANES, min(block_size, length - position) - from_row,
                                        scores + (row * _PIECE + position + from_row) * 4, _PIECE * 4,
                                        values + block * value_block + head * value_head + from_row * head_dim * cache_bytes,
                                        simd.LANES * cache_bytes, head_dim * cache_bytes,
                                        part + row * row_bytes, row_bytes, position - begin,
                                    )  # fmt: skip
                                if length == 0:
                                    for i in range(0, height * row_bytes, simd.VECTOR_BYTES):
                                        simd.store(part + row * row_bytes + i, simd.splat(0.0), FLOAT32)
                            for row in range(rows if mode != _PIECES else 0):
                                oldest = max(0, seen + row // group - window)
                                if oldest < start + _PIECE:
                                    _merge(
                                        start <= oldest, head_dim,
                                        part + row * row_bytes, part_max + row * 4, part_sum + row * 4,
                                        whole + row * row_bytes, whole_max + row * 4, whole_sum + row * 4,
                                    )  # fmt: skip
                        for row in range(rows if mode != _PIECES else 0):
                            target = out + ((token + row // group) * kv_heads * group + head * group + row % group) * head_dim * query_bytes
                            total = simd.splat(simd.read_float32(whole_sum + row * 4))
                            for i in range(0, head_dim, simd.LANES):
                                mean = simd.divide(simd.load(whole + row * row_bytes + i * 4, FLOAT32), total)
                                simd.store(target + i * query_bytes, mean, query_kind)
                    piece_item += pieces

    return attend


_ATTEND = NativeKernel(NAME, _build)


def compile_for(dtype: torch.dtype) -> None:
    _ATTEND.compile(simd.KINDS[dtype], simd.KINDS[dtype])


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
