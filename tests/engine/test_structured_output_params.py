"""What is wrong with a form as given, and how the right ones are normalised. Needs no grammar library."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.engine import SamplingParams, StructuredOutputsParams
from octavo.engine.config import engine_config
from octavo.engine.structured_output_config import STRUCTURED_OUTPUTS

LOOP: dict[str, Any] = {}
LOOP["items"] = LOOP
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}]}

WRONG = [
    ({}, "exactly one of json, regex.* not none"),
    ({"regex": "a", "choice": ["a"]}, "exactly one of.* not regex and choice"),
    ({"json_object": False}, "not none"),
    ({"json_object": 1}, "json_object 1 is not True or False"),
    ({"regexp": "a"}, "unknown structured output parameter 'regexp': did you mean regex"),
    ({"regex": 5}, "regex 5 is not a string"),
    ({"regex": "\ud800"}, "lone surrogate at position 0"),
    ({"grammar": ""}, "grammar is empty"),
    ({"choice": []}, "choice .* is not a list of at least one string"),
    ({"choice": "yes"}, "choice 'yes' is not a list"),
    ({"choice": ["a", 2]}, "choice 2 is not a string"),
    ({"json": "{"}, "json '{' is not JSON"),
    ({"json": "[1]"}, "is not a JSON schema"),
    ({"json": "[" * 100_000}, "nested too deeply"),
    ({"json": LOOP}, "cannot be written as JSON|nested too deeply"),
    ({"json": {"const": float("nan")}}, "cannot be written as JSON"),
    ({"json": {"const": {1}}}, "cannot be written as JSON"),
    ({"structural_tag": {"triggers": ["a"]}}, "is not like"),
    ({"structural_tag": TAG | {"triggers": ["x"]}}, "'<f>' begins with none of the triggers"),
    ({"structural_tag": TAG | {"format": 1}}, "unknown parts .'format'"),
    ({"structural_tag": TAG | {"structures": [{"begin": "<f"}]}}, "is not like"),
]


@pytest.mark.parametrize("form, message", WRONG, ids=[message[:30] for _, message in WRONG])
def test_a_wrong_form_is_refused_by_what_is_wrong(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        SamplingParams(structured_outputs=form)
    assert len(str(found.value)) < 600


def test_a_form_must_be_a_form_and_end() -> None:
    with pytest.raises(ValueError, match="neither a StructuredOutputsParams nor a dict"):
        SamplingParams(structured_outputs="a+")
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)


def test_schemas_come_as_dict_text_or_class() -> None:
    class Dog:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return {"type": "null"}

    as_dict, as_text, as_class = (
        SamplingParams(structured_outputs={"json": value}).structured_outputs
        for value in ({"type": "null"}, '{"type":  "null"}', Dog)
    )
    assert as_dict == as_text == as_class and hash(as_dict) == hash(as_text)
    assert as_dict.source() == as_text.source() != as_dict.source(compact=True)
    kind, text = as_dict.source()
    assert kind == "json" and json.loads(text)["schema"] == {"type": "null"}


@pytest.mark.parametrize(
    "form",
    [{"regex": "a"}, {"choice": ["b", "a", "b"]}, {"grammar": "root ::= [a]"}, {"json_object": True},
     {"structural_tag": TAG, "disable_any_whitespace": True}, {"json": True, "whitespace_pattern": " "}],
)  # fmt: skip
def test_a_form_is_made_again_from_its_dict(form: dict[str, Any]) -> None:
    one = StructuredOutputsParams(**form)
    assert StructuredOutputsParams.of(json.loads(json.dumps(one.as_dict()))) == one


def test_what_the_engine_can_be_told_of_forms() -> None:
    assert engine_config().structured_outputs_config == STRUCTURED_OUTPUTS
    config = engine_config(structured_outputs_config={"backend": "guidance", "compile_timeout": 3})
    assert config.structured_outputs_config == STRUCTURED_OUTPUTS | {"backend": "guidance", "compile_timeout": 3}
    for parts, kind, message in (
        ({"backend": "xgrammar"}, NotImplementedError, "'xgrammar' is not supported"),
        ({"backend": "foo"}, ValueError, "choose one of auto, guidance"),
        ({"enable_in_reasoning": True}, NotImplementedError, "enable_in_reasoning"),
        ({"compile_timeout": 0}, ValueError, "compile_timeout 0"),
        ({"compile_workers": 0}, ValueError, "compile_workers 0"),
        ({"disable_any_whitespaces": True}, ValueError, "did you mean disable_any_whitespace"),
    ):
        with pytest.raises(kind, match=message):
            engine_config(structured_outputs_config=parts)
