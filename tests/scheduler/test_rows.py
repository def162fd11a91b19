"""Rows: installed once, extended by what is new, and reused only when nobody can mean the old one."""

from __future__ import annotations

from pagemill.ids import unpack_ids
from pagemill.messages.worker import InstallRow, Plan
from tests.helpers.core_driver import CoreDriver
from tests.helpers.prompts import expected, prompt


def test_the_row_is_installed_once_and_then_extended_by_slices() -> None:
    driver = CoreDriver(block_size=4)
    driver.add(prompt(4), max_tokens=6)
    effects = driver.turn()
    install = next(effect for effect in effects if isinstance(effect, InstallRow))
    plan = next(effect for effect in effects if isinstance(effect, Plan))
    assert list(unpack_ids(install.token_ids)) == prompt(4)
    assert (plan.slices[0].start, plan.slices[0].num_tokens, plan.slices[0].sample) == (0, 4, True)
    driver.answer()
    effects = driver.turn()
    assert not any(isinstance(effect, InstallRow) for effect in effects)
    (piece,) = driver.plans[-1].slices
    assert list(unpack_ids(piece.new_token_ids)) == expected(driver, prompt(4), 1)
    assert len(unpack_ids(piece.new_block_ids[0])) == 1
    driver.answer()
    driver.turn()
    assert driver.plans[-1].slices[0].new_block_ids == (b"",)


def test_a_missing_row_is_installed_again_and_nothing_is_lost() -> None:
    driver = CoreDriver(block_size=4)
    keys = [driver.add(prompt(5, stem), max_tokens=8) for stem in range(3)]
    for _ in range(3):
        driver.step()
    driver.worker.rows.clear()
    driver.run()
    for stem, key in enumerate(keys):
        assert driver.outputs[key] == expected(driver, prompt(5, stem), 8)
    installs = [effect.row for _, _, effects in driver.log for effect in effects if isinstance(effect, InstallRow)]
    assert sorted(installs) == [0, 0, 1, 1, 2, 2]


def test_workers_are_told_which_rows_they_may_forget() -> None:
    driver = CoreDriver()
    first = driver.add(prompt(5), max_tokens=1)
    driver.add(prompt(5, stem=1), max_tokens=4)
    driver.step()
    assert first in driver.finished
    driver.turn()
    assert driver.plans[-1].released_rows == (0,)
    driver.answer()
    driver.add(prompt(5, stem=2), max_tokens=1)
    driver.step()
    driver.add(prompt(5, stem=3), max_tokens=1)
    driver.turn()
    assert not driver.plans[-1].released_rows, "row 0 was installed anew with this plan"


def test_a_row_number_is_reused_only_after_its_plan_is_acknowledged() -> None:
    driver = CoreDriver()
    first = driver.add(prompt(5), max_tokens=50)
    driver.step()
    driver.turn()
    driver.abort(first)
    assert driver.core.rows.accounted()[0] == []
    driver.answer()
    assert driver.core.rows.accounted()[0] == [0]
