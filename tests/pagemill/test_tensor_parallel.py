"""Who holds what of a divided model, and what cannot be divided."""

from __future__ import annotations

from itertools import groupby

import pytest
from msgspec import structs

from pagemill.errors import UsageError
from pagemill.model_info import ModelInfo
from pagemill.tensor_parallel import check_divides, first_kv_head, kv_heads_per_rank, kv_shard, num_kv_shards
from tests.pagemill.test_memory_plan import INFO

#: The default model's.
SMOLLM = structs.replace(INFO, num_heads=9, num_kv_heads=3, intermediate_size=1536)
WIDE = structs.replace(INFO, num_heads=8, num_kv_heads=4, intermediate_size=160)
ONE_KV_HEAD = structs.replace(INFO, num_heads=4, num_kv_heads=1, intermediate_size=2048)


def sizes(info: ModelInfo) -> list[int]:
    return [size for size in range(1, 20) if divides(info, size)]


def divides(info: ModelInfo, size: int) -> bool:
    try:
        check_divides(info, size)
    except UsageError:
        return False
    return True


def test_heads_and_the_intermediate_size_must_divide_and_kv_heads_may_be_repeated() -> None:
    assert sizes(SMOLLM) == [1, 3]
    assert sizes(WIDE) == [1, 2, 4, 8]
    assert sizes(ONE_KV_HEAD) == [1, 2, 4]
    assert sizes(structs.replace(WIDE, intermediate_size=162)) == [1, 2]
    assert sizes(structs.replace(WIDE, num_heads=12, num_kv_heads=4, intermediate_size=1200)) == [1, 2, 4, 12], "neither 3 nor 6 goes with 4 KV heads"


def test_every_rank_must_have_some_of_the_vocabulary() -> None:
    check_divides(structs.replace(WIDE, vocab_size=25), 4)
    with pytest.raises(UsageError, match=r"sizes that work: 1, 2$"):
        check_divides(structs.replace(WIDE, vocab_size=16), 4)


def test_a_refusal_names_the_numbers_and_the_sizes_that_work() -> None:
    with pytest.raises(UsageError) as refused:
        check_divides(SMOLLM, 2)
    assert str(refused.value) == (
        "--tensor-parallel-size 2: 9 attention heads, 3 KV heads and an intermediate size of 1536 cannot be divided among 2 ranks; sizes that work: 1, 3"
    )


@pytest.mark.parametrize(("size", "num_kv_heads"), [(1, 3), (3, 3), (2, 4), (4, 4), (8, 4), (4, 1), (12, 4)])
def test_every_kv_head_is_held_and_a_shard_is_what_ranks_with_the_same_heads_share(size: int, num_kv_heads: int) -> None:
    held = [range(first, first + kv_heads_per_rank(num_kv_heads, size)) for first in (first_kv_head(rank, size, num_kv_heads) for rank in range(size))]
    assert [head for heads, _ in groupby(held) for head in heads] == list(range(num_kv_heads))

    shards = [kv_shard(rank, size, num_kv_heads) for rank in range(size)]
    for rank, (shard, is_first) in enumerate(shards):
        assert [shard == other for other, _ in shards] == [held[rank] == heads for heads in held]
        assert is_first == (rank == 0 or held[rank] != held[rank - 1])
    assert sorted(shard for shard, is_first in shards if is_first) == list(range(num_kv_shards(size, num_kv_heads)))


def test_a_query_head_lives_with_the_kv_head_that_it_reads() -> None:
    for info, size in ((WIDE, 8), (WIDE, 4), (ONE_KV_HEAD, 4), (SMOLLM, 3)):
        per_rank, per_kv_head = info.num_heads // size, info.num_heads // info.num_kv_heads
        for head in range(info.num_heads):
            rank = head // per_rank
            first = first_kv_head(rank, size, info.num_kv_heads)
            assert head // per_kv_head in range(first, first + kv_heads_per_rank(info.num_kv_heads, size))
