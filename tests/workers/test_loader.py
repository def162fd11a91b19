"""Loading as the worker process does it: numbers reported, progress shown, refusals in one sentence."""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from kvstore.arena import ArenaError, Region
from pagemill.arena_file import create_arena
from pagemill.config import WorkerConfig
from pagemill.ids import NONE
from pagemill.memory_plan import MemoryRequest, plan_memory
from pagemill.messages.sequences import KvGroup
from pagemill.messages.worker import Plan, RowResult
from pagemill.model_info import read_model_info
from scripts.lib.offline import offline_config
from tests.helpers.ranks import close, load_ranks
from tests.helpers.tiny_model import tiny_checkpoint
from workers import loader, piecewise_attention
from workers.loader import load, warm_up
from workers.model_config import ModelRefused, read_config
from workers.probe import DeviceFault
from workers.runner import Runner
from workers.weights import Part, SafetensorsCheckpoint

SWAP_BYTES = 10 * 8192 + 4096  #: with blocks of eight tokens, ten slots and a page


def test_what_is_reported_is_what_was_made() -> None:
    loaded = load(offline_config(str(tiny_checkpoint("llama")), block_size=8, num_blocks=40))
    ready = loaded.ready
    assert (ready.num_blocks, ready.block_size) == (40, 8)
    assert ready.block_bytes == 3 * 2 * 4 * 8 * 8 * 4  # layers, K and V, heads, tokens, head size, float32
    assert loaded.runner.kv_cache.blocks.shape == (40, ready.block_bytes)
    assert ready.max_model_len == 320, "bounded by the pool"
    assert ready.prefill_tok_s > 0
    assert ready.num_swap_slots == 0
    assert len(loaded.runner.rows) == 0


@pytest.mark.parametrize(("kind", "dtype", "matrix_itemsize"), [("llama", "float32", 4), ("llama", "bfloat16", 2), ("bfloat16-shards", "float32", 2)])
def test_weight_bytes_are_those_held_in_memory(kind: str, dtype: str, matrix_itemsize: int) -> None:
    kept_plain = matrices = 0
    for name, tensor in load_file(tiny_checkpoint("llama") / "model.safetensors").items():
        if "norm" in name or "embed" in name:
            kept_plain += tensor.numel()
        else:
            matrices += tensor.numel()
    expected = matrix_itemsize * matrices + getattr(torch, dtype).itemsize * kept_plain
    assert load(offline_config(str(tiny_checkpoint(kind)), dtype=dtype)).ready.weight_bytes == expected


def held_by_tensors() -> dict[int, int]:
    """Bytes by address, of all tensors there are."""
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("kind", ["llama", "gemma3-vector-heads"])
def test_the_launcher_plans_for_every_tensor_that_loading_leaves(kind: str) -> None:
    before = held_by_tensors()
    loaded = load(offline_config(str(tiny_checkpoint(kind)), num_blocks=300))
    after = held_by_tensors()
    del after[loaded.runner.kv_cache.blocks.untyped_storage().data_ptr()]
    info = read_model_info(tiny_checkpoint(kind))
    request = MemoryRequest(
        num_blocks=300, kv_cache_bytes=0, swap_bytes=0, block_size=16, max_model_len=loaded.ready.max_model_len,
        max_num_seqs=64, max_num_batched_tokens=512, dtype="float32", num_ranks=1, num_frontends=1,
    )  # fmt: skip
    plan = plan_memory(info, request, total_bytes=2**40, available_bytes=2**40)
    held = sum(size for address, size in after.items() if address not in before)
    assert abs(held - plan.weight_bytes - plan.rotary_bytes) < 8192, "room for alignment"


@pytest.mark.parametrize(("asked", "given"), [(0, 4096), (1000, 1000)])
def test_the_length_is_the_models_own_unless_asked_for_less(asked: int, given: int) -> None:
    loaded = load(offline_config(str(tiny_checkpoint("llama")), max_model_len=asked, num_blocks=300))
    assert loaded.ready.max_model_len == given


def test_the_pool_is_sized_from_bytes_when_blocks_are_not_given() -> None:
    loaded = load(offline_config(str(tiny_checkpoint("llama")), block_size=8, num_blocks=0, kv_cache_bytes=1_000_000))
    assert loaded.ready.num_blocks == 1_000_000 // loaded.ready.block_bytes


def test_groups_are_those_of_the_layers_and_share_the_pool() -> None:
    loaded = load(offline_config(str(tiny_checkpoint("hybrid")), block_size=8, num_blocks=40))
    ready = loaded.ready
    assert ready.groups == (KvGroup(), KvGroup(window=20), KvGroup(window=20))
    assert ready.block_bytes == 2 * 2 * 4 * 8 * 8 * 4  # two layers of five, K and V, heads, tokens, head size, float32
    assert ready.max_model_len == (40 - 2 * 4) * 8, "a window of 20 tokens touches four blocks at most"


def test_a_window_does_not_limit_the_length() -> None:
    ready = load(offline_config(str(tiny_checkpoint("sliding-window")), block_size=8, num_blocks=4)).ready
    assert (ready.groups, ready.max_model_len) == ((KvGroup(window=20),), 4096)


def changed(tmp_path: Path, **changes: Any) -> str:
    folder = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "settings", "sentence"),
    [
        ({}, {"max_model_len": 4097}, "--max-model-len 4097 exceeds the 4096 positions"),
        ({"architectures": ["GrokForCausalLM"]}, {}, "the architecture GrokForCausalLM is not supported; supported are .*LlamaForCausalLM"),
        ({"architectures": []}, {}, "none named"),
        ({}, {"num_blocks": 0, "kv_cache_bytes": 100}, "KV pool of 0 blocks of 12288 bytes holds no token"),
        (
            {"model_type": "ministral", "sliding_window": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
            {"num_blocks": 2},
            "each of 3 groups",
        ),
        (
            {},
            {"num_blocks": 20, "max_model_len": 321},
            "--max-model-len 321 does not fit: the KV pool of 20 blocks holds 320 tokens of one sequence; lower it to 320, or raise --num-blocks",
        ),
        (
            {"model_type": "ministral", "sliding_window": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
            {"num_blocks": 20, "max_model_len": 225},
            "the KV pool of 20 blocks holds 224 tokens of one sequence",
        ),
        ({}, {"num_blocks": 0, "kv_cache_bytes": 20 * 12288, "max_model_len": 321}, "lower it to 320, or raise --kv-cache-memory"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, {}, "layers of the kind linear_attention are not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any], sentence: str) -> None:
    seen: list[str] = []
    with pytest.raises(ModelRefused, match=sentence):
        load(offline_config(changed(tmp_path, **changes), **settings), lambda phase, fraction, detail: seen.append(phase))
    assert "weights" not in seen


def test_a_length_beyond_what_a_device_turns_out_to_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.loader.available_bytes", lambda device: 40 * 12288)
    settings = {"num_blocks": 0, "kv_cache_bytes": 0}
    assert load(offline_config(str(tiny_checkpoint("llama")), max_model_len=320, **settings)).ready.max_model_len == 320
    with pytest.raises(ModelRefused, match=r"--max-model-len 321 does not fit: the KV pool of 20 blocks holds 320 tokens .*, or raise --kv-cache-memory"):
        load(offline_config(str(tiny_checkpoint("llama")), max_model_len=321, **settings))


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("LayerBuilder", "the weights in float32 do not fit into the memory of cpu"),
        ("KvCache", r"a KV pool of 3 MiB does not fit into the \d+ MiB that cpu has left"),
    ],
)
def test_what_a_device_has_no_memory_for_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch, what: str, sentence: str) -> None:
    def is_full(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")

    monkeypatch.setattr(loader, what, is_full)
    with pytest.raises(ModelRefused, match=sentence):
        load(offline_config(str(tiny_checkpoint("llama"))))


@pytest.mark.parametrize("is_memory_scarce", [True, False])
def test_where_memory_is_scarce_the_longest_step_is_tried_before_anybody_needs_it(monkeypatch: pytest.MonkeyPatch, is_memory_scarce: bool) -> None:
    runner = load(offline_config(str(tiny_checkpoint("llama")))).runner
    lengths: list[int] = []
    run = Runner.run

    def run_noted(self: Runner, plan: Plan) -> tuple[tuple[RowResult, ...], dict[str, float]]:
        lengths.extend(piece.num_tokens for piece in plan.slices)
        if lengths[-1] == 200:
            raise DeviceFault("CUDA out of memory")
        return run(self, plan)

    monkeypatch.setattr(Runner, "run", run_noted)
    monkeypatch.setattr(loader, "WARMUP_SECONDS", 0.0)
    warm_up(runner, 128, is_memory_scarce=is_memory_scarce)
    assert max(lengths) == (128 if is_memory_scarce else loader.WARMUP_TOKENS)
    assert len(runner.rows) == 0
    if is_memory_scarce:
        with pytest.raises(ModelRefused, match=r"a step of 200 tokens fails where shorter ones do not: .* Lower --kv-cache-memory or --max-num-batched-tokens"):
            warm_up(runner, 200, is_memory_scarce=True)


def test_the_pool_leaves_a_device_the_memory_that_attention_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_config(tiny_checkpoint("llama"))
    config = offline_config(str(tiny_checkpoint("llama")), num_workers=2)
    assert loader._scratch_bytes(config, model, torch.bfloat16) == 0, "on a CPU"
    needed = piecewise_attention.scratch_bytes(model.num_attention_heads // 2, model.num_key_value_heads // 2, model.head_dim, config.block_size, 2)
    assert loader._scratch_bytes(replace(config, device="cuda"), model, torch.bfloat16) == needed
    monkeypatch.setattr("workers.loader._scratch_bytes", lambda *_: 300 * 12288)
    monkeypatch.setattr("workers.loader.available_bytes", lambda device: 340 * 12288)
    assert load(offline_config(str(tiny_checkpoint("llama")), num_blocks=0, kv_cache_bytes=0)).ready.num_blocks == 20


@pytest.mark.parametrize("size", [3, 16])
def test_a_model_that_ranks_cannot_divide_is_refused_before_they_meet(size: int) -> None:
    seen: list[str] = []
    with pytest.raises(ModelRefused, match=rf"8 attention heads, 4 KV heads and an intermediate size of 160 .* among {size} ranks"):
        load(offline_config(str(tiny_checkpoint("llama")), rank=1, num_workers=size), lambda phase, fraction, detail: seen.append(phase))
    assert seen == []


def test_each_rank_reads_its_share_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_file(tiny_checkpoint("llama") / "model.safetensors")
    num_read: dict[str, list[int]] = {name: [] for name in whole}
    read = SafetensorsCheckpoint.read

    def count(self: SafetensorsCheckpoint, name: str, part: Part = ()) -> torch.Tensor:
        tensor = read(self, name, part)
        num_read[name].append(tensor.numel())
        return tensor

    monkeypatch.setattr(SafetensorsCheckpoint, "read", count)
    close(load_ranks(tiny_checkpoint("llama"), 4))
    for name, tensor in whole.items():
        each = tensor.numel() if "norm" in name else tensor.numel() // 4
        assert num_read[name] == [each] * 4, name


@pytest.mark.parametrize("size", [2, 8])
def test_progress_of_a_rank_is_that_of_its_own_share(size: int) -> None:
    fractions: dict[str, list[float]] = {}

    def note(phase: str, fraction: float, detail: str) -> None:
        if phase == "weights":
            fractions.setdefault(threading.current_thread().name, []).append(fraction)

    close(load_ranks(tiny_checkpoint("llama"), size, on_progress=note))
    assert len(fractions) == size
    for seen in fractions.values():
        assert seen == sorted(seen)
        assert 0.95 < seen[-1] <= 1.0


def test_ranks_agree_on_the_pool_and_say_what_each_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([3_000_000, 2_000_000])
    monkeypatch.setattr("workers.loader.available_bytes", lambda device: next(free))
    ranks = load_ranks(tiny_checkpoint("llama"), 2, block_size=8, num_blocks=0)
    close(ranks)
    assert [loaded.ready.rank for loaded in ranks] == [0, 1]
    for loaded in ranks:
        assert loaded.ready.block_bytes == 3 * 2 * 2 * 8 * 8 * 4, "half of the KV heads"
        assert loaded.ready.num_blocks == loaded.runner.kv_cache.num_blocks == 1_000_000 // loaded.ready.block_bytes


def test_broken_weights_are_noticed_in_warm_up(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    tensors = load_file(Path(folder) / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, Path(folder) / "model.safetensors")
    with pytest.raises(ModelRefused, match="are its weights intact"):
        load(offline_config(folder))


def test_a_model_that_raises_is_noticed_in_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr("workers.models.llama.Model.logits", fail)
    with pytest.raises(ModelRefused, match=r"does not produce a token in warm-up: .*: no kernel image is available; are its weights intact"):
        load(offline_config(str(tiny_checkpoint("llama"))))


@pytest.fixture
def arena_fd() -> Iterator[int]:
    fd = create_arena(2 * SWAP_BYTES)
    yield fd
    os.close(fd)


def with_arena(**settings: Any) -> WorkerConfig:
    return offline_config(str(tiny_checkpoint("llama")), **({"block_size": 8, "num_blocks": 40, "swap_bytes": SWAP_BYTES} | settings))


def test_an_arena_is_mapped_in_slots_and_resident_before_the_worker_is_ready(arena_fd: int) -> None:
    seen: list[tuple[str, float]] = []
    ready = load(with_arena(), lambda phase, fraction, detail: seen.append((phase, fraction)), arena_fd).ready
    assert ready.block_bytes == 6144
    assert ready.num_swap_slots == SWAP_BYTES // 8192 == 10, "a slot is whole pages"
    assert os.fstat(arena_fd).st_blocks * 512 == ready.num_swap_slots * 8192, "of its own region alone"
    assert list(dict.fromkeys(phase for phase, _ in seen)) == ["kernels", "weights", "prepare", "swap", "warmup"]
    fractions = [fraction for phase, fraction in seen if phase == "swap"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


@pytest.mark.parametrize(("swap_bytes", "given"), [(0, True), (SWAP_BYTES, False)])
def test_without_swap_bytes_or_without_an_arena_there_are_no_slots(arena_fd: int, swap_bytes: int, given: bool) -> None:
    assert load(with_arena(swap_bytes=swap_bytes), arena_fd=arena_fd if given else NONE).ready.num_swap_slots == 0
    assert os.fstat(arena_fd).st_blocks == 0


@pytest.mark.parametrize(("swap_bytes", "says"), [(4 * SWAP_BYTES, "bytes of the arena cannot be mapped"), (4096, "holds no block, which takes 8192")])
def test_an_arena_that_does_not_suit_is_refused_before_weights_are_read(arena_fd: int, swap_bytes: int, says: str) -> None:
    seen: list[str] = []
    with pytest.raises(ModelRefused, match=f"--swap-memory: .*{says}"):
        load(with_arena(swap_bytes=swap_bytes), lambda phase, fraction, detail: seen.append(phase), arena_fd)
    assert seen == []


@pytest.mark.parametrize(("kind", "num_regions"), [("llama", 2), ("one-kv-head", 1)])
def test_ranks_have_a_region_each_unless_they_hold_the_same_kv_head(arena_fd: int, kind: str, num_regions: int) -> None:
    ranks = load_ranks(tiny_checkpoint(kind), 2, arena_fd=arena_fd, block_size=8, num_blocks=40, swap_bytes=SWAP_BYTES)
    close(ranks)
    assert [loaded.ready.num_swap_slots for loaded in ranks] == [21, 21]
    assert os.fstat(arena_fd).st_blocks * 512 == num_regions * 21 * 4096


def test_an_arena_that_cannot_be_had_is_refused(arena_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Region, report: object) -> None:
        raise ArenaError("--swap-memory: no memory left")

    monkeypatch.setattr(Region, "wait_until_populated", refuse)
    with pytest.raises(ModelRefused, match="--swap-memory: no memory left"):
        load(with_arena(), arena_fd=arena_fd)


def test_a_model_that_fails_leaves_nobody_populating(tmp_path: Path, arena_fd: int) -> None:
    folder = changed(tmp_path, architectures=["GrokForCausalLM"])
    before = threading.active_count()
    with pytest.raises(ModelRefused, match="GrokForCausalLM"):
        load(offline_config(folder, swap_bytes=SWAP_BYTES), arena_fd=arena_fd)
    assert threading.active_count() == before


@pytest.mark.parametrize("kind", ["llama", "tied", "bfloat16-shards"])
def test_progress_names_its_phases_and_only_grows(kind: str) -> None:
    seen: list[tuple[str, float]] = []
    load(offline_config(str(tiny_checkpoint(kind))), lambda phase, fraction, detail: seen.append((phase, fraction)))
    assert list(dict.fromkeys(phase for phase, _ in seen)) == ["kernels", "weights", "prepare", "warmup"]
    for phase in ("kernels", "weights", "prepare", "warmup"):
        fractions = [fraction for name, fraction in seen if name == phase]
        assert fractions == sorted(fractions)
        assert 0.0 <= fractions[0] <= fractions[-1] <= 1.0
    assert max(fraction for phase, fraction in seen if phase == "weights") > 0.98


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind; mapped weights can be dropped by the kernel and do not count."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def test_loading_holds_little_more_than_one_copy_of_the_weights(tmp_path: Path) -> None:
    layers, width = 32, 8192
    small = load_file(tiny_checkpoint("llama") / "model.safetensors")
    folder = changed(tmp_path, num_hidden_layers=layers, intermediate_size=width)
    tensors = {name: tensor for name, tensor in small.items() if not name.startswith("model.layers.")}
    for layer in range(layers):
        for name, tensor in small.items():
            if name.startswith("model.layers.0.") and ".mlp." not in name:
                tensors[name.replace("layers.0.", f"layers.{layer}.")] = tensor.clone()
        for name, shape in (("gate", (width, 64)), ("up", (width, 64)), ("down", (64, width))):
            tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"] = torch.randn(shape) * 0.01
    save_file(tensors, Path(folder) / "model.safetensors")
    del tensors, small
    load(offline_config(str(tiny_checkpoint("wide-heads"))))  # what compiling kernels takes is not the point here
    gc.collect()
    before = peak = anonymous_bytes()

    def look(phase: str, fraction: float, detail: str) -> None:
        nonlocal peak
        peak = max(peak, anonymous_bytes())

    loaded = load(offline_config(folder, num_blocks=16), look)
    assert loaded.ready.weight_bytes > 190 * 2**20
    assert peak - before < 1.25 * loaded.ready.weight_bytes
