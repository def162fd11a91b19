"""Several ranks answer as one does: the same greedy tokens through the whole engine, and the same bits whenever the group is of one size.

The real core drives the real workers, each with its shard of the model, its pool and its region of the arena. The default
model runs as well, for its heads can be divided by three only.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pagemill.arena_file import create_arena
from pagemill.messages.decisions import VictimKind
from pagemill.messages.sequences import SamplingParams, TokenLogprobs
from pagemill.model_download import ModelError
from pagemill.model_store import resolve
from pagemill.tensor_parallel import num_kv_shards
from scripts.lib.offline import OfflineEngine, offline_config
from tests.helpers.forward import logits_in_chunks
from tests.helpers.ranks import RanksEngine, close, load_ranks, together
from tests.helpers.tiny_model import tiny_checkpoint
from workers.loader import Loaded, load

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 8
NUM_KV_HEADS = 4
#: Of a rank's region; blocks of 16 tokens of the tiny model are at most 12 KiB.
SWAP_BYTES = 64 * 12 * 1024
EXPECTATIONS = json.loads((Path(__file__).parent.parent / "data" / "greedy_smollm2.json").read_text(encoding="utf-8"))

_DRAW = random.Random(7)
PROMPTS = [[_DRAW.randrange(3, 500) for _ in range(length)] for length in (31, 5, 43, 16, 28, 47)]

Answer = tuple[list[int], list[TokenLogprobs]]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What one rank answers to all prompts, in a pool that holds them all."""
    engine = OfflineEngine(load(offline_config(str(tiny_checkpoint("llama")), num_blocks=128, max_num_batched_tokens=64)))
    return engine.generate(PROMPTS, max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module", params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Loaded]]:
    """The tiny model, with more ranks than KV heads in the end. The arena has a region for each KV shard and no more."""
    size = int(request.param)
    arena_fd = create_arena(num_kv_shards(size, NUM_KV_HEADS) * SWAP_BYTES)
    loaded = load_ranks(tiny_checkpoint("llama"), size, arena_fd=arena_fd, num_blocks=128, swap_bytes=SWAP_BYTES)
    os.close(arena_fd)
    yield loaded
    close(loaded)


def test_greedy_tokens_are_those_of_one_rank(ranks: list[Loaded], expected: list[list[int]]) -> None:
    assert RanksEngine(ranks, check_invariants=True).generate(PROMPTS, max_tokens=NUM_TOKENS) == expected


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_under_memory_pressure_they_are_the_same(ranks: list[Loaded], expected: list[list[int]], preemption: VictimKind) -> None:
    engine = RanksEngine(ranks, num_blocks=8, preemption=preemption, prefix_caching=False, check_invariants=True)
    assert engine.generate(PROMPTS, max_tokens=NUM_TOKENS) == expected
    assert engine.core.preemption.decisions.num_preempted(preemption) > 0


def answers_of(engine: RanksEngine, wanted: Sequence[int]) -> list[Answer]:
    """Half of them greedy, half drawn, each with what asks ranks for whole rows of logits."""
    samplings = [SamplingParams(temperature=0.0, num_logprobs=2), SamplingParams(temperature=0.9, top_p=0.9, num_logprobs=0)]
    keys = [engine.add(PROMPTS[index], max_tokens=NUM_TOKENS, sampling=samplings[index % 2], seed=index) for index in wanted]
    engine.run()
    return [(engine.outputs[key].token_ids, engine.outputs[key].logprobs) for key in keys]


@pytest.mark.parametrize("size", [2, 4])
def test_under_deterministic_bits_do_not_depend_on_the_batch(size: int) -> None:
    # Heads as wide as a vector: others are computed by reference operations, which promise nothing.
    ranks = load_ranks(tiny_checkpoint("wide-heads"), size, num_blocks=128, deterministic="on")
    assert all(loaded.ready.deterministic for loaded in ranks)
    everything = range(len(PROMPTS))
    alone = [answer for index in everything for answer in answers_of(RanksEngine(ranks, prefix_caching=False), [index])]
    assert answers_of(RanksEngine(ranks, prefix_caching=False), everything) == alone
    assert answers_of(RanksEngine(ranks, max_num_batched_tokens=13, num_blocks=8, prefix_caching=False), everything) == alone
    close(ranks)


def test_three_ranks_of_the_default_model_compute_the_logits_of_one_and_answer_as_transformers_does() -> None:
    try:
        path = resolve(EXPECTATIONS["model"], lambda phase, fraction, detail: None).path
    except ModelError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    ranks = load_ranks(path, 3, num_blocks=64, max_model_len=256)
    chosen = EXPECTATIONS["answers"][:4]
    answers = RanksEngine(ranks).generate([answer["prompt_ids"] for answer in chosen], max_tokens=NUM_TOKENS)
    histories = [answer["prompt_ids"] + ours for answer, ours in zip(chosen[:2], answers, strict=False)]
    divided = together(lambda loaded: logits_in_chunks(loaded, histories, chunk=64), ranks)
    close(ranks)
    whole = logits_in_chunks(load(offline_config(str(path), num_blocks=64, max_model_len=256)), histories, chunk=64)
    for of_rank in divided:
        torch.testing.assert_close(of_rank, whole, atol=1e-4, rtol=0.0)  # they reach 38
    for answer, ours in zip(chosen, answers, strict=True):
        theirs = answer["expected_ids"][:NUM_TOKENS]  # less, where it ends with a stop token
        assert ours[: len(theirs)] == theirs
    assert ranks[0].ready.block_bytes * 3 == 2 * 30 * 3 * 16 * 64 * 4, "a KV head each"
