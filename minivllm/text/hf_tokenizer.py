"""The methods of our `Tokenizer` for every other kind, by the `tokenizers` library.

Serves what is not byte-level BPE, such as the vocabularies of Llama 2 and Mistral 7B (words
start with "▁", bytes without a token are written <0x0A>). Given (no notebook builds it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm.text.chat_template import (
    ChatTemplate,
    Message,
    new_marker,
    required_template,
    token_starts,
)

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class HFTokenizer:
    """A tokenizer of any kind that `tokenizer.json` can describe; see `tokenizer.Tokenizer`."""

    def __init__(self, file: Path, template: ChatTemplate | None = None, reason: str = "") -> None:
        self.template = template
        self._parsing = read_file(file, reason)
        added = self._parsing.get_added_tokens_decoder().items()
        special = {token_id: token for token_id, token in added if token.special}
        self.special_ids = frozenset(special)
        self._starts = token_starts(token.content for token in special.values())
        # A second one that leaves special tokens in a text alone, but knows each of them by a
        # random other name. A template's own special tokens are given that name.
        self._literal = read_file(file, reason)
        self._literal.encode_special_tokens = True
        self._names = {token.content: f"<{new_marker()}>" for token in special.values()}
        self._ids = _add_names(self._literal, special, self._names)
        longest_first = sorted(self._names, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @property
    def vocab_size(self) -> int:
        """The number of ids: the largest one plus 1. A model's own may be padded beyond it."""
        return int(max(self._parsing.get_vocab(with_added_tokens=True).values())) + 1

    def encode(
        self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids of `text`; keywords and errors are those of `Tokenizer.encode`."""
        tokenizer = self._parsing if parse_special else self._literal
        try:
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"text is not a str of characters: {error}") from error

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; an id without a token stands for no text."""
        ids = list(token_ids)
        return str(self._parsing.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a character; none for an unknown id."""
        token = self._parsing.id_to_token(token_id) or ""
        byte = BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode("utf-8")

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a single byte, which has a meaning only with its neighbours."""
        return BYTE_TOKEN.fullmatch(self._parsing.id_to_token(token_id) or "") is not None

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the model's chat template makes of `messages`, for reading."""
        template = required_template(self.template)
        return template.render(messages, add_generation_prompt, chat_template_kwargs)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of `render_chat`, in which only the template's own special tokens are special."""
        template = required_template(self.template)
        text, marker = template.render_guarded(
            messages, add_generation_prompt, chat_template_kwargs, self._starts
        )
        if marker not in text:
            return self.encode(text, parse_special=True, add_special_tokens=False)
        renamed = self._special.sub(lambda found: self._names[found[0]], text)
        ids = self.encode(renamed.replace(marker, ""), add_special_tokens=False)
        return [self._ids.get(i, i) for i in ids]

    def detokenizer(self, skip_special_tokens: bool = True) -> HFDetokenizer:
        """A decoder for one stream of ids."""
        return HFDetokenizer(self, skip_special_tokens)


def read_file(file: Path, reason: str) -> Any:
    """The library's tokenizer; ValueError if it cannot read the file either."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(
            f"{file} cannot be read: {error} (ours: {reason}). Download it again, or update the"
            " tokenizers package"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _add_names(
    tokenizer: Any, special: Mapping[int, Any], names: Mapping[str, str]
) -> dict[int, int]:
    # Each special token's other name, as a token that is not special: its id -> the real id.
    from tokenizers import AddedToken

    for token in special.values():
        like = {"lstrip": token.lstrip, "rstrip": token.rstrip, "normalized": False}
        tokenizer.add_tokens([AddedToken(names[token.content], special=False, **like)])
    return {tokenizer.token_to_id(names[token.content]): i for i, token in special.items()}


class HFDetokenizer:
    """Turns ids into text as they come; see `tokenizer.Detokenizer`.

    Decoding may depend on the token before (the first word of a text has no space in front),
    so each new text is the difference of two decoded windows: with the new tokens and without.
    """

    def __init__(self, tokenizer: HFTokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._shown: list[int] = []  # the tokens of the last text that was given out
        self._held: list[int] = []  # the tokens since

    def push(self, token_id: int) -> str:
        """The text that is certain by now, which may be none."""
        tokenizer = self._tokenizer
        # Skipped tokens and ids without a token have no text, and part no neighbours.
        is_skipped = self._skips_special and token_id in tokenizer.special_ids
        if is_skipped or not tokenizer.token_bytes(token_id):
            return ""
        self._held.append(token_id)
        # A run of bytes is decoded as a whole, and one wrong byte at its end spoils all of it.
        return "" if tokenizer.is_byte(token_id) else self._flush()

    def _flush(self) -> str:
        window = self._shown + self._held
        before = self._tokenizer.decode(self._shown, self._skips_special)
        new = self._tokenizer.decode(window, self._skips_special)[len(before) :]
        # A window without text would let the next word stand at the beginning of a text.
        self._shown, self._held = self._held if new else window, []
        return new

    def finish(self) -> str:
        """The rest of the text."""
        return self._flush()
