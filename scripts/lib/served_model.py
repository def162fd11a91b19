"""The model a benchmark runs, loaded in this process exactly as the server's worker would load it.

Options, model name and machine go through the same resolution as those of `pagemill serve`, so a number
measured here is about what people run. `exec_as_worker` gives the process the environment of a worker.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pagemill.arena_file import kept_arena, slot_bytes_for
from pagemill.config import Dtype, ServeOptions, WorkerConfig
from pagemill.kv_groups import peak_blocks
from pagemill.machine import read_machine
from pagemill.memory_plan import DTYPE_BYTES
from pagemill.messages.sequences import KvGroup
from pagemill.model_info import read_model_info
from pagemill.model_store import resolve
from pagemill.resolve import Model, Secrets, settle
from pagemill.telemetry import configure
from pagemill.threads import thread_environment, worker_threads
from scripts.lib.report import note
from scripts.lib.workloads import Workload
from workers.loader import Loaded, load


def exec_as_worker() -> None:
    """Starts this script again with the threads of a worker, unless it has them: OpenMP reads them once, when it is loaded.

    Logs go to standard error from here on, for standard output is the benchmark's.
    """
    threads = thread_environment(worker_threads(read_machine()))
    if any(os.environ.get(name) != value for name, value in threads.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | threads)
    configure("bench", "console", "warning")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """--model, --dtype, --deterministic and --seed."""
    parser.add_argument("--model", default=ServeOptions().model, help="as for `pagemill serve` (default: %(default)s)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="(default: %(default)s, as the server decides)")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, help="bit-equal tokens whatever the batch (default: as the server decides)")
    parser.add_argument("--seed", type=int, default=1, help="of the random prompts (default: %(default)s)")


@dataclass(frozen=True)
class ServedModel:
    """A loaded model and what it is called."""

    name: str
    dtype: Dtype
    loaded: Loaded

    @property
    def vocab_size(self) -> int:
        return self.loaded.runner.rows.bounds.vocab_size

    @property
    def engine(self) -> str:
        """The engine's name in a line: what it computes in, and whether it promises equal bits."""
        return f"pagemill {self.dtype}{' deterministic' if self.loaded.ready.deterministic else ''}"


def model_groups(name: str) -> tuple[KvGroup, ...]:
    """How its layers share block tables. Raises ModelError or UsageError with a sentence."""
    return read_model_info(resolve(name, lambda phase, fraction, detail: None).path).groups


def blocks_held(groups: Sequence[KvGroup], workload: Workload, block_size: int, max_num_batched_tokens: int) -> int:
    """KV blocks that all requests of a workload hold together at most: a pool of so many preempts nobody."""
    return workload.num_requests * peak_blocks(groups, workload.num_tokens, block_size, max_num_batched_tokens)


def load_model(name: str, *, num_swap_slots: int = 0, **options: object) -> ServedModel:
    """Loads a model with these fields of `ServeOptions`. Raises ModelError, UsageError or ModelRefused with a sentence."""
    found = resolve(name, lambda phase, fraction, detail: None)
    model = Model(found.name, found.path, found.gguf_path, found.fingerprint, read_model_info(found.path))
    worker = _settle(model, options)
    if num_swap_slots:
        block_bytes = model.info.block_bytes(DTYPE_BYTES[worker.dtype], worker.block_size)
        worker = _settle(model, options | {"swap_memory": num_swap_slots * slot_bytes_for(block_bytes)})
    with kept_arena(worker.swap_bytes) as arena_fd:
        served = ServedModel(found.name, worker.dtype, load(worker, arena_fd=arena_fd))
    ready = served.loaded.ready
    swap = f" and {ready.num_swap_slots} swap slots" if ready.num_swap_slots else ""
    note(f"{found.name}: {served.engine}, {ready.num_blocks} blocks{swap} of {ready.block_size} tokens, {worker.num_threads} threads")
    return served


def _settle(model: Model, options: Mapping[str, object]) -> WorkerConfig:
    """As the server decides, but without swap space unless it is asked for."""
    settings = msgspec.convert({"model": model.name, "log_level": "warning", "swap_memory": 0, **options}, ServeOptions)
    return settle(settings, model, read_machine(), Secrets((), (), b""), reads_priority=False).workers[0]
