"""The model a benchmark runs, loaded in this process exactly as the server's worker would load it.

Options, model name and machine go through the same resolution as those of `pagemill serve`, so a number
measured here is about what people run. `exec_as_worker` gives the process the environment of a worker.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

import msgspec

from pagemill.config import Dtype, ServeOptions
from pagemill.machine import read_machine
from pagemill.model_info import read_model_info
from pagemill.model_store import resolve
from pagemill.resolve import Model, Secrets, settle
from pagemill.telemetry import configure
from pagemill.threads import thread_environment, worker_threads
from scripts.lib.report import note
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
    parser.add_argument(
        "--deterministic", action=argparse.BooleanOptionalAction, help="bit-equal tokens whatever the batch (default: as the server decides)"
    )
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


def load_model(name: str, **options: object) -> ServedModel:
    """Loads a model with these fields of `ServeOptions`. Raises ModelError, UsageError or ModelRefused with a sentence."""
    settings = msgspec.convert({"model": name, "log_level": "warning"} | options, ServeOptions)
    found = resolve(name, lambda phase, fraction, detail: None)
    model = Model(found.name, found.path, found.gguf_path, found.fingerprint, read_model_info(found.path))
    worker = settle(settings, model, read_machine(), Secrets((), (), b""), reads_priority=False).worker
    served = ServedModel(found.name, worker.dtype, load(worker))
    ready = served.loaded.ready
    note(f"{found.name}: {served.engine}, {ready.num_blocks} blocks of {ready.block_size} tokens, {worker.num_threads} threads")
    return served
