"""Text from token ids: whole characters only, and in the end exactly what decoding everything at once gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Strip
from tokenizers.decoders import Sequence as DecoderSequence
from tokenizers.models import BPE

from frontend.detokenizer import Detokenizer
from frontend.token_bytes import TokenBytes, UnsupportedTokenizerError
from tests.helpers.tiny_model import make_tokenizer

TEXTS = [
    "Hello, world!",
    "  two leading spaces",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 end",
    "안녕하세요 세계, 你好世界, こんにちは",
    "naïve café — ﷽",
    "line\r\nbreak\ttab\x00null",
]


@cache
def byte_level() -> Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("à propos", special=False, normalized=False)])
    return tokenizer


@cache
def sentence_piece() -> Tokenizer:
    """As Llama 2's: `▁` for spaces, a token for each byte, and a first space that the decoder takes away."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁▁", "H", "ell", "o", "中", "▁the"]
    tokenizer = Tokenizer(BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = DecoderSequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:3]])
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    special = frozenset(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return TokenBytes(json.loads(tokenizer.to_str())["decoder"], tokenizer.id_to_token, special)


def pieces(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True, *, begins_text: bool = True) -> list[str]:
    detokenizer = Detokenizer(token_bytes(tokenizer), skip_special_tokens, begins_text=begins_text)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_whole_and_no_piece_splits_a_character(text: str) -> None:
    got = pieces(byte_level(), byte_level().encode(text).ids)
    assert "".join(got) == text
    assert not any("\ufffd" in piece for piece in got)


@given(st.lists(st.integers(0, 513), max_size=40), st.booleans())
def test_pieces_of_any_ids_join_to_the_decoding_of_all_of_them(ids: list[int], skip: bool) -> None:
    assert "".join(pieces(byte_level(), ids, skip)) == byte_level().decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=30), st.booleans())
def test_pieces_of_any_text_join_to_the_decoding_of_all_of_it(text: str, skip: bool) -> None:
    ids = byte_level().encode(text).ids
    assert "".join(pieces(byte_level(), ids, skip)) == byte_level().decode(ids, skip_special_tokens=skip)


@given(st.lists(st.one_of(st.integers(259, 266), st.sampled_from([[0xF0, 0x9F, 0x98, 0x80], [0xE4, 0xB8, 0xAD], [0x41]])), max_size=20), st.booleans())
def test_sentence_piece_ids_join_to_the_decoding_of_all_of_them(parts: list[int | list[int]], skip: bool) -> None:
    ids = [token_id for part in parts for token_id in ([byte + 3 for byte in part] if isinstance(part, list) else [part])]
    ids = [1, *ids, 2]
    got = "".join(pieces(sentence_piece(), ids, skip))
    assert got == sentence_piece().decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [byte_level(), sentence_piece()], ids=["byte-level", "SentencePiece"])
@given(before=st.lists(st.integers(260, 266), min_size=1, max_size=5), ids=st.lists(st.integers(259, 266), max_size=10), skip=st.booleans())
def test_pieces_that_continue_a_text_join_to_what_decoding_all_of_it_adds(tokenizer: Tokenizer, before: list[int], ids: list[int], skip: bool) -> None:
    text = tokenizer.decode(before, skip_special_tokens=skip)
    assume(not text.endswith("\ufffd"))  # no half of a character that these ids would complete
    whole = tokenizer.decode(before + ids, skip_special_tokens=skip)
    assert text + "".join(pieces(tokenizer, ids, skip, begins_text=False)) == whole


def test_only_a_text_that_begins_loses_its_first_space() -> None:
    the = sentence_piece().token_to_id("▁the")
    assert the is not None
    assert pieces(sentence_piece(), [the, the]) == ["the", " the", ""]
    assert pieces(sentence_piece(), [the, the], begins_text=False) == [" the", " the", ""]


def test_an_emoji_of_four_byte_tokens_appears_with_the_last_of_them() -> None:
    byte_ids = [byte + 3 for byte in "😀".encode()]
    assert pieces(sentence_piece(), byte_ids) == ["", "", "", "😀", ""]


def test_a_word_after_half_a_character_replaces_the_half_once_and_keeps_the_word() -> None:
    the = sentence_piece().token_to_id("▁the")
    assert the is not None
    cut = [0xE4 + 3, 0xB8 + 3, the]
    assert pieces(sentence_piece(), cut) == ["", "", "\ufffd the", ""]


def test_half_a_character_at_the_end_is_flushed_as_one_replacement() -> None:
    assert pieces(sentence_piece(), [0xF0 + 3, 0x9F + 3]) == ["", "", "\ufffd"]


def test_endless_invalid_bytes_are_flushed_as_they_come() -> None:
    got = pieces(sentence_piece(), [0xFF + 3] * 50)
    assert got == ["\ufffd"] * 50 + [""]


@pytest.mark.parametrize(("skip", "expected"), [(True, "hi"), (False, "<|im_start|>hi<|im_end|>")])
def test_special_tokens_are_text_only_if_asked_for(skip: bool, expected: str) -> None:
    ids = [1, *byte_level().encode("hi").ids, 2]
    assert "".join(pieces(byte_level(), ids, skip)) == expected


def test_added_tokens_that_are_not_special_always_are_text() -> None:
    ids = byte_level().encode("<think>à propos").ids
    assert len(ids) == 2
    assert "".join(pieces(byte_level(), ids)) == "<think>à propos"


def test_ids_outside_the_vocabulary_stand_for_nothing() -> None:
    assert pieces(byte_level(), [99999, 5]) == ["", byte_level().decode([5]), ""]


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "Sequence", "decoders": [{"type": "CTC"}]}])
def test_an_unknown_kind_of_tokenizer_is_refused_by_name(decoder: dict[str, object] | None) -> None:
    with pytest.raises(UnsupportedTokenizerError, match=r"no decoder|WordPiece|CTC"):
        TokenBytes(decoder, lambda _: None, frozenset())
