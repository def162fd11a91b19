"""What a checkpoint's `config.json` says about the model, checked and brought into one form.

Everything that this worker cannot run as the model's authors meant it is refused here, by name, before
any weight is read. Knows files and numbers; no weights, no devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pagemill.errors import UsageError
from pagemill.family_defaults import completed
from pagemill.layer_windows import FULL, SLIDING, layer_kinds, layer_windows
from workers.rope import FREQUENCIES, Rope

Decoded = TypeVar("Decoded")

#: Names as in config files; SiLU, and GELU in its tanh form.
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


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
    activation: str  #: of the gate in an MLP, one of `ACTIVATIONS`
    attention_scale: float  #: of queries times keys
    final_logit_softcapping: float | None  #: c: logits x become c tanh(x / c)
    ropes: tuple[Rope, ...]  #: of each layer
    windows: tuple[int, ...]  #: positions that each layer looks back, itself included; 0: all
    tokenizer_vocab_size: int  #: ids from here on are padding that no tokenizer entry names


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
    hidden_activation: str | None = None  #: the same, as Gemma calls it
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None
    rope_theta: float = 10000.0
    rope_local_base_freq: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    quantization_config: dict[str, Any] | None = None


def read_config(folder: Path) -> ModelConfig:
    """Reads and checks `folder/config.json`. Raises ModelRefused."""
    config = completed(_decode(folder / "config.json", dict[str, Any]))
    found = _convert(folder / "config.json", config, _ConfigFile)
    _check_supported(found)
    head_dim = found.head_dim or found.hidden_size // found.num_attention_heads
    ropes = _ropes(found)
    try:
        kinds, windows = layer_kinds(config), layer_windows(config)
    except UsageError as error:
        raise ModelRefused(str(error)) from error
    return ModelConfig(
        architectures=found.architectures,
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        intermediate_size=found.intermediate_size,
        num_hidden_layers=found.num_hidden_layers,
        num_attention_heads=found.num_attention_heads,
        num_key_value_heads=found.num_key_value_heads or found.num_attention_heads,
        head_dim=head_dim,
        max_position_embeddings=found.max_position_embeddings,
        rms_norm_eps=found.rms_norm_eps,
        tie_word_embeddings=found.tie_word_embeddings,
        attention_bias=found.attention_bias,
        mlp_bias=found.mlp_bias,
        activation=found.hidden_activation or found.hidden_act,
        attention_scale=(found.query_pre_attn_scalar or head_dim) ** -0.5,
        final_logit_softcapping=found.final_logit_softcapping,
        ropes=tuple(ropes[kind] for kind in kinds),
        windows=windows,
        tokenizer_vocab_size=min(found.vocab_size, _tokenizer_vocab_size(folder / "tokenizer.json") or found.vocab_size),
    )


def _check_supported(found: _ConfigFile) -> None:
    if found.quantization_config is not None:
        raise ModelRefused(f"weights quantised with {found.quantization_config.get('quant_method', 'an unknown method')!r} are not supported")
    activation = found.hidden_activation or found.hidden_act
    if activation not in ACTIVATIONS:
        raise ModelRefused(f"the activation {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    if found.num_attention_heads % (found.num_key_value_heads or found.num_attention_heads):
        raise ModelRefused(f"{found.num_attention_heads} attention heads cannot share {found.num_key_value_heads} KV heads")
    if found.attn_logit_softcapping is not None:
        raise ModelRefused("a soft cap on attention scores (attn_logit_softcapping) is not supported")
    if found.use_bidirectional_attention:
        raise ModelRefused("attention to later tokens (use_bidirectional_attention) is not supported: this is no model that generates text")


def _ropes(found: _ConfigFile) -> dict[str, Rope]:
    """By kind of layer. All spellings: `rope_parameters` with everything inside, for all layers or for each kind, or `rope_scaling` beside `rope_theta`,
    where a base of its own for layers with a window means that only the others are scaled.
    """
    local_theta = found.rope_local_base_freq or found.rope_theta
    by_kind = found.rope_parameters or {}
    if by_kind.keys() & {FULL, SLIDING}:
        return {kind: _rope(found, theta, by_kind.get(kind) or {}) for kind, theta in ((FULL, found.rope_theta), (SLIDING, local_theta))}
    rope = _rope(found, found.rope_theta, found.rope_parameters or found.rope_scaling or {})
    return {FULL: rope, SLIDING: rope if found.rope_local_base_freq is None else _rope(found, local_theta, {})}


def _rope(found: _ConfigFile, theta: float, given: dict[str, Any]) -> Rope:
    settings = {"rope_theta": theta} | given
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


def _convert(path: Path, value: dict[str, Any], kind: type[Decoded]) -> Decoded:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ModelRefused(f"{path} is not understood: {error}") from error


def _decode(path: Path, kind: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ModelRefused(f"{path} is not understood: {error}") from error
