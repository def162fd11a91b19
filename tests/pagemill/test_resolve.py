"""Every `auto` and every combination: what the operator wrote against what the processes get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagemill.config import ServeOptions
from pagemill.errors import UsageError
from pagemill.machine import Machine
from pagemill.resolve import Model, Secrets, Settings, check_options, settle
from tests.pagemill.test_memory_plan import INFO

GIB = 1024**3
PLAIN = {"total_bytes": 16 * GIB, "available_bytes": 8 * GIB, "num_cpus": 2, "num_cores": 2, "has_bfloat16": False, "has_cuda": False}
MODEL = Model(name="m", path=Path("/models/m"), gguf_path=Path("/models/m.gguf"), fingerprint=b"f" * 32, info=INFO)
SECRETS = Secrets(api_keys=("sk-a",), admin_keys=(), cache_secret=b"s" * 32)


def settled(machine: dict[str, Any] | None = None, **options: Any) -> Settings:
    return settle(ServeOptions(**options), MODEL, Machine(**(PLAIN | (machine or {}))), SECRETS, reads_priority=False)


def test_a_plain_cpu_computes_in_float32_on_the_folder_s_weights() -> None:
    settings = settled()
    assert (settings.device, settings.dtype) == ("cpu", "float32")
    assert settings.worker.gguf_path == ""
    assert (settings.worker.block_size, settings.worker.max_num_batched_tokens) == (16, 512)
    assert settings.plan is not None
    assert settings.worker.num_blocks == settings.plan.num_blocks > 0
    assert settings.worker.max_model_len == settings.plan.max_model_len


def test_a_cpu_that_multiplies_bfloat16_uses_it() -> None:
    assert settled({"has_bfloat16": True}).dtype == "bfloat16"


def test_who_asks_for_float32_gets_the_gguf_file_itself() -> None:
    assert settled({"has_bfloat16": True}, dtype="float32").worker.gguf_path == "/models/m.gguf"
    assert settled(dtype="float32").worker.gguf_path == "/models/m.gguf"
    assert settled(dtype="bfloat16").worker.gguf_path == ""


def test_a_gpu_is_taken_unless_the_cpu_is_asked_for() -> None:
    settings = settled({"has_cuda": True})
    assert (settings.device, settings.dtype, settings.plan) == ("cuda", "bfloat16", None)
    assert (settings.worker.num_blocks, settings.worker.block_size, settings.worker.max_num_batched_tokens) == (0, 32, 8192)
    assert settled({"has_cuda": True}, device="cpu").device == "cpu"


def test_what_this_machine_cannot_do_is_refused() -> None:
    with pytest.raises(UsageError, match="--device cuda: no GPU"):
        settled(device="cuda")
    with pytest.raises(UsageError, match="--dtype float16 needs --device cuda"):
        settled(dtype="float16")


def test_small_machines_compute_on_every_processor_and_large_ones_on_every_core() -> None:
    assert settled({"num_cpus": 4, "num_cores": 2}).worker.num_threads == 4
    assert settled({"num_cpus": 32, "num_cores": 16}).worker.num_threads == 16


def test_names_and_switches_reach_their_process(tmp_path: Path) -> None:
    settings = settled(served_model_name=("a", "b"), prefix_caching=False, deterministic=True, event_log=str(tmp_path / "e"), check_invariants=True)
    assert settings.frontend.model_names == ("a", "b")
    assert settled().frontend.model_names == ("m",)
    assert not settings.frontend.prefix_caching
    assert not settings.scheduler.prefix_caching
    assert [settings.worker.deterministic, settled().worker.deterministic, settled(deterministic=False).worker.deterministic] == ["on", "auto", "off"]
    assert settings.scheduler.event_log == str(tmp_path / "e")
    assert settings.scheduler.check_invariants


def test_swap_space_reaches_the_worker_and_the_way_to_use_it_the_scheduler() -> None:
    swapping = settled(num_blocks=10, swap_memory=1_000_000, preemption="swap", max_plans_in_flight=2)
    assert swapping.worker.swap_bytes == swapping.swap.size_bytes == 1_000_000 // swapping.swap.slot_bytes * swapping.swap.slot_bytes
    assert (swapping.scheduler.preemption, swapping.scheduler.max_plans_in_flight) == ("swap", 2)
    usual = settled(num_blocks=10)
    assert usual.worker.swap_bytes == 20 * usual.swap.slot_bytes
    assert (usual.scheduler.preemption, usual.scheduler.max_plans_in_flight) == ("auto", 1)


def test_who_recomputes_needs_no_swap_space_unless_it_is_asked_for() -> None:
    assert settled(preemption="recompute").worker.swap_bytes == 0
    assert settled(preemption="recompute").swap.notes == ()
    assert settled(preemption="recompute", swap_memory=2**20).worker.swap_bytes == 2**20
    assert settled(swap_memory=0).worker.swap_bytes == 0


def test_beside_a_card_swap_space_is_host_memory() -> None:
    host = {"has_cuda": True, "available_bytes": 8 * GIB}
    usual = settled(host)
    assert usual.plan is None
    assert 3 * GIB < usual.worker.swap_bytes == usual.swap.size_bytes < 4 * GIB
    block_bytes = 2 * 2 * 2 * 16 * 2 * 32  # K and V, layers, KV heads, head_dim, bfloat16, tokens
    assert settled(host, num_blocks=10).swap.size_bytes == 20 * block_bytes
    assert settled(host, kv_cache_memory=10 * block_bytes).swap.size_bytes == 20 * block_bytes
    with pytest.raises(UsageError, match=r"--swap-memory asks for 8\.0 GiB, but 7\.5 GiB of memory are left"):
        settled(host, swap_memory=8 * GIB)


def test_swap_without_any_memory_left_for_it_is_refused() -> None:
    plan = settled(num_blocks=10).plan
    assert plan is not None
    full = {"available_bytes": plan.total_bytes - plan.swap.size_bytes}
    assert settled(full, num_blocks=10).worker.swap_bytes == 0
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
        ({"event_log": "/no/such/folder/log"}, "--event-log: the folder of /no/such/folder/log does not exist"),
    ],
)
def test_what_is_wrong_whatever_the_model_is_refused_first(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_options(ServeOptions(**options), {"fcfs": False, "static": False})


def test_good_options_pass() -> None:
    check_options(ServeOptions(block_size=16, num_blocks=1, max_model_len=2), {"fcfs": False})
