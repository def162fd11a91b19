"""Reading checkpoints: the same tensors, or parts of them, from a GGUF file, dequantised to float32 one at a time.

Names and contents are put back to Hugging Face's by `pagemill.gguf_tensors`, as in the conversion of such files; here
each tensor is read when a layer asks for it, and kept by nobody.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from pagemill.gguf_tensors import FAMILIES, ROPE_FREQS, UnknownTensor
from workers.model_config import ModelConfig, ModelRefused
from workers.weights import Part


class GgufCheckpoint:
    """One mapped GGUF file. `config` gives the head counts that its row order depends on."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        try:
            reader = gguf.GGUFReader(path)
            architecture = reader.fields["general.architecture"].contents()
            if architecture not in FAMILIES:
                raise ModelRefused(f"{path} holds the architecture {architecture!r}, which is not supported from a GGUF file")
            self._family = FAMILIES[architecture]
            tensors = {self._family.hf_name(tensor.name): tensor for tensor in reader.tensors if tensor.name != ROPE_FREQS}
        except (OSError, ValueError, IndexError, KeyError, UnknownTensor) as error:
            raise ModelRefused(f"{path} is not a usable GGUF file: {error}") from error
        self.size_bytes = sum(int(tensor.n_elements) * np.dtype(np.float32).itemsize for tensor in reader.tensors)
        self._tensors = tensors
        self._heads = config.num_attention_heads, config.num_key_value_heads

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(length) for length in reversed(self._tensors[name].shape))

    def read(self, name: str, part: Part = ()) -> Tensor:
        """Of a part, the rows alone are dequantised. Those of queries and keys must be whole heads."""
        tensor = self._tensors[name]
        num_rows = self.shape(name)[0]
        rows = range(num_rows)[part[0]] if part else range(num_rows)
        try:
            values = gguf.dequantize(tensor.data[rows.start : rows.stop], tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelRefused(f"tensor {name} is stored as {tensor.tensor_type.name}, which cannot be dequantised") from error
        num_heads, num_kv_heads = (number * len(rows) // num_rows for number in self._heads)
        values = self._family.restored(name, values, num_heads, num_kv_heads)
        return torch.from_numpy(np.array(values[(slice(None), *part[1:])], dtype=np.float32))  # a copy: the map is read-only

    def close(self) -> None:
        self._tensors = {}
