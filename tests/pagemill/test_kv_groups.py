"""Groups of layers, and the blocks that they need, against a slow restatement that marks positions one by one."""

from __future__ import annotations

import pytest

from pagemill.kv_groups import first_live_block, group_layers, kv_groups, longest_sequence, peak_blocks, pool_capacity
from pagemill.messages.sequences import KvGroup


def test_layers_of_one_kind_are_one_group() -> None:
    assert group_layers([0] * 30) == (tuple(range(30)),)
    assert kv_groups([0] * 30) == (KvGroup(),)
    assert kv_groups([64] * 3) == (KvGroup(window=64),)


def test_groups_are_as_large_as_the_kind_with_the_fewest_layers() -> None:
    windows = [0 if (layer + 1) % 6 == 0 else 512 for layer in range(18)]
    groups = group_layers(windows)
    assert groups[0] == (5, 11, 17)
    assert groups[1:] == ((0, 1, 2), (3, 4, 6), (7, 8, 9), (10, 12, 13), (14, 15, 16))
    assert kv_groups(windows) == (KvGroup(), *[KvGroup(window=512)] * 5)


def test_what_does_not_divide_leaves_the_last_group_of_a_kind_smaller() -> None:
    assert group_layers([0, 64, 64, 0, 64, 64, 64]) == ((0, 3), (1, 2), (4, 5), (6,))


def test_layers_with_different_windows_are_of_different_kinds() -> None:
    assert group_layers([32, 64, 0, 64, 32, 0]) == ((2, 5), (0, 4), (1, 3))


def restated_peak(window: int, num_tokens: int, block_size: int, chunk: int, first: int) -> int:
    """The most blocks live during any chunk, where the first chunk has `first` positions."""
    most, start = 0, 0
    while start < num_tokens:
        end = min(num_tokens, start + (chunk if start else first))
        oldest = max(0, start - window + 1) if window else 0
        most = max(most, len({position // block_size for position in range(oldest, end)}))
        start = end
    return most


@pytest.mark.parametrize("window", [0, 1, 2, 4, 5, 9])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_sequence_holds_at_most_its_peak_and_reaches_it(window: int, chunk: int, block_size: int) -> None:
    for num_tokens in (1, 2, block_size, 17, 61):
        peak = peak_blocks([KvGroup(window=window)], num_tokens, block_size, chunk)
        seen = [restated_peak(window, num_tokens, block_size, chunk, first) for first in range(1, chunk + 1)]
        assert max(seen) <= peak
        assert num_tokens < 61 or max(seen) == peak


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_the_first_live_block_holds_the_oldest_position_in_sight(window: int) -> None:
    for position in range(30):
        oldest = min(other for other in range(position + 1) if other > position - window)
        assert first_live_block(KvGroup(window=window), position, 4) == oldest // 4
    assert first_live_block(KvGroup(), 29, 4) == 0


def test_the_longest_sequence_is_the_last_that_fits() -> None:
    groups = (KvGroup(), KvGroup(window=64), KvGroup(window=64))
    for num_blocks in (2, 3, 12, 15, 16, 40):
        longest = longest_sequence(groups, num_blocks, 16, 4096)
        assert peak_blocks(groups, longest, 16, 1) <= num_blocks < peak_blocks(groups, longest + 1, 16, 1)
    assert longest_sequence(groups, 2, 16, 4096) == 0
    assert longest_sequence(groups, 10**6, 16, 4096) == 4096
    assert longest_sequence([KvGroup(window=64)], 5, 16, 4096) == 4096


def test_a_pool_of_one_group_holds_a_position_in_each_place() -> None:
    assert pool_capacity([KvGroup()], 100, 16, 320) == (1600, 5.0)
    assert pool_capacity([KvGroup()], 100, 16, 17) == (1600, 50.0), "a sequence takes whole blocks"
    assert pool_capacity([KvGroup()], 100, 16, 2560) == (1600, 0.625)


def test_groups_share_a_pool_and_a_window_takes_the_less_of_it_the_longer_sequences_are() -> None:
    groups = (KvGroup(), KvGroup(window=64), KvGroup(window=64))
    assert pool_capacity(groups, 120, 16, 64) == (640, 10.0), "shorter than the window: every group holds it all"
    assert pool_capacity(groups, 120, 16, 480) == (1440, 3.0), "30 blocks and twice the five that a window touches"
    assert pool_capacity([KvGroup(window=64)] * 2, 120, 16, 480) == (5760, 12.0)
