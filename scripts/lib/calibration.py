"""What steps and copies cost on this machine, as the simulator wants to know it: measured on a loaded model.

A few decode steps of several sizes, a long prompt in chunks, and decodes behind it, from which `CpuCost.fitted` has
its five numbers. Takes some ten seconds with a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pagemill.kv_groups import longest_sequence, peak_blocks
from pagemill.messages.worker import Plan, SchedulerToWorker, TransferDone, WorkerToScheduler
from scripts.lib.costs import LinkCost, Work
from scripts.lib.engine import AnyWorker
from scripts.lib.offline import OfflineEngine
from scripts.lib.served_model import ServedModel
from scripts.lib.workloads import Workload
from workers.loader import Loaded

#: One copy thread serves both directions, and takes a share of the memory bandwidth that forwards live on.
_BOTH_SHARE = 0.5
_PER_BLOCK_S = 30e-6
_COMPUTE_SHARE = 0.25
_DECODE_STEPS = 4

#: What a step computed and how many seconds that took.
Sample = tuple[list[Work], float]


class RecordingWorker:
    """Passes everything on and keeps what each plan computes."""

    def __init__(self, worker: AnyWorker) -> None:
        self._worker = worker
        self.works: list[list[Work]] = []

    def poll(self) -> Sequence[TransferDone]:
        return self._worker.poll()

    def handle(self, message: SchedulerToWorker) -> Sequence[WorkerToScheduler]:
        if isinstance(message, Plan):
            self.works.append([Work(piece.start, piece.num_tokens, piece.sample) for piece in message.slices])
        return self._worker.handle(message)


def measure_steps(served: ServedModel, max_num_batched_tokens: int, longest_prompt: int) -> list[Sample]:
    """Steps of all kinds, for `CpuCost.fitted`. Prompts are no longer than `longest_prompt` and than half the pool holds."""
    ready = served.loaded.ready
    longest = longest_sequence(ready.groups, ready.num_blocks // 2, ready.block_size, min(longest_prompt, ready.max_model_len))
    longest = max(2, longest - 2 * _DECODE_STEPS)
    samples: list[Sample] = []
    for workload in (Workload(1, 1, _DECODE_STEPS), Workload(4, 8, _DECODE_STEPS), Workload(16, 8, _DECODE_STEPS), Workload(1, longest, _DECODE_STEPS)):
        one_request = peak_blocks(ready.groups, workload.num_tokens, ready.block_size, max_num_batched_tokens)
        if workload.num_requests * one_request <= ready.num_blocks:
            samples += _run(served, workload, max_num_batched_tokens)
    return samples


def link_cost(loaded: Loaded) -> LinkCost:
    """From the rates that the worker measured when it was loaded."""
    ready = loaded.ready
    if not ready.num_swap_slots:
        raise ValueError("a worker without swap space has measured no link")
    return LinkCost(ready.swap_out_bytes_s, ready.swap_in_bytes_s, _BOTH_SHARE, _PER_BLOCK_S, _COMPUTE_SHARE)


def _run(served: ServedModel, workload: Workload, max_num_batched_tokens: int) -> list[Sample]:
    engine = OfflineEngine(served.loaded, max_num_batched_tokens=max_num_batched_tokens, num_swap_slots=0)
    recording = RecordingWorker(engine.worker)
    engine.worker = recording
    for request in workload.requests(seed=0, vocab_size=served.vocab_size):
        engine.add(request.prompt_ids, max_tokens=request.num_output_tokens, prefix_caching=False)
    times = [engine.clock()]
    while engine.step():
        times.append(engine.clock())
    return [(works, end - start) for works, (start, end) in zip(recording.works, pairwise(times), strict=True)]
