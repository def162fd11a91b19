"""Plain completions over HTTP: every form of prompt, order of choices, logprobs in their older shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HubTokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Strip
from tokenizers.decoders import Sequence as DecoderSequence
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from frontend.tokenizer import Tokenizer
from tests.helpers.event_stream import parse_response
from tests.helpers.fake_scheduler import Step, logprobs_of, prompt_ids, tokens
from tests.helpers.frontend_server import MODEL, RunningFrontend, running_frontend
from tests.helpers.tiny_model import tiny_model_path

PATH = "/v1/completions"


def ids_of(text: str) -> list[int]:
    return Tokenizer(tiny_model_path()).encode(text)


def test_a_reply_has_every_key_that_the_specification_requires(frontend: RunningFrontend) -> None:
    frontend.scheduler.script = lambda _: tokens(ids_of(" world"))
    reply = frontend.post(PATH, model=MODEL, prompt="Hello").json()
    assert reply["id"].startswith("cmpl-")
    assert reply["object"] == "text_completion"
    assert reply["choices"] == [{"index": 0, "text": " world", "logprobs": None, "finish_reason": "length", "stop_reason": None}]
    assert reply["usage"]["prompt_tokens"] == len(ids_of("Hello"))


def test_sixteen_tokens_are_the_default(frontend: RunningFrontend) -> None:
    reply = frontend.post(PATH, prompt="Hello").json()
    assert reply["usage"]["completion_tokens"] == 16


def test_the_default_shrinks_to_what_fits_but_a_full_context_is_refused(frontend: RunningFrontend) -> None:
    reply = frontend.post(PATH, prompt=[5] * 511).json()
    assert reply["usage"]["completion_tokens"] == 1
    response = frontend.post(PATH, prompt=[5] * 512)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("prompt", ["Hello", ["Hello"], ids_of("Hello"), [ids_of("Hello")]])
def test_every_form_of_a_prompt_is_the_same_prompt(prompt: object, frontend: RunningFrontend) -> None:
    frontend.post(PATH, prompt=prompt, max_tokens=1)
    (request,) = frontend.scheduler.requests()
    assert prompt_ids(request) == ids_of("Hello")


def test_choices_are_ordered_by_prompt_and_then_by_choice(frontend: RunningFrontend) -> None:
    frontend.scheduler.script = lambda request: tokens([100 + request.key.choice])
    reply = frontend.post(PATH, prompt=["a", "bb"], n=2, max_tokens=1).json()
    texts = [Tokenizer(tiny_model_path()).decode([100 + index]) for index in range(4)]
    assert [choice["text"] for choice in reply["choices"]] == texts
    requests = {request.key.choice: prompt_ids(request) for request in frontend.scheduler.requests()}
    assert [requests[index] for index in range(4)] == [ids_of("a"), ids_of("a"), ids_of("bb"), ids_of("bb")]
    assert reply["usage"]["prompt_tokens"] == len(ids_of("a")) + len(ids_of("bb"))


def test_cached_tokens_count_each_prompt_once(frontend: RunningFrontend) -> None:
    frontend.scheduler.script = lambda request: [Step((40,), "length", cached=10 + request.key.choice)]
    usage = frontend.post(PATH, prompt=["a", "b"], n=2, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 10 + 12


def test_logprobs_have_the_older_shape_and_offsets_into_the_text(frontend: RunningFrontend) -> None:
    ids = [*ids_of("He"), *ids_of("y")]
    steps = [Step((token_id,), logprobs=(logprobs_of(-0.5, {5: -0.1, 6: -0.2}),)) for token_id in ids]
    frontend.scheduler.script = lambda _: [*steps[:-1], Step(steps[-1].tokens, "length", logprobs=steps[-1].logprobs)]
    logprobs = frontend.post(PATH, prompt="x", logprobs=2, max_tokens=9).json()["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "Hey"
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:index])) for index in range(len(ids))]
    assert logprobs["token_logprobs"] == [-0.5] * len(ids)
    assert all(len(top) == 3 and top[token] == -0.5 for top, token in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True))
    stream = parse_response(frontend.post(PATH, prompt="x", logprobs=2, max_tokens=9, stream=True))
    assert stream.logprobs("text_offset") == logprobs["text_offset"]


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFrontend]:
    """A frontend whose tokenizer begins texts with a space and takes it away again, as Llama 2's and Mistral's do."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁France", "▁is", "▁Paris", ".", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = HubTokenizer(BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = DecoderSequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:3]])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = tmp_path_factory.mktemp("sentence_piece")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with running_frontend(model_path=str(folder)) as running:
        running.scheduler.script = lambda _: tokens([6, 6, 7])
        yield running


@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "x"}, " Paris Paris."),
        ({"prompt": [4, 5]}, " Paris Paris."),
        ({"prompt": "x", "stop": " Paris."}, " Paris"),
        ({"prompt": "x", "stop": " Paris"}, ""),
        ({"prompt": ""}, "Paris Paris."),
        ({"prompt": [1]}, "Paris Paris."),
    ],
    ids=["text", "ids", "a later stop", "a stop at once", "nothing", "special ids only"],
)
def test_a_completion_goes_on_where_its_prompt_ends(fields: dict[str, Any], expected: str, stream: bool, sentence_piece: RunningFrontend) -> None:
    response = sentence_piece.post(PATH, **fields, max_tokens=3, stream=stream)
    assert (parse_response(response).text if stream else response.json()["choices"][0]["text"]) == expected


def test_each_prompt_of_several_is_gone_on_with_as_it_ends(sentence_piece: RunningFrontend) -> None:
    reply = sentence_piece.post(PATH, prompt=[[1], [4, 5]], n=2, logprobs=0, max_tokens=3).json()
    assert [choice["text"] for choice in reply["choices"]] == ["Paris Paris."] * 2 + [" Paris Paris."] * 2


def test_a_chat_s_reply_is_a_text_of_its_own(sentence_piece: RunningFrontend) -> None:
    reply = sentence_piece.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=3).json()
    assert reply["choices"][0]["message"]["content"] == "Paris Paris."


def test_a_stream_has_the_shape_of_the_whole_and_ends_with_usage(frontend: RunningFrontend) -> None:
    stream = parse_response(frontend.post(PATH, prompt=["a", "b"], max_tokens=3, stream=True, stream_options={"include_usage": True}))
    buffered = frontend.post(PATH, prompt=["a", "b"], max_tokens=3).json()
    assert stream.done
    assert [stream.text_of(index) for index in range(2)] == [choice["text"] for choice in buffered["choices"]]
    assert [stream.finish_reasons(index) for index in range(2)] == [["length"], ["length"]]
    assert stream.usage == buffered["usage"]
