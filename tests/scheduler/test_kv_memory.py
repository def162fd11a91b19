"""KV memory of one sequence: tables that grow together or not at all."""

from __future__ import annotations

from pagemill.messages.sequences import KvGroup
from scheduler.kv_memory import KvMemory
from scheduler.sequence import Sequence
from tests.helpers.core_driver import CoreDriver


def one_sequence(num_groups: int) -> Sequence:
    driver = CoreDriver(groups=(KvGroup(),) * num_groups)
    driver.add([1, 2, 3])
    return driver.core.queues.waiting[0]


def test_growing_takes_a_block_for_each_group_or_changes_nothing() -> None:
    memory, sequence = KvMemory(num_blocks=5, block_size=1, groups=(KvGroup(), KvGroup()), max_chunk=512), one_sequence(2)
    assert memory.capacity_tokens() == 2
    assert not memory.extend(sequence, 3)
    assert [len(table) for table in sequence.tables] == [0, 0]
    assert memory.extend(sequence, 2)
    assert [len(table) for table in sequence.tables] == [2, 2]
    assert memory.pool.num_obtainable == 1
