"""What the code of a model family assumes where its `config.json` says nothing. Pure.

Older releases wrote down only what differed from the defaults of the library that saved them, so a file that is silent
about tied embeddings means what that family's own code does then. Launcher and workers complete what
they read with the same table, or they would plan for another model than is served. How far layers look back is
known to `layer_windows`; which families are supported is not known here.
"""

from __future__ import annotations

from typing import Any

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
}


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with what its family takes for granted."""
    return _DEFAULTS.get(str(config.get("model_type", "")), {}) | config
