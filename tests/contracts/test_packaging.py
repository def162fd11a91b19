"""What people install and type: the wheel's content, the scripts, the pins, the commands that the README names."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pagemill import __version__
from pagemill.cli import main

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pagemill", "frontend", "scheduler", "workers", "kvstore")
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file())


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Built without the network, from a copy without caches."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in (*PACKAGES, "scripts", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob(f"pagemill-{__version__}-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_five_packages_and_nothing_else(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert tops == {*PACKAGES, f"pagemill-{__version__}.dist-info"}


def test_the_wheel_holds_every_file_of_the_packages(wheel_names: list[str]) -> None:
    files = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert files <= set(wheel_names)
    assert "pagemill/catalogue.toml" in files


def test_the_wheel_carries_the_licence_and_the_command(wheel_names: list[str]) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)
    assert any(name.endswith("entry_points.txt") for name in wheel_names)


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_every_script_is_an_executable_without_a_suffix(script: Path) -> None:
    assert script.suffix == ""
    assert script.stat().st_mode & stat.S_IXUSR
    assert script.read_bytes().startswith(b"#!")


@pytest.mark.parametrize("script", [path for path in [*SCRIPTS, ROOT / ".ci" / "run"] if b"bash\n" in path.read_bytes()[:30]], ids=lambda path: path.name)
def test_shell_scripts_are_strict_and_parse(script: Path) -> None:
    assert "set -euo pipefail" in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_setup_refuses_an_environment_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "mine").touch()
    done = subprocess.run([str(tmp_path / "scripts" / "setup")], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
    assert (tmp_path / ".venv" / "mine").exists()


def test_setup_says_in_one_line_that_python_is_missing(tmp_path: Path) -> None:
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    done = subprocess.run(
        [str(shutil.which("bash")), str(ROOT / "scripts" / "setup")], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Python 3.11 or newer with the venv module is needed" in done.stderr


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_every_dependency_is_pinned_to_a_version_that_its_requirement_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]]
    for requirement in wanted:
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), requirement
    assert not any("+" in version for version in pins().values())


def test_what_is_installed_is_what_is_pinned() -> None:
    """Otherwise the suite has tested something else than what people get."""
    installed = {name: distribution(name).version.split("+")[0] for name in pins()}
    assert installed == pins()


def test_the_readmes_commands_exist() -> None:
    text = (ROOT / "README.md").read_text()
    scripts = set(re.findall(r"(?:\./)?scripts/([a-z_]+)", text))
    assert {"serve", "test"} <= scripts
    assert all(os.access(ROOT / "scripts" / name, os.X_OK) for name in scripts), scripts
    for flag in set(re.findall(r"pagemill serve[^\n`]*?(--[a-z-]+)", text)):
        assert flag in serve_help(), flag


def serve_help() -> str:
    done = subprocess.run([sys.executable, "-m", "pagemill", "serve", "--help"], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def test_the_command_line_knows_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert __version__ in capsys.readouterr().out
