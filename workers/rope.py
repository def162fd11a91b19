"""Rotary position tables: from a checkpoint's rope settings to cosines and sines.

Frequencies are computed in float32 exactly as the reference implementations do, because a difference in
the last bit grows with the position. A type whose frequencies depend on the length of the sequence is
refused: keys already in the cache would have to be rotated again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's `rope_parameters` (or `rope_scaling` with `rope_theta`), validated."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0


def rotary_table(rope: Rope, head_dim: int, num_positions: int) -> Tensor:
    """[num_positions, head_dim] float32: head_dim / 2 cosines, then as many sines."""
    frequencies, scale = FREQUENCIES[rope.rope_type](rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


def _default(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(rope, head_dim), 1.0


def _linear(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Positions are squeezed by `factor`."""
    return 1.0 / _wavelengths(rope, head_dim) / rope.factor, 1.0


def _llama3(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Long waves are squeezed, short ones kept, those between blended."""
    plain = 1.0 / _wavelengths(rope, head_dim)
    wavelengths = 2 * math.pi / plain
    context = rope.original_max_position_embeddings
    blend = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    squeezed = torch.where(wavelengths > context / rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(wavelengths < context / rope.high_freq_factor, plain, squeezed), 1.0


def _yarn(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """A linear ramp from kept (short waves) to squeezed (long ones), and a temperature on attention."""
    wavelengths = _wavelengths(rope, head_dim)

    def dimension(rotations: float) -> float:
        """The (fractional) dimension that turns this often within the original context."""
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: Rope) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _wavelengths(rope: Rope, head_dim: int) -> Tensor:
    """Positions per radian, for each pair of dimensions."""
    return torch.as_tensor(rope.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


#: Rope types that are supported: settings and head size to (frequencies [head_dim / 2], scale of cosine and sine).
FREQUENCIES: dict[str, Callable[[Rope, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
