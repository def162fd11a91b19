"""The prefix index: which block, or swap slot, holds the KV of which prefix key.

Pure accounting over ids; it knows neither tokens nor references. A key stands for everything the bytes of
a block depend on (`pagemill.keys`), so equal keys mean interchangeable bytes. The index holds at most one
place per key and one key per place. Only confirmed blocks may be inserted; whoever hands a block out for
writing removes it first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

Id = TypeVar("Id", bound=int)
IdSeen = TypeVar("IdSeen", bound=int, contravariant=True)


class Mirror(Protocol[IdSeen]):
    """Who writes down what the index says (`kv_directory`)."""

    def write(self, number: IdSeen, key: bytes) -> None: ...
    def mark(self, number: IdSeen, is_expendable: bool) -> None: ...
    def clear(self, number: IdSeen) -> None: ...


class PrefixIndex(Generic[Id]):
    """A one-to-one map between keys and ids. Owned by an `IdPool`, which alone removes entries."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Id] = {}
        self._keys: dict[Id, bytes] = {}
        self.version = 0  #: grows with every change
        self.mirror: Mirror[Id] | None = None
        self.mirrors_inserts = True  #: false where what is inserted is still being written: then the owner tells when it is

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, key: bytes) -> Id | None:
        return self._blocks.get(key)

    def find_run(self, keys: Iterable[bytes]) -> list[Id]:
        """The blocks of the first keys, up to the first key that has none."""
        blocks: list[Id] = []
        find = self._blocks.get  # bound once: a long prompt has thousands of keys, and every turn may ask
        for key in keys:
            block = find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def key_of(self, block: Id) -> bytes | None:
        return self._keys.get(block)

    def __contains__(self, block: Id) -> bool:
        return block in self._keys

    def insert(self, key: bytes, block: Id) -> bool:
        """False, and no change, if the key already has a block: the newcomer stays private."""
        if key in self._blocks:
            return False
        if block in self._keys:
            raise ValueError(f"block {block} already stands for another prefix")
        self.version += 1
        self._blocks[key] = block
        self._keys[block] = key
        if self.mirror is not None and self.mirrors_inserts:
            self.mirror.write(block, key)
        return True

    def remove(self, block: Id) -> None:
        """Forgets a block that is about to be overwritten. No effect if it is not indexed."""
        key = self._keys.pop(block, None)
        if key is not None:
            self.version += 1
            del self._blocks[key]
            if self.mirror is not None:
                self.mirror.clear(block)

    def mark(self, block: Id, is_expendable: bool) -> None:
        """Lets it be known beside the key whether the content is worth any effort to keep."""
        if self.mirror is not None:
            self.mirror.mark(block, is_expendable)

    def entries(self) -> dict[bytes, Id]:
        """A copy, for invariants."""
        return dict(self._blocks)
