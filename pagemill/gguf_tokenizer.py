"""Makes `tokenizer.json` and its settings from the vocabulary inside a GGUF file.

A GGUF names the rule by which text is split before byte-pair merging; the wrong rule still decodes perfectly and only
makes the model a little worse, so a rule that is not in the table is refused. A SentencePiece vocabulary has scores in
place of merges; the merges follow from them. `check` compares the finished folder with what the file says. Must not
know about weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers
from tokenizers.decoders import ByteFallback, Fuse, Replace, Strip
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Sequence as DecoderSequence
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.processors import TemplateProcessing

from pagemill.gguf_file import GgufError, GgufFile

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types of a GGUF: the latter two are matched whole, and control tokens never shown
_SPACE = "▁"  # how SentencePiece writes it

_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEXES = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "tekken": _TEKKEN}
#: GPT-2's rule, but every digit stands alone.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact"})

SAMPLES = (
    "What is the capital of France?",
    "   12 apples\n\n\tand 3.14159 pies  ",
    "naïve 世界 🎉👩‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|>",
    "it's we'll I'D",
    "",
)


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    match file.metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            _byte_level_tokenizer(file).save(str(folder / "tokenizer.json"))
        case "llama":
            _sentencepiece_tokenizer(file).save(str(folder / "tokenizer.json"))
        case other:
            raise GgufError(f"tokenizer {other!r} of the GGUF file is not supported")
    (folder / "tokenizer_config.json").write_text(json.dumps(_settings(file), indent=2) + "\n", encoding="utf-8")
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


def end_token_ids(file: GgufFile) -> list[int]:
    """Tokens that end an answer: end of sequence, and end of turn where the file names one."""
    return sorted({token_id for token_id in (file.token_id("eos"), file.token_id("eot")) if token_id is not None})


def check(file: GgufFile, folder: Path) -> None:
    """Compares the folder with the GGUF's own words. Raises GgufError at the first difference."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    _expect("number of tokens", tokenizer.get_vocab_size(), len(tokens))
    for role, name in _SPECIAL.items():
        _expect(name, tokenizer.token_to_id(settings[name]) if name in settings else None, file.token_id(role))
    for token_id in _ids_of_type(file, _CONTROL):
        _expect(f"control token {tokens[token_id]!r}", tokenizer.encode(tokens[token_id], add_special_tokens=False).ids, [token_id])
    # A space put before every text is put behind every token that is matched whole, too; decoding takes back only the first.
    for text in () if _starts_with_space(file) else SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        _expect(f"decoding of {text!r}", tokenizer.decode(ids, skip_special_tokens=False), text)


def _byte_level_tokenizer(file: GgufFile) -> Tokenizer:
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in file.metadata["tokenizer.ggml.merges"])]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    split = file.metadata.get("tokenizer.ggml.pre")
    ignore_merges = split in _REGEXES and _REGEXES[split] in (_LLAMA3, _TEKKEN)  # a word that is a token is one token
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.post_processor = _post_processor(file, tokens) or ByteLevelProcessor(trim_offsets=False)
    _add_whole_tokens(tokenizer, file, tokens)
    return tokenizer


def _add_whole_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    tokenizer.add_special_tokens([AddedToken(tokens[token_id], special=True, normalized=False) for token_id in _ids_of_type(file, _CONTROL)])
    tokenizer.add_tokens([AddedToken(tokens[token_id], special=False, normalized=False) for token_id in _ids_of_type(file, _USER_DEFINED)])


def _pre_tokenizer(split: str | None) -> PreTokenizer:
    if split in _SINGLE_DIGITS:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if split == "gpt-2":
        return ByteLevel(add_prefix_space=False)
    if split in _REGEXES:
        return Sequence([Split(Regex(_REGEXES[split]), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
    raise GgufError(f"pre-tokenizer {split!r} of the GGUF file is not supported: text would be split in another way than in training")


def _post_processor(file: GgufFile, tokens: list[str]) -> TemplateProcessing | None:
    """Puts the begin token before a text where the file asks for it."""
    bos = file.token_id("bos")
    if bos is None or not file.metadata.get("tokenizer.ggml.add_bos_token", False):
        return None
    return TemplateProcessing(single=[tokens[bos], "$A"], pair=[tokens[bos], "$A", "$B"], special_tokens=[(tokens[bos], bos)])


def _sentencepiece_tokenizer(file: GgufFile) -> Tokenizer:
    """Spaces become a letter of their own; what the vocabulary lacks falls apart into bytes."""
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = file.token_id("unknown")
    unknown_token = None if unknown is None else tokens[unknown]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges_of_scores(file), unk_token=unknown_token, fuse_unk=True, byte_fallback=True))
    starts_with_space = _starts_with_space(file)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if starts_with_space else spaces
    text = [Replace(_SPACE, " "), ByteFallback(), Fuse()]
    tokenizer.decoder = DecoderSequence([*text, Strip(" ", 1, 0)] if starts_with_space else text)
    post_processor = _post_processor(file, tokens)
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    _add_whole_tokens(tokenizer, file, tokens)
    return tokenizer


def _starts_with_space(file: GgufFile) -> bool:
    return file.metadata["tokenizer.ggml.model"] == "llama" and bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))


def merges_of_scores(file: GgufFile) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the token of the highest score first; of one token's, that with the longest first part."""
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    scores: list[float] = file.metadata["tokenizer.ggml.scores"]
    normal = {tokens[token_id]: scores[token_id] for token_id in _ids_of_type(file, _NORMAL)}
    merges: list[tuple[str, str]] = []
    for token in sorted(normal, key=normal.__getitem__, reverse=True):
        merges += [(token[:cut], token[cut:]) for cut in range(len(token) - 1, 0, -1) if token[:cut] in normal and token[cut:] in normal]
    return merges


def _settings(file: GgufFile) -> dict[str, Any]:
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, name in _SPECIAL.items():
        token_id = file.token_id(role)
        if token_id is not None:
            settings[name] = tokens[token_id]
    settings["model_max_length"] = file.config()["max_position_embeddings"]
    return settings


def _ids_of_type(file: GgufFile, wanted: int) -> list[int]:
    return [token_id for token_id, kind in enumerate(file.metadata.get("tokenizer.ggml.token_type", ())) if kind == wanted]


def _expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise GgufError(f"the conversion went wrong: {what} is {found!r}, the GGUF file says {wanted!r}")
