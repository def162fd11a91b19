"""Admission: what can ever run, and what does not fit into the queue now.

"Cannot run now" means waiting; "can never run" means a rejection with both numbers, at once. Nothing here
changes state.
"""

from __future__ import annotations

from pagemill.ids import ID_BYTES, num_ids
from pagemill.keys import KEY_BYTES
from pagemill.messages.frontend import AddRequest, Rejection
from scheduler.core_config import CoreConfig


def reject(request: AddRequest, config: CoreConfig, capacity_tokens: int, num_waiting: int, num_waiting_tokens: int) -> Rejection | None:
    """Why the request will not run, or None. `capacity_tokens` is what an otherwise empty pool holds of one sequence."""
    num_prompt_tokens, num_output_tokens = num_ids(request.prompt_ids), num_ids(request.output_ids)
    num_tokens = num_prompt_tokens + num_output_tokens
    num_full_blocks = num_prompt_tokens // config.block_size
    if len(request.prompt_ids) % ID_BYTES or len(request.output_ids) % ID_BYTES or not num_prompt_tokens:
        return Rejection(request.key, "invalid", 0, 0)
    if num_output_tokens >= request.limits.max_tokens:
        return Rejection(request.key, "invalid", num_output_tokens + 1, request.limits.max_tokens)
    if request.root and len(request.prefix_keys) != num_full_blocks * KEY_BYTES:
        return Rejection(request.key, "invalid", num_full_blocks * KEY_BYTES, len(request.prefix_keys))
    if num_tokens + 1 > config.max_model_len:
        return Rejection(request.key, "exceeds_model_length", num_tokens + 1, config.max_model_len)
    if num_tokens + 1 > capacity_tokens:
        return Rejection(request.key, "exceeds_kv_cache", num_tokens + 1, capacity_tokens)
    if request.resubmitted:
        return None
    if num_waiting >= config.max_num_queued:
        return Rejection(request.key, "queue_full", num_waiting + 1, config.max_num_queued)
    if num_waiting and num_waiting_tokens + num_prompt_tokens > config.max_queued_tokens:
        return Rejection(request.key, "queue_tokens", num_waiting_tokens + num_prompt_tokens, config.max_queued_tokens)
    return None
