"""What chat and plain completions share when they write: names, usage, and chunks made from a ready prefix and suffix.

This module must not know in which order things are written (`frontend.replies` does).
"""

from __future__ import annotations

import time

import msgspec

from frontend.generation import Generation
from frontend.openai_types import PromptTokensDetails, Usage
from frontend.token_bytes import TokenBytes
from frontend.validation import GenerationRequest

encoder = msgspec.json.Encoder()


def usage_of(generation: Generation) -> Usage:
    prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(generation.num_cached_tokens))


class ChunkWriter:
    """The constant part of every chunk of one reply. `id`, `created` and `model` are the same in all of them."""

    def __init__(self, reply_id: str, kind: str, request: GenerationRequest, token_bytes: TokenBytes) -> None:
        self.id = reply_id
        self.created = int(time.time())
        self.model = request.model
        self.token_bytes = token_bytes
        self._include_usage = request.include_usage
        self._continuous_usage = request.continuous_usage
        head = encoder.encode({"id": reply_id, "object": kind, "created": self.created, "model": request.model})
        self._prefix = head[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}' if request.include_usage else b"]}"

    def chunk(self, choice: msgspec.Struct, generation: Generation) -> bytes:
        if self._continuous_usage:
            return b"".join((self._prefix, encoder.encode(choice), b'],"usage":', encoder.encode(usage_of(generation)), b"}"))
        return b"".join((self._prefix, encoder.encode(choice), self._suffix))

    def usage(self, generation: Generation) -> bytes | None:
        """The chunk without choices that ends a stream, if it was asked for."""
        if not self._include_usage:
            return None
        return self._prefix + b'],"usage":' + encoder.encode(usage_of(generation)) + b"}"
