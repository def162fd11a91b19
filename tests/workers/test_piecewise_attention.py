"""Attention in pieces gives what the reference gives, reads what that reads, and needs no more memory than it says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from workers import piecewise_attention
from workers.kernels import Case, paged_attention
from workers.kv_cache import KvCache, LayerCache, full_attention_spec
from workers.piecewise_attention import Pieces, attend, scratch_bytes

SMALL = Pieces(rows=5, sequences=2, positions=16)
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 32, 16


def step(lengths: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> tuple[Tensor, LayerCache, Tensor, Tensor, Tensor, float]:
    """`lengths` are (rows, context) of sequences in a pool of random numbers; blocks are shared at random, which nobody notices."""
    generator = torch.Generator().manual_seed(7)
    spec = full_attention_spec(1, KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype, "cuda")  # laid out as for a device
    pool = KvCache(spec, num_blocks=300).layer(0)
    for part in pool.key, pool.value:
        part.copy_(torch.randn(part.shape, generator=generator))
    starts = torch.tensor([0, *(rows for rows, _ in lengths)]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    tables = torch.randint(0, 300, (len(lengths), -(-int(contexts.max()) // BLOCK_SIZE)), generator=generator, dtype=torch.int32)
    query = torch.randn((int(starts[-1]), HEADS, HEAD_DIM), generator=generator).to(dtype)
    return query, pool, starts, contexts, tables, HEAD_DIM**-0.5


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.dtype == expected.dtype
    assert (actual.double() - expected.double()).abs().max() <= tolerance * expected.double().abs().max()


@pytest.mark.parametrize("case", paged_attention.CASES, ids=lambda case: case.name)
def test_every_case_of_the_kernel_agrees_with_the_reference(case: Case) -> None:
    given = case.arguments()
    expected = paged_attention.reference(*given)
    for pieces in (Pieces(), SMALL):
        assert_close(attend(*given, pieces=pieces), expected, case.tolerance)


@pytest.mark.parametrize("window", [0, 1, 900])
@pytest.mark.parametrize(
    "lengths",
    [[(150, 4000)], [(1, 4000), (1, 30), (1, 3999), (1, 2049)], [(3, 9), (3, 1025), (3, 1024), (2, 7), (70, 2500), (1, 1)]],
    ids=["chunk", "decode", "mixed"],
)
def test_long_contexts_in_small_pieces_agree_with_the_reference(lengths: list[tuple[int, int]], window: int) -> None:
    given = step(lengths)
    expected = paged_attention.reference(*given, window)
    assert_close(attend(*given, window, pieces=Pieces(rows=64, sequences=3, positions=256)), expected, 2e-6)


def test_queries_may_lie_among_keys_and_values() -> None:
    query, *_ = given = step([(9, 40), (1, 70)])
    merged = torch.cat((query, torch.full((len(query), 3, HEAD_DIM), math.nan)), dim=1)
    assert_close(attend(merged[:, :HEADS], *given[1:], pieces=SMALL), paged_attention.reference(*given), 2e-6)
    assert torch.equal(merged[:, :HEADS], query), "queries are not written to"


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_stays_so_and_in_its_sequence(number: float) -> None:
    query, *_ = given = step([(1, 40), (1, 70), (4, 70)])
    expected = attend(*given)
    query[1, 2, 0] = number
    out = attend(*given)
    assert out[1, 2].isnan().all()
    assert torch.equal(out[[0, 2, 3, 4, 5]], expected[[0, 2, 3, 4, 5]])


def test_pieces_begin_at_multiples_of_their_size_whoever_is_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    begins: list[list[int]] = []
    unread = piecewise_attention._Sight.unread

    def noting(sight: Any, positions: Tensor) -> Tensor:
        begins[-1].append(int(positions[0]))
        return unread(sight, positions)

    monkeypatch.setattr(piecewise_attention._Sight, "unread", noting)
    for lengths in ([(1, 500)], [(1, 90), (1, 500)], [(1, 700), (1, 500)], [(40, 500)]):
        begins.append([])
        attend(*step(lengths), 300, pieces=Pieces(rows=64, sequences=4, positions=64))
    assert begins[0] == [192, 256, 320, 384, 448]
    assert all(begin % 64 == 0 for each in begins for begin in each)


def test_decodes_share_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    gather = piecewise_attention._gather

    def noting(part: Tensor, block_ids: Tensor) -> Tensor:
        calls.append(block_ids.shape)
        return gather(part, block_ids)

    monkeypatch.setattr(piecewise_attention, "_gather", noting)
    attend(*step([(1, 60)] * 16 + [(40, 64)]))
    assert calls == [(16, 4)] * 2 + [(1, 4)] * 2, "keys and values of the decodes, then of the chunk"


def test_no_device_is_asked_for_a_number() -> None:
    query, pool, starts, contexts, tables, scale = step([(1, 600), (1, 20), (40, 700)])
    key, value, query, tables = (x.to("meta") for x in (pool.key, pool.value, query, tables))  # where no number is known
    assert attend(query, LayerCache(key, value), starts, contexts, tables, scale, 100, pieces=SMALL).shape == query.shape


@pytest.mark.gpu
@pytest.mark.parametrize("case", paged_attention.CASES, ids=lambda case: case.name)
def test_every_case_agrees_on_the_device_which_is_never_waited_for(case: Case) -> None:
    given = case.arguments()
    query, pool, starts, contexts, tables, scale, window = given
    on_device = LayerCache(pool.key.cuda(), pool.value.cuda())
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = paged_attention.paged_attention(query.cuda(non_blocking=True), on_device, starts, contexts, tables.cuda(non_blocking=True), scale, window)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(out.cpu(), paged_attention.reference(*given), case.tolerance)


def peak_bytes(*given: Any, pieces: Pieces) -> int:
    """The most that was allocated at a time, besides the result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = attend(*given, pieces=pieces)
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda change: change.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak - out.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[(160, 800)], [(1, 800)] * 6, [(16, 800)] * 4], ids=["chunk", "decode", "chunks"])
def test_memory_is_bounded_whatever_the_length_of_chunks_and_contexts(lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    pieces = Pieces(rows=64, sequences=4, positions=256)
    bound = scratch_bytes(HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype.itemsize, pieces)
    longer = [(2 * rows if len(lengths) == 1 else rows, 2 * context) for rows, context in lengths]
    peaks = [peak_bytes(*step(each, dtype), pieces=pieces) for each in (lengths, longer)]
    assert bound / 3 < peaks[1] <= bound
    assert peaks[1] <= 1.05 * peaks[0]
