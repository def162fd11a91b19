"""No check hangs on an assertion: with `python -O` there are none.

What the shipped code asserts is what it knows already and the type checker does not: that something is there, or is of a
type. Whatever comes from outside is checked by code that stays.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("pagemill", "frontend", "scheduler", "workers", "kvstore")


def other_assertions(source: str) -> list[str]:
    """Assertions that are neither `… is not None` nor `isinstance(…)`."""
    asserts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    return [ast.unparse(node.test) for node in asserts if not _only_tells_a_type(node.test)]


def _only_tells_a_type(test: ast.expr) -> bool:
    match test:
        case ast.Compare(ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
        case ast.Call(func=ast.Name(id="isinstance")):
            return True
    return False


def test_assertions_of_the_shipped_code_only_tell_types() -> None:
    files = [path for name in SHIPPED for path in (ROOT / name).rglob("*.py")]
    assert len(files) > 100
    assert {str(path.relative_to(ROOT)): found for path in files if (found := other_assertions(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize("source", ["assert x > 0", "assert x", "assert len(ids) == n, 'short'", "assert x is not None and y", "assert x != None"])
def test_the_check_itself_sees(source: str) -> None:
    assert len(other_assertions(source)) == 1


@pytest.mark.parametrize("source", ["assert x is not None", "assert isinstance(x, int), x", "x = 1"])
def test_the_check_does_not_see_what_is_harmless(source: str) -> None:
    assert other_assertions(source) == []
