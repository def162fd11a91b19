"""How large a pool a benchmark asks for."""

from __future__ import annotations

import pytest

from pagemill.messages.sequences import KvGroup
from scripts.lib.served_model import blocks_held
from scripts.lib.simulation import SimulatedEngine
from scripts.lib.workloads import Workload

WORKLOAD = Workload(4, 50, 60)


def seconds(groups: tuple[KvGroup, ...], num_blocks: int) -> float:
    """What the requests take in a pool of so many blocks, simulated."""
    engine = SimulatedEngine(num_blocks=num_blocks, block_size=16, groups=groups, max_num_seqs=4, max_num_batched_tokens=64)
    engine.generate([request.prompt_ids for request in WORKLOAD.requests(seed=1, vocab_size=1000)], max_tokens=WORKLOAD.num_output_tokens)
    return engine.clock()


@pytest.mark.parametrize("groups", [(KvGroup(),), (KvGroup(), KvGroup(window=32), KvGroup(window=32)), (KvGroup(window=32),)])
def test_a_pool_of_what_a_workload_holds_is_as_good_as_any_larger_one(groups: tuple[KvGroup, ...]) -> None:
    enough = blocks_held(groups, WORKLOAD, 16, 64)
    assert seconds(groups, enough) == seconds(groups, 10 * enough) < seconds(groups, enough // 4)
