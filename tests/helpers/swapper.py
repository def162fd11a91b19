"""A few small blocks and swap slots for a swapper, and what became of its transfers."""

from __future__ import annotations

import select

import torch
from torch import Tensor

from pagemill.ids import PlanId
from tests.helpers.copiers import DEADLINE_S
from workers.kv_cache import KvCache, full_attention_spec
from workers.pages import allocate
from workers.swapper import Swapper

NUM_BLOCKS, NUM_SLOTS = 8, 6
PLAN = PlanId(4)


def pool(dtype: torch.dtype = torch.float32, head_dim: int = 16, block_size: int = 4) -> KvCache:
    """A few small blocks of random bytes."""
    cache = KvCache(full_attention_spec(2, 2, head_dim, block_size, dtype), NUM_BLOCKS)
    cache.blocks.random_(0, 256, generator=torch.Generator().manual_seed(1))
    return cache


def arena() -> Tensor:
    """[NUM_SLOTS, 4096] random bytes."""
    return allocate(NUM_SLOTS * 4096).view(NUM_SLOTS, 4096).random_(0, 256, generator=torch.Generator().manual_seed(2))


def collect(swapper: Swapper, reports: dict[int, bool], count: int) -> None:
    """Until so many transfers have been reported in all."""
    while len(reports) < count:
        assert select.select([swapper], [], [], DEADLINE_S)[0], f"only {len(reports)} of {count} transfers were reported"
        for done in swapper.take_done():
            for transfer_id in done.transfer_ids:
                assert transfer_id not in reports, "reported twice"
                reports[transfer_id] = done.ok
