"""What SIGHUP changes: the settings that a running server can take over, and the names of those that it cannot.

Keys, log level and limits may change; whatever processes, memory or model were built from may not. Pure: what the files
say by then is read by functions that are handed in. Must not know how children are told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pagemill.config import ServeOptions
from pagemill.errors import UsageError
from pagemill.launcher import Reloaded
from pagemill.process import ProcessSpec
from pagemill.resolve import Secrets, Settings, check_pairs, resettle

#: Fields of `ServeOptions`. The two files of keys are read again whether or not their names have changed.
RELOADABLE = ("api_key_file", "admin_key_file", "log_level", "max_queue_time", "max_connections", "restart_limit", "drain_timeout")


class Reloader:
    """Reads everything again. Keeps what is in force, with which the next reload is compared."""

    def __init__(
        self,
        options: ServeOptions,
        secrets: Secrets,
        settings: Settings,
        *,
        read_options: Callable[[], ServeOptions],
        read_secrets: Callable[[ServeOptions], Secrets],
        needs_key: bool,
    ) -> None:
        self.options = options
        self.settings = settings
        self._secrets = secrets
        self._read_options, self._read_secrets = read_options, read_secrets
        self._needs_key = needs_key  #: others can reach the port

    def reload(self, make_specs: Callable[[Settings], Sequence[ProcessSpec]]) -> Reloaded:
        """Raises UsageError; then everything stays as it was."""
        options, needs_restart = merge(self.options, self._read_options())
        check_pairs(options)  # with what stays in force, which the files may no longer say
        secrets = self._read_secrets(options)
        if self._needs_key and not secrets.api_keys:
            raise UsageError("without a key others would be let in: set --api-key-file or PAGEMILL_API_KEY")
        settings = resettle(self.settings, options, secrets)
        reloaded = Reloaded(
            specs=make_specs(settings),
            restart_limit=options.restart_limit,
            drain_timeout_s=float(options.drain_timeout),
            changed=self._changed(options, secrets),
            needs_restart=needs_restart,
        )
        self.options, self.settings, self._secrets = options, settings, secrets
        return reloaded

    def _changed(self, options: ServeOptions, secrets: Secrets) -> tuple[str, ...]:
        settings = [name for name in RELOADABLE if getattr(options, name) != getattr(self.options, name)]
        keys = [name for name in ("api_keys", "admin_keys") if getattr(secrets, name) != getattr(self._secrets, name)]
        return (*settings, *keys)


def merge(running: ServeOptions, wanted: ServeOptions) -> tuple[ServeOptions, tuple[str, ...]]:
    """(`running` with what may change taken from `wanted`, the names of other differences)."""
    different = [name for name in ServeOptions.__struct_fields__ if getattr(running, name) != getattr(wanted, name)]
    taken = {name: getattr(wanted, name) for name in RELOADABLE}
    return msgspec.structs.replace(running, **taken), tuple(name for name in different if name not in RELOADABLE)
