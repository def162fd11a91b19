"""How far each decoder layer looks back, from the fields of a checkpoint's `config.json`. Pure.

Checkpoints say it in several ways: one window for all layers, a kind for each layer, or a pattern. What a family's
own code assumes where a field is absent, or never reads though it is there, is known here and nowhere else. Kinds
of layers that are not attention are refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pagemill.errors import UsageError

FULL, SLIDING = "full_attention", "sliding_attention"
#: What `sliding_window` means where it is absent, by model type.
_DEFAULT_WINDOWS = {"mistral": 4096, "ministral": 4096, "gemma3_text": 4096}
#: One layer in so many sees everything, where the file neither names kinds nor has a pattern.
_DEFAULT_PATTERNS = {"gemma3_text": 6}
#: Families whose code never looks at a window, whatever the file says.
_WITHOUT_WINDOWS = frozenset({"llama"})


class _Fields(msgspec.Struct):
    """The fields that matter, as they are found in the wild."""

    num_hidden_layers: int
    max_position_embeddings: int
    model_type: str = ""
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = True
    layer_types: tuple[str, ...] | None = None
    sliding_window_pattern: int | None = None


def layer_windows(config: dict[str, Any]) -> tuple[int, ...]:
    """For each decoder layer the positions that a position attends to, itself included; 0: all before it. Raises UsageError."""
    found = _fields(config)
    window = found.sliding_window
    if window is msgspec.UNSET:
        window = _DEFAULT_WINDOWS.get(found.model_type)
    if not window or not found.use_sliding_window or found.model_type in _WITHOUT_WINDOWS or window >= found.max_position_embeddings:
        window = 0  # one that never closes is none
    if window < 0:
        raise UsageError(f"a sliding window of {window} positions is not understood")
    return tuple(window if kind == SLIDING else 0 for kind in _layer_kinds(found))


def layer_kinds(config: dict[str, Any]) -> tuple[str, ...]:
    """For each decoder layer `FULL` or `SLIDING`, whether or not the window ever closes: kinds may differ in other ways too. Raises UsageError."""
    return _layer_kinds(_fields(config))


def _fields(config: dict[str, Any]) -> _Fields:
    try:
        return msgspec.convert(config, _Fields)
    except msgspec.ValidationError as error:
        raise UsageError(f"config.json is not understood: {error}") from error


def _layer_kinds(found: _Fields) -> tuple[str, ...]:
    kinds = found.layer_types
    if kinds is None:
        pattern = found.sliding_window_pattern or _DEFAULT_PATTERNS.get(found.model_type, 0)
        return tuple(FULL if pattern and (layer + 1) % pattern == 0 else SLIDING for layer in range(found.num_hidden_layers))
    unknown = set(kinds) - {FULL, SLIDING}
    if unknown:
        raise UsageError(f"layers of the kind {' and '.join(sorted(unknown))} are not supported")
    if len(kinds) != found.num_hidden_layers:
        raise UsageError(f"layer_types names {len(kinds)} layers, but there are {found.num_hidden_layers}")
    return kinds
