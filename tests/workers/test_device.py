"""Opening a device: each rank has a GPU of its own, or is refused with the number of those that exist."""

from __future__ import annotations

import pytest
import torch

from workers.device import available_bytes, open_device
from workers.model_config import ModelRefused


def test_every_rank_computes_on_the_same_cpu() -> None:
    assert open_device("cpu", 3, 0) == torch.device("cpu")


def test_without_cuda_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ModelRefused, match="finds no usable CUDA device"):
        open_device("cuda", 0, 0)


def test_each_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    assert [open_device("cuda", rank, 0) for rank in range(2)] == taken == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(ModelRefused, match="rank 2 has no GPU of its own, for there are 2"):
        open_device("cuda", 2, 0)


def test_memory_that_torch_keeps_for_reuse_counts_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [300]
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: kept.clear())
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1000 - sum(kept), 4000))
    assert available_bytes(torch.device("cuda", 0)) == 1000
