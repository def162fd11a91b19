"""Bytes arrive where they should, all of them and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.copiers import CudaCopier, HostCopier, coalesce, open_copier
from workers.pages import allocate
from workers.transfer_order import BOTH


def tables(block_bytes: int, slot_bytes: int) -> tuple[Tensor, Tensor]:
    """Seven blocks and five slots of random bytes."""
    draw = torch.Generator().manual_seed(block_bytes)
    blocks, slots = allocate(7 * block_bytes).view(7, block_bytes), allocate(5 * slot_bytes).view(5, slot_bytes)
    for table in (blocks, slots):
        table.random_(0, 256, generator=draw)
    return blocks, slots


@pytest.mark.parametrize("block_bytes", [64, 4096, 5 * 1024, 737_280, 4100])
def test_blocks_come_back_as_they_went(block_bytes: int) -> None:
    blocks, slots = tables(block_bytes, -(-block_bytes // 4096) * 4096)
    before, slots_before = blocks.clone(), slots.clone()
    copier = open_copier(blocks, slots)
    assert copier.start("out", [(1, 4), (2, 0), (6, 2)], copier.mark()).is_over()
    blocks[1:3].zero_()
    assert copier.start("in", [(4, 2), (0, 1)], copier.mark()).wait() > 0
    assert torch.equal(blocks[[1, 2]], before[[2, 1]])
    assert torch.equal(blocks[[0, 3, 4, 5, 6]], before[[0, 3, 4, 5, 6]])
    assert torch.equal(slots[[4, 0, 2], :block_bytes], before[[1, 2, 6]])
    assert torch.equal(slots[:, block_bytes:], slots_before[:, block_bytes:])
    assert torch.equal(slots[[1, 3]], slots_before[[1, 3]])


def test_what_another_rank_writes_is_read_and_never_written() -> None:
    blocks, slots = tables(4096, 4096)
    before, slots_before = blocks.clone(), slots.clone()
    copier = open_copier(blocks, slots, writes_slots=False)
    assert (copier.lanes, copier.batch_blocks) == (HostCopier.lanes, HostCopier(blocks, slots).batch_blocks)
    out = copier.start("out", [(1, 4), (2, 0)], copier.mark())
    assert out.is_over()
    assert out.wait() == 0.0
    assert torch.equal(slots, slots_before)
    assert copier.start("in", [(4, 2)], copier.mark()).wait() > 0
    assert torch.equal(blocks[2], slots_before[4])
    assert torch.equal(blocks[[0, 1, 3, 4, 5, 6]], before[[0, 1, 3, 4, 5, 6]])
    copier.close()


def test_the_host_copies_one_batch_at_a_time_of_at_most_eight_mebibytes() -> None:
    assert HostCopier(*tables(737_280, 737_280)).batch_blocks == 11
    assert HostCopier.lanes == (BOTH,)


@pytest.mark.parametrize(
    ("places", "runs"),
    [
        ([], []),
        ([(3, 9)], [(3, 9, 1)]),
        ([(3, 9), (4, 10), (5, 11)], [(3, 9, 3)]),
        ([(3, 9), (4, 11), (5, 12)], [(3, 9, 1), (4, 11, 2)]),
        ([(3, 9), (5, 10), (4, 11)], [(3, 9, 1), (5, 10, 1), (4, 11, 1)]),
        ([(3, 9), (2, 8)], [(3, 9, 1), (2, 8, 1)]),
    ],
)
def test_neighbours_on_both_sides_are_one_copy(places: list[tuple[int, int]], runs: list[tuple[int, int, int]]) -> None:
    assert list(coalesce(places)) == runs


@pytest.mark.gpu
@pytest.mark.parametrize("slot_bytes", [4 * 2**20, 4 * 2**20 + 4096])
def test_a_forward_may_overwrite_what_is_copied_out_urgently_on_the_device(slot_bytes: int) -> None:
    blocks = torch.randint(0, 256, (64, 4 * 2**20), dtype=torch.uint8, device="cuda")
    before = blocks.cpu()
    slots = allocate(64 * slot_bytes).view(64, slot_bytes)
    copier = open_copier(blocks, slots)
    assert isinstance(copier, CudaCopier)
    copy = copier.start("out", [(number, number) for number in range(64)], copier.mark())
    copy.hold_forward()
    blocks.zero_()
    assert copy.wait() > 0
    assert copier.start("in", [(63 - number, number) for number in range(64)], copier.mark()).wait() > 0
    assert torch.equal(slots[:, : 4 * 2**20], before)
    assert torch.equal(blocks.cpu(), before.flip(0))
    copier.close()
