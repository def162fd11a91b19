"""From slices and rows to the tensors of one step.

All sequences of a step lie behind one another in one flat batch; `query_start` says where each begins.
There is no padding but that of the block tables, of which a sequence has one for each KV group. The rows have checked every id, so what is computed
here may be used as an index without another look.

    slices      |  a: 3 tokens  | b: 1 |   c: 4 tokens   |      T = 8, S = 3
    query_start  0               3      4                 8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.kv_groups import first_live_block
from pagemill.messages.worker import Slice
from workers.rows import Row, RowBounds


@dataclass(frozen=True)
class GroupInputs:
    """Where the sequences of a step lie in the blocks of one KV group."""

    slot_mapping: Tensor  #: [T] int64: block_id * block_size + offset, where the token's K and V go
    block_tables: Tensor  #: [S, max_blocks] int32; 0 behind the end, and before the first block that the slice's windows reach


@dataclass(frozen=True)
class StepInputs:
    """One step for the whole model: T tokens of S sequences, N of which sample."""

    token_ids: Tensor  #: [T] int64
    positions: Tensor  #: [T] int64, within the sequence
    query_start: Tensor  #: [S + 1] int32; this and the next on the host, for whoever divides the work asks for them
    context_lens: Tensor  #: [S] int32: KV length including this step's tokens
    sample_rows: Tensor  #: [N] int64: index into T of the last token of each sampling slice
    groups: tuple[GroupInputs, ...]  #: one for each KV group


def build_inputs(slices: Sequence[Slice], rows: Sequence[Row], bounds: RowBounds, device: torch.device) -> StepInputs:
    """The inputs of one step. Every row must be sound and `slices` must not be empty."""
    block_size = bounds.block_size
    num_tokens = np.array([piece.num_tokens for piece in slices], dtype=np.int64)
    starts = np.array([piece.start for piece in slices], dtype=np.int64)
    context_lens = starts + num_tokens
    query_start = np.zeros(len(slices) + 1, dtype=np.int64)
    np.cumsum(num_tokens, out=query_start[1:])
    positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, num_tokens)
    tokens = b"".join(row.token_ids[piece.start : piece.start + piece.num_tokens].tobytes() for piece, row in zip(slices, rows, strict=True))
    owners = np.repeat(np.arange(len(slices)), num_tokens)
    indices, offsets = positions // block_size, positions % block_size
    num_blocks = -(-context_lens // block_size)
    samples = np.array([piece.sample for piece in slices], dtype=np.bool_)

    def on_device(values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(device)

    def of_group(group: int) -> GroupInputs:
        tables = _block_tables(slices, rows, group, bounds, num_blocks)
        # widened before it is multiplied: a slot number may exceed 32 bits
        block_ids = tables[owners, indices].astype(np.int64)
        return GroupInputs(slot_mapping=on_device(block_ids * block_size + offsets), block_tables=on_device(tables))

    return StepInputs(
        token_ids=on_device(np.frombuffer(tokens, dtype=np.int32).astype(np.int64)),
        positions=on_device(positions),
        query_start=torch.from_numpy(query_start.astype(np.int32)),
        context_lens=torch.from_numpy(context_lens.astype(np.int32)),
        sample_rows=on_device((query_start[1:] - 1)[samples]),
        groups=tuple(map(of_group, range(len(bounds.groups)))),
    )


def _block_tables(slices: Sequence[Slice], rows: Sequence[Row], group: int, bounds: RowBounds, num_blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    tables = np.zeros((len(rows), int(num_blocks.max())), dtype=np.int32)
    for table, piece, row, count in zip(tables, slices, rows, num_blocks.tolist(), strict=True):
        first = first_live_block(bounds.groups[group], piece.start, bounds.block_size)
        table[first:count] = np.frombuffer(row.block_tables[group], dtype=np.int32, count=count - first, offset=first * table.itemsize)
    return tables
