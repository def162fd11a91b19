"""Tells a fault of the device or the weights from one of the rows: does the model still compute what it once could?

The probe is a few tokens that came out as numbers when the worker warmed up. They get a pool of their own, one
block, so that asking harms nobody. Asked only when no row of a plan came out right, which may also be the rows'
own doing. Knows no plans.
"""

from __future__ import annotations

from pagemill.ids import NO_PLAN, RowId, SeqId, pack_ids
from pagemill.messages.sequences import SamplingParams
from pagemill.messages.worker import InstallRow, Slice
from workers.rows import Row, RowBounds

_MAX_TOKENS = 4


class DeviceFault(Exception):
    """Nothing that this worker computes can be trusted; the message is one line for the operator."""


def probe_row(bounds: RowBounds) -> tuple[Slice, Row]:
    """A prompt in block 0, to be computed in one step that samples."""
    num_tokens = min(_MAX_TOKENS, bounds.block_size, bounds.max_model_len)
    message = InstallRow(
        epoch=0,
        row=RowId(0),
        version=0,
        seq_id=SeqId(0),
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        num_prompt_tokens=num_tokens,
        token_ids=pack_ids([index % bounds.vocab_size for index in range(num_tokens)]),
        block_tables=(pack_ids([0]),) * len(bounds.groups),
    )
    return Slice(RowId(0), 0, 0, num_tokens, True, b"", NO_PLAN, ()), Row(message, bounds)
