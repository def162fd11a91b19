"""Nothing in the tree can turn data into code: no pickle and its kin, no eval or exec, no shell.

Checked on the syntax tree of every Python file, tests and scripts included, so that a comment may still say `pickle`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = frozenset({"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})
BUILTINS = frozenset({"eval", "exec", "__import__"})
#: Attribute calls that load or run whatever they are given.
CALLS = frozenset({("torch", "load"), ("numpy", "load"), ("np", "load"), ("os", "system"), ("os", "popen"), ("yaml", "load"), ("runpy", "run_path")})
METHODS = frozenset({"recv_pyobj", "send_pyobj", "allow_pickle"})


def python_files() -> list[Path]:
    folders = [ROOT / name for name in ("pagemill", "frontend", "scheduler", "workers", "kvstore", "scripts", "tests")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if path.suffix == ".py" or (path.suffix == "" and b"python" in path.read_bytes().split(b"\n", 1)[0])]


def violations(source: str) -> list[str]:
    reasons = ((getattr(node, "lineno", 0), _violation(node)) for node in ast.walk(ast.parse(source)))
    return [f"line {line}: {reason}" for line, reason in reasons if reason]


def _violation(node: ast.AST) -> str:
    match node:
        case ast.Import(names=names):
            return ", ".join(name.name for name in names if name.name.split(".")[0] in MODULES)
        case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
            return module
        case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
            return f"{name}()"
        case ast.Call(func=ast.Attribute(attr=attribute, value=ast.Name(id=name))) if (name, attribute) in CALLS:
            return f"{name}.{attribute}()"
        case ast.Attribute(attr=attribute) if attribute in METHODS:
            return attribute
        case ast.Call(keywords=keywords):
            return ", ".join(f"{word.arg}=True" for word in keywords if word.arg in ("shell", "allow_pickle", "trust_remote_code") and _is_true(word.value))
    return ""


def _is_true(value: ast.expr) -> bool:
    return not (isinstance(value, ast.Constant) and not value.value)


def test_no_file_can_turn_data_into_code() -> None:
    files = python_files()
    assert len(files) > 40
    found = {str(path.relative_to(ROOT)): bad for path in files if (bad := violations(path.read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import os, dill.source",
        "eval('1')",
        "exec(code)",
        "torch.load(path)",
        "np.load(path)",
        "socket.recv_pyobj()",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=flag)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "__import__('os')",
    ],
)
def test_the_check_itself_sees(source: str) -> None:
    assert len(violations(source)) == 1


@pytest.mark.parametrize("source", ["model.eval()", "subprocess.run(command, shell=False)", "json.load(file)", "'pickle'", "re.compile('x')"])
def test_the_check_does_not_see_what_is_not_there(source: str) -> None:
    assert violations(source) == []
