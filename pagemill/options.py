"""`ServeOptions` as a command line and as a TOML file, generated from its fields.

Command line goes before file, file before default. Every value is read by `parse_value`, so `32k`,
`512MiB` and `auto` mean the same in both. Whatever is wrong ends as one line that names the flag and what
it accepts. A new field in `ServeOptions` is a new flag; nothing is added here.
"""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

import msgspec
from msgspec import inspect

from pagemill.config import ServeOptions
from pagemill.errors import UsageError
from pagemill.foreign_flags import advice_on

#: As vLLM reads them: a small letter is decimal, a capital or an `i` is binary. `MB` is what is printed on memory: decimal.
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_UNITS |= {f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)} | {"kB": 1000, "B": 1}
#: Share of letters that a word has in common with what may have been meant: two of four swapped, one of a longer word wrong.
_CLOSE = 0.75
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


@dataclass(frozen=True)
class Option:
    """One field of `ServeOptions`."""

    name: str
    kind: inspect.Type
    default: Any
    group: str
    description: str
    metavar: str
    automatic: bool  #: the default, 0 or None, may be written `auto`
    aliases: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """A bool, or a bool that may be left to the server."""
        kinds = self.kind.types if isinstance(self.kind, inspect.UnionType) else (self.kind,)
        return any(isinstance(kind, inspect.BoolType) for kind in kinds)

    @property
    def number(self) -> inspect.IntType | None:
        """The type of a number, which None may stand beside."""
        kinds = self.kind.types if isinstance(self.kind, inspect.UnionType) else (self.kind,)
        return next((kind for kind in kinds if isinstance(kind, inspect.IntType)), None)

    @property
    def accepts(self) -> str:
        """The allowed values, in words."""
        match self.number or self.kind:
            case inspect.LiteralType():
                return "one of " + ", ".join(self.choices)
            case inspect.IntType(ge=lowest, le=highest):
                lowest = 1 if self.automatic and self.default == 0 else lowest
                numbers = f"at least {lowest}" if highest is None else f"from {lowest} to {highest}"
                what = "a size such as 512MiB" if self.metavar == "SIZE" else "a number"
                return f"{'auto or ' if self.automatic else ''}{what}, {numbers}"
            case inspect.VarTupleType():
                return "one or more names"
            case _:
                return "true or false" if self.is_switch else "a text that is not empty"

    def means_nothing(self, value: object) -> bool:
        """The stand-in for `auto` or for what was left out, which nobody writes but by mistake: an empty variable of a shell, above all."""
        if isinstance(self.kind, inspect.VarTupleType):
            return isinstance(value, tuple) and not all(value)
        return value == "" or (self.automatic and self.default == 0 and value == 0)

    @property
    def choices(self) -> tuple[str, ...]:
        """Of a Literal, in the order in which it is written."""
        if not isinstance(self.kind, inspect.LiteralType):
            return ()
        return get_args(get_args(_field_type(self.name))[0])


def serve_options() -> list[Option]:
    """Every option, in the order of the fields."""
    return [_option(field) for field in msgspec.structs.fields(ServeOptions)]


def _option(field: msgspec.structs.FieldInfo) -> Option:
    described = inspect.type_info(field.type)
    assert isinstance(described, inspect.Metadata), f"{field.name} has no description"
    extra, schema = described.extra or {}, described.extra_json_schema or {}
    return Option(
        name=field.name,
        kind=described.type,
        default=field.default,
        group=extra["group"],
        description=schema["description"],
        metavar=extra["metavar"],
        automatic=extra["automatic"],
        aliases=extra["aliases"],
    )


def parse_value(option: Option, value: object) -> Any:
    """`value` from a flag (text) or a TOML file (typed) as the option's own type. Raises UsageError."""
    parsed = value
    if option.number is not None and isinstance(value, str):
        if option.automatic and value.strip().lower() == "auto":
            return option.default
        parsed = _number(value)
    elif isinstance(option.kind, inspect.VarTupleType) and isinstance(value, str):
        parsed = [value]
    try:
        converted = msgspec.convert(parsed, type=_field_type(option.name))
    except msgspec.ValidationError:
        raise _unacceptable(option, value) from None
    if option.means_nothing(converted):
        raise _unacceptable(option, value)
    return converted


def _unacceptable(option: Option, value: object) -> UsageError:
    return UsageError(f"{option.flag} accepts {option.accepts}; not {value!r}")


def _number(text: str) -> int | str:
    """What is no number stays text, which no option accepts for one."""
    number = parse_number(text)
    return text if number is None else number


def parse_number(text: str) -> int | None:
    """`4096`, `32k`, `1.5GiB` as an integer; None if it is none."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        return None
    number = float(match[1]) * _UNITS[match[2]]
    whole = int(match[1]) * _UNITS[match[2]] if match[1].isdigit() else round(number)
    return whole if match[1].isdigit() or abs(whole - number) < 1e-6 * max(1.0, number) else None


def read_config_file(path: str) -> dict[str, Any]:
    """The settings in a TOML file, by field name. Raises UsageError."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: {path} is not TOML: {error}") from None
    options = {option.name: option for option in serve_options()}
    for key in content:
        if key not in options:
            table = "; settings stand at the top level, without tables" if isinstance(content[key], dict) else _did_you_mean(key, options)
            raise UsageError(f"--config: {path}: unknown key {key!r}{table}")
    try:
        return {key: parse_value(options[key], value) for key, value in content.items()}
    except UsageError as error:
        raise UsageError(f"--config: {path}: {error}") from None


class OneLineParser(argparse.ArgumentParser):
    """Reports what is wrong in one line instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def refuse_unknown(arguments: list[str]) -> None:
    """Raises UsageError for the first argument that no parser knew, with what does the same here or a guess at what was meant."""
    if not arguments:
        return
    flag = arguments[0].split("=")[0]
    if not flag.startswith("-"):
        raise UsageError(f"pagemill serve takes one MODEL; {flag!r} is one argument too many")
    if advice := advice_on(flag):
        raise UsageError(f"there is no {flag}: {advice}")
    raise UsageError(f"there is no {flag} in this version{_did_you_mean(flag, _flags())} (see pagemill serve --help)")


def _flags() -> list[str]:
    """All that are spelled out on a command line."""
    flags = [flag for option in serve_options() if option.name != "model" for flag in (option.flag, *option.aliases)]
    switches = [option.flag for option in serve_options() if option.is_switch]
    return ["--config", *flags, *(f"--no-{flag.removeprefix('--')}" for flag in switches)]


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags. What is not given stays absent from the namespace."""
    parser.add_argument("--config", metavar="FILE", default=None, help="TOML file; keys are the flag names with underscores; flags win over it")
    options = serve_options()
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(option.group for option in options)}
    for option in options:
        if option.name == "model":
            parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=f"{option.description} (default: {option.default})")
            continue
        _add_flag(groups[option.group], option)


def _add_flag(group: argparse._ActionsContainer, option: Option) -> None:
    flags = (option.flag, *option.aliases)
    if option.is_switch:
        text = option.description if option.default is None else f"{option.description} (default: {'on' if option.default else 'off'})"
        group.add_argument(*flags, dest=option.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        return
    metavar = option.metavar or "|".join(option.choices)
    text = option.description if option.default in ("", ()) else f"{option.description} (default: {_show_default(option)})"
    several = isinstance(option.kind, inspect.VarTupleType)
    arity: dict[str, Any] = {"nargs": "+", "action": "extend"} if several else {}
    group.add_argument(*flags, dest=option.name, metavar=metavar, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **arity)


def resolve_options(arguments: Mapping[str, Any]) -> ServeOptions:
    """Parsed arguments over the file they name over defaults. Raises UsageError."""
    options = {option.name: option for option in serve_options()}
    settings = read_config_file(arguments["config"]) if arguments.get("config") is not None else {}
    settings |= {name: parse_value(options[name], value) for name, value in arguments.items() if name in options}
    return msgspec.convert(settings, type=ServeOptions)


def _show_default(option: Option) -> object:
    return "auto" if option.automatic else option.default


def _field_type(name: str) -> Any:
    return next(field.type for field in msgspec.structs.fields(ServeOptions) if field.name == name)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    """A guess at a slip of the fingers. The dashes that all flags have in common say nothing."""
    bare = {name.lstrip("-"): name for name in known}
    close = difflib.get_close_matches(word.lstrip("-").replace("_", "-" if word.startswith("-") else "_"), bare, n=1, cutoff=_CLOSE)
    return f"; did you mean {bare[close[0]]}?" if close else ""
