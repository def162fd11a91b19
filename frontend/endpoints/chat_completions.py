"""POST /v1/chat/completions: a chat in, the assistant's next message out, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend import body
from frontend.choice import Delta, Finish, TokenEntry
from frontend.generation import Generation
from frontend.logprobs import chat_logprobs
from frontend.openai_types import (
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinalChunkChoice,
    ChatLogprobs,
)
from frontend.replies import reply
from frontend.reply_format import ChunkWriter, encoder, usage_of
from frontend.request_context import context_of
from frontend.services import Services
from frontend.token_bytes import TokenBytes
from frontend.unknown_fields import note_unknown_fields
from frontend.validation import GenerationRequest, chat_request
from frontend.whole_reply import Outcome, Pieces, array, with_field

PATHS = ("/v1/chat/completions",)
METHODS = ("POST",)

_decoder = msgspec.json.Decoder(ChatBody)


async def handle(request: Request, services: Services) -> Response:
    wanted, generation, form = await _start(request, services)
    return await reply(request, wanted, generation, form)


async def _start(request: Request, services: Services) -> tuple[GenerationRequest, Generation, ChatFormat]:
    """On its own, so that body and messages are gone while the reply is generated."""
    text = services.require_text()
    context = context_of(request)
    data = await body.read_json(request)
    chat, fields = await body.decode(data, _decoder, "chat")
    note_unknown_fields("chat", fields, services, context.record)
    wanted, messages = await body.digest(data, lambda: chat_request(chat, text.facts))
    generation = await text.submitter.chat(wanted, messages, context.record, context.key_id, context.load)
    return wanted, generation, ChatFormat(f"chatcmpl-{context.record.request_id}", wanted, text.tokenizer.token_bytes)


class ChatFormat:
    """Writes chat completions and their chunks."""

    def __init__(self, reply_id: str, request: GenerationRequest, token_bytes: TokenBytes) -> None:
        self._writer = ChunkWriter(reply_id, "chat.completion.chunk", request, token_bytes)
        self._with_logprobs = request.text.logprobs

    def first(self, choice: int, generation: Generation) -> bytes:
        return self._writer.chunk(ChatChunkChoice(choice, ChatDelta(role="assistant", content="")), generation)

    def text(self, delta: Delta, generation: Generation) -> bytes:
        return self._writer.chunk(ChatChunkChoice(delta.choice, ChatDelta(content=delta.text), self.logprobs(delta.entries)), generation)

    def finish(self, choice: int, finish: Finish, generation: Generation) -> bytes:
        final = ChatFinalChunkChoice(choice, ChatDelta(), finish_reason=finish.reason, stop_reason=finish.stop_reason)
        return self._writer.chunk(final, generation)

    def usage(self, generation: Generation) -> bytes | None:
        return self._writer.usage(generation)

    def logprobs(self, entries: Sequence[TokenEntry]) -> ChatLogprobs | None:
        return chat_logprobs(entries, self._writer.token_bytes) if self._with_logprobs else None

    def whole(self, outcomes: list[Outcome], generation: Generation) -> Pieces:
        reply = encoder.encode(ChatCompletion(self._writer.id, self._writer.created, self._writer.model, usage_of(generation)))
        return with_field((reply,), "choices", array(self._choice(index, outcome) for index, outcome in enumerate(outcomes)))

    def _choice(self, index: int, outcome: Outcome) -> Pieces:
        assert outcome.finish is not None
        choice = ChatChoice(index, AssistantMessage(outcome.text), outcome.finish.reason, outcome.finish.stop_reason)
        return with_field((encoder.encode(choice),), "logprobs", outcome.encoded_logprobs)
