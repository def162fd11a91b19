"""Prefix keys: the names under which KV blocks may be shared.

A key says everything that the bytes of a block depend on: the model, the adapter, the cache domain and
all tokens up to the block's end. Every part is tagged and length-prefixed before it is hashed, so no two
different inputs meet in one encoding. Frontends compute the keys of prompts, the scheduler's core those
of generated blocks; both from this file. Keys are SHA-256 digests, `KEY_BYTES` long.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array

KEY_BYTES = 32


def cache_domain(secret: bytes, api_key_id: str) -> bytes:
    """The domain within which prefixes are shared: one per API key, unguessable without the run's secret."""
    return hmac.new(secret, _tagged(b"domain", api_key_id.encode()), hashlib.sha256).digest()


def root_key(model_fingerprint: bytes, adapter: bytes, domain: bytes) -> bytes:
    """The parent of every first block."""
    return hashlib.sha256(_tagged(b"root", model_fingerprint, adapter, domain)).digest()


def block_key(parent: bytes, token_ids: array[int]) -> bytes:
    """The key of the block that holds `token_ids` (int32) behind `parent`."""
    return hashlib.sha256(_tagged(b"block", parent, token_ids.tobytes())).digest()


def prefix_keys(root: bytes, token_ids: array[int], block_size: int) -> bytes:
    """Keys of all full blocks of `token_ids`, `KEY_BYTES` each, concatenated in order."""
    keys, parent = [], root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_key(parent, token_ids[start : start + block_size])
        keys.append(parent)
    return b"".join(keys)


def choice_seed(seed: int, choice: int) -> int:
    """The 64-bit seed of one choice: H(seed, i), so that equal seeds repeat and choices differ."""
    digest = hashlib.sha256(_tagged(b"seed", (seed % 2**64).to_bytes(8, "little"), choice.to_bytes(8, "little"))).digest()
    return int.from_bytes(digest[:8], "little")


def _tagged(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
