"""The pictures of chapter 10 say what they were given, in the image and in words."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from figure_checks import assert_fits_the_page_and_is_described

from course.figures import sampler as draw

pytestmark = pytest.mark.course

TOKENS = [" rain", " snow", " the water"]

PICTURES = {
    "knobs": lambda: draw.knobs(TOKENS, {"plain": [0.5, 0.3, 0.2], "top_k 2": [0.6, 0.4, 0.0]}),
    "cuts": lambda: draw.cuts(TOKENS, [0.5, 0.3, 0.2], {"top_k 2": 2, "top_p 0.9": 3}),
    "cdf": lambda: draw.cdf(TOKENS, [5, 3, 2], [0.1, 0.9], [0, 2]),
    "race": lambda: draw.race(TOKENS, [0.0, -1.0, -2.0], [0.1, 2.5, -0.4]),
    "observed": lambda: draw.observed(TOKENS, [50, 28, 22], [50.0, 30.0, 20.0], "100 draws"),
    "token_grid": lambda: draw.token_grid({"a": ["x", "y"], "b": ["x", "z"]}, "Two runs"),
    "times": lambda: draw.times({"greedy": 1.0, "top_p": 2.5}, "32 rows"),
    "speeds": lambda: draw.speeds({"slow": 2.0, "fast": 40.0}, "a machine"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_fits_the_page_and_is_described(name):
    """700 pixels wide, with alt text where a notebook keeps it."""
    assert_fits_the_page_and_is_described(PICTURES[name])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("knobs", "plain: ' rain' 0.50; top_k 2: ' rain' 0.60"),
        ("cuts", "top_k 2 keeps 2; top_p 0.9 keeps 3"),
        ("cdf", "0.10 on ' rain'; 0.90 on ' the water'"),
        ("race", "The largest logit is ' rain'; with noise ' snow' is the largest at 1.5: drawn"),
        ("observed", "100 draws. ' rain' 50 of 50; ' snow' 28 of 30"),
        ("token_grid", "a: 0 tokens of 2 unlike the first line's; b: 1 token of 2 unlike"),
        ("times", "greedy 1.0, top_p 2.5"),
    ],
)
def test_the_words_hold_the_numbers(name, words):
    """The text says what the image shows."""
    assert words in PICTURES[name]().alt


def test_blanks_of_a_token_are_seen():
    """And a long one is cut, so that the axis stays readable."""
    assert draw.shown(" a\n") == "·a↵"
    assert draw.shown("internationally") == "internati…"
