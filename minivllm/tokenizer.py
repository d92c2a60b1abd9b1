"""Text to token ids and back: byte-level BPE, special tokens, chat, decoding of a stream.

Does not handle training, nor tokenizers other than byte-level BPE (see `text.hf_tokenizer`).
Notebook 01.
Three forms of a text: "é " is the bytes C3 A9 20, written "Ã©Ġ" in the vocabularies' alphabet.
"""

from __future__ import annotations

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

CACHE_WORDS = 65_536  # words remembered with their ids
CACHE_WORD_LENGTH = 128  # characters of the longest of them
LONG_WORD = 32  # bytes; from here on the library is faster than `encode_word`

Merges = Mapping[tuple[str, str], int]  # pair of tokens -> rank; the lowest is joined first


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in the files of GPT-2's format, `[256]`.

    A byte whose Latin-1 character is visible (33 to 126, 161 to 172, 174 to 255) is written as that
    character; the 68 others, in order, as the characters from 256 on. Byte 65 is "A", byte 0
    is "Ā" (256), byte 32, the space, is "Ġ" (288), byte 10, the line feed, is "Ċ" (266).

    Source: GPT-2, Radford et al. 2019, section 2.2, and its `bytes_to_unicode`.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    stand_in = {byte: chr(256 + number) for number, byte in enumerate(hidden)}
    return [stand_in.get(byte, chr(byte)) for byte in range(256)]


ALPHABET = byte_alphabet()
BYTE_OF = {character: byte for byte, character in enumerate(ALPHABET)}


def to_alphabet(text: str) -> str:
    """The UTF-8 bytes of `text`, one printable character each: "é " becomes "Ã©Ġ"."""
    return "".join([ALPHABET[byte] for byte in text.encode("utf-8")])


def from_alphabet(token: str) -> bytes:
    """The bytes of a token of the vocabulary: "Ã©Ġ" is C3 A9 20.

    A token with a character outside of the alphabet stands for its own text.
    """
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def best_pair(tokens: Sequence[str], merges: Merges) -> tuple[str, str] | None:
    """The pair of neighbours with the lowest rank in `merges`; None if no neighbours merge.

    With merges {("l", "o"): 0, ("lo", "w"): 1}: for l, o, w it is ("l", "o"), for lo, w it is
    ("lo", "w"), for w, o it is None.
    """
    # A pair that is not in the list gets a rank behind all others.
    last = len(merges)
    best = min(zip(tokens, tokens[1:]), key=lambda pair: merges.get(pair, last), default=None)
    return best if best in merges else None


def merge_pair(tokens: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """`tokens` with each occurrence of `pair` joined, from left to right.

    A token takes part in one join only: a, a, a with the pair ("a", "a") is aa, a.
    """
    merged: list[str] = []
    left = None  # a token that waits for its right neighbour
    for token in tokens:
        if left == pair[0] and token == pair[1]:
            merged[-1], left = left + token, None
        else:
            merged.append(token)
            left = token
    return merged


def encode_word(word: Iterable[str], merges: Merges) -> list[str]:
    """The tokens of one word: its characters, joined pair by pair until no pair is left.

    With merges {("l", "o"): 0, ("lo", "w"): 1, ("e", "r"): 2}: "lower" is low, er.

    Source: Sennrich et al. 2016, arXiv:1508.07909, section 3.2.
    """
    tokens = list(word)
    while (pair := best_pair(tokens, merges)) is not None:
        tokens = merge_pair(tokens, pair)
    return tokens


def token_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds each of `tokens` in a text, as one group; of several the longest.

    With "<a>" and "<a>b": it finds "<a>b" in "<a>bc", although "<a>" is there too.
    """
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def split_at_tokens(text: str, pattern: re.Pattern[str], ids: Mapping[str, int]) -> list[str | int]:
    """`text` cut at the added tokens in it; each of those is replaced by its id.

    With {"<|end|>": 2} and the `token_pattern` of it: "a<|end|>b" is ["a", 2, "b"]. Texts of no
    length are left out; without any added tokens the text stays whole.
    """
    if not ids:
        return [text] if text else []
    # The group of the pattern makes `split` keep what it splits at, at the odd places.
    parts = enumerate(pattern.split(text))
    return [ids[part] if place % 2 else part for place, part in parts if part]


class Tokenizer:
    """Byte-level BPE of one checkpoint: text to ids, ids to text, messages to ids.

    Nothing but the cache of words changes after it was made, and no answer depends on that.
    """

    def __init__(self, file: BytePairFile, template: ChatTemplate | None = None) -> None:
        self.file = file
        self.template = template
        self.special_ids = frozenset(token.id for token in file.added if token.special)
        ids = {token.content: token.id for token in file.added}
        plain = {token.content: token.id for token in file.added if not token.special}
        # What `split_at_tokens` takes, to find all of them or those that are not special.
        self.all_added = (token_pattern(ids), ids)
        self.plain_added = (token_pattern(plain), plain)
        self._bytes = {token_id: from_alphabet(token) for token, token_id in file.vocab.items()}
        self._bytes.update({token.id: token.content.encode("utf-8") for token in file.added})
        self._short_word_ids = lru_cache(CACHE_WORDS)(self._word_ids)
        self._control = ControlTokens(ids.keys() - plain.keys())

    @property
    def vocab_size(self) -> int:
        """The number of ids: the largest one plus 1. A model's own may be padded beyond it."""
        return max(self._bytes) + 1

    def encode(
        self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids of `text`.

        `parse_special`: a special token written in the text becomes its id; for prompts that a
        program wrote. Without it a user's "<|im_end|>" is text like any other. Added tokens
        that are not special, such as "<think>", become their ids either way.
        `add_special_tokens`: `self.file.prefix_ids` before everything, `suffix_ids` at the end.
        Raises ValueError for anything but text (`checked_text`).

        Where the ids are the bytes and "<e>" is the special token 256, "a<e>" gives [97, 256]
        with `parse_special`, else [97, 60, 101, 62].
        """
        checked_text(text)
        ids: list[int] = []
        added = self.all_added if parse_special else self.plain_added
        for piece in split_at_tokens(text, *added):
            ids += [piece] if isinstance(piece, int) else self.text_ids(piece)
        return [*self.file.prefix_ids, *ids, *self.file.suffix_ids] if add_special_tokens else ids

    def text_ids(self, text: str) -> list[int]:
        """The ids of the words of `text`, in which no added token is looked for."""
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
        # A vocabulary may lack bytes that its training text did not have.
        known = [byte if byte in vocab else unknown for byte in word]
        return encode_word([byte for byte in known if byte is not None], self.file.merges)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids: wrong UTF-8 becomes U+FFFD, an id without a token nothing."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        parts = [self._bytes.get(i, b"") for i in token_ids if i not in skipped]
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a character; none for an unknown id."""
        return self._bytes.get(token_id, b"")

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of the text that the model's chat template makes of `messages`.

        `[{"role": "user", "content": "Hi"}]` may be "<s>user: Hi</s><s>assistant: ", without
        its end if not `add_generation_prompt`; `chat_template_kwargs` are variables of the
        template. Special tokens that are written in a message stay text. Raises ValueError
        without a template and for messages that it does not take.
        """
        options = (messages, add_generation_prompt, chat_template_kwargs)
        pieces = required_template(self.template).render_pieces(*options, self._control)
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            ids += self.encode(piece, parse_special=place % 2 == 1, add_special_tokens=False)
        return ids

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A decoder for one stream of ids."""
        return Detokenizer(self, skip_special_tokens)


def character_size(byte: int) -> int:
    """The number of bytes of the UTF-8 character that starts with `byte`; 0 if none does.

    0x41 ("A") 1, 0xC3 2, 0xED 3, 0xF0 4; 0xA9 continues a character and 0xFF is in none: 0.
    """
    if byte < 0x80:
        return 1
    if not 0xC2 <= byte <= 0xF4:
        return 0
    return 2 + (byte >= 0xE0) + (byte >= 0xF0)


def unfinished_bytes(data: bytes) -> int:
    """How many bytes at the end of `data` begin a character that has more, 0 to 3.

    "é" is C3 A9: 1 for 41 C3, 0 for C3 A9, 0 for 41. The first three bytes of an emoji: 3.
    Nothing waits for bytes that begin no character: 0 for 41 A9, and for FF.
    """
    for size in range(1, min(3, len(data)) + 1):
        if needed := character_size(data[-size]):
            return size if size < needed else 0
    return 0


class Detokenizer:
    """Turns ids into text as they come, and shows no half of a character.

    Invariant: what `push` gave so far, and `finish` now, are together `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.held = b""  # bytes held back: the beginning of a character, 0 to 3

    def push(self, token_id: int) -> str:
        """The text that this token completes, which may be none.

        "é" in two tokens: the first gives "", the second "é"; a token with the bytes 41 C3 gives
        "A" at once. Bytes that no byte can complete become U+FFFD. Ids in `skipped_ids` give
        no text and leave `held` as it is.
        """
        if token_id in self.skipped_ids:
            return ""
        data = self.held + self.tokenizer.token_bytes(token_id)
        # Most tokens are ASCII, in which nothing can be unfinished: a quick answer for those.
        end = len(data) - (0 if data.isascii() else unfinished_bytes(data))
        self.held = data[end:]
        return data[:end].decode("utf-8", "replace")

    def finish(self) -> str:
        """The rest of the text: U+FFFD if the ids ended within a character, else nothing."""
        rest, self.held = self.held, b""
        return rest.decode("utf-8", "replace")

    def check(self) -> None:
        """Assert that what is held back could still become a character."""
        assert len(self.held) == unfinished_bytes(self.held), f"held back: {self.held!r}"


def load_tokenizer(path: str | Path) -> Tokenizer | HFTokenizer:
    """The tokenizer of the checkpoint directory `path`, with its chat template.

    Ours for byte-level BPE, else one with the same methods by the `tokenizers` library. Raises
    ValueError if there is no `tokenizer.json` or it cannot be read.
    """
    directory = Path(path)
    with damage_named(f"tokenizer.json or tokenizer_config.json in {directory}"):
        raw = read_tokenizer_json(directory)
        template = read_chat_template(directory)
        if not any(unsupported_parts(raw)):
            return Tokenizer(parse(raw), template)

        from minivllm.text.hf_tokenizer import HFTokenizer

        return HFTokenizer(raw, template, from_alphabet)
