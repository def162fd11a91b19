"""Transfers at random leave pool and arena as a plain model of them leaves lists of bytes, on a host and on a device."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pagemill.ids import NO_PLAN, PlanId
from pagemill.messages.worker import Transfer
from tests.helpers.copiers import StreamCopier
from tests.helpers.plans import copy_in, copy_out
from tests.helpers.swapper import NUM_BLOCKS, NUM_SLOTS, arena, collect, pool
from workers.swapper import Swapper


class Model:
    """Pool and arena as lists of bytes; transfers happen at once, in the order they are given."""

    def __init__(self, blocks: Tensor, slots: Tensor) -> None:
        self.size = blocks.shape[1]
        self.blocks, self.slots = [bytes(row.tolist()) for row in blocks], [bytes(row.tolist()) for row in slots]
        self.expected: dict[int, bool] = {}

    def transfer(self, transfer: Transfer) -> None:
        tables = {"device": self.blocks, "arena": self.slots}
        source, target = tables[transfer.from_tier], tables[transfer.to_tier]
        ok = 0 <= transfer.from_id < len(source) and 0 <= transfer.to_id < len(target)
        self.expected[transfer.transfer_id] = ok
        if ok:
            target[transfer.to_id] = source[transfer.from_id][: self.size] + target[transfer.to_id][self.size :]

    def matches(self, blocks: Tensor, slots: Tensor) -> bool:
        return self.blocks == [bytes(row.tolist()) for row in blocks] and self.slots == [bytes(row.tolist()) for row in slots]


def random_transfers(draw: random.Random, first_id: int, plan_id: PlanId) -> list[Transfer]:
    transfers = []
    for transfer_id in range(first_id, first_id + draw.randrange(7)):
        block, slot = draw.randrange(NUM_BLOCKS), draw.randrange(NUM_SLOTS)
        if draw.random() < 0.05:
            block, slot = draw.choice([(-1, slot), (NUM_BLOCKS, slot), (block, NUM_SLOTS)])
        needed_by = plan_id if draw.random() < 0.4 else NO_PLAN
        out = copy_out(transfer_id, block, slot, needed_by=needed_by)
        transfers.append(out if draw.random() < 0.5 else copy_in(transfer_id, slot, block, needed_by=needed_by))
    return transfers


def untouched(transfers: Sequence[Transfer], reports: dict[int, bool]) -> list[int]:
    """Blocks that no background transfer still names: a forward may write to them."""
    background = [transfer for transfer in transfers if transfer.needed_by == NO_PLAN and transfer.transfer_id not in reports]
    busy = {transfer.from_id if transfer.from_tier == "device" else transfer.to_id for transfer in background}
    return [block for block in range(NUM_BLOCKS) if block not in busy]


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("seed", range(4))
def test_random_transfers_leave_what_a_plain_model_leaves(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    cache, slots = pool(), arena()
    copier = StreamCopier(cache.blocks, slots, seed) if kind == "device" else None
    swapper = Swapper(cache, slots, copier=copier)
    model = Model(cache.blocks, slots)
    sent: list[Transfer] = []
    reports: dict[int, bool] = {}
    for step in range(150):
        transfers = random_transfers(draw, len(sent), PlanId(step))
        sent += transfers
        swapper.start(transfers, PlanId(step))
        if copier is not None:
            copier.forward()
        for transfer in transfers:
            model.transfer(transfer)
        for done in swapper.take_done():
            reports |= dict.fromkeys(done.transfer_ids, done.ok)
        for block in draw.sample(free := untouched(sent, reports), min(2, len(free))):
            content = draw.randbytes(model.size)
            cache.blocks[block] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            model.blocks[block] = content
        if draw.random() < 0.1:
            collect(swapper, reports, len(sent))
            assert model.matches(cache.blocks, slots), f"seed {seed}, step {step}"
    collect(swapper, reports, len(sent))
    assert model.matches(cache.blocks, slots)
    assert reports == model.expected
    assert {True, False} == set(reports.values())
    swapper.close()
