"""Chat templates: messages become one text, in Jinja's immutable sandbox.

A template comes with a checkpoint and is not trusted: it sees copies in plain JSON types. Does
not handle token ids (see `tokenizer` and `text.hf_tokenizer`). Not built in the course.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from minivllm.text.tokenizer_json import read_if_present, special_token_names

Message = Mapping[str, Any]
PRIVATE_USE = range(0xE000, 0xF900)  # characters without a meaning in Unicode
EXAMPLE = 'a message is {"role": "user", "content": "text"}'


class ControlTokens:
    """The control tokens of a vocabulary, to be told apart from text that looks like them."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        none = "(?!)"  # a pattern that never matches
        self._tokens = re.compile(f"({'|'.join(map(re.escape, longest_first)) or none})")
        starts = "|".join(map(_token_or_cut_token, longest_first)) or none
        self._starts = re.compile(f"(?={starts}).", re.DOTALL)

    def mark(self, value: Any, mark: str) -> Any:
        """A copy of a JSON value with `mark` after the first character of each control token.

        A token that the end of a string cuts off counts, because a template may join strings.
        With "<|end|>" and "#": "a <|end|>" becomes "a <#|end|>", "a <|en" "a <#|en".
        """
        if isinstance(value, str):
            return self._starts.sub(rf"\g<0>{mark}", value)
        if isinstance(value, dict):
            return {self.mark(key, mark): self.mark(item, mark) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item, mark) for item in value]
        return value

    def split(self, text: str) -> list[str]:
        """Cut `text` at its control tokens: these get the odd indices, the texts the even ones."""
        return self._tokens.split(text)


def _token_or_cut_token(token: str) -> str:
    # "abc" -> a(?:\\Z|b(?:\\Z|c)): after each character the text may end.
    *head, pattern = map(re.escape, token)
    for character in reversed(head):
        pattern = f"{character}(?:\\Z|{pattern})"
    return pattern


class ChatTemplate:
    """A Jinja template and the special tokens that it may name (`bos_token`, `eos_token`, …).

    `tool_source` is the template for conversations with `tools`, if it differs.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        self.source = source
        self.tokens = dict(tokens or {})
        self.tool_source = tool_source

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as one text, in the form that the model was trained on.

        `add_generation_prompt` appends the start of the answer; `variables` are the
        template's own, such as `{"enable_thinking": False}` or `{"tools": [...]}`. Raises
        ValueError for messages without role or content and for a conversation that the template
        refuses.
        """
        none = ControlTokens(())
        return "".join(self.render_pieces(messages, add_generation_prompt, variables, none))

    def render_pieces(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
        control: ControlTokens,
    ) -> list[str]:
        """Return the text of `render`, cut at the template's own control tokens (odd indices).

        A control token that the caller wrote, in a message or a variable, stays part of a text.
        """
        given = {"tools": None, "documents": None, **(variables or {})}
        given["messages"] = checked_messages(messages)
        try:
            seen = json.dumps([given, self.source, self.tool_source, self.tokens])
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"messages may hold only JSON types: {error}") from error
        # Neither the mark nor its escape in JSON is in anything that the template can write.
        escape = next((e for e in map(r"\u{:04x}".format, PRIVATE_USE) if e not in seen), None)
        if escape is None:
            raise ValueError("the messages hold every private-use character; remove one")
        mark: str = json.loads(f'"{escape}"')
        # The template gets copies: objects may have methods that write files.
        values = {**self.tokens, **control.mark(json.loads(seen)[0], mark)}
        template = compile_template((given["tools"] and self.tool_source) or self.source)
        try:
            rendered = template.render(values | {"add_generation_prompt": add_generation_prompt})
        except Exception as error:  # a template can raise anything
            words = str(error).replace(mark, "")
            raise ValueError(f"the model's chat template refused the messages: {words}") from None
        pieces = control.split(rendered)
        return [piece.replace(mark, "").replace(escape, "") for piece in pieces]


def read_chat_template(path: Path) -> ChatTemplate | None:
    """Return the template of the checkpoint directory `path`; None if it has none.

    `chat_template.jinja` takes precedence over `chat_template` in `tokenizer_config.json`, which
    is a text or a list of named ones: "default", and "tool_use" for conversations with tools.
    """
    file = path / "chat_template.jinja"
    config_file = path / "tokenizer_config.json"
    config = read_if_present(config_file)
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if source is None:
        return None
    named = {"default": source}
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
    if not isinstance(named.get("default"), str):
        raise ValueError(
            f"chat_template in {config_file} has {sorted(named)} but no text named 'default'; put"
            " the one to use into chat_template.jinja next to it"
        )
    return ChatTemplate(named["default"], special_token_names(config), named.get("tool_use"))


def required_template(template: ChatTemplate | None) -> ChatTemplate:
    """Return `template`; ValueError, with the remedy, if the checkpoint has none."""
    if template is None:
        raise ValueError(
            "the checkpoint has no chat template: pass a text to generate() in place of messages,"
            " or put the template of the instruct model into chat_template.jinja next to its"
            " tokenizer.json"
        )
    return template


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return copies of the messages, each content one text; ValueError for wrong ones."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages={reprlib.repr(messages)}: pass a list of messages; {EXAMPLE}")
    return [_checked_message(number, message) for number, message in enumerate(messages)]


def _checked_message(number: int, message: Message) -> dict[str, Any]:
    shown = f"{reprlib.repr(message)}; {EXAMPLE}"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no role: {shown}")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return {**message, "content": "".join(_text_of(number, part) for part in content)}
    # An assistant's message that calls tools may have no text.
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"message {number} has no content: {shown}")
    return dict(message)


def _text_of(number: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError(
        f"message {number} has a part of type {reprlib.repr(kind)}; only text parts are supported:"
        ' {"type": "text", "text": "words"}'
    )


@lru_cache(8)
def compile_template(source: str) -> Any:
    """Return a Jinja template in the sandbox, with the helpers that chat templates expect.

    Raises ValueError if `source` is not valid Jinja.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    # {% generation %} marks the assistant's words for training; here it is always true.
    source = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", source)
    source = re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", source)
    try:
        return environment.from_string(source)
    except Exception as error:  # a template nested too deeply is a RecursionError
        raise ValueError(f"the model's chat template is not valid Jinja: {error}") from error


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter would write < as \u003c, for web pages.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
