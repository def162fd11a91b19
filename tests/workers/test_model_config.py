"""What a checkpoint says about itself, and what is refused by name before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagemill.model_info import read_model_info
from tests.helpers.tiny_model import BASE, KINDS, tiny_checkpoint
from workers.kernels import act_and_mul
from workers.model_config import ACTIVATIONS, ModelRefused, read_config


def written(folder: Path, **changes: Any) -> Path:
    config = {key: value for key, value in (BASE | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_usual_fields_are_read() -> None:
    config = read_config(tiny_checkpoint("llama"))
    assert config.architectures == ("LlamaForCausalLM",)
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (64, 8, 4, 8)
    assert (config.max_position_embeddings, config.windows) == (4096, (0, 0, 0))
    assert config.ropes[0].rope_type == "default"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_tiny_checkpoint_is_accepted(kind: str) -> None:
    config = read_config(tiny_checkpoint(kind))
    assert config.num_hidden_layers == len(config.windows) == len(config.ropes) == KINDS[kind].get("num_hidden_layers", 3)


def test_absent_fields_take_their_usual_defaults(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, num_key_value_heads="absent", head_dim=None, attention_bias="absent", tie_word_embeddings="absent"))
    assert (config.num_key_value_heads, config.head_dim) == (8, 8)
    assert not config.attention_bias
    assert not config.tie_word_embeddings


def test_both_spellings_of_rope_settings_mean_the_same(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    old = read_config(written(tmp_path, rope_theta=500000.0, rope_scaling=scaling)).ropes[0]
    new = read_config(written(tmp_path, rope_theta="absent", rope_parameters=scaling | {"rope_theta": 500000.0})).ropes[0]
    assert old == new
    assert (old.rope_theta, old.factor) == (500000.0, 8.0)


def test_layers_with_a_window_have_a_rope_of_their_own_where_the_family_gives_them_one() -> None:
    plain, scaled, nested = (read_config(tiny_checkpoint(kind)).ropes for kind in ("gemma3", "gemma3-capped", "gemma3-rope-parameters"))
    assert [(rope.rope_type, rope.rope_theta) for rope in plain] == [("default", 500.0), ("default", 50000.0), ("default", 500.0)]
    assert [(rope.rope_type, rope.factor) for rope in scaled] == [("default", 1.0), ("linear", 4.0), ("default", 1.0)]
    assert nested == scaled
    assert len(set(read_config(tiny_checkpoint("llama3-rope")).ropes)) == 1


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_launcher_plans_for_as_many_tables_of_positions_as_there_are_ropes(kind: str) -> None:
    folder = tiny_checkpoint(kind)
    assert read_model_info(folder).num_rotary_tables == len(set(read_config(folder).ropes))


def test_a_silent_file_of_gemma_means_what_its_code_assumes() -> None:
    config = read_config(tiny_checkpoint("gemma3-silent"))
    assert (config.head_dim, config.attention_scale, config.activation, config.tie_word_embeddings) == (256, 1 / 16, "gelu_pytorch_tanh", True)
    assert [rope.rope_theta for rope in config.ropes] == [10000.0, 10000.0, 1000000.0]


def test_every_activation_that_is_accepted_has_a_kernel() -> None:
    assert set(ACTIVATIONS) == set(act_and_mul.ACTIVATIONS)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "factor": "much"}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"factor": "much"}}}, "factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"hidden_activation": "relu"}, "'relu'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelRefused, match=named):
        read_config(written(tmp_path, **changes))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"config\.json"):
        read_config(tmp_path)


def test_each_layer_looks_back_as_far_as_the_config_says(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read_config(written(tmp_path, model_type="ministral", sliding_window=64, layer_types=kinds)).windows == (64, 0, 64)
    with pytest.raises(ModelRefused, match="layer_types names 3 layers, but there are 4"):
        read_config(written(tmp_path, num_hidden_layers=4, layer_types=kinds))


def test_ids_past_the_tokenizer_are_padding() -> None:
    config = read_config(tiny_checkpoint("padded-vocab"))
    assert (config.vocab_size, config.tokenizer_vocab_size) == (515, 512)


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [
        ({"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 9, "content": "<x>"}]}, 10),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}, 2),
        ({"model": {"vocab": {"a": 5000}}}, 512),
        ({"model": {}, "added_tokens": []}, 512),
    ],
    ids=["byte pairs", "unigrams", "more ids than the model has rows", "no vocabulary"],
)
def test_tokenizers_of_several_kinds_say_how_many_ids_they_have(tmp_path: Path, tokenizer: dict[str, Any], size: int) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_config(written(tmp_path)).tokenizer_vocab_size == size
