"""Requests that have broken servers of this kind, and what is right: one list, run against the fake and the real scheduler.

Each case names the endpoint, the body (a value, or raw bytes), and the expected status, `param` and `code`. Sizes that
depend on the model are for the tiny one: 512 token ids. Must not know how the server refuses them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
VOCAB_SIZE = 512
HELLO = [{"role": "user", "content": "Hello"}]

ANY = object()  #: any `param`


@dataclass(frozen=True)
class BadRequest:
    name: str
    path: str
    body: bytes
    param: object = None
    code: str = "invalid_value"
    status: int = 400


def chat(name: str, param: object, code: str = "invalid_value", **fields: Any) -> BadRequest:
    return BadRequest(name, CHAT, _encode({"messages": HELLO, "max_tokens": 4, **fields}), param, code)


def completion(name: str, param: object, code: str = "invalid_value", **fields: Any) -> BadRequest:
    return BadRequest(name, COMPLETIONS, _encode({"prompt": "Hello", "max_tokens": 4, **fields}), param, code)


def literal(name: str, param: object, text: str, code: str = "invalid_value") -> list[BadRequest]:
    """`text` stands in the JSON of both endpoints as it is: for what json.dumps would not write."""
    both = ((CHAT, '"messages":[{"role":"user","content":"Hello"}]'), (COMPLETIONS, '"prompt":"Hello"'))
    return [BadRequest(f"{name} {path}", path, f"{{{required},{text}}}".encode("utf-8", "surrogatepass"), param, code) for path, required in both]


def raw(name: str, body: bytes, param: object = None, code: str = "invalid_json", status: int = 400) -> list[BadRequest]:
    return [BadRequest(f"{name} {path}", path, body, param, code, status) for path in (CHAT, COMPLETIONS)]


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def _everywhere(name: str, param: object, code: str = "invalid_value", **fields: Any) -> list[BadRequest]:
    return [chat(f"{name} in a chat", param, code, **fields), completion(f"{name} in a completion", param, code, **fields)]


#: A1: prompts without a token, on a tokenizer that adds none.
EMPTY = [
    completion("empty text", "prompt", prompt=""),
    completion("list of an empty text", "prompt[0]", prompt=[""]),
    completion("an empty text among others", "prompt[1]", prompt=["abc", "", "d"]),
    completion("no prompts", "prompt", prompt=[]),
    completion("no ids in a list", "prompt[0]", prompt=[[]]),
    completion("ids, then none", "prompt[1]", prompt=[[5], []]),
    completion("null prompt", "prompt", prompt=None),
    completion("number as prompt", "prompt", prompt=5),
    completion("texts and ids mixed", "prompt[1]", prompt=["a", [1]]),
    completion("texts and numbers mixed", "prompt[2]", prompt=["a", "b", 1]),
    completion("ids and texts mixed", "prompt[1]", prompt=[[1], "a"]),
    completion("null among texts", "prompt[1]", prompt=["a", None]),
    completion("numbers and texts mixed", "prompt[1]", prompt=[1, "a"]),
]
#: A2: scoring is refused until it exists; nothing to generate is always wrong.
LENGTHS = [
    completion("echo", "echo", "unsupported_parameter", echo=True, max_tokens=0, logprobs=1),
    *_everywhere("max_tokens 0", "max_tokens", max_tokens=0),
    *_everywhere("max_tokens -1", "max_tokens", max_tokens=-1),
    *_everywhere("max_tokens 2**40", "max_tokens", max_tokens=2**40),
    *_everywhere("max_tokens as text", "max_tokens", max_tokens="5"),
    *_everywhere("max_tokens as fraction", "max_tokens", max_tokens=1.5),
    chat("max_completion_tokens 0", "max_completion_tokens", max_completion_tokens=0),
    completion("max_completion_tokens in a completion", "max_completion_tokens", "unsupported_parameter", max_completion_tokens=5),
    *_everywhere("max_tokens by another name", "max_new_tokens", "unsupported_parameter", max_new_tokens=5),
    completion("ids of a second prompt beyond the context", "prompt[1]", "context_length_exceeded", prompt=[[5], [5] * 600]),
    completion("text of a second prompt beyond the context", "prompt[1]", "context_length_exceeded", prompt=["a", "x" * 3000]),
    completion("megabytes of digits", "prompt", "context_length_exceeded", prompt="0123456789" * 300_000),
    chat("megabytes of digits in many messages", "messages", "context_length_exceeded", messages=[{"role": "user", "content": "0123456789" * 100}] * 3_000),
    completion("ids beyond the context", "prompt", "context_length_exceeded", prompt=[5] * 600),
    *_everywhere("min_tokens above max_tokens", "min_tokens", min_tokens=5),
    *_everywhere("min_tokens -1", "min_tokens", min_tokens=-1),
    completion("min_tokens above the default", "min_tokens", min_tokens=17, max_tokens=None),
    chat("min_tokens above what fits", "min_tokens", min_tokens=1000, max_tokens=None),
]
#: A3, A4, A11: whatever becomes an index.
INDICES = [
    *_everywhere("bias beyond the vocabulary", f"logit_bias.{VOCAB_SIZE}", logit_bias={"3": 1, str(VOCAB_SIZE): 5}),
    *(case for key in ("-1", "1e3", " 5", "abc", "5.0", "05", "", "٣", "9" * 40) for case in _everywhere(f"bias for {key[:9]!r}", ANY, logit_bias={key: 1})),
    *_everywhere("bias of 101", "logit_bias.5", logit_bias={"5": 101}),
    *_everywhere("bias of -101", "logit_bias.5", logit_bias={"5": -101}),
    *_everywhere("bias as text", "logit_bias", logit_bias={"5": "1"}),
    *_everywhere("bias as list", "logit_bias", logit_bias=[1]),
    *_everywhere("too many biases", "logit_bias", logit_bias={str(index): 1 for index in range(2000)}),
    *_everywhere("stop id beyond the vocabulary", "stop_token_ids[1]", stop_token_ids=[5, VOCAB_SIZE], min_tokens=1),
    *_everywhere("stop id -1", "stop_token_ids[0]", stop_token_ids=[-1]),
    *_everywhere("stop id as text", "stop_token_ids[0]", stop_token_ids=["5"]),
    *_everywhere("stop id 2**63", "stop_token_ids[0]", stop_token_ids=[2**63]),
    *_everywhere("too many stop ids", "stop_token_ids", stop_token_ids=[5] * 1000),
    completion("prompt id beyond the vocabulary", "prompt[2]", prompt=[2, 5, VOCAB_SIZE]),
    completion("prompt id in the second prompt", "prompt[1][0]", prompt=[[2], [VOCAB_SIZE]]),
    completion("prompt id -1", "prompt[0]", prompt=[-1]),
    completion("prompt id beyond int64", "prompt[0]", prompt=[5279552648203111001]),
    completion("prompt id true", "prompt[1]", prompt=[1, True]),
]
#: A5.
SEEDS = [
    *_everywhere("seed 2**64", "seed", seed=2**64),
    *_everywhere("seed 2**63", "seed", seed=2**63),
    *_everywhere("seed -2**63-1", "seed", seed=-(2**63) - 1),
    *_everywhere("seed as text", "seed", seed="100"),
    *_everywhere("seed 1.5", "seed", seed=1.5),
    *_everywhere("seed true", "seed", seed=True),
]
#: A6: not JSON, whatever Python's parser thinks.
NOT_NUMBERS = [
    *(
        case
        for field in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        for value, param, code in (("NaN", None, "invalid_json"), ("-Infinity", None, "invalid_json"), ("1e400", field, "invalid_value"))
        for case in literal(f"{field} {value}", param, f'"{field}":{value}', code)
    ),
    *literal("NaN in a field nobody knows", None, '"x":[NaN]', "invalid_json"),
    *literal("NaN as bias", None, '"logit_bias":{"5":NaN}', "invalid_json"),
]
#: A7, A8: amplification.
MANY = [
    *_everywhere("n of five million", "n", n=5_000_000),
    *_everywhere("n 0", "n", n=0),
    *_everywhere("n -1", "n", n=-1),
    *_everywhere("n 129", "n", n=129),
    completion("n times prompts", "n", n=100, prompt=["a"] * 100),
    completion("best_of below n", "best_of", "unsupported_parameter", n=2, best_of=1),
    completion("best_of above n", "best_of", "unsupported_parameter", best_of=10_000),
    chat("top_logprobs of two billion", "top_logprobs", logprobs=True, top_logprobs=2_000_000_000),
    chat("top_logprobs -1", "top_logprobs", logprobs=True, top_logprobs=-1),
    chat("top_logprobs 21", "top_logprobs", logprobs=True, top_logprobs=21),
    chat("top_logprobs without logprobs", "top_logprobs", top_logprobs=2),
    chat("top_logprobs with logprobs false", "top_logprobs", logprobs=False, top_logprobs=0),
    chat("logprobs as number", "logprobs", logprobs=5),
    completion("logprobs 6", "logprobs", logprobs=6),
    completion("logprobs -1", "logprobs", logprobs=-1),
    completion("logprobs true", "logprobs", logprobs=True),
    completion("top_logprobs in a completion", "top_logprobs", "unsupported_parameter", top_logprobs=2),
]
#: A21, A23 and other ways of not being a request.
STRUCTURE = [
    *raw("20,000 brackets", b"[" * 20_000 + b"]" * 20_000),
    *literal("20,000 brackets in a field nobody knows", None, '"x":' + "[" * 20_000 + "]" * 20_000, "invalid_json"),
    *literal("70 objects deep", None, '"metadata":' + '{"a":' * 70 + "1" + "}" * 70, "invalid_json"),
    *literal("a hundred thousand containers", None, '"x":[' + ",".join(["[]"] * 100_001) + "]", "invalid_json"),
    *raw("nothing", b""),
    *raw("null", b"null"),
    *raw("a list", b"[1]"),
    *raw("a text", b'"messages"'),
    *raw("cut off", b'{"messages":[{"role":"user"'),
    *raw("two values", b'{"messages":[]} {}'),
    *raw("brackets that cross", b'{"messages":[}]'),
    *literal("a key twice", None, '"n":1,"n":5000000', "invalid_json"),
    *literal("half a surrogate pair", None, '"user":"x \\ud83d"', "invalid_json"),
    *literal("the other half", None, '"stop":"\\ude00"', "invalid_json"),
    BadRequest("half a pair in a message", CHAT, b'{"messages":[{"role":"user","content":"x \\ud83d"}]}', None, "invalid_json"),
    BadRequest("half a pair in a stream", CHAT, b'{"messages":[{"role":"user","content":"x \\ud83d"}],"stream":true}', None, "invalid_json"),
    BadRequest("invalid UTF-8 in a message", CHAT, b'{"messages":[{"role":"user","content":"\xff\xfe"}]}', None, "invalid_json"),
    *(BadRequest(f"invalid UTF-8 in a field nobody knows {path}", path, b'{"x":"\xc3("}', None, "invalid_json") for path in (CHAT, COMPLETIONS)),
]
#: A25.
MESSAGES = [
    chat("no messages", "messages", messages=[]),
    chat("null messages", "messages", messages=None),
    chat("messages as text", "messages", messages="Hello"),
    chat("message as text", ANY, messages=["Hello"]),
    chat("unknown role", "messages[0].role", messages=[{"role": "wizard", "content": "x"}]),
    chat("role as number", "messages[0].role", messages=[{"role": 5, "content": "x"}]),
    chat("no role", "messages[0].role", messages=[{"content": "x"}]),
    chat("no content", "messages[0].content", messages=[{"role": "user"}]),
    chat("null content", "messages[1].content", messages=[*HELLO, {"role": "user", "content": None}]),
    chat("content as number", "messages[0].content", messages=[{"role": "user", "content": 5}]),
    chat("no parts", "messages[0].content", messages=[{"role": "user", "content": []}]),
    chat("part as text", "messages[1].content[1]", messages=[*HELLO, {"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}]),
    chat("part without type", "messages[0].content[0].type", messages=[{"role": "user", "content": [{"text": "x"}]}]),
    chat("part without text", "messages[0].content[0]", messages=[{"role": "user", "content": [{"type": "text"}]}]),
    chat("part of an unknown type", "messages[0].content[0]", messages=[{"role": "user", "content": [{"type": "smell", "text": "x"}]}]),
    chat(
        "image",
        "messages[0].content[0]",
        "unsupported_parameter",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
    ),
    chat("tool message", "messages[0]", "unsupported_parameter", messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}]),
    chat("tool calls", "messages[0]", "unsupported_parameter", messages=[{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]),
]
#: A29.
STOPS = [
    *_everywhere("empty stop", "stop", stop=""),
    *_everywhere("an empty stop among others", "stop[1]", stop=["a", ""]),
    *_everywhere("a megabyte of stop", "stop", stop="x" * 1_000_000),
    *_everywhere("a stop too long among others", "stop[2]", stop=["a", "b", "é" * 129]),
    *_everywhere("too many stops", "stop", stop=["a"] * 17),
    *_everywhere("stop as number", "stop", stop=5),
    *_everywhere("stops of numbers", "stop[0]", stop=[5]),
]
#: A33 and ranges in general.
RANGES = [
    *_everywhere("temperature 2.1", "temperature", temperature=2.1),
    *_everywhere("temperature 100", "temperature", temperature=100),
    *_everywhere("temperature -0.1", "temperature", temperature=-0.1),
    *_everywhere("temperature as text", "temperature", temperature="1"),
    *_everywhere("top_p 0", "top_p", top_p=0),
    *_everywhere("top_p 1.1", "top_p", top_p=1.1),
    *_everywhere("top_k -2", "top_k", top_k=-2),
    *_everywhere("top_k 2**40", "top_k", top_k=2**40),
    *_everywhere("min_p 1.1", "min_p", min_p=1.1),
    *_everywhere("min_p -0.1", "min_p", min_p=-0.1),
    *_everywhere("repetition_penalty 0", "repetition_penalty", repetition_penalty=0),
    *_everywhere("presence_penalty 2.1", "presence_penalty", presence_penalty=2.1),
    *_everywhere("frequency_penalty -2.1", "frequency_penalty", frequency_penalty=-2.1),
    *_everywhere("priority beyond 32 bits", "priority", priority=2**40),
    *_everywhere("priority without the policy", "priority", "unsupported_parameter", priority=1),
    *_everywhere("stream as text", "stream", stream="yes"),
    *_everywhere("stream options without stream", "stream_options", stream_options={"include_usage": True}),
    *_everywhere("stream options as list", "stream_options", stream=True, stream_options=[]),
    *_everywhere("obfuscation", "stream_options.include_obfuscation", "unsupported_parameter", stream=True, stream_options={"include_obfuscation": True}),
    BadRequest("another model", CHAT, _encode({"model": "gpt-17", "messages": HELLO}), "model", "model_not_found", 404),
    BadRequest("another model for a completion", COMPLETIONS, _encode({"model": "gpt-17", "prompt": "x"}), "model", "model_not_found", 404),
]

BAD_REQUESTS = [*EMPTY, *LENGTHS, *INDICES, *SEEDS, *NOT_NUMBERS, *MANY, *STRUCTURE, *MESSAGES, *STOPS, *RANGES]

#: The same kinds of values at the edge where they are right.
GOOD_REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    (f"{name} {path}", path, {required: value, "max_tokens": 2} | fields)
    for path, required, value in ((CHAT, "messages", HELLO), (COMPLETIONS, "prompt", "Hello"))
    for name, fields in (
        ("least seed", {"seed": -(2**63)}),
        ("greatest seed", {"seed": 2**63 - 1}),
        ("last token id", {"logit_bias": {str(VOCAB_SIZE - 1): -100}, "stop_token_ids": [VOCAB_SIZE - 1]}),
        ("everything null", dict.fromkeys(["temperature", "top_p", "seed", "stop", "n", "logprobs", "logit_bias", "stream", "stream_options"])),
        ("tiny temperature", {"temperature": 1e-6}),
        ("small temperature", {"temperature": 3e-4}),
        ("top_k -1", {"top_k": -1}),
        ("top_k 0", {"top_k": 0}),
        ("top_k beyond the vocabulary", {"top_k": VOCAB_SIZE + 1}),
        ("min_p 1", {"min_p": 1}),
        ("temperature 2", {"temperature": 2}),
        ("integers for numbers", {"temperature": 0, "top_p": 1}),
        ("no stops", {"stop": []}),
        ("sixteen stops of 256 bytes", {"stop": ["é" * 128] * 16}),
        ("a null character in a stop", {"stop": "\0"}),
        ("paired surrogates", {"stop": "\ud83d\ude00"}),
        ("best_of of n", {"n": 2, "best_of": 2}),
        ("60 deep in a field that says nothing", {"metadata": json.loads("[" * 60 + "]" * 60)}),
        ("a field nobody knows", {"no_stop_trim": True}),
        ("priority 0", {"priority": 0}),
    )
]


def is_stream_variant_needed(case: BadRequest) -> bool:
    """Whether the same request can also be asked for as a stream."""
    return case.body.startswith(b"{") and case.body.endswith(b"}") and b'"stream"' not in case.body and b"stream_options" not in case.body


def as_stream(case: BadRequest) -> bytes:
    return case.body[:-1] + b',"stream":true}'
