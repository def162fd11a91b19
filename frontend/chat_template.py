"""A model's chat template: messages in, one prompt text out, exactly as transformers would render it.

The template comes with the model and is not trusted: it runs in jinja's immutable sandbox and sees plain values only.
Requests cannot bring templates of their own. What the template refuses (`raise_exception`) is the client's mistake and
carries the template's own words; what breaks inside it is a 400 with a fixed text.
This module must not know token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from frontend.errors import ApiError, invalid_value

Message = Mapping[str, str]


class ChatTemplate:
    """One compiled template and the special tokens it may write (`bos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)
        #: The role `developer` is the newer name of `system`; templates that never heard of it get the old one.
        self.knows_developer = "developer" in source

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt text. Raises ApiError (400) if the template does not accept the messages."""
        chat = [dict(message) for message in messages]
        try:
            return self._template.render(messages=chat, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **self._special_tokens)
        except TemplateRefusal as refusal:
            raise invalid_value("messages", f"The model's chat template refuses these messages: {refusal.message}") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise _broken() from error


class TemplateRefusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


def load_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The source of a model's default template: `chat_template.jinja` wins over tokenizer_config.json. None if there is none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, list):  # named templates
        entry = next((item.get("template") for item in entry if isinstance(item, dict) and item.get("name") == "default"), None)
    return entry if isinstance(entry, str) else None


def _broken() -> ApiError:
    return invalid_value("messages", "The model's chat template cannot render these messages.")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it just renders them."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja)

    def parse(self, parser: Parser) -> Node | list[Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Macro) -> str:
        return str(caller())


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Without the escaping for HTML that jinja's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
