"""The engine with a real model: `Engine` driven by a worker that is loaded as the worker process loads it.

    engine = OfflineEngine(load(worker_config), max_num_batched_tokens=512)
    key = engine.add(prompt_ids, max_tokens=64)
    engine.run()
    engine.outputs[key].token_ids
"""

from __future__ import annotations

import time

from pagemill.config import WorkerConfig
from scheduler.core import SchedulerCore
from scheduler.core_config import CoreConfig
from scripts.lib.engine import GREEDY, Engine, Output
from workers.loader import Loaded
from workers.process import Worker

__all__ = ["GREEDY", "OfflineEngine", "Output", "offline_config"]


def offline_config(model_path: str, **changes: object) -> WorkerConfig:
    """A worker's settings for a CPU, float32, and a pool of 4,096 tokens unless `changes` say otherwise."""
    settings: dict[str, object] = {
        "rank": 0,
        "num_workers": 1,
        "model_path": model_path,
        "gguf_path": "",
        "device": "cpu",
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": 256,
        "kv_cache_bytes": 0,
        "max_model_len": 0,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "deterministic": "off",
        "num_threads": 0,
        "log_format": "console",
        "log_level": "warning",
    }
    return WorkerConfig(**(settings | changes))  # type: ignore[arg-type]


class OfflineEngine(Engine):
    """The engine with a loaded model. Times are `time.perf_counter()`; `limits` are fields of `CoreConfig`."""

    def __init__(self, loaded: Loaded, *, check_invariants: bool = False, **limits: object) -> None:
        ready = loaded.ready
        numbers = {"num_blocks": ready.num_blocks, "block_size": ready.block_size, "max_model_len": ready.max_model_len} | limits
        core = SchedulerCore(CoreConfig(**numbers))  # type: ignore[arg-type]
        loaded.runner.rows.clear()
        worker = Worker(loaded.runner, ready.rank, core.config.epoch)
        super().__init__(core, worker, time.perf_counter, check_invariants=check_invariants)
