"""Counts agree with the history however it grew, and what was counted once is not looked at again."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest

from workers.token_counts import TokenCounts


class WatchedHistory(array):  # type: ignore[type-arg]
    """Remembers how many of its tokens were read."""

    num_read = 0

    def __getitem__(self, index: slice) -> array[int]:  # type: ignore[override]
        part = super().__getitem__(index)
        self.num_read += len(part)
        return part


@pytest.mark.parametrize("seed", range(20))
def test_a_history_counted_as_it_grows_has_the_counts_of_the_whole(seed: int) -> None:
    draw = random.Random(seed)
    num_prompt, total = draw.randrange(1, 40), 80
    tokens, history, counts = [draw.randrange(30) for _ in range(total)], array("i"), TokenCounts()
    while len(history) < total:
        history.extend(tokens[len(history) : len(history) + draw.choice([0, 1, 1, 1, 7, 50])])
        counts.count(history, num_prompt)
        assert counts.token_ids.tolist() == list(dict.fromkeys(history))
        written = Counter(history[num_prompt:])
        assert counts.num_written.tolist() == [written[token_id] for token_id in counts.token_ids]


def test_the_same_history_counts_once() -> None:
    history, counts = array("i", [3, 1, 3, 3]), TokenCounts()
    for _ in range(3):
        counts.count(history, 1)
    assert dict(zip(counts.token_ids, counts.num_written, strict=True)) == {3: 2, 1: 1}


def test_a_step_reads_its_new_tokens_alone() -> None:
    history, counts = WatchedHistory("i", range(1000)), TokenCounts()
    counts.count(history, 900)
    history.num_read = 0
    history.append(5)
    counts.count(history, 900)
    assert 0 < history.num_read <= 2
    assert counts.num_written[5] == 1
