"""The default model answers as in transformers, token for token, through the real core and however the work is cut.

The expectations are in tests/data/greedy_smollm2.json, which scripts/make_greedy_expectations writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.model_store import ResolvedModel, resolve
from scripts.lib.offline import OfflineEngine, offline_config
from tests.helpers.forward import reference_model
from workers.loader import Loaded, load

EXPECTATIONS: dict[str, Any] = json.loads((Path(__file__).parent.parent / "data" / "greedy_smollm2.json").read_text(encoding="utf-8"))
PROMPTS = [answer["prompt_ids"] for answer in EXPECTATIONS["answers"]]
EXPECTED = [answer["expected_ids"] for answer in EXPECTATIONS["answers"]]
NUM_TOKENS = EXPECTATIONS["num_tokens"]
STOP_TOKEN_ID = 2

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def resolved() -> ResolvedModel:
    return resolve(EXPECTATIONS["model"], lambda phase, fraction, detail: None)


@pytest.fixture(scope="module")
def loaded(resolved: ResolvedModel) -> Loaded:
    return load(offline_config(str(resolved.path), num_blocks=256, max_model_len=512))


def up_to_stop(token_ids: list[int]) -> list[int]:
    """transformers ends at the stop token; the engine is told to run on, so that every row lives to the end."""
    return token_ids[: token_ids.index(STOP_TOKEN_ID) + 1] if STOP_TOKEN_ID in token_ids else token_ids


def test_the_expectations_belong_to_the_model_in_use(resolved: ResolvedModel) -> None:
    assert resolved.fingerprint.hex() == EXPECTATIONS["fingerprint"], "run scripts/make_greedy_expectations"
    assert len(PROMPTS) == 20
    assert len({tuple(prompt) for prompt in PROMPTS}) == 20


def test_all_twenty_at_once_are_answered_as_expected(loaded: Loaded) -> None:
    engine = OfflineEngine(loaded)
    answers = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    assert [up_to_stop(answer) for answer in answers] == EXPECTED


def test_alone_and_in_chunks_of_16_the_answer_is_the_same(loaded: Loaded) -> None:
    engine = OfflineEngine(loaded, max_num_batched_tokens=16, prefix_caching=False)
    (answer,) = engine.generate([PROMPTS[8]], max_tokens=32)
    assert answer == EXPECTED[8][:32]


def test_in_chunks_of_16_side_by_side_with_preemption_the_answers_are_the_same(loaded: Loaded) -> None:
    engine = OfflineEngine(loaded, check_invariants=True, max_num_batched_tokens=16, num_blocks=20)
    answers = engine.generate(PROMPTS[2:8], max_tokens=NUM_TOKENS)
    assert [up_to_stop(answer) for answer in answers] == EXPECTED[2:8]
    assert sum(output.num_preemptions for output in engine.outputs.values()) > 0


def test_two_prompts_are_answered_alike_by_transformers_itself(resolved: ResolvedModel) -> None:
    model = reference_model(resolved.path)
    generate: Callable[..., Any] = model.generate
    for index in (0, 10):
        with torch.inference_mode():
            prompt = torch.tensor([PROMPTS[index]])
            answer = generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
        assert answer.tolist() == EXPECTED[index][:16]
