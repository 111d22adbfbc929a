"""JSON schemas: valid ones, written by hand and generated, and hostile constraints of every kind."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

STRING = {"type": "string", "maxLength": 4}
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
HAND_WRITTEN: list[Schema] = [
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, "1", None, True, 2.5, [1, "a"], {"k": "v"}]},
    {"enum": ["é", "日本", "😀", "\n", '"', "\\", "/"]},
    {"const": "only"},
    {"const": {"a": [1, 2, {"b": None}]}},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["integer", "null"]},
    {"type": ["string", "boolean"], "maxLength": 3},
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "integer", "minimum": -17, "maximum": 1234},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -2.5, "maximum": 2.5},
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^[A-Z][a-z]{1,3}$"},
    {"type": "string", "pattern": "^(\\d{3}-)?\\d{4}$"},
    {"type": "string", "pattern": "^é+日?$", "maxLength": 6},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "items": False, "minItems": 2},
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "maxItems": 2},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"é": {"type": "boolean"}, "日本": STRING}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"in": {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]}},
        "required": ["in"],
    },
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^a": {"type": "boolean"}}, "additionalProperties": False},
    {"anyOf": [{"type": "integer"}, {"type": "boolean"}, {"type": "string", "maxLength": 2}]},
    {"anyOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, {"type": "null"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    {"$defs": {"s": STRING}, "type": "array", "items": {"$ref": "#/$defs/s"}, "maxItems": 2},
    {"definitions": {"s": {"enum": [7]}}, "type": "object", "properties": {"s": {"$ref": "#/definitions/s"}}},
    {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    {"title": "T", "description": "d", "default": 3, "examples": [1], "type": "integer", "minimum": 1, "maximum": 3},
]


def valid_schemas(count: int, seed: int = 0) -> list[Schema]:
    """HAND_WRITTEN, and generated ones up to `count`."""
    rng = random.Random(seed)
    return [*HAND_WRITTEN, *(_root(rng) for _ in range(count - len(HAND_WRITTEN)))][:count]


def _root(rng: random.Random) -> Schema:
    schema = _schema(rng, 3)
    if rng.random() < 0.3:
        return {"$defs": {"d0": _schema(rng, 1), "d1": _schema(rng, 1)}, "type": "array", "minItems": 1, "maxItems": 2,
                "items": {"anyOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}, schema]}}  # fmt: skip
    return schema


def _schema(rng: random.Random, depth: int) -> Schema:
    leaves = [_integer, _number, _string, _enum, _plain]
    return rng.choice(leaves if depth == 0 else [*leaves, _object, _object, _array, _any])(rng, depth - 1)


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _number(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-5, 5)
    return {"type": "number", rng.choice(["minimum", "exclusiveMinimum"]): low, "maximum": low + rng.randint(1, 9)}


def _string(rng: random.Random, depth: int) -> Schema:
    pattern = rng.choice(["^[a-c]{1,3}$", "^x?[0-9]{2}$", "^(ab|cd|é)$", "^[^a-z]{2}$"])
    least = rng.randint(0, 2)
    return rng.choice([{"type": "string", "pattern": pattern},
                       {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 3)}])  # fmt: skip


def _enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(["a", "ab", "日", "", 0, 1, -2.5, None, True, [1], {"a": "b"}], rng.randint(1, 5))}


def _plain(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null"])}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["a", "b", "name", "tags", "日本", "x y", 'q"', "é"], rng.randint(1, 4))
    schema: Schema = {"type": "object", "properties": {n: _schema(rng, max(depth, 0)) for n in names}}
    schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    return schema | {"additionalProperties": False}


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    most = least + rng.randint(0, 2)
    return {"type": "array", "items": _schema(rng, max(depth, 0)), "minItems": least, "maxItems": most}


def _any(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(rng, max(depth, 0)) for _ in range(rng.randint(1, 3))]}


def hostile(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` values of structured_outputs that are wrong, or cost much, each another."""
    rng, found = random.Random(seed), {}
    families = [_wrong_form, _deep, _refs, _wrong_schema, _costly_schema, _big_enum, _regex, _bad_regex, _grammar]
    while len(found) < count:
        for family in families:
            for form in family(rng):
                found.setdefault(repr(form), form)
    forms = list(found.values())
    rng.shuffle(forms)
    return forms[:count]


def _wrong_form(rng: random.Random) -> Iterator[dict[str, Any]]:
    n = rng.randint(0, 99)
    yield from ({"regex": n}, {"choice": []}, {"choice": [n]}, {"json": n}, {"json": [n]}, {"grammar": ""}, {})
    yield from ({"json": "{" * n}, {"json": f'{{"a": {n}'}, {"json_object": n}, {"regex": "a", "choice": [f"{n}"]})
    yield from ({f"unknown{n}": 1}, {"choice": f"a{n}"}, {"structural_tag": {"structures": [n], "triggers": ["a"]}})
    yield from ({"regex": f"\ud800{n}"}, {"json": {"a": float("nan"), "b": n}}, {"json": {"a": {n}}})


def _deep(rng: random.Random) -> Iterator[dict[str, Any]]:
    n = rng.choice([50, 90, 130, 500, 900, 5000, 50_000]) + rng.randint(0, 40)
    yield {"json": '{"items":' * n + "{}" + "}" * n}
    yield {"json": '{"anyOf":[' * n + "{}" + "]}" * n}
    yield {"json": '{"properties":{"a":' * n + "{}" + "}}" * n}
    yield {"regex": "(" * n + "a" + ")*" * n}
    yield {"grammar": "root ::= " + "(" * n + '"a"' + ")" * n}
    yield {"json": json.dumps({"const": n}) + "]" * n}


def _refs(rng: random.Random) -> Iterator[dict[str, Any]]:
    n = rng.randint(2, 300)
    chain = {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % n}"} for i in range(n)}
    yield {"json": {"$defs": chain, "$ref": "#/$defs/d0"}}
    loop = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{(i + 1) % n}"}, "minItems": 1} for i in range(n)}
    yield {"json": {"$defs": loop, "$ref": "#/$defs/d0"}}
    yield {"json": {"$ref": f"http://example.com/{n}.json"}}
    yield {"json": {"$ref": f"#/$defs/none{n}"}}
    yield {"json": {"properties": {f"p{n}": {"$ref": "#"}}, "required": [f"p{n}"], "type": "object"}}
    both = {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
    yield {"json": {"$defs": {"a": both, "b": {"const": n}}, "$ref": "#/$defs/a"}}


def _wrong_schema(rng: random.Random) -> Iterator[dict[str, Any]]:
    n = rng.randint(1, 99)
    for schema in ({"type": n}, {"type": f"t{n}"}, {"minimum": f"{n}", "type": "integer"}, {"enum": n}, {"enum": []},
                   {"properties": [n]}, {"required": n, "type": "object"}, {"pattern": n, "type": "string"},
                   {"not": {"const": n}}, {"if": {"const": n}, "then": {}}, {"uniqueItems": True, "minItems": n},
                   {"contains": {"const": n}}, {"dependentRequired": {f"a{n}": ["b"]}}, {"$dynamicRef": f"#{n}"},
                   {"oneOf": [{}, {"const": n}]}, {"type": "integer", "minimum": n, "maximum": n - 1},
                   {"type": "string", "minLength": n, "maxLength": n - 1}, {"items": n}, {"anyOf": []},
                   {"format": f"f{n}", "type": "string"}, {"x-guidance": n, "type": "string"}):  # fmt: skip
        yield {"json": schema}


def _costly_schema(rng: random.Random) -> Iterator[dict[str, Any]]:
    n = rng.randint(1, 10**6)
    # of these only the first takes for ever
    yield {"json": {"type": "integer", "multipleOf": 999_000 + 997 * rng.randint(0, 1)}}
    yield {"json": {"type": "string", "minLength": n, "maxLength": 2 * n}}
    yield {"json": {"type": "array", "items": {"type": "array", "minItems": n}, "minItems": n}}
    yield {"json": {"type": "number", "minimum": -(10.0**300), "maximum": float(n)}}
    yield {"json": {"type": "number", "multipleOf": n / 10**9}}
    yield {"json": {"type": "string", "pattern": f"(a+)+b[ab]*a[ab]{{{n % 4000}}}"}}
    wide = {f"p{i}": {"type": "string"} for i in range(n % 9000)}
    yield {"json": {"type": "object", "properties": wide, "required": list(wide)}}
    parts = [{"anyOf": [{"properties": {f"p{i}_{j}": {"const": n}}} for j in range(4)]} for i in range(n % 12)]
    yield {"json": {"type": "object", "allOf": parts}}
    yield {"json": {"oneOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(n % 300)]}}


def _big_enum(rng: random.Random) -> Iterator[dict[str, Any]]:
    n = rng.randint(100, 20_000)
    yield {"json": {"enum": [f"x{i}" * (i % 7) for i in range(n)]}}
    yield {"choice": [str(i) * 9 for i in range(n // 4)]}
    yield {"json": {"enum": ["y" * n * 10]}}
    yield {"choice": ["z" * n]}
    yield {"regex": "|".join(str(i) * 9 for i in range(n // 4))}


def _regex(rng: random.Random) -> Iterator[dict[str, Any]]:
    n, m = rng.randint(2, 5000), rng.randint(2, 30)
    yield from ({"regex": f"(a+)+b{{{m}}}"}, {"regex": f"a{{1,{n * 20}}}"}, {"regex": f"[ab]*a[ab]{{{n}}}"})
    yield from ({"regex": f"(((a{{1,{n}}}){{1,{m}}}){{1,{n}}})"}, {"regex": f"(.*a.*){{{m}}}"}, {"regex": f".{{{n}}}"})
    yield from ({"regex": f"((a|aa)+){{{m}}}$"}, {"regex": "".join(f"(x{i})?" for i in range(n))})
    yield from ({"regex": rf"\p{{L}}{{{n}}}\p{{Greek}}*"}, {"regex": f"(?i)straße{{{m}}}"}, {"regex": "\\x00" * m})


def _bad_regex(rng: random.Random) -> Iterator[dict[str, Any]]:
    n = rng.randint(1, 999)
    for text in (f"[{n}", f"(?={n})b", rf"({n})\1", f"a{{{n}", f"a{{{n},{n - 1}}}", f"(?P<x{n}", rf"\p{{Q{n}}}",
                 rf"\b{n}\b", f"(?<!{n})a", f"[z-a]{n}", f"){n}", rf"{n}[^\s\S]", f"\\{n}", "*"):  # fmt: skip
        yield {"regex": text}
    yield {"regex": "".join(rng.choice("()[]{}|*+?\\^$.ab1,-") for _ in range(rng.randint(3, 40)))}


def _grammar(rng: random.Random) -> Iterator[dict[str, Any]]:
    n = rng.randint(1, 5000)
    for text in (f"root ::= other{n}", f'root ::= "a{n}', f"start: start{n}", f'start: start "a{n}" | start', "root",
                 f'root ::= "\\q{n}"', f"start: /[{n}/", f'start: x{{{n * 99}}}\nx: "a" y{{99}}\ny: "b"',
                 f'start: start start | "a{n}" | ""', "start: " + " | ".join(f'"a{i}"' for i in range(n)),
                 "\n".join(f"r{i} ::= r{i + 1}" for i in range(n)) + f'\nroot ::= r0\nr{n} ::= "a"',
                 f"start: %json {{{n}", f"start: @g{n}", f"%llguidance {{{n}", f"root ::= [{n}", f"start: <[{n * 99}]>",
                 f"start: x[max_tokens={n}]\nx: /a+/", f"start: x[stop={n}]\nx: /a+/"):  # fmt: skip
        yield {"grammar": text}
    yield {"grammar": "".join(rng.choice('root ::= "ab"|()[]*+\n') for _ in range(rng.randint(5, 80)))}
