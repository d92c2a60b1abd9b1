"""The text of an answer as its tokens come: whole characters, and nothing of a stop string.

Does not handle decoding (see `tokenizer`). Not built in the course.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.request import SamplingParams


def num_held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string.

    "so\\nUs" with the stop string "\\nUser:": 3. A whole stop string counts as none.
    """
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        tail = text[-size:]
        if any(stop.startswith(tail) for stop in stops):
            return size
    return 0


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string begins in `text`, and which it is; None if there is none.

    Of two that begin at the same place, the shorter: it was complete first.
    """
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    place, _, stop = min(found)
    return place, stop


class TextStream:
    """The text of one answer as it grows, up to its first stop string.

    Invariant: `text` never contains a stop string (unless it was asked for), and before the end
    no tail that may still become one; it only ever grows.
    """

    def __init__(self, detokenizer: Any, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._stops = params.stop
        self._min_tokens = params.min_tokens
        self._shows_stop = params.include_stop_str_in_output
        self._held = ""  # text that may still become a stop string
        self.text = ""
        self.num_tokens = 0  # taken in; those after a stop string are not
        self.stop: str | None = None  # the stop string that ended the text

    def push(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens; those after a stop string are ignored."""
        for token_id in token_ids:
            if self.stop is not None:
                return
            self.num_tokens += 1
            self._add(self._detokenizer.push(token_id))

    def skip(self) -> None:
        """Take in a token that shows no text: the one that ended the answer."""
        if self.stop is None:
            self.num_tokens += 1

    def finish(self) -> None:
        """No more tokens come: show what was held back."""
        if self.stop is None:
            self._add(self._detokenizer.finish())
        self.text, self._held = self.text + self._held, ""

    def _add(self, piece: str) -> None:
        self._held += piece
        if not self._stops or self.num_tokens <= self._min_tokens:
            self.text, self._held = self.text + self._held, ""
            return
        found = find_stop(self._held, self._stops)
        if found is not None:
            place, self.stop = found
            end = place + len(self.stop) if self._shows_stop else place
            self.text, self._held = self.text + self._held[:end], ""
            return
        shown = len(self._held) - num_held_back(self._held, self._stops)
        self.text, self._held = self.text + self._held[:shown], self._held[shown:]
