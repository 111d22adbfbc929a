"""Constraints as grammars of llguidance, and the process that tries one out before the engine does.

A schema from a stranger may take minutes or gigabytes to compile, and a library can crash: a process can be killed for
it. This file is run by its path and imports nothing of octavo, so that the process starts quickly.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# without it the library forces tokens of its own choice where only one text is legal, and asks for a tokenizer
HEAD = '%llguidance {"no_forcing": true}\n'
MAX_MESSAGE = 400  # characters


def grammar_library() -> Any:
    """The spec of llguidance, without importing it; None if it is not installed."""
    return importlib.util.find_spec("llguidance")


class GrammarError(ValueError):
    """What is wrong with one grammar."""


class Vocabulary(NamedTuple):
    """What each token id stands for. `special` tokens are no text; `ends` are those that may end an output."""

    tokens: list[bytes]
    special: dict[str, int]
    ends: list[int]


class _Words:
    """A vocabulary as llguidance wants to be given one."""

    def __init__(self, vocabulary: Vocabulary):
        self.eos_token_id, self.bos_token_id = vocabulary.ends[0], None
        self.tokens, self.special_token_ids = vocabulary.tokens, sorted(vocabulary.special.values())

    def __call__(self, text: Any) -> list[int]:
        raise NotImplementedError("nothing is tokenized where nothing is forced")


def token_trie(vocabulary: Vocabulary) -> Any:
    """The vocabulary as the library keeps it (LLTokenizer)."""
    import llguidance

    words = llguidance.TokenizerWrapper(_Words(vocabulary))
    return llguidance.LLTokenizer(words, n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.ends))


def compiled(trie: Any, grammar: str) -> Any:
    """An LLMatcher at the start of the grammar. Raises GrammarError for one that is wrong or allows nothing."""
    import llguidance

    matcher = llguidance.LLMatcher(trie, grammar, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False))
    # also fills tables that the first step would otherwise wait for
    allows_any = not matcher.is_error() and any(matcher.compute_bitmask())
    if matcher.is_error():
        raise GrammarError(message_of(matcher))
    if not allows_any:
        raise GrammarError("it allows no output at all")
    return matcher


def message_of(matcher: Any) -> str:
    """What the library says went wrong, on one line, without the listing of the grammar."""
    if matcher.stop_reason() in ("NoExtension", "NoExtensionBias"):
        return "it allows no output at all"
    text = re.split(r"\n\s*\d+ \| |\n<state>", matcher.get_error())[0]
    return " ".join(text.split())[:MAX_MESSAGE]


def grammar_of(kind: str, text: str, special: Mapping[str, int]) -> str:
    """A constraint (StructuredOutputsParams.source) as a grammar of llguidance. Raises ValueError for a wrong one.

    `special` has the ids of special tokens by their text: a structural tag may be triggered by one.
    """
    import llguidance

    match kind:
        case "json":
            value = json.loads(text)
            return f"{HEAD}start: {_json(value['schema'], value)}"
        case "structural_tag":
            value = json.loads(text)
            return HEAD + _tags(value["tag"], value, special)
        case "choice":
            # as one regex: an alternation of rules may have 2,000 parts, a regex many more
            lark = llguidance.LLMatcher.grammar_from_regex("|".join(map(_literal, json.loads(text))))
        case "regex":
            lark = llguidance.LLMatcher.grammar_from_regex(text)
        case _:
            lark = llguidance.grammar_from("grammar", text)
    (body,) = json.loads(lark)["grammars"] if lark.startswith("{") else [{"lark_grammar": lark}]
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": f"{HEAD}start: @body"}, {**body, "name": "body"}]})


def _json(schema: Any, value: Mapping[str, Any]) -> str:
    """The rule of a JSON schema, with what the request says of whitespace and additional properties."""
    schema = {} if schema is True else schema
    if schema is False:
        raise GrammarError("the schema is false: it allows no output at all")
    if value["closed"]:
        _close(schema)
    if value["options"]:
        own = schema.get("x-guidance", {})
        schema = {**schema, "x-guidance": {**(own if isinstance(own, dict) else {}), **value["options"]}}
    return f"%json {json.dumps(schema)}"


def _close(schema: Any) -> None:
    """Lets no object take properties that it does not list, unless it says itself what it takes."""
    if isinstance(schema, list):
        for part in schema:
            _close(part)
    if isinstance(schema, dict):
        if "properties" in schema and not schema.keys() & {"additionalProperties", "patternProperties"}:
            schema["additionalProperties"] = False
        for name, part in schema.items():
            # these hold values, not schemas
            if name not in ("enum", "const", "default", "examples"):
                _close(part)


def _tags(tag: Mapping[str, Any], value: Mapping[str, Any], special: Mapping[str, int]) -> str:
    """Free text, in which what begins with a trigger must go on as one of the structures that begin so."""
    structures, rules = tag["structures"], []
    for i, one in enumerate(structures):
        trigger = next(t for t in tag["triggers"] if one["begin"].startswith(t))
        rest = " ".join(json.dumps(s) for s in (one["begin"][len(trigger) :],) if s)
        end = json.dumps(one["end"]) if one["end"] else ""
        body = f"{rest} {_json(one['schema'], value)} {end}"
        if trigger in special:
            rules.append(f"tag_{i}: TEXT <[{special[trigger]}]> {body}")
        else:
            rules += [f"trigger_{i}[lazy]: TEXT {json.dumps(trigger)}", f"tag_{i}: trigger_{i} {body}"]
    any_tag = " | ".join(f"tag_{i}" for i in range(len(structures)))
    return "\n".join([f"start: ({any_tag})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules])


def _literal(text: str) -> str:
    """A regex for exactly this text."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{{{ord(c):02x}}}" for c in text)


def main() -> None:
    """Reads a line of JSON with the set-up, then one for each constraint; answers each with a line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # whatever the library prints is no answer
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.readline())
    sys.path[:] = setup["path"]
    vocabulary = Vocabulary([bytes.fromhex(t) for t in setup["tokens"]], setup["special"], setup["ends"])
    trie = token_trie(vocabulary)
    _limit_memory(setup["memory"])
    # requests that run go first
    os.nice(10)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        # the engine kills a slow one sooner, unless it was killed itself
        signal.setitimer(signal.ITIMER_REAL, 2 * setup["seconds"] + 1)
        answer = _tried(trie, vocabulary, *json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers)


def _tried(trie: Any, vocabulary: Vocabulary, kind: str, text: str) -> dict[str, str]:
    try:
        grammar = grammar_of(kind, text, vocabulary.special)
        compiled(trie, grammar)
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except ValueError as error:
        return {"error": " ".join(str(error).split())[:MAX_MESSAGE]}
    return {"grammar": grammar}


def _limit_memory(size: int) -> None:
    """Lets the process have `size` bytes of address space beyond what it has, where the system can do that."""
    if not sys.platform.startswith("linux"):
        return
    import resource

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size, used + size))
    # nor does it leave a core behind
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def pack(vocabulary: Vocabulary, path: Sequence[str], memory: int, seconds: float) -> str:
    """The set-up line of `main`. `memory` (bytes) and `seconds` are what compiling one grammar may cost."""
    tokens, limits = [t.hex() for t in vocabulary.tokens], {"memory": memory, "seconds": seconds}
    return json.dumps(
        {"tokens": tokens, "special": vocabulary.special, "ends": vocabulary.ends, "path": list(path), **limits}
    )


if __name__ == "__main__":
    main()
