"""Groups of ranks: shares cover everything once, results are the sums and wholes they should be, and a lost rank is noticed."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch

from tests.helpers.ranks import DEADLINE_S, open_groups, rendezvous, together
from workers.determinism import is_sum_row_independent
from workers.parallel import ALONE, PeerRankLost, TensorParallel, open_group

#: This rank, and the process that is the other one.
Pair = tuple[TensorParallel, subprocess.Popen[bytes]]

ROOT = Path(__file__).resolve().parents[2]


class Place(TensorParallel):
    """Knows its shares; meets nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def places(size: int) -> list[Place]:
    return [Place(rank, size) for rank in range(size)]


def test_a_group_of_one_has_everything_and_does_nothing() -> None:
    alone = open_group(0, 1, "", torch.device("cpu"), ordered=True)
    tensor = torch.ones(2, 3)
    assert alone is ALONE
    assert alone.reduce(tensor) is tensor
    assert alone.gather(tensor, 3) is tensor
    assert alone.exchange(torch.tensor([4, 5])).tolist() == [[4, 5]]
    assert (alone.share(7), alone.kv_share(3), alone.vocabulary_share(515)) == (slice(0, 7), slice(0, 3), slice(0, 515))


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_shares_of_a_dimension_are_equal_and_follow_each_other(size: int) -> None:
    assert [each for place in places(size) for each in range(24)[place.share(24)]] == list(range(24))
    assert len({len(range(24)[place.share(24)]) for place in places(size)}) == 1


def test_what_cannot_be_divided_evenly_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="9 cannot be divided among 2 ranks"):
        Place(0, 2).share(9)


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "held"),
    [(4, 2, [[0, 1], [2, 3]]), (4, 4, [[0], [1], [2], [3]]), (3, 3, [[0], [1], [2]]), (2, 4, [[0], [0], [1], [1]]), (1, 3, [[0], [0], [0]])],
)
def test_kv_heads_are_divided_or_held_by_several_ranks(num_kv_heads: int, size: int, held: list[list[int]]) -> None:
    assert [list(range(num_kv_heads))[place.kv_share(num_kv_heads)] for place in places(size)] == held


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("vocab_size", [512, 515, 49152, 262145])
def test_every_token_id_belongs_to_one_rank(vocab_size: int, size: int) -> None:
    shares = [place.vocabulary_share(vocab_size) for place in places(size)]
    assert [shares[0].start, shares[-1].stop] == [0, vocab_size]
    assert all(before.stop == after.start for before, after in pairwise(shares))
    widths = [share.stop - share.start for share in shares]
    assert min(widths) > 0
    assert max(widths) - min(widths) <= 15, "who has more than others makes them wait"


def test_a_vocabulary_too_small_for_its_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 10 tokens cannot be divided among 4 ranks"):
        [place.vocabulary_share(10) for place in places(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_the_same_sum(size: int, ordered: bool, dtype: torch.dtype) -> None:
    groups = open_groups(size, ordered=ordered)
    parts = torch.randint(-30, 30, (size, 5, 7), generator=torch.Generator().manual_seed(1)).to(dtype)
    sums = together(lambda group: group.reduce(parts[group.rank].clone()), groups)
    for each in sums:
        assert each.dtype == dtype
        assert torch.equal(each, parts.sum(0))


def test_ordered_sums_are_added_up_in_rank_order() -> None:
    groups = open_groups(4)
    large = 2.0**24
    parts = torch.tensor([[large, 1.0, 1.0, -large], [1.0, 1.0, large, -large]]).T.reshape(4, 2, 1).repeat(1, 1, 70)
    sums = together(lambda group: group.reduce(parts[group.rank].clone()), groups)
    assert torch.equal(sums[0][0], torch.zeros(70)), "each one is lost beside the large number"
    assert torch.equal(sums[0][1], torch.full((70,), 2.0)), "the small ones come first"


@pytest.mark.parametrize("ordered", [True, False])
def test_only_ordered_sums_do_not_depend_on_what_is_summed_beside_them(ordered: bool) -> None:
    verdicts = together(lambda group: is_sum_row_independent(group, 576), open_groups(4, ordered=ordered))
    assert verdicts == [ordered] * 4


def test_shares_of_a_vocabulary_are_put_together_in_order_though_they_differ_in_size() -> None:
    groups = open_groups(3)
    whole = torch.randn((4, 515), generator=torch.Generator().manual_seed(2))
    wholes = together(lambda group: group.gather(whole[:, group.vocabulary_share(515)], 515), groups)
    assert len({len(range(515)[group.vocabulary_share(515)]) for group in groups}) > 1
    assert all(torch.equal(each, whole) for each in wholes)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_numbers_are_exchanged_exactly_and_in_rank_order(dtype: torch.dtype) -> None:
    groups = open_groups(3)
    tables = together(lambda group: group.exchange(torch.tensor([group.rank, 2**53 - group.rank], dtype=dtype)), groups)
    for table in tables:
        assert table.dtype == dtype
        assert table.tolist() == [[rank, 2**53 - rank] for rank in range(3)]


def test_who_leaves_is_missed_by_all_others_if_each_leaves_in_turn() -> None:
    groups = open_groups(3)
    groups[1].close()

    def miss(group: TensorParallel) -> str:
        with pytest.raises(PeerRankLost) as caught:
            group.reduce(torch.ones(8))
        group.close()
        return str(caught.value)

    said = together(miss, [groups[0], groups[2]])
    assert all(line.startswith(f"rank {rank} of 3 has lost another rank: ") and "\n" not in line for rank, line in zip((0, 2), said, strict=True))


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Rank 0, here, and rank 1, a process that says so each time that it has met rank 0."""
    with rendezvous() as path:
        command = [sys.executable, "-m", "tests.helpers.rank_process", "1", "2", path]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as other:
            yield open_group(0, 2, path, torch.device("cpu"), ordered=True), other
            other.kill()


def says_something(other: subprocess.Popen[bytes], within_s: float) -> bool:
    assert other.stdout is not None
    return bool(select.select([other.stdout], [], [], within_s)[0])


def meet(group: TensorParallel, other: subprocess.Popen[bytes]) -> None:
    group.exchange(torch.zeros(1, dtype=torch.int64))
    assert says_something(other, DEADLINE_S)
    assert other.stdout is not None
    assert other.stdout.readline() == b"met\n"


def test_sockets_of_a_group_are_bound_to_loopback_only(pair: Pair) -> None:
    group, other = pair
    meet(group, other)
    connections = psutil.Process(other.pid).net_connections("inet")
    assert connections
    assert {connection.laddr.ip for connection in connections} == {"127.0.0.1"}


def test_a_rank_that_waits_for_others_leaves_them_the_processor(pair: Pair) -> None:
    group, other = pair
    meet(group, other)
    process = psutil.Process(other.pid)
    before = process.cpu_times()
    assert not says_something(other, 0.5), "it waits for this rank"
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system <= 0.05


def test_a_rank_that_is_killed_is_missed_by_those_who_wait_for_it(pair: Pair) -> None:
    group, other = pair
    meet(group, other)
    other.kill()
    other.wait(DEADLINE_S)
    with pytest.raises(PeerRankLost, match=r"rank 0 of 2 has lost another rank: .*(closed|reset) by peer"):
        group.exchange(torch.zeros(1, dtype=torch.int64))
