"""From what the ranks of a group report to the numbers of one core."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pagemill.messages.sequences import KvGroup
from pagemill.messages.worker import WorkerReady
from scheduler.worker_group import RanksDiffer, core_config
from tests.helpers.fake_launcher import CONFIG
from tests.helpers.running_scheduler import ready


def test_of_what_there_is_and_how_fast_it_goes_the_least_counts() -> None:
    plenty: dict[str, Any] = {
        "num_blocks": 90,
        "max_model_len": 900,
        "num_swap_slots": 9,
        "prefill_tok_s": 9e3,
        "swap_out_bytes_s": 9e9,
        "swap_in_bytes_s": 9e9,
    }
    reports: dict[int, WorkerReady] = {}
    for rank, (name, value) in enumerate(plenty.items()):
        reports[rank] = ready(rank, **plenty | {name: value / 9 if isinstance(value, float) else value // 9})
    config = core_config(msgspec.structs.replace(CONFIG, num_workers=len(reports)), reports)
    assert {name: getattr(config, name) for name in plenty} == {
        "num_blocks": 10,
        "max_model_len": 100,
        "num_swap_slots": 1,
        "prefill_tok_s": 1e3,
        "swap_out_bytes_s": 1e9,
        "swap_in_bytes_s": 1e9,
    }
    assert (config.num_workers, config.block_size, config.block_bytes) == (len(reports), 16, 1024)


def test_no_more_sequences_run_than_have_a_token_in_each_step() -> None:
    config = msgspec.structs.replace(CONFIG, max_num_seqs=64, max_num_batched_tokens=48)
    assert core_config(config, {0: ready(0)}).max_num_seqs == 48


@pytest.mark.parametrize(
    ("changes", "story"),
    [
        ({"block_size": 32}, "block_size is 16 on ranks 0, 2 but 32 on rank 1"),
        ({"block_bytes": 2048}, "block_bytes is 1024 on ranks 0, 2 but 2048 on rank 1"),
        ({"deterministic": False}, "deterministic is True on ranks 0, 2 but False on rank 1"),
        ({"groups": (KvGroup(), KvGroup(512))}, "groups is"),
    ],
)
def test_ranks_that_mean_different_things_by_a_block_are_refused(changes: dict[str, Any], story: str) -> None:
    with pytest.raises(RanksDiffer, match=story):
        core_config(CONFIG, {2: ready(2), 0: ready(0), 1: ready(1, **changes)})
