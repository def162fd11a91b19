"""Every model family against transformers: equal logits whatever the cut into steps."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor

from scripts.lib.offline import offline_config
from tests.helpers.forward import logits_in_chunks, reference_logits, reference_model
from tests.helpers.ranks import close, load_ranks, together
from tests.helpers.tiny_model import BASE, KINDS, VOCAB_SIZE, tiny_checkpoint
from workers.loader import Loaded, load
from workers.models import discover

TOLERANCE = 1e-4
BLOCK_SIZE = 16
NUM_BLOCKS = 32
#: (seed, length), computed side by side; lengths around multiples of the block size.
SEQUENCES = ((1, 61), (2, 32), (3, 1), (4, 17))
#: A block, its neighbours, two blocks, three and a token.
AROUND_BLOCKS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1]


@cache
def loaded_model(kind: str) -> Loaded:
    return load(offline_config(str(tiny_checkpoint(kind)), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS))


@cache
def tokens(seed: int, length: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB_SIZE) for _ in range(length))


@cache
def expected(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    model = reference_model(tiny_checkpoint(kind), dtype)
    return tuple(reference_logits(model, tokens(*shape)) for shape in SEQUENCES)


@pytest.mark.parametrize(("first", "chunk"), [(1000, 1000), (7, 7), (50, 1)], ids=["one prefill", "chunks of 7", "decode steps"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_logits_equal_those_of_transformers(kind: str, first: int, chunk: int) -> None:
    computed = logits_in_chunks(loaded_model(kind), [tokens(*shape) for shape in SEQUENCES], chunk, first=first)
    for ours, theirs in zip(computed, expected(kind), strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("kind", "size"), [*((kind, 2) for kind in sorted(KINDS)), ("llama", 4), ("llama", 8), ("vector-heads", 4), ("one-kv-head", 8)])
def test_ranks_together_compute_what_transformers_does(kind: str, size: int) -> None:
    ranks = load_ranks(tiny_checkpoint(kind), size, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    computed = together(lambda loaded: logits_in_chunks(loaded, [tokens(*shape) for shape in SEQUENCES], 7), ranks)
    close(ranks)
    for number, theirs in enumerate(expected(kind)):
        assert all(torch.equal(logits[number], computed[0][number]) for logits in computed)
        torch.testing.assert_close(computed[0][number], theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_every_architecture_has_a_tiny_checkpoint() -> None:
    covered = {name for kind in KINDS.values() for name in (BASE | kind)["architectures"]}
    assert set(discover()) <= covered


@pytest.mark.parametrize("length", AROUND_BLOCKS)
@pytest.mark.parametrize("chunk", AROUND_BLOCKS)
@pytest.mark.parametrize("kind", ["llama", "wide-heads"], ids=["odd heads", "heads of a vector's size"])
def test_lengths_and_chunks_around_a_block_change_nothing(kind: str, length: int, chunk: int) -> None:
    (computed,) = logits_in_chunks(loaded_model(kind), [tokens(1, 61)[:length]], chunk)
    torch.testing.assert_close(computed, expected(kind)[0][:length], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "wide-heads"], ids=["odd heads", "heads of a vector's size"])
def test_what_lies_in_unused_blocks_does_not_matter(kind: str) -> None:
    loaded = loaded_model(kind)
    for layer in range(3):
        for part in loaded.runner.kv_cache.layer(layer)[:2]:
            part.fill_(float("nan"))
    computed = logits_in_chunks(loaded, [tokens(*shape) for shape in SEQUENCES], 7, seed=1)
    for ours, theirs in zip(computed, expected(kind), strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "wide-heads"], ids=["odd heads", "heads of a vector's size"])
def test_bfloat16_is_as_exact_as_in_transformers(kind: str) -> None:
    loaded = load(offline_config(str(tiny_checkpoint(kind)), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, dtype="bfloat16"))
    computed = logits_in_chunks(loaded, [tokens(1, 61)], 7)[0]
    exact = expected(kind)[0]
    our_error = (computed - exact).square().mean().sqrt()
    their_error = (expected(kind, torch.bfloat16)[0] - exact).square().mean().sqrt()
    assert computed.dtype == torch.float32
    assert 0 < our_error < 1.2 * their_error
