"""The bytes that each token id stands for: the ground on which text, deltas and logprobs are built.

A token of a language model is a piece of a byte string, not of a text: characters may be split between tokens. Two
families of tokenizers cover what is served here. Byte-level BPE writes each byte as one printable character (GPT-2's
alphabet); SentencePiece style writes spaces as U+2581 and rare bytes as `<0xE2>`. Any other kind is refused by name at
start. This module must not know requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Tokens whose looks are remembered: with logprobs, one output token shows twenty others.
_MAX_SHOWN = 32 * 1024


class UnsupportedTokenizerError(Exception):
    """The model's tokenizer is of a kind that this server does not know; the text names it."""


class ShownToken(NamedTuple):
    """How a reply shows a token by itself: as a text, which cannot say all, and as bytes, in a JSON list."""

    text: str
    encoded_bytes: msgspec.Raw


class TokenBytes:
    """Token id -> bytes, worked out on first use. Ids outside the vocabulary stand for nothing."""

    def __init__(self, decoder: Mapping[str, Any] | None, token_of: Callable[[int], str | None], special_ids: frozenset[int]) -> None:
        self.special_ids = special_ids
        self._token_of = token_of
        self._known: dict[int, bytes] = {}
        self.shown = lru_cache(_MAX_SHOWN)(self._show)
        kinds = list(_decoder_kinds(decoder))
        self._convert = _converter(kinds)
        #: SentencePiece begins texts with a space that its decoder takes away again.
        self.strips_first_space = ("Strip", " ") in kinds

    def __call__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            token = self._token_of(token_id)
            known = self._known[token_id] = b"" if token is None else self._convert(token)
        return known

    def _show(self, token_id: int) -> ShownToken:
        data = self(token_id)
        return ShownToken(data.decode("utf-8", "replace"), msgspec.Raw(msgspec.json.encode(list(data))))


def _decoder_kinds(decoder: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """(type, what it acts on) of each part of a `tokenizer.json` decoder that changes text."""
    if decoder is None:
        raise UnsupportedTokenizerError("the tokenizer has no decoder")
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoder_kinds(part)
        return
    match decoder:
        case {"type": "ByteLevel" | "ByteFallback"}:
            yield decoder["type"], ""
        case {"type": "Fuse"}:
            pass  # joins what is joined here anyway
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": " "}:
            yield "Replace", pattern
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            yield "Strip", " "
        case _:
            raise UnsupportedTokenizerError(f"a tokenizer with a decoder of type {decoder['type']} is not supported")


def _converter(kinds: list[tuple[str, str]]) -> Callable[[str], bytes]:
    if kinds == [("ByteLevel", "")]:
        return _from_byte_level
    spaces = [pattern for kind, pattern in kinds if kind == "Replace"]
    names = {kind for kind, _ in kinds}
    if names == {"ByteFallback", "Replace"} | (names & {"Strip"}) and set(spaces) == {_SPACE}:
        return _from_sentence_piece
    raise UnsupportedTokenizerError(f"a tokenizer with the decoders {', '.join(sorted(names))} is not supported")


def _byte_alphabet() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other bytes, in order, are the characters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:  # an added token that is not written in the alphabet
        return token.encode()


def _from_sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE, " ").encode()
