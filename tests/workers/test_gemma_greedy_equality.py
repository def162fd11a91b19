"""Gemma answers as in transformers, token for token: window layers, full layers, and a prompt many windows long.

The expectations are in tests/data/greedy_gemma3.json, which scripts/make_greedy_expectations writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pagemill.model_download import ModelError
from pagemill.model_store import ResolvedModel, resolve
from scripts.lib.offline import OfflineEngine, offline_config
from workers.loader import Loaded, load

EXPECTATIONS: dict[str, Any] = json.loads((Path(__file__).parent.parent / "data" / "greedy_gemma3.json").read_text(encoding="utf-8"))
TEXTS = [answer["prompt"] for answer in EXPECTATIONS["answers"]]
PROMPTS = [answer["prompt_ids"] for answer in EXPECTATIONS["answers"]]
EXPECTED = [answer["expected_ids"] for answer in EXPECTATIONS["answers"]]
NUM_TOKENS = EXPECTATIONS["num_tokens"]
STOP_TOKEN_ID = 1

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def resolved() -> ResolvedModel:
    try:
        return resolve(EXPECTATIONS["model"], lambda phase, fraction, detail: None, consent=lambda terms: True)
    except ModelError as error:
        pytest.skip(f"the model cannot be had here: {error}")


@pytest.fixture(scope="module")
def loaded(resolved: ResolvedModel) -> Loaded:
    return load(offline_config(str(resolved.path), num_blocks=1536, max_model_len=8192))


def up_to_stop(token_ids: list[int]) -> list[int]:
    """transformers ends at the stop token; the engine is told to run on, so that every row lives to the end."""
    return token_ids[: token_ids.index(STOP_TOKEN_ID) + 1] if STOP_TOKEN_ID in token_ids else token_ids


def test_the_expectations_belong_to_the_model_in_use(resolved: ResolvedModel) -> None:
    assert resolved.fingerprint.hex() == EXPECTATIONS["fingerprint"], "run scripts/make_greedy_expectations"
    assert len({tuple(prompt) for prompt in PROMPTS}) == 20
    assert max(map(len, PROMPTS)) >= 4000


def test_prompts_are_encoded_as_expected(resolved: ResolvedModel) -> None:
    tokenizer = Tokenizer.from_file(str(resolved.path / "tokenizer.json"))
    assert [tokenizer.encode(text).ids for text in TEXTS] == PROMPTS


def test_all_twenty_at_once_are_answered_as_expected(loaded: Loaded) -> None:
    engine = OfflineEngine(loaded)
    answers = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    assert [up_to_stop(answer) for answer in answers] == EXPECTED


def test_in_chunks_of_16_side_by_side_with_preemption_the_answers_are_the_same(loaded: Loaded) -> None:
    engine = OfflineEngine(loaded, check_invariants=True, max_num_batched_tokens=16, num_blocks=60)
    answers = engine.generate(PROMPTS[:6], max_tokens=NUM_TOKENS)
    assert [up_to_stop(answer) for answer in answers] == EXPECTED[:6]
    assert sum(output.num_preemptions for output in engine.outputs.values()) > 0
