"""The methods of our `Tokenizer` for every other kind, by the `tokenizers` library.

Serves what is not byte-level BPE, such as the vocabularies of Llama 2 and Mistral 7B (words
start with "▁", bytes without a token are written <0x0A>), and byte-level BPE with options that
ours does not have. Not built in the course.
"""

from __future__ import annotations

import codecs
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from minivllm.text.chat_template import ChatTemplate, ControlTokens, Message, required_template
from minivllm.text.tokenizer_json import checked_text, merge_pairs, read_library

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
WORD = "a"  # an ordinary token to put before others, so that they are not the first of a text
CACHED_PIECES = 65_536


class HFTokenizer:
    """A tokenizer of any kind that `tokenizer.json` can describe; see `tokenizer.Tokenizer`."""

    def __init__(
        self,
        raw: Mapping[str, Any],
        template: ChatTemplate | None,
        from_alphabet: Callable[[str], bytes],
    ) -> None:
        """`from_alphabet` gives the bytes of a token of a byte-level vocabulary."""
        self.template = template
        self._library = read_library(raw)
        self.id_to_token: Callable[[int], str | None] = self._library.id_to_token
        added = self._library.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        special = [token.content for token in added.values() if token.special]
        # The same vocabulary, in which special tokens have names that no text can contain.
        self._names = {token: f"<{secrets.token_hex(8)}>" for token in special}
        self._literal = read_library(rename_tokens(raw, self._names))
        self._control = ControlTokens(special)
        self._added = {token.content for token in added.values()}
        self._from_alphabet = from_alphabet
        # Found by trying, as a decoder may be a sequence of any steps.
        self._is_byte_level = self._join(["Ã", "©"]) == "é"
        self._has_byte_tokens = self._join(["<0xC3>", "<0xA9>"]) == "é"
        self.bytes_after = lru_cache(CACHED_PIECES)(self._bytes_after)

    @property
    def vocab_size(self) -> int:
        """The number of ids: the largest id plus 1. The model's own vocabulary may be larger."""
        return int(max(self._library.get_vocab(with_added_tokens=True).values())) + 1

    def encode(
        self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids of `text`; keywords and errors are those of `Tokenizer.encode`."""
        checked_text(text)
        library = self._library if parse_special else self._literal
        return list(library.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; an id without a token adds no text."""
        detokenizer = self.detokenizer(skip_special_tokens)
        pieces = [detokenizer.push(token_id) for token_id in token_ids]
        return "".join(pieces) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token within a text, such as b" the"; none for an unknown id."""
        token = self.id_to_token(token_id)
        return b"" if token is None else self.bytes_after(WORD, token)

    def _bytes_after(self, before: str | None, token: str) -> bytes:
        """The bytes that `token` adds to a text that ends in the token `before` (None: empty).

        Llama 2: "▁the" adds b"the" to an empty text, b" the" to another; <0xC3> adds b"\\xc3".
        """
        if self._is_byte_level and token in self._added:
            return token.encode("utf-8")
        tokens = [] if before is None else [WORD, before]
        if before is not None and "\ufffd" in self._join([before]):
            tokens = [WORD]  # a part of a character: bytes have a meaning only together
        text = self._join([*tokens, token])[len(self._join(tokens)) :]
        if "\ufffd" in text and self._is_byte_level:
            return self._from_alphabet(token)
        if "\ufffd" in text and self._has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return text.encode("utf-8")

    def _join(self, tokens: list[str]) -> str:
        decoder = self._library.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a chat; see `Tokenizer.apply_chat_template`."""
        options = (messages, add_generation_prompt, chat_template_kwargs)
        pieces = required_template(self.template).render_pieces(*options, self._control)
        pieces[1::2] = [self._names[token] for token in pieces[1::2]]
        return self.encode("".join(pieces), add_special_tokens=False)

    def detokenizer(self, skip_special_tokens: bool = True) -> HFDetokenizer:
        """A decoder for one stream of ids."""
        return HFDetokenizer(self, skip_special_tokens)


def rename_tokens(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a `tokenizer.json` in which each token of `names` is spelled by its new name.

    The ids stay the same, and no merges lead to these tokens any more.
    """
    model = dict(raw["model"])
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    else:
        model["vocab"] = {names.get(token, token): i for token, i in vocab.items()}
    if "merges" in model:
        pairs = merge_pairs(model["merges"])
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [
        token | {"content": names[token["content"]], "normalized": False}
        if token["content"] in names
        else token
        for token in raw.get("added_tokens") or ()
    ]
    return {**raw, "model": model, "added_tokens": added}


class HFDetokenizer:
    """Turns ids into text as they arrive, and holds back incomplete characters.

    The text of a token may depend on the token before it: the first word of a text has no space
    in front.
    """

    def __init__(self, tokenizer: HFTokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._before: str | None = None  # the last token that was not skipped
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; it may be empty."""
        token = None if token_id in self._skipped_ids else self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        data = self._tokenizer.bytes_after(self._before, token)
        self._before = token
        return self._characters.decode(data)

    def finish(self) -> str:
        """Return the rest of the text: U+FFFD if the ids ended within a character, else ""."""
        return self._characters.decode(b"", final=True)
