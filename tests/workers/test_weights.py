"""Checkpoints: what is missing or malformed is refused by name; GGUF and safetensors hold the same model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.lib.offline import offline_config
from tests.helpers.forward import logits_in_chunks
from tests.helpers.tiny_model import tiny_checkpoint
from workers.gguf_weights import GgufCheckpoint
from workers.loader import load
from workers.model_config import ModelRefused, read_config
from workers.weights import Part, SafetensorsCheckpoint

TOKENS = list(range(3, 60))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("bfloat16-shards"), tmp_path / "model"))


def change_index(folder: Path, file: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(index))


def test_shards_are_read_as_one_checkpoint(sharded: Path) -> None:
    checkpoint = SafetensorsCheckpoint(sharded)
    whole = load_file(tiny_checkpoint("llama") / "model.safetensors")
    assert checkpoint.names() == frozenset(whole)
    for name, tensor in whole.items():
        assert torch.equal(checkpoint.read(name), tensor.bfloat16())


#: Whole heads of queries and keys, rows, columns, a part of a vector.
PARTS: list[tuple[str, Part]] = [
    ("model.layers.0.self_attn.q_proj.weight", (slice(16, 48),)),
    ("model.layers.1.self_attn.k_proj.weight", (slice(8, 16),)),
    ("model.layers.1.mlp.down_proj.weight", (slice(None), slice(40, 80))),
    ("lm_head.weight", (slice(504, 512),)),
    ("model.norm.weight", (slice(3, 5),)),
    ("model.norm.weight", ()),
]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_part_of_a_tensor_is_what_the_whole_has_there(folder: Path, name: str, part: Part) -> None:
    checkpoint, whole = SafetensorsCheckpoint(folder), load_file(folder / "model.safetensors")[name]
    assert checkpoint.shape(name) == tuple(whole.shape)
    assert torch.equal(checkpoint.read(name, part), whole[part])


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_cannot_name_files_outside_its_folder(sharded: Path, file: str) -> None:
    change_index(sharded, file)
    with pytest.raises(ModelRefused, match="outside its folder"):
        SafetensorsCheckpoint(sharded)


def test_a_shard_that_is_missing_is_named(sharded: Path) -> None:
    change_index(sharded, "model-00003-of-00003.safetensors")
    with pytest.raises(ModelRefused, match="model-00003-of-00003"):
        SafetensorsCheckpoint(sharded)


def test_a_file_that_is_cut_off_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelRefused, match=r"model\.safetensors is not a readable safetensors file"):
        SafetensorsCheckpoint(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="neither"):
        SafetensorsCheckpoint(folder)


def test_a_tensor_that_is_missing_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(offline_config(str(folder)))


def test_a_tensor_of_the_wrong_shape_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(16, 64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"k_proj\.weight has shape \[16, 64\], the config asks for \[32, 64\]"):
        load(offline_config(str(folder)))


def to_pairs(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp's own conversion: halves of each head become neighbouring pairs."""
    return values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
GEMMA_NAMES = GGUF_NAMES | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path: Path, folder: Path, quantization: gguf.GGMLQuantizationType, architecture: str = "llama") -> None:
    config = read_config(folder)
    names = GEMMA_NAMES if architecture == "gemma3" else GGUF_NAMES
    writer = gguf.GGUFWriter(path, architecture)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if architecture == "gemma3" and "norm" in name:
            values = values + np.float32(1)
        if architecture == "llama" and "q_proj" in name:
            values = to_pairs(values, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            values = to_pairs(values, config.num_key_value_heads)
        stem, _, kind = name.rpartition(".")
        block, _, part = stem.removeprefix("model.layers.").partition(".")
        target = f"blk.{block}.{names[part]}.{kind}" if stem.startswith("model.layers.") else f"{names[stem]}.{kind}"
        chosen = quantization if values.ndim == 2 and values.shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(target, gguf.quantize(values, chosen), raw_dtype=chosen)
    writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["llama", "attention-bias", "one-kv-head", "tied"])
def test_a_gguf_file_holds_the_same_model(tmp_path: Path, kind: str) -> None:
    folder = tiny_checkpoint(kind)
    write_gguf(tmp_path / "model.gguf", folder, gguf.GGMLQuantizationType.F32)
    from_gguf = load(offline_config(str(folder), gguf_path=str(tmp_path / "model.gguf"), num_blocks=32))
    from_safetensors = load(offline_config(str(folder), num_blocks=32))
    ours, theirs = (logits_in_chunks(loaded, [TOKENS], 1000)[0] for loaded in (from_gguf, from_safetensors))
    assert torch.equal(ours, theirs)


def test_a_gguf_file_of_gemma_holds_the_same_model(tmp_path: Path) -> None:
    folder = tiny_checkpoint("gemma3")
    write_gguf(tmp_path / "model.gguf", folder, gguf.GGMLQuantizationType.F32, "gemma3")
    from_gguf = load(offline_config(str(folder), gguf_path=str(tmp_path / "model.gguf"), num_blocks=32))
    from_safetensors = load(offline_config(str(folder), num_blocks=32))
    ours, theirs = (logits_in_chunks(loaded, [TOKENS], 1000)[0] for loaded in (from_gguf, from_safetensors))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)  # a norm's weight loses its last bits to the one that was added


@pytest.mark.parametrize("quantization", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0])
def test_quantized_tensors_come_back_as_float32(tmp_path: Path, quantization: gguf.GGMLQuantizationType) -> None:
    folder = tiny_checkpoint("llama")
    write_gguf(tmp_path / "model.gguf", folder, quantization)
    checkpoint = GgufCheckpoint(tmp_path / "model.gguf", read_config(folder))
    for name, tensor in load_file(folder / "model.safetensors").items():
        read = checkpoint.read(name)
        assert read.dtype == torch.float32
        assert (read - tensor).abs().max() <= 0.1 * tensor.abs().max()


@pytest.mark.parametrize(("name", "part"), PARTS)
@pytest.mark.parametrize("quantization", [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0])
def test_a_part_of_a_quantized_tensor_is_what_the_whole_has_there(tmp_path: Path, quantization: gguf.GGMLQuantizationType, name: str, part: Part) -> None:
    folder = tiny_checkpoint("llama")
    write_gguf(tmp_path / "model.gguf", folder, quantization)
    checkpoint = GgufCheckpoint(tmp_path / "model.gguf", read_config(folder))
    whole = checkpoint.read(name)
    assert checkpoint.shape(name) == tuple(whole.shape)
    assert torch.equal(checkpoint.read(name, part), whole[part])


def test_other_families_and_other_files_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama")
    write_gguf(tmp_path / "falcon.gguf", folder, gguf.GGMLQuantizationType.F32, architecture="falcon")
    with pytest.raises(ModelRefused, match="'falcon'"):
        GgufCheckpoint(tmp_path / "falcon.gguf", read_config(folder))
    (tmp_path / "text.gguf").write_text("no such thing")
    with pytest.raises(ModelRefused, match=r"text\.gguf is not a usable GGUF file"):
        GgufCheckpoint(tmp_path / "text.gguf", read_config(folder))
