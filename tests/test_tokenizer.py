"""The rules of the tokenizer, each on values to check by eye.

The tests with an `exercise` mark are the checks of notebook 01. They use nothing that a later
exercise builds, so each can be passed before the next one is begun; what a failed assert says
is the hint a learner reads. `test_tokenizer_library.py` compares the whole with an oracle.
"""

import random

import pytest

from minivllm.text.tokenizer_json import AddedToken, BytePairFile
from minivllm.tokenizer import (
    Detokenizer,
    Tokenizer,
    best_pair,
    byte_alphabet,
    character_size,
    encode_word,
    from_alphabet,
    merge_pair,
    split_at_tokens,
    to_alphabet,
    token_pattern,
    unfinished_bytes,
)

MERGES = {("l", "o"): 0, ("lo", "w"): 1, ("e", "r"): 2}
LO, LOW, ER, END, THINK = 256, 257, 258, 259, 260  # ids of `small`; those below are the bytes


def small(prefix_ids=(), suffix_ids=(), split=str.split):
    """A tokenizer to check by eye: bytes, MERGES, a special token <e>, an added token <t>."""
    tokens = [*byte_alphabet(), "lo", "low", "er"]
    file = BytePairFile(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=MERGES,
        added=(AddedToken("<e>", END, True), AddedToken("<t>", THINK, False)),
        normalize=str,
        split=split,
        ignore_merges=False,
        unknown=None,
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
    )
    return Tokenizer(file)


class Table:
    """Stands where a tokenizer stands: the bytes of each token, and which ids are special."""

    def __init__(self, *tokens, special=()):
        self.tokens = tokens
        self.special_ids = frozenset(special)

    def token_bytes(self, token_id):
        return self.tokens[token_id]


def stream(*tokens, special=(), **options):
    """A detokenizer of the tokens 0, 1, 2, ... with these bytes."""
    return Detokenizer(Table(*tokens, special=special), **options)


def error_of(function, *args):
    """The exception that a call ends with, or None."""
    try:
        function(*args)
    except Exception as error:
        return error
    return None


# --- the alphabet (given) ---


def test_alphabet_shows_each_byte_as_one_visible_character():
    """Visible Latin-1 stays what it is, the other bytes move behind 255."""
    alphabet = byte_alphabet()
    assert [alphabet[byte] for byte in (65, 32, 10, 0, 255)] == ["A", "Ġ", "Ċ", "Ā", "ÿ"]
    assert [alphabet[byte] for byte in (33, 126, 127, 160, 161, 172, 173, 174)] == list("!~ġł¡¬Ń®")
    assert len(set(alphabet)) == 256
    assert all(character.isprintable() and character != " " for character in alphabet)


def test_alphabet_and_bytes_are_inverse():
    """What was written with the alphabet is read back, byte by byte."""
    assert to_alphabet("é ") == "Ã©Ġ"
    assert from_alphabet("Ã©Ġ") == b"\xc3\xa9 "
    assert from_alphabet("a b") == b"a b", "a space is not in the alphabet: the token is text"


# --- best_pair ---


@pytest.mark.exercise("tokenizer.best_pair")
def test_the_lowest_rank_is_joined_first():
    """Rank counts, not the place in the word."""
    assert best_pair(list("erlo"), MERGES) == ("l", "o"), (
        "l, o has rank 0 and e, r rank 2: do you take the first pair that you find?"
    )
    assert best_pair(["lo", "w"], MERGES) == ("lo", "w"), "joined tokens are neighbours too"


@pytest.mark.exercise("tokenizer.best_pair")
def test_rank_0_is_a_rank():
    """The best pair of all must not be taken for a missing one."""
    assert best_pair(list("loer"), MERGES) == ("l", "o"), (
        "l, o has rank 0, the best there is: does your code take 0 for nothing?"
    )


@pytest.mark.exercise("tokenizer.best_pair")
def test_neighbours_that_are_not_in_the_list_do_not_merge():
    """Then there is no best pair."""
    assert best_pair(list("wo"), MERGES) is None, (
        "w, o is not in the list: do you return it all the same?"
    )
    assert best_pair(["l", "x", "o"], MERGES) is None, "l and o are no neighbours here"


@pytest.mark.exercise("tokenizer.best_pair")
@pytest.mark.parametrize("tokens", [["l"], []])
def test_a_single_token_has_no_neighbours(tokens):
    """Every word comes to that in the end, so it is no error."""
    error = error_of(best_pair, tokens, MERGES)
    assert error is None, "there are no neighbours: does min() of nothing stop your code?"
    assert best_pair(tokens, MERGES) is None, "without neighbours there is nothing to join"


@pytest.mark.exercise("tokenizer.best_pair")
def test_the_rank_is_the_number_in_the_list():
    """Not the place where the pair stands in the dict."""
    assert best_pair(list("erlo"), {("e", "r"): 5, ("l", "o"): 1}) == ("l", "o"), (
        "1 is lower than 5: do you go through the dict and take the first pair that is there?"
    )


# --- merge_pair ---


@pytest.mark.exercise("tokenizer.merge_pair")
def test_every_occurrence_is_joined():
    """One round joins a pair wherever it stands."""
    assert merge_pair(list("lolo"), ("l", "o")) == ["lo", "lo"], (
        "l, o stands there twice: do you stop after the first?"
    )
    assert merge_pair(list("xyz"), ("l", "o")) == ["x", "y", "z"], "no l, o here: nothing to join"


@pytest.mark.exercise("tokenizer.merge_pair")
@pytest.mark.parametrize(
    ("tokens", "merged"),
    [(["a", "a", "a"], ["aa", "a"]), (["a", "a", "a", "a"], ["aa", "aa"])],
)
def test_a_token_takes_part_in_one_join_only(tokens, merged):
    """Where occurrences overlap, the left one counts."""
    assert merge_pair(tokens, ("a", "a")) == merged, (
        "a token is joined once, from the left: do you skip the one that was used up?"
    )


@pytest.mark.exercise("tokenizer.merge_pair")
def test_tokens_are_compared_as_a_whole():
    """A token that ends like the pair's first one is another token."""
    assert merge_pair(["aa", "a"], ("a", "a")) == ["aa", "a"], (
        "aa is not a: do you join all to one text and replace in that?"
    )


@pytest.mark.exercise("tokenizer.merge_pair")
def test_no_token_gets_lost():
    """What stands before, between and behind the pairs stays."""
    assert merge_pair(list("lox"), ("l", "o")) == ["lo", "x"], (
        "x is the last token and has no right neighbour: did you forget it?"
    )
    assert merge_pair(list("xlo"), ("l", "o")) == ["x", "lo"], "x stands before the pair"
    assert merge_pair(["l"], ("l", "o")) == ["l"], "one token: there is nothing to join it with"
    assert merge_pair([], ("l", "o")) == [], "no token, no join"


@pytest.mark.exercise("tokenizer.merge_pair")
def test_arguments_are_not_changed():
    """The caller may need it again."""
    tokens = ["l", "o", "w"]
    merge_pair(tokens, ("l", "o"))
    assert tokens == ["l", "o", "w"], "the caller's list has changed: do you make a new one?"


@pytest.mark.exercise("tokenizer.merge_pair")
def test_both_tokens_of_the_pair_are_compared():
    """One of the two alone is not the pair."""
    assert merge_pair(list("lxlo"), ("l", "o")) == ["l", "x", "lo"], (
        "l, x is not the pair: do you compare the first token only?"
    )
    assert merge_pair(list("xolo"), ("l", "o")) == ["x", "o", "lo"], (
        "x, o is not the pair: do you compare the second token only?"
    )


# --- encode_word ---


@pytest.mark.exercise("tokenizer.encode_word")
def test_joining_goes_on_until_no_pair_is_left():
    """What was joined can be joined again."""
    assert encode_word("lower", MERGES) == ["low", "er"], (
        "lo, w is a pair once l, o was joined: do you go on until none is left?"
    )
    assert encode_word("lowlow", MERGES) == ["low", "low"], "every part of a word gets its turn"


@pytest.mark.exercise("tokenizer.encode_word")
def test_rank_decides_and_not_length():
    """The longest token from the left is another algorithm."""
    merges = {("b", "c"): 0, ("a", "b"): 1, ("ab", "c"): 2}
    assert encode_word("abc", merges) == ["a", "bc"], (
        "b, c has rank 0, and then nothing is left to join: do you look for the longest token?"
    )


@pytest.mark.exercise("tokenizer.encode_word")
def test_characters_without_a_merge_stay_single():
    """The characters themselves are tokens."""
    assert encode_word("xyz", MERGES) == ["x", "y", "z"], "no pair of xyz is in the list"
    assert encode_word("", MERGES) == [], "a word without characters has no tokens"
    assert encode_word(["<unk>", "l", "o"], MERGES) == ["<unk>", "lo"], (
        "a word may come as a list of tokens: do you treat it as one text?"
    )


@pytest.mark.exercise("tokenizer.encode_word")
def test_a_join_can_make_a_pair_of_lower_rank():
    """ab, c has rank 0, and stands there only after a, b of rank 1 was joined."""
    merges = {("ab", "c"): 0, ("a", "b"): 1}
    assert encode_word("abc", merges) == ["abc"], (
        "a, b was joined, now ab, c stands there: do you go through the merges only once?"
    )


# --- Tokenizer.encode ---


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_the_ids_of_a_text_are_one_flat_list():
    """Whatever pieces it was cut into."""
    tokenizer = small()
    assert tokenizer.encode("low lower") == [LOW, LOW, ER], (
        "text_ids gives a list for each piece: do you append it where you want to extend?"
    )


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_what_a_stranger_typed_is_text():
    """A control token in a text that no program wrote is four ordinary characters."""
    tokenizer = small()
    assert tokenizer.encode("a<e>") == [97, 60, 101, 62], (
        "a stranger typed <e>: do you look for special tokens without being asked to?"
    )


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_a_program_may_write_special_tokens():
    """With `parse_special` they become their ids."""
    tokenizer = small()
    assert tokenizer.encode("low<e>er", parse_special=True) == [LOW, END, ER], (
        "parse_special=True: does <e> become one id, between the ids of its neighbours?"
    )


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_added_tokens_that_are_not_special_always_count():
    """They control nothing, so a text may contain them."""
    tokenizer = small()
    assert tokenizer.encode("low<t>") == [LOW, THINK], (
        "<t> is an added token, and not special: do you look for no added token at all?"
    )
    assert tokenizer.encode("low<t>", parse_special=True) == [LOW, THINK], "<t> counts here too"


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_the_ids_around_a_text_stand_there_once():
    """At its beginning and its end, not around each of its pieces."""
    tokenizer = small(prefix_ids=(1,), suffix_ids=(2,))
    assert tokenizer.encode("a<t>b") == [1, 97, THINK, 98, 2], (
        "1 before it all and 2 behind it all: are they there, and once?"
    )
    assert tokenizer.encode("") == [1, 2], "an empty text has a beginning and an end too"


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_the_ids_around_a_text_can_be_left_out():
    """A text that goes on needs no second beginning."""
    tokenizer = small(prefix_ids=(1,), suffix_ids=(2,))
    assert tokenizer.encode("a<t>b", add_special_tokens=False) == [97, THINK, 98], (
        "add_special_tokens=False: do you put them there all the same?"
    )


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_only_text_is_accepted():
    """An empty list looks like an empty text, and is none."""
    tokenizer = small()
    error = error_of(tokenizer.encode, [])
    assert isinstance(error, ValueError), "a list is no text: do you ask checked_text first?"


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_no_character_of_a_text_is_changed():
    """Spaces at both ends and the ends of lines are tokens too."""
    tokenizer = small(split=lambda text: [text])
    assert tokenizer.encode(" a \r\n") == [32, 97, 32, 13, 10], (
        "spaces and ends of lines are text like any other: do you strip or replace them?"
    )


# --- unfinished_bytes ---


@pytest.mark.parametrize(
    ("byte", "size"),
    [(0x00, 1), (0x7F, 1), (0x80, 0), (0xBF, 0), (0xC1, 0), (0xC2, 2), (0xDF, 2), (0xE0, 3)]
    + [(0xEF, 3), (0xF0, 4), (0xF4, 4), (0xF5, 0), (0xFF, 0)],
)
def test_first_byte_says_how_long_a_character_is(byte, size):
    """UTF-8 puts the length into the first byte; some bytes are never the first."""
    assert character_size(byte) == size


@pytest.mark.exercise("tokenizer.unfinished_bytes")
def test_the_beginning_of_a_character_waits():
    """All its bytes so far, whichever of them was the last."""
    assert unfinished_bytes(b"A\xc3") == 1, "C3 needs one more byte, so it waits"
    assert unfinished_bytes("👍".encode()[:3]) == 3, (
        "3 of the 4 bytes of an emoji are there: do you count the missing one, or those that wait?"
    )
    assert unfinished_bytes("👍👍".encode()[:6]) == 2, "the first emoji is complete, F0 9F waits"


@pytest.mark.exercise("tokenizer.unfinished_bytes")
@pytest.mark.parametrize("text", ["é", "한", "👍", "aé", "A", ""])
def test_a_complete_character_does_not_wait(text):
    """The reader sees it at once."""
    assert unfinished_bytes(text.encode()) == 0, (
        "the last character is complete: do you compare its bytes with how many it needs?"
    )


@pytest.mark.exercise("tokenizer.unfinished_bytes")
@pytest.mark.parametrize("data", [b"\xff", b"A\xa9", b"\xc3\xa9\xa9\xa9\xa9"])
def test_nothing_waits_for_bytes_that_begin_no_character(data):
    """No further byte makes a character of them, so they would wait for ever."""
    assert unfinished_bytes(data) == 0, "these bytes begin no character: would they wait for ever?"


@pytest.mark.exercise("tokenizer.unfinished_bytes")
def test_a_character_that_was_broken_off_does_not_wait():
    """Only the end of the data can go on."""
    assert unfinished_bytes(b"\xc3A") == 0, (
        "an A follows C3, so it is over for C3: do you look at the end of the data only?"
    )
    assert unfinished_bytes(b"\xff\xc3") == 1, "FF is lost in any case, C3 waits"


# --- Detokenizer.push ---


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_a_character_comes_with_its_last_byte():
    """Not before, and not later."""
    detokenizer = stream(*[bytes([byte]) for byte in "é한👍!".encode()])
    pushed = [detokenizer.push(token_id) for token_id in range(10)]
    assert pushed == ["", "é", "", "", "한", "", "", "", "👍", "!"], (
        "é in two tokens, 한 in three: do you put what was held in front of the new bytes?"
    )


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_complete_characters_do_not_wait_for_their_neighbour():
    """Only the unfinished bytes are held, not the whole token."""
    detokenizer = stream(b"low\xc3", b"\xa9")
    assert detokenizer.push(0) == "low", (
        "low is complete, C3 is not: do you hold back the whole token?"
    )
    assert detokenizer.push(1) == "é", "C3 was held, and A9 completes it"


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_skipped_tokens_leave_no_trace():
    """Neither in the text nor in what is held."""
    detokenizer = stream(b"\xc3", b"<e>", b"\xa9", special=[1])
    pushed = [detokenizer.push(token_id) for token_id in range(3)]
    assert pushed == ["", "", "é"], (
        "<e> is skipped, between the halves of é too: do you ask skipped_ids before all else?"
    )


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_special_tokens_that_are_not_skipped_are_text():
    """With skip_special_tokens=False they are shown."""
    detokenizer = stream(b"a", b"<e>", special=[1], skip_special_tokens=False)
    assert detokenizer.push(1) == "<e>", "skipped_ids is empty here: which ids do you skip?"


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_bytes_that_are_no_character_are_replaced_at_once():
    """A model may sample anything; the stream goes on, and says so."""
    detokenizer = stream(b"\xff", b"\xc3", b"A")
    error = error_of(detokenizer.push, 0)
    assert error is None, "FF is no character: does your decode raise an error at it?"
    pushed = [detokenizer.push(token_id) for token_id in range(3)]
    assert pushed == ["\ufffd", "", "\ufffdA"], (
        "FF and a C3 without its A9 are U+FFFD each: do you drop them?"
    )


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_a_replacement_character_that_was_written_is_shown():
    """U+FFFD is a character of three bytes, and a model may write it."""
    detokenizer = stream("\ufffd".encode())
    assert detokenizer.push(0) == "\ufffd", (
        "this U+FFFD is complete: do you hold back whatever ends in one?"
    )


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_the_pieces_are_the_text_of_all_ids():
    """Whatever the bytes are, and wherever they were cut into tokens."""
    rng = random.Random(0)
    for _ in range(200):
        data = bytes(rng.choice(b"a\x80\xa9\xbf\xc3\xe2\xed\xf0\xff") for _ in range(12))
        cuts = sorted(rng.sample(range(13), 4))
        tokens = [data[i:j] for i, j in zip([0, *cuts], [*cuts, 12])]
        detokenizer = stream(*tokens)
        pieces = [detokenizer.push(token_id) for token_id in range(len(tokens))]
        text = "".join(pieces) + detokenizer.finish()
        assert text == data.decode("utf-8", "replace"), (
            "pieces and rest are not the text of all the bytes: what got lost, or came twice?"
        )


# --- added tokens (given) ---


def test_longest_added_token_counts():
    """Of two tokens that begin alike the longer one is found; dots and bars mean themselves."""
    ids = {"<a>": 1, "<a>b": 2, "x|y": 3, "...": 4}
    pattern = token_pattern(ids)
    assert split_at_tokens("<a>bc<a>", pattern, ids) == [2, "c", 1]
    assert split_at_tokens("xyabc", pattern, ids) == ["xyabc"]
    assert split_at_tokens("", pattern, ids) == []
    assert split_at_tokens("<a>", token_pattern([]), {}) == ["<a>"]
