"""Copiers for tests: one that can be held up and made to fail, and one that works behind the caller's back as a device does."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from workers.copiers import Copy, HostCopier, Places
from workers.transfer_order import BOTH, Direction

DEADLINE_S = 20.0


class GatedCopier(HostCopier):
    """Copies for real. In the background only while `gate` is set, and never the places in `faulty`."""

    def __init__(self, blocks: Tensor, slots: Tensor) -> None:
        super().__init__(blocks, slots)
        self.gate = threading.Event()
        self.gate.set()
        self.faulty: set[tuple[Direction, int, int]] = set()
        self.copied: list[tuple[str, Direction, int, int]] = []  #: where ("here" is the thread of the test), and what, when it was over
        self.held_up = threading.Semaphore(0)  #: counts the background copies that have come to the gate
        self.before_copy: Callable[[], object] = lambda: None
        self._here = threading.current_thread()

    def start(self, direction: Direction, places: Sequence[Places], mark: object) -> Copy:
        is_here = threading.current_thread() is self._here
        if not is_here:
            self.held_up.release()
            assert self.gate.wait(DEADLINE_S)
        self.before_copy()
        if any((direction, *pair) in self.faulty for pair in places):
            raise RuntimeError("faulty")
        copy = super().start(direction, places, mark)
        self.copied += (("here" if is_here else "background", direction, *pair) for pair in places)
        return copy


class _Pending:
    """A copy that a `StreamCopier` will carry out."""

    def __init__(self, copier: StreamCopier, carry_out: Callable[[], object]) -> None:
        self._copier, self.carry_out = copier, carry_out
        self.over = threading.Event()

    def hold_forward(self) -> None:
        self._copier.held.append(self)

    def is_over(self) -> bool:
        return self.over.is_set()

    def wait(self) -> float:
        assert self.over.wait(DEADLINE_S)
        return 0.001


class StreamCopier:
    """As a device with two streams: `start` only queues, and what a forward must wait for is waited for in `forward`."""

    lanes: Sequence[Sequence[Direction]] = (("out",), ("in",))
    batch_blocks = 3

    def __init__(self, blocks: Tensor, slots: Tensor, seed: int = 0) -> None:
        self._host = HostCopier(blocks, slots[:, : blocks.shape[1]])
        self._queues: dict[Direction, queue.SimpleQueue[_Pending | None]] = {direction: queue.SimpleQueue() for direction in BOTH}
        self._draw = random.Random(seed)
        self.held: list[_Pending] = []
        self.num_unfinished_when_held = 0
        self._streams = [threading.Thread(target=self._run, args=(self._queues[direction],), daemon=True) for direction in BOTH]
        for stream in self._streams:
            stream.start()

    def enter_thread(self) -> None:
        pass

    def mark(self) -> object:
        return None

    def start(self, direction: Direction, places: Sequence[Places], mark: object) -> Copy:
        places = list(places)
        pending = _Pending(self, lambda: self._host.start(direction, places, mark))
        self._queues[direction].put(pending)
        return pending

    def forward(self) -> None:
        """What the device does before it computes."""
        for pending in self.held:
            self.num_unfinished_when_held += not pending.over.is_set()
            pending.wait()
        self.held.clear()

    def close(self) -> None:
        for direction in BOTH:
            self._queues[direction].put(None)
        for stream in self._streams:
            stream.join()

    def _run(self, pending: queue.SimpleQueue[_Pending | None]) -> None:
        while (copy := pending.get()) is not None:
            if self._draw.random() < 0.3:
                threading.Event().wait(0.0003)  # a device is busy with other things as well
            copy.carry_out()
            copy.over.set()
