"""Bodies of requests: read under a cap, looked over, and decoded strictly.

Whoever wants to send one is admitted first (`frontend.overload`). A body is counted while it arrives, alone and with all
others, and must arrive in time. Before anything parses it, its nesting is measured, so that no parser meets 20,000
brackets; large ones are looked over and decoded in a thread, one by one, so that streams and probes go on. JSON is
strict: no NaN, no lone surrogates, no invalid UTF-8, no key twice in any object. What is wrong is said with the field's
path, in JSON's words, and without its value. This module must not know what fields mean.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from frontend import request_fields
from frontend.errors import ApiError, body_timeout, body_too_large, invalid_json, invalid_value, unsupported_content_encoding, unsupported_media_type
from frontend.generation import ClientGoneError
from frontend.request_context import context_of
from frontend.request_fields import EndpointName

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
#: The most of each that one body may have. Ten thousand messages with parts, or a million token ids, stay below.
MAX_CONTAINERS = 100_000
MAX_STRINGS = 400_000
MAX_VALUES = 1_000_000
MAX_KEYS = 250_000
MAX_FIELDS = 1_000
BODY_TIMEOUT_S = 60.0
#: Bodies above this size are worked on in a thread.
_LARGE_BYTES = 16 * 1024
#: A single thread: its steps hold the GIL for up to 70 ms each, and the event loop runs only between two of them.
_thread = ThreadPoolExecutor(1, thread_name_prefix="body")

_OTHERS = bytes(byte for byte in range(256) if byte not in b"[]{}:,")
_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
_INNERMOST = re.compile(rb"\[[^\[\]]*\]")
#: msgspec's words for a wrong value: what was expected and found, then the path to it.
_COMPLAINT = re.compile(r"(?P<what>.*?)(?: - at `(?:key` in `)?\$(?P<path>[^`]*)`)?", re.DOTALL)
#: JSON's words for msgspec's.
_KINDS = {"int": "an integer", "float": "a number", "str": "a string", "bool": "a boolean", "array": "an array", "object": "an object", "null": "null"}
_KIND = "|".join(_KINDS)
_WRONG_KIND = re.compile(rf"Expected `(?P<expected>(?:{_KIND})(?: \| (?:{_KIND}))*)`, got `(?P<found>{_KIND})`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[a-z_]+)`")

Fields = dict[str, msgspec.Raw]
Body = TypeVar("Body")
Result = TypeVar("Result")


async def read_json(request: Request) -> bytes:
    """The body of a request that claims to be JSON, if there is room for it. Raises ApiError (408, 413, 415, 429) or ClientGoneError."""
    check_head(request.headers)
    load = context_of(request).load
    load.admit()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise body_too_large(MAX_BODY_BYTES)
                load.hold(len(body))
    except TimeoutError:
        raise body_timeout() from None
    except ClientDisconnect:
        raise ClientGoneError from None
    load.prepare()
    return bytes(body)


def check_head(headers: Headers) -> None:
    """Checks what the headers say of the body. Raises ApiError (413, 415)."""
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise unsupported_media_type()
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise unsupported_content_encoding()
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise body_too_large(MAX_BODY_BYTES)


async def decode(data: bytes, decoder: msgspec.json.Decoder[Body], endpoint: EndpointName | None = None) -> tuple[Body, Fields]:
    """A body as its struct, and its top-level fields undecoded. Raises ApiError (400)."""
    return await digest(data, lambda: _decode(data, decoder, endpoint))


async def digest(data: bytes, work: Callable[[], Result]) -> Result:
    """The result of work that grows with the body `data`. Of a large body it is done in a thread, so that streams go on."""
    if len(data) < _LARGE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_thread, work)


_fields_decoder = msgspec.json.Decoder(Fields)
_NESTING = frozenset({dict, list})


def _decode(data: bytes, decoder: msgspec.json.Decoder[Body], endpoint: EndpointName | None) -> tuple[Body, Fields]:
    num_fields, num_keys = look_over(data)
    try:
        fields = _fields_decoder.decode(data)
    except msgspec.ValidationError:
        raise invalid_json("The request body must be a JSON object.") from None
    except (msgspec.MsgspecError, RecursionError):
        raise invalid_json() from None
    if num_fields != len(fields):
        raise invalid_json("The request body has a field twice.")
    if endpoint is not None:
        request_fields.check_names(endpoint, fields)
    try:
        decoded = decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _complaint(str(error), endpoint) from None
    except msgspec.MsgspecError:
        raise invalid_json() from None
    if num_keys > num_fields and num_keys != num_fields + _num_keys_within(fields):
        raise invalid_json("An object in the request body has a key twice.")
    return decoded, fields


def _num_keys_within(fields: Fields) -> int:
    """The keys of all objects in the fields, of which a parser keeps the last of each name. Raises ApiError (400) for what none can read."""
    try:
        values: list[Any] = [msgspec.json.decode(raw) for raw in fields.values() if b"{" in bytes(raw)]
    except msgspec.MsgspecError:
        raise invalid_json() from None
    num_keys = 0
    while values:
        value = values.pop()
        if isinstance(value, dict):
            num_keys += len(value)
            value = value.values()
        if not isinstance(value, str) and not _NESTING.isdisjoint(map(type, value)):
            values += [item for item in value if type(item) in _NESTING]
    return num_keys


def look_over(data: bytes) -> tuple[int, int]:
    """The number of keys of the outermost object, and of all objects. Raises ApiError (400) for what no parser should meet.

    Works in time linear in the body whatever it contains. Escapes go first, so that every quote left begins or ends a
    string; then strings go; of the rest only brackets and colons matter. Then the innermost pairs of brackets are
    taken away until one is left: so many times, so deep.
    """
    try:
        data.decode()
    except UnicodeDecodeError:
        raise invalid_json("The request body is not valid UTF-8.") from None
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * MAX_STRINGS:
        raise invalid_json(f"The request body has more than {MAX_STRINGS} strings.")
    structure = b"".join(plain.split(b'"')[::2]).translate(_AS_BRACKETS, delete=_OTHERS)
    if structure.count(b"[") > MAX_CONTAINERS:
        raise invalid_json(f"The request body has more than {MAX_CONTAINERS} arrays and objects.")
    if structure.count(b",") > MAX_VALUES:
        raise invalid_json(f"The request body has more than {MAX_VALUES} values.")
    num_keys = structure.count(b":")
    if num_keys > MAX_KEYS:
        raise invalid_json(f"The request body has more than {MAX_KEYS} keys.")
    return _count_fields(structure.replace(b",", b"")), num_keys


def _count_fields(structure: bytes) -> int:
    """Colons within the outermost brackets and no others."""
    for _ in range(MAX_DEPTH):
        if structure.count(b"[") <= 1:
            num_fields = structure.count(b":")
            if num_fields > MAX_FIELDS:
                raise invalid_json(f"The request body has more than {MAX_FIELDS} fields.")
            return num_fields
        shorter = _INNERMOST.sub(b"", structure)
        if len(shorter) == len(structure):
            raise invalid_json()  # brackets that do not match
        structure = shorter
    raise invalid_json(f"The request body is nested more than {MAX_DEPTH} deep.")


def _complaint(text: str, endpoint: EndpointName | None) -> ApiError:
    """msgspec's complaint in our words: it may quote the value, which is not said back."""
    match = _COMPLAINT.fullmatch(text)
    assert match is not None  # it matches everything
    path: str = match["path"] or ""
    param = path.removeprefix(".").replace("[...]", "") or None
    if endpoint is not None and param is not None and param in request_fields.UNDERSTOOD[endpoint]:
        return request_fields.broken(endpoint, param)
    missing = _MISSING.fullmatch(match["what"])
    if missing is not None:
        param = missing["name"] if param is None else f"{param}.{missing['name']}"
        return invalid_value(param, f"'{param}' is required.")
    name = "The request body" if param is None else f"'{param}'"
    wrong = _WRONG_KIND.fullmatch(match["what"])
    if wrong is None:
        return invalid_value(param, f"{name} has a value that is not allowed.")
    found = "a decimal number" if wrong["found"] == "float" else _KINDS[wrong["found"]]
    return invalid_value(param, f"{name} must be {_any_of(wrong['expected'].split(' | '))}, not {found}.")


def _any_of(kinds: list[str]) -> str:
    *others, last = (_KINDS[kind] for kind in kinds)
    return f"{', '.join(others)} or {last}" if others else last
