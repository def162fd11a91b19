"""Takes a scheduler core back to an earlier state, thousands of times a second.

A snapshot lists every mutable object that can be reached from a root, with a copy of its contents; restoring
writes the contents back into the same objects. Identities stay, so callbacks between the core's parts stay valid,
and nothing has to be known of any class: what the core grows tomorrow is part of the snapshot. What is immutable
(numbers, bytes, messages, functions) is left alone.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any, Literal

import msgspec

from scheduler.slices import PlannedSlice

Shape = Literal["immutable", "dict", "list", "array", "deque", "tuple", "slice", "attributes", "slots"]

_PACKAGES = ("scheduler", "kvstore")
_SHAPES: dict[type, Shape] = {}


class Snapshot:
    """The state of everything that can be reached from `root`."""

    __slots__ = ("_attributes", "_items", "_mappings", "_queues", "_slots")

    def __init__(self, root: object) -> None:
        # Each an object (or what holds its attributes) and a copy of what was in it.
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._items: list[tuple[Any, Any]] = []
        self._mappings: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._slots: list[tuple[Any, list[tuple[str, Any]]]] = []
        self._queues: list[tuple[deque[Any], list[Any]]] = []
        seen: set[int] = set()
        pending: list[Any] = [root]
        while pending:
            value = pending.pop()
            kind = type(value)
            shape = _SHAPES.get(kind) or _SHAPES.setdefault(kind, _shape_of(kind))
            if shape == "immutable" or id(value) in seen:
                continue
            seen.add(id(value))
            pending += self._save(shape, value)

    def restore(self) -> None:
        for attributes, values in self._attributes:
            attributes.update(values)
        for items, elements in self._items:
            items[:] = elements
        for mapping, entries in self._mappings:
            mapping.clear()
            mapping.update(entries)
        for value, fields in self._slots:
            for name, item in fields:
                setattr(value, name, item)
        for queue, members in self._queues:
            queue.clear()
            queue.extend(members)

    def _save(self, shape: Shape, value: Any) -> Iterable[Any]:
        """Notes what the value holds, and returns what it refers to."""
        match shape:
            case "attributes":
                attributes: dict[str, Any] = value.__dict__.copy()
                self._attributes.append((value.__dict__, attributes))
                return attributes.values()
            case "slots":
                names: tuple[str, ...] = getattr(value, "__struct_fields__", ()) or value.__slots__
                slots = [(name, getattr(value, name)) for name in names]
                self._slots.append((value, slots))
                return [item for _, item in slots]
            case "dict":
                copy = dict(value)
                self._mappings.append((value, copy))
                return copy.values()
            case "array":
                self._items.append((value, value[:]))
                return ()
            case "slice":
                return (value.sequence,)
            case "tuple":
                return tuple(value)
            case _:
                items = list(value)
                (self._queues if shape == "deque" else self._items).append((value, items))
                return items


def _shape_of(kind: type) -> Shape:
    """How to save an object of this type. Keys of dictionaries are taken for immutable."""
    containers: tuple[tuple[type, Shape], ...] = ((dict, "dict"), (list, "list"), (array, "array"), (deque, "deque"), (tuple, "tuple"), (PlannedSlice, "slice"))
    for container, shape in containers:
        if issubclass(kind, container):
            return shape
    if issubclass(kind, (set, bytearray)):
        raise TypeError(f"no way is known to take a {kind.__name__} back")
    if issubclass(kind, msgspec.Struct):
        return "immutable" if kind.__struct_config__.frozen else "slots"
    if issubclass(kind, Enum) or kind.__module__.partition(".")[0] not in _PACKAGES:
        return "immutable"
    return "slots" if "__slots__" in vars(kind) else "attributes"
