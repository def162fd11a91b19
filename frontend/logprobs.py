"""Logprobs in the two shapes of OpenAI's API. Pure; must not know requests."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from frontend.choice import TokenEntry
from frontend.openai_types import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from frontend.token_bytes import ShownToken, TokenBytes
from pagemill.ids import unpack_ids

#: JSON has no infinity; this stands for what cannot happen.
LOWEST_LOGPROB = -9999.0


def chat_logprobs(entries: Sequence[TokenEntry], token_bytes: TokenBytes) -> ChatLogprobs:
    """`bytes` lets clients join characters that are split between tokens."""
    content = []
    for entry in entries:
        top = [TopLogprob(shown.text, value, shown.encoded_bytes) for shown, value in _top(entry, token_bytes)]
        token = token_bytes.shown(entry.token_id)
        content.append(ChatTokenLogprob(token.text, _single(entry.logprobs.logprob), token.encoded_bytes, top))
    return ChatLogprobs(content)


def completion_logprobs(entries: Sequence[TokenEntry], token_bytes: TokenBytes) -> CompletionLogprobs:
    """The chosen token is always among the top ones, so there may be one more of them than was asked for."""
    tokens = [token_bytes.shown(entry.token_id).text for entry in entries]
    values = [_single(entry.logprobs.logprob) for entry in entries]
    top_logprobs = []
    for entry, token, value in zip(entries, tokens, values, strict=True):
        top: dict[str, float] = {}
        for shown, logprob in _top(entry, token_bytes):
            top.setdefault(shown.text, logprob)  # of several tokens that look alike the likeliest is shown
        top_logprobs.append(top | {token: top.get(token, value)})
    return CompletionLogprobs([entry.offset for entry in entries], values, tokens, top_logprobs)


def _top(entry: TokenEntry, token_bytes: TokenBytes) -> list[tuple[ShownToken, float]]:
    values = array("f")
    values.frombytes(entry.logprobs.top_logprobs)
    ids = unpack_ids(entry.logprobs.top_ids)
    return [(token_bytes.shown(token_id), _finite(value)) for token_id, value in zip(ids, values, strict=True)]


def _single(value: float) -> float:
    """Rounded to single precision, in which the top ones arrive: a token that is also among them must show the same number twice."""
    return _finite(array("f", [value])[0])


def _finite(value: float) -> float:
    return value if LOWEST_LOGPROB < value < math.inf else LOWEST_LOGPROB
