"""The pictures of chapter 04 say what they were given, in the image and in words."""

import pytest
from figure_checks import assert_fits_the_page_and_is_described

from course.figures import prefix_cache as draw
from minivllm.prefix_cache import PrefixCache

pytestmark = pytest.mark.course

WORDS = ["a", "b", "c", "d", "e", "f"]


def words(token_ids):
    """Token 0 is a, token 1 is b."""
    return " ".join(WORDS[token] for token in token_ids)


def make_cache(*chains):
    """A cache with these chains of blocks of 2 tokens: block 0, 1, 2, ... as they come."""
    cache = PrefixCache(2)
    block_id = 0
    for chain in chains:
        node = None
        for tokens in chain:
            node = cache.insert(node, tokens, block_id)
            block_id += 1
    return cache


def make_tree(joined=False, owners=None):
    """Two prompts that part after their first block, and one that is alone."""
    chains = [[(0, 1), (2, 3), (4, 5)], [(0, 1), (4, 4)], [(5, 5)]]
    nodes = make_cache(*chains).entries.values()
    return draw.tree(nodes, owners or [0] * 6, words, joined)


PICTURES = {
    "reuse": lambda: draw.reuse({"one": (0, 100), "two": (96, 4)}, "Found"),
    "matches": lambda: draw.matches({"4 tokens": (4, 2), "5 tokens": (5, 4)}, 2, "Sent again"),
    "chains": lambda: draw.chains({"x": [("a b", 7), ("c d", 8)], "y": [("a b", 7), ("e", -1)]}),
    "collisions": lambda: draw.collisions({8: 90, 64: 0}, 1000),
    "tree": make_tree,
    "joined tree": lambda: make_tree(joined=True),
    "queue": lambda: draw.queue({"begin": [(0, ""), (1, "")], "end": [(1, "A")]}),
    "first_tokens": lambda: draw.first_tokens({"no": [1, 2], "yes": [1, 0.5]}, [9, 17], "here"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_fits_the_page_and_is_described(name):
    """700 pixels wide, with alt text where a notebook keeps it."""
    assert_fits_the_page_and_is_described(PICTURES[name])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("reuse", "Found: 48% of the tokens. one: 0 before, 100 now; two: 96 before, 4 now"),
        ("matches", "4 tokens: 2 of 4 found; 5 tokens: 4 of 5 found"),
        ("chains", "2 chains of blocks with their keys; 1 key shared. x: a b | c d; y: a b | e"),
        ("collisions", "8 bits: 90, 64 bits: 0"),
        ("tree", "The tree of 5 known blocks, with 3 ends: block 0 (a b); block 1 (c d); block 2"),
        ("joined tree", "with 3 ends: block 0 (a b); 2 blocks (c d e f); block 4 (e e); block 5"),
        ("queue", "begin: [0, 1]; end: [1]"),
        ("first_tokens", "no [1000, 2000]; yes [1000, 500]"),
    ],
)
def test_the_words_hold_the_numbers(name, text):
    """The text says what the image shows."""
    assert text in PICTURES[name]().alt


def test_owned_and_cached_blocks_are_not_one_box():
    """A box has one colour, so a row of blocks is cut where ownership ends."""
    owners = [1, 1, 0, 0, 0, 0]
    assert "block 1 (c d); block 2 (e f)" in make_tree(joined=True, owners=owners).alt


def test_an_orphan_is_drawn_behind_its_evicted_parent():
    """Not as the beginning of a prompt, which it is not; the title counts known blocks only."""
    cache = make_cache([(0, 1), (2, 3)])
    cache.forget(0)
    alt = draw.tree(cache.entries.values(), [0, 0], words).alt
    assert "1 known block, with 1 end: block 0 (evicted, a b); block 1 (c d)" in alt


def test_an_empty_cache_has_an_empty_tree():
    """Nothing known, nothing drawn."""
    assert "The tree of 0 known blocks" in draw.tree([], [], words).alt
