"""Logprobs in the two shapes of OpenAI's API. Pure; must not know requests."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from frontend.choice import TokenEntry
from frontend.openai_types import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from frontend.token_bytes import TokenBytes
from pagemill.messages import unpack_ids

#: JSON has no infinity; this stands for what cannot happen.
LOWEST_LOGPROB = -9999.0


def chat_logprobs(entries: Sequence[TokenEntry], token_bytes: TokenBytes) -> ChatLogprobs:
    """`bytes` lets clients join characters that are split between tokens."""
    content = []
    for entry in entries:
        data = token_bytes(entry.token_id)
        top = [TopLogprob(_text(data), value, list(data)) for data, value in _top(entry, token_bytes)]
        content.append(ChatTokenLogprob(_text(data), _finite(entry.logprobs.logprob), list(data), top))
    return ChatLogprobs(content)


def completion_logprobs(entries: Sequence[TokenEntry], token_bytes: TokenBytes) -> CompletionLogprobs:
    """The chosen token is always among the top ones, so there may be one more of them than was asked for."""
    tokens = [_text(token_bytes(entry.token_id)) for entry in entries]
    values = [_finite(entry.logprobs.logprob) for entry in entries]
    top_logprobs = []
    for entry, token, value in zip(entries, tokens, values, strict=True):
        top: dict[str, float] = {}
        for data, logprob in _top(entry, token_bytes):
            top.setdefault(_text(data), logprob)  # of several tokens that look alike the likeliest is shown
        top_logprobs.append(top | {token: top.get(token, value)})
    return CompletionLogprobs([entry.offset for entry in entries], values, tokens, top_logprobs)


def _top(entry: TokenEntry, token_bytes: TokenBytes) -> list[tuple[bytes, float]]:
    values = array("f")
    values.frombytes(entry.logprobs.top_logprobs)
    ids = unpack_ids(entry.logprobs.top_ids)
    return [(token_bytes(token_id), _finite(value)) for token_id, value in zip(ids, values, strict=True)]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _finite(value: float) -> float:
    """In single precision, in which the top ones arrive: a token that is also among them shows the same number twice."""
    return max(array("f", [value])[0], LOWEST_LOGPROB) if math.isfinite(value) else LOWEST_LOGPROB
