"""What the launcher shows: tables, a progress bar and a banner to a person, structured lines to a machine.

Both kinds of reporter hear the same events. Must not decide anything, and never sees a secret.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pagemill.config import WorkerConfig
from pagemill.group_progress import group_name
from pagemill.memory_plan import MemoryPlan
from pagemill.messages import control
from pagemill.resolve import Model, Settings
from pagemill.swap_plan import SwapPlan
from pagemill.telemetry import get_logger, resolve_format
from pagemill.threads import thread_environment

log = get_logger("pagemill.launcher")


class Reporter(Protocol):
    """Hears what the launcher does; the events from `on_progress` on are those of `launcher.Observer`."""

    def on_listening(self, url: str) -> None: ...
    def on_settled(self, model: Model, settings: Settings) -> None: ...
    def on_progress(self, process: str, progress: control.Progress) -> None: ...
    def on_process_ready(self, process: str, detail: str) -> None: ...
    def on_ready(self) -> None: ...
    def on_process_lost(self, process: str, reason: str, num_deaths: int, limit: int) -> None: ...
    def on_process_back(self, process: str, seconds: float) -> None: ...
    def on_start_failed(self, process: str, reason: str) -> None: ...
    def on_recovered(self, seconds: float) -> None: ...
    def on_reloaded(self, changed: tuple[str, ...], needs_restart: tuple[str, ...]) -> None: ...
    def on_reload_refused(self, reason: str) -> None: ...
    def on_stopping(self, reason: str) -> None: ...
    def on_killed(self, process: str) -> None: ...
    def on_failed(self, reason: str) -> None: ...


def make_reporter(log_format: str, *, has_key: bool) -> Reporter:
    """The kind of reporter that fits what reads stderr."""
    return ConsoleReporter(has_key) if resolve_format(log_format) == "console" else LogReporter()


class LogReporter:
    """For machines: one structured line each, progress at most every tenth of a phase."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._url = ""
        self._last_progress: dict[str, tuple[str, int]] = {}  #: process -> phase, tenth

    def on_listening(self, url: str) -> None:
        self._url = url
        log.info("listening", url=url)

    def on_settled(self, model: Model, settings: Settings) -> None:
        log.info("model_resolved", model=model.name, architecture=model.info.architecture, device=settings.device, dtype=settings.dtype)
        threads, cpus = thread_environment(settings.workers[0].num_threads), [worker.cpus for worker in settings.workers]
        log.info("threads_set", worker=threads, others=1, ranks=len(cpus), cpus=cpus)
        plan, swap = settings.plan, settings.swap
        if plan is None:
            log.info("swap_planned", swap_bytes=swap.size_bytes, num_swap_slots=swap.num_slots)
            self._warn(swap.notes)
            return
        log.info(
            "memory_planned",
            weight_bytes=plan.weight_bytes,
            rotary_bytes=plan.rotary_bytes,
            activation_bytes=plan.activation_bytes,
            kv_bytes=plan.kv_bytes,
            swap_bytes=swap.size_bytes,
            overhead_bytes=plan.overhead_bytes,
            available_bytes=plan.available_bytes,
            num_blocks=plan.num_blocks,
            num_swap_slots=swap.num_slots,
            max_model_len=plan.max_model_len,
        )
        self._warn(plan.notes)

    def on_progress(self, process: str, progress: control.Progress) -> None:
        step = (progress.phase, int(progress.fraction * 10))
        if self._last_progress.get(process) != step:
            self._last_progress[process] = step
            log.info("loading", child=process, phase=progress.phase, fraction=round(progress.fraction, 3), detail=progress.detail)

    def on_process_ready(self, process: str, detail: str) -> None:
        log.info("process_ready", child=process, detail=detail)

    def on_ready(self) -> None:
        log.info("ready", url=self._url, seconds=round(time.monotonic() - self._started, 2))

    def on_process_lost(self, process: str, reason: str, num_deaths: int, limit: int) -> None:
        log.error("process_lost", child=process, reason=reason, deaths=num_deaths, restart_limit=limit)

    def on_process_back(self, process: str, seconds: float) -> None:
        log.info("process_restarted", child=process, seconds=round(seconds, 2))

    def on_start_failed(self, process: str, reason: str) -> None:
        log.error("start_failed", child=process, reason=reason)

    def on_recovered(self, seconds: float) -> None:
        log.info("server_ready", seconds=round(seconds, 2))

    def on_reloaded(self, changed: tuple[str, ...], needs_restart: tuple[str, ...]) -> None:
        log.info("reloaded", changed=changed)
        if needs_restart:
            log.warning("reload_incomplete", needs_restart=needs_restart)

    def on_reload_refused(self, reason: str) -> None:
        log.error("reload_refused", reason=reason)

    def on_stopping(self, reason: str) -> None:
        log.info("stopping", reason=reason)

    def on_killed(self, process: str) -> None:
        log.info("process_killed", child=process, reason="did not end when asked")

    def on_failed(self, reason: str) -> None:
        log.error("server_failed", reason=reason)

    def _warn(self, notes: tuple[str, ...]) -> None:
        for note in notes:
            log.warning("plan_reduced", detail=note)


class _PatientStream:
    """A stream that loses what cannot be written, as the log does: a terminal may be gone long before its server."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # ValueError: it is closed
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            pass

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class ConsoleReporter:
    """For people. The bar goes to the same stream as the log, and is gone when loading is done."""

    def __init__(self, has_key: bool) -> None:
        self._started = time.monotonic()
        self._console = Console(file=cast(TextIO, _PatientStream(sys.stderr)), highlight=False)
        self._has_key = has_key
        self._url = ""
        self._model = ""
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}  #: process -> its line in the bar

    def on_listening(self, url: str) -> None:
        self._url = url

    def on_settled(self, model: Model, settings: Settings) -> None:
        self._end_bar()  # of a download
        self._model = settings.frontend.model_names[0]
        self._console.print(f"[bold]{self._model}[/]  {model.info.architecture}, {settings.dtype} on {settings.device}")
        self._console.print(f"threads: {show_threads(settings.workers)}, 1 for each other process, waiting without spinning")
        if settings.plan is not None:
            self._console.print(memory_table(settings.plan, len(settings.workers)))
        else:
            self._console.print(f"swap arena: {show_bytes(settings.swap.size_bytes)} of host memory, {show_slots(settings.swap)}")
        for note in settings.swap.notes if settings.plan is None else settings.plan.notes:
            self._console.print(f"[yellow]note[/] {note}")
        self._show_progress(group_name(len(settings.workers)), "starting", None, "")

    def on_progress(self, process: str, progress: control.Progress) -> None:
        self._show_progress(process, progress.phase, progress.fraction, progress.detail)

    def on_process_ready(self, process: str, detail: str) -> None:
        if self._bar is not None and process in self._tasks:
            self._show_progress(process, "ready", 1.0, detail)

    def on_ready(self) -> None:
        self._end_bar()
        self._console.print(banner(self._url, self._model, self._has_key), markup=False, soft_wrap=True)
        self._console.print(f"[bold green]ready[/] after {time.monotonic() - self._started:.1f} s; Ctrl-C ends it")

    def on_process_lost(self, process: str, reason: str, num_deaths: int, limit: int) -> None:
        self._print(f"{reason}; restarting ({num_deaths} of {limit} in 10 minutes)", style="yellow")

    def on_process_back(self, process: str, seconds: float) -> None:
        self._print(f"{process} is back after {seconds:.1f} s")

    def on_start_failed(self, process: str, reason: str) -> None:
        self._print(f"{process} could not be started: {reason}; trying again", style="yellow")

    def on_recovered(self, seconds: float) -> None:
        self._end_bar()

    def on_reloaded(self, changed: tuple[str, ...], needs_restart: tuple[str, ...]) -> None:
        self._print(f"reloaded: {', '.join(changed) or 'nothing has changed'}")
        if needs_restart:
            self._print(f"needs a restart: {', '.join(needs_restart)}", style="yellow")

    def on_reload_refused(self, reason: str) -> None:
        self._print(f"not reloaded: {reason}", style="yellow")

    def on_stopping(self, reason: str) -> None:
        self._end_bar()
        self._print(f"stopping ({reason}); once more ends it at once")

    def on_killed(self, process: str) -> None:
        pass  # of no use to a person, who is told why the server ends

    def on_failed(self, reason: str) -> None:
        self._end_bar()
        self._console.print(f"pagemill: {reason}", markup=False, soft_wrap=True)

    def _print(self, line: str, style: str = "") -> None:
        """What happens while the server runs, dated like the log's lines around it. It may hold anything, paths above all: neither markup nor folded."""
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        self._console.print(Text.assemble((now, "dim"), " ", (line, style)), soft_wrap=True)

    def _show_progress(self, process: str, phase: str, fraction: float | None, detail: str) -> None:
        """One line for each process. A fraction of None moves without end."""
        if self._bar is None:
            columns = TextColumn("{task.description:<24}"), BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.fields[detail]}")
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
        total = None if fraction is None else 1.0
        if process not in self._tasks:
            self._tasks[process] = self._bar.add_task("", total=total, detail="")
        self._bar.update(self._tasks[process], description=f"{process}: {phase}", total=total, completed=fraction or 0.0, detail=detail)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._tasks.clear()


def memory_table(plan: MemoryPlan, num_ranks: int = 1) -> Table:
    """The plan as a person reads it."""
    title = "memory plan" if num_ranks == 1 else f"memory plan, {num_ranks} ranks together"
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("weights", show_bytes(plan.weight_bytes), "")
    table.add_row("rotary tables", show_bytes(plan.rotary_bytes), "")
    table.add_row("activations", show_bytes(plan.activation_bytes), "")
    table.add_row("KV pool", show_bytes(plan.kv_bytes), f"{plan.num_blocks} blocks of {show_bytes(plan.block_bytes)}, {plan.capacity.tokens} tokens")
    table.add_row("swap arena", show_bytes(plan.swap.size_bytes), show_slots(plan.swap))
    table.add_row("overhead", show_bytes(plan.overhead_bytes), "all processes")
    table.add_row("total", show_bytes(plan.total_bytes), f"of {show_bytes(plan.available_bytes)} available", style="bold")
    table.add_row("max_model_len", str(plan.max_model_len), f"the pool holds {plan.capacity.sequences:.1f} sequences of this length")
    return table


def show_threads(workers: Sequence[WorkerConfig]) -> str:
    """`2 for the worker`, or what each of several has."""
    count = workers[0].num_threads
    if len(workers) == 1:
        return f"{count} for the worker"
    own = [" ".join(map(str, worker.cpus)) for worker in workers if worker.cpus]
    return f"{count} for each of {len(workers)} workers" + (f" on processors of its own ({' | '.join(own)})" if own else "")


def show_slots(swap: SwapPlan) -> str:
    return f"{swap.num_slots} slots of {show_bytes(swap.num_regions * swap.slot_bytes)}" if swap.num_slots else "preempted requests are computed again"


def banner(url: str, model: str, has_key: bool) -> str:
    """Where the server is and how to talk to it, ready to copy."""
    header = ' -H "Authorization: Bearer $PAGEMILL_API_KEY"' if has_key else ""
    key = 'os.environ["PAGEMILL_API_KEY"]' if has_key else '"none"'
    return f"""
  chat page  {url}/
  API        {url}/v1

  curl {url}/v1/chat/completions -H "Content-Type: application/json"{header} \\
    -d '{{"model": "{model}", "max_tokens": 64, "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

  {"import os; " if has_key else ""}from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key={key})
  messages = [{{"role": "user", "content": "Hello!"}}]
  print(client.chat.completions.create(model="{model}", messages=messages, max_tokens=64).choices[0].message.content)
"""


def show_bytes(size: int) -> str:
    """`1.5 GiB`, `12.0 MiB`, `64.0 KiB`."""
    for unit, name in ((1024**3, "GiB"), (1024**2, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 1024:.1f} KiB"
