"""How far layers look back, in every way that checkpoints say it."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.errors import UsageError
from pagemill.layer_windows import layer_windows

FULL, SLIDING = "full_attention", "sliding_attention"


def windows(**fields: Any) -> tuple[int, ...]:
    return layer_windows({"num_hidden_layers": 3, "max_position_embeddings": 8192, "model_type": "mistral", "hidden_size": 64} | fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"sliding_window": 64}, (64, 64, 64)),
        ({"sliding_window": None}, (0, 0, 0)),
        ({"sliding_window": 0}, (0, 0, 0)),
        ({}, (4096, 4096, 4096)),
        ({"max_position_embeddings": 4096}, (0, 0, 0)),
        ({"sliding_window": 64, "use_sliding_window": False}, (0, 0, 0)),
        ({"sliding_window": 64, "layer_types": [FULL] * 3}, (0, 0, 0)),
        ({"sliding_window": 64, "layer_types": [FULL, SLIDING, FULL]}, (0, 64, 0)),
        ({"sliding_window": 64, "layer_types": None}, (64, 64, 64)),
        ({"sliding_window": 64, "sliding_window_pattern": 2}, (64, 0, 64)),
        ({"sliding_window": 64, "sliding_window_pattern": 2, "layer_types": [FULL, FULL, SLIDING]}, (0, 0, 64)),
        ({"model_type": ""}, (0, 0, 0)),
        ({"model_type": "llama", "sliding_window": 64}, (0, 0, 0)),
        ({"model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 64}, ((64,) * 5 + (0,)) * 2),
    ],
)
def test_windows_are_those_that_the_layers_use(fields: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert windows(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sliding_window": 64, "layer_types": [SLIDING, "linear_attention", FULL]}, "layers of the kind linear_attention are not supported"),
        ({"sliding_window": 64, "layer_types": [SLIDING]}, "layer_types names 1 layers, but there are 3"),
        ({"sliding_window": -1}, "a sliding window of -1 positions is not understood"),
        ({"sliding_window": "wide"}, r"config\.json is not understood: .*sliding_window"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        windows(**fields)
