"""What is told of those who were asked to give something up: each of them once, whatever happened to him."""

from __future__ import annotations

from pagemill.messages.decisions import VictimKind
from scheduler.offers import Asked, Offer
from scheduler.sequence import Sequence
from scheduler.swapping import Tail
from tests.helpers.core_driver import CoreDriver


def sequences(number: int) -> list[Sequence]:
    driver = CoreDriver()
    return [driver.core.sequences[driver.add([1, 2, 3])] for _ in range(number)]


def offer(sequence: Sequence, num_blocks: int = 1, *, freed: int = 0, kind: VictimKind = "keep", yielded: bool = False) -> Offer:
    tail = Tail([(index, 0) for index in range(num_blocks)], num_blocks)
    return Offer(sequence, tail, was_running=False, recompute_s=0.5 * num_blocks, freed=freed, kind=kind, yielded=yielded)


def test_who_is_priced_again_is_told_once_at_the_newest_price_and_has_not_yielded() -> None:
    asked, (first, second) = Asked(7, 100), sequences(2)
    asked.looked_at([offer(first, 1), offer(second, 1)])
    asked.looked_at([offer(first, 3)])
    assert [(price.seq_id, price.blocks, price.yielded) for price in asked.prices()] == [(first.seq_id, 3, False), (second.seq_id, 1, False)]
    assert not asked.anybody_yielded
    assert (asked.num_slots, asked.backlog_bytes) == (7, 100)


def test_of_one_who_gives_several_times_the_first_price_is_told_and_all_that_came_of_it() -> None:
    asked, (first,) = Asked(0, 0), sequences(1)
    asked.looked_at([offer(first, 5)])
    asked.took(offer(first, 2, freed=2, kind="swap", yielded=True))
    asked.took(offer(first, 1, freed=1, kind="recompute", yielded=True))
    asked.took(offer(first, 0))
    (price,) = asked.prices()
    assert (price.blocks, price.freed, price.kind, price.yielded) == (2, 3, "recompute", True)
    assert asked.anybody_yielded


def test_what_was_free_as_soon_as_one_stopped_is_told_only_if_that_was_all() -> None:
    asked, (first, second) = Asked(0, 0), sequences(2)
    for sequence in (first, second):
        asked.took(offer(sequence, 0, freed=1, yielded=True))
    asked.took(offer(second, 2, freed=2, kind="swap", yielded=True))
    assert [(price.freed, price.kind) for price in asked.prices()] == [(1, "keep"), (2, "swap")]


def test_of_one_who_had_nothing_to_give_at_first_the_next_offer_is_told() -> None:
    asked, (first,) = Asked(0, 0), sequences(1)
    asked.took(offer(first, 0))
    asked.took(offer(first, 2, freed=2, kind="swap", yielded=True))
    (price,) = asked.prices()
    assert (price.blocks, price.freed, price.kind) == (2, 2, "swap")


def test_the_price_of_a_block_is_that_of_the_cheaper_way() -> None:
    (first,) = sequences(1)
    one = offer(first, 4)
    assert one.price == 0.5
    one.swap_s = 1.0
    assert one.price == 0.25
    assert offer(first, 0).price == 0.0
