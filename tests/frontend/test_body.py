"""Looking over a body before any parser sees it, and complaints that name fields and never say values back."""

from __future__ import annotations

import json
import re
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend import body, request_fields
from frontend.errors import ApiError
from frontend.openai_types import ChatBody, CompletionBody
from frontend.validation import ModelFacts, chat_request, completion_request

TEXT = st.text(st.sampled_from('"\\[]{}:,ab\u00e9\n'), max_size=6)
JSON = st.recursive(st.none() | st.integers() | TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8)
SIZE = body.MAX_BODY_BYTES - 100


def keys_in(value: object) -> int:
    """Of all objects in a value."""
    within = sum(map(keys_in, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))
    return within + (len(value) if isinstance(value, dict) else 0)


@given(st.dictionaries(TEXT, JSON, max_size=4), st.booleans())
def test_the_fields_and_keys_of_any_object_are_counted(fields: dict[str, object], ascii_only: bool) -> None:
    data = json.dumps(fields, ensure_ascii=ascii_only).encode("utf-8", "replace")
    assert body.look_over(data) == (len(fields), keys_in(fields))
    assert body._decode(data, msgspec.json.Decoder(dict[str, object]), None)[0] == json.loads(data)


@pytest.mark.parametrize("text", ['"', "\\", '\\"', "[", "]{", ":", "\\\\", '":"', "\n"])
def test_what_stands_in_strings_is_not_structure(text: str) -> None:
    assert body.look_over(json.dumps({text: [text, {text: text}], "b": 1}).encode()) == (2, 3)


def test_depth_is_counted_exactly() -> None:
    deepest = b'{"a":' + b"[" * (body.MAX_DEPTH - 1) + b"]" * (body.MAX_DEPTH - 1) + b"}"
    assert body.look_over(deepest) == (1, 1)
    with pytest.raises(ApiError, match="nested"):
        body.look_over(deepest.replace(b"[]", b"[[]]"))


@pytest.mark.parametrize(
    "data",
    [b"[" * SIZE, b"[]" * (SIZE // 2), (b"[" * 64 + b"]" * 64) * (SIZE // 128), b'"' * SIZE, b'{"a":' + b'"\\' * (SIZE // 2), b'{"a":"' + b"\\" * SIZE],
    ids=["open", "pairs", "deep", "quotes", "escaped quotes", "backslashes"],
)
def test_the_largest_hostile_bodies_are_looked_over_quickly(data: bytes) -> None:
    started = time.process_time()
    try:
        body.look_over(data)
    except ApiError:
        pass
    assert time.process_time() - started < 2.0  # a quadratic look takes minutes


@pytest.mark.parametrize(
    "data",
    [
        b"{" + b",".join(b'"%d":1' % index for index in range(1001)) + b"}",
        b'{"a":{' + b",".join(b'"%d":1' % index for index in range(250_001)) + b"}}",
        b'{"prompt":[' + b"1," * 1_000_001 + b"1]}",
        b'{"prompt":[' + b'"",' * 400_001 + b'""]}',
    ],
    ids=["fields", "keys", "values", "strings"],
)
def test_bodies_of_too_many_parts_are_refused(data: bytes) -> None:
    with pytest.raises(ApiError, match="more than"):
        body.look_over(data)


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('{"messages":[{"role":"SECRET","content":{"SECRET":1}}]}', "messages[0].content"),
        ('{"messages":[{"role":1}]}', "messages[0].role"),
        ('{"stream_options":{"include_usage":"SECRET"}}', "stream_options.include_usage"),
        ('{"logit_bias":{"SECRET":"SECRET"}}', "logit_bias"),
        ('{"temperature":"SECRET"}', "temperature"),
        ('{"n":99999999999999999999999.5}', "n"),
    ],
)
def test_complaints_name_the_field_and_not_the_value(text: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        body._decode(text.encode(), msgspec.json.Decoder(ChatBody), "chat")
    assert caught.value.param == param
    assert b"SECRET" not in caught.value.body


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"messages":[{"content":"a"}]}', "'messages[0].role' is required."),
        ('{"messages":[null]}', "'messages[0]' must be an object, not null."),
        ('{"messages":[{"role":1.5}]}', "'messages[0].role' must be a string, not a decimal number."),
        ('{"messages":[{"role":"user","content":{}}]}', "'messages[0].content' must be a string, an array or null, not an object."),
        ('{"messages":[{"role":"user","content":[{"type":"text","text":[]}]}]}', "'messages[0].content[0].text' must be a string or null, not an array."),
        ('{"stop":["a",true]}', "'stop[1]' must be a string, not a boolean."),
        ('{"stop_token_ids":[5,"a"]}', "'stop_token_ids[1]' must be an integer, not a string."),
        ('{"stream_options":{"include_usage":0}}', "'stream_options.include_usage' must be a boolean or null, not an integer."),
    ],
)
def test_complaints_speak_of_json_and_not_of_python(text: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        body._decode(text.encode(), msgspec.json.Decoder(ChatBody), "chat")
    assert caught.value.detail.message == message


class Anything(msgspec.Struct):
    """Every kind that msgspec can expect."""

    a: int | None = None
    b: float | None = None
    c: str | bool | None = None
    d: list[dict[str, list[int]]] | None = None


def complaint_about(data: bytes) -> ApiError | None:
    try:
        body._decode(data, msgspec.json.Decoder(Anything), None)
    except ApiError as error:
        return error
    return None


@given(st.dictionaries(st.sampled_from("abcd"), JSON | st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_no_complaint_about_any_value_says_what_a_library_calls_it(fields: dict[str, object]) -> None:
    error = complaint_about(json.dumps(fields).encode("utf-8", "replace"))
    if error is not None:
        assert not re.search(r"Expected|got|[`$]|\b(?:int|str|bool|float|dict|list|NoneType)\b", error.detail.message)
        assert error.param is not None
        assert error.param[0] in fields


@pytest.mark.parametrize(
    "text",
    [
        '{"n":1,"n":1}',
        '{"messages":[{"role":"user","role":"system","content":"a"}]}',
        '{"messages":[{"role":"user","ro\\u006ce":"system","content":"a"}]}',
        '{"messages":[{"role":"user","content":[{"type":"text","text":"a","text":"b"}]}]}',
        '{"stream_options":{"include_usage":true,"include_usage":false}}',
        '{"logit_bias":{"5":1,"5":2}}',
        '{"metadata":[[{"a":{"b":1,"b":1}}]]}',
    ],
)
def test_no_object_may_have_a_key_twice(text: str) -> None:
    with pytest.raises(ApiError, match="twice") as caught:
        body._decode(text.encode(), msgspec.json.Decoder(ChatBody), "chat")
    assert caught.value.code == "invalid_json"


def test_objects_side_by_side_may_have_the_same_keys() -> None:
    fields = {"messages": [{"role": "user", "content": [{"type": "text", "text": '{"role":1}'}] * 2}] * 3, "metadata": {"role": {"role": "role"}}}
    decoded, _ = body._decode(json.dumps(fields).encode(), msgspec.json.Decoder(ChatBody), "chat")
    assert decoded.messages is not None
    assert len(decoded.messages) == 3


#: JSON that is odd, huge or broken, for every field alike.
ODD_VALUES = [
    *("1e400", "-1e400", "1e-400", "1e" + "9" * 200, "-0", "0.0", "9" * 300, "-" + "9" * 300, "1" * 5000, "0." + "3" * 5000, "true", "null", "{}", "[]"),
    *('""', '"\\u0000"', '"\\ud83d"', '"\\ude00\\ud83d"', '"\\u12"', '"\\x"', '"\x01"', '"NaN"', '{"a":1,"a":2}', '{"\\ud83d":1}', '{"":""}'),
    *("[1,]", "[[[]]]", "[null]", '[""]', "[[],{}]", "-", "01", "1.", ".5", "+1", "nul", "NaN", "Infinity", "[", "}", "'a'", "[1e400]", '{"1":1e400}'),
]
ALL_FIELDS = [
    (endpoint, name)
    for endpoint in ("chat", "completions")
    for name in [*request_fields.UNDERSTOOD[endpoint], *request_fields.REFUSED[endpoint], *sorted(request_fields.INERT), "nobody_knows"]
]
FACTS = ModelFacts(names=("tiny",), vocab_size=512, eos_ids=(2,), sampling_defaults={}, knows_developer=False, priority_allowed=True)


@pytest.mark.parametrize(("endpoint", "name"), ALL_FIELDS, ids=lambda part: part)
def test_any_value_of_any_field_is_taken_or_refused_and_never_an_accident(endpoint: request_fields.EndpointName, name: str) -> None:
    for value in ODD_VALUES:
        data = f'{{"{name}":{value},"{"n" if name == "best_of" else "best_of"}":1}}'.encode("utf-8", "surrogatepass")
        error = refusal_of(endpoint, data)
        assert error is None or (error.status in (400, 404) and len(error.body) < 4096), value


def refusal_of(endpoint: request_fields.EndpointName, data: bytes) -> ApiError | None:
    try:
        if endpoint == "chat":
            chat_request(body._decode(data, msgspec.json.Decoder(ChatBody), endpoint)[0], FACTS)
        else:
            completion_request(body._decode(data, msgspec.json.Decoder(CompletionBody), endpoint)[0], FACTS)
    except ApiError as error:
        return error
    return None
