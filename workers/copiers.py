"""How bytes get from a block of the pool to a swap slot and back: one copier for the CPU, one for CUDA.

A copier is told what to copy when it may be copied, and says when that is over. In which order, on whose
behalf and in which thread is not its business (`workers.swapper`). Pool and arena are tables of bytes to
it: uint8 [num_blocks, block_bytes] and [num_slots, slot_bytes], of which a block fills the beginning.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pagemill.telemetry import get_logger
from workers.kernels.copy_blocks import copy_blocks
from workers.transfer_order import BOTH, Direction

#: (from, to): a block and a slot, or a slot and a block.
Places = tuple[int, int]


class Copy(Protocol):
    """Blocks that are being copied together."""

    def hold_forward(self) -> None:
        """What is computed from now on runs only when this is over. Called by the thread that runs forwards."""

    def is_over(self) -> bool: ...

    def wait(self) -> float:
        """Returns when it is over, with the seconds that it took. Raises if it failed."""


class Copier(Protocol):
    """Starts copies. `start` may be called by several threads, as long as no two copies name the same place."""

    #: What is copied side by side; each of these gets a thread.
    lanes: Sequence[Sequence[Direction]]
    #: Blocks of one background copy, so that something urgent behind it need not wait long.
    batch_blocks: int

    def enter_thread(self) -> None:
        """Called by each thread of a lane before anything else."""

    def mark(self) -> object:
        """All that has been computed, or handed to the device, until now. Called by the thread that runs forwards."""

    def start(self, direction: Direction, places: Sequence[Places], mark: object) -> Copy:
        """Copies what was there at the mark, or what other copies have put there since."""

    def close(self) -> None: ...


def open_copier(blocks: Tensor, slots: Tensor, *, writes_slots: bool = True) -> Copier:
    """The copier for the device that holds the pool. `writes_slots`: no other rank does it for this one."""
    slots = slots[:, : blocks.shape[1]]
    copier = CudaCopier(blocks, slots) if blocks.device.type == "cuda" else HostCopier(blocks, slots)
    return copier if writes_slots else ReadingCopier(copier)


class ReadingCopier:
    """Of a rank that has its slots in common with another one, which has the same KV and writes it: a copy out is none, and over at once."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self.lanes, self.batch_blocks = copier.lanes, copier.batch_blocks

    def enter_thread(self) -> None:
        self._copier.enter_thread()

    def mark(self) -> object:
        return self._copier.mark()

    def start(self, direction: Direction, places: Sequence[Places], mark: object) -> Copy:
        return _Copied(0.0) if direction == "out" else self._copier.start(direction, places, mark)

    def close(self) -> None:
        self._copier.close()


# --- the CPU ---------------------------------------------------------------------------------------------


class _Copied:
    """A copy that is over already."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def hold_forward(self) -> None:
        pass  # it cannot begin before the copy returned

    def is_over(self) -> bool:
        return True

    def wait(self) -> float:
        return self._seconds


class HostCopier:
    """Copies in the calling thread, without Python's lock. One lane: two threads would not copy faster, and compute less."""

    lanes: Sequence[Sequence[Direction]] = (BOTH,)

    def __init__(self, blocks: Tensor, slots: Tensor) -> None:
        self._blocks, self._slots = blocks, slots
        self.batch_blocks = max(1, 8 * 2**20 // blocks.shape[1])

    def enter_thread(self) -> None:
        pass  # every thread has the same memory

    def mark(self) -> object:
        return None  # a forward has returned when its plan is done

    def start(self, direction: Direction, places: Sequence[Places], mark: object) -> Copy:
        started = time.perf_counter()
        source, target = (self._blocks, self._slots) if direction == "out" else (self._slots, self._blocks)
        copy_blocks(source, target, places)
        return _Copied(time.perf_counter() - started)

    def close(self) -> None:
        pass


# --- CUDA ------------------------------------------------------------------------------------------------
#
# C is the stream that computes, O copies out, I copies in; a mark is an event on C. What keeps which rule:
#
#  1. out after compute       O waits for the mark of the plan that asked, which follows every forward before it.
#  2. reuse of a freed block  a block is free when its copy is acknowledged; if a forward may overwrite it sooner,
#                             the copy is urgent and C waits for its event (`hold_forward`).
#  3. in over blocks in use   I waits for the same mark, even if the scheduler thinks that nobody reads the block.
#  4. in after other writes   nothing but forwards and copies writes to the pool, and no block is ever cleared.
#  5. use after in            a block is named by a slice only after its acknowledgement, so its event has passed;
#                             an urgent copy in holds the forward as an urgent copy out does.
#  6. reuse of a slot         copies of one slot or block wait for each other on the host (`TransferOrder`),
#                             across both streams: the next one starts when the event of the last has passed.
#  7. staging buffers         there are none; the places of a copy are read before `start` returns.
#  8. victims                 a copy is never cancelled. What became of its sequence is the scheduler's affair.
#  9. the token in flight     the plan whose token it is runs before the mark of any later plan.
# 10. graphs                  copies are queued between forwards, never while one is captured.


class _CudaCopy:
    """Blocks queued on a stream between two events."""

    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._begin, self._end = begin, end

    def hold_forward(self) -> None:
        torch.cuda.current_stream().wait_event(self._end)

    def is_over(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> float:
        self._end.synchronize()  # without Python's lock, and asleep: the event was made with `blocking`
        return float(self._begin.elapsed_time(self._end)) / 1000.0


class CudaCopier:
    """Copies on two streams of its own, one each way, so that both copy engines run. The arena is pinned if the driver lets us."""

    lanes: Sequence[Sequence[Direction]] = (("out",), ("in",))

    def __init__(self, blocks: Tensor, slots: Tensor) -> None:
        self._blocks, self._slots = blocks, slots
        self._streams: dict[Direction, torch.cuda.Stream] = {direction: torch.cuda.Stream(blocks.device) for direction in BOTH}
        self.batch_blocks = max(1, 64 * 2**20 // blocks.shape[1])
        self._is_dense = slots.stride(0) == blocks.stride(0)
        self._pinned = PinnedSlots(slots, blocks.device)

    def enter_thread(self) -> None:
        """A new thread is on the first device, whichever is this rank's: a context there would cost its memory, and events would be of it."""
        torch.cuda.set_device(self._blocks.device)

    def mark(self) -> object:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._blocks.device))
        return event

    def start(self, direction: Direction, places: Sequence[Places], mark: object) -> Copy:
        stream = self._streams[direction]
        begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        source, target = (self._blocks, self._slots) if direction == "out" else (self._slots, self._blocks)
        runs = coalesce(places, direction, self._pinned.slots_per_piece) if self._is_dense else ((*pair, 1) for pair in places)
        with torch.cuda.stream(stream):
            if isinstance(mark, torch.cuda.Event):
                stream.wait_event(mark)
            try:
                begin.record(stream)
                for first, to, count in runs:
                    target[to : to + count].copy_(source[first : first + count], non_blocking=True)
                end.record(stream)
            except Exception:
                stream.synchronize()  # its places may soon be another's: nothing of it may still be under way
                raise
        return _CudaCopy(begin, end)

    def close(self) -> None:
        """Nothing may be under way any more."""
        self._pinned.release()


def coalesce(places: Iterable[Places], direction: Direction, slots_per_piece: int) -> Iterator[tuple[int, int, int]]:
    """(from, to, count): neighbours on both sides become one copy, unless the second one's slot begins a piece (see `PinnedSlots`)."""
    run: tuple[int, int, int] | None = None
    for first, to in places:
        is_next = run is not None and (first, to) == (run[0] + run[2], run[1] + run[2])
        if run is not None and is_next and (to if direction == "out" else first) % slots_per_piece:
            run = (run[0], run[1], run[2] + 1)
            continue
        if run is not None:
            yield run
        run = (first, to, 1)
    if run is not None:
        yield run


class PinnedSlots:
    """Lets the device read and write the slots by itself: all of them or none.

    They are registered with the driver in pieces, for it holds locks meanwhile that a running server needs as well. A piece is
    made of whole slots, since what one copy touches must lie in one registration.
    """

    PIECE_BYTES = 2**30

    def __init__(self, slots: Tensor, device: torch.device) -> None:
        slot_bytes = slots.stride(0)
        self.slots_per_piece = max(1, self.PIECE_BYTES // slot_bytes)
        self._addresses: list[int] = []  #: that are registered now
        for first in range(0, len(slots), self.slots_per_piece):
            piece = slots[first : first + self.slots_per_piece]
            code = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), len(piece) * slot_bytes, 0))
            if code:
                self.release()
                _clear_error(device)
                get_logger("workers.copiers").warning(
                    "arena_not_pinned",
                    error=code,
                    bytes=len(slots) * slot_bytes,
                    refused_after_bytes=first * slot_bytes,
                    effect="swapping is several times slower; raise the memlock limit",
                )
                return
            self._addresses.append(piece.data_ptr())

    def release(self) -> None:
        for address in self._addresses:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._addresses.clear()


def _clear_error(device: torch.device) -> None:
    """A failed call leaves its error for the next launch to report: let that be one of no consequence."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
