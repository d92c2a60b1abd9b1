"""Text as tokens come: whole characters, stop strings cut away, nothing shown too early."""

import random

import pytest

from minivllm.output.text_stream import TextStream, find_stop, num_held_back
from minivllm.request import SamplingParams


class Letters:
    """A detokenizer whose tokens are strings, so that a test can write what it means."""

    def push(self, token):
        return token

    def finish(self):
        return ""


def make_stream(stop=(), **settings):
    """A stream over `Letters`."""
    return TextStream(Letters(), SamplingParams(stop=stop, **settings))


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("so\nUs", ["\nUser:"], 3),
        ("so\nUser", ["\nUser:"], 5),
        ("so", ["\nUser:"], 0),
        ("aab", ["ab", "abc"], 2),  # "b" begins nothing, "ab" begins "abc"
        ("aaa", ["aab"], 2),
        ("", ["x"], 0),
        ("anything", [], 0),
        ("ends with x", ["x"], 0),  # one character is whole or absent
    ],
)
def test_what_may_become_a_stop_string_is_held_back(text, stops, expected):
    """The longest end of the text that begins a stop string, and is not a whole one."""
    assert num_held_back(text, stops) == expected


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["three", "two"], (4, "two")),
        ("one two", ["four"], None),
        ("abc", ["abc", "ab"], (0, "ab")),
        ("aXbX", ["X"], (1, "X")),
    ],
)
def test_the_first_stop_string_counts(text, stops, expected):
    """The first in the text, not the first in the list; of two at one place the shorter."""
    assert find_stop(text, stops) == expected


def test_a_stop_string_may_span_tokens():
    """None of its parts is ever shown."""
    stream = make_stream("\nUser:")
    shown = []
    for token in ("Well", ".\n", "Us", "er", ": and so on"):
        stream.push([token])
        shown.append(stream.text)
    assert shown == ["Well", "Well.", "Well.", "Well.", "Well."]
    assert stream.stop == "\nUser:"
    assert stream.num_tokens == 5


def test_text_that_turned_out_to_be_no_stop_string_is_shown_at_once():
    """Only the part that still may become one waits."""
    stream = make_stream("abc")
    stream.push(["xab"])
    assert stream.text == "x"
    stream.push(["a"])
    assert stream.text == "xab"  # "aba": the new "a" may begin one
    stream.finish()
    assert stream.text == "xaba"
    assert stream.stop is None


def test_tokens_after_a_stop_string_are_not_taken_in():
    """Also where they come in the same call."""
    stream = make_stream(("!",))
    stream.push(["a", "b!c", "d"])
    stream.push(["e"])
    stream.finish()
    assert (stream.text, stream.num_tokens) == ("ab", 2)


def test_the_stop_string_is_shown_where_it_was_asked_for():
    """Up to its end, and no further."""
    stream = make_stream(("!",), include_stop_str_in_output=True)
    stream.push(["a", "b!c"])
    stream.finish()
    assert stream.text == "ab!"


def test_stop_strings_do_not_count_before_min_tokens():
    """The first `min_tokens` tokens are shown whatever they are."""
    stream = make_stream(("!",), min_tokens=2)
    stream.push(["a!", "b!"])
    assert (stream.text, stream.stop) == ("a!b!", None)
    stream.push(["c!"])
    assert (stream.text, stream.stop) == ("a!b!c", "!")


def test_a_character_that_was_never_finished_is_shown_at_the_end():
    """The detokenizer's rest is part of the text."""

    class Unfinished(Letters):
        def finish(self):
            return "\N{REPLACEMENT CHARACTER}"

    stream = TextStream(Unfinished(), SamplingParams(stop="ab"))
    stream.push(["xa"])
    stream.finish()
    assert stream.text == "xa\N{REPLACEMENT CHARACTER}"


def test_streams_equal_the_plain_cut_on_random_texts():
    """However the text is cut into tokens: it only grows, and ends before the first stop."""
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(0, 12)))
        stops = tuple(
            "".join(rng.choice("ab") for _ in range(rng.randint(1, 4)))
            for _ in range(rng.randint(1, 3))
        )
        places = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 5)))
        tokens = [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]
        stream = make_stream(stops)
        before = ""
        for token in tokens:
            stream.push([token])
            assert stream.text.startswith(before)
            assert not any(stop in stream.text for stop in stops)
            before = stream.text
        stream.finish()
        # A stop string ends the text where the last of its characters has come; several that
        # came with one token: at the first place.
        ends = [text.find(s) for s in stops if s in text]
        assert (stream.stop is not None) == bool(ends)
        if not ends:
            assert stream.text == text
        if len(tokens) == 1 and ends:
            assert stream.text == text[: min(ends)]
