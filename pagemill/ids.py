"""The numbers by which processes speak of sequences, blocks, swap slots, rows and plans, and how many of them travel together.

Each kind has a type of its own, so that a type checker notices a block where a slot is meant. Many ids travel as packed native
int32: decoding those costs next to nothing where a list of integers costs most of a message. Must not know any message.
"""

from __future__ import annotations

from array import array
from typing import NewType

SeqId = NewType("SeqId", int)
BlockId = NewType("BlockId", int)
SwapSlotId = NewType("SwapSlotId", int)
RowId = NewType("RowId", int)
PlanId = NewType("PlanId", int)

#: An id that stands for "none".
NONE = -1
NO_PLAN = PlanId(NONE)
NO_ROW = RowId(NONE)
#: An entry of a window group's block table whose positions lie behind the window: no step reads or writes it again.
BEHIND = -2


#: What one packed id takes.
ID_BYTES = 4


def pack_ids(ids: list[int] | array[int]) -> bytes:
    """Token, block or slot ids as packed native int32. Raises OverflowError outside int32."""
    return (ids if isinstance(ids, array) else array("i", ids)).tobytes()


def num_ids(packed: bytes) -> int:
    """How many ids `pack_ids` has packed there."""
    return len(packed) // ID_BYTES


def unpack_ids(packed: bytes) -> array[int]:
    """The inverse of `pack_ids`. Raises ValueError if the length is no multiple of four."""
    ids = array("i")
    ids.frombytes(packed)
    return ids
