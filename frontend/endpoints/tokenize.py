"""POST /tokenize: the token ids of a text, or of the prompt that a chat would become."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend import body
from frontend.errors import invalid_value
from frontend.openai_types import TokenizeBody, TokenizeReply
from frontend.services import Services, TextServices
from frontend.tokenizer import Tokenizer
from frontend.validation import chat_messages, check_model

PATHS = ("/tokenize",)
METHODS = ("POST",)

#: As many as /detokenize takes.
_MAX_TOKENS = body.MAX_VALUES

_decoder = msgspec.json.Decoder(TokenizeBody)


async def handle(request: Request, services: Services) -> Response:
    text = services.require_text()
    data = await body.read_json(request)
    wanted, _ = await body.decode(data, _decoder)
    check_model(wanted.model, text.facts.names)
    max_model_len = services.readiness.require().max_model_len
    reply = await text.submitter.run(lambda: _reply(wanted, text, max_model_len), len(data))
    return Response(reply, media_type="application/json")


def _reply(wanted: TokenizeBody, text: TextServices, max_model_len: int) -> bytes:
    token_ids = _encode(wanted, text)
    strings = text.tokenizer.token_strings(token_ids) if wanted.return_token_strs else None
    return msgspec.json.encode(TokenizeReply(len(token_ids), max_model_len, token_ids, strings))


def _encode(wanted: TokenizeBody, text: TextServices) -> list[int]:
    prompt = wanted.content if wanted.prompt is None else wanted.prompt
    if (wanted.prompt, wanted.content, wanted.messages).count(None) != 2:
        raise invalid_value("prompt", "Either 'prompt' or 'messages' must be given.")
    tokenizer, add_special_tokens = text.tokenizer, wanted.add_special_tokens
    if prompt is not None:
        _require_few(prompt, "prompt" if wanted.content is None else "content", tokenizer)
        return tokenizer.encode(prompt, add_special_tokens=add_special_tokens is not False)
    messages = chat_messages(wanted.messages, text.facts.knows_developer)
    _require_few("".join(message["content"] for message in messages), "messages", tokenizer)
    return tokenizer.encode_chat(messages, add_generation_prompt=wanted.add_generation_prompt is not False, add_special_tokens=bool(add_special_tokens))


def _require_few(text: str, field: str, tokenizer: Tokenizer) -> None:
    if len(text.encode()) > _MAX_TOKENS and tokenizer.has_more_tokens(text, _MAX_TOKENS):
        raise invalid_value(field, f"'{field}' has more than {_MAX_TOKENS} tokens.")
