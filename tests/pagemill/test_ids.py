"""Packed ids: what is unpacked is what was packed, and what is no id is refused."""

from __future__ import annotations

from array import array

import pytest

from pagemill.ids import BEHIND, ID_BYTES, NONE, num_ids, pack_ids, unpack_ids


@pytest.mark.parametrize("ids", [[], [0], [NONE, BEHIND], [2**31 - 1, -(2**31), 7]])
def test_ids_come_back_as_they_were_packed_four_bytes_each(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert packed == pack_ids(array("i", ids))
    assert len(packed) == 4 * len(ids) == ID_BYTES * num_ids(packed)
    assert list(unpack_ids(packed)) == ids


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_what_is_no_int32_cannot_be_packed(number: int) -> None:
    with pytest.raises(OverflowError):
        pack_ids([1, number])


def test_a_number_that_was_cut_off_cannot_be_unpacked() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(pack_ids([1, 2])[:-1])
