"""What the files of an extension folder declare, read without importing them.

Models, policies and the like are found by the process that uses them, by importing the folder. The launcher
must not import torch or another process, yet should refuse an unknown name before it starts anything: it
reads the same declarations from the source. It must not know any particular family.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, cast

import pagemill

#: Where this distribution is installed: the folder that holds all its packages.
ROOT = Path(pagemill.__file__).resolve().parent.parent


def declarations(package: str) -> list[dict[str, Any]]:
    """For each module of `package`: the names it assigns literally, at its top or in a class of it.

    `declarations("scheduler.policies")` contains `{"NAME": "fcfs", "READS_PRIORITY": False}`.
    """
    files = sorted(ROOT.joinpath(*package.split(".")).glob("*.py"))
    return [_literals(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))) for path in files if path.name != "__init__.py"]


def _literals(tree: ast.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    scopes = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    for statement in (statement for body in scopes for statement in body):
        if isinstance(statement, ast.Assign):
            targets: list[ast.expr] = statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        else:
            continue
        try:
            value = ast.literal_eval(cast(ast.expr, statement.value))
        except ValueError:  # computed, not declared
            continue
        found |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return found
