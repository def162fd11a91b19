"""Tiny random checkpoints in Hugging Face layout, for every test that needs a model but not a good one.

`tiny_model_path()` is the usual one: a Llama with 3 layers, a real byte-level BPE tokenizer of 512 tokens and a
ChatML template. `tiny_checkpoint(kind)` gives its variants, one per feature that a model file must get right.
Weights are seeded and scaled so that greedy output wanders instead of looping, and never ends by itself (the
special tokens' output rows are zero). Built once with numpy, without torch, and kept under a key made from this file,
so that a change here makes new folders. Must not know any process of the server.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

Config = dict[str, Any]

VOCAB_SIZE = 512
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2; the last one is EOS
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

BASE: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": EOS_TOKEN_ID,
    "dtype": "float32",
}
_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
#: Two groups of two layers and one of a single layer, whose blocks are half empty.
_HYBRID = {
    "architectures": ["MinistralForCausalLM"],
    "model_type": "ministral",
    "num_hidden_layers": 5,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "attention_bias": None,
    "mlp_bias": None,
}
#: Every number differs from what would follow from others, so that none can be mistaken for another.
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 24,
    "rope_theta": 50000.0,
    "rope_local_base_freq": 500.0,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
    "mlp_bias": None,
}
_ROPE_BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
_SILENT = ("hidden_activation", "head_dim", "query_pre_attn_scalar", "rope_theta", "rope_local_base_freq", "layer_types", "tie_word_embeddings")

#: What each kind changes. Rope settings are written in both spellings that are found in the wild.
KINDS: dict[str, Config] = {
    "llama": {},
    "llama3-rope": {"rope_scaling": _LLAMA3_ROPE},
    "llama3-rope-parameters": {"rope_theta": None, "rope_parameters": _LLAMA3_ROPE | {"rope_theta": 500000.0}},
    "linear-rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear-rope-parameters": {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}},
    "tied": {"tie_word_embeddings": True},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "wide-heads": {"head_dim": 16},
    "vector-heads": {"head_dim": 32},  # every operation is a compiled kernel
    "shallow-vector-heads": {"head_dim": 32, "num_hidden_layers": 2},  # as few layers as can be mistaken for one another
    "no-head-dim": {"head_dim": None},
    "one-kv-head": {"num_key_value_heads": 1},
    "full-kv-heads": {"num_key_value_heads": 8},
    "padded-vocab": {"vocab_size": 515},  # three rows that no tokenizer entry names
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None, "attention_bias": None, "mlp_bias": None},
    "sliding-window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20, "attention_bias": None, "mlp_bias": None},
    "hybrid": _HYBRID,
    "hybrid-vector-heads": _HYBRID | {"head_dim": 32},
    "gemma3": _GEMMA3,
    "gemma3-vector-heads": _GEMMA3 | {"head_dim": 32},  # every operation is a compiled kernel
    "gemma3-capped": _GEMMA3 | {"final_logit_softcapping": 3.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "attention_bias": True},
    "gemma3-rope-parameters": _GEMMA3 | {"rope_theta": None, "rope_local_base_freq": None, "rope_parameters": _ROPE_BY_LAYER, "tie_word_embeddings": False},
    "gemma3-silent": _GEMMA3 | dict.fromkeys(_SILENT) | {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window_pattern": 3},
    "bfloat16-shards": {"dtype": "bfloat16"},  # two files and an index
}

_TEXT = """
The mill stands where the river bends, and every page that leaves it has been water, rag and patience first. In the morning
the miller opens the sluice; the wheel turns, the hammers rise and fall, and the vat fills with a grey soup in which nothing
can yet be read. A page is made by dipping a mould into this soup and lifting it with a steady hand. What is the capital of
France? The capital of France is Paris. What is the capital of Italy? The capital of Italy is Rome. One, two, three, four,
five, six, seven, eight, nine, ten. You are a helpful assistant. Please write a short story about a small dog who wanted to
see the sea, and tell me why the sky is blue. The quick brown fox jumps over the lazy dog, while seventeen wizards brew
strong tea behind the old stone bridge. When the memory is full, some of the work must wait; it should not be lost, and it
should not be done again if it can be kept elsewhere. Answer with yes or no, and then explain your reasons in detail. Thank
you very much for your question! I would like to know how this works, what it costs, and whether there is another way.
"""


def tiny_model_path() -> Path:
    """The usual tiny model; about a megabyte, built in less than a second the first time."""
    return tiny_checkpoint("llama")


def tiny_checkpoint(kind: str) -> Path:
    """The folder of one of `KINDS`."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    root = Path(tempfile.gettempdir()) / f"pagemill-tests-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    target = root / f"{kind}-{version}"
    if not target.exists():
        building = Path(tempfile.mkdtemp(dir=root))
        write_checkpoint(building, kind)
        try:
            building.rename(target)
        except OSError:  # another process was first; its folder is as good
            shutil.rmtree(building)
    return target


def write_checkpoint(folder: Path, kind: str = "llama") -> None:
    """Writes configuration, tokenizer and weights into an existing folder."""
    config = {key: value for key, value in (BASE | KINDS[kind]).items() if value is not None or key == "sliding_window"}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": EOS_TOKEN_ID})
    _write_tokenizer(folder)
    weights = make_weights(config)
    if config["dtype"] == "float32":
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        _write_bfloat16_shards(folder, weights)


def make_weights(config: Config) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor by its usual name. Each has a seed of its own, so variants share what they have in common."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    is_gemma = config["model_type"] == "gemma3_text"
    head_dim = config.get("head_dim") or (256 if is_gemma else hidden // config["num_attention_heads"])
    norms = _gemma_norms(hidden, head_dim) if is_gemma else {"input_layernorm": (hidden, 1.0), "post_attention_layernorm": (hidden, 1.0)}
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    # (outputs, inputs, gain): queries and keys are strong so that attention picks, and output depends on the whole context
    shapes = {
        "self_attn.q_proj": (query, hidden, 2.0),
        "self_attn.k_proj": (key, hidden, 2.0),
        "self_attn.v_proj": (key, hidden, 1.5),
        "self_attn.o_proj": (hidden, query, 1.5),
        "mlp.gate_proj": (inner, hidden, 1.5),
        "mlp.up_proj": (inner, hidden, 1.5),
        "mlp.down_proj": (hidden, inner, 1.5),
    }
    weights = {
        "model.embed_tokens.weight": _normal("embed", (vocab, hidden), 0.1 if is_gemma else 0.4),
        "model.norm.weight": (not is_gemma) + _normal("norm", (hidden,), 0.1),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm, (size, mean) in norms.items():
            weights[f"{prefix}{norm}.weight"] = np.float32(mean) + _normal(prefix + norm, (size,), 0.1)
        for name, (outputs, inputs, gain) in shapes.items():
            weights[f"{prefix}{name}.weight"] = _normal(prefix + name, (outputs, inputs), gain / math.sqrt(inputs))
            if config.get("attention_bias" if name.startswith("self_attn") else "mlp_bias"):
                weights[f"{prefix}{name}.bias"] = _normal(prefix + name + ".bias", (outputs,), 0.3)
    if config.get("tie_word_embeddings", is_gemma):
        weights["model.embed_tokens.weight"][: len(SPECIAL_TOKENS)] *= 0.1
    else:
        weights["lm_head.weight"] = _normal("lm_head", (vocab, hidden), 0.4)
        weights["lm_head.weight"][: len(SPECIAL_TOKENS)] = 0.0
        weights["lm_head.weight"][VOCAB_SIZE:] *= 3  # would often win if a sampler let them
    return weights


def _gemma_norms(hidden: int, head_dim: int) -> dict[str, tuple[int, float]]:
    """Size and mean, which is what a weight is more than one: strong where a block's outcome is normed, or the scaled embedding would drown it."""
    outcomes = {"post_attention_layernorm": (hidden, 2.0), "post_feedforward_layernorm": (hidden, 2.0)}
    heads = {"self_attn.q_norm": (head_dim, 0.5), "self_attn.k_norm": (head_dim, 0.5)}
    return {"input_layernorm": (hidden, 0.0), "pre_feedforward_layernorm": (hidden, 0.0)} | outcomes | heads


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE; text outside the training passage, such as emojis or Chinese, falls apart into bytes."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(_TEXT.split("\n"), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise AssertionError(f"the training passage yields only {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def _write_tokenizer(folder: Path) -> None:
    make_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": BASE["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_bfloat16_shards(folder: Path, weights: dict[str, npt.NDArray[np.float32]]) -> None:
    """numpy has no bfloat16, so the safetensors files are laid out by hand: a length, a JSON header, the bytes."""
    names = sorted(weights)
    half = len(names) // 2
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:half], names[half:]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        header: dict[str, object] = {}
        body = b""
        for name in part:
            data = _bfloat16_bytes(weights[name])
            header[name] = {"dtype": "BF16", "shape": list(weights[name].shape), "data_offsets": [len(body), len(body) + len(data)]}
            body += data
            weight_map[name] = file
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        (folder / file).write_bytes(len(encoded).to_bytes(8, "little") + encoded + body)
    total_size = sum(2 * tensor.size for tensor in weights.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _bfloat16_bytes(values: npt.NDArray[np.float32]) -> bytes:
    bits = values.view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # to nearest, ties to even
    return (rounded >> 16).astype("<u2").tobytes()


def _normal(name: str, shape: tuple[int, ...], scale: float) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return (random.standard_normal(shape) * scale).astype(np.float32)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
