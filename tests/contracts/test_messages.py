"""Every message that there is arrives as it was sent, on the channels that it belongs to and on no other.

Messages are found, not listed: a new one is tried as soon as it exists, and has to be a member of a union.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from pagemill import messages
from pagemill.messages.wire import Hello, Message, Record
from scheduler import events

MODULES = [*(importlib.import_module(f"{messages.__name__}.{module.name}") for module in pkgutil.iter_modules(messages.__path__)), events]
#: By name; each is what one direction carries, or what the core takes or returns.
UNIONS: dict[str, UnionType] = {name: value for module in MODULES for name, value in vars(module).items() if isinstance(value, UnionType)}
CORE_UNIONS = {"Event", "Effect"}
VALUES: dict[type[inspect.Type], tuple[Any, ...]] = {
    inspect.IntType: (0, 1, -1, 127, 128, 2**31 - 1, -(2**31), 2**63, -(2**63), 2**64 - 1),
    inspect.FloatType: (0.0, 0.1, -9999.0, 5e-324, 1.7e308),
    inspect.StrType: ("", "worker 0", "\0", "\u00e4 \U0001f600" * 20),
    inspect.BytesType: (b"", b"\xc1", bytes(range(256)) * 2),
    inspect.BoolType: (False, True),
    inspect.NoneType: (None,),
    inspect.RawType: (msgspec.Raw(b"\x01"), msgspec.Raw(msgspec.msgpack.encode({"rank": 1}))),
}
SEEDS = range(8)


def kinds_of(root: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """All that derive from it, wherever in the contract they are written."""
    written_in = {module.__name__ for module in MODULES}
    return sorted((kind for kind in root.__subclasses__() if kind.__module__ in written_in), key=lambda kind: kind.__name__)


MESSAGES = kinds_of(Message)


def unions_of(kind: type[msgspec.Struct]) -> dict[str, UnionType]:
    return {name: union for name, union in UNIONS.items() if kind in get_args(union)}


def draw(kind: inspect.Type, chance: random.Random) -> Any:
    """Any value of this type."""
    match kind:
        case inspect.StructType():
            return kind.cls(**{field.name: draw(field.type, chance) for field in kind.fields})
        case inspect.UnionType():
            return draw(chance.choice(kind.types), chance)
        case inspect.VarTupleType():
            return tuple(draw(kind.item_type, chance) for _ in range(chance.randrange(4)))
        case inspect.TupleType():
            return tuple(draw(item, chance) for item in kind.item_types)
        case inspect.ListType():
            return [draw(kind.item_type, chance) for _ in range(chance.randrange(4))]
        case inspect.DictType():
            return {draw(kind.key_type, chance): draw(kind.value_type, chance) for _ in range(chance.randrange(4))}
        case inspect.LiteralType():
            return chance.choice(kind.values)
        case _:
            return chance.choice(VALUES[type(kind)])


def drawn(kind: type[msgspec.Struct], seed: int) -> Any:
    return draw(inspect.type_info(kind), random.Random(f"{kind.__name__} {seed}"))


def parts_of(kind: inspect.Type) -> Iterator[type[msgspec.Struct]]:
    """The structs that a value of this type can hold."""
    if isinstance(kind, inspect.StructType):
        yield kind.cls
        for field in kind.fields:
            yield from parts_of(field.type)
    for name in ("item_type", "key_type", "value_type"):
        if hasattr(kind, name):
            yield from parts_of(getattr(kind, name))
    for name in ("item_types", "types"):
        for part in getattr(kind, name, ()):
            yield from parts_of(part)


def test_the_contract_is_found() -> None:
    directions = {"FrontendToScheduler", "SchedulerToFrontend", "SchedulerToWorker", "WorkerToScheduler", "LauncherToChild", "ChildToLauncher"}
    assert UNIONS.keys() == directions | CORE_UNIONS
    assert {member for union in UNIONS.values() for member in get_args(union)} <= set(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_is_a_member_of_a_union_and_arrives_as_it_was_sent(kind: type[msgspec.Struct]) -> None:
    carriers = {"the handshake": Hello} if kind is Hello else unions_of(kind)
    assert carriers, f"nothing carries {kind.__name__}"
    assert carriers.keys() - CORE_UNIONS or kind.__module__ == events.__name__, f"{kind.__name__} crosses no border"
    for name, union in carriers.items():
        decoder = msgspec.msgpack.Decoder(union)
        for seed in SEEDS:
            sent = drawn(kind, seed)
            assert decoder.decode(msgspec.msgpack.encode(sent)) == sent, name


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_is_refused_where_it_does_not_belong_and_whenever_it_is_cut_off(kind: type[msgspec.Struct]) -> None:
    frame = msgspec.msgpack.encode(drawn(kind, 0))
    for name in UNIONS.keys() - unions_of(kind).keys():
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(frame, type=UNIONS[name])
    for union in unions_of(kind).values():
        decoder = msgspec.msgpack.Decoder(union)
        for end in range(len(frame)):
            with pytest.raises(msgspec.DecodeError):
                decoder.decode(frame[:end])


@pytest.mark.parametrize("kind", kinds_of(Record))
def test_a_record_is_part_of_a_message(kind: type[msgspec.Struct]) -> None:
    assert any(kind in parts_of(inspect.type_info(message)) for message in MESSAGES)
