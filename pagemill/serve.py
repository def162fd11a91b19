"""`pagemill serve`: from options to a running server, in the order in which things can go wrong.

Options, keys and the port are checked before a model is fetched, the memory plan before anything is
started. It wires parts together and decides nothing itself; what the parts decide is in `resolve`,
`memory_plan` and `launcher`.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import setproctitle

from pagemill import injection, telemetry
from pagemill.arena_file import kept_arena, kept_directory
from pagemill.config import ServeOptions
from pagemill.discovery import ROOT, declarations
from pagemill.errors import UsageError
from pagemill.ids import NONE
from pagemill.key_file import numbered_keys
from pagemill.launcher import ChildDied, Launcher, Reloaded
from pagemill.listening import bind, url_of
from pagemill.loopback import is_loopback
from pagemill.machine import read_machine
from pagemill.messages.control import Progress
from pagemill.messages.wire import ProcessKind
from pagemill.model_info import check_supported, read_model_info
from pagemill.process import ProcessSpec
from pagemill.reload import Reloader
from pagemill.reporting import Reporter, make_reporter
from pagemill.resolve import Model, Secrets, Settings, check_options, settle
from pagemill.run_directory import run_directory
from pagemill.tensor_parallel import collective_environment
from pagemill.threads import thread_environment

_KEY_VARIABLE = "PAGEMILL_API_KEY"
#: They travel to frontends in one frame of the control socket.
_MAX_KEYS_BYTES = 65536
_READY_TIMEOUT_S = 300.0
#: A slow disk, and slow memory: large weights and a large arena get more time.
_SLOWEST_READ_BYTES_PER_S = 50e6
_SLOWEST_TOUCH_BYTES_PER_S = 200e6
_PACKAGES: dict[ProcessKind, str] = {"frontend": "frontend", "scheduler": "scheduler", "worker": "workers"}


def main(options: ServeOptions, read_options: Callable[[], ServeOptions]) -> int:
    """Serves until it is told to stop. `read_options` reads them anew, for SIGHUP. Returns the exit code; raises UsageError."""
    setproctitle.setproctitle("pagemill: launcher")
    telemetry.configure("launcher", options.log_format, options.log_level)
    with _stop_quietly():
        keys = read_secrets(options, os.environ)
        policies = {str(found["NAME"]): bool(found.get("READS_PRIORITY")) for found in declarations("scheduler.policies") if "NAME" in found}
        check_options(options, policies)
        injection.arm(options.inject, kind="launcher", incarnation=0)
        reporter = make_reporter(options.log_format, has_key=bool(keys.api_keys))
        with bind(options.host, options.port, has_key=bool(keys.api_keys)) as listener:
            reporter.on_listening(url_of(listener))
            model = find_model(options.model, reporter)
            settings = settle(options, model, read_machine(), keys, reads_priority=policies.get(options.scheduling_policy, False))
            reporter.on_settled(model, settings)
            reloader = Reloader(
                options,
                keys,
                settings,
                read_options=read_options,
                read_secrets=lambda wanted: read_secrets(wanted, os.environ),
                needs_key=not is_loopback(listener.getsockname()[0]),
            )
            return _launch(reloader, model, listener, reporter)


def _launch(reloader: Reloader, model: Model, listener: socket.socket, reporter: Reporter) -> int:
    options, settings = reloader.options, reloader.settings
    arena_bytes = settings.swap.size_bytes
    with run_directory() as directory, kept_arena(arena_bytes) as arena_fd, kept_directory() as directory_fd:

        def make_specs(wanted: Settings) -> list[ProcessSpec]:
            return process_specs(wanted, listener.fileno(), arena_fd, directory_fd)

        launcher = Launcher(
            make_specs(settings),
            directory=directory,
            token=secrets.token_bytes(32),
            ready_timeout_s=_READY_TIMEOUT_S + model.info.weight_bytes / _SLOWEST_READ_BYTES_PER_S + arena_bytes / _SLOWEST_TOUCH_BYTES_PER_S,
            restart_limit=options.restart_limit,
            drain_timeout_s=float(options.drain_timeout),
            observer=reporter,
            injections=options.inject,
            reload=lambda: _reload(reloader, make_specs),
        )
        try:
            launcher.run(listener)
        except ChildDied as death:
            reporter.on_failed(str(death))
            return 1
    return 0


def _reload(reloader: Reloader, make_specs: Callable[[Settings], list[ProcessSpec]]) -> Reloaded:
    """The launcher's own log level follows at once."""
    reloaded = reloader.reload(make_specs)
    telemetry.configure("launcher", reloader.options.log_format, reloader.options.log_level)
    return reloaded


def process_specs(settings: Settings, listen_fd: int, arena_fd: int = NONE, directory_fd: int = NONE) -> list[ProcessSpec]:
    """Frontends first, so that somebody answers on the port as early as possible."""
    one_thread = _environment(thread_environment(1))
    rank = _environment(thread_environment(settings.workers[0].num_threads) | collective_environment())
    return [
        *(ProcessSpec("frontend", index, _command("frontend"), one_thread, settings.frontend, listen_fd) for index in range(settings.frontend.num_frontends)),
        *(ProcessSpec("worker", worker.rank, _command("worker"), rank, worker, arena_fd=arena_fd) for worker in settings.workers),
        ProcessSpec("scheduler", 0, _command("scheduler"), one_thread, settings.scheduler, directory_fd=directory_fd),
    ]


def find_model(name: str, reporter: Reporter) -> Model:
    """The model called `name`, fetched if need be, with its geometry. Raises UsageError."""
    # What it takes to fetch a model is not needed to refuse a wrong flag.
    from pagemill.model_download import ModelError
    from pagemill.model_store import resolve

    def report(phase: str, fraction: float, detail: str) -> None:
        reporter.on_progress("model", Progress(phase=phase, fraction=fraction, detail=detail))

    try:
        found = resolve(name, report)
    except ModelError as error:
        raise UsageError(str(error)) from None
    info = read_model_info(found.path)
    check_supported(info, [name for module in declarations("workers.models") for name in module.get("ARCHITECTURES", ())])
    return Model(name=found.name, path=found.path, gguf_path=found.gguf_path, fingerprint=found.fingerprint, info=info)


def read_secrets(options: ServeOptions, environment: Mapping[str, str]) -> Secrets:
    """The keys that are asked for, and this run's own secret. Raises UsageError, which never quotes a key."""
    api_keys = read_keys("--api-key-file", options.api_key_file) if options.api_key_file else ()
    variable = environment.get(_KEY_VARIABLE, "").strip()
    if variable and not _is_key(variable):
        raise UsageError(f"{_KEY_VARIABLE} holds characters that cannot stand in an HTTP header")
    api_keys = (*api_keys, *([variable] if variable and variable not in api_keys else []))
    admin_keys = read_keys("--admin-key-file", options.admin_key_file) if options.admin_key_file else ()
    if sum(map(len, api_keys + admin_keys)) > _MAX_KEYS_BYTES:
        raise UsageError(f"all keys together may have {_MAX_KEYS_BYTES} characters; shorten --api-key-file or --admin-key-file")
    return Secrets(api_keys=api_keys, admin_keys=admin_keys, cache_secret=secrets.token_bytes(32))


def read_keys(flag: str, path: str) -> tuple[str, ...]:
    """Every key of a file, once. Raises UsageError, naming the flag."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag}: cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    keys = dict.fromkeys(key for _, key in numbered_keys(text))
    for number, key in numbered_keys(text):
        if not _is_key(key):
            raise UsageError(f"{flag}: {path}: line {number} holds characters that cannot stand in an HTTP header")
    if not keys:
        raise UsageError(f"{flag}: {path} holds no key")
    return tuple(keys)


def _is_key(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def _command(kind: ProcessKind) -> tuple[str, ...]:
    """`python -P -m PACKAGE`, once it is certain that this finds our package and no other of the same name."""
    package = _PACKAGES[kind]
    found = importlib.util.find_spec(package)
    expected = ROOT / package
    if found is None or expected not in [Path(place).resolve() for place in found.submodule_search_locations or ()]:
        elsewhere = found.origin if found is not None else "nowhere"
        raise UsageError(f"the package {package!r} of this installation is in {expected}, but Python finds it in {elsewhere}; reinstall in a fresh environment")
    return (sys.executable, "-P", "-m", package)


def _environment(libraries: Mapping[str, str]) -> dict[str, str]:
    """Ours, without the key, with what libraries read, and with the way to our packages where the launcher found them by the current folder."""
    environment = {name: value for name, value in os.environ.items() if name != _KEY_VARIABLE} | dict(libraries)
    if not sys.flags.safe_path and sys.path and Path(sys.path[0] or ".").resolve() == ROOT:
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    return environment


@contextmanager
def _stop_quietly() -> Iterator[None]:
    """Until the launcher takes over the signals, SIGTERM and Ctrl-C end the program as asked for: exit code 0."""

    def stop(_: int, __: FrameType | None) -> None:
        raise SystemExit(0)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)
