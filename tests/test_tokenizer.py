"""The rules of the tokenizer, on values to check by eye.

The tests with an `exercise` mark are the checks of notebook 01. They use nothing that a later
exercise builds, so each can pass before you start the next one. The message of each assert is the
hint that a learner reads. `test_tokenizer_library.py` compares the whole tokenizer with an oracle.
"""

import itertools
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
LO, LOW, ER, END, THINK = 256, 257, 258, 259, 260  # ids of `small`; smaller ids are the bytes


def small(prefix_ids=(), suffix_ids=(), split=str.split, end=END, think=THINK):
    """A small tokenizer: bytes, MERGES, the special token <e>, the added token <t>."""
    tokens = [*byte_alphabet(), "lo", "low", "er"]
    file = BytePairFile(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=MERGES,
        added=(AddedToken("<e>", end, True), AddedToken("<t>", think, False)),
        normalize=str,
        split=split,
        ignore_merges=False,
        unknown=None,
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
    )
    return Tokenizer(file)


class Table:
    """What a detokenizer needs of a tokenizer: each token's bytes, and the special ids."""

    def __init__(self, *tokens, special=()):
        self.tokens = tokens
        self.special_ids = frozenset(special)

    def token_bytes(self, token_id):
        return self.tokens[token_id]


def stream(*tokens, special=(), **options):
    """A detokenizer of the tokens 0, 1, 2, ... with these bytes."""
    return Detokenizer(Table(*tokens, special=special), **options)


def error_of(function, *args):
    """The exception that a call raises, or None."""
    try:
        function(*args)
    except Exception as error:
        return error
    return None


def random_merges(rng):
    """Ranks, in any order, for six pairs of the tokens a, b, c, ab, bc, ca."""
    tokens = ["a", "b", "c", "ab", "bc", "ca"]
    pairs = rng.sample([(left, right) for left in tokens for right in tokens], 6)
    return dict(zip(pairs, rng.sample(range(20), 6)))


def plainly_best(tokens, merges):
    """The rule of `best_pair` in the plainest words."""
    found = [pair for pair in zip(tokens, tokens[1:]) if pair in merges]
    return sorted(found, key=lambda pair: merges[pair])[0] if found else None


def plainly_merged(tokens, pair):
    """The rule of `merge_pair` in the plainest words."""
    if len(tokens) < 2:
        return list(tokens)
    if (tokens[0], tokens[1]) == pair:
        return [tokens[0] + tokens[1], *plainly_merged(tokens[2:], pair)]
    return [tokens[0], *plainly_merged(tokens[1:], pair)]


# --- the alphabet (given) ---


def test_alphabet_shows_each_byte_as_one_visible_character():
    """Visible Latin-1 characters stay; the other bytes become the characters from 256 on."""
    alphabet = byte_alphabet()
    assert [alphabet[byte] for byte in (65, 32, 10, 0, 255)] == ["A", "Ġ", "Ċ", "Ā", "ÿ"]
    assert [alphabet[byte] for byte in (33, 126, 127, 160, 161, 172, 173, 174)] == list("!~ġł¡¬Ń®")
    assert len(set(alphabet)) == 256
    assert all(character.isprintable() and character != " " for character in alphabet)


def test_alphabet_and_bytes_are_inverse():
    """A text in the alphabet is read back byte by byte."""
    assert to_alphabet("é ") == "Ã©Ġ"
    assert from_alphabet("Ã©Ġ") == b"\xc3\xa9 "
    assert from_alphabet("a b") == b"a b", "a space is not in the alphabet: the token is text"


# --- best_pair ---


@pytest.mark.exercise("tokenizer.best_pair")
def test_the_lowest_rank_wins():
    """Rank counts, and the position in the word doesn't."""
    assert best_pair(list("erlo"), MERGES) == ("l", "o"), (
        "l, o has rank 0 and e, r has rank 2: do you return the first pair that you find?"
    )
    assert best_pair(["lo", "w"], MERGES) == ("lo", "w"), "a joined token has neighbours too"


@pytest.mark.exercise("tokenizer.best_pair")
def test_rank_0_is_a_rank():
    """The best pair of all must not look like a missing one."""
    assert best_pair(list("loer"), MERGES) == ("l", "o"), (
        "l, o has rank 0, the lowest there is: does your code treat 0 as missing?"
    )


@pytest.mark.exercise("tokenizer.best_pair")
def test_pairs_without_a_rank_do_not_merge():
    """Then there's no best pair."""
    assert best_pair(list("wo"), MERGES) is None, "w, o has no rank: do you return it anyway?"
    assert best_pair(["l", "x", "o"], MERGES) is None, "x separates l and o: are they a pair?"


@pytest.mark.exercise("tokenizer.best_pair")
@pytest.mark.parametrize("tokens", [["l"], []])
def test_a_single_token_has_no_pair(tokens):
    """Every word ends up like this, so it isn't an error."""
    error = error_of(best_pair, tokens, MERGES)
    assert error is None, "no pairs here: does your code raise, such as min() of nothing?"
    assert best_pair(tokens, MERGES) is None, "without a pair there is nothing to join"


@pytest.mark.exercise("tokenizer.best_pair")
def test_the_rank_is_the_number_in_the_dict():
    """The order of the entries means nothing."""
    assert best_pair(list("erlo"), {("e", "r"): 5, ("l", "o"): 1}) == ("l", "o"), (
        "1 is lower than 5: do you go by the order of the dict's entries?"
    )


@pytest.mark.exercise("tokenizer.best_pair")
@pytest.mark.parametrize("place", range(4))
def test_every_pair_is_considered(place):
    """Wherever it starts, at an odd place or at the end."""
    tokens = ["x"] * place + ["l", "o"] + ["x"] * (3 - place)
    assert best_pair(tokens, MERGES) == ("l", "o"), (
        "l, o is somewhere in this word: do you look at the pair that starts at every place?"
    )


@pytest.mark.exercise("tokenizer.best_pair")
def test_no_pair_of_a_random_word_has_a_lower_rank():
    """Whatever the tokens and the ranks are."""
    rng = random.Random(0)
    for _ in range(200):
        merges = random_merges(rng)
        tokens = rng.choices(["a", "b", "c", "ab", "bc"], k=rng.randrange(7))
        expected = plainly_best(tokens, merges)
        assert best_pair(tokens, merges) == expected, (
            "all adjacent pairs count, and the lowest number in merges wins: which pair differs?"
        )


# --- merge_pair ---


@pytest.mark.exercise("tokenizer.merge_pair")
def test_every_occurrence_is_joined():
    """One call joins a pair wherever it occurs."""
    assert merge_pair(list("lolo"), ("l", "o")) == ["lo", "lo"], (
        "l, o occurs twice: do you stop after the first?"
    )
    assert merge_pair(list("xyz"), ("l", "o")) == ["x", "y", "z"], "no l, o here, so no join"


@pytest.mark.exercise("tokenizer.merge_pair")
@pytest.mark.parametrize(
    ("tokens", "merged"),
    [(["a", "a", "a"], ["aa", "a"]), (["a", "a", "a", "a"], ["aa", "aa"])],
)
def test_a_token_takes_part_in_one_join_only(tokens, merged):
    """Of two overlapping occurrences, the left one is joined."""
    assert merge_pair(tokens, ("a", "a")) == merged, (
        "each token is joined at most once, from the left: do you skip both after a join?"
    )


@pytest.mark.exercise("tokenizer.merge_pair")
def test_both_tokens_of_the_pair_are_compared():
    """One of the two alone isn't the pair."""
    assert merge_pair(list("lxlo"), ("l", "o")) == ["l", "x", "lo"], (
        "l, x is not the pair: do you compare only the first token?"
    )
    assert merge_pair(list("xolo"), ("l", "o")) == ["x", "o", "lo"], (
        "x, o is not the pair: do you compare only the second token?"
    )


@pytest.mark.exercise("tokenizer.merge_pair")
def test_tokens_are_compared_one_by_one():
    """Equal text isn't enough: the border between the tokens must be the same."""
    assert merge_pair(["aa", "a"], ("a", "a")) == ["aa", "a"], (
        "aa is not a: do you search in the joined text?"
    )
    assert merge_pair(["ab", "c"], ("a", "bc")) == ["ab", "c"], (
        "the pair is a and bc, these are ab and c: do you compare the tokens or the joined text?"
    )


@pytest.mark.exercise("tokenizer.merge_pair")
def test_no_token_gets_lost():
    """Tokens before, between and after the pairs stay."""
    assert merge_pair(list("lox"), ("l", "o")) == ["lo", "x"], (
        "x is the last token and has no right neighbour: is it in your result?"
    )
    assert merge_pair(list("xlo"), ("l", "o")) == ["x", "lo"], "x comes before the pair"
    assert merge_pair(["l"], ("l", "o")) == ["l"], "a single token has nothing to be joined with"
    assert merge_pair([], ("l", "o")) == [], "no tokens, no joins"


@pytest.mark.exercise("tokenizer.merge_pair")
def test_the_arguments_are_not_changed():
    """The caller may still need the list."""
    tokens = ["l", "o", "w"]
    merge_pair(tokens, ("l", "o"))
    assert tokens == ["l", "o", "w"], "the caller's list has changed: do you make a new one?"


@pytest.mark.exercise("tokenizer.merge_pair")
def test_random_words_are_joined_from_left_to_right():
    """Whatever the tokens and the pair are."""
    rng = random.Random(0)
    for _ in range(300):
        tokens = rng.choices(["a", "b", "ab", "aa"], k=rng.randrange(8))
        pair = tuple(rng.choices(["a", "b", "ab", "aa"], k=2))
        assert merge_pair(tokens, pair) == plainly_merged(tokens, pair), (
            "from left to right, each occurrence once, all else unchanged: which token differs?"
        )


# --- encode_word ---


@pytest.mark.exercise("tokenizer.encode_word")
def test_joining_continues_until_no_pair_is_left():
    """A joined token can be joined again."""
    assert encode_word("lower", MERGES) == ["low", "er"], (
        "lo, w is a pair once l, o is joined: do you continue until no pair is left?"
    )
    assert encode_word("low", MERGES) == ["low"], "a word can become one token: do you stop early?"
    assert encode_word("lowlow", MERGES) == ["low", "low"], "both halves of this word can be joined"


@pytest.mark.exercise("tokenizer.encode_word")
def test_rank_decides_and_length_does_not():
    """Taking the longest known token is another algorithm."""
    merges = {("b", "c"): 0, ("a", "b"): 1, ("ab", "c"): 2}
    assert encode_word("abc", merges) == ["a", "bc"], (
        "b, c has rank 0, and after that no pair is left: do you look for the longest token?"
    )


@pytest.mark.exercise("tokenizer.encode_word")
def test_characters_without_a_merge_stay_single():
    """Single characters are tokens."""
    assert encode_word("xyz", MERGES) == ["x", "y", "z"], "no pair of xyz has a rank: is it a list?"
    assert encode_word("", MERGES) == [], "a word without characters has no tokens"
    assert encode_word(["<unk>", "l", "o"], MERGES) == ["<unk>", "lo"], (
        "a word may be a list of tokens: do you treat it as one text?"
    )


@pytest.mark.exercise("tokenizer.encode_word")
def test_a_join_can_make_a_pair_of_lower_rank():
    """ab, c has rank 0 and exists only after a, b of rank 1 is joined."""
    merges = {("ab", "c"): 0, ("a", "b"): 1}
    assert encode_word("abc", merges) == ["abc"], (
        "after a, b is joined, ab, c is a pair: do you go through the merges only once?"
    )


@pytest.mark.exercise("tokenizer.encode_word")
def test_random_words_follow_the_ranks():
    """Whatever the merges are."""
    rng = random.Random(0)
    for _ in range(200):
        merges, word = random_merges(rng), "".join(rng.choices("abc", k=rng.randrange(8)))
        tokens = list(word)
        while (pair := plainly_best(tokens, merges)) is not None:
            tokens = plainly_merged(tokens, pair)
        assert encode_word(word, merges) == tokens, (
            "the lowest rank first, until no pair is left: at which join does yours differ?"
        )


# --- Tokenizer.encode ---


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_the_ids_of_a_text_are_one_flat_list():
    """However many pieces the text has."""
    tokenizer = small()
    assert tokenizer.encode("low lower") == [LOW, LOW, ER], (
        "the ids are one flat list: is yours nested, or something other than a list?"
    )


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_a_control_token_typed_by_a_user_is_text():
    """Without `parse_special`, <e> is three ordinary characters."""
    tokenizer = small()
    assert tokenizer.encode("a<e>") == [97, 60, 101, 62], (
        "a user typed <e>: do you look for special tokens although parse_special is False?"
    )


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_a_program_may_write_control_tokens():
    """With `parse_special` they become their ids."""
    tokenizer = small()
    assert tokenizer.encode("low<e>er", parse_special=True) == [LOW, END, ER], (
        "parse_special=True: does <e> become one id, between the ids of its neighbours?"
    )
    assert tokenizer.encode("<e><e>", parse_special=True) == [END, END], "<e> twice is two ids"


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_added_tokens_that_are_not_special_always_count():
    """They control nothing, so a user may write them."""
    tokenizer = small()
    assert tokenizer.encode("low<t>") == [LOW, THINK], (
        "<t> is an added token and not special: do you look for added tokens at all?"
    )
    assert tokenizer.encode("low<t>", parse_special=True) == [LOW, THINK], "<t> counts here too"


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_prefix_and_suffix_are_added_once():
    """Around the whole text, and not around each piece."""
    tokenizer = small(prefix_ids=(1,), suffix_ids=(2,))
    assert tokenizer.encode("a<t>b") == [1, 97, THINK, 98, 2], (
        "prefix 1 and suffix 2: is each there, and only once?"
    )
    assert tokenizer.encode("") == [1, 2], "an empty text gets its prefix and suffix too"


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_prefix_and_suffix_can_be_left_out():
    """A text that continues another one needs no second beginning."""
    tokenizer = small(prefix_ids=(1,), suffix_ids=(2,))
    assert tokenizer.encode("a<t>b", add_special_tokens=False) == [97, THINK, 98], (
        "add_special_tokens=False: do you add prefix and suffix anyway?"
    )


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_prefix_and_suffix_do_not_depend_on_the_text():
    """A text that already starts and ends with these tokens gets them as well."""
    tokenizer = small(prefix_ids=(END,), suffix_ids=(END,))
    assert tokenizer.encode("<e>a<e>", parse_special=True) == [END, END, 97, END, END], (
        "the text starts and ends with <e>, and <e> is also prefix and suffix: are all four there?"
    )


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_id_0_is_an_id():
    """In some vocabularies an added token has id 0."""
    tokenizer = small(end=0, think=0)
    assert tokenizer.encode("a<e>b", parse_special=True) == [97, 0, 98], (
        "<e> has id 0 here: does your code treat 0 as missing?"
    )
    assert tokenizer.encode("a<t>b") == [97, 0, 98], "<t> has id 0 here"


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_only_text_is_accepted():
    """An empty list looks like an empty text, but isn't one."""
    tokenizer = small()
    error = error_of(tokenizer.encode, [])
    assert isinstance(error, ValueError), "a list isn't text: do you call checked_text first?"


@pytest.mark.exercise("tokenizer.Tokenizer.encode")
def test_no_character_of_a_text_is_changed():
    """Spaces at both ends, line ends, upper case and combining accents are text."""
    tokenizer = small(split=lambda text: [text])
    assert tokenizer.encode(" a \r\n") == [32, 97, 32, 13, 10], (
        "spaces and line ends are text: do you strip or replace any?"
    )
    assert tokenizer.encode("\tE\u0301\x00") == [9, 69, 0xCC, 0x81, 0], (
        "a tab, E, a combining accent and a null byte: do you change the text before encoding it?"
    )


# --- unfinished_bytes ---


@pytest.mark.parametrize(
    ("byte", "size"),
    [(0x00, 1), (0x7F, 1), (0x80, 0), (0xBF, 0), (0xC1, 0), (0xC2, 2), (0xDF, 2), (0xE0, 3)]
    + [(0xEF, 3), (0xF0, 4), (0xF4, 4), (0xF5, 0), (0xFF, 0)],
)
def test_first_byte_says_how_long_a_character_is(byte, size):
    """UTF-8 puts the length into the first byte; some bytes are never first."""
    assert character_size(byte) == size


@pytest.mark.exercise("tokenizer.unfinished_bytes")
def test_the_start_of_a_character_waits():
    """All its bytes so far, whichever came last."""
    assert unfinished_bytes(b"A\xc3") == 1, "C3 needs one more byte, so it waits"
    assert unfinished_bytes("👍".encode()[:3]) == 3, (
        "3 of the 4 bytes of an emoji are here: do you count the missing byte or the waiting ones?"
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
def test_bytes_that_start_no_character_do_not_wait(data):
    """No further byte makes a character of them, so they would wait forever."""
    assert unfinished_bytes(data) == 0, "these bytes start no character: would they wait forever?"


@pytest.mark.exercise("tokenizer.unfinished_bytes")
@pytest.mark.parametrize("byte", [0xC0, 0xC1, 0xF5, 0xF7, 0xF8, 0xFE, 0xFF])
def test_bytes_that_utf8_never_uses_do_not_wait(byte):
    """They look like first bytes, and `character_size` knows that they aren't."""
    assert unfinished_bytes(bytes([0x41, byte])) == 0, (
        "this byte occurs in no character: do you ask character_size?"
    )
    assert unfinished_bytes(bytes([byte, 0xA9])) == 0, "A9 continues nothing here"


@pytest.mark.exercise("tokenizer.unfinished_bytes")
def test_a_broken_character_does_not_wait():
    """Only the end of the data can still become a character."""
    assert unfinished_bytes(b"\xc3A") == 0, (
        "A doesn't continue C3, so C3 is lost: do you look only at the end of the data?"
    )
    assert unfinished_bytes(b"\xe2A") == 0, (
        "A doesn't continue E2, so E2 is lost: do you stop at the last character's first byte?"
    )
    assert unfinished_bytes(b"\xff\xc3") == 1, "FF is lost in any case, C3 waits"


@pytest.mark.exercise("tokenizer.unfinished_bytes")
def test_all_short_sequences_of_bytes():
    """First bytes of all sizes and bytes that continue them, in every order."""
    for data in map(bytes, itertools.product(b"A\x80\xa9\xc3\xe2\xf1", repeat=4)):
        start = max((i for i in range(4) if data[i] not in b"\x80\xa9"), default=4)
        size = 4 - start
        expected = size if start < 4 and size < character_size(data[start]) else 0
        assert unfinished_bytes(data) == expected, (
            "the last byte that isn't 80 or A9 starts a character: is all of it there?"
        )


# --- Detokenizer.push ---


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_a_character_appears_with_its_last_byte():
    """Not earlier, and not later."""
    detokenizer = stream(*[bytes([byte]) for byte in "é한👍!".encode()])
    pushed = [detokenizer.push(token_id) for token_id in range(10)]
    assert pushed == ["", "é", "", "", "한", "", "", "", "👍", "!"], (
        "é in two tokens, 한 in three: do you put the held bytes before the new ones?"
    )


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_complete_characters_do_not_wait_for_an_incomplete_one():
    """Only the incomplete bytes are held, not the whole token."""
    detokenizer = stream(b"low\xc3", b"\xa9")
    assert detokenizer.push(0) == "low", (
        "low is complete, C3 isn't: do you hold back the whole token?"
    )
    assert detokenizer.push(1) == "é", "C3 was held, and A9 completes it"


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_skipped_tokens_leave_no_trace():
    """Neither in the text nor in the held bytes."""
    detokenizer = stream(b"\xc3", b"<e>", b"\xa9", special=[1])
    pushed = [detokenizer.push(token_id) for token_id in range(3)]
    assert pushed == ["", "", "é"], (
        "<e> is skipped, even between the halves of é: do you check skipped_ids first?"
    )


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_special_tokens_that_are_not_skipped_are_text():
    """With skip_special_tokens=False they are shown."""
    detokenizer = stream(b"a", b"<e>", special=[1], skip_special_tokens=False)
    assert detokenizer.push(1) == "<e>", "skipped_ids is empty here: which ids do you skip?"


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_invalid_bytes_are_replaced_at_once():
    """A model may sample anything; the stream continues."""
    detokenizer = stream(b"\xff", b"\xc3", b"A")
    error = error_of(detokenizer.push, 0)
    assert error is None, "FF is in no character: does your decode raise an error for it?"
    pushed = [detokenizer.push(token_id) for token_id in range(3)]
    assert pushed == ["\ufffd", "", "\ufffdA"], (
        "FF, and a C3 without its A9, become one U+FFFD each: is one missing, or there twice?"
    )


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_a_replacement_character_from_the_model_is_shown():
    """U+FFFD is a character of three bytes, and a model may write it."""
    detokenizer = stream("\ufffd".encode())
    assert detokenizer.push(0) == "\ufffd", (
        "this U+FFFD is complete: do you hold back every text that ends in one?"
    )


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_no_character_of_a_token_is_changed():
    """Spaces, line ends and null bytes are text."""
    tokens = [b" ", b"\r\n", b" a\t", b"\x00", b"\xef\xbb\xbf", b""]
    detokenizer = stream(*tokens)
    pushed = [detokenizer.push(token_id) for token_id in range(6)]
    assert pushed == [" ", "\r\n", " a\t", "\x00", "\ufeff", ""], (
        "each token is complete text: do you strip or replace anything?"
    )


@pytest.mark.exercise("tokenizer.Detokenizer.push")
def test_the_pieces_add_up_to_the_text_of_all_ids():
    """Whatever the bytes are, and wherever they are cut into tokens."""
    rng = random.Random(0)
    for _ in range(200):
        data = bytes(rng.choice(b"a\x80\xa9\xbf\xc3\xe2\xed\xf0\xff") for _ in range(12))
        cuts = sorted(rng.sample(range(13), 4))
        tokens = [data[i:j] for i, j in zip([0, *cuts], [*cuts, 12])]
        detokenizer = stream(*tokens)
        pieces = [detokenizer.push(token_id) for token_id in range(len(tokens))]
        text = "".join(pieces) + detokenizer.finish()
        assert text == data.decode("utf-8", "replace"), (
            "pieces and rest aren't the text of all the bytes: is something lost, or there twice?"
        )


# --- added tokens (given) ---


def test_the_longest_added_token_is_found():
    """Of two tokens with the same start the longer one is found; dots and bars are literal."""
    ids = {"<a>": 1, "<a>b": 2, "x|y": 3, "...": 4}
    pattern = token_pattern(ids)
    assert split_at_tokens("<a>bc<a>", pattern, ids) == [2, "c", 1]
    assert split_at_tokens("xyabc", pattern, ids) == ["xyabc"]
    assert split_at_tokens("", pattern, ids) == []
    assert split_at_tokens("<a>", token_pattern([]), {}) == ["<a>"]
