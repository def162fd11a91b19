"""Bodies of requests and replies, as structs: names and types only.

A null field equals an absent one, so every field of a request is optional here; what is required, ranges and meaning are
`frontend.request_fields` and `frontend.validation`. Replies keep the keys that OpenAI's specification requires even when
they are null. This module must not know how anything is computed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# --- requests --------------------------------------------------------------------------------------------


# A body may have 100,000 of each of the first two; the garbage collector need not look at them, for they hold nothing that could hold them.
class ContentPart(msgspec.Struct, gc=False):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, gc=False):
    """`tool_calls` and the like are here to be refused by name."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: msgspec.Raw | None = None
    audio: msgspec.Raw | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields that chat and plain completions share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None


class TokenizeBody(msgspec.Struct):
    """Either a prompt (`content` is another server's word for it) or messages."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    model: str | None = None
    tokens: list[int] | None = None


# --- replies ---------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: msgspec.Raw  #: a list of integers, encoded


class ChatTokenLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: msgspec.Raw
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """Has `logprobs` as well, which are encoded by themselves."""

    index: int
    message: AssistantMessage
    finish_reason: str
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct):
    """All but the `choices`, which are encoded one by one."""

    id: str
    created: int
    model: str
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatFinalChunkChoice(ChatChunkChoice):
    """The chunk that ends a choice also says what ended it."""

    stop_reason: str | int | None = None


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct):
    """Has `logprobs` as well, which are encoded by themselves."""

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class CompletionChunkChoice(CompletionChoice):
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct):
    """All but the `choices`, which are encoded one by one."""

    id: str
    created: int
    model: str
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None


class Model(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    root: str
    object: Literal["model"] = "model"
    owned_by: str = "pagemill"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(msgspec.Struct):
    prompt: str
