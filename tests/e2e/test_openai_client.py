"""The official OpenAI client against a real server: what it sends is understood, what it gets parses."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.helpers.server import running_server

MODEL = "gpt-tiny"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    key_file = tmp_path_factory.mktemp("keys") / "keys"
    key_file.write_text("sk-one\nsk-two\n")
    key_file.chmod(0o600)
    with (
        running_server("--served-model-name", MODEL, "--api-key-file", str(key_file), "--num-blocks", "128") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-two", max_retries=0, timeout=30) as opened,
    ):
        yield opened


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, temperature=0)
    text, reasons, usage = "", [], None
    for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content != ""
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason] == ["length"]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 12
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens // 16 * 16  # the first request left its blocks


def test_a_seed_repeats_and_choices_differ(client: openai.OpenAI) -> None:
    first, second = (client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, n=3, seed=7) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3


def test_logprobs_parse_and_belong_to_the_text(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 6
    data = bytes(byte for entry in choice.logprobs.content for byte in entry.bytes or [])
    assert data.decode("utf-8", "replace") == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy takes the best


def test_a_completion_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=["One, two,", "The quick"], max_tokens=6, temperature=0, logprobs=2)
    texts = ["", ""]
    for chunk in client.completions.create(model=MODEL, prompt=["One, two,", "The quick"], max_tokens=6, temperature=0, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_the_raw_response_carries_the_request_id(client: openai.OpenAI) -> None:
    response = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=1, extra_headers={"X-Request-Id": "mine"})
    assert response.request_id == "mine"


def test_refusals_are_the_client_s_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10**6)
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model=MODEL, messages=HELLO, response_format={"type": "json_object"})
    assert (unsupported.value.code, unsupported.value.param) == ("unsupported_parameter", "response_format")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-three").models.list()


def test_leaving_a_stream_is_no_fault(client: openai.OpenAI) -> None:
    for _ in range(5):
        with client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=500, stream=True) as stream:
            next(iter(stream))
    assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2).choices[0].finish_reason == "length"
