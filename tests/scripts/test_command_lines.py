"""Every script explains itself and refuses what it does not know, in a line or two and with the exit codes that shells expect."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lib import served_model
from tests.helpers.script import SCRIPTS, load_bench

PYTHON = sorted(path.name for path in SCRIPTS.iterdir() if path.is_file() and b"python" in path.read_bytes().partition(b"\n")[0])


def run(script: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The exit code. In this process, so that torch is loaded once for all of them."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(served_model, "exec_as_worker", lambda: None)  # which would end this process for another
    with pytest.raises(SystemExit) as ended:
        load_bench(script, as_program=True)
    return ended.value.code


@pytest.mark.parametrize("script", PYTHON)
def test_help_is_an_answer_and_nonsense_is_refused(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(script, monkeypatch, "--help") == 0
    assert f"usage: {script}" in capsys.readouterr().out
    assert run(script, monkeypatch, "--nonsense") == 2
    assert f"{script}: error: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("script", ["bench_kernels", "make_greedy_expectations"])
def test_a_name_that_is_none_is_refused_with_those_that_are(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(script, monkeypatch, "nonsense") == 2
    assert "'nonsense'; choose from " in capsys.readouterr().err


def test_a_tiny_model_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("make_tiny_model", monkeypatch, str(tmp_path)) == 2
    assert capsys.readouterr().err.endswith(f"make_tiny_model: error: cannot make {tmp_path}: File exists\n")


def test_a_file_that_is_no_event_log_is_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("# Pagemill\n")
    assert run("replay", monkeypatch, str(tmp_path / "README.md")) == 2
    assert capsys.readouterr().err == f"replay: {tmp_path}/README.md is no event log\n"


@pytest.mark.parametrize("script", ["setup", "check"])
def test_shell_scripts_do_so_before_they_do_anything(script: str) -> None:
    told, refused = (subprocess.run([SCRIPTS / script, argument], capture_output=True, text=True, check=False) for argument in ("--help", "nonsense"))
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.rstrip().endswith(".")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"scripts/{script}: ")
    assert refused.stderr.count("\n") == 1
