"""Convictions: requests that were found to kill workers are not tried again.

To find one costs several restarts of the whole group (`suspicion`), and whoever sent it may send it again, by mistake
or not. So what was found is remembered for a while, as a digest of what its computation depends on: the prompt and how
it samples. The seed is part of it where the worker died behind the prompt, at tokens that the seed has chosen; a second
conviction with another seed shows that the seed does not matter. Bounded, pure, and gone with the scheduler. Must not
know how a cause is found, nor what becomes of a request that is known.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from pagemill.ids import num_ids
from pagemill.messages.frontend import AddRequest
from pagemill.messages.sequences import GREEDY_TEMPERATURE

#: The longest unused one is forgotten first.
MAX_CONVICTIONS = 1024
REMEMBERED_S = 3600.0

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class _Conviction:
    until: float
    seed: int | None  #: None: whatever the seed


class Convictions:
    """One per scheduler."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, _Conviction] = OrderedDict()  #: oldest first

    def __len__(self) -> int:
        return len(self._known)

    def add(self, request: AddRequest, num_computed_tokens: int, now: float) -> None:
        """The request killed workers when so many of its tokens were being computed, or were already."""
        digest = _digest(request)
        is_drawn = num_computed_tokens > num_ids(request.prompt_ids) and request.sampling.temperature >= GREEDY_TEMPERATURE
        before = self._known.pop(digest, None)
        is_known = before is not None and before.seed != request.seed
        self._known[digest] = _Conviction(now + REMEMBERED_S, request.seed if is_drawn and not is_known else None)
        if len(self._known) > MAX_CONVICTIONS:
            self._known.popitem(last=False)

    def names(self, request: AddRequest, now: float) -> bool:
        """An equal request has killed workers."""
        if not self._known:
            return False
        digest = _digest(request)
        found = self._known.get(digest)
        if found is None:
            return False
        if now >= found.until:
            del self._known[digest]
            return False
        return found.seed is None or found.seed == request.seed


def _digest(request: AddRequest) -> bytes:
    """The prompt has a length of its own, so that nothing of one part can be taken for the other."""
    digest = hashlib.sha256(len(request.prompt_ids).to_bytes(8, "little"))
    digest.update(request.prompt_ids)
    digest.update(_encoder.encode(request.sampling))
    return digest.digest()
