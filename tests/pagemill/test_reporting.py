"""What people read: the memory table, the banner, the course of a start."""

from __future__ import annotations

import io

import structlog
from rich.console import Console

from pagemill.messages import Progress
from pagemill.reporting import ConsoleReporter, LogReporter, banner, memory_table, show_bytes
from pagemill.threads import thread_environment
from tests.pagemill.test_memory_plan import plan
from tests.pagemill.test_resolve import MODEL, settled


def rendered(reporter: ConsoleReporter | None = None) -> tuple[ConsoleReporter, io.StringIO]:
    out = io.StringIO()
    reporter = reporter or ConsoleReporter(has_key=False)
    reporter._console = Console(file=out, width=120, highlight=False)
    return reporter, out


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
    reporter.on_settled(MODEL, settled({"has_cuda": True}, num_blocks=512), thread_environment(2))
    assert "swap arena: 8.0 MiB of host memory, 1024 slots of 8.0 KiB" in out.getvalue()


def test_a_machine_reads_of_the_arena_with_and_without_a_plan() -> None:
    with structlog.testing.capture_logs() as lines:
        for machine in ({}, {"has_cuda": True}):
            LogReporter().on_settled(MODEL, settled(machine, num_blocks=512, max_num_seqs=2), thread_environment(2))
    planned = [line for line in lines if line["event"] in ("memory_planned", "swap_planned")]
    assert [line["num_swap_slots"] for line in planned] == [1024, 1024]
    assert [line["swap_bytes"] for line in planned] == [1024 * 8192, 1024 * 8192]


def test_a_start_ends_with_the_banner_and_ready() -> None:
    reporter, out = rendered()
    reporter.on_listening("http://127.0.0.1:8000")
    reporter.on_progress("model", Progress(phase="fetch", fraction=0.5, detail="50 of 100 MiB"))
    reporter.on_settled(MODEL, settled(num_blocks=10), thread_environment(2))
    reporter.on_progress("worker 0", Progress(phase="weights", fraction=0.5, detail="half"))
    reporter.on_process_ready("worker 0", "fine")
    reporter.on_ready()
    reporter.on_stopping("SIGTERM")
    text = out.getvalue()
    parts = ("memory plan", "note max_model_len reduced", "http://127.0.0.1:8000/v1/chat/completions", "ready after", "stopping (SIGTERM)")
    order = [text.index(part) for part in parts]
    assert order == sorted(order)


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
