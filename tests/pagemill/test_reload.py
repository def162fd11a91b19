"""SIGHUP: what a running server takes over, what it names, and what it refuses without changing anything."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from pagemill.config import ServeOptions
from pagemill.errors import UsageError
from pagemill.process import ProcessSpec
from pagemill.reload import RELOADABLE, Reloader, merge
from pagemill.resolve import Secrets, Settings
from tests.pagemill.test_resolve import settled


class World:
    """What the files say."""

    def __init__(self, **options: object) -> None:
        self.options = ServeOptions(**options)  # type: ignore[arg-type]  # a test knows the fields
        self.api_keys: tuple[str, ...] = ()
        self.admin_keys: tuple[str, ...] = ()
        self.settings: list[Settings] = []  #: those from which specs were made

    def secrets(self, _: ServeOptions) -> Secrets:
        return Secrets(api_keys=self.api_keys, admin_keys=self.admin_keys, cache_secret=b"another run's secret")

    def change(self, **options: object) -> None:
        self.options = msgspec.structs.replace(self.options, **options)

    def reloader(self, *, needs_key: bool = False) -> Reloader:
        return Reloader(self.options, self.secrets(self.options), settled(), read_options=lambda: self.options, read_secrets=self.secrets, needs_key=needs_key)

    def make_specs(self, settings: Settings) -> Sequence[ProcessSpec]:
        self.settings.append(settings)
        return []


def test_what_may_change_reaches_the_configs_and_the_launcher() -> None:
    world = World()
    reloader = world.reloader()
    before = reloader.settings
    world.change(log_level="debug", max_queue_time=7, max_connections=100, restart_limit=9, drain_timeout=11)
    world.api_keys, world.admin_keys = ("new",), ("admin",)
    reloaded = reloader.reload(world.make_specs)
    assert (reloaded.restart_limit, reloaded.drain_timeout_s) == (9, 11.0)
    assert reloaded.changed == ("log_level", "max_queue_time", "max_connections", "restart_limit", "drain_timeout", "api_keys", "admin_keys")
    assert reloaded.needs_restart == ()
    (settings,) = world.settings
    assert settings.frontend == msgspec.structs.replace(
        before.frontend, api_keys=("new",), admin_keys=("admin",), log_level="debug", max_queue_time_s=7, max_connections=100
    )
    assert settings.scheduler == msgspec.structs.replace(before.scheduler, log_level="debug")
    assert settings.workers[0] == msgspec.structs.replace(before.workers[0], log_level="debug")


def test_the_runs_own_secret_stays_so_that_cached_prefixes_do() -> None:
    world = World()
    reloader = world.reloader()
    before = reloader.settings.frontend.cache_secret
    reloader.reload(world.make_specs)
    assert world.settings[0].frontend.cache_secret == before


def test_what_may_not_change_is_named_and_stays_and_is_named_again() -> None:
    world = World()
    reloader = world.reloader()
    world.change(max_num_seqs=3, port=1, log_level="error")
    first = reloader.reload(world.make_specs)
    second = reloader.reload(world.make_specs)
    assert first.needs_restart == second.needs_restart == ("port", "max_num_seqs")
    assert (first.changed, second.changed) == (("log_level",), ())
    assert reloader.options == ServeOptions(log_level="error")


def test_a_file_that_cannot_be_read_changes_nothing() -> None:
    world = World()
    reloader = world.reloader()
    before = (reloader.options, reloader.settings)

    def refuse(_: ServeOptions) -> Secrets:
        raise UsageError("--api-key-file: cannot read it")

    world.change(log_level="debug")
    reloader._read_secrets = refuse
    with pytest.raises(UsageError, match="cannot read it"):
        reloader.reload(world.make_specs)
    assert (reloader.options, reloader.settings) == before
    assert world.settings == []


@pytest.mark.parametrize(
    ("running", "wanted", "says"),
    [
        ({"log_requests": True}, {"log_level": "warning"}, "--log-requests writes at level info, which --log-level warning leaves out"),
        ({"log_requests": True}, {"log_requests": False, "log_level": "error"}, "--log-requests writes at level info"),  # it goes on until a restart
        ({"frontends": 4}, {"max_connections": 1}, "--max-connections 1 is less than one for each of --frontends 4"),
    ],
)
def test_a_setting_that_one_in_force_makes_void_is_refused_and_changes_nothing(running: dict[str, object], wanted: dict[str, object], says: str) -> None:
    world = World(**running)
    reloader = world.reloader()
    before = (reloader.options, reloader.settings)
    world.change(**wanted)
    with pytest.raises(UsageError, match=says):
        reloader.reload(world.make_specs)
    assert (reloader.options, reloader.settings) == before
    assert world.settings == []


def test_the_last_key_of_a_server_that_others_reach_cannot_be_taken_away() -> None:
    world = World()
    world.api_keys = ("key",)
    reloader = world.reloader(needs_key=True)
    world.api_keys = ()
    with pytest.raises(UsageError, match="without a key others would be let in"):
        reloader.reload(world.make_specs)
    assert world.reloader(needs_key=False).reload(world.make_specs).changed == ()


def test_every_setting_is_either_taken_over_or_named() -> None:
    running = ServeOptions()
    for field in ServeOptions.__struct_fields__:
        wanted = msgspec.structs.replace(running, **{field: "another"})
        merged, needs_restart = merge(running, wanted)
        assert (getattr(merged, field) == "another", needs_restart) == ((True, ()) if field in RELOADABLE else (False, (field,)))
