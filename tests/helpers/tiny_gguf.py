"""A tiny GGUF file with the weights and the tokenizer of the tiny checkpoint, laid out as llama.cpp lays them out.

What llama.cpp does to query and key rows and to norms is written independently of the code that undoes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.helpers.tiny_model import BASE, CHAT_TEMPLATE, EOS_TOKEN_ID, KINDS, SPECIAL_TOKENS, make_tokenizer, make_weights

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_PARTS = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
#: A vocabulary of SentencePiece: pieces in the order in which they were learned, so that the score says what is merged first.
PIECES = ["th", "▁t", "▁the", "he", "▁the▁", "in", "▁a", "▁th", "▁in", "er", "▁", "t", "h", "e", "i", "n", "a", "r", "世"]
USER_DEFINED = ["\n\n", "  ", "   ", "<td>"]
_GLOBAL = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def write_tiny_gguf(
    path: Path,
    *,
    kind: str = "llama",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre_tokenizer: str = "gpt-2",
    architecture: str = "",
    end_of_turn: int | None = None,
    sentencepiece: bool = False,
    space_prefix: bool = False,
    extra_tensors: dict[str, npt.NDArray[np.float32]] | None = None,
) -> None:
    """Writes one file; matrices are stored as `quantization` says, vectors in float32."""
    config = BASE | KINDS[kind]
    architecture = architecture or {"llama": "llama", "gemma3_text": "gemma3"}[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "gemma3_text":
        _add_gemma(writer, config)
    if sentencepiece:
        _add_sentencepiece(writer, space_prefix)
    else:
        _add_tokenizer(writer, pre_tokenizer, end_of_turn)
    tensors = {_gguf_name(name, config): _stored(name, values, config) for name, values in make_weights(config).items()}
    for name, values in (tensors | (extra_tensors or {})).items():
        stored = quantization if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, pre_tokenizer: str, end_of_turn: int | None) -> None:
    model = json.loads(make_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(EOS_TOKEN_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    if end_of_turn is not None:
        writer.add_eot_token_id(end_of_turn)


def _add_gemma(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_key_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    writer.add_float32("gemma3.rope.freq_base_swa", config["rope_local_base_freq"])
    if "final_logit_softcapping" in config:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_sentencepiece(writer: gguf.GGUFWriter, space_prefix: bool) -> None:
    kinds = [
        *((token, -1000.0, gguf.TokenType.CONTROL) for token in ("<pad>", "<eos>", "<bos>")),
        ("<unk>", -1000.0, gguf.TokenType.UNKNOWN),
        *((token, -1000.0, gguf.TokenType.USER_DEFINED) for token in USER_DEFINED),
        *((f"<0x{byte:02X}>", 0.0, gguf.TokenType.BYTE) for byte in range(256)),
        *((piece, -float(rank), gguf.TokenType.NORMAL) for rank, piece in enumerate(PIECES)),
    ]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _, _ in kinds])
    writer.add_token_scores([score for _, score, _ in kinds])
    writer.add_token_types([kind for _, _, kind in kinds])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(space_prefix)


def _gguf_name(name: str, config: dict[str, Any]) -> str:
    if name in _GLOBAL:
        return _GLOBAL[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    parts = _PARTS | (_GEMMA_PARTS if config["model_type"] == "gemma3_text" else {})
    return f"blk.{layer}.{parts[part]}.{kind}"


def _stored(name: str, values: npt.NDArray[np.float32], config: dict[str, Any]) -> npt.NDArray[np.float32]:
    """Llama: row i of a head's first half and row i of its second half become neighbours. Gemma: norms have the one added that its code adds."""
    if config["model_type"] == "gemma3_text":
        return values + np.float32(1) if "norm" in name else values
    if "q_proj" not in name and "k_proj" not in name:
        return values
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    size = len(values) // heads
    order = [head * size + half * size // 2 + row for head in range(heads) for row in range(size // 2) for half in (0, 1)]
    return values[order]
