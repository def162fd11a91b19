"""The one table of request fields: what is understood, what asks for nothing, and what is refused by name.

Every field that this server, OpenAI's specification or other servers' extensions know has its row here, per endpoint:

  understood   has a `Rule`: what it must look like, its range, its greatest length, and what it indexes
  inert        accepted whatever it says, for no answer depends on it
  refused      400 by name, unless it is null or has a value that asks for nothing; of those that are understood by another
               name the right one is said

A field without a row is unknown: accepted, warned of once, counted, and refused under --strict-request. The structs that
bodies are decoded into (`frontend.openai_types`) hold types only; ranges are checked from here, for all alike.
This module must not know how a request is served.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from frontend.errors import ApiError, invalid_value, misnamed_parameter, unsupported_parameter

EndpointName = Literal["chat", "completions"]
Indexed = Literal["", "vocabulary", "choices", "positions", "top list"]

MAX_CHOICES = 128  #: `n`
MAX_SEQUENCES = 512  #: prompts times `n`
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
_INT64 = 2**63


class Rule(msgspec.Struct, frozen=True):
    """What an understood field must be. `expects` completes the sentence "'field' must be ..."."""

    expects: str
    low: float | None = None
    high: float | None = None
    max_length: int | None = None  #: of a list, a mapping, or a string in characters
    max_bytes: int | None = None  #: of its JSON, where decoding what is too long would already cost much
    indexes: Indexed = ""  #: what an integer in it indexes; checked where the size is known


def _number(low: float, high: float) -> Rule:
    return Rule(f"a number from {low:g} to {high:g}", low, high)


_FLAG = Rule("true or false")

_COMMON: dict[str, Rule] = {
    "model": Rule("a string", max_length=1024),
    "max_tokens": Rule("an integer of at least 1", 1, 2**31 - 1, indexes="positions"),
    "temperature": _number(0, 2),
    "top_p": Rule("a number above 0 and up to 1", math.ulp(0.0), 1),
    "top_k": Rule("an integer, -1 or 0 to switch it off", -1, 2**31 - 1, indexes="top list"),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0.01, 100),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": Rule(
        "an object from token ids to numbers from -100 to 100", max_length=MAX_LOGIT_BIASES, max_bytes=64 * MAX_LOGIT_BIASES, indexes="vocabulary"
    ),
    "seed": Rule("an integer of 64 bits", -_INT64, _INT64 - 1),
    "n": Rule(f"an integer from 1 to {MAX_CHOICES}", 1, MAX_CHOICES, indexes="choices"),
    "stop": Rule(f"a string or an array of at most {MAX_STOPS} strings, none empty or above {MAX_STOP_BYTES} bytes"),
    "stop_token_ids": Rule("an array of token ids", max_length=MAX_STOP_TOKEN_IDS, indexes="vocabulary"),
    "ignore_eos": _FLAG,
    "min_tokens": Rule("an integer from 0 to max_tokens", 0, 2**31 - 1, indexes="positions"),
    "stream": _FLAG,
    "stream_options": Rule("an object with include_usage and continuous_usage_stats"),
    "include_stop_str_in_output": _FLAG,
    "skip_special_tokens": _FLAG,
    "priority": Rule("an integer of 32 bits", -(2**31), 2**31 - 1),
}

UNDERSTOOD: Mapping[EndpointName, Mapping[str, Rule]] = {
    "chat": _COMMON
    | {
        "messages": Rule("an array of messages, not empty", 1, max_length=100_000),
        "max_completion_tokens": _COMMON["max_tokens"],
        "logprobs": Rule("true or false: 'top_logprobs' says how many"),
        "top_logprobs": Rule(f"an integer from 0 to {MAX_TOP_LOGPROBS}", 0, MAX_TOP_LOGPROBS, indexes="top list"),
    },
    "completions": _COMMON
    | {
        "prompt": Rule("a string, an array of strings, an array of token ids, or an array of arrays of token ids", indexes="vocabulary"),
        "logprobs": Rule(f"an integer from 0 to {MAX_COMPLETION_LOGPROBS}", 0, MAX_COMPLETION_LOGPROBS, indexes="top list"),
    },
}

INERT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "include_reasoning"})

#: Field -> values (beside null) that ask for nothing.
_REFUSED_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    # OpenAI, chat completions
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    **dict.fromkeys(("prompt_cache_options", "prompt_cache_retention", "prediction", "moderation", "web_search_options", "audio"), ()),
    # OpenAI, completions (`best_of` equal to `n` asks for nothing either)
    "echo": (False,),
    "suffix": ("",),
    "best_of": (),
    # sampling, as other servers extend it
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "stream_interval": (1,),
    **dict.fromkeys(("truncate_prompt_tokens", "truncation_side", "allowed_token_ids", "logprob_token_ids"), ()),
    **dict.fromkeys(("repetition_detection", "thinking_token_budget"), ()),
    # chat, as other servers extend it
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    # structure
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("regex", "ebnf", "json_schema", "grammar"), ()),
    # system
    **dict.fromkeys(("request_id", "session_id", "cache_salt", "kv_transfer_params", "lora"), ()),
    "return_token_ids": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "timings_per_token": (False,),
    "vllm_xargs": ({},),
    "logits_processors": ([],),
}

#: What other servers, and other routes of this one, call what is understood here: field -> what to use, in words. They are
#: refused as well: who asks for 500 tokens by another name must not be given 16.
_MISNAMED_EVERYWHERE = {
    **dict.fromkeys(("max_new_tokens", "max_tokens_to_sample", "max_output_tokens", "n_predict", "num_predict"), "'max_tokens'"),
    **dict.fromkeys(("stop_sequences", "stop_strings"), "'stop'"),
    **dict.fromkeys(("best_of", "n_cmpl", "num_return_sequences", "candidate_count"), "'n'"),
    "repeat_penalty": "'repetition_penalty'",
    "random_seed": "'seed'",
}
MISNAMED: Mapping[EndpointName, Mapping[str, str]] = {
    "chat": _MISNAMED_EVERYWHERE
    | {
        "prompt": "'messages', or the route /v1/completions",
        **dict.fromkeys(("input", "inputs"), "'messages'"),
        **dict.fromkeys(("system", "instructions"), "a message with the role 'system'"),
    },
    "completions": _MISNAMED_EVERYWHERE
    | {
        "messages": "'prompt', or the route /v1/chat/completions",
        "max_completion_tokens": "'max_tokens'",
        "top_logprobs": "'logprobs', which is a number here",
        **dict.fromkeys(("input", "inputs"), "'prompt'"),
    },
}

REFUSED: Mapping[EndpointName, Mapping[str, tuple[Any, ...]]] = {
    "chat": dict.fromkeys(MISNAMED["chat"], ()) | _REFUSED_EVERYWHERE | {"add_special_tokens": (False,)},
    "completions": dict.fromkeys(MISNAMED["completions"], ()) | _REFUSED_EVERYWHERE | {"add_special_tokens": (True,)},
}

#: The longest value that is looked at to see whether it asks for nothing.
_MAX_NEUTRAL_BYTES = 256


def check_names(endpoint: EndpointName, fields: Mapping[str, msgspec.Raw]) -> None:
    """Raises ApiError (400) for the first field that asks for what is not there, or is too large to be looked at."""
    refused, understood = REFUSED[endpoint], UNDERSTOOD[endpoint]
    for name, raw in fields.items():
        rule = understood.get(name)
        if rule is not None and rule.max_bytes is not None and len(memoryview(raw)) > rule.max_bytes:
            raise broken(endpoint, name)
        if name not in refused or _asks_for_nothing(raw, refused[name]):
            continue
        if name != "best_of" or not _equals_n(fields):
            right = MISNAMED[endpoint].get(name)
            raise unsupported_parameter(name) if right is None else misnamed_parameter(name, right)


def unknown_names(endpoint: EndpointName, names: Iterable[str]) -> list[str]:
    """Those that have no row."""
    return [name for name in names if name not in UNDERSTOOD[endpoint] and name not in INERT and name not in REFUSED[endpoint]]


def check_ranges(endpoint: EndpointName, values: object) -> None:
    """Checks every understood field of a decoded body against its rule. Raises ApiError (400) for the first that breaks it."""
    for name, rule in UNDERSTOOD[endpoint].items():
        value = getattr(values, name)
        if isinstance(value, bool) or value is None:
            continue
        size = len(value) if isinstance(value, str | list | dict) else None
        too_long = size is not None and rule.max_length is not None and size > rule.max_length
        if too_long:
            raise invalid_value(name, f"'{name}' must be {rule.expects}, and no longer than {rule.max_length}.")
        number = value if isinstance(value, int | float) else size
        if number is not None and not _in_range(number, rule):
            raise broken(endpoint, name)


def broken(endpoint: EndpointName, name: str) -> ApiError:
    """The refusal of a field that is not what its rule says."""
    return invalid_value(name, f"'{name}' must be {UNDERSTOOD[endpoint][name].expects}.")


def _in_range(number: float, rule: Rule) -> bool:
    return (rule.low is None or number >= rule.low) and (rule.high is None or number <= rule.high)


def _asks_for_nothing(raw: msgspec.Raw, neutral: tuple[Any, ...]) -> bool:
    if len(memoryview(raw)) > _MAX_NEUTRAL_BYTES:
        return False
    value = _value(raw)
    return value is None or any(type(value) is type(candidate) and value == candidate for candidate in neutral)


def _equals_n(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether `best_of` is `n`, which is 1 if absent or null."""
    n = _value(fields["n"]) if "n" in fields else None
    best_of = _value(fields["best_of"])
    return type(best_of) is int and best_of == (1 if n is None else n)


def _value(raw: msgspec.Raw) -> object:
    """A field's value, or something that equals nothing if Python has no such number (1e400)."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.MsgspecError:
        return object()
