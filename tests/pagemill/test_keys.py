"""Prefix keys: equal for equal prefixes, different for anything that the bytes of a block depend on."""

from __future__ import annotations

from array import array

from pagemill.keys import KEY_BYTES, block_key, cache_domain, choice_seed, prefix_keys, root_key

ROOT = root_key(b"model", b"", b"domain")


def tokens(*ids: int) -> array[int]:
    return array("i", ids)


def test_there_is_one_key_for_each_full_block_and_each_hangs_on_the_one_before() -> None:
    keys = prefix_keys(ROOT, tokens(1, 2, 3, 4, 5), 2)
    first = block_key(ROOT, tokens(1, 2))
    assert keys == first + block_key(first, tokens(3, 4))
    assert len(keys) == 2 * KEY_BYTES


def test_a_prompt_shorter_than_a_block_has_no_key() -> None:
    assert prefix_keys(ROOT, tokens(1, 2, 3), 4) == b""
    assert len(prefix_keys(ROOT, tokens(1, 2, 3, 4), 4)) == KEY_BYTES


def test_the_same_tokens_behind_another_prefix_or_root_have_another_key() -> None:
    keys = {
        block_key(ROOT, tokens(1, 2)),
        block_key(ROOT, tokens(2, 1)),
        block_key(block_key(ROOT, tokens(0, 0)), tokens(1, 2)),
        block_key(root_key(b"other", b"", b"domain"), tokens(1, 2)),
        block_key(root_key(b"model", b"adapter", b"domain"), tokens(1, 2)),
        block_key(root_key(b"model", b"", b"other"), tokens(1, 2)),
    }
    assert len(keys) == 6


def test_parts_cannot_be_shifted_into_each_other() -> None:
    assert root_key(b"ab", b"c", b"") != root_key(b"a", b"bc", b"") != root_key(b"", b"abc", b"")


def test_a_cache_domain_needs_the_secret_and_tells_api_keys_apart() -> None:
    assert cache_domain(b"secret", "a") == cache_domain(b"secret", "a")
    assert len({cache_domain(b"secret", "a"), cache_domain(b"secret", "b"), cache_domain(b"other", "a")}) == 3


def test_choices_have_seeds_of_their_own_that_repeat() -> None:
    seeds = [choice_seed(7, choice) for choice in range(100)]
    assert seeds == [choice_seed(7, choice) for choice in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert choice_seed(-1, 0) == choice_seed(2**64 - 1, 0)
    assert choice_seed(8, 0) not in seeds
