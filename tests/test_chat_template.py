"""Templates render as in transformers, see plain data only, and cannot be written into."""

import enum
import json

import pytest

from minivllm.text.chat_template import (
    ChatTemplate,
    new_marker,
    plain,
    read_chat_template,
    token_breaker,
    token_starts,
)

USER = [{"role": "user", "content": "Hi"}]
# What templates of the supported families do, in short: trim, loop controls, macros, namespaces,
# tojson of tools, slices, block tags on lines of their own, and the tags of training.
RICH = """
{%- macro shout(text) -%}{{ text | upper }}{%- endmacro -%}
{%- set ns = namespace(last=none) -%}
{{ bos_token }}
{% if tools %}
  {%- for tool in tools %}
{{ tool | tojson }}
    {{- '\\n' }}
  {%- endfor %}
{% endif %}
{% for message in messages %}
    {% if message.role == 'skip' %}
        {%- continue %}
    {% endif %}
    {% set ns.last = loop.index0 %}
{{ shout(message['role']) }}: {% generation %}{{ message.content | trim }}{% endgeneration %}
{{ eos_token }}
{% endfor %}
{{ messages[1:] | length }} {{ ns.last }} {{ unk_token }}
{% if add_generation_prompt %}>{% endif %}
{% if enable_thinking is defined and not enable_thinking %}!{% endif %}
"""


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False, "tools": [{"é": "<a&b>"}]}])
def test_rendering_is_that_of_transformers(generate, variables):
    """Whitespace around blocks, `tojson`, missing tokens: character for character."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [
        {"role": "user", "content": "  hello \n"},
        {"role": "skip", "content": "x"},
        {"role": "assistant", "content": "<ok> & 'so'"},
    ]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    oracle, _ = utils.render_jinja_template(
        [messages],
        chat_template=RICH,
        add_generation_prompt=generate,
        **{"tools": None, **variables, **tokens},
    )
    assert ChatTemplate(RICH, tokens).render(messages, generate, variables) == oracle[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_sandbox_holds(source):
    """A template reaches nothing but the text it makes."""
    with pytest.raises(ValueError, match="chat template refused"):
        ChatTemplate(source).render(USER)


def test_template_refuses_in_its_own_words():
    """`raise_exception` ends in an error with the template's message."""
    with pytest.raises(ValueError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(USER)
    with pytest.raises(ValueError, match="no valid Jinja"):
        ChatTemplate("{% if %}").render(USER)
    with pytest.raises(ValueError, match="refused"):
        ChatTemplate("{{ messages[0].content + 1 }}").render(USER)


def test_today_is_available():
    """Llama 3's template writes the date."""
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(USER).isdigit()


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one"),
        ("Hi", "pass a list"),
        ({"role": "user", "content": "Hi"}, "pass a list"),
        ([{"content": "Hi"}], "message 0 has no role"),
        (["Hi"], "message 0 has no role"),
        ([*USER, {"role": "user"}], "message 1 has no content"),
        ([{"role": "user", "content": None}], "message 0 has no content"),
        ([{"role": "user", "content": 5}], "message 0 has no content"),
        ([{"role": "user", "content": "x", "image": object()}], "only JSON types"),
    ],
)
def test_what_is_no_message_is_refused(messages, words):
    """The message says which one it is and what one looks like."""
    with pytest.raises(ValueError, match=words):
        ChatTemplate("{{ messages[0].content }}").render(messages)


def test_calls_of_tools_need_no_content():
    """A field that is None is as if it were not there."""
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    source = "{{ messages[0].content is defined }} {{ messages[0].tool_calls[0].name }}"
    assert ChatTemplate(source).render(calls) == "False f"


def test_template_gets_copies_of_plain_data():
    """A str that can do more than a str is a str inside of the sandbox."""

    class Role(str, enum.Enum):
        USER = "user"

    value = plain({"a": (Role.USER, 1, True, None, 0.5)})
    assert value == {"a": ["user", 1, True, None, 0.5]}
    assert type(value["a"][0]) is str
    assert value["a"][2] is True


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("a <|end|>", "a <#|end|>"),
        ("<|end|><|end|>", "<#|end|><#|end|>"),
        ("a <|en", "a <#|en"),
        ("a <", "a <#"),
        ("<|en|", "<|en|"),
        ("< |end|>", "< |end|>"),
        ("<tool>x</tool>", "<#tool>x</tool>"),
        ("ababc", "aba#bc"),
        ("plain", "plain"),
    ],
)
def test_marker_goes_into_what_looks_like_a_token(text, marked):
    """Whole tokens and those cut off by the end of the text; nothing else is touched."""
    mark = token_breaker(token_starts(["<|end|>", "<tool>", "abc"]), "#")
    assert mark(text) == marked
    assert mark(text).replace("#", "") == text


def test_without_tokens_nothing_is_marked():
    """A vocabulary may have no special tokens."""
    assert token_breaker(token_starts([]), "#")("<|end|>") == "<|end|>"


def test_markers_cannot_be_guessed():
    """Each is new, and of digits only, which no filter of a template changes."""
    markers = {new_marker() for _ in range(50)}
    assert len(markers) == 50
    assert all(len(marker) == 20 and marker.isdigit() for marker in markers)


def test_every_string_of_the_caller_is_marked():
    """Roles, names, parts and arguments of calls can carry a token as well."""
    message = {
        "role": "user<|end|>",
        "content": [{"type": "text", "text": "<|end|>"}],
        "tool_calls": [{"arguments": {"x": "<|end|>"}}],
    }
    source = "{{ messages | tojson }}{{ extra }}<|end|>"
    text, marker = ChatTemplate(source).render_guarded(
        [message], True, {"extra": "<|end|>"}, token_starts(["<|end|>"])
    )
    assert text.count(f"<{marker}|end|>") == 4
    assert text.count("<|end|>") == 1


def test_template_is_found_where_checkpoints_keep_it(tmp_path):
    """Its own file goes first, then the text or the "default" of the list in the configuration."""
    assert read_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text("{}")
    assert read_chat_template(tmp_path) is None
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    config.write_text(json.dumps({"chat_template": "{{ bos_token }}b{{ eos_token }}", **tokens}))
    assert read_chat_template(tmp_path).render(USER) == "<s>b</s>"
    named = [{"name": "tool_use", "template": "c"}, {"name": "default", "template": "d"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert read_chat_template(tmp_path).render(USER) == "d"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert read_chat_template(tmp_path).render(USER) == "Hi"


def test_list_of_templates_without_a_default_is_refused(tmp_path):
    """Nobody can know which one is meant."""
    named = [{"name": "tool_use", "template": "c"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(ValueError, match=r"\['tool_use'\] but no 'default'"):
        read_chat_template(tmp_path)
