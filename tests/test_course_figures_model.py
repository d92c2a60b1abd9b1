"""The pictures of chapter 05 say what they were given, in the image and in words."""

import pytest
from figure_checks import assert_fits_the_page_and_is_described

from course.figures import model as draw

pytestmark = pytest.mark.course

MAP = [[1.0, 0.0], [0.25, 0.75]]
PICTURES = {
    "bits": lambda: draw.bits({"a": ("0101", 2), "b": ("010", 1)}),
    "hands": lambda: draw.hands({"fast": [0.0, 1.0, 2.0], "slow": [0.0, 0.001, 0.002]}),
    "lines": lambda: draw.lines({"one": ([0, 1], [2.0, 3.0])}, "Title", "x", "y"),
    "groups": lambda: draw.groups([0, 0, 1, 1]),
    "attention_maps": lambda: draw.attention_maps({"head 0": MAP}, ["a", "$b\n"]),
    "roofline": lambda: draw.roofline(4e10, 1e10, {"1 token": (0.5, 4e9), "8": (4, 3e10)}, "Here"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_fits_the_page_and_is_described(name):
    """700 pixels wide, with alt text where a notebook keeps it."""
    assert_fits_the_page_and_is_described(PICTURES[name])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bits", "a: 1 sign bit, 2 of exponent, 1 of fraction (0101)"),
        ("hands", "slow turns by 0.001 radians a position"),
        ("lines", "Title. one: 2 at 0 to 3 at 1"),
        ("groups", "KV head 0: query heads [0, 1]; KV head 1: query heads [2, 3]"),
        ("attention_maps", "head 0: 25% of the weight on the first token"),
        ("roofline", "they meet at 4 FLOP per byte. 1 token: 4 GFLOP/s; 8: 30 GFLOP/s"),
    ],
)
def test_the_text_says_what_the_picture_shows(name, text):
    """Readers who cannot see the picture learn the same."""
    assert text in PICTURES[name]().alt
