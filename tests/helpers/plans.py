"""Short spellings of what the scheduler sends to a worker."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.ids import NO_PLAN, PlanId, RowId, SeqId, pack_ids
from pagemill.messages.sequences import SamplingParams
from pagemill.messages.worker import InstallRow, Plan, Slice, Transfer

GREEDY = SamplingParams(temperature=0.0)


def install(
    row: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    *,
    version: int = 1,
    epoch: int = 1,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
    num_prompt_tokens: int | None = None,
) -> InstallRow:
    return InstallRow(
        epoch=epoch,
        row=RowId(row),
        version=version,
        seq_id=SeqId(row + 100),
        sampling=sampling,
        seed=seed,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        token_ids=pack_ids(list(token_ids)),
        block_tables=(pack_ids(list(block_ids)),),
    )


def piece(
    row: int,
    start: int,
    num_tokens: int,
    *,
    version: int = 1,
    sample: bool = True,
    new_tokens: Sequence[int] = (),
    new_blocks: Sequence[int] = (),
    after_plan: PlanId = NO_PLAN,
) -> Slice:
    return Slice(RowId(row), version, start, num_tokens, sample, pack_ids(list(new_tokens)), after_plan, (pack_ids(list(new_blocks)),))


def copy_out(transfer_id: int, block: int, swap_slot: int, *, needed_by: int = NO_PLAN) -> Transfer:
    return Transfer(transfer_id, "device", block, "arena", swap_slot, PlanId(needed_by))


def copy_in(transfer_id: int, swap_slot: int, block: int, *, needed_by: int = NO_PLAN) -> Transfer:
    return Transfer(transfer_id, "arena", swap_slot, "device", block, PlanId(needed_by))


def plan(*slices: Slice, plan_id: int = 1, epoch: int = 1, released: Sequence[int] = (), transfers: Sequence[Transfer] = ()) -> Plan:
    return Plan(epoch, PlanId(plan_id), slices, tuple(transfers), tuple(RowId(row) for row in released))
