"""Declarations read from source, without importing what declares them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill import discovery
from pagemill.discovery import declarations
from scheduler.policies import load_policies


def test_literals_of_modules_and_classes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "ROOT", tmp_path)
    folder = tmp_path / "animals" / "mammals"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("NAME = 'not a member'")
    (folder / "a.py").write_text("LEGS = 4\nNAME = compute()\nNAME: str\nclass Mammal:\n    NAME: str = 'cow'\n    KINDS = ('x', 'y')\n")
    (folder / "b.py").write_text("raise SystemExit('is never run')\n")
    assert declarations("animals.mammals") == [{"LEGS": 4, "NAME": "cow", "KINDS": ("x", "y")}, {}]


def test_a_family_that_does_not_exist_declares_nothing() -> None:
    assert declarations("no.such.family") == []


def test_what_is_declared_is_what_the_policies_say_of_themselves() -> None:
    assert {found["NAME"]: found["READS_PRIORITY"] for found in declarations("scheduler.policies")} == {
        name: policy.READS_PRIORITY for name, policy in load_policies().items()
    }


def test_the_models_that_have_a_file_are_known() -> None:
    architectures = [name for found in declarations("workers.models") for name in found.get("ARCHITECTURES", ())]
    assert "LlamaForCausalLM" in architectures
