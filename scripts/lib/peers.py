"""Runs other engines through a program the user names, and reads what they measured.

The program is called as `PROGRAM run PEER n:in:out ...` and prints one JSON object per workload on standard
output. Must not know how an engine is installed or started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

#: By the names the program knows them by. The first two run the weights in bfloat16.
PEERS = ("vllm", "transformers", "openvino", "llamacpp")
FOUR_BIT_PEERS = frozenset({"openvino", "llamacpp"})
#: Chosen for an engine that compiles its model at each start, on a busy machine.
TIMEOUT_S = 3600.0


class PeerError(Exception):
    """The engine could not be run. One line."""


class PeerResult(msgspec.Struct, frozen=True):
    """One workload's line; fields we do not know are left alone."""

    peer: str
    workload: str
    seconds: float
    output_tok_s: float


def run_peer(program: str, peer: str, workloads: Sequence[str]) -> Iterator[PeerResult]:
    """The engine's results as they come. Raises PeerError if it fails or leaves one out."""
    command = [*([sys.executable] if program.endswith(".py") else []), program, "run", peer, *workloads]
    missing = set(workloads)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(), start_new_session=True
        )
    except OSError as error:
        raise PeerError(str(error)) from error
    with process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise PeerError(f"not done after {TIMEOUT_S:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # it has children of its own
    for line in output.splitlines():
        result = _parse(line)
        missing.discard(result.workload)
        yield result
    if process.returncode != 0 or missing:
        reason = next((line for line in reversed(errors.splitlines()) if line.strip()), f"ended with code {process.returncode}")
        raise PeerError(reason if process.returncode else f"no result for {', '.join(sorted(missing))}")


def _parse(line: str) -> PeerResult:
    try:
        return msgspec.json.decode(line, type=PeerResult)
    except msgspec.DecodeError as error:
        raise PeerError(f"not a result: {line[:200]!r} ({error})") from error


def _environment() -> dict[str, str]:
    """Ours without the threads we chose for ourselves: each engine has its own idea of them."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "RAYON_"))}
