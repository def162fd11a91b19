"""Prompts for tests of the core, and what a request with one must produce."""

from __future__ import annotations

from pagemill.messages.sequences import SamplingParams
from tests.helpers.core_driver import CoreDriver
from tests.helpers.fake_worker import expected_tokens

VOCAB = 32


def prompt(num_tokens: int, stem: int = 0) -> list[int]:
    return [(stem * 7 + i * 3) % VOCAB for i in range(num_tokens)]


def expected(driver: CoreDriver, tokens: list[int], max_tokens: int, sampling: SamplingParams | None = None) -> list[int]:
    longest = min(driver.core.config.max_model_len, driver.core.memory.capacity_tokens())
    return expected_tokens(tokens, sampling or SamplingParams(), 0, longest, max_tokens, VOCAB)
