"""The device a rank computes on: opening it, how much memory is free there, and how the C library hands it out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from workers.model_config import ModelRefused

#: Options of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: While loading, anything larger than this is mapped on its own, so that freeing it gives it back.
_LOADING_MMAP_BYTES = 256 * 1024
#: While serving, a step's activations come from memory that is already there: mapped anew, each would be zeroed
#: by the kernel first. 32 MiB is the largest threshold that glibc takes.
_SERVING_MMAP_BYTES = 32 * 1024**2
_SERVING_TRIM_BYTES = 256 * 1024**2


def open_device(kind: str, index: int, num_threads: int) -> torch.device:
    """Sets process-wide state of torch: threads, no gradients, the current one of several GPUs. Raises ModelRefused if there is no such device."""
    torch.set_grad_enabled(False)
    if num_threads:
        torch.set_num_threads(num_threads)
    if kind == "cuda" and not torch.cuda.is_available():
        raise ModelRefused("--device cuda: torch finds no usable CUDA device on this machine")
    if kind == "cpu":
        return torch.device(kind)
    if index >= torch.cuda.device_count():
        raise ModelRefused(f"--device cuda: rank {index} has no GPU of its own, for there are {torch.cuda.device_count()}")
    device = torch.device(kind, index)
    torch.cuda.set_device(device)
    return device


def available_bytes(device: torch.device) -> int:
    """Memory that could be allocated now without pushing anything out."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for reuse does not count as free
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


@contextmanager
def loading_allocations() -> Iterator[None]:
    """Keeps what is allocated for a moment from leaving holes between what stays; afterwards memory is kept for reuse."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # not glibc: its allocator does as it likes
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LOADING_MMAP_BYTES)
    try:
        yield
    finally:
        libc.malloc_trim(0)
        libc.mallopt(_M_MMAP_THRESHOLD, _SERVING_MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _SERVING_TRIM_BYTES)
