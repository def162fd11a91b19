"""From a `WorkerConfig` to a runner that is ready: read, check, pack, allocate the pool, warm up.

Everything that can be refused is refused before the weights are read. Knows no sockets; progress goes
out through a callback, so that tests and offline tools load a model exactly as the worker process does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvstore.arena import ArenaError, Region, map_region
from pagemill.arena_file import slot_bytes_for
from pagemill.config import WorkerConfig
from pagemill.errors import UsageError
from pagemill.ids import NONE, PlanId, RowId, SeqId, pack_ids
from pagemill.kv_groups import longest_sequence
from pagemill.messages.sequences import SamplingParams
from pagemill.messages.worker import InstallRow, Plan, Slice, WorkerReady
from pagemill.model_info import read_model_info
from pagemill.tensor_parallel import check_divides, kv_heads_per_rank, kv_shard
from workers import determinism
from workers.device import available_bytes, loading_allocations, open_device
from workers.gguf_weights import GgufCheckpoint
from workers.kernels import paged_attention
from workers.kv_cache import KvCache, KvSpec, attention_spec
from workers.layers import LayerBuilder
from workers.link_rate import LinkFailed, LinkRate, measure_link
from workers.model_config import ModelConfig, ModelRefused, read_config
from workers.models import Model, find_model
from workers.parallel import ALONE, TensorParallel, open_group
from workers.probe import DeviceFault
from workers.rows import RowBounds, RowTable
from workers.runner import Runner
from workers.swapper import Swapper
from workers.warm_up import compile_kernels
from workers.weights import Checkpoint, SafetensorsCheckpoint

#: (phase, fraction from 0 to 1, one line for people)
OnProgress = Callable[[str, float, str], object]

#: Share of the device's free memory that the pool takes when nobody said how much.
DEFAULT_POOL_SHARE = 0.5
#: Tokens of the first warm-up step; the timed one is as long as this many seconds allow.
WARMUP_TOKENS = 32
WARMUP_SECONDS = 0.5


@dataclass(frozen=True)
class Loaded:
    """A worker that can take plans, and what it tells the scheduler about itself."""

    runner: Runner
    ready: WorkerReady


def load(config: WorkerConfig, on_progress: OnProgress = lambda phase, fraction, detail: None, arena_fd: int = NONE, rendezvous: str = "") -> Loaded:
    """Loads the model of one rank, which swaps to its region of the arena if it is given one. Raises ModelRefused with a sentence for the operator.

    The caller owns `arena_fd` and may close it afterwards. One rank of several finds the others through the file `rendezvous`, waits for them, and
    raises PeerRankLost if one is lost.
    """
    device = open_device(config.device, config.rank, config.num_threads)
    dtype: torch.dtype = getattr(torch, config.dtype)
    model_config = read_config(Path(config.model_path))
    max_model_len = _max_model_len(config.max_model_len, model_config)
    _check_divides(config)
    num_kv_heads = kv_heads_per_rank(model_config.num_key_value_heads, config.num_workers)
    spec = attention_spec(model_config.windows, num_kv_heads, model_config.head_dim, config.block_size, dtype, config.device)
    deterministic = determinism.wanted(config.deterministic, dtype, device)
    if config.num_blocks or config.kv_cache_bytes:
        _longest(config, spec, _num_blocks(config, spec, 0), max_model_len)
    region = _map_arena(config, model_config, spec, arena_fd)
    for fraction, name in compile_kernels(dtype, device.type):  # before the others are met: the first start on a machine takes a while
        on_progress("kernels", fraction, name)
    parallel = open_group(config.rank, config.num_workers, rendezvous, device, ordered=deterministic)
    with region.populating() if region is not None else nullcontext():
        with loading_allocations():
            model, layers = _read_model(config, model_config, max_model_len, (dtype, device, deterministic, parallel), on_progress)
        on_progress("prepare", 0.0, "checking that results do not depend on the batch")
        deterministic = deterministic and _settle(config, layers, spec, parallel, model_config.hidden_size)
        num_blocks = _least(parallel, _num_blocks(config, spec, available_bytes(device) - _scratch_bytes(config, model_config, dtype)))
        max_model_len = _longest(config, spec, num_blocks, max_model_len)
        on_progress("prepare", 0.5, f"KV pool of {num_blocks} blocks, {num_blocks * spec.block_bytes / 2**20:.0f} MiB")
        bounds = RowBounds(model_config.tokenizer_vocab_size, num_blocks, config.block_size, max_model_len, spec.groups)
        kv_cache = _allocate_pool(spec, num_blocks, device)
        swapper = Swapper(kv_cache, _arena_slots(region, on_progress) if region is not None else None, writes_slots=_writes_slots(config, model_config))
        runner = Runner(model, kv_cache, swapper, RowTable(bounds), device, parallel)

    on_progress("warmup", 0.0, "")
    link = _measure_link(swapper, spec)
    ready = WorkerReady(
        rank=config.rank,
        num_blocks=num_blocks,
        block_size=config.block_size,
        block_bytes=spec.block_bytes,
        max_model_len=max_model_len,
        deterministic=deterministic,
        weight_bytes=layers.weight_bytes,
        prefill_tok_s=warm_up(runner, config.max_num_batched_tokens, parallel, is_memory_scarce=device.type != "cpu"),
        num_swap_slots=swapper.num_slots,
        swap_out_bytes_s=link.out_bytes_s,
        swap_in_bytes_s=link.in_bytes_s,
        groups=spec.groups,
    )
    on_progress("warmup", 1.0, f"{ready.prefill_tok_s:.0f} prompt tokens per second")
    return Loaded(runner, ready)


def _map_arena(config: WorkerConfig, model_config: ModelConfig, spec: KvSpec, arena_fd: int) -> Region | None:
    """The region of this rank's KV heads; other ranks that hold the same ones have it too."""
    if arena_fd == NONE or not config.swap_bytes:
        return None
    index, _ = kv_shard(config.rank, config.num_workers, model_config.num_key_value_heads)
    try:
        return map_region(arena_fd, index, config.swap_bytes, slot_bytes_for(spec.block_bytes))
    except ArenaError as error:
        raise ModelRefused(str(error)) from error


def _writes_slots(config: WorkerConfig, model_config: ModelConfig) -> bool:
    """Whether it is this rank that writes what goes to its region: the first of those that hold the same KV heads."""
    _, is_first = kv_shard(config.rank, config.num_workers, model_config.num_key_value_heads)
    return is_first


def _arena_slots(region: Region, on_progress: OnProgress) -> Tensor:
    """[num_slots, slot_bytes] uint8, every page of it resident."""
    size = f"{len(region.memory) / 2**20:.0f} MiB for {region.num_slots} blocks"
    try:
        region.wait_until_populated(lambda fraction: on_progress("swap", fraction, size))
    except ArenaError as error:
        raise ModelRefused(str(error)) from error
    return torch.frombuffer(region.memory, dtype=torch.uint8).view(region.num_slots, region.slot_bytes)


def _measure_link(swapper: Swapper, spec: KvSpec) -> LinkRate:
    try:
        return measure_link(swapper, spec.block_bytes)
    except LinkFailed as error:
        raise ModelRefused(str(error)) from error


def warm_up(runner: Runner, max_num_batched_tokens: int, parallel: TensorParallel = ALONE, *, is_memory_scarce: bool = False) -> float:
    """Runs prefill and decode once, so that nothing is compiled or first touched under load; tokens per second of prefill.

    Where memory is scarce the longest step is tried as well: what does not fit beside the pool is to fail now, and not whoever needs it first.
    """
    bounds = runner.rows.bounds
    longest = min(max_num_batched_tokens, bounds.max_model_len - 1, bounds.num_blocks * bounds.block_size - 1)
    _prefill_seconds(runner, min(WARMUP_TOKENS, longest))
    short = _prefill_seconds(runner, min(WARMUP_TOKENS, longest))
    timed = _least(parallel, max(1, min(longest, int(WARMUP_TOKENS * WARMUP_SECONDS / short))))
    rate = timed / _prefill_seconds(runner, timed)
    if is_memory_scarce and longest > timed:
        _try_longest(runner, longest)
    runner.rows.clear()
    return rate


def _try_longest(runner: Runner, num_tokens: int) -> None:
    try:
        _prefill_seconds(runner, num_tokens)
    except ModelRefused as error:
        raise ModelRefused(
            f"a step of {num_tokens} tokens fails where shorter ones do not: is there memory for it beside the KV pool?"
            " Lower --kv-cache-memory or --max-num-batched-tokens"
        ) from error


def _prefill_seconds(runner: Runner, num_tokens: int) -> float:
    """Times a prompt of `num_tokens`, then decodes one token behind it. Raises ModelRefused if the model cannot.

    All KV groups write to the same blocks, one over another: it does not matter what is drawn.
    """
    bounds = runner.rows.bounds
    row, blocks = RowId(0), list(range(-(-(num_tokens + 1) // bounds.block_size)))
    prompt = pack_ids([index % bounds.vocab_size for index in range(num_tokens)])
    runner.rows.clear()
    runner.rows.install(
        InstallRow(
            epoch=0, row=row, version=0, seq_id=SeqId(0), sampling=SamplingParams(temperature=0.0), seed=0,
            num_prompt_tokens=num_tokens, token_ids=prompt, block_tables=(pack_ids(blocks),) * len(bounds.groups),
        )
    )  # fmt: skip
    started = time.perf_counter()
    drawn = _run_slice(runner, Slice(row, 0, 0, num_tokens, True, b"", PlanId(NONE), ()))
    elapsed = time.perf_counter() - started
    _run_slice(runner, Slice(row, 0, num_tokens, 1, True, pack_ids([drawn]), PlanId(NONE), ()))
    return elapsed


def _run_slice(runner: Runner, piece: Slice) -> int:
    try:
        (result,), _ = runner.run(Plan(epoch=0, plan_id=PlanId(0), slices=(piece,), transfers=(), released_rows=()))
        reason = result.error
    except DeviceFault as fault:
        reason = str(fault)
    if reason:
        raise ModelRefused(f"the model does not produce a token in warm-up: {reason}; are its weights intact?")
    return result.token_ids[0]


def _read_model(
    config: WorkerConfig,
    model_config: ModelConfig,
    max_model_len: int,
    placement: tuple[torch.dtype, torch.device, bool, TensorParallel],
    on_progress: OnProgress,
) -> tuple[Model, LayerBuilder]:
    """Opens the checkpoint, builds the model from it, and closes it: nothing of the files stays mapped."""
    dtype, device, deterministic, parallel = placement
    model_class = find_model(model_config.architectures)
    checkpoint: Checkpoint
    if config.gguf_path:
        checkpoint = GgufCheckpoint(Path(config.gguf_path), model_config)
    else:
        checkpoint = SafetensorsCheckpoint(Path(config.model_path))
    progress = _ByteProgress(checkpoint.size_bytes // parallel.size, on_progress)
    try:
        layers = LayerBuilder(checkpoint, dtype=dtype, device=device, deterministic=deterministic, parallel=parallel, on_read=progress.add)
        return model_class(model_config, layers, max_model_len), layers
    except torch.cuda.OutOfMemoryError as error:
        raise ModelRefused(f"the weights in {config.dtype} do not fit into the memory of {device}") from error
    finally:
        checkpoint.close()


class _ByteProgress:
    """Turns bytes read into "weights" progress, one report per percent."""

    def __init__(self, total_bytes: int, on_progress: OnProgress) -> None:
        """`total_bytes` is about what will be read."""
        self._total, self._on_progress = max(total_bytes, 1), on_progress
        self._done = 0
        self._reported = -1

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._total = max(self._total, self._done)
        percent = 100 * self._done // self._total
        if percent > self._reported:
            self._reported = percent
            self._on_progress("weights", percent / 100, f"{self._done / 2**20:.0f} of {self._total / 2**20:.0f} MiB")


def _settle(config: WorkerConfig, layers: LayerBuilder, spec: KvSpec, parallel: TensorParallel, hidden_size: int) -> bool:
    try:
        return determinism.settle(config.deterministic, layers.linears, spec, parallel, hidden_size)
    except determinism.NotDeterministic as error:
        raise ModelRefused(f"--deterministic cannot be promised here: {error}") from error


def _check_divides(config: WorkerConfig) -> None:
    if config.num_workers == 1:
        return
    try:
        check_divides(read_model_info(Path(config.model_path)), config.num_workers)
    except UsageError as error:
        raise ModelRefused(str(error)) from error


def _least(parallel: TensorParallel, number: int) -> int:
    """The least of what ranks have measured, for they must do alike."""
    return int(parallel.exchange(torch.tensor([number])).min())


def _max_model_len(asked: int, model: ModelConfig) -> int:
    if asked > model.max_position_embeddings:
        raise ModelRefused(f"--max-model-len {asked} exceeds the {model.max_position_embeddings} positions the model knows")
    return asked or model.max_position_embeddings


def _longest(config: WorkerConfig, spec: KvSpec, num_blocks: int, limit: int) -> int:
    """The most positions, up to `limit`, that a sequence has room for. Raises ModelRefused where more were asked for."""
    longest = longest_sequence(spec.groups, num_blocks, config.block_size, limit)
    if config.max_model_len > longest:
        raise ModelRefused(
            f"--max-model-len {config.max_model_len} does not fit: the KV pool of {num_blocks} blocks holds {longest} tokens of one sequence;"
            f" lower it to {longest}, or raise {'--num-blocks' if config.num_blocks else '--kv-cache-memory'}"
        )
    return longest


def _scratch_bytes(config: WorkerConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """What a step needs beside the pool at once, however long the context."""
    num_kv_heads = kv_heads_per_rank(model.num_key_value_heads, config.num_workers)
    shape = (num_kv_heads, config.block_size, model.head_dim)
    return paged_attention.scratch_bytes(config.device, model.num_attention_heads // config.num_workers, shape, dtype)


def _allocate_pool(spec: KvSpec, num_blocks: int, device: torch.device) -> KvCache:
    try:
        return KvCache(spec, num_blocks, device)
    except torch.cuda.OutOfMemoryError as error:
        size, free = num_blocks * spec.block_bytes, available_bytes(device)
        raise ModelRefused(
            f"a KV pool of {size / 2**20:.0f} MiB does not fit into the {free / 2**20:.0f} MiB that {device} has left beside the weights"
        ) from error


def _num_blocks(config: WorkerConfig, spec: KvSpec, free_bytes: int) -> int:
    """`free_bytes` matters only where nobody said how large the pool is to be."""
    num_blocks = config.num_blocks or (config.kv_cache_bytes or int(max(0, free_bytes) * DEFAULT_POOL_SHARE)) // spec.block_bytes
    if num_blocks < len(spec.groups):
        raise ModelRefused(
            f"a KV pool of {num_blocks} blocks of {spec.block_bytes} bytes holds no token: each of {len(spec.groups)} groups of layers needs one"
        )
    return num_blocks
