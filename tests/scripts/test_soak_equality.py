"""Nobody can tell from tokens and log probabilities that memory ran out: over 1,000 random cells on the tiny model, and the default one.

The cells run in processes of their own, as `scripts/soak_equality` runs many more of them. They are worth what they
reach, so every value of every axis and everything that may happen must be among them; and what a broken engine
would do is planted, to see that it is found.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagemill.config import ServeOptions
from pagemill.ids import PlanId
from pagemill.messages.worker import InstallRow
from pagemill.model_download import ModelError
from pagemill.model_store import resolve
from scheduler.transfers import Transfers
from scripts.lib.equality import Bench, LateCopier, open_bench
from scripts.lib.equality_cells import SLOW, TINY, CellSource, Scale, every_place
from scripts.lib.equality_tally import Tally
from tests.helpers.script import load_bench
from tests.helpers.tiny_model import tiny_checkpoint
from workers.copiers import Copy, HostCopier, Places
from workers.rows import RowTable
from workers.transfer_order import Direction

ROOT = Path(__file__).resolve().parents[2]
TINY_CELLS = 1_000
#: Of these, on a model with windows beside full layers.
HYBRID_CELLS = 400
DEFAULT_CELLS = 40
#: Enough for each planted fault to show.
FEW = 60

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def soaked() -> subprocess.CompletedProcess[str]:
    """What the script says of all cells."""
    try:
        resolve(ServeOptions().model, lambda phase, fraction, detail: None)
        num_default = DEFAULT_CELLS
    except ModelError:
        num_default = 0
    command = [sys.executable, str(ROOT / "scripts" / "soak_equality"), "--cells", str(TINY_CELLS + num_default), "--default-cells", str(num_default)]
    command += ["--hybrid-cells", str(HYBRID_CELLS)]
    return subprocess.run(command, capture_output=True, text=True, timeout=870, check=False)


@pytest.fixture(scope="module")
def summary(soaked: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert soaked.stdout, soaked.stderr
    last: dict[str, Any] = json.loads(soaked.stdout.splitlines()[-1])
    return last


def test_every_sequence_of_every_cell_gets_the_bits_it_gets_alone(soaked: subprocess.CompletedProcess[str], summary: dict[str, Any]) -> None:
    assert soaked.returncode == 0, soaked.stdout + soaked.stderr
    assert summary["failures"] == 0
    assert summary["cells"] >= TINY_CELLS


def test_the_cells_reach_every_value_of_every_axis_and_everything_that_may_happen(summary: dict[str, Any]) -> None:
    assert summary["never_happened"] == []


# --- what they would find --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_bench(str(tiny_checkpoint("vector-heads")), "float32", TINY) as bench:
        for number in range(FEW):  # a fault must not reach what sequences get alone
            for asked in bench.cells.cell(number).asked:
                bench.alone(asked)
        yield bench


def lose_copies_to_the_device(patch: pytest.MonkeyPatch) -> None:
    copy = HostCopier.start

    def start(self: HostCopier, direction: Direction, places: Sequence[Places], mark: object) -> Copy:
        return copy(self, direction, [] if direction == "in" else places, mark)

    patch.setattr(LateCopier, "start", start)


def overwrite_blocks_that_are_being_copied(patch: pytest.MonkeyPatch) -> None:
    def start(self: HostCopier, direction: Direction, places: Sequence[Places], mark: object) -> Copy:
        time.sleep(0.02)  # nobody waits for it, so this is late
        return HostCopier.start(self, direction, places, mark)

    def make_urgent(self: Transfers, transfer_id: int, plan_id: PlanId) -> None:
        pass

    patch.setattr(LateCopier, "start", start)
    patch.setattr(Transfers, "make_urgent", make_urgent)


def take_output_for_prompt_after_a_preemption(patch: pytest.MonkeyPatch) -> None:
    install = RowTable.install

    def install_longer(self: RowTable, message: InstallRow) -> None:
        install(self, msgspec.structs.replace(message, num_prompt_tokens=len(message.token_ids) // 4))

    patch.setattr(RowTable, "install", install_longer)


@pytest.mark.parametrize("plant", [lose_copies_to_the_device, overwrite_blocks_that_are_being_copied, take_output_for_prompt_after_a_preemption])
def test_a_planted_fault_makes_cells_differ(bench: Bench, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    plant(monkeypatch)
    assert any(bench.run(number).differences for number in range(FEW))


def test_what_is_raised_in_a_cell_says_in_which(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Transfers, direction: Direction) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(Transfers, "budget", broken)
    with pytest.raises(ZeroDivisionError) as caught:
        bench.run(0)
    assert "forced preemptions:" in caught.value.__notes__[0]


def test_the_script_tells_of_cells_that_differ_and_ends_with_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lose_copies_to_the_device(monkeypatch)
    assert load_bench("soak_equality").main(["--part", "tiny", "float32", "0", "10"]) == 1
    output = capsys.readouterr()
    tallies = [msgspec.json.decode(line, type=Tally) for line in output.out.splitlines()]
    failures = [failure for tally in tallies for failure in tally.failures]
    assert failures
    assert all(failure.startswith("tiny float32: cell ") for failure in failures)
    assert failures[0] in output.err


# --- cells -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [TINY, SLOW])
def test_a_cell_is_a_function_of_its_number(scale: Scale) -> None:
    one, other = CellSource(scale), CellSource(scale)
    assert [one.cell(number) for number in (3, 400, 3)] == [other.cell(number) for number in (3, 400, 3)]
    assert one.cell(3) != one.cell(4)


@pytest.mark.parametrize("scale", [TINY, SLOW])
def test_every_sequence_of_a_cell_fits_into_its_pool_and_few_cells_have_room_for_all_at_once(scale: Scale) -> None:
    cells = [CellSource(scale).cell(number) for number in range(50)]
    for cell in cells:
        assert max(asked.num_tokens for asked in cell.asked) <= cell.num_blocks * scale.block_size
        assert cell.num_blocks <= scale.num_blocks
        assert set(cell.places) <= set(every_place())
    crowded = [cell for cell in cells if sum(asked.num_tokens for asked in cell.asked) > cell.num_blocks * scale.block_size]
    assert len(crowded) > len(cells) / 2
