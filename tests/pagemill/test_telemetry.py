"""The log: one line per event, no forged lines, no secrets."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from pagemill.telemetry import LineLogger, configure, get_logger

SECRET = "sk-very-secret"


def json_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_lines_carry_the_common_keys(capsys: pytest.CaptureFixture[str]) -> None:
    configure("worker-0", "json", "info")
    get_logger("workers.loader").info("weights_loaded", num_tokens=3)
    (line,) = json_lines(capsys)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"level": "info", "logger": "workers.loader", "process": "worker-0", "event": "weights_loaded", "num_tokens": 3}


def test_a_level_that_changes_concerns_loggers_that_were_used_before(capsys: pytest.CaptureFixture[str]) -> None:
    configure("worker-0", "json", "info")
    log = get_logger("x")
    log.info("first")
    log.debug("unheard")
    configure("worker-0", "json", "debug")
    log.debug("heard")
    configure("worker-0", "json", "error")
    log.info("unheard")
    assert [line["event"] for line in json_lines(capsys)] == ["first", "heard"]


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_value_cannot_forge_a_line(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure("frontend-0", log_format, "info")
    get_logger("x").info("refused", name='a\nb\r\x1b[31m\x9b\u2028 {"event": "forged"}')
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 1
    assert not set(text) & set("\r\x1b\x9b\u2028")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_secrets_show_stars(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure("frontend-0", log_format, "info")
    secrets = {"api_key": SECRET, "api_keys": [SECRET], "admin_keys": (SECRET,), "authorization": SECRET, "hf_token": SECRET, "cache_secret": SECRET}
    get_logger("x").info("options", num_tokens=5, **secrets)
    text = capsys.readouterr().err
    assert SECRET not in text
    assert text.count("***") == 6
    assert "5" in text


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_tracebacks_show_no_locals(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure("frontend-0", log_format, "info")

    def fail(prompt: str) -> None:
        raise RuntimeError("broken")

    try:
        fail(SECRET + prompt_of_the_day())
    except RuntimeError:
        get_logger("x").exception("crashed")
    text = capsys.readouterr().err
    assert "RuntimeError: broken" in text
    assert "tell nobody" not in text


def prompt_of_the_day() -> str:
    return "".join(["tell", " nobody"])


def test_less_severe_events_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    configure("x", "json", "warning")
    get_logger("x").info("quiet")
    get_logger("x").warning("loud")
    assert [line["event"] for line in json_lines(capsys)] == ["loud"]


def test_libraries_log_in_the_same_form_from_warnings_on(capsys: pytest.CaptureFixture[str]) -> None:
    configure("x", "json", "info")
    logging.getLogger("httpx").info("chatter")
    logging.getLogger("httpx").warning("trouble with %s", "it")
    assert [(line["logger"], line["event"]) for line in json_lines(capsys)] == [("httpx", "trouble with it")]


def test_a_log_that_cannot_be_written_does_not_stop_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    configure("x", "json", "info")
    lost = LineLogger.num_lost
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stderr", full)
        get_logger("x").info("event")
        assert LineLogger.num_lost == lost + 1
        monkeypatch.undo()
        try:
            full.close()
        except OSError:
            pass  # what is buffered cannot be written either


def test_surrogates_from_broken_input_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    configure("x", "json", "info")
    get_logger("x").info("refused", name="\udc80")
    assert json_lines(capsys)[0]["name"] == "\udc80"
