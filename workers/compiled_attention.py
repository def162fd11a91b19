"""Attention over the paged pool as a compiled CPU kernel: what `workers.kernels.paged_attention` says, by all threads at once.

The context is taken in pieces of `_PIECE` positions that start at multiples of it: a softmax within each piece, and the
pieces merged in order, from the first that the row sees. All of it is float32, and none of it depends on which rows
are computed together or by whom, so chunking and batching change no bit. If there are too few rows to occupy all
threads, the pieces of one row are computed side by side and merged by a second call.

    item     some tokens of a sequence and one KV head, or one piece of it
    piece    for each tile of the item's rows: scores, softmax, mixture of values
    merge    a row's pieces, in order, into one
    write    what was merged, divided by its sum

Its keys lie transposed in blocks whose size is a multiple of `LANES`, as does the size of a head. Must not know
sequences' tokens; ids and lengths have been checked.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from workers import matrix_product, simd
from workers.kv_cache import LayerCache
from workers.matrix_product import UNBROKEN
from workers.native import Body, NativeKernel, argument_reader, float32_bits, helper, inlined
from workers.simd import FLOAT32

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


def covers(device: str, block_size: int, head_dim: int) -> bool:
    """Whether this kernel computes such attention; otherwise plain torch does, which promises no equal bits."""
    return device == "cpu" and block_size % simd.LANES == 0 and head_dim % simd.LANES == 0


def compile_for(dtype: torch.dtype) -> None:
    _ATTEND.compile(simd.KINDS[dtype], simd.KINDS[dtype])


def attend(query: Tensor, cache: LayerCache, query_start: Tensor, context_lens: Tensor, block_tables: Tensor, scale: float, window: int) -> Tensor:
    """As `paged_attention.reference`."""
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


def _place(part: Tensor) -> tuple[int, int, int]:
    """Address, block stride and head stride in bytes."""
    return part.data_ptr(), part.stride(0) * part.itemsize, part.stride(1) * part.itemsize


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


_read = argument_reader(_Arguments)


class _Result(NamedTuple):
    """Addresses of what became of an item's rows over some of the context: mixed values, and the softmax's maximum and sum, a float32 each."""

    mixed: int
    maxima: int
    sums: int


class _Room(NamedTuple):
    """A thread's scratch: addresses."""

    queries: int  #: [rows, head_dim], scaled
    scores: int  #: [rows, _PIECE]
    piece: _Result  #: of the piece at hand
    whole: _Result  #: of all pieces so far


class _Item(NamedTuple):
    """A few consecutive tokens of a sequence and one KV head. Its rows are the query heads that share this one: all of a token, then all of the next."""

    rows: int
    query: int  #: address of the first row
    out: int
    seen: int  #: where the first token's sight ends; that of each further token begins and ends one position later
    table: int  #: address of the sequence's block ids
    keys: int  #: addresses of this head's in block 0
    values: int
    first_piece: int  #: of the context, that any row sees
    pieces: int
    partials: int  #: address of the first piece's result, where pieces are items


class _Span(NamedTuple):
    """The part of a piece that a tile of rows computes, in positions from its start."""

    begin: int  #: of the first block that any of these rows sees
    skipped: int  #: where the sight of the first row begins, and so that of all
    length: int  #: where the sight of the last row ends


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


@inlined
def _result_at(given: _Arguments, address: int) -> _Result:
    maxima = address + given.item_tokens * given.group * given.head_dim * 4
    return _Result(address, maxima, maxima + given.item_tokens * given.group * 4)


@inlined
def _result_bytes(given: _Arguments) -> int:
    return given.item_tokens * given.group * (given.head_dim + 2) * 4


@inlined
def _room_of(given: _Arguments, thread: int) -> _Room:
    rows = given.item_tokens * given.group
    queries = given.scratch + thread * given.scratch_stride
    scores = queries + rows * given.head_dim * 4
    piece = scores + rows * _PIECE * 4
    return _Room(queries, scores, _result_at(given, piece), _result_at(given, piece + _result_bytes(given)))


@inlined
def _scale_queries(given: _Arguments, item: _Item, queries: int, kind: int) -> None:
    """Queries in float32, so scaled that scores are exponents of two."""
    size = 4 if kind == FLOAT32 else 2
    scale = simd.splat(simd.float32_from_bits(given.scale))
    for row in range(item.rows):
        source = item.query + row // given.group * given.query_stride + row % given.group * given.head_dim * size
        for i in range(0, given.head_dim, simd.LANES):
            wide = simd.times(simd.load(source + i * size, kind), scale)
            simd.store(queries + (row * given.head_dim + i) * 4, wide, FLOAT32)


@inlined
def _block_at(given: _Arguments, item: _Item, position: int) -> int:
    block: int = simd.read_int32(item.table + position // given.block_size * 4)
    return block


@inlined
def _span_of(given: _Arguments, item: _Item, row: int, height: int, start: int) -> _Span:
    length = max(0, min(_PIECE, item.seen + (row + height - 1) // given.group - start))
    skipped = max(0, min(length, item.seen + row // given.group - given.window - start))
    return _Span(skipped // given.block_size * given.block_size, skipped, length)


@inlined
def _score_tile(given: _Arguments, item: _Item, span: _Span, start: int, height: int, queries: int, scores: int, kind: int) -> None:
    """Products of `height` queries with the keys of a span."""
    size = 4 if kind == FLOAT32 else 2
    for position in range(span.begin, span.length, max(given.block_size, 2 * simd.LANES)):
        block = _block_at(given, item, start + position)
        panels, next_panel = given.block_size // simd.LANES, simd.LANES * size
        # Two small blocks as one product, to keep more chains of additions in flight.
        if panels == 1 and position + given.block_size < span.length:
            panels, next_panel = 2, (_block_at(given, item, start + position + given.block_size) - block) * given.key_block
        matrix_product.multiply(
            kind, UNBROKEN, height, panels, given.head_dim,
            queries, given.head_dim * 4,
            item.keys + block * given.key_block, next_panel, given.block_size * size,
            scores + position * 4, _PIECE * 4, 0,
        )  # fmt: skip


@inlined
def _mix_tile(given: _Arguments, item: _Item, span: _Span, start: int, height: int, weights: int, mixed: int, kind: int) -> None:
    """The sum of a span's values, for each of `height` rows with its own weights."""
    size = 4 if kind == FLOAT32 else 2
    row_bytes = given.head_dim * 4
    for position in range(span.begin, span.length, given.block_size):
        # What lies behind the window in the first block may have been overwritten, and not with numbers.
        unread = max(0, span.skipped - position)
        first_value = item.values + _block_at(given, item, start + position) * given.value_block + unread * given.head_dim * size
        matrix_product.multiply(
            kind, UNBROKEN, height, given.head_dim // simd.LANES, min(given.block_size, span.length - position) - unread,
            weights + (position + unread) * 4, _PIECE * 4,
            first_value, simd.LANES * size, given.head_dim * size,
            mixed, row_bytes, position - span.begin,
        )  # fmt: skip
    if span.length == 0:
        for i in range(0, height * row_bytes, simd.VECTOR_BYTES):
            simd.store(mixed + i, simd.splat(0.0), FLOAT32)


@inlined
def _attend_piece(given: _Arguments, item: _Item, start: int, room: _Room, result: _Result, kind: int) -> None:
    """The softmax of all rows over the positions from `start` to the end of the piece, a tile of rows at a time."""
    for row in range(0, item.rows, matrix_product.TILE_ROWS):
        height = min(matrix_product.TILE_ROWS, item.rows - row)
        span = _span_of(given, item, row, height, start)
        scores = room.scores + row * _PIECE * 4
        _score_tile(given, item, span, start, height, room.queries + row * given.head_dim * 4, scores, kind)
        for i in range(row, row + height):
            visible = max(0, min(_PIECE, item.seen + i // given.group - start))
            hidden = max(0, min(_PIECE, item.seen + i // given.group - given.window - start))
            _softmax(room.scores + i * _PIECE * 4, hidden, visible, span.begin, span.length, result.maxima + i * 4, result.sums + i * 4)
        _mix_tile(given, item, span, start, height, scores, result.mixed + row * given.head_dim * 4, kind)


@inlined
def _merge_piece(given: _Arguments, item: _Item, start: int, piece: _Result, whole: _Result) -> None:
    """Adds what became of a piece to the running result of each row that sees any of it."""
    for row in range(item.rows):
        oldest = max(0, item.seen + row // given.group - given.window)
        if oldest < start + _PIECE:
            mixed = row * given.head_dim * 4
            _merge(
                start <= oldest, given.head_dim,
                piece.mixed + mixed, piece.maxima + row * 4, piece.sums + row * 4,
                whole.mixed + mixed, whole.maxima + row * 4, whole.sums + row * 4,
            )  # fmt: skip


@inlined
def _write_out(given: _Arguments, item: _Item, whole: _Result, kind: int) -> None:
    size = 4 if kind == FLOAT32 else 2
    for row in range(item.rows):
        target = item.out + (row // given.group * given.kv_heads * given.group + row % given.group) * given.head_dim * size
        total = simd.splat(simd.read_float32(whole.sums + row * 4))
        for i in range(0, given.head_dim, simd.LANES):
            mean = simd.divide(simd.load(whole.mixed + (row * given.head_dim + i) * 4, FLOAT32), total)
            simd.store(target + i * size, mean, kind)


@inlined
def _attend_item(given: _Arguments, item: _Item, turn: int, room: _Room, query_kind: int, cache_kind: int) -> None:
    """All pieces of its context, or one of them, or what others have made of them."""
    if given.mode != _MERGE:
        _scale_queries(given, item, room.queries, query_kind)
    for piece in range(turn, turn + 1 if given.mode == _PIECES else item.pieces):
        start = (item.first_piece + piece) * _PIECE
        result = room.piece if given.mode == _WHOLE else _result_at(given, item.partials + piece * _result_bytes(given))
        if given.mode != _MERGE:
            _attend_piece(given, item, start, room, result, cache_kind)
        if given.mode != _PIECES:
            _merge_piece(given, item, start, result, room.whole)
    if given.mode != _PIECES:
        _write_out(given, item, room.whole, query_kind)


@inlined
def _item_of(given: _Arguments, sequence: int, token: int, head: int, earlier_pieces: int, query_kind: int) -> _Item:
    """The item of one KV head that begins with a token. `earlier_pieces` are those of the items before head 0's."""
    size = 4 if query_kind == FLOAT32 else 2
    last = simd.read_int32(given.query_start + sequence * 4 + 4)
    num_tokens = min(given.item_tokens, last - token)
    seen = simd.read_int32(given.context_lens + sequence * 4) - last + token + 1
    first_piece = max(0, seen - given.window) // _PIECE
    pieces = (seen + num_tokens - 1 + _PIECE - 1) // _PIECE - first_piece
    return _Item(
        num_tokens * given.group,
        given.query + token * given.query_stride + head * given.group * given.head_dim * size,
        given.out + (token * given.kv_heads + head) * given.group * given.head_dim * size,
        seen,
        given.tables + sequence * given.table_stride,
        given.keys + head * given.key_head,
        given.values + head * given.value_head,
        first_piece,
        pieces,
        given.partials + (earlier_pieces + head * pieces) * _result_bytes(given),
    )


def _build(query_kind: int, cache_kind: int) -> Body:
    def attend(arguments: int) -> None:
        given = _read(arguments)
        room = _room_of(given, simd.claim(arguments + 8))
        mine, num_items, num_pieces = simd.claim(arguments), 0, 0
        for sequence in range(given.num_sequences):
            first, last = simd.read_int32(given.query_start + sequence * 4), simd.read_int32(given.query_start + sequence * 4 + 4)
            for token in range(first, last, given.item_tokens):
                pieces = _item_of(given, sequence, token, 0, num_pieces, query_kind).pieces
                turns = pieces if given.mode == _PIECES else 1
                while mine < num_items + given.kv_heads * turns:
                    item = _item_of(given, sequence, token, (mine - num_items) // turns, num_pieces, query_kind)
                    _attend_item(given, item, (mine - num_items) % turns, room, query_kind, cache_kind)
                    mine = simd.claim(arguments)
                num_items += given.kv_heads * turns
                num_pieces += given.kv_heads * pieces

    return attend


_ATTEND = NativeKernel("paged_attention", _build)
