"""What a user may ask of the form of an output, checked. Names are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .checks import check_names, flag

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an output must have: exactly one of the six constraints.

    `json` is a JSON schema: a dict, its text, or a class with model_json_schema (pydantic). `regex` must match the
    whole output. `choice` lists the possible outputs. `grammar` is EBNF (GBNF, as llama.cpp and xgrammar write it) or
    Lark. `json_object` is True for any JSON object. `structural_tag` is {"structures": [{"begin", "schema", "end"}],
    "triggers": [str]}: free text, in which what begins with a trigger must go on as one of the structures.

    Normalised: `json` and `structural_tag` are JSON text, `choice` is a tuple. Raises ValueError for what is wrong in
    form; what only the grammar library can say of a schema ends the request instead, with finish_reason "error".
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False  # JSON without any whitespace
    disable_additional_properties: bool = False  # objects whose schema does not say so take no other properties
    whitespace_pattern: str | None = None  # regex of the whitespace that JSON may hold; None: any

    def __new__(cls, **names: Any) -> StructuredOutputsParams:
        check_names("structured output parameter", names, (f.name for f in fields(cls)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.json_object is not None and not flag("json_object", self.json_object):
            object.__setattr__(self, "json_object", None)
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"structured_outputs needs exactly one of {', '.join(CONSTRAINTS)}, not {found}")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            flag(name, getattr(self, name))
        normalise = {"json": _schema_text, "structural_tag": _tag_text, "choice": _choices}.get(given[0], _text)
        if given[0] != "json_object":
            object.__setattr__(self, given[0], normalise(given[0], getattr(self, given[0])))
        if self.whitespace_pattern is not None:
            _text("whitespace_pattern", self.whitespace_pattern)

    @staticmethod
    def of(value: Any) -> StructuredOutputsParams:
        """The value itself, or made from a dict of its fields."""
        if isinstance(value, StructuredOutputsParams):
            return value
        if isinstance(value, Mapping):
            return StructuredOutputsParams(**value)
        raise ValueError(f"structured_outputs {value!r} is neither a StructuredOutputsParams nor a dict of its fields")

    def as_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, JSON-able: `of` makes the same from them."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return values | ({"choice": list(self.choice)} if self.choice is not None else {})

    def source(self, *, compact: bool = False, closed: bool = False) -> tuple[str, str]:
        """What is to be compiled: a kind ("json", "regex", "choice", "grammar", "structural_tag") and its text.

        `compact` and `closed` are what the engine wants of all requests: no whitespace in JSON, no additional
        properties.
        """
        if self.regex is not None or self.grammar is not None:
            return ("regex", self.regex) if self.regex is not None else ("grammar", str(self.grammar))
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        options: dict[str, Any] = {}
        if compact or self.disable_any_whitespace:
            options["whitespace_flexible"] = False
        elif self.whitespace_pattern is not None:
            options["whitespace_pattern"] = self.whitespace_pattern
        value = {"options": options, "closed": closed or self.disable_additional_properties}
        if self.structural_tag is not None:
            return "structural_tag", json.dumps(value | {"tag": json.loads(self.structural_tag)})
        schema = {"type": "object"} if self.json is None else json.loads(self.json)
        return "json", json.dumps(value | {"schema": schema})


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} {value!r} is not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds a lone surrogate at position {error.start}: it is no valid Unicode") from None
    if not value and name in ("grammar", "whitespace_pattern"):
        raise ValueError(f"{name} is empty")
    return value


def _choices(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence) or not value:
        raise ValueError(f"{name} {value!r} is not a list of at least one string")
    return tuple(dict.fromkeys(_text(name, one) for one in value))


def _schema_text(name: str, value: Any) -> str:
    """A JSON schema as text."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    schema = _parsed(name, value)
    if not isinstance(schema, dict | bool):
        raise ValueError(f"{name} {_short(value)} is not a JSON schema: it must be an object, true or false")
    return _dumped(name, schema)


def _tag_text(name: str, value: Any) -> str:
    """A structural tag as text, its form checked; the schemas in it are not."""
    tag = _parsed(name, value)
    match tag:
        case {"structures": [_, *_] as structures, "triggers": [_, *_] as triggers}:
            pass
        case _:
            raise ValueError(f'{name} {_short(value)} is not like {{"structures": [...], "triggers": [...]}}')
    if unknown := tag.keys() - {"type", "structures", "triggers"}:
        raise ValueError(f"{name} has unknown parts {sorted(map(str, unknown))}")
    if not all(isinstance(t, str) and t for t in triggers):
        raise ValueError(f"{name}: triggers {triggers!r} are not strings of at least one character")
    for one in structures:
        match one:
            case {"begin": str(begin), "schema": dict() | bool(), "end": str()} if len(one) == 3:
                if not any(begin.startswith(t) for t in triggers):
                    raise ValueError(f"{name}: {begin!r} begins with none of the triggers {triggers}")
            case _:
                raise ValueError(f'{name}: {_short(one)} is not like {{"begin": str, "schema": {{...}}, "end": str}}')
    return _dumped(name, tag)


def _parsed(name: str, value: Any) -> Any:
    if not isinstance(value, str | bytes):
        return value
    try:
        return json.loads(value)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name} {_short(value)} is not JSON: {error}") from None


def _dumped(name: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}") from None


def _short(value: Any, most: int = 100) -> str:
    """The value for a message, its end left out when it is long."""
    plain = isinstance(value, str | bytes | int | float | type(None))
    text = repr(value) if plain else f"of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."
