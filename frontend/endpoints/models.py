"""GET /v1/models and /v1/models/{id}: every name under which the one model is served. Ids may contain slashes."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.errors import model_not_found
from frontend.openai_types import Model, ModelList
from frontend.services import Services

PATHS = ("/v1/models", "/v1/models/{model_id:path}")
METHODS = ("GET",)


async def handle(request: Request, services: Services) -> Response:
    max_model_len = services.readiness.require().max_model_len
    names = services.config.model_names
    models = [Model(id=name, created=services.started, max_model_len=max_model_len, root=names[0]) for name in names]
    wanted = request.path_params.get("model_id")
    if wanted is None:
        return Response(msgspec.json.encode(ModelList(models)), media_type="application/json")
    for model in models:
        if model.id == wanted:
            return Response(msgspec.json.encode(model), media_type="application/json")
    raise model_not_found(names[0])
