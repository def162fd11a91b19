"""The Llama family: pre-norm decoder blocks with grouped-query attention, rotary positions and a gated MLP.

Llama 2 and 3, SmolLM2, Mistral, Ministral and what else calls itself so. Differences between them are numbers in
the config: rope settings, biases, head size, tied embeddings, and how far each layer looks back.
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
        hidden, eps = config.hidden_size, config.rms_norm_eps
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        packed = Model.PACKED
        self.input_norm = layers.norm(f"{prefix}.input_layernorm", hidden, eps)
        self.attention = layers.attention(
            f"{prefix}.self_attn", packed["qkv_proj"], hidden, heads, table, scale=config.attention_scale, bias=config.attention_bias
        )
        self.mlp_norm = layers.norm(f"{prefix}.post_attention_layernorm", hidden, eps)
        self.mlp = layers.gated_mlp(f"{prefix}.mlp", packed["gate_up_proj"], hidden, config.intermediate_size, config.activation, bias=config.mlp_bias)

    def __call__(self, stream: Tensor, update: Tensor | None, inputs: StepInputs, cache: LayerCache) -> Tensor:
        """`update` is what the block before adds to the stream; returns what this one adds."""
        normed = self.input_norm(stream) if update is None else self.input_norm.add(update, stream)
        attended = self.attention(normed, inputs, cache)
        return self.mlp(self.mlp_norm.add(attended, stream))


class Model:
    """Embedding, blocks, norm, output head."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM")
    PACKED: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: ModelConfig, layers: LayerBuilder, max_model_len: int) -> None:
        vocab, hidden = config.vocab_size, config.hidden_size
        tables = [layers.rotary_table(rope, config.head_dim, max_model_len) for rope in config.ropes]
        self.embedding = layers.embedding("model.embed_tokens", vocab, hidden)
        self.blocks = [Block(config, layers, f"model.layers.{index}", table) for index, table in enumerate(tables)]
        self.norm = layers.norm("model.norm", hidden, config.rms_norm_eps)
        self.head = layers.lm_head("lm_head", vocab, hidden, tied=self.embedding if config.tie_word_embeddings else None)

    def __call__(self, inputs: StepInputs, kv_cache: KvCache) -> Tensor:
        stream = self.embedding(inputs.token_ids)  # [T, hidden]
        update: Tensor | None = None
        for index, block in enumerate(self.blocks):
            update = block(stream, update, inputs, kv_cache.layer(index))
        return self.norm(stream) if update is None else self.norm.add(update, stream)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)  # [N, share of the vocabulary]
