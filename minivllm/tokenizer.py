"""Text to token ids and back: byte-level BPE, special tokens, chats, streams.

Does not train tokenizers and handles byte-level BPE only (see `text.hf_tokenizer` for others).
A text has three forms here: "é " is the bytes C3 A9 20, which a vocabulary writes as "Ã©Ġ".
Notebook 01.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.text.chat_template import (
    ChatTemplate,
    ControlTokens,
    Message,
    read_chat_template,
    required_template,
)
from minivllm.text.tokenizer_json import (
    BytePairFile,
    checked_text,
    damage_named,
    parse,
    read_tokenizer_json,
    unsupported_parts,
)
from minivllm.text.tokenizer_json import read_eos_token_ids as read_eos_token_ids

if TYPE_CHECKING:
    from minivllm.text.hf_tokenizer import HFTokenizer

CACHE_WORDS = 65_536  # words whose ids are cached
CACHE_WORD_LENGTH = 128  # characters; longer words aren't cached
LONG_WORD = 32  # bytes; for longer words the library is faster than `encode_word`

Merges = Mapping[tuple[str, str], int]  # pair of tokens -> rank; the lowest is joined first


def byte_alphabet() -> list[str]:
    """Return the printable character that represents each byte in GPT-2's file format, `[256]`.

    A byte whose Latin-1 character is visible (33 to 126, 161 to 172, 174 to 255) is written as that
    character. The other 68 become, in order, the characters from 256 on: byte 65 is "A", byte 0
    is "Ā" (256), byte 32 (space) is "Ġ" (288), byte 10 (line feed) is "Ċ" (266).

    Source: GPT-2, Radford et al. 2019, section 2.2, and its `bytes_to_unicode`.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    stand_in = {byte: chr(256 + number) for number, byte in enumerate(hidden)}
    return [stand_in.get(byte, chr(byte)) for byte in range(256)]


ALPHABET = byte_alphabet()
BYTE_OF = {character: byte for byte, character in enumerate(ALPHABET)}


def to_alphabet(text: str) -> str:
    """Return the UTF-8 bytes of `text`, each as one printable character: "é " -> "Ã©Ġ"."""
    return "".join([ALPHABET[byte] for byte in text.encode("utf-8")])


def from_alphabet(token: str) -> bytes:
    """Return the bytes of a vocabulary's token: "Ã©Ġ" -> C3 A9 20.

    A token with a character outside the alphabet represents its own text.
    """
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def best_pair(tokens: Sequence[str], merges: Merges) -> tuple[str, str] | None:
    """Return the pair of adjacent tokens with the lowest rank; None if no adjacent pair merges.

    `merges` maps a pair to its rank. A pair that isn't in it never merges.

    Example: with {("l", "o"): 0, ("lo", "w"): 1}, the best pair of l, o, w is ("l", "o"), that
    of lo, w is ("lo", "w"), and w, o has None.
    """
    pairs = zip(tokens, tokens[1:])
    best = min(pairs, key=lambda pair: merges.get(pair, math.inf), default=None)
    return best if best in merges else None


def merge_pair(tokens: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """Return a new list in which each occurrence of `pair`, from left to right, is one token.

    A token takes part in at most one join. `tokens` isn't changed.

    Example: a, a, a with the pair ("a", "a") becomes aa, a.
    """
    merged: list[str] = []
    left = None  # the token before this one, unless it was joined
    for token in tokens:
        if left == pair[0] and token == pair[1]:
            merged[-1] = left + token
            left = None
        else:
            merged.append(token)
            left = token
    return merged


def encode_word(word: Iterable[str], merges: Merges) -> list[str]:
    """Return the tokens of a word: its characters, joined pair by pair until no pair merges.

    Each round joins the pair with the lowest rank. `word` may also be a list whose entries are
    tokens of several characters.

    Example: with {("l", "o"): 0, ("lo", "w"): 1, ("e", "r"): 2}, "lower" becomes low, er.

    Source: Sennrich et al. 2016, arXiv:1508.07909, section 3.2.
    """
    tokens = list(word)
    while (pair := best_pair(tokens, merges)) is not None:
        tokens = merge_pair(tokens, pair)
    return tokens


def token_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of `tokens` in a text, as one group; the longest wins.

    Example: with "<a>" and "<a>b", it finds "<a>b" in "<a>bc", although "<a>" is there too.
    """
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def split_at_tokens(text: str, pattern: re.Pattern[str], ids: Mapping[str, int]) -> list[str | int]:
    """Split `text` at the added tokens it contains, and replace each of them with its id.

    `pattern` is the `token_pattern` of the keys of `ids`. The result has no empty texts.

    Example: with {"<|end|>": 2}, "a<|end|>b" becomes ["a", 2, "b"].
    """
    if not ids:
        return [text] if text else []
    # The group in the pattern makes `split` keep what it splits at, at the odd places.
    parts = enumerate(pattern.split(text))
    return [ids[part] if place % 2 else part for place, part in parts if part]


class Tokenizer:
    """Byte-level BPE of one checkpoint: text to ids, ids to text, messages to ids.

    Immutable apart from its cache of words, which no result depends on.
    """

    def __init__(self, file: BytePairFile, template: ChatTemplate | None = None) -> None:
        self.file = file
        self.template = template
        self.special_ids = frozenset(token.id for token in file.added if token.special)
        ids = {token.content: token.id for token in file.added}
        plain = {token.content: token.id for token in file.added if not token.special}
        # Arguments of `split_at_tokens`: to find all added tokens, or only those not special.
        self.all_added = (token_pattern(ids), ids)
        self.plain_added = (token_pattern(plain), plain)
        self._bytes = {token_id: from_alphabet(token) for token, token_id in file.vocab.items()}
        self._bytes.update({token.id: token.content.encode("utf-8") for token in file.added})
        self._short_word_ids = lru_cache(CACHE_WORDS)(self._word_ids)
        self._control = ControlTokens(ids.keys() - plain.keys())

    @property
    def vocab_size(self) -> int:
        """The largest id plus 1. A model's vocabulary may be padded beyond it."""
        return max(self._bytes) + 1

    def encode(
        self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids of `text`.

        `parse_special`: special tokens written in the text become their ids. Set it only for
        prompts that a program wrote. Otherwise a user's "<|im_end|>" is ordinary text. Added
        tokens that aren't special, such as "<think>", become their ids in both cases.
        `add_special_tokens`: put `self.file.prefix_ids` before the whole text and
        `self.file.suffix_ids` after it, whatever the text contains.
        Raises ValueError for anything but text (see `checked_text`).

        Example: if ids are bytes and "<e>" is the special token 256, "a<e>" becomes [97, 256]
        with `parse_special`, and [97, 60, 101, 62] without.
        """
        checked_text(text)
        ids: list[int] = []
        added = self.all_added if parse_special else self.plain_added
        for piece in split_at_tokens(text, *added):
            ids += [piece] if isinstance(piece, int) else self.text_ids(piece)
        return [*self.file.prefix_ids, *ids, *self.file.suffix_ids] if add_special_tokens else ids

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of `text`, in which added tokens are ordinary text."""
        ids: list[int] = []
        for word in self.file.split(self.file.normalize(text)):
            is_short = len(word) <= CACHE_WORD_LENGTH
            ids += self._short_word_ids(word) if is_short else self._word_ids(word)
        return ids

    def _word_ids(self, word: str) -> list[int]:
        return [self.file.vocab[token] for token in self._word_tokens(to_alphabet(word))]

    def _word_tokens(self, word: str) -> list[str]:
        vocab, unknown = self.file.vocab, self.file.unknown
        if self.file.ignore_merges and word in vocab and vocab[word] not in self.special_ids:
            return [word]
        if len(word) >= LONG_WORD:
            return self.file.long_word_tokens(word)
        # A vocabulary may lack bytes that its training text didn't contain.
        known = [byte if byte in vocab else unknown for byte in word]
        return encode_word([byte for byte in known if byte is not None], self.file.merges)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the ids. Invalid UTF-8 becomes U+FFFD; unknown ids are dropped."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        parts = [self._bytes.get(i, b"") for i in token_ids if i not in skipped]
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, maybe part of a character; b"" for an unknown id."""
        return self._bytes.get(token_id, b"")

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of `messages` in the format of the model's chat template.

        `[{"role": "user", "content": "Hi"}]` may become "<s>user: Hi</s><s>assistant: ".
        `add_generation_prompt` adds the last part, the start of the answer.
        `chat_template_kwargs` are variables of the template. A special token written in a
        message stays text. Raises ValueError if there's no template or it rejects the messages.
        """
        options = (messages, add_generation_prompt, chat_template_kwargs)
        pieces = required_template(self.template).render_pieces(*options, self._control)
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            ids += self.encode(piece, parse_special=place % 2 == 1, add_special_tokens=False)
        return ids

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a decoder for one stream of ids."""
        return Detokenizer(self, skip_special_tokens)


def character_size(byte: int) -> int:
    """Return the number of bytes of a UTF-8 character that starts with `byte`, 0 if none does.

    Examples: 1 for 41 ("A"), 2 for C3, 3 for ED, 4 for F0; 0 for A9, which only continues a
    character, and for FF, which occurs in none.
    """
    if byte < 0x80:
        return 1
    if not 0xC2 <= byte <= 0xF4:
        return 0
    return 2 + (byte >= 0xE0) + (byte >= 0xF0)


def unfinished_bytes(data: bytes) -> int:
    """Return how many bytes at the end of `data` are an incomplete character, 0 to 3.

    An incomplete character is its first byte and, up to the end of `data`, only bytes that
    continue it, but fewer than it needs (`character_size`).

    Examples: "é" is C3 A9, so 41 C3 has 1 and C3 A9 has 0. The first three bytes of an emoji
    have 3. C3 41 has 0, because 41 doesn't continue C3. 41 A9 and FF have 0 as well: no
    character starts with A9 or FF.
    """
    for size in range(1, min(3, len(data)) + 1):
        byte = data[-size]
        if not 0x80 <= byte <= 0xBF:  # it doesn't continue a character
            return size if size < character_size(byte) else 0
    return 0


class Detokenizer:
    """Turns ids into text as they arrive, one whole character at a time.

    Invariant: the texts from `push` so far plus that from `finish` are `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.held = b""  # bytes held back, 0 to 3: the start of a character

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; "" if it completes none.

        An incomplete character at the end is kept in `self.held` for the next call. Bytes that
        can't become a character are U+FFFD. An id in `self.skipped_ids` returns "" and leaves
        `self.held` unchanged. `self.tokenizer.token_bytes` has a token's bytes.

        Example: for "é" in two tokens, the first call returns "" and the second "é". A token
        with the bytes 41 C3 returns "A" at once, and C3 is held.
        """
        if token_id in self.skipped_ids:
            return ""
        data = self.held + self.tokenizer.token_bytes(token_id)
        # Most tokens are ASCII, where no character can be incomplete: skip the search there.
        end = len(data) - (0 if data.isascii() else unfinished_bytes(data))
        self.held = data[end:]
        return data[:end].decode("utf-8", "replace")

    def finish(self) -> str:
        """Return the rest of the text: U+FFFD if the ids end inside a character, else ""."""
        rest, self.held = self.held, b""
        return rest.decode("utf-8", "replace")

    def check(self) -> None:
        """Assert that the bytes held back can still become a character."""
        assert len(self.held) == unfinished_bytes(self.held), f"held back: {self.held!r}"


def load_tokenizer(path: str | Path) -> Tokenizer | HFTokenizer:
    """Return the tokenizer of the checkpoint directory `path`, with its chat template.

    This is a `Tokenizer` for byte-level BPE, and otherwise an `HFTokenizer`, which has the same
    methods. Raises ValueError if `tokenizer.json` is missing or can't be read.
    """
    directory = Path(path)
    with damage_named(f"tokenizer.json or tokenizer_config.json in {directory}"):
        raw = read_tokenizer_json(directory)
        template = read_chat_template(directory)
        if not any(unsupported_parts(raw)):
            return Tokenizer(parse(raw), template)

        from minivllm.text.hf_tokenizer import HFTokenizer

        return HFTokenizer(raw, template, from_alphabet)
