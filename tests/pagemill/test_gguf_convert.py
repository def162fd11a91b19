"""Conversion of GGUF files: same weights, same tokens, and no guessing where the file asks for more."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import LlamaConfig

from pagemill.gguf_convert import convert, plan_shards, to_bfloat16
from pagemill.gguf_file import GgufError, GgufFile
from tests.helpers.tiny_gguf import PIECES, USER_DEFINED, write_tiny_gguf
from tests.helpers.tiny_model import BASE, CHAT_TEMPLATE, KINDS, make_tokenizer, make_weights

TEXTS = ["What is the capital of France?", "   42 and 007", "世界 🎉", "<|im_start|>user\nhi<|im_end|>", "\n\n\tx"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_tiny_gguf(folder / "tiny.gguf", end_of_turn=0)
    convert(folder / "tiny.gguf", folder / "hf")
    return folder / "hf"


@pytest.mark.parametrize("kind", ["llama", "tied", "attention-bias", "wide-heads", "one-kv-head"])
def test_weights_are_those_of_the_checkpoint_under_hugging_face_names(kind: str, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", kind=kind)
    wanted = make_weights(BASE | KINDS[kind])
    file = GgufFile(tmp_path / "tiny.gguf")
    found = dict(file.tensors())
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert file.shapes() == {name: values.shape for name, values in found.items()}


def test_weights_of_gemma_are_those_of_the_checkpoint_and_norms_lose_the_one_that_was_added(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", kind="gemma3")
    wanted = make_weights(BASE | KINDS["gemma3"])
    found = dict(GgufFile(tmp_path / "tiny.gguf").tensors())
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=3e-7 if "norm" in name else 0, rtol=0, err_msg=name)


def test_weights_are_rounded_to_bfloat16_as_torch_rounds_them(converted: Path) -> None:
    found = load_file(converted / "model.safetensors")
    wanted = make_weights(BASE)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], torch.from_numpy(wanted[name]).bfloat16()) for name in wanted)


def test_ties_are_rounded_to_even() -> None:
    values = torch.tensor([1.0, 1.00390625, 1.01171875, -1.00390625, 3e38, 1e-40, 0.0, -0.0])
    found = torch.from_numpy(to_bfloat16(values.numpy()).astype(np.int32) << 16).view(torch.float32)
    assert torch.equal(found, values.bfloat16().float())


def test_quantised_weights_are_dequantised_exactly(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", quantization=gguf.GGMLQuantizationType.Q8_0)
    found = dict(GgufFile(tmp_path / "tiny.gguf").tensors())["model.layers.0.mlp.up_proj.weight"]
    original = make_weights(BASE)["model.layers.0.mlp.up_proj.weight"]
    wanted = gguf.quants.dequantize(gguf.quants.quantize(original, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(found, wanted)
    assert not np.array_equal(found, original)


def test_config_says_what_the_checkpoint_says(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"):
        assert config[name] == BASE[name], name
    assert config["rms_norm_eps"] == pytest.approx(BASE["rms_norm_eps"])
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert config["tie_word_embeddings"] is False
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")


def test_config_of_gemma_means_what_the_checkpoints_means(tmp_path: Path) -> None:
    kind = BASE | KINDS["gemma3"] | {"query_pre_attn_scalar": KINDS["gemma3"]["head_dim"]}  # a file cannot say another scale
    write_tiny_gguf(tmp_path / "tiny.gguf", kind="gemma3")
    write_tiny_gguf(tmp_path / "capped.gguf", kind="gemma3-capped")
    config = GgufFile(tmp_path / "tiny.gguf").config()
    for name in ("head_dim", "sliding_window", "query_pre_attn_scalar", "hidden_activation", "layer_types", "tie_word_embeddings", "attention_bias"):
        assert config[name] == kind[name], name
    assert config["rope_parameters"] == {
        "full_attention": {"rope_theta": kind["rope_theta"], "rope_type": "default"},
        "sliding_attention": {"rope_theta": kind["rope_local_base_freq"], "rope_type": "default"},
    }
    assert (config["architectures"], config["model_type"], config["final_logit_softcapping"]) == (["Gemma3ForCausalLM"], "gemma3_text", None)
    assert GgufFile(tmp_path / "capped.gguf").config()["final_logit_softcapping"] == KINDS["gemma3-capped"]["final_logit_softcapping"]


def test_both_ends_of_sequence_and_of_turn_end_an_answer(converted: Path) -> None:
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def test_tokenizer_encodes_like_the_one_inside_and_like_transformers(converted: Path) -> None:
    found, original, loaded = Tokenizer.from_file(str(converted / "tokenizer.json")), make_tokenizer(), AutoTokenizer.from_pretrained(converted)
    for text in TEXTS:
        ids = found.encode(text).ids
        assert ids == original.encode(text).ids == loaded(text)["input_ids"]
        assert found.decode(ids, skip_special_tokens=False) == text
    assert found.decode(found.encode("<|im_start|>a<|im_end|>").ids) == "a"
    assert loaded.chat_template == (converted / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.unk_token_id, loaded.pad_token_id) == (1, 2, 0, 2)


def test_vocabularies_trained_on_single_digits_split_digits_and_the_spaces_before_them(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", pre_tokenizer="smollm")
    convert(tmp_path / "tiny.gguf", tmp_path / "hf")
    found = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert found.pre_tokenizer is not None
    assert [piece for piece, _ in found.pre_tokenizer.pre_tokenize_str("   42 go")] == ["ĠĠĠ", "4", "2", "Ġgo"]


def sentencepiece_ids(text: str) -> list[int]:
    """As the algorithm is defined: user-defined pieces first, the longest; then always the pair of neighbours with the best score, the leftmost of equals."""
    whole = {piece: 4 + index for index, piece in enumerate(USER_DEFINED)}
    scores = {piece: -rank for rank, piece in enumerate(PIECES)}
    first_byte = 4 + len(USER_DEFINED)
    ids: list[int] = []
    for part in re.split("(" + "|".join(sorted(map(re.escape, whole), key=len, reverse=True)) + ")", text):
        if part in whole:
            ids.append(whole[part])
            continue
        pieces = list(part.replace(" ", "▁"))
        while candidates := [(scores[a + b], -at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]:
            at = -max(candidates)[1]
            pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
        for piece in pieces:
            ids += [first_byte + 256 + PIECES.index(piece)] if piece in scores else [first_byte + byte for byte in piece.encode()]
    return ids


@pytest.mark.parametrize("text", ["the in tether", "a  the   in", "<td>the\n\nin 世界 🎉", " the", "thethe ther\n", "in in  in", ""])
def test_a_sentencepiece_vocabulary_splits_text_by_its_scores(text: str, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", kind="gemma3", sentencepiece=True)
    convert(tmp_path / "tiny.gguf", tmp_path / "hf")
    found = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    ids = found.encode(text, add_special_tokens=False).ids
    assert ids == sentencepiece_ids(text)
    assert found.encode(text).ids == [2, *ids]
    assert found.decode(ids) == text


def test_a_sentencepiece_vocabulary_that_begins_texts_with_a_space_takes_it_back(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", kind="gemma3", sentencepiece=True, space_prefix=True)
    convert(tmp_path / "tiny.gguf", tmp_path / "hf")
    found = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    ids = found.encode("the in", add_special_tokens=False).ids
    assert ids == sentencepiece_ids(" the in")
    assert found.decode(ids) == "the in"


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_frequencies_of_llama_3_become_its_rope_scaling(factor: float, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    parameters = scaling | {"rope_theta": BASE["rope_theta"]}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=parameters), "cpu")
    plain = BASE["rope_theta"] ** -(np.arange(0, 64, 2) / 64)
    write_tiny_gguf(tmp_path / "tiny.gguf", extra_tensors={"rope_freqs.weight": (plain / scaled.numpy()).astype(np.float32)})
    assert GgufFile(tmp_path / "tiny.gguf").config()["rope_parameters"] == parameters


def test_rope_frequencies_of_no_known_release_are_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", extra_tensors={"rope_freqs.weight": np.linspace(1, 5, 32, dtype=np.float32)})
    with pytest.raises(GgufError, match="rope frequencies"):
        GgufFile(tmp_path / "tiny.gguf").config()


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", architecture="falcon")
    with pytest.raises(GgufError, match="'falcon'"):
        GgufFile(tmp_path / "tiny.gguf")


def test_an_unknown_split_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", pre_tokenizer="deepseek-llm")
    with pytest.raises(GgufError, match="pre-tokenizer 'deepseek-llm'"):
        convert(tmp_path / "tiny.gguf", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", extra_tensors={"blk.0.attn_sinks.weight": np.ones(8, np.float32)})
    with pytest.raises(GgufError, match="attn_sinks"):
        list(GgufFile(tmp_path / "tiny.gguf").tensors())


def test_something_else_than_a_gguf_file_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 not a model")
    command = [sys.executable, "-m", "pagemill.gguf_convert", str(tmp_path / "x.gguf"), str(tmp_path / "hf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("x.gguf is not a readable GGUF file")
    assert done.stderr.count("\n") == 1


def test_shards_hold_as_many_tensors_as_fit_and_a_larger_one_alone() -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (10,), "b": (10,), "c": (100,), "d": (5, 2)}
    assert plan_shards(shapes, 40) == [["a", "b"], ["c"], ["d"]]
    assert plan_shards(shapes, 10**6) == [["a", "b", "c", "d"]]


def test_several_shards_load_through_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagemill.gguf_convert.MAX_SHARD_BYTES", 100_000)
    write_tiny_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "hf")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    wanted = make_weights(BASE)
    assert index["weight_map"].keys() == wanted.keys()
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "hf" / file)[name], torch.from_numpy(wanted[name]).bfloat16())
