"""Every `auto` and every combination: what the operator wrote against what the processes get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagemill.config import ServeOptions
from pagemill.errors import UsageError
from pagemill.machine import Machine
from pagemill.resolve import Model, Secrets, Settings, check_options, settle
from tests.pagemill.test_memory_plan import INFO

GIB = 1024**3
PLAIN: dict[str, Any] = {"total_bytes": 16 * GIB, "available_bytes": 8 * GIB, "num_cpus": 2, "cores": ((0,), (1,)), "has_bfloat16": False, "num_gpus": 0}
MODEL = Model(name="m", path=Path("/models/m"), gguf_path=Path("/models/m.gguf"), fingerprint=b"f" * 32, info=INFO)
SECRETS = Secrets(api_keys=("sk-a",), admin_keys=(), cache_secret=b"s" * 32)


def settled(machine: dict[str, Any] | None = None, **options: Any) -> Settings:
    return settle(ServeOptions(**options), MODEL, Machine(**(PLAIN | (machine or {}))), SECRETS, reads_priority=False)


def test_a_plain_cpu_computes_in_float32_on_the_folder_s_weights() -> None:
    settings = settled()
    assert (settings.device, settings.dtype) == ("cpu", "float32")
    assert settings.workers[0].gguf_path == ""
    assert (settings.workers[0].block_size, settings.workers[0].max_num_batched_tokens) == (16, 512)
    assert settings.plan is not None
    assert settings.workers[0].num_blocks == settings.plan.num_blocks > 0
    assert settings.workers[0].max_model_len == settings.plan.max_model_len


def test_a_cpu_that_multiplies_bfloat16_uses_it() -> None:
    assert settled({"has_bfloat16": True}).dtype == "bfloat16"


def test_who_asks_for_float32_gets_the_gguf_file_itself() -> None:
    assert settled({"has_bfloat16": True}, dtype="float32").workers[0].gguf_path == "/models/m.gguf"
    assert settled(dtype="float32").workers[0].gguf_path == "/models/m.gguf"
    assert settled(dtype="bfloat16").workers[0].gguf_path == ""


def test_a_gpu_is_taken_unless_the_cpu_is_asked_for() -> None:
    settings = settled({"num_gpus": 1})
    assert (settings.device, settings.dtype, settings.plan) == ("cuda", "bfloat16", None)
    assert (settings.workers[0].num_blocks, settings.workers[0].block_size, settings.workers[0].max_num_batched_tokens) == (0, 32, 8192)
    assert settled({"num_gpus": 1}, device="cpu").device == "cpu"


def test_what_this_machine_cannot_do_is_refused() -> None:
    with pytest.raises(UsageError, match="--device cuda: no GPU"):
        settled(device="cuda")
    with pytest.raises(UsageError, match="--deterministic is promised on the CPU only"):
        settled({"num_gpus": 1}, deterministic=True)
    with pytest.raises(UsageError, match="--dtype float16 needs --device cuda"):
        settled(dtype="float16")


def test_small_machines_compute_on_every_processor_and_large_ones_on_every_core() -> None:
    assert settled({"num_cpus": 4, "cores": ((0, 2), (1, 3))}).workers[0].num_threads == 4
    assert settled({"num_cpus": 32, "cores": tuple((core, core + 16) for core in range(16))}).workers[0].num_threads == 16


def test_each_rank_gets_its_own_worker_with_a_share_of_threads_processors_and_pool() -> None:
    settings = settled({"num_cpus": 4, "cores": ((0, 2), (1, 3))}, tensor_parallel_size=2, num_blocks=10)
    assert settings.scheduler.num_workers == 2
    assert [(worker.rank, worker.num_workers, worker.num_threads, worker.cpus) for worker in settings.workers] == [(0, 2, 2, (0, 2)), (1, 2, 2, (1, 3))]
    first, second = settings.workers
    assert msgspec.structs.replace(second, rank=0, cpus=first.cpus) == first
    assert settings.plan is not None
    assert (first.num_blocks, 2 * first.kv_cache_bytes) == (10, settings.plan.kv_bytes)
    assert 2 * first.swap_bytes == settings.swap.size_bytes == 20 * 2 * settings.swap.slot_bytes


def test_more_ranks_than_kv_heads_share_regions_of_the_arena() -> None:
    settings = settled(tensor_parallel_size=4, num_blocks=10)
    assert settings.swap.num_regions == 2
    assert 2 * settings.workers[3].swap_bytes == settings.swap.size_bytes
    assert {(worker.num_threads, worker.cpus) for worker in settings.workers} == {(1, ())}, "four cannot have two cores for themselves"


def test_a_rank_on_a_gpu_runs_on_any_processor_and_has_its_part_of_the_pool() -> None:
    settings = settled({"num_gpus": 2}, tensor_parallel_size=2, kv_cache_memory=2**20)
    assert [(worker.device, worker.cpus, worker.kv_cache_bytes) for worker in settings.workers] == [("cuda", (), 2**19)] * 2


def test_a_size_that_model_or_machine_cannot_have_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        UsageError, match="4 attention heads, 2 KV heads and an intermediate size of 128 cannot be divided among 3 ranks; sizes that work: 1, 2, 4"
    ):
        settled(tensor_parallel_size=3)
    with pytest.raises(UsageError, match=r"--tensor-parallel-size 2 needs as many GPUs, one for each rank, but there is 1; lower it, or take --device cpu"):
        settled({"num_gpus": 1}, tensor_parallel_size=2)
    with pytest.raises(UsageError, match="but there are 2;"):
        settled({"num_gpus": 2}, tensor_parallel_size=4)
    assert settled({"num_gpus": 1}, tensor_parallel_size=2, device="cpu").device == "cpu"


def test_names_and_switches_reach_their_process(tmp_path: Path) -> None:
    settings = settled(served_model_name=("a", "b"), prefix_caching=False, deterministic=True, event_log=str(tmp_path / "e"), check_invariants=True)
    assert settings.frontend.model_names == ("a", "b")
    assert settled().frontend.model_names == ("m",)
    assert not settings.frontend.prefix_caching
    assert not settings.scheduler.prefix_caching
    assert [settings.workers[0].deterministic, settled().workers[0].deterministic, settled(deterministic=False).workers[0].deterministic] == [
        "on",
        "auto",
        "off",
    ]
    assert settings.scheduler.event_log == str(tmp_path / "e")
    assert settings.scheduler.check_invariants


def test_swap_space_reaches_the_worker_and_the_way_to_use_it_the_scheduler() -> None:
    swapping = settled(num_blocks=10, swap_memory=1_000_000, preemption="swap", max_plans_in_flight=2)
    assert swapping.workers[0].swap_bytes == swapping.swap.size_bytes == 1_000_000 // swapping.swap.slot_bytes * swapping.swap.slot_bytes
    assert (swapping.scheduler.preemption, swapping.scheduler.max_plans_in_flight) == ("swap", 2)
    usual = settled(num_blocks=10)
    assert usual.workers[0].swap_bytes == 20 * usual.swap.slot_bytes
    assert (usual.scheduler.preemption, usual.scheduler.max_plans_in_flight) == ("auto", 1)


def test_who_recomputes_needs_no_swap_space() -> None:
    assert settled(preemption="recompute").workers[0].swap_bytes == 0
    assert settled(preemption="recompute").swap.notes == ()
    assert settled(swap_memory=0).workers[0].swap_bytes == 0


def test_beside_a_card_swap_space_is_host_memory() -> None:
    host = {"num_gpus": 1, "available_bytes": 8 * GIB}
    usual = settled(host)
    assert usual.plan is None
    assert 3 * GIB < usual.workers[0].swap_bytes == usual.swap.size_bytes < 4 * GIB
    block_bytes = 2 * 2 * 2 * 16 * 2 * 32  # K and V, layers, KV heads, head_dim, bfloat16, tokens
    assert settled(host, num_blocks=10).swap.size_bytes == 20 * block_bytes
    assert settled(host, kv_cache_memory=10 * block_bytes).swap.size_bytes == 20 * block_bytes
    with pytest.raises(UsageError, match=r"--swap-memory asks for 8\.0 GiB, but 7\.6 GiB of memory are left"):
        settled(host, swap_memory=8 * GIB)


def test_swap_without_any_memory_left_for_it_is_refused() -> None:
    plan = settled(num_blocks=10).plan
    assert plan is not None
    full = {"available_bytes": plan.total_bytes - plan.swap.size_bytes}
    assert settled(full, num_blocks=10).workers[0].swap_bytes == 0
    with pytest.raises(UsageError, match="--preemption swap: no swap space: 0 bytes of memory are left"):
        settled(full, num_blocks=10, preemption="swap")


def test_no_secret_shows_in_what_is_printed() -> None:
    settings = settled()
    assert settings.frontend.api_keys == ("sk-a",)
    assert "sk-a" not in repr(settings) + repr(SECRETS) + str(settings.frontend)
    assert repr(SECRETS.cache_secret) not in repr(settings) + repr(SECRETS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scheduling_policy": "lifo"}, "--scheduling-policy accepts one of fcfs, static; not 'lifo'"),
        ({"block_size": 24}, "--block-size accepts auto or a power of two up to 256; not 24"),
        ({"max_model_len": 1}, "--max-model-len accepts auto or at least 2"),
        ({"num_blocks": 1, "kv_cache_memory": 1}, "--num-blocks and --kv-cache-memory both size the KV pool"),
        ({"preemption": "swap", "swap_memory": 0}, "--preemption swap has nowhere to swap to with --swap-memory 0; take a size or auto"),
        ({"preemption": "recompute", "swap_memory": 2**20}, "--swap-memory is taken for nothing with --preemption recompute"),
        ({"shared_prefix_cache": True, "prefix_caching": False}, "--shared-prefix-cache has nothing to share with --no-prefix-caching"),
        ({"max_connections": 3, "frontends": 4}, "--max-connections 3 is less than one for each of --frontends 4"),
        ({"log_requests": True, "log_level": "warning"}, "--log-requests writes at level info, which --log-level warning leaves out"),
        ({"event_log": "/no/such/folder/log"}, "--event-log: the folder of /no/such/folder/log does not exist"),
        ({"event_log": "/tmp"}, "--event-log: /tmp is a folder; name a file"),
    ],
)
def test_what_is_wrong_whatever_the_model_is_refused_first(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_options(ServeOptions(**options), {"fcfs": False, "static": False})


def test_good_options_pass() -> None:
    check_options(ServeOptions(block_size=16, num_blocks=1, max_model_len=2), {"fcfs": False})
    check_options(ServeOptions(preemption="recompute", swap_memory=0, log_requests=True, log_level="debug", max_connections=2, frontends=2), {"fcfs": False})
