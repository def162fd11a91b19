"""The compiled attention: where it runs, and that how its work is divided changes no bit. What it computes is tested with all kernels."""

from __future__ import annotations

import pytest
import torch

from workers import compiled_attention
from workers.compiled_attention import attend, covers
from workers.kv_cache import KvCache, full_attention_spec

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, CONTEXT = 6, 2, 32, 16, 900


@pytest.mark.parametrize(
    ("device", "block_size", "head_dim", "is_covered"),
    [("cpu", 16, 64, True), ("cpu", 32, 16, True), ("cpu", 8, 64, False), ("cpu", 16, 72, False), ("cuda", 16, 64, False)],
)
def test_it_runs_on_cpus_where_blocks_and_heads_fill_vectors(device: str, block_size: int, head_dim: int, is_covered: bool) -> None:
    assert covers(device, block_size, head_dim) == is_covered


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("rows", [1, 45])
def test_pieces_computed_side_by_side_give_the_bits_of_those_computed_in_turn(monkeypatch: pytest.MonkeyPatch, rows: int, window: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    num_blocks = -(-CONTEXT // BLOCK_SIZE)
    cache = KvCache(full_attention_spec(1, KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32), num_blocks).layer(0)
    for part in (cache.key, cache.value):
        part.copy_(torch.randn(part.shape, generator=draw))
    table = torch.randperm(num_blocks, generator=draw).int()[None]
    query = torch.randn((rows, HEADS, HEAD_DIM), generator=draw)
    starts, contexts = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([CONTEXT], dtype=torch.int32)
    results = []
    for items_per_thread in (0, 1000):
        monkeypatch.setattr(compiled_attention, "_ITEMS_PER_THREAD", items_per_thread)
        results.append(attend(query, cache, starts, contexts, table, HEAD_DIM**-0.5, window))
    in_turn, side_by_side = results
    assert torch.equal(in_turn, side_by_side)
