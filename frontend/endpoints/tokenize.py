"""POST /tokenize: the token ids of a text, or of the prompt that a chat would become."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend import body
from frontend.errors import invalid_value
from frontend.openai_types import TokenizeBody, TokenizeReply
from frontend.services import Services, TextServices
from frontend.validation import chat_messages, check_model

PATHS = ("/tokenize",)
METHODS = ("POST",)

_decoder = msgspec.json.Decoder(TokenizeBody)


async def handle(request: Request, services: Services) -> Response:
    text = services.require_text()
    wanted, _ = await body.decode(await body.read_json(request), _decoder)
    check_model(wanted.model, text.facts.names)
    work, num_characters = _plan(wanted, text)
    token_ids = await text.submitter.run(work, num_characters)
    strings = text.tokenizer.token_strings(token_ids) if wanted.return_token_strs else None
    reply = TokenizeReply(len(token_ids), services.readiness.require().max_model_len, token_ids, strings)
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _plan(wanted: TokenizeBody, text: TextServices) -> tuple[Callable[[], list[int]], int]:
    """What is to be encoded, and how long it is in characters."""
    prompt = wanted.content if wanted.prompt is None else wanted.prompt
    if (prompt is None) == (wanted.messages is None):
        raise invalid_value("prompt", "Either 'prompt' or 'messages' must be given.")
    tokenizer, add_special_tokens = text.tokenizer, wanted.add_special_tokens
    if prompt is not None:
        return lambda: tokenizer.encode(prompt, add_special_tokens=add_special_tokens is not False), len(prompt)
    messages = chat_messages(wanted.messages, text.facts.knows_developer)

    def encode() -> list[int]:
        return tokenizer.encode_chat(messages, add_generation_prompt=wanted.add_generation_prompt is not False, add_special_tokens=bool(add_special_tokens))

    return encode, sum(len(message["content"]) for message in messages)
