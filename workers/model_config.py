"""What a checkpoint's `config.json` says about the model, checked and brought into one form.

Everything that this worker cannot run as the model's authors meant it is refused here, by name, before
any weight is read. Knows files and numbers; no weights, no devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from workers.rope import FREQUENCIES, Rope

Decoded = TypeVar("Decoded")


class ModelRefused(Exception):
    """This model cannot be served; the message is one sentence for the operator."""


class ModelConfig(msgspec.Struct, frozen=True):
    """Geometry of a decoder-only model. Fields carry the names that Hugging Face gave them."""

    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: Rope
    sliding_window: int | None  #: tokens a position may look back, or None
    tokenizer_vocab_size: int  #: ids from here on are padding that no tokenizer entry names

    @property
    def longest_exact_len(self) -> int:
        """The longest context that full attention computes as the model means it."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)


class _ConfigFile(msgspec.Struct):
    """The fields of `config.json` that matter, as they are found in the wild."""

    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    model_type: str = ""
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = True
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None


def read_config(folder: Path) -> ModelConfig:
    """Reads and checks `folder/config.json`. Raises ModelRefused."""
    found = _decode(folder / "config.json", _ConfigFile)
    if found.quantization_config is not None:
        raise ModelRefused(f"weights quantised with {found.quantization_config.get('quant_method', 'an unknown method')!r} are not supported")
    if found.hidden_act != "silu":
        raise ModelRefused(f"the activation {found.hidden_act!r} is not supported, only 'silu'")
    if found.num_attention_heads % (found.num_key_value_heads or found.num_attention_heads):
        raise ModelRefused(f"{found.num_attention_heads} attention heads cannot share {found.num_key_value_heads} KV heads")
    return ModelConfig(
        architectures=found.architectures,
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        intermediate_size=found.intermediate_size,
        num_hidden_layers=found.num_hidden_layers,
        num_attention_heads=found.num_attention_heads,
        num_key_value_heads=found.num_key_value_heads or found.num_attention_heads,
        head_dim=found.head_dim or found.hidden_size // found.num_attention_heads,
        max_position_embeddings=found.max_position_embeddings,
        rms_norm_eps=found.rms_norm_eps,
        tie_word_embeddings=found.tie_word_embeddings,
        attention_bias=found.attention_bias,
        mlp_bias=found.mlp_bias,
        rope=_rope(found),
        sliding_window=_sliding_window(found),
        tokenizer_vocab_size=min(found.vocab_size, _tokenizer_vocab_size(folder / "tokenizer.json") or found.vocab_size),
    )


def _sliding_window(found: _ConfigFile) -> int | None:
    if not found.use_sliding_window or (found.layer_types is not None and "sliding_attention" not in found.layer_types):
        return None
    if found.sliding_window is msgspec.UNSET:  # Mistral's first model left it to the code's default
        return 4096 if found.model_type == "mistral" else None
    return found.sliding_window


def _rope(found: _ConfigFile) -> Rope:
    """Both spellings: `rope_parameters` with everything inside, or `rope_scaling` beside `rope_theta`."""
    settings = {"rope_theta": found.rope_theta} | (found.rope_parameters or found.rope_scaling or {})
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    original = settings.get("original_max_position_embeddings") or found.original_max_position_embeddings
    settings["original_max_position_embeddings"] = original or found.max_position_embeddings
    try:
        rope = msgspec.convert(settings, Rope)
    except msgspec.ValidationError as error:
        raise ModelRefused(f"the rope settings in config.json are not understood: {error}") from error
    if rope.rope_type not in FREQUENCIES:
        raise ModelRefused(f"the rope type {rope.rope_type!r} is not supported; supported are {', '.join(FREQUENCIES)}")
    if rope.partial_rotary_factor != 1.0:
        raise ModelRefused("rotating a part of each head (partial_rotary_factor) is not supported")
    return rope


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _AddedToken(msgspec.Struct):
    id: int


class _TokenizerFile(msgspec.Struct):
    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []


def _tokenizer_vocab_size(path: Path) -> int | None:
    """One more than the largest id that the tokenizer knows; None if there is no such file."""
    if not path.exists():
        return None
    found = _decode(path, _TokenizerFile)
    vocab = found.model.vocab
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    largest = max((*ids, *(token.id for token in found.added_tokens)), default=None)
    return None if largest is None else largest + 1


def _decode(path: Path, kind: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ModelRefused(f"{path} is not understood: {error}") from error
