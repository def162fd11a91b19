"""The table of request fields: complete, in agreement with the structs, and what is refused is refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from frontend import request_fields
from frontend.errors import ApiError
from frontend.openai_types import ChatBody, CompletionBody
from frontend.request_fields import INERT, MISNAMED, REFUSED, UNDERSTOOD, EndpointName

BODIES: dict[EndpointName, type[msgspec.Struct]] = {"chat": ChatBody, "completions": CompletionBody}
ENDPOINTS: list[EndpointName] = ["chat", "completions"]

#: OpenAI's specification.
OPENAI: dict[EndpointName, str] = {
    "chat": "messages model frequency_penalty presence_penalty logit_bias logprobs top_logprobs max_completion_tokens max_tokens n seed stop stream "
    "stream_options temperature top_p response_format tools tool_choice parallel_tool_calls reasoning_effort service_tier user safety_identifier metadata "
    "store prompt_cache_key prompt_cache_options prompt_cache_retention verbosity modalities prediction moderation web_search_options audio functions "
    "function_call",
    "completions": "model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options suffix "
    "temperature top_p user",
}
#: Extensions that other servers made common.
EXTENSIONS = (
    "top_k min_p repetition_penalty length_penalty use_beam_search stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens "
    "spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs allowed_token_ids bad_words logprob_token_ids "
    "repetition_detection stream_interval thinking_token_budget echo add_generation_prompt continue_final_message add_special_tokens documents chat_template "
    "chat_template_kwargs include_reasoning structured_outputs guided_json guided_regex guided_choice guided_grammar regex ebnf json_schema grammar priority "
    "request_id session_id cache_salt return_token_ids return_tokens_as_token_ids kv_transfer_params vllm_xargs logits_processors"
)


def raws(fields: dict[str, Any]) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(json.dumps(fields), type=dict[str, msgspec.Raw])


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_of_a_body_has_a_row_and_every_row_a_field(endpoint: EndpointName) -> None:
    assert set(UNDERSTOOD[endpoint]) == set(BODIES[endpoint].__struct_fields__)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_that_is_known_anywhere_has_exactly_one_row(endpoint: EndpointName) -> None:
    known = [*UNDERSTOOD[endpoint], *INERT, *REFUSED[endpoint]]
    assert len(known) == len(set(known))
    assert set(OPENAI[endpoint].split()) | set(EXTENSIONS.split()) <= set(known)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_numbers_that_index_something_have_both_bounds_and_lists_a_length(endpoint: EndpointName) -> None:
    for name, rule in UNDERSTOOD[endpoint].items():
        bounded = (rule.low is not None and rule.high is not None) or rule.max_length is not None
        assert bounded or not rule.indexes or name == "prompt", name  # a prompt is bounded by the context


@pytest.mark.parametrize(("endpoint", "name"), [(endpoint, name) for endpoint in ENDPOINTS for name in REFUSED[endpoint]])
def test_refused_fields_are_refused_by_name_and_null_is_not(endpoint: EndpointName, name: str) -> None:
    for value in ("something", 17, {"a": [1]}, [{"a": 1}], "x" * 1000):
        with pytest.raises(ApiError) as caught:
            request_fields.check_names(endpoint, raws({name: value}))
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_parameter", name)
    request_fields.check_names(endpoint, raws({name: None}))


@pytest.mark.parametrize(("endpoint", "name"), [(endpoint, name) for endpoint in ENDPOINTS for name in REFUSED[endpoint]])
def test_values_that_ask_for_nothing_pass(endpoint: EndpointName, name: str) -> None:
    for value in REFUSED[endpoint][name]:
        request_fields.check_names(endpoint, raws({name: value}))


@pytest.mark.parametrize(
    "fields",
    [{"echo": 0}, {"stream_interval": True}, {"response_format": {"type": "json_object"}}, {"store": True}, {"tools": [{}]}, {"length_penalty": 1.5}],
)
def test_values_that_only_look_like_nothing_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        request_fields.check_names("chat", raws(fields))


@pytest.mark.parametrize(
    ("fields", "passes"),
    [({"n": 3, "best_of": 3}, True), ({"best_of": 1}, True), ({"n": None, "best_of": 1}, True), ({"best_of": 2}, False), ({"n": 2, "best_of": 1}, False)],
)
def test_best_of_passes_only_if_it_equals_n(fields: dict[str, Any], passes: bool) -> None:
    if passes:
        request_fields.check_names("completions", raws(fields))
    else:
        with pytest.raises(ApiError):
            request_fields.check_names("completions", raws(fields))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_is_meant_by_another_name_is_a_field_of_that_endpoint(endpoint: EndpointName) -> None:
    for name, right in MISNAMED[endpoint].items():
        with pytest.raises(ApiError) as caught:
            request_fields.check_names(endpoint, raws({name: 7}))
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)
        assert right in caught.value.detail.message
        meant = re.match(r"'(\w+)'", right)
        assert (meant[1] if meant else "messages") in UNDERSTOOD[endpoint]


@pytest.mark.parametrize(
    ("endpoint", "name", "right"),
    [("completions", "max_completion_tokens", "'max_tokens'"), ("completions", "top_logprobs", "'logprobs'"), ("chat", "prompt", "'messages'")],
)
def test_a_name_from_the_other_endpoint_leads_to_the_right_one(endpoint: EndpointName, name: str, right: str) -> None:
    with pytest.raises(ApiError, match=f"'{name}' is not supported by this route: use {right}"):
        request_fields.check_names(endpoint, raws({name: 5}))


def test_inert_fields_pass_whatever_they_say_and_unknown_ones_are_listed() -> None:
    fields = raws({name: {"a": 1} for name in INERT} | {"no_stop_trim": True, "temperature": 1})
    request_fields.check_names("chat", fields)
    assert request_fields.unknown_names("chat", fields) == ["no_stop_trim"]
