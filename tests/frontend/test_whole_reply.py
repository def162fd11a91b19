"""Replies in pieces: the same JSON as if it had been encoded at once, and no piece that takes long to send."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from frontend.choice import Delta, Finish, TokenEntry
from frontend.openai_types import ChatLogprobs, CompletionLogprobs
from frontend.whole_reply import BLOCK_BYTES, GrowingObject, Outcome, Pieces, WholeReply, array, with_field
from pagemill.messages.sequences import TokenLogprobs

ENTRIES = (TokenEntry(5, 0, TokenLogprobs(-1.0, b"", b"")),)


def joined(pieces: Pieces) -> Any:
    return msgspec.json.decode(b"".join(pieces))


def logprobs(tokens: list[str], first: int = 0) -> CompletionLogprobs:
    return CompletionLogprobs(list(range(first, first + len(tokens))), [-1.0] * len(tokens), tokens, [{token: -1.0} for token in tokens])


@given(st.lists(st.text(max_size=5), max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_an_object_that_grew_is_the_object_that_was_there_at_once(tokens: list[str], cuts: list[int]) -> None:
    growing = GrowingObject(logprobs([]))
    before = len(b"".join(growing.pieces()))
    num_bytes = sum(growing.add(logprobs(tokens[start:end], start)) for start, end in pairwise(sorted({0, len(tokens), *cuts})))
    assert joined(growing.pieces()) == msgspec.to_builtins(logprobs(tokens))
    assert 0 <= before + num_bytes - len(b"".join(growing.pieces())) <= 4 * (len(cuts) + 2)


def test_what_is_no_list_stays_as_it_was_at_the_beginning() -> None:
    growing = GrowingObject(ChatLogprobs([]))
    growing.add(ChatLogprobs([]))
    assert joined(growing.pieces()) == {"content": [], "refusal": None}


@pytest.mark.parametrize("items", [[], [b"1"], [b"1", b'"2"', b"{}"]])
@pytest.mark.parametrize("encoded", [b"{}", b'{"b":1}'])
def test_a_field_is_added_to_any_object(encoded: bytes, items: list[bytes]) -> None:
    fields = with_field(with_field((encoded,), "a", array((item,) for item in items)), "c", (b"null",))
    assert joined(fields) == {**msgspec.json.decode(encoded), "a": [msgspec.json.decode(item) for item in items], "c": None}


def test_an_outcome_has_the_texts_of_its_deltas_and_says_what_they_take_up() -> None:
    outcome = Outcome(logprobs([]))
    num_bytes = outcome.add(Delta(0, "a", ENTRIES, 1), logprobs(["a"]))
    assert num_bytes > outcome.add(Delta(0, "é", (), 2, Finish("length")), logprobs([])) > 0
    assert (outcome.text, outcome.finish) == ("aé", Finish("length"))
    assert joined(outcome.encoded_logprobs)["tokens"] == ["a"]
    assert joined(Outcome(None).encoded_logprobs) is None


async def sent_by(reply: WholeReply) -> tuple[list[Message], int]:
    """What it sends, and how many turns others had meanwhile."""
    sent: list[Message] = []
    turns = 0

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read while a reply is sent")

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await reply({"type": "http"}, receive, send)
    task.cancel()
    return sent, turns


@pytest.mark.parametrize("sizes", [[1], [BLOCK_BYTES], [3, 10 * BLOCK_BYTES + 7, 1], [1000] * 1000, [BLOCK_BYTES - 1, 2]])
def test_a_reply_is_sent_in_blocks_between_which_others_have_their_turns(sizes: list[int]) -> None:
    pieces = [bytes([65 + index % 26]) * size for index, size in enumerate(sizes)]
    (start, *bodies), turns = asyncio.run(sent_by(WholeReply(pieces)))
    assert dict(start["headers"])[b"content-length"] == b"%d" % sum(sizes)
    assert dict(start["headers"])[b"content-type"] == b"application/json"
    assert b"".join(message["body"] for message in bodies) == b"".join(pieces)
    assert [message["more_body"] for message in bodies] == [True] * (len(bodies) - 1) + [False]
    assert max(len(message["body"]) for message in bodies) < 2 * BLOCK_BYTES
    assert turns >= len(bodies) - 1
