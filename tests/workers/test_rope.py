"""Rotary tables against transformers' own frequencies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from workers.rope import FREQUENCIES, Rope, rotary_table

LENGTH = 300
SETTINGS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.707},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=[f"{index}-{settings['rope_type']}" for index, settings in enumerate(SETTINGS)])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_tables_equal_those_of_transformers(settings: dict[str, Any], head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=LENGTH, rope_parameters=settings)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(LENGTH)[None])
    half = head_dim // 2
    table = rotary_table(Rope(**settings), head_dim, LENGTH)
    assert table.dtype == torch.float32
    assert torch.equal(table[:, :half], cos[0, :, :half])
    assert torch.equal(table[:, half:], sin[0, :, :half])


def test_every_supported_type_is_compared() -> None:
    assert {settings["rope_type"] for settings in SETTINGS} == set(FREQUENCIES)


def test_a_row_is_the_angle_of_its_position() -> None:
    table = rotary_table(Rope(rope_theta=100.0), 4, 50)
    assert table[49].tolist() == pytest.approx([math.cos(49), math.cos(4.9), math.sin(49), math.sin(4.9)], abs=1e-5)
