"""What people read: the memory table, the banner, the course of a start."""

from __future__ import annotations

import errno
import io
import re
import sys

import pytest
import structlog
from rich.console import Console

from pagemill.messages.control import Progress
from pagemill.reporting import ConsoleReporter, LogReporter, banner, memory_table, show_bytes
from tests.pagemill.test_memory_plan import plan
from tests.pagemill.test_resolve import MODEL, settled


def rendered(reporter: ConsoleReporter | None = None) -> tuple[ConsoleReporter, io.StringIO]:
    out = io.StringIO()
    reporter = reporter or ConsoleReporter(has_key=False)
    reporter._console = Console(file=out, width=120, highlight=False)
    return reporter, out


def undated(out: io.StringIO) -> list[str]:
    """The lines, each of which says when it was written, as the log does."""
    dated = [re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z (.*)", line) for line in out.getvalue().splitlines()]
    assert all(dated), out.getvalue()
    return [match[1] for match in dated if match is not None]


def test_the_table_shows_every_part_and_what_it_is_of() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(memory_table(plan(num_blocks=10)))
    text = out.getvalue()
    for part in ("weights", "activations", "KV pool", "swap arena", "overhead", "total", "max_model_len"):
        assert part in text
    assert "10 blocks of 8.0 KiB, 160 tokens" in text
    assert "20 slots of 8.0 KiB" in text
    assert "of 8.0 GiB available" in text
    assert "the pool holds 1.0 sequences of this length" in text


def test_without_swap_space_the_table_says_what_happens_instead() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(memory_table(plan(swap_bytes=0)))
    assert "preempted requests are computed again" in out.getvalue()


def test_beside_a_card_the_arena_is_shown_without_a_plan() -> None:
    reporter, out = rendered()
    reporter.on_settled(MODEL, settled({"num_gpus": 1}, num_blocks=512))
    assert "swap arena: 8.0 MiB of host memory, 1024 slots of 8.0 KiB" in out.getvalue()


def test_a_machine_reads_of_the_arena_with_and_without_a_plan() -> None:
    with structlog.testing.capture_logs() as lines:
        for machine in ({}, {"num_gpus": 1}):
            LogReporter().on_settled(MODEL, settled(machine, num_blocks=512, max_num_seqs=2))
    planned = [line for line in lines if line["event"] in ("memory_planned", "swap_planned")]
    assert [line["num_swap_slots"] for line in planned] == [1024, 1024]
    assert [line["swap_bytes"] for line in planned] == [1024 * 8192, 1024 * 8192]


def test_several_ranks_are_shown_together_with_the_processors_of_each() -> None:
    reporter, out = rendered()
    reporter.on_settled(MODEL, settled(num_blocks=10, tensor_parallel_size=2))
    text = out.getvalue()
    assert "threads: 1 for each of 2 workers on processors of its own (0 | 1), 1 for each other process" in text
    assert "memory plan, 2 ranks together" in text
    assert "10 blocks of 8.0 KiB, 160 tokens" in text
    assert "20 slots of 8.0 KiB" in text
    crowded, out = rendered()
    crowded.on_settled(MODEL, settled(num_blocks=10, tensor_parallel_size=4))
    assert "threads: 1 for each of 4 workers, 1 for each other process" in out.getvalue()


def test_a_machine_reads_of_each_ranks_processors() -> None:
    with structlog.testing.capture_logs() as lines:
        for size in (1, 2, 4):
            LogReporter().on_settled(MODEL, settled(num_blocks=10, tensor_parallel_size=size))
    told = [(line["ranks"], line["worker"]["OMP_NUM_THREADS"], line["cpus"]) for line in lines if line["event"] == "threads_set"]
    assert told == [(1, "2", [()]), (2, "1", [(0,), (1,)]), (4, "1", [()] * 4)]


def test_a_start_ends_with_the_banner_and_ready() -> None:
    reporter, out = rendered()
    reporter.on_listening("http://127.0.0.1:8000")
    reporter.on_progress("model", Progress(phase="fetch", fraction=0.5, detail="50 of 100 MiB"))
    reporter.on_settled(MODEL, settled(num_blocks=10))
    reporter.on_progress("worker 0", Progress(phase="weights", fraction=0.5, detail="half"))
    reporter.on_process_ready("worker 0", "fine")
    reporter.on_ready()
    reporter.on_stopping("SIGTERM")
    text = out.getvalue()
    parts = ("memory plan", "note max_model_len reduced", "http://127.0.0.1:8000/v1/chat/completions", "ready after", "stopping (SIGTERM)")
    order = [text.index(part) for part in parts]
    assert order == sorted(order)


def test_a_death_and_a_recovery_are_one_line_each() -> None:
    reporter, out = rendered()
    reporter.on_process_lost("worker 0", "worker 0 was killed by SIGKILL", 1, 5)
    reporter.on_process_back("worker 0", 3.24)
    reporter.on_recovered(3.3)
    reporter.on_start_failed("worker 0", "Cannot allocate memory")
    assert undated(out) == [
        "worker 0 was killed by SIGKILL; restarting (1 of 5 in 10 minutes)",
        "worker 0 is back after 3.2 s",
        "worker 0 could not be started: Cannot allocate memory; trying again",
    ]


def test_a_terminal_that_is_gone_takes_nobody_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        def flush(self) -> None:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    reporter = ConsoleReporter(has_key=False)
    reporter.on_process_lost("worker 0", "worker 0 was killed by SIGKILL", 1, 5)
    reporter.on_progress("worker 0", Progress(phase="weights", fraction=0.5, detail="half"))
    reporter.on_recovered(1.0)
    reporter.on_stopping("SIGTERM")


def test_the_end_is_told_to_each_reader_in_its_own_way() -> None:
    reporter, out = rendered()
    reporter.on_failed("worker 0 was killed by [SIGKILL]")
    assert out.getvalue() == "pagemill: worker 0 was killed by [SIGKILL]\n"
    with structlog.testing.capture_logs() as lines:
        LogReporter().on_failed("worker 0 was killed by SIGKILL")
    assert lines == [{"event": "server_failed", "log_level": "error", "reason": "worker 0 was killed by SIGKILL"}]


def test_a_reload_says_what_changed_and_what_could_not() -> None:
    reporter, out = rendered()
    reporter.on_reloaded(("log_level", "api_keys"), ("port",))
    reporter.on_reloaded((), ())
    reporter.on_reload_refused("--config: cannot read [bold]x.toml")
    assert undated(out) == [
        "reloaded: log_level, api_keys",
        "needs a restart: port",
        "reloaded: nothing has changed",
        "not reloaded: --config: cannot read [bold]x.toml",
    ]


def test_a_machine_reads_the_same() -> None:
    with structlog.testing.capture_logs() as lines:
        reporter = LogReporter()
        reporter.on_process_lost("worker 0", "worker 0 was killed by SIGKILL", 1, 5)
        reporter.on_process_back("worker 0", 3.24)
        reporter.on_recovered(3.333)
        reporter.on_reloaded(("log_level",), ("port",))
        reporter.on_reloaded((), ())
        reporter.on_reload_refused("no")
    assert lines == [
        {"event": "process_lost", "log_level": "error", "child": "worker 0", "reason": "worker 0 was killed by SIGKILL", "deaths": 1, "restart_limit": 5},
        {"event": "process_restarted", "log_level": "info", "child": "worker 0", "seconds": 3.24},
        {"event": "server_ready", "log_level": "info", "seconds": 3.33},
        {"event": "reloaded", "log_level": "info", "changed": ("log_level",)},
        {"event": "reload_incomplete", "log_level": "warning", "needs_restart": ("port",)},
        {"event": "reloaded", "log_level": "info", "changed": ()},
        {"event": "reload_refused", "log_level": "error", "reason": "no"},
    ]


def test_the_banner_never_shows_a_key_but_where_to_put_it() -> None:
    assert '-H "Authorization: Bearer $PAGEMILL_API_KEY"' in banner("http://h:1", "m", has_key=True)
    assert 'api_key=os.environ["PAGEMILL_API_KEY"]' in banner("http://h:1", "m", has_key=True)
    assert "Authorization" not in banner("http://h:1", "m", has_key=False)


def test_the_snippet_of_the_banner_is_python() -> None:
    for has_key in (True, False):
        snippet = [line.strip() for line in banner("http://h:1", "m", has_key).splitlines() if "client" in line or "import" in line]
        assert len(snippet) == 3
        compile("\n".join(snippet), "banner", "exec")


def test_bytes_are_shown_in_the_unit_that_fits() -> None:
    assert [show_bytes(size) for size in (0, 65536, 12 * 2**20, 3 * 2**29)] == ["0.0 KiB", "64.0 KiB", "12.0 MiB", "1.5 GiB"]
