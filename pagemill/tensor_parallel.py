"""How one model is divided among tensor-parallel ranks: pure arithmetic that launcher and workers share.

Query heads and the intermediate size are divided evenly. KV heads are divided too, or replicated where there are more
ranks than heads; ranks that hold the same KV heads hold equal KV, one *shard*. Anything else is refused with the numbers.
"""

from __future__ import annotations

from pagemill.errors import UsageError
from pagemill.model_info import ModelInfo

#: Shares of a vocabulary begin at multiples of this, which matrix products like.
VOCABULARY_UNIT = 8


def check_divides(info: ModelInfo, size: int) -> None:
    """Raises UsageError, which names sizes that work, if the model cannot be divided among `size` ranks."""
    if _divides(info, size):
        return
    possible = [str(other) for other in range(1, info.num_heads + 1) if _divides(info, other)]
    raise UsageError(
        f"--tensor-parallel-size {size}: {info.num_heads} attention heads, {info.num_kv_heads} KV heads and an intermediate size of"
        f" {info.intermediate_size} cannot be divided among {size} ranks; sizes that work: {', '.join(possible)}"
    )


def kv_heads_per_rank(num_kv_heads: int, size: int) -> int:
    """KV heads that each rank holds."""
    return max(1, num_kv_heads // size)


def first_kv_head(rank: int, size: int, num_kv_heads: int) -> int:
    """The first KV head that a rank holds."""
    return rank * num_kv_heads // size


def num_kv_shards(size: int, num_kv_heads: int) -> int:
    """Ranks that hold KV which no rank before them holds."""
    return min(size, num_kv_heads)


def kv_shard(rank: int, size: int, num_kv_heads: int) -> tuple[int, bool]:
    """Which shard of the KV a rank holds, and whether it is the first rank that does."""
    ranks_per_shard = size // num_kv_shards(size, num_kv_heads)
    return rank // ranks_per_shard, rank % ranks_per_shard == 0


def collective_environment() -> dict[str, str]:
    """What gloo and NCCL read when ranks connect: all of them are on this machine. For NCCL a name alone would be a prefix."""
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def _divides(info: ModelInfo, size: int) -> bool:
    heads_agree = info.num_kv_heads % size == 0 or size % info.num_kv_heads == 0
    has_tokens_for_all = -(-info.vocab_size // VOCABULARY_UNIT) >= size
    return info.num_heads % size == 0 and info.intermediate_size % size == 0 and heads_agree and has_tokens_for_all
