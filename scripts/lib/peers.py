"""Runs other engines through a program the user names, and reads what they measured.

The program is called as `PROGRAM run PEER n:in:out ...` and prints one JSON object per workload on standard
output; as `PROGRAM converse SESSIONS START ADD TURNS BLOCKS` it prints one about vLLM. PEER_BLOCKS in its environment
is the KV capacity in blocks of 32 tokens. Must not know how an engine is installed or started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

#: By the names the program knows them by. The first two run the weights in bfloat16.
PEERS = ("vllm", "transformers", "openvino", "llamacpp")
FOUR_BIT_PEERS = frozenset({"openvino", "llamacpp"})
#: Chosen for an engine that compiles its model at each start, on a busy machine.
TIMEOUT_S = 3600.0

Result = TypeVar("Result", bound=msgspec.Struct)


class PeerError(Exception):
    """The engine could not be run. One line."""


class PeerResult(msgspec.Struct, frozen=True):
    """One workload's line; fields we do not know are left alone."""

    peer: str
    workload: str
    seconds: float
    output_tok_s: float


class ConverseResult(msgspec.Struct, frozen=True):
    """Times to first token of follow-up turns."""

    peer: str
    ttft_p50_s: float
    ttft_max_s: float


def run_peer(program: str, peer: str, workloads: Sequence[str], num_blocks: int = 0) -> Iterator[PeerResult]:
    """The engine's results as they come, with a KV capacity of `num_blocks` blocks of 32 tokens, 0 for its own choice.

    Raises PeerError if it fails or leaves one out.
    """
    missing = set(workloads)
    for line in _run(program, ["run", peer, *workloads], num_blocks):
        result = _parse(line, PeerResult)
        missing.discard(result.workload)
        yield result
    if missing:
        raise PeerError(f"no result for {', '.join(sorted(missing))}")


def run_converse(program: str, num_sessions: int, num_start: int, num_added: int, num_turns: int, num_blocks: int) -> ConverseResult:
    """vLLM, one turn at a time. Raises PeerError."""
    numbers = (num_sessions, num_start, num_added, num_turns, num_blocks)
    for line in _run(program, ["converse", *map(str, numbers)]):
        return _parse(line, ConverseResult)
    raise PeerError("no result")


def _run(program: str, arguments: Sequence[str], num_blocks: int = 0) -> Iterator[str]:
    """The lines it writes, then PeerError if it failed."""
    command = [*([sys.executable] if program.endswith(".py") else []), program, *arguments]
    environment = _environment() | ({"PEER_BLOCKS": str(num_blocks)} if num_blocks else {})
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
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
    yield from output.splitlines()
    if process.returncode != 0:
        raise PeerError(next((line for line in reversed(errors.splitlines()) if line.strip()), f"ended with code {process.returncode}"))


def _parse(line: str, of: type[Result]) -> Result:
    try:
        return msgspec.json.decode(line, type=of)
    except msgspec.DecodeError as error:
        raise PeerError(f"not a result: {line[:200]!r} ({error})") from error


def _environment() -> dict[str, str]:
    """Ours without the threads we chose for ourselves: each engine has its own idea of them."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "RAYON_"))}
