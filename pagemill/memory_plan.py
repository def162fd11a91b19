"""Where the memory of a CPU server will go, decided before anything is loaded. Pure.

Weights, activations and overhead are estimated from the geometry; what is left is shared between the KV
pool, swap space and the rest of the machine. Then the longest sequence that fits is known. What cannot work is refused
in one line that names the flag to change; what can work after a reduction is reduced, and says so.
It must not know how memory is measured (`machine`), shown (`console`) or taken (the worker).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagemill.errors import UsageError
from pagemill.model_info import ModelInfo
from pagemill.swap_plan import SwapPlan, plan_swap

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

MIB = 1024 * 1024
#: Interpreters, torch, tokenizer and buffers of all processes together; some 420 MiB were measured.
OVERHEAD_BYTES = 512 * MIB


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


@dataclass(frozen=True)
class MemoryPlan:
    """Estimates in bytes, and the two numbers that follow from them."""

    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    overhead_bytes: int
    available_bytes: int
    block_bytes: int
    num_blocks: int
    num_slots: int  #: tokens that the pool holds
    max_model_len: int
    swap: SwapPlan
    notes: tuple[str, ...]  #: what was reduced, and why

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes + self.swap.size_bytes + self.overhead_bytes


def plan_memory(info: ModelInfo, request: MemoryRequest, *, total_bytes: int, available_bytes: int) -> MemoryPlan:
    """Fits the model into what is available. Raises UsageError if it does not fit."""
    model_limit, notes = _model_limit(info, request)
    weight_bytes = weights_in_memory(info, request.dtype)
    activation_bytes = activations_in_memory(info, request)
    free = available_bytes - weight_bytes - activation_bytes - OVERHEAD_BYTES
    block_bytes = info.kv_bytes_per_token(DTYPE_BYTES[request.dtype]) * request.block_size
    if free < block_bytes:
        smaller = "" if request.dtype != "float32" else "--dtype bfloat16 or "
        raise UsageError(
            f"{info.architecture} needs {_gib(weight_bytes)} for weights in {request.dtype} and {_gib(activation_bytes + OVERHEAD_BYTES)} besides,"
            f" but {_gib(available_bytes)} of memory are available; use {smaller}a smaller model"
        )
    num_blocks = _num_blocks(request, model_limit, block_bytes=block_bytes, free=free, total_bytes=total_bytes)
    swap = plan_swap(request.swap_bytes, "cpu", block_bytes=block_bytes, pool_bytes=num_blocks * block_bytes, free_bytes=free - num_blocks * block_bytes)
    num_slots = num_blocks * request.block_size
    max_model_len = request.max_model_len or min(model_limit, num_slots)
    if max_model_len > num_slots:
        raise UsageError(
            f"--max-model-len {max_model_len} does not fit: the KV pool holds {num_slots} tokens"
            f" ({_gib(num_blocks * block_bytes)}); lower it to {num_slots}, or raise {_pool_flag(request)}"
        )
    if max_model_len < model_limit and not request.max_model_len:
        notes += (f"max_model_len reduced from {model_limit} to {max_model_len}: that is what the KV pool holds; raise {_pool_flag(request)} for more",)
    return MemoryPlan(
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        kv_bytes=num_blocks * block_bytes,
        overhead_bytes=OVERHEAD_BYTES,
        available_bytes=available_bytes,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        num_slots=num_slots,
        max_model_len=max_model_len,
        swap=swap,
        notes=notes + swap.notes,
    )


def weights_in_memory(info: ModelInfo, dtype: Dtype) -> int:
    """A tied embedding counts twice: the table that is looked up, and the packed matrix of the output layer."""
    packed_again = info.vocab_size * info.hidden_size if info.tied_embeddings else 0
    return (info.num_parameters + packed_again) * DTYPE_BYTES[dtype]


def activations_in_memory(info: ModelInfo, request: MemoryRequest) -> int:
    """The widest moment of a step, in float32: one layer's intermediates, or the logits with their sorted copies."""
    attention_width = (info.num_heads + 2 * info.num_kv_heads) * info.head_dim
    layer = request.max_num_batched_tokens * (4 * info.hidden_size + 2 * attention_width + 3 * info.intermediate_size)
    logits = 4 * request.max_num_seqs * info.vocab_size
    return 4 * max(layer, logits)


def _model_limit(info: ModelInfo, request: MemoryRequest) -> tuple[int, tuple[str, ...]]:
    """The longest sequence the model itself allows, which an explicit length may not exceed."""
    if request.max_model_len > info.context_length:
        raise UsageError(f"--max-model-len {request.max_model_len} is more than the {info.context_length} positions of the model; lower it")
    window = info.sliding_window
    if not window or window >= info.context_length:
        return info.context_length, ()
    if request.max_model_len > window:
        raise UsageError(f"sliding-window attention is not supported: --max-model-len may be at most the window of {window} tokens")
    return window, (f"the model's sliding window limits max_model_len to {window}: sliding-window attention is not supported",)


def _num_blocks(request: MemoryRequest, model_limit: int, *, block_bytes: int, free: int, total_bytes: int) -> int:
    if request.num_blocks:
        wanted = request.num_blocks
    elif request.kv_cache_bytes:
        wanted = request.kv_cache_bytes // block_bytes
    else:
        length = request.max_model_len or model_limit
        one_sequence = _blocks_for(length, request.block_size)
        beside_swap = max(free - (request.swap_bytes or 0), 0)
        share = min(beside_swap // 2, total_bytes // 4) // block_bytes
        useful = one_sequence * request.max_num_seqs
        at_least = one_sequence if request.max_model_len else 1
        return max(min(share, useful), min(at_least, free // block_bytes))
    if wanted < 1:
        raise UsageError(f"--kv-cache-memory {request.kv_cache_bytes} holds no block: one of {request.block_size} tokens has {block_bytes} bytes; raise it")
    if wanted * block_bytes > free:
        raise UsageError(
            f"the KV pool asked for has {_gib(wanted * block_bytes)}, but {_gib(free)} are free after the weights;"
            f" lower {_pool_flag(request)} to {free // block_bytes if request.num_blocks else free}"
        )
    return wanted


def _blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _pool_flag(request: MemoryRequest) -> str:
    return "--num-blocks" if request.num_blocks else "--kv-cache-memory"


def _gib(size_bytes: int) -> str:
    return f"{max(size_bytes, 0) / 1024**3:.1f} GiB" if abs(size_bytes) >= 1024**3 // 10 else f"{max(size_bytes, 0) / MIB:.1f} MiB"
