"""Chat templates: a list of messages becomes one text, in Jinja's immutable sandbox.

A template comes with a checkpoint, so it is somebody else's program: it sees plain strings,
numbers, lists and dicts, and nothing it does can reach further. Leaves out the tokens: the
tokenizers encode the text. Given (no notebook builds it).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from minivllm.text.tokenizer_json import read_json

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")

Message = Mapping[str, Any]


class ChatTemplate:
    """A Jinja template and the special tokens that it may name (`bos_token`, `eos_token`, …)."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.tokens = dict(tokens or {})
        self._compiled: Any = None

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        guard: Callable[[str], str] = str,
    ) -> str:
        """The conversation as the model saw conversations in training.

        `add_generation_prompt` opens the answer; `variables` are the template's own, such as
        `{"enable_thinking": False}` or `{"tools": [...]}`; `guard` is applied to every string
        that comes from the caller. Raises ValueError for messages without role or content and
        for a conversation that the template refuses.
        """
        self._compiled = self._compiled or compile_template(self.source)
        given = plain({"tools": None, "documents": None} | dict(variables or {}), guard)
        chat = [plain(message, guard) for message in checked_messages(messages)]
        names = {**self.tokens, **given, "add_generation_prompt": add_generation_prompt}
        try:
            return str(self._compiled.render({**names, "messages": chat}))
        except Exception as error:  # somebody else's program can raise anything
            raise ValueError(f"the model's chat template refused the messages: {error}") from error

    def render_guarded(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
        starts: re.Pattern[str] | None,
    ) -> tuple[str, str]:
        """The text of `render` and a marker, which stands in every special token that was written
        by the caller, after the character that the pattern `starts` found (see `token_starts`).

        Take the marker out once the template's own special tokens have been found.
        """
        marker = new_marker()
        guard = token_breaker(starts, marker)
        return self.render(messages, add_generation_prompt, variables, guard), marker


def read_chat_template(path: Path) -> ChatTemplate | None:
    """The template of the checkpoint directory `path`; None if it has none.

    `chat_template.jinja` goes before `chat_template` in `tokenizer_config.json`, which is a
    text or a list of named ones; of those "default" is taken.
    """
    file, config_file = path / "chat_template.jinja", path / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = _default_of({named["name"]: named["template"] for named in source}, config_file)
    return None if source is None else ChatTemplate(source, special_token_names(config))


def required_template(template: ChatTemplate | None) -> ChatTemplate:
    """`template`; ValueError, with the remedy, if the checkpoint has none."""
    if template is None:
        raise ValueError(
            "the checkpoint has no chat template: pass a text to generate() in place of messages,"
            " or put the template of the instruct model into chat_template.jinja beside its"
            " tokenizer.json"
        )
    return template


def _default_of(templates: Mapping[str, str], file: Path) -> str:
    if "default" not in templates:
        raise ValueError(
            f"chat_template in {file} has {sorted(templates)} but no 'default'; put the one to"
            " use into chat_template.jinja beside it"
        )
    return templates["default"]


def special_token_names(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … of a `tokenizer_config.json`, each as its text."""
    found = {name: config[name] for name in TOKEN_NAMES if config.get(name) is not None}
    return {name: tok["content"] if isinstance(tok, dict) else tok for name, tok in found.items()}


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of the messages without fields that are None; ValueError for what is no message."""
    if not messages or isinstance(messages, (str, Mapping)):
        raise ValueError(f"messages={messages!r}: pass a list with at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role: {message!r}; {_EXAMPLE}")
        content = message.get("content")
        # An assistant's message that calls tools may be without text.
        if not isinstance(content, (str, list)) and not message.get("tool_calls"):
            raise ValueError(f"message {number} has no content: {message!r}; {_EXAMPLE}")
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


_EXAMPLE = 'a message is {"role": "user", "content": "text"}'


def plain(value: Any, guard: Callable[[str], str] = str) -> Any:
    """`value` rebuilt from plain JSON types, with `guard` applied to each string.

    Whatever an object can do beyond that (a method that writes files) stays outside of the
    sandbox. Raises ValueError, naming the type, for anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return guard(str.__str__(value))
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, guard) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, guard) for item in value]
    raise ValueError(f"a message holds a {type(value).__name__}; it may hold only JSON types")


def token_starts(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for the first character of each of `tokens` in a text; None without tokens.

    It also finds a token that the end of the text cuts off, because a template may join two
    texts. With the token `<|end|>`: one match in "a <|end|>", one in "a <|en", none in "a |end|>".
    """
    found = "|".join(map(_token_or_cut_token, sorted(tokens)))
    return re.compile(f"(?={found}).", re.DOTALL) if found else None


def _token_or_cut_token(token: str) -> str:
    # "abc" -> a(?:\\Z|b(?:\\Z|c)): after each character the text may end.
    *head, pattern = map(re.escape, token)
    for character in reversed(head):
        pattern = f"{character}(?:\\Z|{pattern})"
    return pattern


def token_breaker(starts: re.Pattern[str] | None, marker: str) -> Callable[[str], str]:
    """A function that puts `marker` into each special token that somebody wrote into a text.

    With the marker "0": "a <|end|>" becomes "a <0|end|>", which is no special token any more.
    Taking the marker out again, once the special tokens of the template have been found,
    gives the very text that was written, so nothing else is encoded in another way.
    """
    return lambda text: text if starts is None else starts.sub(rf"\g<0>{marker}", text)


def new_marker() -> str:
    """20 random digits: nobody can write them in advance, and no filter changes their case."""
    return f"{secrets.randbits(64):020d}"


def compile_template(source: str) -> Any:
    """A Jinja template in the immutable sandbox, with the helpers that chat templates expect.
    Raises ValueError for what is no Jinja."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    try:
        return environment.from_string(_without_generation_tags(source))
    except jinja2.TemplateError as error:
        raise ValueError(f"the model's chat template is no valid Jinja: {error}") from error


def _without_generation_tags(source: str) -> str:
    # {% generation %} marks the assistant's words for training; for us it is always true.
    source = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", source)
    return re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", source)


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter would write < as \u003c, for web pages.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
