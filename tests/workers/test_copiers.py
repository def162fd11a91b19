"""Bytes arrive where they should, all of them and no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from workers.copiers import CudaCopier, HostCopier, PinnedSlots, coalesce, open_copier
from workers.pages import allocate
from workers.transfer_order import BOTH, Direction


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
    assert list(coalesce(places, "out", 100)) == list(coalesce(places, "in", 100)) == runs


@pytest.mark.parametrize(
    ("direction", "places", "runs"),
    [
        ("out", [(1, 3), (2, 4), (3, 5), (4, 6)], [(1, 3, 1), (2, 4, 3)]),
        ("in", [(3, 1), (4, 2), (5, 3), (6, 4)], [(3, 1, 1), (4, 2, 3)]),
        ("out", [(3, 0), (4, 1)], [(3, 0, 2)]),
        ("out", [(number, number) for number in range(1, 13)], [(1, 1, 3), (4, 4, 4), (8, 8, 4), (12, 12, 1)]),
    ],
)
def test_no_copy_goes_from_one_pinned_piece_to_the_next(direction: Direction, places: list[tuple[int, int]], runs: list[tuple[int, int, int]]) -> None:
    assert list(coalesce(places, direction, 4)) == runs


class FakeRuntime:
    """What the driver has registered, and how much more it will."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.pieces: dict[int, int] = {}  #: bytes by address
        self.most = 0

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        if sum(self.pieces.values()) + size_bytes > self.limit_bytes:
            return 2  # cudaErrorMemoryAllocation
        assert not any(address < other + held and other < address + size_bytes for other, held in self.pieces.items())
        self.pieces[address] = size_bytes
        self.most = max(self.most, len(self.pieces))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pieces[address]
        return 0


def pinned_slots(monkeypatch: pytest.MonkeyPatch, slots: Tensor, limit_bytes: int) -> tuple[PinnedSlots, FakeRuntime]:
    runtime = FakeRuntime(limit_bytes)
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    monkeypatch.setattr(PinnedSlots, "PIECE_BYTES", 64 * 1024)
    return PinnedSlots(slots[:, :100], torch.device("cpu")), runtime


@pytest.mark.parametrize("slot_bytes", [4096, 5 * 4096, 7 * 4096, 20 * 4096])
def test_slots_are_pinned_whole_in_pieces_that_leave_nothing_out(monkeypatch: pytest.MonkeyPatch, slot_bytes: int) -> None:
    slots = allocate(50 * slot_bytes).view(50, slot_bytes)
    pinned, runtime = pinned_slots(monkeypatch, slots, 2**40)
    assert sum(runtime.pieces.values()) == 50 * slot_bytes
    assert len(runtime.pieces) > 1
    for number in range(50):
        start = slots[number].data_ptr()
        assert any(address <= start and start + slot_bytes <= address + size for address, size in runtime.pieces.items())
        begins = start in runtime.pieces
        assert begins == (number % pinned.slots_per_piece == 0), "where copies are divided"
    pinned.release()
    assert not runtime.pieces
    pinned.release()


def test_slots_that_cannot_all_be_pinned_are_not_pinned_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with capture_logs() as logs:
        pinned, runtime = pinned_slots(monkeypatch, allocate(50 * 4096).view(50, 4096), 150_000)
    assert (runtime.most, runtime.pieces) == (2, {})
    assert [(line["event"], line["error"], line["bytes"], line["refused_after_bytes"]) for line in logs] == [("arena_not_pinned", 2, 50 * 4096, 2 * 65536)]
    pinned.release()


class FakeDevice:
    """Streams and events that only note what is asked of them, in order; copies are carried out at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal: list[tuple[str, str, object]] = []
        self.current = self.compute = FakeStream(self, "compute")
        self.copies_until_fault = 1000
        names = iter(BOTH)
        copy = Tensor.copy_

        def copy_noted(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            self.copies_until_fault -= 1
            if self.copies_until_fault < 0:
                raise RuntimeError("CUDA error")
            self.journal.append((self.current.name, "copies", len(target)))
            assert non_blocking
            return copy(target, source)

        @contextmanager
        def on(stream: FakeStream) -> Iterator[None]:
            before, self.current = self.current, stream
            try:
                yield
            finally:
                self.current = before

        monkeypatch.setattr("torch.cuda.cudart", lambda: FakeRuntime(2**40))
        monkeypatch.setattr("torch.cuda.Stream", lambda device: FakeStream(self, next(names)))
        monkeypatch.setattr("torch.cuda.Event", FakeEvent)
        monkeypatch.setattr("torch.cuda.stream", on)
        monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: self.current)
        monkeypatch.setattr(Tensor, "copy_", copy_noted)


class FakeStream:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name = device, name

    def wait_event(self, event: FakeEvent) -> None:
        self.device.journal.append((self.name, "waits for", event))

    def synchronize(self) -> None:
        self.device.journal.append((self.name, "is over", None))


class FakeEvent:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        pass

    def record(self, stream: FakeStream) -> None:
        stream.device.journal.append((stream.name, "reaches", self))


@pytest.mark.parametrize("direction", BOTH)
def test_a_device_copies_behind_the_mark_and_computes_behind_a_copy_that_it_needs(monkeypatch: pytest.MonkeyPatch, direction: Direction) -> None:
    blocks, slots = tables(4096, 4096)
    source, target = (blocks, slots) if direction == "out" else (slots, blocks)
    before, device = source.clone(), FakeDevice(monkeypatch)
    copier = CudaCopier(blocks, slots)
    mark = copier.mark()
    copier.start(direction, [(1, 2), (2, 3), (4, 0)], mark).hold_forward()
    (*rest, (_, _, begin)), (_, _, end) = device.journal[:3], device.journal[5]
    assert rest == [("compute", "reaches", mark), (direction, "waits for", mark)]
    assert device.journal[2:] == [
        (direction, "reaches", begin),
        (direction, "copies", 2),
        (direction, "copies", 1),
        (direction, "reaches", end),
        ("compute", "waits for", end),
    ]
    assert len({mark, begin, end}) == 3
    assert torch.equal(target[[2, 3, 0]], before[[1, 2, 4]])


def test_of_a_copy_that_fails_on_a_device_nothing_is_under_way_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, slots = tables(4096, 8192)
    device = FakeDevice(monkeypatch)
    copier = CudaCopier(blocks, slots[:, :4096])
    device.copies_until_fault = 1
    with pytest.raises(RuntimeError, match="CUDA error"):
        copier.start("out", [(1, 2), (2, 3)], copier.mark())
    assert device.journal[-2:] == [("out", "copies", 1), ("out", "is over", None)]


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
