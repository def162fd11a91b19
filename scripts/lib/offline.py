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

#: A transfer that ends meanwhile is noticed so late.
LOOK_AGAIN_S = 0.0005

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
        "swap_bytes": 0,
        "max_model_len": 0,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "deterministic": "off",
        "num_threads": 0,
        "cpus": (),
        "log_format": "console",
        "log_level": "warning",
    }
    return WorkerConfig(**(settings | changes))  # type: ignore[arg-type]


class OfflineEngine(Engine):
    """The engine with a loaded model. Times are `time.perf_counter()`; `limits` are fields of `CoreConfig`.

    Pool, swap space and rates are the worker's own unless `limits` say less. One model may serve several engines,
    one after another.
    """

    def __init__(self, loaded: Loaded, *, check_invariants: bool = False, **limits: object) -> None:
        ready = loaded.ready
        measured = {
            "num_blocks": ready.num_blocks,
            "block_size": ready.block_size,
            "block_bytes": ready.block_bytes,
            "max_model_len": ready.max_model_len,
            "groups": ready.groups,
            "prefill_tok_s": ready.prefill_tok_s,
            "num_swap_slots": ready.num_swap_slots,
            "swap_out_bytes_s": ready.swap_out_bytes_s,
            "swap_in_bytes_s": ready.swap_in_bytes_s,
        }
        core = SchedulerCore(CoreConfig(**(measured | limits)))  # type: ignore[arg-type]
        # To the worker this core is a new scheduler: it forgets the rows and transfers of the engine before.
        worker = Worker(loaded.runner, ready.rank, core.config.epoch - 1)
        super().__init__(core, worker, time.perf_counter, _sleep, check_invariants=check_invariants)


def _sleep(until: float) -> None:
    time.sleep(max(0.0, min(until - time.perf_counter(), LOOK_AGAIN_S)))
