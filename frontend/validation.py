"""From a decoded body to a request that can be run: meaning, defaults, and everything that must hold between fields.

Whatever becomes an index is checked here against what it indexes, without exception for rare fields; the worker checks
again, but a client hears of it from here, by the field's name. Lengths are checked with the scheduler's own maximum.
Everything is decided before a reply begins, so a stream and a buffered reply are refused alike.
This module must not know the scheduler's messages beyond `SamplingParams`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from frontend.chat_template import Message
from frontend.choice import TextOptions
from frontend.errors import context_length_exceeded, invalid_value, model_not_found, unsupported_parameter
from frontend.openai_types import ChatBody, ChatMessage, CompletionBody, ContentPart, GenerationBody, StreamOptions
from frontend.request_fields import MAX_SEQUENCES, MAX_STOP_BYTES, MAX_STOPS, EndpointName, broken, check_ranges
from pagemill.ids import NONE
from pagemill.messages.sequences import SamplingParams

#: What a plain completion generates where nothing is said.
DEFAULT_COMPLETION_TOKENS = 16

ROLES = frozenset({"developer", "system", "user", "assistant"})
_TOOL_ROLES = frozenset({"tool", "function"})
#: Kinds of content parts that exist elsewhere and are refused by their name.
_OTHER_PARTS = frozenset({"image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "refusal", "thinking"})

#: Prompts as the client gave them: texts, or ids that have been checked.
Prompts = Sequence[str] | Sequence[list[int]]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What of a model bounds its requests."""

    names: tuple[str, ...]
    vocab_size: int
    eos_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float]
    knows_developer: bool
    priority_allowed: bool


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A valid request, but for the length of its prompts. `max_tokens` None: as many as there is room for."""

    model: str
    n: int
    max_tokens: int | None
    default_max_tokens: int | None
    sampling: SamplingParams
    text: TextOptions
    seed: int
    priority: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    prompt_fields: tuple[str, ...]  #: what each prompt is blamed on

    def max_tokens_for(self, prompt_field: str, num_prompt_tokens: int, max_model_len: int) -> int:
        """Output tokens that a prompt of this length may get. Raises ApiError (400) if prompt and output do not fit."""
        room = max_model_len - num_prompt_tokens
        if room < 1:
            raise context_length_exceeded(prompt_field, max_model_len, f"the prompt alone has {num_prompt_tokens}")
        max_tokens = min(room, self.default_max_tokens or room) if self.max_tokens is None else self.max_tokens
        if max_tokens > room:
            asked = f"{num_prompt_tokens + max_tokens} were asked for: {num_prompt_tokens} in the prompt and {max_tokens} to generate"
            raise context_length_exceeded(prompt_field, max_model_len, asked)
        if self.sampling.min_tokens > max_tokens:
            raise invalid_value("min_tokens", f"'min_tokens' must not exceed the tokens that may be generated, which are {max_tokens}.")
        return max_tokens

    def certain_tokens(self, max_tokens: int) -> int:
        """Output tokens that a choice has at least if it may have `max_tokens`: where nothing can stop it, all of them."""
        can_stop = bool(self.sampling.stop_token_ids or self.text.stops)
        return self.sampling.min_tokens if can_stop else max_tokens


def chat_request(body: ChatBody, facts: ModelFacts) -> tuple[GenerationRequest, list[Message]]:
    """Raises ApiError (400, or 404 for an unknown model)."""
    check_ranges("chat", body)
    messages = chat_messages(body.messages, facts.knows_developer)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_value("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else NONE
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _request("chat", body, facts, num_logprobs, max_tokens, ("messages",)), messages


def completion_request(body: CompletionBody, facts: ModelFacts) -> tuple[GenerationRequest, Prompts]:
    """Raises ApiError (400, or 404 for an unknown model)."""
    check_ranges("completions", body)
    prompts = _prompts(body.prompt, facts.vocab_size)
    if (body.n or 1) * len(prompts) > MAX_SEQUENCES:
        raise invalid_value("n", f"'n' times the number of prompts must not exceed {MAX_SEQUENCES}.")
    is_list = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    fields = tuple(f"prompt[{index}]" for index in range(len(prompts))) if is_list else ("prompt",)
    return _request("completions", body, facts, NONE if body.logprobs is None else body.logprobs, body.max_tokens, fields), prompts


def chat_messages(messages: Sequence[ChatMessage] | None, knows_developer: bool) -> list[Message]:
    """Messages as templates want them: a role and one string."""
    if not messages:
        raise broken("chat", "messages")
    return [_message(message, f"messages[{index}]", knows_developer) for index, message in enumerate(messages)]


def check_model(model: str | None, names: Sequence[str]) -> str:
    """The name under which the reply is given."""
    if model is None:
        return names[0]
    if model not in names:
        raise model_not_found(names[0])
    return model


def check_token_ids(token_ids: Sequence[object], vocab_size: int, param: str) -> list[int]:
    """Ids that came from outside, all within the tokenizer's vocabulary. Raises ApiError naming the first that is not."""
    if set(map(type, token_ids)) <= {int}:  # a million of them must not hold up the event loop: no loop of ours unless one is wrong
        checked = cast(list[int], list(token_ids))
        if not checked or (min(checked) >= 0 and max(checked) < vocab_size):
            return checked
    wrong = next(index for index, token_id in enumerate(token_ids) if type(token_id) is not int or not 0 <= token_id < vocab_size)
    raise invalid_value(f"{param}[{wrong}]", f"'{param}[{wrong}]' must be a token id from 0 to {vocab_size - 1}.")


def _request(
    endpoint: EndpointName, body: GenerationBody, facts: ModelFacts, num_logprobs: int, max_tokens: int | None, prompt_fields: tuple[str, ...]
) -> GenerationRequest:
    model = check_model(body.model, facts.names)
    options = _stream_options(body)
    min_tokens = body.min_tokens or 0
    if body.priority and not facts.priority_allowed:
        raise unsupported_parameter("priority", "'priority' needs a server with --scheduling-policy priority.")
    stop_token_ids = check_token_ids(body.stop_token_ids or [], facts.vocab_size, "stop_token_ids")
    return GenerationRequest(
        model=model,
        n=body.n or 1,
        max_tokens=max_tokens,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS if endpoint == "completions" else None,
        sampling=_sampling(body, facts, num_logprobs, min_tokens, stop_token_ids),
        text=TextOptions(
            stops=_stops(endpoint, body.stop),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=min_tokens,
            stop_token_ids=frozenset(stop_token_ids),
            logprobs=num_logprobs != NONE,
        ),
        seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
        priority=body.priority or 0,
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        prompt_fields=prompt_fields,
    )


def _sampling(body: GenerationBody, facts: ModelFacts, num_logprobs: int, min_tokens: int, stop_token_ids: Sequence[int]) -> SamplingParams:
    def value(name: str, fallback: float) -> float:
        asked: float | None = getattr(body, name)
        return float(facts.sampling_defaults.get(name, fallback)) if asked is None else asked

    top_k = int(value("top_k", 0))
    eos_ids = () if body.ignore_eos else facts.eos_ids
    return SamplingParams(
        temperature=value("temperature", 1.0),
        top_p=value("top_p", 1.0),
        top_k=top_k if 0 < top_k < facts.vocab_size else 0,  # as many as there are, or more, is no limit
        min_p=value("min_p", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        logit_bias=_logit_bias(body.logit_bias or {}, facts.vocab_size),
        num_logprobs=num_logprobs,
        min_tokens=min_tokens,
        stop_token_ids=tuple(sorted({*eos_ids, *stop_token_ids})),
    )


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    checked = []
    for key, bias in biases.items():
        canonical = key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key
        if not canonical or int(key) >= vocab_size:
            shown = f"logit_bias.{key}" if canonical else "logit_bias"
            raise invalid_value(shown, f"Keys of 'logit_bias' must be token ids from 0 to {vocab_size - 1}.")
        if not -100 <= bias <= 100:
            raise invalid_value(f"logit_bias.{key}", "Values of 'logit_bias' must be numbers from -100 to 100.")
        checked.append((int(key), bias))
    return tuple(sorted(checked))


def _stops(endpoint: EndpointName, stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise broken(endpoint, "stop")
    for index, text in enumerate(stops):
        if not 0 < len(text.encode()) <= MAX_STOP_BYTES:
            name = f"stop[{index}]" if isinstance(stop, list) else "stop"
            raise invalid_value(name, f"'{name}' must have from 1 to {MAX_STOP_BYTES} bytes.")
    return tuple(stops)


def _stream_options(body: GenerationBody) -> StreamOptions:
    if body.stream_options is None:
        return StreamOptions()
    if not body.stream:
        raise invalid_value("stream_options", "'stream_options' needs 'stream' to be true.")
    if body.stream_options.include_obfuscation:
        raise unsupported_parameter("stream_options.include_obfuscation")
    return body.stream_options


def _prompts(prompt: str | list[str | int | list[int]] | None, vocab_size: int) -> Prompts:
    """One or several prompts; never none, and none of them empty ids. An empty text may still get a BOS token."""
    if prompt is None or prompt == []:
        raise broken("completions", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [check_token_ids(prompt, vocab_size, "prompt")]
    kind, words = (str, "a string") if isinstance(prompt[0], str) else (list, "an array of token ids, not empty")
    wrong = next((index for index, item in enumerate(prompt) if type(item) is not kind or item == []), None)
    if wrong is not None:
        raise invalid_value(f"prompt[{wrong}]", f"'prompt[{wrong}]' must be {words}{', as the first is' if wrong else ''}.")
    if kind is str:
        return cast(list[str], prompt)
    return [check_token_ids(ids, vocab_size, f"prompt[{index}]") for index, ids in enumerate(cast(list[list[int]], prompt))]


def _message(message: ChatMessage, param: str, knows_developer: bool) -> Message:
    if message.role in _TOOL_ROLES or message.tool_calls or message.function_call is not None or message.audio is not None:
        raise unsupported_parameter(param, f"'{param}' belongs to tools or audio, which this server does not support.")
    if message.role not in ROLES:
        raise invalid_value(f"{param}.role", f"'{param}.role' must be one of {', '.join(sorted(ROLES))}.")
    role = "system" if message.role == "developer" and not knows_developer else message.role
    if message.content is None:
        raise invalid_value(f"{param}.content", f"'{param}.content' must be a string or an array of text parts.")
    return {"role": role, "content": message.content if isinstance(message.content, str) else _join(message.content, f"{param}.content")}


def _join(parts: Sequence[ContentPart], param: str) -> str:
    """The texts of content parts, one per line."""
    if not parts:
        raise invalid_value(param, f"'{param}' must have at least one part.")
    for index, part in enumerate(parts):
        if part.type in _OTHER_PARTS:
            raise unsupported_parameter(f"{param}[{index}]", f"Content parts of type '{part.type}' are not supported; only text is.")
        if part.type != "text" or part.text is None:
            raise invalid_value(f"{param}[{index}]", f"'{param}[{index}]' must be a part of type 'text' with a text.")
    return "\n".join(part.text or "" for part in parts)
