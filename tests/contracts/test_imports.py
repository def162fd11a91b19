"""Who may import whom, and what a process has loaded once it runs: static contracts do not see what a library drags in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "triton", "numba", "transformers")


def test_imports_point_one_way() -> None:
    done = subprocess.run([str(Path(sys.executable).with_name("lint-imports"))], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def modules_of(package: str) -> list[str]:
    paths = [path for path in (ROOT / package).rglob("*.py") if "static" not in path.parts]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths)


@pytest.mark.parametrize("package", ["frontend", "scheduler", "kvstore", "pagemill"])
def test_nothing_but_the_worker_and_the_converter_loads_torch(package: str) -> None:
    """Imports every module of a package into one fresh process, entry points included."""
    names = modules_of(package)
    assert len(names) > 2
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or ".")
    return found


def test_messages_need_msgspec_ids_and_each_other_only() -> None:
    contract = sorted((ROOT / "pagemill" / "messages").glob("*.py"))
    own = {f"pagemill.messages.{path.stem}" for path in contract} | {"pagemill.ids"}
    assert len(own) > 2
    for path in [ROOT / "pagemill" / "ids.py", *contract]:
        assert imports_of(path) <= {"__future__", "array", "typing", "msgspec"} | own, path


def test_no_import_hides_behind_type_checking() -> None:
    """An import that exists for the type checker only is a cycle that nobody wanted to see."""
    files = [path for package in ("pagemill", "frontend", "scheduler", "workers", "kvstore") for path in (ROOT / package).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in files if "TYPE_CHECKING" in path.read_text(encoding="utf-8")] == []
