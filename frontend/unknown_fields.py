"""Fields of a request that nobody knows: accepted and counted, for routers add their own, unless the operator is strict.

This module must not know how they are counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from frontend import request_fields
from frontend.errors import unknown_parameter
from frontend.request_fields import EndpointName
from frontend.request_metrics import RequestRecord
from frontend.services import Services


def note_unknown_fields(endpoint: EndpointName, fields: Mapping[str, object], services: Services, record: RequestRecord) -> None:
    """Raises ApiError (400) for the first unknown field under --strict-request."""
    unknown = request_fields.unknown_names(endpoint, fields)
    if unknown and services.config.strict_request:
        raise unknown_parameter(unknown[0])
    services.ledger.unknown_fields(record, unknown)
