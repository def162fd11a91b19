"""`pagemill explain`: words, JSON, choosing by request, keys, and one line for whatever is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pagemill.cli import main
from pagemill.preemption_report import PreemptionReport
from tests.helpers.fake_openai import FakeOpenAI, fake_openai
from tests.helpers.fake_scheduler import decision, victim
from tests.helpers.frontend_server import running_frontend
from tests.helpers.server import ROOT

DECISIONS = [decision(1, (victim(),)), decision(2, (victim("third", kind="recompute"),), reason="start"), decision(3, (victim(),))]
REPORT = PreemptionReport(103.75, DECISIONS, {"swap/growth": 7})


@pytest.fixture(scope="module")
def served() -> Iterator[FakeOpenAI]:
    with fake_openai() as server:
        yield server


@pytest.fixture
def server(served: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> FakeOpenAI:
    """It has decided three times; the second one is about another request too. No key and no colour come from outside."""
    served.reset()
    served.preemptions = msgspec.json.encode(REPORT)
    for name in ("PAGEMILL_API_KEY", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return served


def explain(url: str, *flags: str) -> int:
    return main(["explain", "--url", url, *flags])


def test_decisions_are_told_oldest_first_and_summed_up(server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(server.url) == 0
    paragraphs = capsys.readouterr().out.split("\n\n")
    assert [text.splitlines()[0] for text in paragraphs] == [
        "Decision 1, step 10, 3.5 s ago",
        "Decision 2, step 20, 3.2 s ago",
        "Decision 3, step 30, 3.0 s ago",
        "3 decisions (growth 2, start 1).",
    ]
    assert "third (sequence 2), running" in paragraphs[1]
    assert server.limits == ["20"]


def test_colours_are_for_terminals_only(server: FakeOpenAI, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    explain(server.url)
    plain = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    explain(server.url)
    coloured = capsys.readouterr().out
    assert "\x1b[" not in plain
    assert "\x1b[1mDecision 1" in coloured


def test_one_request_is_searched_for_in_all_that_the_server_keeps(server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    explain(server.url, "--request", "cmpl-third")
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("Decision")] == ["Decision 2, step 20, 3.2 s ago"]
    explain(server.url, "--request", "cmpl-second", "--limit", "1")
    assert "Decision 3," in (shown := capsys.readouterr().out)
    assert "Decision 1," not in shown
    assert explain(server.url, "--request", "cmpl-\x1b[2J") == 0
    assert capsys.readouterr().out == "None of the decisions that the server still keeps is about 'cmpl-\\x1b[2J'.\n"
    assert server.limits == ["1000", "1000", "1000"]


@pytest.mark.parametrize("name", ["ab12", "cmpl-ab12", "chatcmpl-ab12"])
def test_a_request_is_found_by_its_own_id_and_by_that_of_its_reply(name: str, server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    server.preemptions = msgspec.json.encode(PreemptionReport(103.75, [*DECISIONS, decision(4, (victim(),), request_id="ab12")]))
    assert explain(server.url, "--request", name) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("Decision")] == ["Decision 4, step 40, 2.8 s ago"]


def test_a_part_of_all_decisions_is_called_one(server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    server.preemptions = msgspec.json.encode(PreemptionReport(103.75, DECISIONS[1:]))
    explain(server.url, "--limit", "2")
    assert "\nNewest 2 of 3 decisions (start 1, growth 1).\n" in capsys.readouterr().out
    server.preemptions = msgspec.json.encode(REPORT)
    explain(server.url, "--request", "cmpl-second", "--limit", "1")
    assert "Newest 1 of 2 decisions (growth 1)." in capsys.readouterr().out


def test_programs_get_json(server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(server.url, "--json", "--request", "cmpl-third") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [made["number"] for made in shown["decisions"]] == [2]
    assert shown["preemptions"] == {"swap/growth": 7}
    server.preemptions = b'{"now_s":1.0,"decisions":[]}'
    assert explain(server.url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["decisions"] == []


def test_that_nobody_had_to_yield_is_no_failure(server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    server.preemptions = b'{"now_s":1.0,"decisions":[]}'
    assert explain(server.url) == 0
    assert capsys.readouterr().out == "No decision yet: so far nobody had to yield.\n"


def test_a_key_comes_from_a_file_or_the_environment(
    server: FakeOpenAI, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "secret"
    assert explain(server.url) == 1
    assert capsys.readouterr().err == (
        "pagemill explain: Debug routes of this server want an admin key: use --admin-key-file FILE or the variable PAGEMILL_API_KEY.\n"
    )
    file = tmp_path / "key"
    file.write_text("# mine\nsecret\n")
    assert explain(server.url, "--admin-key-file", str(file)) == 0
    monkeypatch.setenv("PAGEMILL_API_KEY", "secret")
    assert explain(server.url) == 0
    assert explain(server.url, "--admin-key-file", str(tmp_path / "none")) == 2
    assert "--admin-key-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, "start it with --admin-key-file"),
        (404, "has no /debug/preemptions"),
        (503, "The server said so."),
    ],
)
def test_a_refusal_is_one_line(status: int, words: str, server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    server.refusal = (status, "code", "The server said so.")
    assert explain(server.url) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert words in error
    assert error.startswith("pagemill explain: ")
    assert error.count("\n") == 1


def test_an_answer_that_is_no_report_is_one_line(server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    for body in (b"<html>", b"[]", b'{"now_s":1.0,"decisions":[{"number":1}]}'):
        server.preemptions = body
        assert explain(server.url) == 1
        assert capsys.readouterr().err.endswith("answers as no Pagemill of this version does.\n")


def test_without_a_server_one_line_says_how_to_start_one(server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("http://127.0.0.1:9") == 1
    assert capsys.readouterr().err == "pagemill explain: No server answers at http://127.0.0.1:9. Start one with: pagemill serve\n"


@pytest.mark.parametrize("flags", [("--limit", "0"), ("--limit", "1001"), ("--limit", "ten"), ("--nonsense",)])
def test_a_wrong_flag_is_a_usage_error_in_one_line(flags: tuple[str, ...], server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(server.url, *flags) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not server.limits


def test_a_real_frontend_is_explained_in_a_pipe_and_a_reader_that_leaves_is_no_fault() -> None:
    with running_frontend() as frontend:
        frontend.scheduler.decisions = [decision(number, (victim(),)) for number in range(1, 1001)]
        command = [sys.executable, "-m", "pagemill", "explain", "--url", frontend.url, "--limit", "1000"]
        environment = {name: value for name, value in os.environ.items() if name not in ("PAGEMILL_API_KEY", "FORCE_COLOR")}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "Decision 1, step 10, 99.8 s ago\n"
            process.stdout.close()
            complaints = process.stderr.read()
            assert process.wait(60) == 1
    assert complaints == ""
