"""Chat templates against transformers' `apply_chat_template`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octavo.engine.chat_template import render
from octavo.engine.tokenizer import Tokenizer

# SmolLM2's, as its GGUF file has it
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.first and system else '') + message.content | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""
TOOLS = """{%- set ns = namespace(last=-1, self='x') %}
{% if tools %}
<|im_start|>system
# Tools
{% for tool in tools %}
{{ tool | tojson }}
    {{ tool.function | tojson(indent=2, sort_keys=true) }}
{% endfor %}
<|im_end|>
{% endif %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% if message.role == 'end' %}{% break %}{% endif %}
    {% set ns.last = loop.index0 %}
<|im_start|>{{ message.role }}
{% if message.tool_calls is defined %}
{% for call in message.tool_calls %}
<call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</call>
{% endfor %}
{% elif message.content is string %}
{{ message.content }}<|im_end|>
{% else %}
{% for part in message.content %}
{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}
{% endfor %}
<|im_end|>
{% endif %}
{% endfor %}
{{ ns.last }} {{ documents }} {{ dict(a=1).a }} {{ pad_token }}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
REASONING = """{% for message in messages %}<|{{ message.role }}|>
{%- if message.role == 'assistant' %}{% generation %}
{% set shout = 'inner' %}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}{{ message.thinking }}</think>{% endif %}
{{ message.content }}{{ shout }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{{ shout }}{{ eos_token }}
{% endfor %}{{ flavour }}{% if enable_thinking %}on{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
TEMPLATES = {"smollm2": SMOLLM2, "trimming": TRIMMING, "tools": TOOLS, "reasoning": REASONING}

PLAIN = [
    {"role": "user", "content": "  What is <b>2 & 2</b>? 'é' 你好  "},
    {"role": "assistant", "content": "It is\n\n 4 "},
]
CHATS = {
    "one": PLAIN[:1],
    "two": PLAIN,
    "three": [*PLAIN, {"role": "user", "content": "Sure?"}],
    "system": [{"role": "system", "content": " Be kind. "}, *PLAIN],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How's the <weather> in É?",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = [
    {"role": "user", "content": "How warm is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Åre", "n": [1, 2.5, None]}}}
        ],
    },
    {"role": "skip", "content": "not shown"},
    {"role": "tool", "content": "21"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "And "}, {"type": "image"}, {"type": "text", "text": "here?"}],
    },
    {"role": "end", "content": "not shown"},
]
THOUGHT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "reasoning": "hm"}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def _backend() -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    return made


def _pair(template: Any) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    theirs = PreTrainedTokenizerFast(tokenizer_object=_backend(), **SPECIAL)
    theirs.chat_template = template
    return Tokenizer(_backend(), SPECIAL, template), theirs


def _assert_equal(template: Any, messages: Any, **arguments: Any) -> str:
    ours, theirs = _pair(template)
    text = ours.apply_chat_template(messages, tokenize=False, **arguments)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **arguments)
    ids = ours.apply_chat_template(messages, **arguments)
    assert ids == theirs.apply_chat_template(messages, return_dict=False, **arguments)
    return text


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_text_and_ids_equal_transformers(template, chat, prompt):
    _assert_equal(template, chat, add_generation_prompt=prompt)


@pytest.mark.parametrize("tools", [None, [], [TOOL, TOOL]])
def test_tools_calls_and_parts_equal_transformers(tools):
    text = _assert_equal(TOOLS, CALLS, tools=tools, add_generation_prompt=True)
    assert ("# Tools" in text) == bool(tools)
    assert '"city": "Åre"' in text


def test_reasoning_and_variables_equal_transformers():
    text = _assert_equal(REASONING, THOUGHT, add_generation_prompt=True, enable_thinking=True, flavour="x<y")
    assert "<think>hmhm</think>" in text
    assert _assert_equal(REASONING, THOUGHT, add_generation_prompt=False, eos_token="!").count("!") == 2
    _assert_equal(TOOLS, CHATS["two"], add_generation_prompt=True, documents=[{"title": "a", "text": "b"}])


@pytest.mark.parametrize("content", ["It is 4", "It is ", "  It\n"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_continued_message_equals_transformers(template, content):
    chat = [*PLAIN[:1], {"role": "assistant", "content": content}]
    text = _assert_equal(template, chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith(("It is 4", "It is", "It is ", "It", "It\n"))
    # the caller's messages are as they were
    assert chat[-1]["content"] == content


def test_continued_message_of_parts_equals_transformers():
    parts = [{"type": "text", "text": "It "}, {"type": "text", "text": "is"}, {"type": "image"}]
    chat = [*PLAIN[:1], {"role": "assistant", "content": parts}]
    text = _assert_equal(TOOLS, chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("It is")


def test_continued_message_refuses_what_has_no_end():
    chat = CHATS["two"]
    with pytest.raises(ValueError, match="add_generation_prompt=False"):
        render(SMOLLM2, chat, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(ValueError, match="no content that the template shows"):
        render("{{ messages[0].role }}", chat, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ValueError, match="changes the final message"):
        render("{{ messages[-1].content[::-1] }}", chat, add_generation_prompt=False, continue_final_message=True)
    last = {"role": "user", "content": [{"type": "image"}]}
    with pytest.raises(ValueError, match="no text to continue"):
        render(TOOLS, [last], add_generation_prompt=False, continue_final_message=True)


def test_named_templates_are_chosen_as_in_transformers():
    named = {"default": SMOLLM2, "tool_use": TOOLS, "rag": TRIMMING}
    chat = CHATS["two"]
    default = _assert_equal(named, chat, add_generation_prompt=True)
    assert default == _assert_equal(SMOLLM2, chat, add_generation_prompt=True)
    with_tools = _assert_equal(named, chat, tools=[TOOL], add_generation_prompt=True)
    assert "# Tools" in with_tools
    assert "[INST]" in _assert_equal(named, chat, chat_template="rag", add_generation_prompt=True)
    assert _assert_equal(named, chat, chat_template="{{ messages | length }}", add_generation_prompt=True) == "2"
    with pytest.raises(ValueError, match=r"no default; pass one of \['rag'\]"):
        Tokenizer(_backend(), SPECIAL, {"rag": SMOLLM2}).apply_chat_template(chat)


def test_an_open_message_and_a_new_one_exclude_each_other():
    with pytest.raises(ValueError, match="add_generation_prompt=False"):
        _pair(SMOLLM2)[0].apply_chat_template(PLAIN, continue_final_message=True)


def test_no_template_is_said():
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(_backend()).apply_chat_template(PLAIN)
    assert Tokenizer(_backend()).apply_chat_template(PLAIN, chat_template="{{ bos_token }}x", tokenize=False) == "x"


def test_a_template_s_refusal_is_a_value_error_with_its_message():
    wrong = [PLAIN[1], PLAIN[0]]
    with pytest.raises(ValueError, match="chat template: Conversation roles must alternate user/assistant"):
        render(TRIMMING, wrong)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set n = namespace(__class__=1) %}", "__class__"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "_x"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_broken_and_unsafe_templates_are_value_errors(template, message):
    with pytest.raises(ValueError, match=message):
        render(template, PLAIN)


def test_malformed_chats_are_value_errors():
    with pytest.raises(ValueError, match="no messages"):
        render(SMOLLM2, [])
    with pytest.raises(ValueError, match="a chat message is a dict"):
        render(SMOLLM2, ["hi"])
    with pytest.raises(ValueError, match="a tool is a dict"):
        render(SMOLLM2, PLAIN, tools=["weather"])
    with pytest.raises(ValueError, match=r"chat template: .*content"):
        render(SMOLLM2, [{"role": "user"}])


@dataclass
class _Model:
    """Looks like a pydantic model."""

    content: str

    def model_dump(self) -> dict[str, str]:
        return {"role": "user", "content": self.content}


class _Text(str):
    def secret(self) -> str:
        return "secret"


def test_templates_see_plain_data_only():
    assert render("{{ messages[0].content }}", [_Model("hi")]) == "hi"
    with pytest.raises(ValueError, match="secret"):
        render("{{ messages[0].content.secret() }}", [{"role": "user", "content": _Text("hi")}])
    assert render("{{ x }}", PLAIN, variables={"x": b"data"}) == "<bytes>"
    assert render("{{ x[0] }}{{ x[1] }}", PLAIN, variables={"x": (True, 2.5)}) == "True2.5"


def test_the_date_is_today():
    before = datetime.now().strftime("%d %b %Y")
    text = render("{{ strftime_now('%d %b %Y') }}", PLAIN)
    assert text in (before, datetime.now().strftime("%d %b %Y"))
