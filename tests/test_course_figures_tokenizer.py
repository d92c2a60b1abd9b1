"""The pictures of lesson 01 show their data, in the image and in the alt text."""

import pytest
from figure_checks import assert_fits_the_page_and_is_described

from course.figures import tokenizer as draw

pytestmark = pytest.mark.course


class Table:
    """The part of a tokenizer that pictures use: four tokens, of which the last is special."""

    special_ids = frozenset({3})

    def token_bytes(self, token_id):
        return [b"low ", b"\xc3\xa9", b"$", b"<e>"][token_id]


STEPS = [["l", "o", "w"], ["lo", "w"], ["low"]]
COUNTS = {"small": {"English": 10, "Korean": 30}, "large": {"English": 5, "Korean": 12}}
DATA = [b"a ", b"\xed\x95", b"\x9c$", b"\xc3"]
PIECES = ["a ", "", "한$", ""]

PICTURES = {
    "tokens": lambda: draw.tokens({"a": (Table(), [0, 1, 2, 3]), "b": (Table(), [0])}, "A text"),
    "joins": lambda: draw.joins(STEPS, [7, 1200]),
    "languages": lambda: draw.languages(COUNTS, {"English": 20, "Korean": 10}),
    "stream": lambda: draw.stream(DATA, PIECES, [b"", b"\xed\x95", b"", b"\xc3"]),
    "arrivals": lambda: draw.arrivals([0.25, 0.5], ["one", " two"], "a machine"),
    "speeds": lambda: draw.speeds({"slow": 2.0, "fast": 40.0}, "a machine"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_fits_the_page_and_is_described(name):
    """It is 700 pixels wide, has alt text in the notebook, and needs no missing font."""
    assert_fits_the_page_and_is_described(PICTURES[name])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "tokens",
            "Rows of 10 bytes, in frames of one token each. A text. a: 4 tokens (1 control); b: 1",
        ),
        ("joins", "3 bytes become 1 token in 2 joins. after 0: l o w; after 1: lo w; after 2: low"),
        ("languages", "small: English 10, Korean 30; large: English 5, Korean 12"),
        ("stream", "4 tokens; bytes are held back after 2 of them. Shown: 'a ', nothing, 'U+D55C"),
        ("arrivals", "a machine. First text after 0.25 s, all after 0.50 s: 2 pieces"),
    ],
)
def test_the_alt_text_has_the_numbers(name, words):
    """The alt text says what the image shows."""
    assert words in PICTURES[name]().alt


@pytest.mark.parametrize(
    ("byte", "name"), [(0x41, "A"), (0x20, "␣"), (0x0A, "↵"), (0x00, "00"), (0x7F, "7F")]
)
def test_every_byte_has_a_visible_name(byte, name):
    """ASCII as itself; invisible bytes as a sign or in hex."""
    assert draw.byte_name(byte) == name


def test_characters_that_the_font_lacks_are_written_as_code_points():
    """No empty boxes, and no warning."""
    assert draw.drawable("naïve") == "naïve"
    assert draw.drawable("é한") == "é U+D55C"


def test_pictures_are_the_same_each_time():
    """No date and no version, so executing a notebook again changes no image."""
    assert PICTURES["stream"]() == PICTURES["stream"]()
