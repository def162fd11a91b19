"""How llama.cpp names families and their tensors and stores them, and how they are put back as Hugging Face has them.

A GGUF shortens names, may keep query and key rows in the order in which it rotates them, and may have added to the
weights of norms what their family's code adds. Pure arithmetic on arrays: needs numpy, neither the gguf package nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class UnknownTensor(Exception):
    """The family has no such tensor; the message is one sentence for the operator."""


@dataclass(frozen=True)
class Family:
    """One value of `general.architecture`."""

    hf_class: str
    model_type: str  #: as in `config.json`
    activation: tuple[str, str]  #: how `config.json` calls it, and which one it is
    layer_names: Mapping[str, str]  #: part of a block -> its Hugging Face name
    pairs_rotate: bool = False  #: query and key rows that rotate together are neighbours; Hugging Face has them half a head apart
    added_to_norms: float = 0.0

    def hf_name(self, name: str) -> str:
        """The Hugging Face name of a tensor. Raises UnknownTensor."""
        match name.split("."):
            case [part, kind] if part in _GLOBAL_NAMES:
                return f"{_GLOBAL_NAMES[part]}.{kind}"
            case ["blk", layer, part, kind] if part in self.layer_names:
                return f"model.layers.{layer}.{self.layer_names[part]}.{kind}"
        raise UnknownTensor(f"tensor {name!r} is unknown: this is more than a plain model of its family")

    def restored(self, hf_name: str, values: Array, num_heads: int, num_kv_heads: int) -> Array:
        """A tensor, or whole heads of one, with the content that Hugging Face gives it; the numbers are of the heads in `values`."""
        if self.added_to_norms and hf_name.endswith("norm.weight"):
            return values - np.float32(self.added_to_norms)
        if self.pairs_rotate and ".q_proj." in hf_name:
            return to_half_rotation(values, num_heads)
        if self.pairs_rotate and ".k_proj." in hf_name:
            return to_half_rotation(values, num_kv_heads)
        return values


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", ("hidden_act", "silu"), _LAYER_NAMES | {"ffn_norm": "post_attention_layernorm"}, pairs_rotate=True),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        ("hidden_activation", "gelu_pytorch_tanh"),
        _LAYER_NAMES
        | {
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        added_to_norms=1.0,
    ),
}
#: Per-frequency divisors in place of rope settings: not a weight.
ROPE_FREQS = "rope_freqs.weight"


def to_half_rotation(values: Array, num_heads: int) -> Array:
    """Reorders each head's rows from pairs (0,1)(2,3)… to halves (0,n)(1,n+1)…, the order in which rotation is applied."""
    rows_per_head = values.shape[0] // num_heads
    pairs = values.reshape(num_heads, rows_per_head // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
