"""The directory of sockets: private, short, and never left behind for good."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pagemill.errors import UsageError
from pagemill.run_directory import remove_rendezvous, remove_sockets, rendezvous_path, run_directory, socket_address, sweep


@pytest.fixture(autouse=True)
def temporary_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with run_directory() as directory:
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(f"{directory}/w0.0")
        Path(rendezvous_path(directory, 3)).touch()
    assert list(tmp_path.iterdir()) == []


def test_the_place_where_ranks_meet_is_another_in_each_incarnation_and_can_be_removed(tmp_path: Path) -> None:
    old, new = (Path(rendezvous_path(str(tmp_path), incarnation)) for incarnation in (1, 11))
    old.touch()
    new.touch()
    for _ in range(2):
        remove_rendezvous(str(tmp_path), 1)
        assert list(tmp_path.iterdir()) == [new]


def test_the_directory_of_a_killed_server_is_swept_by_the_next(tmp_path: Path) -> None:
    code = "import os, signal\nfrom pagemill.run_directory import run_directory\nwith run_directory(): os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == -9
    (left,) = tmp_path.iterdir()
    with run_directory() as directory:
        assert list(tmp_path.iterdir()) == [Path(directory)]
    assert not left.exists()


def test_the_directory_of_a_living_server_is_left_alone(tmp_path: Path) -> None:
    with run_directory() as first, run_directory() as second:
        sweep(tmp_path)
        assert {first, second} == {str(path) for path in tmp_path.iterdir()}


def test_what_only_looks_like_one_is_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "pagemill-run-link").symlink_to(elsewhere)
    (tmp_path / "pagemill-run-file").touch()
    (tmp_path / "pagemill-run-used").mkdir()
    (tmp_path / "pagemill-run-used" / "thesis.txt").touch()
    (tmp_path / "pagemill-tests").mkdir()
    before = {path.name for path in tmp_path.rglob("*")}
    sweep(tmp_path)
    assert {path.name for path in tmp_path.rglob("*")} == before


def test_what_a_killed_scheduler_bound_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("w0.0.1", "f1.3.1", "w0.1.0", "f0.1.11", "ranks.1"):
        (tmp_path / name).touch()
    remove_sockets(str(tmp_path), 1)
    assert {path.name for path in tmp_path.iterdir()} == {"w0.1.0", "f0.1.11", "ranks.1"}


def test_addresses_name_the_peer_and_both_incarnations() -> None:
    assert socket_address("/tmp/x", "worker", 1, 2, 3) == "ipc:///tmp/x/w1.2.3"
    assert len({socket_address("/x", kind, 0, 0, 0) for kind in ("worker", "frontend", "scheduler")}) == 3


def test_a_path_too_long_for_a_socket_is_refused() -> None:
    assert socket_address("/" + "x" * 99, "worker", 0, 0, 0)
    with pytest.raises(UsageError, match="set TMPDIR to a shorter one"):
        socket_address("/" + "x" * 100, "worker", 0, 0, 0)
