"""Stop strings: found across borders, nothing withheld without reason, the same result however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What is handed on for each piece and at the end, and the stop that was found."""
    watcher = StopStrings(stops, include)
    out = []
    for piece in pieces:
        out.append(watcher.feed(piece))
        if watcher.matched is not None:
            return out, watcher.matched
    return [*out, watcher.flush()], None


def test_a_stop_over_three_pieces_leaves_what_came_before_it() -> None:
    assert run(["own fox"], ["The quick br", "own", " fox", " jumps"]) == (["The quick br", "", ""], "own fox")


def test_only_a_tail_that_begins_a_stop_is_withheld() -> None:
    assert run(["own fox"], ["The quick brown", " cat"]) == (["The quick br", "own cat", ""], None)


def test_text_after_a_stop_within_one_piece_is_not_handed_on() -> None:
    assert run(["."], ["One. Two."]) == (["One"], ".")


def test_what_was_withheld_is_released_when_it_is_disproved() -> None:
    assert run(["\n<|end|>"], ["a\n", "x"]) == (["a", "\nx", ""], None)


def test_what_is_withheld_at_the_end_is_released() -> None:
    assert run(["###"], ["text##"]) == (["text", "##"], None)


def test_a_repeated_beginning_still_matches() -> None:
    assert run(["aab"], ["aa", "ab"]) == (["", "a"], "aab")


def test_the_stop_that_is_complete_first_wins() -> None:
    assert run(["bcd", "c"], ["abcd"])[1] == "c"
    assert run(["abc", "bc"], ["xabc"]) == (["x"], "abc")


def test_an_included_stop_ends_the_text() -> None:
    assert run(["STOP"], ["go ST", "OP on"], include=True) == (["go ", "STOP"], "STOP")


def test_without_stops_everything_passes_at_once() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


@pytest.mark.parametrize("include", [False, True])
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_the_result_does_not_depend_on_where_the_text_is_cut(include: bool, text: str, stops: list[str], data: st.DataObject) -> None:
    whole, matched = run(stops, [text], include)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parts, matched_in_parts = run(stops, pieces, include)
    assert ("".join(parts), matched_in_parts) == ("".join(whole), matched)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_characters_one_by_one_agree_with_a_plain_search(text: str, stops: list[str]) -> None:
    ends = [(end, -len(stop), stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    expected = (text, None) if not ends else (text[: min(ends)[0] + min(ends)[1]], min(ends)[2])
    parts, matched = run(stops, list(text))
    assert ("".join(parts), matched) == expected
