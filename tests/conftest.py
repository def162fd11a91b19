"""What every test gets: no network, no idle threads, usual signals, no wall-clock limits on examples; GPU tests only where there is one."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Before anything is imported that reads them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads stall everybody on two cores

import pytest
import structlog
from hypothesis import settings

from tests.helpers.server import Server, running_server
from tests.helpers.tiny_model import tiny_model_path

# Tests that run in the background or under nohup ignore these, and so would every process they start: a handler is not inherited.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

settings.register_profile("pagemill", deadline=None, derandomize=True, database=None)
settings.load_profile("pagemill")


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """What a test sets up for logging is for itself alone."""
    handlers, level, was_configured = logging.root.handlers[:], logging.root.level, structlog.is_configured()
    yield
    if structlog.is_configured() and not was_configured:
        structlog.reset_defaults()
        logging.captureWarnings(False)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The usual tiny Llama checkpoint in Hugging Face layout."""
    return tiny_model_path()


@pytest.fixture(scope="session")
def plain_server() -> Iterator[Server]:
    """A real server with the usual tiny model, for tests that need nothing special of it and leave it idle."""
    with running_server("--num-blocks", "64") as server:
        yield server


def has_gpu() -> bool:
    """Asks the driver, so that nothing loads torch only to skip a test."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).stdout.startswith(b"GPU")
    except OSError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
