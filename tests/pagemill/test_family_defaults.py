"""What a family takes for granted yields to what its file says."""

from __future__ import annotations

from pagemill.family_defaults import completed


def test_a_silent_file_is_completed_and_one_that_speaks_is_believed() -> None:
    assert completed({"model_type": "gemma3_text"})["tie_word_embeddings"] is True
    assert completed({"model_type": "gemma3_text", "tie_word_embeddings": False})["tie_word_embeddings"] is False
    assert completed({"model_type": "gemma3_text", "head_dim": 64})["head_dim"] == 64


def test_other_families_are_left_as_they_are() -> None:
    assert completed({"model_type": "llama", "hidden_size": 64}) == {"model_type": "llama", "hidden_size": 64}
    assert completed({}) == {}
