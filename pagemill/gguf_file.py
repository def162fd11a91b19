"""Reads a GGUF file as if it were a Hugging Face checkpoint: the same names, shapes and settings.

`GgufFile(path)` gives `metadata`, `config()` (what `config.json` would say) and `tensors()` (dequantised to float32,
one at a time, with the content that `gguf_tensors` restores). Whatever the file asks for beyond a plain model of its
family is refused by name. Needs numpy and the gguf package, never torch; must
not know where files come from or what they are converted to.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize

from pagemill.gguf_tensors import FAMILIES, ROPE_FREQS, Array, UnknownTensor
from pagemill.layer_windows import FULL, SLIDING

#: Blocks of the one Gemma 3 whose attention is scaled by the width of the model over its heads.
_GEMMA3_27B_BLOCKS = 62
#: What Gemma 3's layers with a window rotate with, unless the file says otherwise.
_GEMMA3_LOCAL_BASE = 10000.0
_GEMMA3_PATTERN = 6
#: Of Llama 3's rope scaling, which a file writes as per-frequency divisors, everything but the factor is the same in all releases.
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTH = 1.0, 4.0, 8192


class GgufError(Exception):
    """The file cannot be used; the message is one sentence for the operator."""


class GgufFile:
    """One open file; bytes are mapped, not read, until asked for."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = GGUFReader(path)
        except (ValueError, OSError, IndexError, UnicodeDecodeError) as error:
            raise GgufError(f"{path.name} is not a readable GGUF file ({error})") from error
        self.metadata: dict[str, Any] = {name: field.contents() for name, field in self._reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._architecture = str(self.metadata.get("general.architecture"))
        if self._architecture not in FAMILIES:
            raise GgufError(f"architecture {self._architecture!r} is not supported from a GGUF file")
        self._family = FAMILIES[self._architecture]
        if self._setting("expert_count", 0):
            raise GgufError("mixture-of-experts models are not supported from a GGUF file")

    def config(self) -> dict[str, Any]:
        """The model's geometry under the names of `config.json`."""
        heads = int(self._setting("attention.head_count"))
        hidden = int(self._setting("embedding_length"))
        tokens = len(self.metadata.get("tokenizer.ggml.tokens", ()))
        activation, activation_name = self._family.activation
        config = {
            "architectures": [self._family.hf_class],
            "model_type": self._family.model_type,
            "hidden_size": hidden,
            "intermediate_size": int(self._setting("feed_forward_length")),
            "num_hidden_layers": int(self._setting("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._setting("attention.head_count_kv", heads)),
            "head_dim": int(self._setting("attention.key_length", self._setting("rope.dimension_count", hidden // heads))),
            activation: activation_name,
            "rms_norm_eps": float(self._setting("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": int(self._setting("context_length")),
            "rope_parameters": self._rope_parameters(),
            "vocab_size": int(self._setting("vocab_size", tokens)),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
            "bos_token_id": self.token_id("bos"),
            "eos_token_id": self.token_id("eos"),
            "pad_token_id": self.token_id("padding"),
        }
        return config | self._gemma3_config(config) if self._architecture == "gemma3" else config

    def token_id(self, role: str) -> int | None:
        """The id of a token by its role in the file: bos, eos, eot, unknown, padding."""
        token_id = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        return None if token_id is None else int(token_id)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape, in the order of `tensors()`."""
        return {self._hf_name(name): tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items() if name != ROPE_FREQS}

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Every weight by its Hugging Face name, in float32."""
        heads = int(self._setting("attention.head_count"))
        kv_heads = int(self._setting("attention.head_count_kv", heads))
        for name, tensor in self._tensors.items():
            if name == ROPE_FREQS:
                continue
            values: Array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            hf_name = self._hf_name(name)
            yield hf_name, self._family.restored(hf_name, values, heads, kv_heads)

    def _hf_name(self, name: str) -> str:
        try:
            return self._family.hf_name(name)
        except UnknownTensor as error:
            raise GgufError(str(error)) from error

    def _gemma3_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """What Gemma 3 has besides. A file may leave out what llama.cpp knows of the family: base of windows, pattern of layers, scale of attention."""
        local = {"rope_type": "default", "rope_theta": float(self._setting("rope.freq_base_swa", _GEMMA3_LOCAL_BASE))}
        pattern, num_layers = self._setting("attention.sliding_window_pattern", _GEMMA3_PATTERN), config["num_hidden_layers"]
        if isinstance(pattern, list):
            raise GgufError("a pattern of windows is understood as a number of layers, not as a list")
        scaled_by_width = num_layers == _GEMMA3_27B_BLOCKS
        return {
            "rope_parameters": {FULL: config["rope_parameters"], SLIDING: local},
            "sliding_window": int(self._setting("attention.sliding_window")),
            "layer_types": [SLIDING if (layer + 1) % int(pattern) else FULL for layer in range(num_layers)],
            "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if scaled_by_width else config["head_dim"],
            "attn_logit_softcapping": self.metadata.get("gemma3.attn_logit_softcapping"),
            "final_logit_softcapping": self.metadata.get("gemma3.final_logit_softcapping"),
        }

    def _rope_parameters(self) -> dict[str, Any]:
        theta = {"rope_theta": float(self._setting("rope.freq_base", 10000.0))}
        kind = self._setting("rope.scaling.type", "none")
        if ROPE_FREQS in self._tensors:
            return theta | self._llama3_scaling(theta["rope_theta"])
        if kind == "linear":
            return theta | {"rope_type": "linear", "factor": float(self._setting("rope.scaling.factor"))}
        if kind != "none":
            raise GgufError(f"rope scaling {kind!r} is not supported from a GGUF file")
        return theta | {"rope_type": "default"}

    def _llama3_scaling(self, theta: float) -> dict[str, Any]:
        tensor = self._tensors[ROPE_FREQS]
        divisors = dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        for factor in _LLAMA3_FACTORS:
            if np.allclose(divisors, _llama3_divisors(theta, 2 * len(divisors), factor), rtol=1e-3):
                low_high = {"low_freq_factor": _LLAMA3_LOW, "high_freq_factor": _LLAMA3_HIGH}
                return low_high | {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": _LLAMA3_LENGTH}
        raise GgufError("the file's rope frequencies are not those of a known Llama 3 release")

    def _setting(self, name: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self._architecture}.{name}", default)
        if value is None:
            raise GgufError(f"the file lacks {self._architecture}.{name}")
        return value


def _llama3_divisors(theta: float, head_dim: int, factor: float) -> npt.NDArray[np.float64]:
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((_LLAMA3_LENGTH / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))
