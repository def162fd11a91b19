"""The catalogue of everything a client can be told when it does not get what it asked for.

Errors have OpenAI's shape, four keys always, and short fixed texts: what a client sent, file names and exception
texts never come back in one. Numbers and names of fields do, and the message of a chat template, cut to size.
Code that refuses raises an `ApiError` made by one of the functions below; the application renders it.
This module must not know how a request is served.
"""

from __future__ import annotations

import re

import msgspec

from pagemill.messages.frontend import Rejection

#: An error body stays below 4 KiB: message and param are cut.
MAX_MESSAGE_BYTES = 1024
MAX_PARAM_CHARACTERS = 128

#: For what has failed once and would fail again: clients retry a 500 unless they are asked not to.
_NO_RETRY = {"x-should-retry": "false"}

_FIELD_NAME = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """A refusal or a failure with its HTTP status. `headers` are added to the response."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = None if param is None else param[:MAX_PARAM_CHARACTERS]
        self.headers = headers or {}
        kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
        self.detail = ErrorDetail(_cut(message), kind, self.param, code)

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.detail))


def _cut(message: str) -> str:
    """On one line, and short; JSON's escapes can at most double what is left."""
    if len(message) <= MAX_MESSAGE_BYTES and message.isascii() and message.isprintable():
        return message  # nearly all, and there may be thousands a second
    printable = "".join(character if character.isprintable() else " " for character in message[:MAX_MESSAGE_BYTES])
    return printable.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")


def field_name(name: str) -> str | None:
    """A client's own field name, if it is harmless enough to be said back."""
    return name if _FIELD_NAME.fullmatch(name) else None


# --- what has not become a request -----------------------------------------------------------------------


def malformed_request() -> ApiError:
    return ApiError(400, "malformed_request", "This is not a valid HTTP request.")


def url_too_long(max_bytes: int) -> ApiError:
    return ApiError(414, "url_too_long", f"The request's URL has more than {max_bytes} bytes.")


def headers_too_large(max_lines: int, max_bytes: int) -> ApiError:
    return ApiError(431, "headers_too_large", f"The request has more than {max_lines} header lines or {max_bytes} bytes of them.")


# --- 400: the request is wrong ---------------------------------------------------------------------------


def invalid_value(param: str | None, message: str) -> ApiError:
    return ApiError(400, "invalid_value", message, param)


def invalid_json(message: str = "The request body is not valid JSON.") -> ApiError:
    return ApiError(400, "invalid_json", message)


def unsupported_parameter(param: str, message: str | None = None) -> ApiError:
    return ApiError(400, "unsupported_parameter", message or f"'{param}' is not supported by this server.", param)


def misnamed_parameter(param: str, right: str) -> ApiError:
    """A name from elsewhere; `right` says in words what it is called here."""
    return ApiError(400, "unsupported_parameter", f"'{param}' is not supported by this route: use {right}.", param)


def unknown_parameter(name: str) -> ApiError:
    known = field_name(name)
    return ApiError(400, "unknown_parameter", f"Nobody knows the field '{known or '(unprintable)'}', and this server runs with --strict-request.", known)


def context_length_exceeded(param: str | None, max_model_len: int, asked: str) -> ApiError:
    """`asked` names the number of tokens asked for, in words. Proxies know it by its first words, which are OpenAI's."""
    return ApiError(400, "context_length_exceeded", f"This model's maximum context length is {max_model_len} tokens, but {asked}.", param)


def reply_too_large(max_bytes: int) -> ApiError:
    message = f"A reply that is not streamed may have {max_bytes} bytes, and this one has more: ask for less, or set 'stream'."
    return ApiError(400, "reply_too_large", message, "stream")


# --- the client may not, or came to the wrong place ------------------------------------------------------


def invalid_api_key(*, of_admin: bool = False) -> ApiError:
    message = f"A valid {'admin' if of_admin else 'API'} key is required: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
    return ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})


def debug_forbidden() -> ApiError:
    return ApiError(403, "forbidden", "Debug routes answer to loopback clients only, or to an admin key where one is set.")


def route_not_found() -> ApiError:
    return ApiError(404, "not_found", "There is no such route.")


def model_not_found(served: str) -> ApiError:
    """`served` is the name it does serve, which GET /v1/models tells anybody who may ask."""
    return ApiError(404, "model_not_found", f"This server does not serve that model; it serves '{served}' (see GET /v1/models).", "model")


def method_not_allowed(allowed: str) -> ApiError:
    return ApiError(405, "method_not_allowed", f"This route answers to {allowed}.", headers={"Allow": allowed})


def body_timeout() -> ApiError:
    return ApiError(408, "timeout", "The request body did not arrive in time.", headers={"Connection": "close"})


def body_too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "too_large", f"The request body exceeds {max_bytes} bytes.", headers={"Connection": "close"})


def unsupported_media_type() -> ApiError:
    return ApiError(415, "unsupported_media_type", "The request body must be JSON: send 'Content-Type: application/json'.")


def unsupported_content_encoding() -> ApiError:
    return ApiError(415, "unsupported_content_encoding", "The request body must not be compressed: send it without 'Content-Encoding'.")


# --- the server cannot, or not now -----------------------------------------------------------------------


def unavailable(message: str, retry_after_s: int = 1) -> ApiError:
    return ApiError(503, "unavailable", message, headers={"Retry-After": str(retry_after_s)})


def shutting_down() -> ApiError:
    """The connection is closed as well: whatever comes next must find another server."""
    return ApiError(503, "unavailable", "The server is shutting down.", headers={"Retry-After": "1", "Connection": "close"})


def scheduler_silent() -> ApiError:
    return unavailable("The scheduler does not answer.")


def queue_full(retry_after_s: int = 1) -> ApiError:
    return ApiError(429, "rate_limit_exceeded", "Too many requests are waiting.", headers={"Retry-After": str(retry_after_s)})


def bodies_full(retry_after_s: int) -> ApiError:
    return ApiError(429, "rate_limit_exceeded", "Too many large request bodies are being read.", headers={"Retry-After": str(retry_after_s)})


def replies_full(retry_after_s: int) -> ApiError:
    message = "Too many large replies are being gathered; with 'stream' this one would not wait to be complete."
    return ApiError(429, "rate_limit_exceeded", message, headers={"Retry-After": str(retry_after_s)})


def too_many_connections() -> ApiError:
    return ApiError(503, "unavailable", "The server has too many open connections.", headers={"Retry-After": "1", "Connection": "close"})


def queue_timeout(max_queue_ms: int, retry_after_s: int = 1) -> ApiError:
    message = f"The request waited longer than the limit of {max_queue_ms / 1000:g} s."
    return ApiError(429, "queue_timeout", message, headers={"Retry-After": str(retry_after_s)})


def internal_error() -> ApiError:
    return ApiError(500, "internal_error", "The server failed on this request.", headers=_NO_RETRY)


def sequence_failed(error: str) -> ApiError:
    """Why a sequence ended with an error; `error` is the scheduler's or the worker's word for it, which no client sees."""
    match error:
        case "killed_worker":
            message = "The model process died whenever it computed this request, even alone; it is not tried again."
            return ApiError(500, "request_failed", message, headers=_NO_RETRY)
        case "core_failed":
            return internal_error()
        case _:
            return ApiError(500, "generation_failed", "The model failed on this request.", headers=_NO_RETRY)


def too_slow_reader() -> ApiError:
    return ApiError(503, "too_slow", "The client did not read its stream; the request was aborted.")


def too_far_behind() -> ApiError:
    return ApiError(503, "too_slow", "Much more was generated than could be sent by now; the request was aborted.")


def rejected(rejection: Rejection, retry_after_s: int = 1) -> ApiError:
    """Why the scheduler will not run a sequence."""
    match rejection.reason:
        case "exceeds_model_length":
            return context_length_exceeded(None, rejection.available, f"{rejection.required} tokens were asked for")
        case "exceeds_kv_cache":
            return context_length_exceeded(None, rejection.available, f"the request needs room for {rejection.required}: the KV cache holds no more")
        case "queue_full" | "queue_tokens":
            return queue_full(retry_after_s)
        case "queue_timeout":
            return queue_timeout(rejection.available, retry_after_s)
        case "draining":
            return shutting_down()
        case "invalid":
            return invalid_value(None, "The scheduler refused this request.")
