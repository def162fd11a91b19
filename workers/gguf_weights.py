"""Reading checkpoints: the same tensors from a GGUF file, dequantised to float32 one at a time.

Names and the order of query and key rows are put back to Hugging Face's by `pagemill.gguf_file`, which also
converts such files; here each tensor is read when a layer asks for it, and kept by nobody.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from pagemill.gguf_file import GgufError, hf_name, to_half_rotation
from workers.model_config import ModelConfig, ModelRefused

#: What llama.cpp calls the Llama family; other families name and order tensors in other ways.
ARCHITECTURE = "llama"
#: Derived from the rope settings, which the config has.
_ROPE_FREQS = "rope_freqs.weight"


class GgufCheckpoint:
    """One mapped GGUF file. `config` gives the head counts that its row order depends on."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        try:
            reader = gguf.GGUFReader(path)
            architecture = reader.fields["general.architecture"].contents()
            tensors = {hf_name(tensor.name): tensor for tensor in reader.tensors if tensor.name != _ROPE_FREQS}
        except (OSError, ValueError, IndexError, KeyError, GgufError) as error:
            raise ModelRefused(f"{path} is not a usable GGUF file: {error}") from error
        if architecture != ARCHITECTURE:
            raise ModelRefused(f"{path} holds the architecture {architecture!r}, which is not supported from a GGUF file")
        self.size_bytes = sum(int(tensor.n_elements) * np.dtype(np.float32).itemsize for tensor in reader.tensors)
        self._tensors = tensors
        self._heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelRefused(f"tensor {name} is stored as {tensor.tensor_type.name}, which cannot be dequantised") from error
        for part, num_heads in self._heads.items():
            if part in name:
                values = to_half_rotation(values, num_heads)
        return torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: the map is read-only

    def close(self) -> None:
        self._tensors = {}
