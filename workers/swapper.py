"""The swapper carries out transfers: it copies blocks between pool and arena, most of them beside the forward.

    swapper.start(plan.transfers, plan.plan_id)     before the plan's forward; returns how long that had to wait
    swapper.wait_until_reported()                   before the plan is acknowledged
    swapper.take_done()                             whenever convenient, and when `fileno()` becomes readable

Transfers that this forward needs are copied at once in the caller's thread, after those they must not overtake
and nothing else; all others by background threads, in order. Nothing is copied for a transfer that names a
block or a slot that does not exist. Every transfer is reported once, also one that failed. If a thread itself
fails, the next call says so, instead of a copy that nobody ever hears of. Ids come from the scheduler; whose
blocks they are is not known here.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pagemill import injection
from pagemill.ids import NONE, PlanId
from pagemill.messages.worker import Transfer
from pagemill.telemetry import get_logger
from workers.copiers import Copier, Copy, open_copier
from workers.kv_cache import KvCache
from workers.transfer_order import BOTH, Direction, Job, TransferOrder

_Batch = Sequence[Job]


@dataclass
class Done:
    """Transfers of one direction that ended alike since the last look."""

    direction: Direction
    ok: bool
    transfer_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0  #: spent copying these


class Swapper:
    """For one thread, that which runs forwards. `slots` is uint8 [num_slots, slot_bytes], or None without an arena.

    Ranks of equal KV have the same slots, and one of them `writes_slots`. A slot is read only after all ranks have acknowledged what was
    copied there, and written anew only after all have acknowledged what they read, so nobody reads half of it.
    """

    def __init__(self, kv_cache: KvCache, slots: Tensor | None, *, copier: Copier | None = None, writes_slots: bool = True) -> None:
        if slots is not None and slots.shape[1] < kv_cache.spec.block_bytes:
            raise ValueError(f"a slot of {slots.shape[1]} bytes does not hold a block of {kv_cache.spec.block_bytes}")
        self.num_blocks, self.num_slots = kv_cache.num_blocks, 0 if slots is None else len(slots)
        self.num_refused = 0  #: transfers that named what does not exist
        self._needed_later: list[Job] = []  #: by forwards that are not planned yet
        self._needed: list[Job] = []  #: by the last forward
        if copier is None and slots is not None:
            copier = open_copier(kv_cache.blocks, slots, writes_slots=writes_slots)
        self._work = _Work(copier)
        lanes = [
            threading.Thread(target=self._work.run_lane, args=(lane,), name=f"swap {'+'.join(lane)}", daemon=True)
            for lane in (copier.lanes if copier is not None else ())
        ]
        # They end with this object or with the interpreter, whichever comes first: they must not copy into memory that is gone.
        self._close = weakref.finalize(self, self._work.close, lanes)
        for lane in lanes:
            lane.start()

    def fileno(self) -> int:
        """Readable while there is something for `take_done`."""
        return self._work.wake_fd

    def start(self, transfers: Sequence[Transfer], plan_id: PlanId) -> float:
        """Takes over a plan's transfers, in order, and returns the seconds that its forward waited for those it needs."""
        if not (transfers or self._needed_later):
            return 0.0
        started = time.perf_counter()
        if transfers:
            injection.reach("transfer.start")
        mark = self._work.mark()
        jobs: list[Job] = []
        refused: list[Job] = []
        for transfer in transfers:
            job = self._job(transfer, plan_id, mark)
            (jobs if self._exists(transfer, job) else refused).append(job)
        self.num_refused += len(refused)
        self._work.add(jobs, refused)
        needed = [job for job in (*self._needed_later, *jobs) if NONE != job.needed_by <= plan_id]
        self._needed_later = [job for job in (*self._needed_later, *jobs) if job.needed_by > plan_id]
        self._work.hurry(needed)
        self._needed = needed
        return time.perf_counter() - started if needed else 0.0

    def wait_until_reported(self) -> None:
        """Returns when `take_done` tells of all that the last forward needed: a device may be done with both before a thread has noticed.

        Whoever believes the results of that forward must know by then of a copy that failed.
        """
        self._work.wait_until_reported(self._needed)
        self._needed = []

    def take_done(self) -> list[Done]:
        """What has ended since the last call, at most one entry for each direction and outcome."""
        return self._work.take_done()

    def reset(self) -> None:
        """Forgets everything: nothing is being copied and nothing will be reported when this returns."""
        self._needed_later, self._needed = [], []
        self._work.reset()

    def close(self) -> None:
        """Ends the threads when they have finished what they are copying. Nothing may be started afterwards."""
        self._close()

    def _job(self, transfer: Transfer, plan_id: PlanId, mark: object) -> Job:
        is_out = transfer.from_tier == "device"
        block_id, slot_id = (transfer.from_id, transfer.to_id) if is_out else (transfer.to_id, transfer.from_id)
        is_urgent = NONE != transfer.needed_by <= plan_id
        return Job(transfer.transfer_id, "out" if is_out else "in", block_id, slot_id, transfer.needed_by, is_urgent, mark)

    def _exists(self, transfer: Transfer, job: Job) -> bool:
        return transfer.from_tier != transfer.to_tier and 0 <= job.block_id < self.num_blocks and 0 <= job.swap_slot_id < self.num_slots


class _Work:
    """What the caller and the background threads share. No method holds the lock while something is copied."""

    def __init__(self, copier: Copier | None) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._copier = copier
        self._changed = threading.Condition()  #: guards all below; notified when any of it changed
        self._order = TransferOrder()
        self._queued: dict[Direction, deque[tuple[_Batch, Copy]]] = {direction: deque() for direction in BOTH}  #: urgent, with the device
        self._done: dict[tuple[Direction, bool], Done] = {}
        self._is_closed = False
        self._failure: BaseException | None = None  #: what a thread died of: there is no one to copy any more
        self._log = get_logger("workers.swapper")

    def mark(self) -> object:
        return None if self._copier is None else self._copier.mark()

    def add(self, jobs: _Batch, refused: _Batch) -> None:
        """Threads that sleep are not woken yet, so that urgent copies have the memory to themselves: `hurry` must follow."""
        if refused:
            self._log.warning("transfers_refused", transfer_ids=[job.transfer_id for job in refused], reason="no such block or slot")
        with self._changed:
            for job in refused:
                self._report(job.direction, [job], ok=False, seconds=0.0)
            for job in jobs:
                self._order.add(job)

    def hurry(self, needed: _Batch) -> None:
        """Copies these now, after those that must be over before them; whatever else waits keeps waiting."""
        while True:
            with self._changed:
                while not (batch := self._order.start_any_of(self._order.with_those_ahead(needed))):
                    if all(self._order.has_started(job) if job.is_urgent else self._order.is_over(job) for job in needed):
                        self._changed.notify_all()
                        return
                    self._wait()  # some of them, or something ahead of them, is being copied in the background
            self._copy(batch, holds_forward=True)

    def wait_until_reported(self, jobs: _Batch) -> None:
        """Waits until these are over and reported."""
        with self._changed:
            while not all(self._order.is_over(job) for job in jobs):
                self._wait()

    def run_next(self, lane: Sequence[Direction]) -> bool:
        """Waits for something to do in the background, and does it. False when there will be nothing more."""
        with self._changed:
            while (found := self._next(lane)) is None:
                if self._is_closed:
                    return False
                self._changed.wait()
        batch, copy = found
        if copy is None:
            self._copy(batch, holds_forward=False)
        else:
            self._await_copy(batch, copy)
        return True

    def run_lane(self, lane: Sequence[Direction]) -> None:
        """A thread's whole life."""
        assert self._copier is not None
        try:
            self._copier.enter_thread()
            while self.run_next(lane):
                pass
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
                os.eventfd_write(self.wake_fd, 1)

    def take_done(self) -> list[Done]:
        with self._changed:
            self._raise_failure()
            done = list(self._done.values())
            self._done.clear()
            if done:
                os.eventfd_read(self.wake_fd)
        return done

    def reset(self) -> None:
        with self._changed:
            self._order.drop_waiting()
            while not self._order.is_idle:
                self._wait()
        self.take_done()

    def close(self, lanes: Sequence[threading.Thread]) -> None:
        with self._changed:
            self._is_closed = True
            self._order.drop_waiting()
            self._changed.notify_all()
        for lane in lanes:
            if lane is not threading.current_thread():  # where the last reference may have been dropped
                lane.join()
        if self._copier is not None:
            self._copier.close()
        self._done.clear()  # the number of the descriptor may soon be another's
        os.close(self.wake_fd)

    def _wait(self) -> None:
        self._raise_failure()
        self._changed.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("a thread that copies blocks has ended") from self._failure

    def _next(self, lane: Sequence[Direction]) -> tuple[_Batch, Copy | None] | None:
        for direction in lane:
            if self._queued[direction]:
                return self._queued[direction].popleft()
        batch = self._order.start(lane, self._copier.batch_blocks) if self._copier is not None else []
        return (batch, None) if batch else None

    def _copy(self, batch: _Batch, *, holds_forward: bool) -> None:
        """Copies what was started; if that raises, again one by one, to find out whose fault it was. Copying twice is harmless."""
        assert self._copier is not None
        direction = batch[0].direction
        try:
            injection.reach("transfer.copy")
            # The last of a batch has the newest mark, which comes after all others.
            copy = self._copier.start(direction, [job.places for job in batch], batch[-1].mark)
            if holds_forward:
                copy.hold_forward()
        except Exception:  # whatever it is, it must not end the worker or the thread
            self._log.exception("copy_failed", transfer_ids=[job.transfer_id for job in batch])
            if len(batch) == 1:
                return self._finish(batch, ok=False, seconds=0.0)
            for job in batch:
                self._copy([job], holds_forward=holds_forward)
            return
        if holds_forward and not copy.is_over():  # the device waits for it, this thread need not
            with self._changed:
                self._queued[direction].append((batch, copy))
                self._changed.notify_all()
        else:
            self._await_copy(batch, copy)

    def _await_copy(self, batch: _Batch, copy: Copy) -> None:
        """Waits for what was started, and reports it."""
        try:
            seconds = copy.wait()
            is_spoilt = injection.reach("transfer.copied")
        except Exception:
            self._log.exception("copy_failed", transfer_ids=[job.transfer_id for job in batch])
            self._finish(batch, ok=False, seconds=0.0)
        else:
            self._finish(batch, ok=not is_spoilt, seconds=seconds)

    def _finish(self, batch: _Batch, *, ok: bool, seconds: float) -> None:
        with self._changed:
            self._order.finish(batch)
            self._report(batch[0].direction, batch, ok=ok, seconds=seconds)
            self._changed.notify_all()

    def _report(self, direction: Direction, batch: _Batch, *, ok: bool, seconds: float) -> None:
        if not self._done:
            os.eventfd_write(self.wake_fd, 1)
        done = self._done.setdefault((direction, ok), Done(direction, ok))
        done.transfer_ids += (job.transfer_id for job in batch)
        done.seconds += seconds
