"""Gemma 3, the text models: each decoder block norms what goes into attention and MLP, and again what comes out.

Most layers see a window of the context and rotate with a short base, every sixth sees everything with a long one.
Queries and keys are normed per head, embeddings scaled by the root of their width, the MLP's gate is a GELU, and the
weights of all norms are kept as what they are more than one.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from workers.inputs import StepInputs
from workers.kv_cache import KvCache, LayerCache
from workers.layers import LayerBuilder
from workers.model_config import ModelConfig


class Block:
    """One decoder block. The residual stream is updated in place."""

    def __init__(self, config: ModelConfig, layers: LayerBuilder, prefix: str, table: Tensor) -> None:
        hidden, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        packed, attention = Model.PACKED, f"{prefix}.self_attn"
        self.input_norm = layers.unit_norm(f"{prefix}.input_layernorm", hidden, eps)
        self.attention = layers.attention(
            attention,
            packed["qkv_proj"],
            hidden,
            (config.num_attention_heads, config.num_key_value_heads, head_dim),
            table,
            scale=config.attention_scale,
            norms=(layers.unit_norm(f"{attention}.q_norm", head_dim, eps), layers.unit_norm(f"{attention}.k_norm", head_dim, eps)),
            bias=config.attention_bias,
        )
        self.attended_norm = layers.unit_norm(f"{prefix}.post_attention_layernorm", hidden, eps)
        self.mlp_norm = layers.unit_norm(f"{prefix}.pre_feedforward_layernorm", hidden, eps)
        self.mlp = layers.gated_mlp(f"{prefix}.mlp", packed["gate_up_proj"], hidden, config.intermediate_size, config.activation, bias=False)
        self.fed_norm = layers.unit_norm(f"{prefix}.post_feedforward_layernorm", hidden, eps)

    def __call__(self, stream: Tensor, update: Tensor | None, inputs: StepInputs, cache: LayerCache) -> Tensor:
        """`update` is what the block before adds to the stream; returns what this one adds."""
        normed = self.input_norm(stream) if update is None else self.input_norm.add(update, stream)
        attended = self.attended_norm(self.attention(normed, inputs, cache))
        return self.fed_norm(self.mlp(self.mlp_norm.add(attended, stream)))


class Model:
    """Embedding, blocks, norm, output head."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("Gemma3ForCausalLM",)
    PACKED: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: ModelConfig, layers: LayerBuilder, max_model_len: int) -> None:
        vocab, hidden = config.vocab_size, config.hidden_size
        tables = [layers.rotary_table(rope, config.head_dim, max_model_len) for rope in config.ropes]
        self.embedding = layers.embedding("model.embed_tokens", vocab, hidden, scale=hidden**0.5)
        self.blocks = [Block(config, layers, f"model.layers.{index}", table) for index, table in enumerate(tables)]
        self.norm = layers.unit_norm("model.norm", hidden, config.rms_norm_eps)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = layers.lm_head("lm_head", vocab, hidden, tied, soft_cap=config.final_logit_softcapping)

    def __call__(self, inputs: StepInputs, kv_cache: KvCache) -> Tensor:
        stream = self.embedding(inputs.token_ids)  # [T, hidden]
        update: Tensor | None = None
        for index, block in enumerate(self.blocks):
            update = block(stream, update, inputs, kv_cache.layer(index))
        return self.norm(stream) if update is None else self.norm.add(update, stream)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)  # [N, share of the vocabulary]
