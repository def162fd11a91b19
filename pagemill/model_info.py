"""Geometry of a model, read from its folder without torch: what the launcher plans with and frontends need.

Reads `config.json`, `generation_config.json` and the headers of the safetensors files; never a weight. A
model that cannot be served as it is described is refused here, by the name of what is missing. Whether the
worker has a file for an architecture is asked of `pagemill.discovery`, not known here.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from pagemill.errors import UsageError
from pagemill.family_defaults import completed
from pagemill.kv_groups import group_layers, kv_groups
from pagemill.layer_windows import layer_kinds, layer_windows
from pagemill.messages.sequences import KvGroup

#: The limit that safetensors itself sets on a header.
_MAX_HEADER_BYTES = 100_000_000
_MAX_JSON_BYTES = 64 * 1024 * 1024


class ModelInfo(msgspec.Struct, frozen=True):
    """What a decoder-only model looks like from outside."""

    architecture: str  #: class name in the Hugging Face config
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int  #: positions the model was made for
    windows: tuple[int, ...]  #: positions that each layer looks back, itself included; 0: all
    num_rotary_tables: int  #: one for each way in which layers rotate queries and keys
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]  #: any of them ends a sequence
    num_parameters: int  #: as stored, tied ones once
    weight_bytes: int  #: as stored

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """Layers that share a block table."""
        return kv_groups(self.windows)

    def block_bytes(self, dtype_bytes: int, block_size: int) -> int:
        """Keys and values of so many positions in the layers of one group: all groups have blocks of one size."""
        num_layers = max(map(len, group_layers(self.windows)))
        return 2 * num_layers * self.num_kv_heads * self.head_dim * dtype_bytes * block_size


def read_model_info(folder: Path) -> ModelInfo:
    """The geometry of the model in `folder`. Raises UsageError if it is incomplete or unfit."""
    config = completed(read_json(folder / "config.json"))
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown") if isinstance(config["quantization_config"], dict) else "unknown"
        raise UsageError(f"{folder}: weights quantized by {method!r} are not supported; use the unquantized model or a .gguf file")
    field = _Fields(folder / "config.json", config)
    num_heads, hidden_size = field.positive("num_attention_heads"), field.positive("hidden_size")
    if "head_dim" not in config and hidden_size % num_heads:
        raise UsageError(f"{folder}/config.json: hidden_size {hidden_size} is not divisible by num_attention_heads {num_heads}")
    num_kv_heads = field.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UsageError(f"{folder}/config.json: num_attention_heads {num_heads} is not divisible by num_key_value_heads {num_kv_heads}")
    num_parameters, weight_bytes = read_weight_sizes(folder)
    return ModelInfo(
        architecture=_architecture(folder, config),
        num_layers=field.positive("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=field.positive("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=field.positive("head_dim", hidden_size // num_heads),
        vocab_size=field.positive("vocab_size"),
        context_length=field.positive("max_position_embeddings"),
        windows=layer_windows(config),
        num_rotary_tables=_num_rotary_tables(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(folder, config),
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
    )


def check_supported(info: ModelInfo, architectures: Collection[str]) -> None:
    """Raises UsageError if no model file serves the architecture. `architectures` are those that have one."""
    if architectures and info.architecture not in architectures:
        raise UsageError(f"the architecture {info.architecture} is not supported; supported are {', '.join(sorted(architectures))}")


def read_weight_sizes(folder: Path) -> tuple[int, int]:
    """(parameters, bytes) of all weights in `folder`, from the headers of its safetensors files."""
    num_parameters = weight_bytes = 0
    for path in weight_files(folder):
        for name, tensor in _read_header(path).items():
            if name == "__metadata__":
                continue
            num_parameters += prod(tensor["shape"])
            weight_bytes += tensor["data_offsets"][1] - tensor["data_offsets"][0]
    return num_parameters, weight_bytes


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model: those of the index if there is one. Raises UsageError."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted({folder / str(name) for name in read_json(index).get("weight_map", {}).values()})
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} holds no .safetensors weights")
    for path in files:
        if not path.is_file() or path.parent != folder:
            raise UsageError(f"{folder}: {path.name} is named by the index but missing; fetch the model again")
    return files


def _read_header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ValueError("impossible length of header")
            header: dict[str, Any] = json.loads(file.read(length))
        end = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
        if path.stat().st_size < 8 + length + end:
            raise ValueError("the file is cut off")
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UsageError(f"{path} is not a complete safetensors file ({error}); fetch the model again") from None
    return header


def read_json(path: Path) -> dict[str, Any]:
    """A settings file. Raises UsageError with its name if it is none."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise UsageError(f"{path} is too large to be a configuration")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a JSON object")
    return content


class _Fields:
    """Typed access to a config file whose every error names file and field."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self._path = path
        self._config = config

    def positive(self, name: str, default: int | None = None) -> int:
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{self._path}: {name} must be a positive integer, not {value!r}")
        return value


def _architecture(folder: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UsageError(f"{folder}/config.json names no architecture")
    return names[0]


def _num_rotary_tables(config: dict[str, Any]) -> int:
    """All layers share one, unless those with a window have settings of their own."""
    kinds, settings = set(layer_kinds(config)), config.get("rope_parameters")
    is_by_kind = isinstance(settings, dict) and not kinds.isdisjoint(settings)
    return len(kinds) if is_by_kind or config.get("rope_local_base_freq") is not None else 1


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """From the generation config where there is one: chat models end a turn with another id than a document."""
    path = folder / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.exists() else None
    ids = config.get("eos_token_id") if ids is None else ids
    ids = ids if isinstance(ids, list) else [ids]
    return tuple(sorted({token for token in ids if isinstance(token, int) and not isinstance(token, bool) and token >= 0}))
