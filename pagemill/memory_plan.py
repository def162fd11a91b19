"""Where the memory of a CPU server will go, decided before anything is loaded. Pure.

Weights, tables of positions, activations and overhead are estimated from the geometry, of all tensor-parallel ranks
together, for they share the machine; what is left is shared between the KV pool, swap space and the rest of it. Then
the longest sequence that fits is known. What cannot work is refused in one line that names the flag to change; what can work
after a reduction is reduced, and says so.
It must not know how memory is measured (`machine`), shown (`console`) or taken (the worker).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagemill.config import Device
from pagemill.errors import UsageError
from pagemill.kv_groups import PoolCapacity, longest_sequence, peak_blocks, pool_capacity
from pagemill.model_info import ModelInfo
from pagemill.swap_plan import SwapPlan, plan_swap
from pagemill.tensor_parallel import kv_heads_per_rank, num_kv_shards

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

MIB = 1024 * 1024
#: Interpreters, torch and buffers of all processes together; some 420 MiB were measured, with a tokenizer of 49,000 tokens.
OVERHEAD_BYTES = 416 * MIB
#: What a frontend's tokenizer takes for each entry of the vocabulary; 580 MB were measured for 262,144.
TOKENIZER_BYTES_PER_ID = 2200
#: What each further worker adds; 240 MiB of its own were measured beside the code of libraries, which all of them share.
RANK_OVERHEAD_BYTES = 256 * MIB


@dataclass(frozen=True)
class MemoryRequest:
    """What the operator asked for; 0 is automatic."""

    num_blocks: int
    kv_cache_bytes: int
    swap_bytes: int | None  #: None is automatic, 0 is none
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: Dtype
    num_ranks: int
    num_frontends: int


@dataclass(frozen=True)
class MemoryPlan:
    """Estimates in bytes, of all ranks together, and the two numbers that follow from them."""

    weight_bytes: int
    rotary_bytes: int
    activation_bytes: int
    kv_bytes: int
    overhead_bytes: int
    available_bytes: int
    block_bytes: int  #: every rank holds its part of each block
    num_blocks: int
    capacity: PoolCapacity  #: of the pool, in sequences of `max_model_len`
    max_model_len: int
    swap: SwapPlan
    notes: tuple[str, ...]  #: what was reduced, and why

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.rotary_bytes + self.activation_bytes + self.kv_bytes + self.swap.size_bytes + self.overhead_bytes


def plan_memory(info: ModelInfo, request: MemoryRequest, *, total_bytes: int, available_bytes: int) -> MemoryPlan:
    """Fits the model into what is available. Raises UsageError if it does not fit."""
    if request.max_model_len > info.context_length:
        raise UsageError(f"--max-model-len {request.max_model_len} is more than the {info.context_length} positions of the model; lower it")
    weight_bytes = weights_in_memory(info, request.dtype, request.num_ranks)
    activation_bytes = activations_in_memory(info, request)
    overhead_bytes = overhead_in_memory(info, request)
    block_bytes = rank_block_bytes(info, request) * request.num_ranks
    besides = rotary_in_memory(info, request, _longest_thinkable(info, request, block_bytes)) + activation_bytes + overhead_bytes
    free = available_bytes - weight_bytes - besides
    if free < block_bytes:
        smaller = "" if request.dtype != "float32" else "--dtype bfloat16 or "
        raise UsageError(
            f"{info.architecture} needs {_gib(weight_bytes)} for weights in {request.dtype} and {_gib(besides)} besides,"
            f" but {_gib(available_bytes)} of memory are available; use {smaller}a smaller model"
        )
    num_blocks = _num_blocks(info, request, block_bytes=block_bytes, free=free, total_bytes=total_bytes)
    swap = plan_swap_for(info, request, "cpu", num_blocks=num_blocks, free_bytes=free - num_blocks * block_bytes)
    longest = longest_sequence(info.groups, num_blocks, request.block_size, info.context_length)
    max_model_len = request.max_model_len or longest
    if max_model_len > longest:
        raise UsageError(
            f"--max-model-len {max_model_len} does not fit: the KV pool holds {longest} tokens"
            f" ({_gib(num_blocks * block_bytes)}); lower it to {longest}, or raise {_pool_flag(request)}"
        )
    if max_model_len < 1:
        raise UsageError(
            f"a KV pool of {num_blocks} blocks holds no token: each of the model's {len(info.groups)} groups of layers needs one; raise {_pool_flag(request)}"
        )
    notes = swap.notes
    if not request.max_model_len and max_model_len < info.context_length:
        reduced = f"max_model_len reduced from {info.context_length} to {max_model_len}: that is what the KV pool holds; raise {_pool_flag(request)} for more"
        notes = (reduced, *notes)
    return MemoryPlan(
        weight_bytes=weight_bytes,
        rotary_bytes=rotary_in_memory(info, request, max_model_len),
        activation_bytes=activation_bytes,
        kv_bytes=num_blocks * block_bytes,
        overhead_bytes=overhead_bytes,
        available_bytes=available_bytes,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        capacity=pool_capacity(info.groups, num_blocks, request.block_size, max_model_len),
        max_model_len=max_model_len,
        swap=swap,
        notes=notes,
    )


def weights_in_memory(info: ModelInfo, dtype: Dtype, num_ranks: int = 1) -> int:
    """A tied embedding counts twice: the table that is looked up, and the packed matrix of the output layer.

    Ranks divide the matrices and repeat what cannot be divided: norms, and KV heads that are fewer than they.
    """
    packed_again = info.vocab_size * info.hidden_size if info.tied_embeddings else 0
    norms = (2 * info.num_layers + 1) * info.hidden_size
    kv_projections = 2 * info.num_layers * info.hidden_size * info.num_kv_heads * info.head_dim
    kv_copies = kv_heads_per_rank(info.num_kv_heads, num_ranks) * num_ranks // info.num_kv_heads
    repeated = norms * (num_ranks - 1) + kv_projections * (kv_copies - 1)
    return (info.num_parameters + packed_again + repeated) * DTYPE_BYTES[dtype]


def rotary_in_memory(info: ModelInfo, request: MemoryRequest, max_model_len: int) -> int:
    """Cosines and sines of every position, in float32; every rank has them."""
    return info.num_rotary_tables * max_model_len * info.head_dim * 4 * request.num_ranks


def activations_in_memory(info: ModelInfo, request: MemoryRequest) -> int:
    """The widest moment of a step, in float32: one layer's intermediates, or the logits with their sorted copies, which every rank may have to gather."""
    num_ranks = request.num_ranks
    attention_width = (info.num_heads // num_ranks + 2 * kv_heads_per_rank(info.num_kv_heads, num_ranks)) * info.head_dim
    layer = request.max_num_batched_tokens * (4 * info.hidden_size + 2 * attention_width + 3 * info.intermediate_size // num_ranks)
    logits = 4 * request.max_num_seqs * info.vocab_size
    return 4 * max(layer, logits) * num_ranks


def overhead_in_memory(info: ModelInfo, request: MemoryRequest) -> int:
    """Of all processes."""
    tokenizers = request.num_frontends * info.vocab_size * TOKENIZER_BYTES_PER_ID
    return OVERHEAD_BYTES + tokenizers + (request.num_ranks - 1) * RANK_OVERHEAD_BYTES


def rank_block_bytes(info: ModelInfo, request: MemoryRequest) -> int:
    """One rank's part of a KV block."""
    of_all_heads = info.block_bytes(DTYPE_BYTES[request.dtype], request.block_size)
    return of_all_heads // info.num_kv_heads * kv_heads_per_rank(info.num_kv_heads, request.num_ranks)


def plan_swap_for(info: ModelInfo, request: MemoryRequest, device: Device, *, num_blocks: int, free_bytes: int) -> SwapPlan:
    """Swap space beside a pool of so many blocks; 0: nobody knows yet. Ranks with the same KV heads share a region. Raises UsageError."""
    return plan_swap(
        request.swap_bytes,
        device,
        block_bytes=rank_block_bytes(info, request),
        num_regions=num_kv_shards(request.num_ranks, info.num_kv_heads),
        num_blocks=num_blocks,
        free_bytes=free_bytes,
    )


def _longest_thinkable(info: ModelInfo, request: MemoryRequest, block_bytes: int) -> int:
    """No sequence will be longer, whatever the size of a pool that nobody asked for."""
    asked = request.num_blocks or request.kv_cache_bytes // block_bytes
    longest = longest_sequence(info.groups, asked, request.block_size, info.context_length) if asked else info.context_length
    return request.max_model_len or longest


def _num_blocks(info: ModelInfo, request: MemoryRequest, *, block_bytes: int, free: int, total_bytes: int) -> int:
    if request.num_blocks:
        wanted = request.num_blocks
    elif request.kv_cache_bytes:
        wanted = request.kv_cache_bytes // block_bytes
    else:
        length = request.max_model_len or info.context_length
        one_sequence = peak_blocks(info.groups, length, request.block_size, request.max_num_batched_tokens)
        beside_swap = max(free - (request.swap_bytes or 0), 0)
        share = min(beside_swap // 2, total_bytes // 4) // block_bytes
        useful = one_sequence * request.max_num_seqs
        at_least = one_sequence if request.max_model_len else len(info.groups)
        return max(min(share, useful), min(at_least, free // block_bytes))
    if wanted < 1:
        raise UsageError(f"--kv-cache-memory {request.kv_cache_bytes} holds no block: one of {request.block_size} tokens has {block_bytes} bytes; raise it")
    if wanted * block_bytes > free:
        raise UsageError(
            f"the KV pool asked for has {_gib(wanted * block_bytes)}, but {_gib(free)} are free after the weights;"
            f" lower {_pool_flag(request)} to {free // block_bytes if request.num_blocks else free}"
        )
    return wanted


def _pool_flag(request: MemoryRequest) -> str:
    return "--num-blocks" if request.num_blocks else "--kv-cache-memory"


def _gib(size_bytes: int) -> str:
    return f"{max(size_bytes, 0) / 1024**3:.1f} GiB" if abs(size_bytes) >= 1024**3 // 10 else f"{max(size_bytes, 0) / MIB:.1f} MiB"
