"""Chat templates: rendering equal to transformers, where templates are found, and what they cannot do."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from tritonmoe.errors import InputError, TokenizerError
from tritonmoe.text import template_sandbox
from tritonmoe.text.chat_template import ChatTemplate
from tritonmoe.text.template_sandbox import MAX_SECONDS

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last_user < 0 and message.role == "user" and message.content is string %}
        {%- set ns.last_user = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" and loop.first %}{% continue %}{% endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = message.reasoning_content if message.reasoning_content is defined else '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.index0 > ns.last_user %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson(indent=2, sort_keys=true) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

HARMONY = """\
{%- macro render_type(spec) -%}
    {%- if spec.type == "array" -%}{{ render_type(spec['items']) }}[]
    {%- elif spec.enum is defined -%}{{ '"' + spec.enum|join('" | "') + '"' }}
    {%- else -%}{{ spec.type|default("any") }}{%- endif -%}
{%- endmacro -%}
<|start|>system<|message|>{{ model_identity|default("You are a helpful assistant.") }}
Current date: {{ strftime_now("%Y-%m-%d") }}

Reasoning: {{ reasoning_effort|default("medium") }}<|end|>
{%- if tools -%}
<|start|>developer<|message|>namespace functions {
{% for tool in tools %}
    {% set fn = tool.function %}
// {{ fn.description }}
type {{ fn.name }} = (_: {
    {% for name, spec in fn.parameters.properties.items() %}
  {{ name }}{{ "" if name in fn.parameters.required else "?" }}: {{ render_type(spec) }},
    {% endfor %}
}) => any;
{% endfor %}
}<|end|>
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.thinking is defined and loop.last -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
        {%- endif -%}
        {%- generation -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>
        {%- endgeneration -%}
    {%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

MISTRAL = """\
{{ bos_token }}
{%- for message in messages %}
    {% if message['role'] not in ['user', 'assistant'] %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {% elif (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the first message, roles must alternate\\nuser/assistant") }}
    {% endif %}
    {%- if message['role'] == 'user' %}
        {{- ' [INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {% generation %}{{- ' ' + message['content'] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""

PARTS = """\
{% set counter = namespace(images=0, names=dict(a=1)) %}
{% for message in messages %}
  {% for part in message.content if message.content is not string %}
    {% if part.type == 'image' %}
      {% set counter.images = counter.images + 1 %}
Picture {{ counter.images }}: <image>
    {% elif part.type == 'stop' %}
      {% break %}
    {% else %}
{{ part.text | trim }}
    {% endif %}
  {% endfor %}
{% endfor %}
{{ unknown_thing }}{{ documents is none }}{{ tools is none }}{{ counter.names | tojson }}
{{ messages | tojson(separators=(',', ':')) }}
{{ {"é": "<&>"} | tojson }} {{ 'é' | tojson(ensure_ascii=true) }}
{% for i in range(3) %}{{ loop.cycle('x', 'y') }}{% endfor %}{{ dict.fromkeys('ab', 1) }}
"""

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <Ort>",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "units": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["place"],
        },
    },
}
USER = {"role": "user", "content": "Wie ist das Wetter in Zürich?"}
ANSWER = {"role": "assistant", "content": "Sonnig.\n"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "weather", "arguments": {"place": "Zürich", "a": 1}}}],
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, ANSWER, USER],
    "thinking": [USER, {"role": "assistant", "content": "4", "reasoning_content": "2+2"}],
    "old_thinking": [USER, {"role": "assistant", "content": "4", "thinking": "2+2"}],
    "inline_thinking": [USER, {"role": "assistant", "content": "<think>\n2+2\n</think>\n\n4"}],
    "tools": [USER, CALL, {"role": "tool", "content": "sun"}, {"role": "tool", "content": "17"}, ANSWER],
}
VARIABLES: list[dict[str, Any]] = [{}, {"tools": [TOOL]}, {"enable_thinking": False}, {"reasoning_effort": "low"}]
PART_MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": " look "}, {"type": "image"}, {"type": "image"}]},
    {"role": "user", "content": [{"type": "stop"}, {"type": "text", "text": "never"}]},
]


@pytest.fixture(scope="module")
def reference() -> Callable[..., str]:
    """Rendering by transformers."""
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, []))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)

    def render(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
        return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **variables)

    return render


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    messages = [USER] if messages is None else messages
    return ChatTemplate({"default": source}, SPECIAL_TOKENS).render(messages, **variables)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("variables", VARIABLES, ids=str)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("source", [CHATML, HARMONY], ids=["chatml", "harmony"])
def test_renders_like_transformers(
    reference: Callable[..., str],
    source: str,
    conversation: str,
    variables: dict[str, Any],
    add_generation_prompt: bool,
) -> None:
    messages = CONVERSATIONS[conversation]
    variables = variables | {"add_generation_prompt": add_generation_prompt}
    assert render(source, messages, **variables) == reference(source, messages, **variables)


@pytest.mark.parametrize(("source", "messages"), [(MISTRAL, CONVERSATIONS["turns"]), (PARTS, PART_MESSAGES)])
def test_renders_like_transformers_in_other_styles(
    reference: Callable[..., str], source: str, messages: list[dict[str, Any]]
) -> None:
    assert render(source, messages) == reference(source, messages, add_generation_prompt=True)


def test_rendering_leaves_the_messages_alone() -> None:
    messages = [{"role": "user", "content": "hi", "name": None}]
    assert render("{{ messages[0] | tojson }}", messages) == '{"role": "user", "content": "hi"}'
    assert messages == [{"role": "user", "content": "hi", "name": None}]


# Where templates are found


def save(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def text_from(folder: Path, **variables: Any) -> str:
    return ChatTemplate.from_folder(folder, {}).render([USER], **variables)


def test_order_of_files(tmp_path: Path) -> None:
    save(tmp_path, "chat_template.json", {"chat_template": "legacy"})
    assert text_from(tmp_path) == "legacy"
    save(tmp_path, "tokenizer_config.json", {"chat_template": "config"})
    assert text_from(tmp_path) == "config"
    save(tmp_path, "chat_template.jinja", "file")
    assert text_from(tmp_path) == "file"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    save(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert text_from(tmp_path) == "plain"
    assert text_from(tmp_path, tools=[TOOL]) == "tools"
    save(tmp_path, "chat_template.jinja", "file")
    assert text_from(tmp_path, tools=[TOOL]) == "file"
    save(tmp_path, "additional_chat_templates/tool_use.jinja", "extra")
    assert text_from(tmp_path) == "file"
    assert text_from(tmp_path, tools=[TOOL]) == "extra"
    assert ChatTemplate.from_folder(tmp_path, {}).names == ("default", "tool_use")


def test_templates_from_a_folder_like_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, []))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)
    tokenizer.chat_template = {"default": CHATML, "tool_use": HARMONY}
    tokenizer.save_pretrained(tmp_path)
    ours = ChatTemplate.from_folder(tmp_path, SPECIAL_TOKENS)
    for tools in (None, [TOOL]):
        theirs = tokenizer.apply_chat_template([USER], tools=tools, tokenize=False)
        assert ours.render([USER], add_generation_prompt=False, tools=tools) == theirs


def test_model_without_template(tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(tmp_path, {})
    assert template.names == ()
    with pytest.raises(InputError, match="no chat template; give it a plain prompt"):
        template.render([USER])


def test_no_default_template(tmp_path: Path) -> None:
    save(tmp_path, "tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "x"}]})
    with pytest.raises(TokenizerError, match="rag"):
        text_from(tmp_path)


@pytest.mark.parametrize("value", [1, [], [{"name": "default"}], [{"name": "default", "template": 1}], ["a"]])
def test_malformed_template_entry(tmp_path: Path, value: Any) -> None:
    save(tmp_path, "tokenizer_config.json", {"chat_template": value})
    with pytest.raises(TokenizerError, match="chat_template must be"):
        ChatTemplate.from_folder(tmp_path, {})


def test_template_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match="UTF-8"):
        ChatTemplate.from_folder(tmp_path, {})


# What goes wrong, in one line


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (MISTRAL, InputError, "refuses these messages: After the first message, roles must alternate user"),
        ("{{ messages[0].missing.deeper }}", InputError, "has no attribute 'missing'"),
        ("{{ 1 + 'a' }}", InputError, "unsupported operand"),
        ("{{ 1 // 0 }}", InputError, "zero"),
        ("{% include 'other' %}", InputError, "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", InputError, "recursion"),
        ("{{ range(1000000) }}", InputError, "Range too big"),
        ("{% for %}", TokenizerError, "broken at line 1"),
        ("\n{% nothing %}", TokenizerError, "broken at line 2"),
        ("{% break %}", TokenizerError, "cannot be compiled"),
    ],
)
def test_errors_are_one_line(source: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"^[^\n]*{message}[^\n]*$"):
        render(source, [USER, USER])


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__.__mro__",
        "''.format.__globals__['os']",
        "raise_exception.__globals__['json']",
        "messages.append(1)",
        "messages[0].update({'a': 1})",
        "dict.update(messages[0], {'a': 1})",
        "namespace(__class__=1)",
        "'x'.encode()",
        "(1).to_bytes(10 ** 10)",
        "namespace({'_a': 1})",
    ],
)
def test_sandbox_forbids(expression: str) -> None:
    with pytest.raises((InputError, TokenizerError), match=r"unsafe|forbidden|not safe|no attribute"):
        render("{{ " + expression + " }}")


def test_sandbox_forbids_to_change_the_inside_of_a_namespace() -> None:
    with pytest.raises(TokenizerError, match="__init__"):
        render("{% set ns = namespace() %}{% set ns.__init__ = 1 %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% set r = range(100000) %}{% for a in r %}{% for b in r if b < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{% for a in range(100000) %}{{ caller() }}{% endfor %}{% endmacro %}"
        "{% call f() %}{% for a in range(100000) %}{% endfor %}{% endcall %}",
        "{% for a in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 9 }}{% endfor %}",
        "{% set _budget = 1e99 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_endless_template_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.05)
    with pytest.raises(TokenizerError, match="runs for more than"):
        render(source, _budget=1e99)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'x' * 10 ** 10 }}", "more than"),
        ("{{ 10 ** 10 * [0] }}", "more than"),
        ("{{ 10 ** (10 ** 10) }}", "power"),
        ("{% set a = 9 ** 99 %}" + "{% set a = a * a %}" * 40, "thousand digits"),
        ("{% set s = 'x' * 999 %}" + "{% set s = s ~ s %}" * 40, "makes a value of more than"),
        ("{% set s = 'x' * 999 %}" + "{% set s = s + s %}" * 40, "makes a value of more than"),
        ("{% set s = 'ab' %}" + "{% set s = s.replace('a', s) %}" * 40, "more than"),
        ("{% set s = 'ab' %}" + "{% set s = s|replace('a', s) %}" * 40, "more than"),
        ("{% set s = 'ab' * 9999 %}{{ s.join(s|list|reverse) }}", "steps at once"),
        ("{% set l = ['x'] %}" + "{% set l = [l, l] %}" * 64 + "{{ l == l }}", "items"),
        ("{% set l = {'a': 1} %}" + "{% set l = {'a': l, 'b': l} %}" * 64, "items"),
        ("{% set n = namespace() %}{% set n.a = n %}{{ n }}", "items"),
        ("{{ 'x'.ljust(10 ** 10) }}", "more than"),
        ("{{ 'x'|center(10 ** 10) }}", "more than"),
        ("{{ 1|round(-(10 ** 9)) }}", "more than"),
        ("{{ messages|tojson(indent=10 ** 10) }}", "more than"),
        ("{{ '%10000000000d' % 1 }}", "width"),
        ("{{ '%*d' % (10 ** 10, 1) }}", "more than"),
        ("{{ '{:>{}}'.format(1, 10 ** 10) }}", "more than"),
        ("{{ ('f' * 100000)|int(base=16) // 3 }}", "thousand digits"),
        ("{% set x %}{% for i in range(99) %}{{ 'x' * 999999 }}{% endfor %}{% endset %}", "writes more than"),
        ("{% macro f() %}{% for i in range(99) %}{{ 'x' * 999999 }}{% endfor %}{% endmacro %}{{ f() }}", "writes more"),
        (
            "{% set n = namespace(s='x' * 9999999) %}{% for i in range(999) %}{% set t = n.s + 'y' %}{% endfor %}",
            "altogether",
        ),
        ("{{ range(99999)|map('replace', '1', 'x' * 99999)|join }}", "more than"),
    ],
)
def test_what_multiplies_is_stopped(source: str, message: str) -> None:
    """Each would take gigabytes or minutes in native code, where no clock is looked at."""
    began = time.monotonic()
    with pytest.raises(TokenizerError, match=rf"^the chat template [^\n]*{message}"):
        render(source)
    assert time.monotonic() - began < MAX_SECONDS


def test_limits_are_far_from_long_conversations() -> None:
    """A thousand messages of a kilobyte, put together piece by piece."""
    source = (
        "{% set n = namespace(text='', first=0) %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% set parts = m.content.split('</think>') %}{% set c = parts[-1].lstrip() ~ '|' ~ parts|length %}"
        "{% else %}{% set c = m.content|trim|replace('a', 'bb') %}{% endif %}"
        "{% set n.text = n.text + '<' ~ m.role ~ '>' ~ c ~ [loop.index, m.role]|join('-') %}"
        "{% set n.first = (n.first + 1700000000 * loop.index) % 10000019 %}{% endfor %}{{ n.text }}{{ n.first }}"
    )
    turns = [{"role": "user", "content": "a " * 500}, {"role": "assistant", "content": "so</think>" + "b" * 1000}]
    assert len(render(source, turns * 500)) > 1_200_000


def test_endless_output_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CHARACTERS", 1000)
    assert len(render("{% for a in range(100) %}{{ 'x' * 10 }}{% endfor %}")) == 1000
    with pytest.raises(TokenizerError, match="writes more than 1000 characters"):
        render("{% for a in range(101) %}{{ 'x' * 10 }}{% endfor %}")


@pytest.mark.parametrize("messages", [[], (), "hello", {"role": "user"}, ["hello"], [None], None])
def test_malformed_messages(messages: Any) -> None:
    with pytest.raises(InputError, match="messages must be a list"):
        ChatTemplate({"default": "x"}, {}).render(messages)


def test_values_that_are_not_json() -> None:
    with pytest.raises(InputError, match="messages must consist of JSON values; bytes"):
        render("x", [{"role": "user", "content": b"raw"}])
    with pytest.raises(InputError, match="flavour must consist of JSON values; object"):
        render("{{ flavour }}", flavour=object())


def test_variable_without_effect_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert render("{{ depth }}", depth=1) == "1"
        assert not caplog.records
        render("{{ depth }}", enable_thinking=True)
    assert "does not read enable_thinking" in caplog.text
