"""Chat templates: messages to the text of a prompt, by the rules of Hugging Face's `apply_chat_template`.

Source: transformers `utils/chat_template_utils.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# stands at the end of the message that is continued; what the template writes from there on is cut off
_CUT = "CONTINUE_FINAL_MESSAGE_TAG "
# what clients call a message's reasoning; templates read the first or the second
_REASONING = ("reasoning_content", "thinking", "reasoning")


def render(
    template: str,
    messages: Sequence[Any],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Returns the text of the prompt. Messages and tools are dicts, or values with a `model_dump` that gives one.

    Raises ValueError with the template's own message when it refuses the chat.
    """
    if add_generation_prompt and continue_final_message:
        raise ValueError("continue_final_message=True needs add_generation_prompt=False: the last message stays open")
    chat = [_message(message) for message in messages]
    if not chat:
        raise ValueError("the chat has no messages; a chat template needs at least one")
    final = _mark_final(chat[-1], template) if continue_final_message else ""
    names = {
        "documents": None,
        **{name: _plain(value) for name, value in (variables or {}).items()},
        "messages": chat,
        "tools": None if tools is None else [_tool(tool) for tool in tools],
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        text = compile_template(template).render(names)
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template: {error.message}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # what a template's Python does to a message of a form that it does not expect
        raise ValueError(f"chat template: {type(error).__name__}: {error}") from error
    return _cut_final(text, final) if continue_final_message else text


@lru_cache(maxsize=32)
def compile_template(template: str) -> jinja2.Template:
    """Returns the compiled template; it cannot change what it is given, nor reach Python beyond it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; a prompt has just its text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # a scope, as the call block of transformers is one: what is set inside is not seen outside
        return [jinja2.nodes.Scope(body)]


class _Namespace(Namespace):
    """jinja's namespace without names that start with an underscore, which reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # no parameter is named self, so that a template may set one of that name
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have an attribute {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain(value: Any) -> Any:
    """A copy of JSON-like data made of Python's own types, so that a template meets no other object's methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (
            type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else [_plain(i) for i in value]
        )
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _message(message: Any) -> dict[str, Any]:
    """A message as the template sees it: no None values, and its reasoning under each name for it."""
    plain = _plain(message)
    if not isinstance(plain, dict):
        raise ValueError(f"a chat message is a dict with a role and content, not {message!r}")
    plain = {key: value for key, value in plain.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _tool(tool: Any) -> dict[str, Any]:
    plain = _plain(tool)
    if not isinstance(plain, dict):
        raise ValueError(f"a tool is a dict (a JSON schema of a function), not {tool!r}")
    return plain


def _mark_final(message: dict[str, Any], template: str) -> str:
    """Returns the text that is continued and puts the mark behind it; changes `message`."""
    content = message.get("content")
    if content is None or "content" not in template:
        raise ValueError("continue_final_message=True: the final message has no content that the template shows")
    if isinstance(content, str):
        message["content"] = content + _CUT
        return content
    parts = [part for part in content if "text" in part]
    if not parts:
        raise ValueError("continue_final_message=True: the final message has no text to continue")
    text = parts[-1]["text"]
    parts[-1]["text"] = text + _CUT
    return text


def _cut_final(text: str, final: str) -> str:
    if final.strip() not in text or _CUT.strip() not in text:
        raise ValueError(
            "continue_final_message=True: the chat template changes the final message, so that it has no end"
        )
    at = text.rindex(_CUT.strip())
    # a template that trims the message trims the mark's space: then the space before it went as well
    return text[:at] if text[at:].startswith(_CUT) else text[:at].rstrip()
