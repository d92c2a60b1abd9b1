"""Long words are encoded like short ones, in less time."""

import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.text.long_words import encode_long_word
from minivllm.text.tokenizer_json import parse
from minivllm.tokenizer import encode_word

MERGES = parse(vocabularies.raw("gpt2")).merges


@given(st.text(st.sampled_from("abcdehilnorstuwyĠ"), max_size=80))
@settings(deadline=None)
def test_long_way_and_short_way_agree(word):
    """The heap gives the tokens of the simple loop for every word."""
    assert encode_long_word(word, MERGES) == encode_word(word, MERGES)


@given(st.text("ab", max_size=60))
def test_repeated_pairs_merge_from_the_left(word):
    """Pairs that overlap, as in aaa, are where the order shows."""
    merges = {("a", "a"): 0, ("aa", "a"): 1, ("b", "aa"): 2, ("aa", "aa"): 3}
    assert encode_long_word(word, merges) == encode_word(word, merges)


def test_nothing_to_merge():
    """A word of no bytes has no tokens, and unknown pairs stay apart."""
    assert encode_long_word("", MERGES) == []
    assert encode_long_word("ab", {}) == ["a", "b"]


def test_megabyte_is_no_matter_of_minutes():
    """The number of looks at `merges` grows with the length, not with its square."""

    class Counting(dict):
        looks = 0

        def __contains__(self, pair):
            Counting.looks += 1
            return super().__contains__(pair)

    encode_long_word("thequickbrownfox" * 1000, Counting(MERGES))
    assert Counting.looks < 5 * 16_000
