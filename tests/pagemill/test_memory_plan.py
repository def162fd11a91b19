"""The memory plan: what fits, what is reduced, and how a refusal reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from pagemill.errors import UsageError
from pagemill.memory_plan import OVERHEAD_BYTES, RANK_OVERHEAD_BYTES, TOKENIZER_BYTES_PER_ID, MemoryPlan, MemoryRequest, plan_memory
from pagemill.model_info import ModelInfo

GIB = 1024**3
INFO = ModelInfo(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=1000,
    context_length=4096,
    windows=(0, 0),
    num_rotary_tables=1,
    tied_embeddings=True,
    eos_token_ids=(2,),
    num_parameters=1_000_000,
    weight_bytes=2_000_000,
)
AUTO = MemoryRequest(
    num_blocks=0,
    kv_cache_bytes=0,
    swap_bytes=None,
    block_size=16,
    max_model_len=0,
    max_num_seqs=4,
    max_num_batched_tokens=512,
    dtype="float32",
    num_ranks=1,
    num_frontends=1,
)
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16  # K and V, layers, KV heads, head_dim, float32, tokens


def plan(info: ModelInfo = INFO, available: int = 8 * GIB, total: int = 16 * GIB, **changes: object) -> MemoryPlan:
    return plan_memory(info, replace(AUTO, **changes), total_bytes=total, available_bytes=available)  # type: ignore[arg-type]


def test_weights_count_in_the_type_they_are_served_in_and_tied_ones_twice() -> None:
    assert plan().weight_bytes == 4 * (1_000_000 + 64 * 1000)
    assert plan(dtype="bfloat16").weight_bytes == 2 * (1_000_000 + 64 * 1000)
    assert plan(info=structs.replace(INFO, tied_embeddings=False)).weight_bytes == 4_000_000


def test_the_pool_is_never_larger_than_its_users_can_fill() -> None:
    assert plan().num_blocks == 4 * 4096 // 16
    assert plan().max_model_len == 4096
    assert plan().notes == ()


def test_the_default_pool_takes_half_of_what_is_free_and_a_quarter_of_the_machine_at_most() -> None:
    free = 40 * 2**20
    assert plan(available=free_for(free), max_num_seqs=64).kv_bytes == free // 2
    quarter = plan(total=32 * 2**20, max_num_seqs=4096)
    assert quarter.kv_bytes == 8 * 2**20


def test_a_small_pool_shortens_the_longest_sequence_and_says_so() -> None:
    fitted = plan(num_blocks=10)
    assert (fitted.num_blocks, fitted.capacity, fitted.max_model_len) == (10, (160, 1.0), 160)
    assert fitted.notes == ("max_model_len reduced from 4096 to 160: that is what the KV pool holds; raise --num-blocks for more",)


def test_a_pool_in_bytes_is_rounded_down_to_blocks() -> None:
    assert plan(kv_cache_bytes=3 * BLOCK_BYTES + 1).num_blocks == 3
    assert plan(kv_cache_bytes=3 * BLOCK_BYTES).block_bytes == BLOCK_BYTES


def test_an_explicit_length_makes_the_default_pool_as_large_as_it_needs() -> None:
    tight = plan(total=1 * 2**20, max_model_len=4096)
    assert tight.num_blocks == 256
    assert plan(total=1 * 2**20).num_blocks < 256


def test_the_plan_adds_up() -> None:
    made = plan()
    assert made.swap.size_bytes > 0
    parts = made.weight_bytes, made.rotary_bytes, made.activation_bytes, made.num_blocks * BLOCK_BYTES, made.swap.size_bytes, made.overhead_bytes
    assert made.total_bytes == sum(parts)
    assert made.total_bytes <= made.available_bytes


def test_every_frontend_has_a_tokenizer_which_a_large_vocabulary_makes_large() -> None:
    assert plan().overhead_bytes == OVERHEAD_BYTES + 1000 * TOKENIZER_BYTES_PER_ID
    assert plan(num_frontends=3).overhead_bytes == OVERHEAD_BYTES + 3000 * TOKENIZER_BYTES_PER_ID
    gemma = plan(info=structs.replace(INFO, vocab_size=262_144))
    assert 540 * 2**20 < gemma.overhead_bytes - OVERHEAD_BYTES < 600 * 2**20


def free_for(size: int, num_positions: int = 4096) -> int:
    """What must be available for `size` bytes to be left after everything else, where no sequence can be longer."""
    return plan().weight_bytes + num_positions * 16 * 4 + plan().activation_bytes + plan().overhead_bytes + size


def test_the_default_swap_space_is_twice_the_pool_or_half_of_what_is_left() -> None:
    assert plan(num_blocks=10).swap.num_slots == 20
    tight = plan(available=free_for(100 * BLOCK_BYTES, 960), num_blocks=60, max_num_seqs=4)
    assert tight.swap.num_slots == 20
    full = plan(available=free_for(10 * BLOCK_BYTES, 160), num_blocks=10)
    assert full.swap.num_slots == 0
    assert full.notes[-1].startswith("no swap space: 0 bytes")


def test_swap_space_that_is_asked_for_leaves_less_to_the_default_pool() -> None:
    swapping = plan(available=free_for(100 * BLOCK_BYTES), swap_bytes=40 * BLOCK_BYTES)
    assert (swapping.swap.num_slots, swapping.num_blocks) == (40, 30)
    nearly_all = plan(available=free_for(100 * BLOCK_BYTES), swap_bytes=99 * BLOCK_BYTES)
    assert (nearly_all.swap.num_slots, nearly_all.num_blocks) == (99, 1)
    assert plan(available=free_for(100 * BLOCK_BYTES), swap_bytes=0).num_blocks == 50


def test_ranks_divide_weights_and_blocks_and_repeat_the_rest() -> None:
    one, two = plan(num_blocks=10), plan(num_blocks=10, num_ranks=2)
    norms = (2 * 2 + 1) * 64
    assert two.weight_bytes == one.weight_bytes + 4 * norms
    assert (two.block_bytes, two.kv_bytes) == (one.block_bytes, one.kv_bytes), "each holds one of the two KV heads"
    assert (two.swap.num_regions, two.swap.slot_bytes, two.swap.size_bytes) == (2, BLOCK_BYTES // 2, one.swap.size_bytes)
    assert two.overhead_bytes == one.overhead_bytes + RANK_OVERHEAD_BYTES
    assert one.activation_bytes < two.activation_bytes <= 2 * one.activation_bytes
    assert two.rotary_bytes == 2 * one.rotary_bytes
    parts = two.weight_bytes, two.rotary_bytes, two.activation_bytes, two.kv_bytes, two.swap.size_bytes, two.overhead_bytes
    assert two.total_bytes == sum(parts)


def test_ranks_that_hold_the_same_kv_heads_each_have_them_in_the_pool_and_share_them_in_the_arena() -> None:
    two, four = plan(num_blocks=10, num_ranks=2), plan(num_blocks=10, num_ranks=4)
    assert four.block_bytes == 2 * two.block_bytes
    kv_projections = 2 * 2 * 64 * 2 * 16
    assert four.weight_bytes == two.weight_bytes + 4 * (2 * (2 * 2 + 1) * 64 + kv_projections)
    assert four.swap == two.swap


def test_tables_of_positions_are_as_long_as_a_sequence_and_as_many_as_there_are_ropes() -> None:
    gemma = structs.replace(INFO, num_layers=6, windows=(64, 64, 0, 64, 64, 0), head_dim=256, context_length=32768, num_rotary_tables=2)
    assert plan(info=gemma).rotary_bytes == 2 * 32768 * 256 * 4 == 64 * 2**20
    assert plan(info=gemma, max_model_len=1024).rotary_bytes == 2 * 2**20
    assert plan(info=gemma, num_blocks=40).rotary_bytes == 2 * plan(info=gemma, num_blocks=40).max_model_len * 256 * 4
    assert plan(num_blocks=10).rotary_bytes == 160 * 16 * 4


def test_tables_that_a_small_pool_keeps_short_take_nothing_from_it() -> None:
    assert plan(available=free_for(10 * BLOCK_BYTES, 160), num_blocks=10, swap_bytes=0).num_blocks == 10
    with pytest.raises(UsageError, match="lower --num-blocks to 9"):
        plan(available=free_for(10 * BLOCK_BYTES - 1, 160), num_blocks=10, swap_bytes=0)


@pytest.mark.parametrize(
    ("num_positions", "changes"),
    [
        (4096, {"swap_bytes": 100 * BLOCK_BYTES}),
        (51 * 16, {"swap_bytes": 50 * BLOCK_BYTES, "num_blocks": 51}),
        (256, {"swap_bytes": 90 * BLOCK_BYTES, "max_model_len": 256}),
    ],
)
def test_swap_space_that_does_not_fit_beside_the_pool_is_refused(num_positions: int, changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"--swap-memory asks for .* GiB, but .* GiB of memory are left beside weights and KV pool"):
        plan(available=free_for(100 * BLOCK_BYTES, num_positions), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"available": 100 * 2**20}, "needs 4.1 MiB for weights in float32 and .* are available; use --dtype bfloat16 or a smaller model"),
        ({"available": 100 * 2**20, "dtype": "bfloat16"}, "are available; use a smaller model"),
        ({"max_model_len": 4097}, "--max-model-len 4097 is more than the 4096 positions of the model; lower it"),
        ({"max_model_len": 200, "num_blocks": 10}, "--max-model-len 200 does not fit: the KV pool holds 160 tokens .*; lower it to 160, or raise --num-blocks"),
        ({"kv_cache_bytes": BLOCK_BYTES - 1}, "--kv-cache-memory 8191 holds no block"),
        ({"kv_cache_bytes": 9 * GIB}, "the KV pool asked for has 9.0 GiB, but .* are free after the weights; lower --kv-cache-memory to"),
        ({"num_blocks": 2**30}, "lower --num-blocks to"),
    ],
)
def test_what_cannot_work_is_refused_with_the_flag_to_change(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        plan(**changes)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_layers_with_a_window_need_few_blocks_for_a_long_sequence() -> None:
    hybrid = structs.replace(INFO, num_layers=6, windows=(64, 64, 0, 64, 64, 0))
    made = plan(info=hybrid, num_blocks=40, max_num_batched_tokens=16)
    assert made.block_bytes == BLOCK_BYTES, "of two layers, as all groups have them"
    # Two window groups hold five blocks each when a window of 64 positions ends within a block; 30 are left.
    assert made.max_model_len == 30 * 16
    assert made.capacity == (40 * 16 * 30 // 40, 1.0)
    assert plan(info=hybrid).num_blocks == 4 * (256 + 2 * 37), "each group has what a chunk and a window before it can touch"


def test_a_model_of_windows_alone_is_not_limited_by_the_pool() -> None:
    windowed = structs.replace(INFO, windows=(64, 64))
    assert plan(info=windowed, num_blocks=5).max_model_len == 4096
    assert plan(info=windowed, num_blocks=4).max_model_len == 64
    with pytest.raises(UsageError, match=r"--max-model-len 65 does not fit: the KV pool holds 64 tokens .*; lower it to 64, or raise --num-blocks"):
        plan(info=windowed, num_blocks=4, max_model_len=65)


def test_a_pool_without_a_block_for_each_group_is_refused() -> None:
    hybrid = structs.replace(INFO, num_layers=6, windows=(64, 64, 0, 64, 64, 0))
    with pytest.raises(UsageError, match="a KV pool of 2 blocks holds no token: each of the model's 3 groups of layers needs one; raise --num-blocks"):
        plan(info=hybrid, num_blocks=2)
    assert plan(info=hybrid, num_blocks=3).max_model_len == 16
