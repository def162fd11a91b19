"""Runs a benchmark of scripts/ in this process, so that torch and compiled kernels are loaded once for all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

#: What every line but the last has.
FIELDS = {"bench": str, "scenario": str, "engine": str, "policy": str, "workload": str, "seed": int, "seconds": float, "output_tok_s": float}


def run_bench(name: str, arguments: Sequence[object], capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The measurements and the summary it printed, checked for what all benchmarks promise."""
    with capture_logs():  # without it they would go where the lines go, for nothing configures logging here
        load_bench(name).main([str(argument) for argument in arguments])
    return read_lines(capsys.readouterr().out)


def load_bench(name: str, *, as_program: bool = False) -> Any:
    """The script as a module, or as a program, which it is when it is `__main__`: its file has no suffix, so the loader must be named."""
    module_name = "__main__" if as_program else f"scripts.{name}"
    spec = spec_from_loader(module_name, SourceFileLoader(module_name, str(SCRIPTS / name)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_lines(output: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Splits and checks what a benchmark wrote to standard output."""
    *lines, summary = [json.loads(line) for line in output.splitlines()]
    assert summary["scenario"] == "summary"
    assert lines
    for line in lines:
        assert {name: type(line[name]) for name in FIELDS} == FIELDS
        assert line["seconds"] > 0
        assert line["output_tok_s"] > 0
        assert line["bench"] == summary["bench"]
    return lines, summary
