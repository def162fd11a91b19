"""Model families, one file each. To add one, write `models/NAME.py` with a class `Model`; it is discovered.

`ARCHITECTURES` are the names that a checkpoint's `config.json` uses. A model reads like its paper: it wires
layers in the constructor and calls them in order; ranks, devices and files are the layers' business.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import ClassVar, Protocol, cast

from torch import Tensor

from workers.inputs import StepInputs
from workers.kv_cache import KvCache
from workers.layers import LayerBuilder, LmHead
from workers.model_config import ModelConfig, ModelRefused


class Model(Protocol):
    """A decoder whose weights are loaded."""

    ARCHITECTURES: ClassVar[tuple[str, ...]]
    PACKED: ClassVar[dict[str, tuple[str, ...]]]  #: merged matrix -> its parts in the checkpoint
    head: LmHead

    def __init__(self, config: ModelConfig, layers: LayerBuilder, max_model_len: int) -> None: ...

    def __call__(self, inputs: StepInputs, kv_cache: KvCache) -> Tensor:
        """Computes every token of the step, writes its K and V; hidden states [T, hidden], normed."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 logits of this rank's share of the vocabulary, which `head` can gather."""
        ...


def discover() -> dict[str, type[Model]]:
    """Every supported architecture and its class. Raises ValueError if two files claim one, or a file claims none."""
    found: dict[str, type[Model]] = {}
    for info in pkgutil.iter_modules(__path__):
        model = cast(type[Model], importlib.import_module(f"{__name__}.{info.name}").Model)
        if not model.ARCHITECTURES or found.keys() & set(model.ARCHITECTURES):
            raise ValueError(f"models/{info.name}.py names no architecture, or one that another file has: {model.ARCHITECTURES}")
        found.update(dict.fromkeys(model.ARCHITECTURES, model))
    return found


def find_model(architectures: Sequence[str]) -> type[Model]:
    """The class for a checkpoint. Raises ModelRefused."""
    known = discover()
    for architecture in architectures:
        if architecture in known:
            return known[architecture]
    raise ModelRefused(f"the architecture {' or '.join(architectures) or '(none named)'} is not supported; supported are {', '.join(known)}")
