"""POST /detokenize: the text of token ids, special tokens included."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend import body
from frontend.errors import invalid_value
from frontend.openai_types import DetokenizeBody, DetokenizeReply
from frontend.services import Services, TextServices
from frontend.validation import check_model, check_token_ids

PATHS = ("/detokenize",)
METHODS = ("POST",)

_decoder = msgspec.json.Decoder(DetokenizeBody)


async def handle(request: Request, services: Services) -> Response:
    text = services.require_text()
    data = await body.read_json(request)
    wanted, _ = await body.decode(data, _decoder)
    return Response(await body.digest(data, lambda: _reply(wanted, text)), media_type="application/json")


def _reply(wanted: DetokenizeBody, text: TextServices) -> bytes:
    check_model(wanted.model, text.facts.names)
    if wanted.tokens is None:
        raise invalid_value("tokens", "'tokens' must be an array of token ids.")
    token_ids = check_token_ids(wanted.tokens, text.facts.vocab_size, "tokens")
    return msgspec.json.encode(DetokenizeReply(text.tokenizer.decode(token_ids)))
