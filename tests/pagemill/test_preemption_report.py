"""A decision in words: for whom, why, at what price, and why the way that was taken."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.messages.decisions import Decision
from pagemill.preemption_report import PreemptionReport, concerns, heading, paragraph, summary
from tests.helpers.fake_scheduler import decision, victim


def told(made: Decision) -> list[str]:
    return [line.text for line in paragraph(made)]


def outcome(made: Decision) -> str:
    """The last sentence about the first victim."""
    return told(made)[1].rpartition("). ")[2]


def test_a_decision_says_for_whom_who_could_who_did_and_what_the_prices_come_from() -> None:
    alone = victim("third", seq_id=3, kind="keep", yielded=False, freed=0, blocks_to_copy=1, was_running=False)
    made = decision(1, (victim(), alone), backlog_bytes=12_000_000)
    assert told(made) == [
        "first (sequence 1) was running and needed 1 block to go on. 1 of 2 sequences looked at yielded and freed 4 blocks.",
        "  second (sequence 2), running, 12 blocks to free: swap 30.2 ms (4 blocks to copy), recompute 302 ms (187 tokens). "
        "Stopped running, swapped 4 blocks (4 MB): 10 times cheaper than to recompute.",
        "  third (sequence 3), not running, 12 blocks to free: swap 30.2 ms (1 block to copy), recompute 302 ms (187 tokens). Left alone.",
        "  Rates: 4 GB/s out, 3.5 GB/s in, prefill of 620 tokens/s; 12 MB queued on the link; 40 swap slots left.",
    ]
    assert [line.kind for line in paragraph(made)] == [None, "swap", "keep", None]


def test_a_heading_says_how_long_ago_it_was() -> None:
    assert heading(decision(5), 103.75) == "Decision 5, step 50, 2.5 s ago"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("growth", "first (sequence 1) was running and needed 3 blocks to go on."),
        ("start", "first (sequence 1) was to start, or to resume, and needed 3 blocks."),
        ("seat", "first (sequence 1) was to run, and every seat was taken."),
        ("forced", "It was asked for, on behalf of first (sequence 1): 3 blocks to be freed."),
    ],
)
def test_every_reason_has_words(reason: str, words: str) -> None:
    assert told(decision(1, (victim(),), reason=reason, blocks_wanted=3))[0].startswith(words)


def test_that_nobody_could_yield_is_said() -> None:
    assert told(decision())[0].endswith("to go on. Nobody could yield.")


@pytest.mark.parametrize(
    ("changes", "words"),  # of one that did not run
    [
        ({"swap_s": 0.1, "recompute_s": 0.25}, "Swapped 4 blocks (4 MB): 2.5 times cheaper than to recompute."),
        ({"swap_s": 0.1, "recompute_s": 0.102}, "Swapped 4 blocks (4 MB): no dearer than to recompute."),
        ({"swap_s": 0.0, "recompute_s": 0.25}, "Swapped 4 blocks (4 MB): for nothing, where to recompute costs 250 ms."),
        ({"swap_s": 0.0, "recompute_s": 0.0}, "Swapped 4 blocks (4 MB): no dearer than to recompute."),
        ({"swap_s": 0.1, "recompute_s": None}, "Swapped 4 blocks (4 MB): recomputing was not open."),
        ({"swap_s": 0.5, "recompute_s": 0.25}, "Swapped 4 blocks (4 MB): though to recompute was cheaper."),
        ({"kind": "recompute", "freed": 1, "swap_s": 0.5, "recompute_s": 0.004}, "Dropped 1 block to recompute: 125 times cheaper than to swap."),
        ({"kind": "recompute", "swap_s": None, "blocks": 40}, "Dropped 4 blocks to recompute: swapping was not open."),
        ({"kind": "recompute", "swap_s": None, "blocks": 41}, "Dropped 4 blocks to recompute: too few swap slots were left."),
        ({"kind": "recompute", "swap_s": 0.1, "recompute_s": 0.5}, "Dropped 4 blocks to recompute: though to swap was cheaper."),
        ({"kind": "keep", "freed": 0}, "Kept its blocks."),
        ({"kind": "keep", "freed": 2}, "Gave back 2 blocks that it had not used yet and kept the rest."),
    ],
)
def test_the_way_taken_is_justified_by_its_price(changes: dict[str, Any], words: str) -> None:
    assert outcome(decision(1, (victim(**{"was_running": False, **changes}),))) == words


def test_a_seat_is_given_up_with_nothing_freed() -> None:
    seat = victim(kind="keep", blocks=0, blocks_to_copy=0, tokens=0, swap_s=None, recompute_s=0.0, freed=0)
    made = decision(1, (seat,), reason="seat", blocks_wanted=0)
    assert told(made)[1] == "  second (sequence 2), running, nothing of its own to free. Stopped running, kept its blocks."


def test_what_was_asked_for_is_called_so() -> None:
    made = decision(1, (victim(swap_s=0.5, recompute_s=0.25),), reason="forced")
    assert outcome(made) == "Stopped running, swapped 4 blocks (4 MB): as asked for, though to recompute was cheaper."


def test_a_way_that_was_not_open_has_no_price() -> None:
    assert "swap not open (4 blocks to copy), recompute 302 ms" in told(decision(1, (victim(swap_s=None, kind="recompute"),)))[1]
    assert "swap 0 ms (nothing to copy), recompute not open (187 tokens)" in told(decision(1, (victim(swap_s=0.0, blocks_to_copy=0, recompute_s=None),)))[1]


def test_a_name_cannot_steer_the_terminal() -> None:
    lines = told(decision(1, (victim("\x1b[31mred\x07\n"),), request_id="\x9b2Jgone"))
    assert all(line.isprintable() for line in lines)
    assert "red" in lines[1]


def test_a_request_is_concerned_if_it_wanted_room_or_was_looked_at() -> None:
    made = decision(1, (victim(), victim("third")))
    assert [concerns(made, name) for name in ("first", "third", "fourth", "")] == [True, True, False, False]


@pytest.mark.parametrize("name", ["ab12", "cmpl-ab12", "chatcmpl-ab12"])
def test_a_request_may_be_called_by_the_id_of_its_reply(name: str) -> None:
    assert concerns(decision(1, (victim(),), request_id="ab12"), name)
    assert concerns(decision(1, (victim("ab12"),)), name)
    assert not concerns(decision(1, (victim(),)), name)


def test_the_summary_counts_by_kind_and_reason_and_gives_the_bytes() -> None:
    made = [
        decision(1, (victim(), victim(yielded=False, freed=0))),
        decision(2, (victim(freed=2), victim(kind="recompute", freed=1))),
        decision(3, (victim(freed=1000),), reason="start"),
        decision(4, (victim(kind="keep", freed=0),), reason="seat"),
    ]
    report = PreemptionReport(
        200.0, made, {"swap/growth": 1200, "swap/start": 34, "recompute/growth": 5, "keep/seat": 0}, {"out": 4_096_000, "in": 500}, {"out": 0.001, "in": 0.0}
    )
    assert [line.text for line in summary(report)] == [
        "4 decisions (growth 2, start 1, seat 1).",
        "  3 sequences swapped, 1,006 blocks freed (growth 2, start 1).",
        "  1 sequence dropped to recompute, 1 block freed (growth 1).",
        "  1 sequence stopped with all blocks kept (seat 1).",
        "Since the scheduler started: 1,239 preemptions (recompute: growth 5; swap: growth 1,200, start 34).",
        "  Copied 4.1 MB out at 4.1 GB/s, 500 B in.",
    ]


def test_the_summary_says_of_how_many_it_tells_the_newest() -> None:
    report = PreemptionReport(0.0, [decision(114), decision(115)])
    assert [next(summary(report, known)).text for known in (2, 1115)] == ["2 decisions (growth 2).", "Newest 2 of 1,115 decisions (growth 2)."]


def test_without_totals_the_summary_is_of_the_decisions_only() -> None:
    assert [line.text for line in summary(PreemptionReport(0.0, [decision()]))] == ["1 decision (growth 1)."]
