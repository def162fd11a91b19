"""Text to token ids: a model's `tokenizer.json`, its special tokens and its chat template, without torch.

Encoding is slow for long texts but releases the GIL, so callers run `encode` and `encode_chat` in a thread.
A user's words never become control ids: where a message spells out a special token, its content is encoded with special
tokens switched off; otherwise the whole rendered prompt is encoded at once, as transformers does.
This module must not know HTTP or the scheduler.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as HubTokenizer

from frontend.chat_template import ChatTemplate, Message, load_template
from frontend.errors import invalid_value
from frontend.token_bytes import TokenBytes, UnsupportedTokenizerError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Characters of a long text that are counted at once, and tokens that cutting it there may have added.
_PIECE_CHARACTERS = 64 * 1024
_CUT_TOKENS = 16
#: Sampling settings that a model's generation_config.json may set as the default of requests.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is read here; the library reads the rest, which as Python objects would be large."""

    decoder: Any = None


class Tokenizer:
    """One model's tokenizer. It behaves as if immutable, and is safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        source = folder / "tokenizer.json"
        if not source.is_file():
            raise UnsupportedTokenizerError(f"{folder.name} has no tokenizer.json: only fast tokenizers are supported")
        text = source.read_text(encoding="utf-8")
        settings = _read_json(folder / "tokenizer_config.json")
        model_config = _read_json(folder / "config.json")
        generation_config = _read_json(folder / "generation_config.json")
        self._hub = _parse(text)

        added = self._hub.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens = tuple(sorted((added[token_id].content for token_id in special_ids), key=len, reverse=True))
        self._control_ids = special_ids - {self._hub.token_to_id(_token_text(settings.get("unk_token")) or "")}
        self._special_pattern = re.compile("|".join(map(re.escape, self.special_tokens))) if self.special_tokens else None

        vocabulary = self._hub.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values())
        self._max_token_bytes = max(len(token.encode()) for token in vocabulary)
        self.token_bytes = TokenBytes(msgspec.json.decode(text, type=_TokenizerFile).decoder, self._hub.id_to_token, special_ids)

        named = {name: token for name in _SPECIAL_NAMES if (token := _token_text(settings.get(name))) is not None}
        self.eos_ids = _eos_ids(model_config, generation_config, self._hub.token_to_id(named.get("eos_token", "")))
        self.sampling_defaults = {name: value for name in _SAMPLING_DEFAULTS if isinstance(value := generation_config.get(name), int | float)}
        template = load_template(folder, settings)
        self.chat_template = None if template is None else ChatTemplate(template, named)
        self._literal: HubTokenizer | None = None
        self._literal_lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt. Special tokens in it count: whoever sends a raw prompt writes the control tokens as well."""
        return _encode(self._hub, text, add_special_tokens)

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, add_special_tokens: bool = False) -> list[int]:
        """The prompt of a chat. Raises ApiError (400) if the model has no template or its template refuses."""
        if self.chat_template is None:
            raise invalid_value("messages", "This model has no chat template; use /v1/completions.")
        if not self._special_pattern or not any(self._special_pattern.search(message["content"]) for message in messages):
            text = self.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
            return self.encode(text, add_special_tokens=add_special_tokens)
        return self._encode_defused(messages, add_generation_prompt)

    def _encode_defused(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        """Renders with a mark in place of each content, and encodes what lies between marks and contents apart."""
        assert self.chat_template is not None
        run = secrets.token_hex(8)
        marks = {f"\ue000{run}{index:06d}\ue001": message["content"] for index, message in enumerate(messages)}
        marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        text = self.chat_template.render(marked, add_generation_prompt=add_generation_prompt)
        ids: list[int] = []
        for part in re.split(f"(\ue000{run}[0-9]{{6}}\ue001)", text):
            ids += self._encode_content(marks[part]) if part in marks else self.encode(part, add_special_tokens=False)
        return ids

    def _encode_content(self, content: str) -> list[int]:
        ids = _encode(self._require_literal(), content, add_special_tokens=False)
        if not self._control_ids.isdisjoint(ids):  # the vocabulary itself spells it: there is no harmless way to say it
            raise invalid_value("messages", "The content of a message spells out a control token.")
        return ids

    def _require_literal(self) -> HubTokenizer:
        """The same tokenizer, but special tokens are plain text to it. Few servers ever need it, and to parse a vocabulary takes long."""
        with self._literal_lock:
            if self._literal is None:
                self._literal = _parse(self._hub.to_str())
                self._literal.encode_special_tokens = True
            return self._literal

    def min_tokens(self, text: str) -> int:
        """A number of tokens that encoding `text` yields at least; 0 if the normalizer may shorten texts."""
        return 0 if self._hub.normalizer is not None else len(text.encode()) // self._max_token_bytes

    def has_more_tokens(self, text: str, num_tokens: int) -> bool:
        """Whether a text has more tokens than that; a few more may pass. Told piece by piece, for encoded at once it takes up a hundred times its size."""
        num_found = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            num_found += len(self.encode(text[start : start + _PIECE_CHARACTERS], add_special_tokens=False)) - _CUT_TOKENS
            if num_found > num_tokens:
                return True
        return False

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._hub.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]  # `decode` would hold the GIL all the time

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary writes each id."""
        names = {token_id: self._hub.id_to_token(token_id) or "" for token_id in set(token_ids)}
        return [names[token_id] for token_id in token_ids]


def _encode(tokenizer: HubTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Encodes a batch of one: the library's `encode` would hold the GIL all the time, and keep offsets that nobody wants."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _parse(text: str) -> HubTokenizer:
    try:
        tokenizer = HubTokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exceptions
        raise UnsupportedTokenizerError(f"tokenizer.json cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """An optional JSON file of the model folder."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _token_text(entry: object) -> str | None:
    """A token in tokenizer_config.json: a string, or an object with its `content`."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _eos_ids(model_config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer_eos: int | None) -> tuple[int, ...]:
    """Every id that ends a text, wherever the model says so, in ascending order."""
    found = set() if tokenizer_eos is None else {tokenizer_eos}
    for config in (model_config, generation_config):
        entry = config.get("eos_token_id")
        found.update(entry if isinstance(entry, list) else [] if entry is None else [entry])
    return tuple(sorted(token_id for token_id in found if isinstance(token_id, int)))
