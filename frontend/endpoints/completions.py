"""POST /v1/completions: raw prompts in, as texts or as token ids, their continuations out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend import body
from frontend.choice import Delta, Finish, TokenEntry
from frontend.generation import Generation
from frontend.logprobs import completion_logprobs
from frontend.openai_types import Completion, CompletionBody, CompletionChoice, CompletionChunkChoice, CompletionLogprobs
from frontend.replies import reply
from frontend.reply_format import ChunkWriter, encoder, usage_of
from frontend.request_context import context_of
from frontend.services import Services
from frontend.token_bytes import TokenBytes
from frontend.unknown_fields import note_unknown_fields
from frontend.validation import GenerationRequest, completion_request
from frontend.whole_reply import Outcome, Pieces, array, with_field

PATHS = ("/v1/completions",)
METHODS = ("POST",)

_decoder = msgspec.json.Decoder(CompletionBody)


async def handle(request: Request, services: Services) -> Response:
    wanted, generation, form = await _start(request, services)
    return await reply(request, wanted, generation, form)


async def _start(request: Request, services: Services) -> tuple[GenerationRequest, Generation, CompletionFormat]:
    """On its own, so that body and prompts are gone while the reply is generated."""
    text = services.require_text()
    context = context_of(request)
    data = await body.read_json(request)
    completion, fields = await body.decode(data, _decoder, "completions")
    note_unknown_fields("completions", fields, services, context.record)
    wanted, prompts = await body.digest(data, lambda: completion_request(completion, text.facts))
    generation = await text.submitter.completion(wanted, prompts, context.record, context.key_id, context.load)
    return wanted, generation, CompletionFormat(f"cmpl-{context.record.request_id}", wanted, text.tokenizer.token_bytes)


class CompletionFormat:
    """Writes completions; chunks of a stream have the shape of the whole."""

    def __init__(self, reply_id: str, request: GenerationRequest, token_bytes: TokenBytes) -> None:
        self._writer = ChunkWriter(reply_id, "text_completion", request, token_bytes)
        self._with_logprobs = request.text.logprobs

    def first(self, choice: int, generation: Generation) -> None:
        return None

    def text(self, delta: Delta, generation: Generation) -> bytes:
        return self._writer.chunk(CompletionChunkChoice(delta.choice, delta.text, logprobs=self.logprobs(delta.entries)), generation)

    def finish(self, choice: int, finish: Finish, generation: Generation) -> bytes:
        return self._writer.chunk(CompletionChunkChoice(choice, "", finish.reason, finish.stop_reason), generation)

    def usage(self, generation: Generation) -> bytes | None:
        return self._writer.usage(generation)

    def logprobs(self, entries: Sequence[TokenEntry]) -> CompletionLogprobs | None:
        return completion_logprobs(entries, self._writer.token_bytes) if self._with_logprobs else None

    def whole(self, outcomes: list[Outcome], generation: Generation) -> Pieces:
        reply = encoder.encode(Completion(self._writer.id, self._writer.created, self._writer.model, usage_of(generation)))
        return with_field((reply,), "choices", array(self._choice(index, outcome) for index, outcome in enumerate(outcomes)))

    def _choice(self, index: int, outcome: Outcome) -> Pieces:
        assert outcome.finish is not None
        choice = CompletionChoice(index, outcome.text, outcome.finish.reason, outcome.finish.stop_reason)
        return with_field((encoder.encode(choice),), "logprobs", outcome.encoded_logprobs)
