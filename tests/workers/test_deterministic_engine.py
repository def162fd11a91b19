"""Under --deterministic a sequence's tokens and log probabilities are a function of its request alone.

The real core drives the real worker: batch mates, chunks, cache hits and preemption are what the scheduler makes of
them. Each is compared, bit for bit, with every request run alone in one chunk. The default model runs too, for its
shapes are those people serve: here as a batch, and in every other way in the cells of tests/scripts/test_soak_equality.py.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from pagemill.config import ServeOptions
from pagemill.messages.sequences import SamplingParams, SequenceKey, TokenLogprobs
from pagemill.model_store import resolve
from scripts.lib.offline import OfflineEngine, offline_config
from tests.helpers.tiny_model import tiny_checkpoint
from workers.loader import Loaded, load

pytestmark = pytest.mark.timeout(300)

#: Of the tiny model, and of the default one: 32 of that at once are compared over HTTP (tests/e2e/test_default_model.py).
NUM_STREAMS = {"tiny": 32, "default": 9}
NUM_TOKENS = 8
NUM_BLOCKS = 256
NUM_PREEMPTIONS = 4

TINY = ("tiny-float32", "tiny-bfloat16")
DEFAULT = ("default-float32", "default-bfloat16")
on_tiny = pytest.mark.parametrize("reference", TINY, indirect=True, scope="module")
on_both = pytest.mark.parametrize("reference", TINY + DEFAULT, indirect=True, scope="module")

Answer = tuple[list[int], list[TokenLogprobs]]


@dataclass(frozen=True)
class Stream:
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True)
class Reference:
    """A model and what it answers to each stream alone."""

    loaded: Loaded
    streams: list[Stream]
    answers: list[Answer]


def answers_of(engine: OfflineEngine, streams: list[Stream]) -> list[Answer]:
    keys = add(engine, streams)
    engine.run()
    return answers(engine, keys)


def add(engine: OfflineEngine, streams: list[Stream]) -> list[SequenceKey]:
    return [engine.add(stream.prompt_ids, max_tokens=NUM_TOKENS, sampling=stream.sampling, seed=stream.seed) for stream in streams]


def answers(engine: OfflineEngine, keys: list[SequenceKey]) -> list[Answer]:
    return [(engine.outputs[key].token_ids, engine.outputs[key].logprobs) for key in keys]


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest) -> Reference:
    kind, _, dtype = str(request.param).partition("-")
    # Heads as wide as a vector: others are computed by reference operations, which promise nothing.
    path = tiny_checkpoint("wide-heads") if kind == "tiny" else resolve(ServeOptions().model, lambda phase, fraction, detail: None).path
    loaded = load(offline_config(str(path), dtype=dtype, deterministic="on", num_blocks=NUM_BLOCKS, max_model_len=1024))
    assert loaded.ready.deterministic
    draw = random.Random(5)
    samplings = [SamplingParams(temperature=0.0, num_logprobs=2), SamplingParams(temperature=0.9, top_p=0.9, num_logprobs=0)]
    streams = [Stream([draw.randrange(3, 500) for _ in range(draw.randint(1, 60))], samplings[index % 2], index) for index in range(NUM_STREAMS[kind])]
    alone = [answers_of(OfflineEngine(loaded, prefix_caching=False), [stream])[0] for stream in streams]
    assert len({tuple(tokens) for tokens, _ in alone}) > len(streams) // 2  # they are different enough to be told apart
    return Reference(loaded, streams, alone)


@on_both
def test_streams_at_once_each_equal_their_solo_run(reference: Reference) -> None:
    engine = OfflineEngine(reference.loaded, max_num_seqs=len(reference.streams), check_invariants=True)
    assert answers_of(engine, reference.streams) == reference.answers


@on_tiny
@pytest.mark.parametrize("budget", [13, 48])
def test_chunked_prompts_give_the_same_bits(reference: Reference, budget: int) -> None:
    engine = OfflineEngine(reference.loaded, max_num_batched_tokens=budget, max_num_seqs=6)
    assert answers_of(engine, reference.streams[:12]) == reference.answers[:12]


@on_tiny
def test_sequences_preempted_and_computed_again_give_the_same_bits(reference: Reference) -> None:
    engine = OfflineEngine(reference.loaded, num_blocks=12, max_num_seqs=16, prefix_caching=False, check_invariants=True)
    keys = add(engine, reference.streams)
    victims = itertools.cycle(keys)
    while engine.core.preemption.decisions.num_preempted("recompute") < NUM_PREEMPTIONS and engine.step():
        engine.preempt(next(victims), "recompute", 2)
    engine.run()
    assert answers(engine, keys) == reference.answers
    assert engine.core.preemption.decisions.num_preempted("recompute") >= NUM_PREEMPTIONS


@on_tiny
def test_a_cached_prefix_gives_the_same_bits_as_a_computed_one(reference: Reference) -> None:
    longest = sorted(range(len(reference.streams)), key=lambda index: len(reference.streams[index].prompt_ids))[-4:]
    streams, expected = [reference.streams[index] for index in longest], [reference.answers[index] for index in longest]
    engine = OfflineEngine(reference.loaded)
    assert answers_of(engine, streams) == expected
    assert answers_of(engine, streams) == expected
    assert all(output.num_cached_tokens >= 16 for output in list(engine.outputs.values())[4:])
