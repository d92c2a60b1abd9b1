"""What lesson 01 brings to its experiments: tokenizers of trained merges, and records of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from minivllm.text.chat_template import ChatTemplate
from minivllm.text.tokenizer_json import parse
from minivllm.tokenizer import ALPHABET, Merges, Tokenizer, best_pair, merge_pair, to_alphabet

CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}"""


def tokenizer_json(
    merges: Iterable[tuple[str, str]], special: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a tokenizer.json with these merges, in the order of their ranks, and special tokens.

    Ids 0 to 255 are the bytes, and each merge adds one id. Special tokens come last.
    """
    tokens = dict.fromkeys([*ALPHABET, *("".join(pair) for pair in merges)])
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": len(vocab) + number, "content": text, "special": True, **flags}
        for number, text in enumerate(special)
    ]
    split = {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}
    split["trim_offsets"] = True  # the tokenizers library requires it
    model = {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in merges]}
    return {"model": model, "pre_tokenizer": split, "added_tokens": added}


def chat_tokenizer(merges: Iterable[tuple[str, str]]) -> Tokenizer:
    """Return a tokenizer with these merges and ChatML, the chat format of SmolLM2 and Qwen."""
    file = tokenizer_json(merges, ["<|im_start|>", "<|im_end|>"])
    return Tokenizer(parse(file), ChatTemplate(CHATML))


def joins_of(word: str, merges: Merges) -> tuple[list[list[str]], list[int]]:
    """Return the tokens of a word before and after each join, and the ranks of the joins."""
    rows = [list(to_alphabet(word))]
    ranks = []
    while (found := best_pair(rows[-1], merges)) is not None:
        rows.append(merge_pair(rows[-1], found))
        ranks.append(merges[found])
    return rows, ranks


def push_all(
    tokenizer: Tokenizer, ids: Iterable[int]
) -> tuple[list[bytes], list[str], list[bytes]]:
    """Return each token's bytes, the text that `push` returned, and the bytes held after it."""
    detokenizer = tokenizer.detokenizer()
    data, pieces, held = [], [], []
    for token_id in ids:
        data.append(tokenizer.token_bytes(token_id))
        pieces.append(detokenizer.push(token_id))
        held.append(detokenizer.held)
    return data, pieces, held
