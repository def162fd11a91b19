"""One choice: outputs become deltas, and logprobs travel with the text they belong to."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.choice import Choice, Delta, TextOptions
from frontend.token_bytes import TokenBytes
from pagemill.ids import NONE
from pagemill.messages.frontend import SequenceOutput
from pagemill.messages.sequences import FinishReason, SequenceKey, TokenLogprobs

WORDS = ["", "a", "b", "ab", " the", "\xc3", "\xa9", "."]  # Ã and © stand for the two bytes of é
TOKENS = TokenBytes({"type": "ByteLevel"}, lambda index: WORDS[index].replace(" ", "Ġ") if 0 <= index < len(WORDS) else None, frozenset({0}))


def output(*ids: int, finish: FinishReason | None = None, stop: int = NONE) -> SequenceOutput:
    logprobs = tuple(TokenLogprobs(-float(token_id), b"", b"") for token_id in ids)
    return SequenceOutput(SequenceKey(0, 1, 1, 0), 0, ids, logprobs, finish, stop, 0, 0, 0.0, "")


def run(options: TextOptions, *outputs: SequenceOutput) -> list[Delta]:
    choice = Choice(0, TOKENS, options)
    deltas = []
    for item in outputs:
        deltas.append(choice.feed(item))
        if choice.finish is not None:
            break
    return deltas


def shown(deltas: list[Delta]) -> list[tuple[str, list[int]]]:
    return [(delta.text, [entry.token_id for entry in delta.entries]) for delta in deltas]


def test_an_entry_waits_for_its_text() -> None:
    deltas = run(TextOptions(stops=("abX",), logprobs=True), output(1), output(2), output(4), output(7, finish="length"))
    assert shown(deltas) == [("", []), ("", []), ("ab the", [1, 2, 4]), (".", [7])]
    assert [entry.offset for delta in deltas for entry in delta.entries] == [0, 1, 2, 6]


def test_an_entry_that_a_stop_cuts_is_shown_and_those_within_the_stop_are_not() -> None:
    deltas = run(TextOptions(stops=("b.",), logprobs=True), output(3), output(7), output(1))
    assert shown(deltas) == [("a", []), ("", [3])]
    assert deltas[-1].keep == 2
    assert deltas[-1].finish is not None
    assert (deltas[-1].finish.reason, deltas[-1].finish.stop_reason) == ("stop", "b.")


def test_halves_of_a_character_have_entries_of_their_own() -> None:
    deltas = run(TextOptions(logprobs=True), output(5), output(6, finish="length"))
    assert "".join(delta.text for delta in deltas) == "é"
    assert [entry.token_id for delta in deltas for entry in delta.entries] == [5, 6]


def test_a_stop_token_is_counted_but_not_shown() -> None:
    (delta,) = run(TextOptions(logprobs=True, stop_token_ids=frozenset({7})), output(1, 7, finish="stop", stop=7))
    assert shown([delta]) == [("a", [1])]
    assert delta.num_tokens == 2
    assert delta.finish is not None
    assert delta.finish.stop_reason == 7
    assert delta.keep is None


def test_what_is_flushed_at_the_end_can_complete_a_stop() -> None:
    deltas = run(TextOptions(stops=("a\ufffd",)), output(1, 5, finish="length"))
    assert (deltas[-1].text, deltas[-1].finish) == ("", deltas[-1].finish)
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.reason == "stop"


def test_tokens_behind_a_stop_in_the_same_output_do_not_count() -> None:
    (delta,) = run(TextOptions(stops=(".",)), output(1, 7, 1, 1))
    assert (delta.text, delta.num_tokens, delta.keep) == ("a", 2, 2)


@pytest.mark.parametrize("include", [False, True])
@given(ids=st.lists(st.integers(1, 7), min_size=1, max_size=12), stops=st.lists(st.text("ab. é", min_size=1, max_size=3), max_size=2), data=st.data())
def test_the_reply_does_not_depend_on_how_tokens_are_grouped(include: bool, ids: list[int], stops: list[str], data: st.DataObject) -> None:
    options = TextOptions(stops=tuple(stops), include_stop=include, logprobs=True)
    cuts = sorted({0, len(ids), *data.draw(st.lists(st.integers(0, len(ids)), max_size=4))})
    groups = [ids[start:end] for start, end in pairwise(cuts)]
    one_by_one = run(options, *(output(token_id, finish="length" if index == len(ids) - 1 else None) for index, token_id in enumerate(ids)))
    grouped = run(options, *(output(*group, finish="length" if index == len(groups) - 1 else None) for index, group in enumerate(groups)))

    def summary(deltas: list[Delta]) -> object:
        entries = [(entry.token_id, entry.offset) for delta in deltas for entry in delta.entries]
        return "".join(delta.text for delta in deltas), entries, deltas[-1].finish, deltas[-1].num_tokens

    assert summary(one_by_one) == summary(grouped)
