"""Bits do not depend on the batch: through two whole decoder layers, and as the start-up check sees it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from workers import determinism
from workers.determinism import NotDeterministic
from workers.kernels.act_and_mul import act_and_mul
from workers.kernels.paged_attention import paged_attention
from workers.kernels.rms_norm import add_rms_norm, rms_norm
from workers.kernels.rotary import rotary
from workers.kernels.store_kv import store_kv
from workers.kv_cache import KvCache, attention_spec, full_attention_spec
from workers.linear import PackedLinear
from workers.parallel import TensorParallel

CPU = torch.device("cpu")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, BLOCK_SIZE, LAYERS = 96, 3, 1, 32, 160, 16, 2


@dataclass
class Sequence:
    tokens: Tensor  #: [num_tokens, HIDDEN], what an embedding would give
    blocks: list[int]
    num_computed: int = 0


class Stack:
    """Two decoder layers made of the real parts, with a pool of its own."""

    def __init__(self, dtype: torch.dtype, windows: tuple[int, int], num_blocks: int) -> None:
        self.windows = windows
        generator = torch.Generator().manual_seed(3)

        def linear(out: int, inner: int) -> PackedLinear:
            return PackedLinear((torch.randn((out, inner), generator=generator) / inner**0.5).to(dtype), None, deterministic=True)

        heads = HEADS + 2 * KV_HEADS
        self.layers = [
            (linear(heads * HEAD_DIM, HIDDEN), linear(HIDDEN, HEADS * HEAD_DIM), linear(2 * INNER, HIDDEN), linear(HIDDEN, INNER)) for _ in range(LAYERS)
        ]
        self.weight = torch.rand(HIDDEN, generator=generator).to(dtype) + 0.5
        angles = torch.arange(700)[:, None] / 50 ** torch.arange(0, 1, 2 / HEAD_DIM)
        self.table = torch.cat((angles.cos(), angles.sin()), -1)
        self.cache = KvCache(full_attention_spec(LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype), num_blocks)

    def step(self, work: list[tuple[Sequence, int]]) -> list[Tensor]:
        """Computes the next `count` tokens of each sequence in one batch; returns their rows."""
        counts = [count for _, count in work]
        positions = [torch.arange(s.num_computed, s.num_computed + count) for s, count in work]
        slots = torch.cat([torch.tensor(s.blocks)[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for (s, _), p in zip(work, positions, strict=True)])
        hidden = torch.cat([s.tokens[p] for (s, _), p in zip(work, positions, strict=True)])
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        contexts = torch.tensor([s.num_computed + count for s, count in work], dtype=torch.int32)
        tables = torch.zeros((len(work), max(len(s.blocks) for s, _ in work)), dtype=torch.int32)
        for i, (sequence, count) in enumerate(work):
            tables[i, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
            sequence.num_computed += count
        residual, hidden = hidden.clone(), rms_norm(hidden, self.weight, 1e-5)
        for i, (qkv, out, gate_up, down) in enumerate(self.layers):
            merged = qkv(hidden).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
            query, key, value = merged.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            rotary(query, key, torch.cat(positions), self.table)
            store_kv(key, value, self.cache.layer(i), slots)
            mixed = paged_attention(query, self.cache.layer(i), starts, contexts, tables, HEAD_DIM**-0.5, self.windows[i])
            hidden = add_rms_norm(out(mixed.flatten(1)), residual, self.weight, 1e-5)
            hidden = add_rms_norm(down(act_and_mul(gate_up(hidden), "silu")), residual, self.weight, 1e-5)
        return list(hidden.split(counts))


@pytest.mark.parametrize(("dtype", "windows"), [(torch.float32, (0, 300)), (torch.bfloat16, (40, 0))])
def test_rows_have_equal_bits_in_any_batch_chunking_and_placement(dtype: torch.dtype, windows: tuple[int, int]) -> None:
    generator, chance = torch.Generator().manual_seed(4), random.Random(5)
    lengths = [1, 2, 16, 17, 90, 255, 257, 530]
    prompts = [torch.randn((length, HIDDEN), generator=generator).to(dtype) for length in lengths]
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths) + 5
    stack = Stack(dtype, windows, num_blocks)
    solo = [stack.step([(Sequence(prompt, list(range(-(-len(prompt) // BLOCK_SIZE)))), len(prompt))])[0] for prompt in prompts]
    for most in (1, 7, 64, 300):
        stack.cache.blocks.fill_(0xFF)  # NaN in every slot that is not written again
        free = chance.sample(range(num_blocks), num_blocks)
        sequences = [Sequence(p, [free.pop() for _ in range(-(-len(p) // BLOCK_SIZE))]) for p in prompts]
        if most == 1:
            sequences = sequences[:5]
        rows: list[list[Tensor]] = [[] for _ in sequences]
        while unfinished := [i for i, s in enumerate(sequences) if s.num_computed < len(s.tokens)]:
            chosen = chance.sample(unfinished, chance.randint(1, len(unfinished)))
            work = [(s, min(chance.randint(1, most), len(s.tokens) - s.num_computed)) for s in (sequences[i] for i in chosen)]
            for i, computed in zip(chosen, stack.step(work), strict=True):
                rows[i].append(computed)
        for parts, expected in zip(rows, solo, strict=False):
            assert torch.equal(torch.cat(parts), expected)


class Drifting(PackedLinear):
    """A linear whose results depend on the number of rows, as libraries that choose kernels by shape."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * (1 + 1e-6 * (len(x) > 32))


@pytest.fixture
def make_linear() -> Callable[[type[PackedLinear]], tuple[str, PackedLinear]]:
    weight = torch.randn((48, 64), generator=torch.Generator().manual_seed(6))
    return lambda kind: ("layers.0.mlp.down_proj", kind(weight, None, True))


def test_check_passes_on_row_independent_linears_and_attention(make_linear: Callable[[type[PackedLinear]], tuple[str, PackedLinear]]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert determinism.settle("on", [make_linear(PackedLinear)], full_attention_spec(1, 2, 64, 16, dtype))


def test_drifting_linear_is_refused_by_name_and_shape_when_asked_for(make_linear: Callable[[type[PackedLinear]], tuple[str, PackedLinear]]) -> None:
    with pytest.raises(NotDeterministic, match=r"layers\.0\.mlp\.down_proj \(48 x 64\)"):
        determinism.settle("on", [make_linear(PackedLinear), make_linear(Drifting)][1:])


def test_drifting_linear_turns_auto_off(make_linear: Callable[[type[PackedLinear]], tuple[str, PackedLinear]]) -> None:
    assert not determinism.settle("auto", [make_linear(Drifting)])


def test_attention_that_drifts_in_one_group_of_layers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def drift(query: Tensor, *others: Any) -> Tensor:
        return paged_attention(query, *others) * (1 + 1e-6 * (others[-1] > 0 and len(query) == 1))

    spec = attention_spec((0, 512), 1, 64, 16, torch.float32)
    assert determinism.settle("on", [], spec)
    monkeypatch.setattr(determinism, "paged_attention", drift)
    with pytest.raises(NotDeterministic, match="attention"):
        determinism.settle("on", [], spec)
    assert determinism.settle("on", [], full_attention_spec(1, 1, 64, 16, torch.float32))


@pytest.mark.parametrize(
    ("head_dim", "block_size", "says"),
    [
        (64, 8, "the compiled attention needs a --block-size that is a multiple of 16, not 8; run without --deterministic"),
        (8, 16, "the compiled attention needs heads whose size is a multiple of 16, and this model's have 8; run without --deterministic"),
    ],
)
def test_attention_outside_the_compiled_kernel_is_not_promised_for_a_reason_with_numbers(head_dim: int, block_size: int, says: str) -> None:
    with pytest.raises(NotDeterministic, match=f"^{says}$"):
        determinism.settle("on", [], full_attention_spec(1, 1, head_dim, block_size, torch.float32))


class Ranks(TensorParallel):
    """Two ranks, the other of which adds nothing and says that all is well, or not."""

    size = 2

    def __init__(self, *, other_is_well: bool = True) -> None:
        self._other_is_well = other_is_well

    def exchange(self, values: Tensor) -> Tensor:
        return torch.stack((values, torch.full_like(values, self._other_is_well)))


class DriftingSums(Ranks):
    """Sums that depend on how many there are, as in a ring."""

    def reduce(self, partial: Tensor) -> Tensor:
        return partial * (1 + 1e-6 * (len(partial) > 32))


def test_sums_over_ranks_that_depend_on_the_batch_are_not_promised() -> None:
    assert determinism.settle("on", [], parallel=Ranks(), hidden_size=64)
    with pytest.raises(NotDeterministic, match="depend on the batch in sums over ranks"):
        determinism.settle("on", [], parallel=DriftingSums(), hidden_size=64)


def test_what_another_rank_cannot_promise_nobody_promises(make_linear: Callable[[type[PackedLinear]], tuple[str, PackedLinear]]) -> None:
    assert not determinism.settle("auto", [make_linear(PackedLinear)], parallel=Ranks(other_is_well=False), hidden_size=64)
    with pytest.raises(NotDeterministic, match="another rank"):
        determinism.settle("on", [], parallel=Ranks(other_is_well=False), hidden_size=64)


def test_mode_off_promises_nothing_and_tries_nothing(make_linear: Callable[[type[PackedLinear]], tuple[str, PackedLinear]]) -> None:
    assert not determinism.settle("off", [make_linear(Drifting)])
    assert not determinism.wanted("off", torch.float32, CPU)


def test_only_the_cpu_promises_it() -> None:
    assert not any(determinism.wanted(mode, torch.float32, torch.device("cuda")) for mode in ("auto", "on"))


def test_auto_wants_it_where_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.linear.multiplies_bfloat16", lambda: True)
    assert determinism.wanted("auto", torch.float32, CPU)
    assert not determinism.wanted("auto", torch.bfloat16, CPU)
    assert determinism.wanted("on", torch.bfloat16, CPU)
