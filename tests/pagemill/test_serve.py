"""What `pagemill serve` reads and starts: keys, commands, environments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pagemill.config import ServeOptions
from pagemill.errors import UsageError
from pagemill.ids import NONE
from pagemill.serve import process_specs, read_secrets
from tests.pagemill.test_resolve import settled

KEY = "sk-secret"


def test_keys_come_from_the_file_and_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-one\r\n\n  sk-two \nsk-one\n")
    secrets = read_secrets(ServeOptions(api_key_file=str(file), admin_key_file=str(file)), {"PAGEMILL_API_KEY": "sk-three"})
    assert secrets.api_keys == ("sk-one", "sk-two", "sk-three")
    assert secrets.admin_keys == ("sk-one", "sk-two")
    assert len(secrets.cache_secret) == 32
    assert secrets.cache_secret != read_secrets(ServeOptions(), {}).cache_secret


@pytest.mark.parametrize("value", ["", "  ", "\n"])
def test_an_empty_variable_is_no_key(value: str) -> None:
    assert read_secrets(ServeOptions(), {"PAGEMILL_API_KEY": value}).api_keys == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no key"),
        (b"\n \n", "holds no key"),
        (b"good\nsk-secret \xc3\xa9", "line 2 holds characters that cannot stand in an HTTP header"),
        (b"sk-secret with spaces", "line 1 holds"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_useless_key_file_is_refused_without_quoting_it(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=says) as refused:
        read_secrets(ServeOptions(api_key_file=str(file)), {})
    assert KEY not in str(refused.value)


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--api-key-file: cannot read .*: No such file"):
        read_secrets(ServeOptions(api_key_file=str(tmp_path / "none")), {})


def test_more_keys_than_fit_into_a_frame_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(f"sk-{number:029}" for number in range(1024)))
    assert len(read_secrets(ServeOptions(api_key_file=str(file), admin_key_file=str(file)), {}).admin_keys) == 1024
    with pytest.raises(UsageError, match="all keys together may have 65536 characters"):
        read_secrets(ServeOptions(api_key_file=str(file), admin_key_file=str(file)), {"PAGEMILL_API_KEY": "k"})


def test_a_strange_variable_is_refused_without_quoting_it() -> None:
    with pytest.raises(UsageError, match="PAGEMILL_API_KEY holds characters") as refused:
        read_secrets(ServeOptions(), {"PAGEMILL_API_KEY": f"{KEY}\x00"})
    assert KEY not in str(refused.value)


def test_children_are_started_by_name_with_their_threads_and_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_API_KEY", KEY)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    specs = {spec.kind: spec for spec in process_specs(settled(), listen_fd=5)}
    assert [spec.command for spec in specs.values()] == [(sys.executable, "-P", "-m", name) for name in ("frontend", "workers", "scheduler")]
    assert [specs["frontend"].listen_fd, specs["scheduler"].listen_fd, specs["worker"].listen_fd] == [5, NONE, NONE]
    assert [spec.environment["OMP_NUM_THREADS"] for spec in specs.values()] == ["1", "2", "1"]
    for spec in specs.values():
        assert "PAGEMILL_API_KEY" not in spec.environment
        assert spec.environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_each_rank_is_a_process_of_its_own_whose_sockets_stay_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    specs = process_specs(settled(tensor_parallel_size=2), listen_fd=5, arena_fd=6)
    ranks = [spec for spec in specs if spec.kind == "worker"]
    assert [(spec.index, spec.arena_fd, spec.config) for spec in ranks] == [
        (rank, 6, worker) for rank, worker in enumerate(settled(tensor_parallel_size=2).workers)
    ]
    for spec in ranks:
        assert [spec.environment[name] for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")] == ["1", "lo", "=lo"]


def test_the_arena_is_for_workers_and_the_directory_for_schedulers() -> None:
    specs = process_specs(settled(), listen_fd=5, arena_fd=6, directory_fd=7)
    assert {spec.kind: spec.arena_fd for spec in specs} == {"worker": 6, "frontend": NONE, "scheduler": NONE}
    assert {spec.kind: spec.directory_fd for spec in specs} == {"worker": NONE, "frontend": NONE, "scheduler": 7}
    assert {spec.arena_fd for spec in process_specs(settled(), listen_fd=5)} == {NONE}


def test_all_frontends_share_one_listening_socket() -> None:
    frontends = [spec for spec in process_specs(settled(frontends=3), listen_fd=5) if spec.kind == "frontend"]
    assert [(spec.index, spec.listen_fd) for spec in frontends] == [(0, 5), (1, 5), (2, 5)]


def test_a_package_of_the_same_name_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "scheduler"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match=r"the package 'scheduler' of this installation is in .*, but Python finds it in .*reinstall"):
        process_specs(settled(), listen_fd=5)
