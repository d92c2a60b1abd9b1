"""Byte pair encoding of very long words, such as a megabyte of base64 or DNA without a space.

The same result as `tokenizer.encode_word`, which is quicker to understand. Given (no notebook
builds it).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

# From this many bytes on, searching the whole word for each pair takes three times as long.
LONG_WORD = 32


def encode_long_word(word: Iterable[str], merges: Mapping[tuple[str, str], int]) -> list[str]:
    """The tokens of `encode_word`, for words of many thousand bytes.

    `encode_word` looks at the whole word again for each kind of pair, O(n) each time. Here the
    pairs wait in a heap, by rank and position, and a join adds its two new pairs: O(n log n).
    """
    tokens = list(word)
    end = len(tokens)
    # The neighbours of each place; a place that was joined to the one on its left is empty.
    before, after = list(range(-1, end - 1)), list(range(1, end + 1))
    waiting = [
        (merges[pair], left, pair)
        for left, pair in enumerate(zip(tokens, tokens[1:]))
        if pair in merges
    ]
    heapq.heapify(waiting)
    while waiting:
        _, left, pair = heapq.heappop(waiting)
        right = after[left]
        # One of the two may have been joined to another neighbour in the meantime.
        if right == end or (tokens[left], tokens[right]) != pair:
            continue
        tokens[left], tokens[right] = pair[0] + pair[1], ""
        after[left] = after[right]
        if after[right] < end:
            before[after[right]] = left
        for first, second in ((before[left], left), (left, after[left])):
            if first >= 0 and second < end and (tokens[first], tokens[second]) in merges:
                new = tokens[first], tokens[second]
                heapq.heappush(waiting, (merges[new], first, new))
    return [token for token in tokens if token]
