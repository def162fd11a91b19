"""Geometry from a folder's headers, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagemill.errors import UsageError
from pagemill.messages.sequences import KvGroup
from pagemill.model_info import check_supported, read_model_info, weight_files
from tests.helpers.tiny_model import tiny_model_path

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}


def write_tensors(path: Path, tensors: dict[str, tuple[str, list[int], int]], cut: int = 0) -> None:
    """A safetensors file with zeros. `tensors`: name -> dtype, shape, bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(end - cut))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tensors(tmp_path / "model.safetensors", {"a": ("BF16", [10, 4], 80), "b": ("F32", [5], 20)})
    write_config(tmp_path)
    return tmp_path


def write_config(folder: Path, **changes: object) -> None:
    config = {name: value for name, value in (CONFIG | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def test_geometry_is_read_without_a_weight(folder: Path) -> None:
    info = read_model_info(folder)
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim, info.context_length) == (2, 4, 2, 16, 512)
    assert (info.num_parameters, info.weight_bytes) == (45, 100)
    assert info.block_bytes(2, 16) == 2 * 2 * 2 * 16 * 2 * 16
    assert not info.tied_embeddings


def test_an_explicit_head_dim_wins(folder: Path) -> None:
    write_config(folder, head_dim=32, num_key_value_heads=...)
    info = read_model_info(folder)
    assert (info.head_dim, info.num_kv_heads) == (32, 4)


def test_the_generation_config_says_what_ends_a_turn(folder: Path) -> None:
    assert read_model_info(folder).eos_token_ids == (7,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 3, 9]}')
    assert read_model_info(folder).eos_token_ids == (3, 9)
    (folder / "generation_config.json").write_text('{"temperature": 1}')
    assert read_model_info(folder).eos_token_ids == (7,)


def test_layers_that_look_back_differently_far_lie_in_blocks_of_one_size(folder: Path) -> None:
    write_config(folder, model_type="ministral", num_hidden_layers=4, sliding_window=256, layer_types=["sliding_attention"] * 3 + ["full_attention"])
    info = read_model_info(folder)
    assert info.windows == (256, 256, 256, 0)
    assert info.groups == (KvGroup(), *[KvGroup(window=256)] * 3)
    assert info.block_bytes(2, 16) == 2 * 1 * 2 * 16 * 2 * 16


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": ...}, "num_hidden_layers must be a positive integer, not None"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, not 0"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ({"num_attention_heads": 5}, "hidden_size 64 is not divisible by num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_key_value_heads 3"),
        ({"architectures": []}, "names no architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantized by 'gptq' are not supported"),
    ],
)
def test_what_is_missing_or_unfit_is_named(folder: Path, changes: dict[str, object], says: str) -> None:
    write_config(folder, **changes)
    with pytest.raises(UsageError, match=says):
        read_model_info(folder)


def test_an_unknown_architecture_is_refused_by_name(folder: Path) -> None:
    write_config(folder, architectures=["MambaForCausalLM"])
    info = read_model_info(folder)
    with pytest.raises(UsageError, match="the architecture MambaForCausalLM is not supported; supported are LlamaForCausalLM"):
        check_supported(info, ["LlamaForCausalLM"])


def test_the_index_names_the_files(folder: Path) -> None:
    write_tensors(folder / "part-1.safetensors", {"a": ("BF16", [3], 6)})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}))
    assert [path.name for path in weight_files(folder)] == ["part-1.safetensors"]
    assert read_model_info(folder).num_parameters == 3
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    with pytest.raises(UsageError, match=r"part-2\.safetensors is named by the index but missing"):
        weight_files(folder)


def test_an_index_cannot_name_a_file_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(UsageError, match="missing"):
        weight_files(folder)


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, (10**12).to_bytes(8, "little"), (4).to_bytes(8, "little") + b"[1]]", (2).to_bytes(8, "little") + b"[]"])
def test_a_broken_weight_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match="is not a complete safetensors file"):
        read_model_info(folder)


def test_a_cut_off_weight_file_is_refused(folder: Path) -> None:
    write_tensors(folder / "model.safetensors", {"a": ("BF16", [10], 20)}, cut=1)
    with pytest.raises(UsageError, match="the file is cut off"):
        read_model_info(folder)


def test_a_folder_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*config\.json"):
        read_model_info(tmp_path)
    write_config(tmp_path)
    with pytest.raises(UsageError, match=r"holds no \.safetensors weights"):
        read_model_info(tmp_path)


def test_a_whole_model_is_read() -> None:
    info = read_model_info(tiny_model_path())
    assert info.architecture == "LlamaForCausalLM"
    assert info.weight_bytes == sum(path.stat().st_size for path in weight_files(tiny_model_path())) - sum(
        8 + int.from_bytes(path.read_bytes()[:8], "little") for path in weight_files(tiny_model_path())
    )
