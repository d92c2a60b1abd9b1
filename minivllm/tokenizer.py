"""Text to token ids and back: byte-level BPE, special tokens, chat, decoding of a stream.

Leaves out training a vocabulary, and every kind of tokenizer that is not byte-level BPE
(`load_tokenizer` hands those to the `tokenizers` library). Notebook 01.

Three forms of a text meet here. The text "é " is the bytes C3 A9 20, and those are, in the
printable alphabet in which vocabularies are written, the characters "Ã©Ġ".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.chat_template import (
    ChatTemplate,
    Message,
    new_marker,
    read_chat_template,
    render_chat,
    token_breaker,
    token_starts,
)
from minivllm.tokenizer_json import (
    BytePairFile,
    parse,
    read_eos_token_ids,
    read_tokenizer_json,
)

if TYPE_CHECKING:
    from minivllm.hf_tokenizer import HFTokenizer

__all__ = [
    "Detokenizer",
    "Tokenizer",
    "best_pair",
    "byte_alphabet",
    "character_size",
    "encode_long_word",
    "encode_word",
    "load_tokenizer",
    "merge_pair",
    "read_eos_token_ids",
    "split_at_tokens",
    "to_alphabet",
    "unfinished_bytes",
]

# Words remembered with their ids, and the longest word that is worth it.
CACHE_WORDS = 65_536
CACHE_WORD_LENGTH = 128
# From this many bytes on, the search for the best pair is not repeated over the whole word.
LONG_WORD = 96

# --- bytes and the alphabet ---


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in the files of GPT-2's format, `[256]`.

    A byte whose Latin-1 character is visible (33–126, 161–172, 174–255) is written as that
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

    A token with a character outside of the alphabet is no result of merges; it was written into
    the vocabulary as it stands, and its bytes are those of its text.
    """
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


# --- byte pair encoding of one word ---


def best_pair(
    tokens: Sequence[str], merges: Mapping[tuple[str, str], int]
) -> tuple[str, str] | None:
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
    position = 0
    while position < len(tokens):
        found = tuple(tokens[position : position + 2]) == pair
        merged.append(pair[0] + pair[1] if found else tokens[position])
        position += 2 if found else 1
    return merged


def encode_word(word: Iterable[str], merges: Mapping[tuple[str, str], int]) -> list[str]:
    """The tokens of one word: its characters, joined pair by pair until no pair is left.

    With merges {("l", "o"): 0, ("lo", "w"): 1, ("e", "r"): 2}: "lower" is low, er.

    Source: Sennrich et al. 2016, arXiv:1508.07909, section 3.2.
    """
    tokens = list(word)
    while (pair := best_pair(tokens, merges)) is not None:
        tokens = merge_pair(tokens, pair)
    return tokens


def encode_long_word(word: Iterable[str], merges: Mapping[tuple[str, str], int]) -> list[str]:
    """The tokens of `encode_word`, for words of many thousand bytes.

    `encode_word` looks at the whole word again for each kind of pair, O(n) each time. Here the
    pairs wait in a heap, by rank and position, and a join adds its two new pairs: O(n log n).
    """
    tokens = list(word)
    before, after = list(range(-1, len(tokens) - 1)), list(range(1, len(tokens) + 1))
    waiting: list[tuple[int, int, tuple[str, str]]] = []

    def add(left: int, right: int) -> None:
        if left >= 0 and right < len(tokens):
            pair = tokens[left], tokens[right]
            if pair in merges:
                heapq.heappush(waiting, (merges[pair], left, pair))

    for left in range(len(tokens) - 1):
        add(left, left + 1)
    while waiting:
        _, left, pair = heapq.heappop(waiting)
        right = after[left]
        # One of the two may have been joined to another neighbour in the meantime.
        if right == len(tokens) or (tokens[left], tokens[right]) != pair:
            continue
        tokens[left], tokens[right] = pair[0] + pair[1], ""
        after[left] = after[right]
        if after[left] < len(tokens):
            before[after[left]] = left
        add(before[left], left)
        add(left, after[left])
    return [token for token in tokens if token]


# --- special tokens ---


def split_at_tokens(text: str, ids: Mapping[str, int]) -> list[str | int]:
    """`text` cut at the added tokens in it; each of those is replaced by its id.

    With {"<|end|>": 2}: "a<|end|>b" is ["a", 2, "b"]; texts of no length are left out. Where one
    added token begins like another, the longest counts.
    """
    if not ids:
        return [text] if text else []
    longest_first = sorted(ids, key=len, reverse=True)
    # The parentheses make `split` keep what it splits at, at the odd places.
    parts = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    pieces = [ids[part] if place % 2 else part for place, part in enumerate(parts)]
    return [piece for piece in pieces if piece != ""]
