"""Reads a GGUF file of the Llama family as if it were a Hugging Face checkpoint: the same names, shapes and settings.

`GgufFile(path)` gives `metadata`, `config()` (what `config.json` would say) and `tensors()` (dequantised to float32,
one at a time). llama.cpp keeps query and key rows in another order than Hugging Face; here they are put back.
Whatever the file asks for beyond plain Llama is refused by name. Needs numpy and the gguf package, never torch; must
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

Array = npt.NDArray[np.float32]

_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Per-frequency divisors that stand for Llama 3's rope scaling; everything but the factor is the same in all releases.
_ROPE_FREQS = "rope_freqs.weight"
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
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama":
            raise GgufError(f"architecture {architecture!r} is not supported from a GGUF file")
        if self._setting("expert_count", 0):
            raise GgufError("mixture-of-experts models are not supported from a GGUF file")

    def config(self) -> dict[str, Any]:
        """The model's geometry under the names of `config.json`."""
        heads = int(self._setting("attention.head_count"))
        hidden = int(self._setting("embedding_length"))
        tokens = len(self.metadata.get("tokenizer.ggml.tokens", ()))
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": int(self._setting("feed_forward_length")),
            "num_hidden_layers": int(self._setting("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._setting("attention.head_count_kv", heads)),
            "head_dim": int(self._setting("attention.key_length", self._setting("rope.dimension_count", hidden // heads))),
            "hidden_act": "silu",
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

    def token_id(self, role: str) -> int | None:
        """The id of a token by its role in the file: bos, eos, eot, unknown, padding."""
        token_id = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        return None if token_id is None else int(token_id)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape, in the order of `tensors()`."""
        return {hf_name(name): tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items() if name != _ROPE_FREQS}

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Every weight by its Hugging Face name, in float32."""
        heads = int(self._setting("attention.head_count"))
        kv_heads = int(self._setting("attention.head_count_kv", heads))
        for name, tensor in self._tensors.items():
            if name == _ROPE_FREQS:
                continue
            values: Array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            if ".attn_q." in name:
                values = to_half_rotation(values, heads)
            elif ".attn_k." in name:
                values = to_half_rotation(values, kv_heads)
            yield hf_name(name), values

    def _rope_parameters(self) -> dict[str, Any]:
        theta = {"rope_theta": float(self._setting("rope.freq_base", 10000.0))}
        kind = self._setting("rope.scaling.type", "none")
        if _ROPE_FREQS in self._tensors:
            return theta | self._llama3_scaling(theta["rope_theta"])
        if kind == "linear":
            return theta | {"rope_type": "linear", "factor": float(self._setting("rope.scaling.factor"))}
        if kind != "none":
            raise GgufError(f"rope scaling {kind!r} is not supported from a GGUF file")
        return theta | {"rope_type": "default"}

    def _llama3_scaling(self, theta: float) -> dict[str, Any]:
        tensor = self._tensors[_ROPE_FREQS]
        divisors = dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        for factor in _LLAMA3_FACTORS:
            if np.allclose(divisors, _llama3_divisors(theta, 2 * len(divisors), factor), rtol=1e-3):
                low_high = {"low_freq_factor": _LLAMA3_LOW, "high_freq_factor": _LLAMA3_HIGH}
                return low_high | {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": _LLAMA3_LENGTH}
        raise GgufError("the file's rope frequencies are not those of a known Llama 3 release")

    def _setting(self, name: str, default: Any = None) -> Any:
        value = self.metadata.get(f"llama.{name}", default)
        if value is None:
            raise GgufError(f"the file lacks llama.{name}")
        return value


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor."""
    if name in _NAMES:
        return _NAMES[name]
    match name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    raise GgufError(f"tensor {name!r} is unknown: this is more than a plain Llama model")


def to_half_rotation(values: Array, num_heads: int) -> Array:
    """Reorders each head's rows from pairs (0,1)(2,3)… to halves (0,n)(1,n+1)…, the order in which rotation is applied."""
    rows_per_head = values.shape[0] // num_heads
    pairs = values.reshape(num_heads, rows_per_head // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def _llama3_divisors(theta: float, head_dim: int, factor: float) -> npt.NDArray[np.float64]:
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((_LLAMA3_LENGTH / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))
