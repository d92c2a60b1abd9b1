"""The prefix cache finds a block exactly by its content and by everything before it.

The tests with an `exercise` mark are the checks of notebook 04 (those of its last two exercises
are in `test_block_manager.py`). They use nothing that a later exercise builds; what a failed
assert says is the hint a learner reads.
"""

import random

import pytest

from minivllm.prefix_cache import CachedBlock, PrefixCache, full_blocks, hash_block


def error_of(function, *args):
    """The exception that a call ends with, or None."""
    try:
        function(*args)
    except Exception as error:
        return error
    return None


def filed(cache, parent, token_ids, block_id):
    """File a node by hand, as `insert` would."""
    tokens = tuple(token_ids)
    entry = CachedBlock(block_id, cache.key_of(parent, tokens), tokens, parent)
    cache.entries[entry.key] = entry
    cache.by_block[block_id] = entry
    return entry


def filed_chain(cache, token_ids, block_ids):
    """File the full blocks of `token_ids` as one chain; returns its nodes."""
    nodes = []
    for tokens, block_id in zip(full_blocks(token_ids, cache.block_size), block_ids, strict=True):
        nodes.append(filed(cache, nodes[-1] if nodes else None, tokens, block_id))
    return nodes


def publish(cache, token_ids, block_ids):
    """Insert the full blocks of `token_ids` as one chain; returns its nodes."""
    nodes = []
    for tokens, block_id in zip(full_blocks(token_ids, cache.block_size), block_ids, strict=True):
        nodes.append(cache.insert(nodes[-1] if nodes else None, tokens, block_id))
    cache.check()
    return nodes


def found(cache, token_ids):
    """The block ids that `match` finds."""
    return [entry.block_id for entry in cache.match(token_ids)]


# -- full_blocks --


def test_only_whole_blocks_are_cut():
    """A block that is not full yet gets more tokens later, so it has no content to find."""
    assert full_blocks([1, 2, 3, 4, 5], 2) == [(1, 2), (3, 4)]
    assert full_blocks([1], 2) == []
    assert full_blocks([1, 2], 2) == [(1, 2)]


# -- hash_block --


@pytest.mark.exercise("prefix_cache.hash_block")
def test_equal_tokens_behind_another_beginning_have_another_key():
    """The key of a block stands for all that came before it too."""
    assert hash_block(0, (7, 8)) != hash_block(1, (7, 8)), (
        "the same tokens behind two different parents: does parent_key go into the hash?"
    )


@pytest.mark.exercise("prefix_cache.hash_block")
def test_other_tokens_or_another_order_have_another_key():
    """Each token counts, and its place."""
    assert hash_block(0, (7, 8)) != hash_block(0, (7, 9)), "8 is not 9: does every token count?"
    assert hash_block(0, (7, 8)) != hash_block(0, (8, 7)), (
        "the order of the tokens counts: do you add them up, or sort them?"
    )


@pytest.mark.exercise("prefix_cache.hash_block")
def test_blocks_in_another_order_have_another_key():
    """A chain is more than the sum of its blocks."""
    one_way = hash_block(hash_block(0, (1, 2)), (3, 4))
    other_way = hash_block(hash_block(0, (3, 4)), (1, 2))
    assert one_way != other_way, (
        "blocks [1, 2] [3, 4] and [3, 4] [1, 2] are two prefixes: do you add or xor the parent?"
    )
    twice = hash_block(hash_block(0, (1, 2)), (1, 2))
    assert twice != 0, "a block and the same block again: do the two cancel out?"


@pytest.mark.exercise("prefix_cache.hash_block")
def test_a_key_is_a_number_and_the_same_each_time():
    """A later call must get the same key."""
    key = hash_block(0, (7, 8))
    assert isinstance(key, int), f"{key!r} isn't an int: did you build the pair and not hash it?"
    assert hash_block(0, (7, 8)) == key, "the same block, asked again, has the same key"


@pytest.mark.exercise("prefix_cache.hash_block")
def test_every_token_counts_as_a_whole():
    """Tokens in the middle too, and 1, 23 is not 12, 3."""
    assert hash_block(0, (1, 2, 3)) != hash_block(0, (1, 9, 3)), (
        "only the middle differs: do you look at the first and the last token alone?"
    )
    assert hash_block(0, (1, 23)) != hash_block(0, (12, 3)), (
        "1, 23 and 12, 3 are the same digits: do you join the tokens to one text?"
    )


# -- PrefixCache.lookup --


@pytest.mark.exercise("prefix_cache.PrefixCache.lookup")
def test_a_known_block_is_found_behind_its_parent():
    """The node that was filed, and nothing else."""
    cache = PrefixCache(2)
    first = filed(cache, None, [1, 2], 10)
    second = filed(cache, first, [3, 4], 11)
    assert cache.lookup(None, (1, 2)) is first, "block 10 holds (1, 2): is that the node you get?"
    assert cache.lookup(first, (3, 4)) is second, (
        "block 11 holds (3, 4) behind block 10: do you build the key with the parent?"
    )


@pytest.mark.exercise("prefix_cache.PrefixCache.lookup")
def test_an_unknown_block_is_none():
    """Not being known is the usual case, no error."""
    cache = PrefixCache(2)
    first = filed(cache, None, [1, 2], 10)
    error = error_of(cache.lookup, first, (3, 4))
    assert error is None, "an unknown key isn't an error: what do square brackets do with one?"
    assert cache.lookup(first, (3, 4)) is None, "nothing is known behind block 10"
    assert cache.lookup(first, (1, 2)) is None, "(1, 2) is known as a beginning, not behind itself"


@pytest.mark.exercise("prefix_cache.PrefixCache.lookup")
def test_an_equal_key_is_not_enough():
    """Here every key is 7, and still only (1, 2) is known."""
    cache = PrefixCache(2, hash_function=lambda parent_key, token_ids: 7)
    first = filed(cache, None, [1, 2], 10)
    assert cache.lookup(None, (3, 4)) is None, (
        "block 10 holds (1, 2), only the key is the same: do you compare the tokens?"
    )
    assert cache.lookup(None, (1, 2)) is first, "key and tokens are the same: this is a hit"


@pytest.mark.exercise("prefix_cache.PrefixCache.lookup")
def test_equal_tokens_behind_another_parent_are_not_a_hit():
    """Key and tokens are equal, and the keys and values are not: they depend on what was before."""
    cache = PrefixCache(2, hash_function=lambda parent_key, token_ids: sum(token_ids))
    first = filed(cache, None, [1, 2], 10)
    second = filed(cache, first, [5, 6], 11)
    assert cache.lookup(None, (5, 6)) is None, (
        "block 11 was computed behind block 10, not as a beginning: do you compare the parent?"
    )
    assert cache.lookup(first, (5, 6)) is second, "key, tokens and parent agree: this is a hit"


@pytest.mark.exercise("prefix_cache.PrefixCache.lookup")
def test_two_parents_with_one_key_are_two_parents():
    """Keys can collide anywhere in the chain: only the node itself stands for all before it."""
    cache = PrefixCache(2, hash_function=lambda parent_key, token_ids: parent_key + sum(token_ids))
    left = filed(cache, None, [1, 4], 10)
    child = filed(cache, left, [5, 6], 11)
    right = filed(cache, None, [2, 3], 12)
    assert cache.lookup(right, (5, 6)) is None, (
        "block 11 was computed behind block 10: do you compare the parents' keys, or the nodes?"
    )
    assert cache.lookup(left, (5, 6)) is child, "behind block 10 it is a hit"


# -- PrefixCache.match --


@pytest.mark.exercise("prefix_cache.PrefixCache.match")
def test_longest_known_prefix_is_found():
    """Blocks are found up to the first that differs."""
    cache = PrefixCache(2)
    nodes = filed_chain(cache, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert cache.match([1, 2, 3, 4, 9, 9, 9]) == nodes[:2], (
        "two blocks of this prompt are known: are these the nodes you return, in order?"
    )
    assert cache.match([9, 2, 3, 4]) == [], "the first block is another one: nothing is found"


@pytest.mark.exercise("prefix_cache.PrefixCache.match")
def test_last_token_is_always_computed():
    """A prompt whose blocks are all known still leaves its last token to compute."""
    cache = PrefixCache(2)
    first, _ = filed_chain(cache, [1, 2, 3, 4], [10, 11])
    assert cache.match([1, 2, 3, 4]) == [first], (
        "4 tokens, all of them known: which of them gives the model something to sample from?"
    )
    assert cache.match([1, 2]) == [], "its only block holds the last token: nothing is reused"


@pytest.mark.exercise("prefix_cache.PrefixCache.match")
def test_no_more_than_the_last_token_is_held_back():
    """If a token follows the last known block, every known block is reused."""
    cache = PrefixCache(2)
    nodes = filed_chain(cache, [1, 2, 3, 4], [10, 11])
    assert cache.match([1, 2, 3, 4, 5]) == nodes, (
        "the 5th token is the last one, both blocks are free to reuse: do you drop one always?"
    )


@pytest.mark.exercise("prefix_cache.PrefixCache.match")
def test_a_match_ends_at_the_first_unknown_block():
    """A block after a gap was computed after another beginning."""
    cache = PrefixCache(2)
    first, _ = filed_chain(cache, [1, 2, 3, 4], [10, 11])
    assert cache.match([1, 2, 9, 9, 3, 4, 0]) == [first], (
        "[9, 9] is unknown, so all behind it is too: do you go on after a miss?"
    )


@pytest.mark.exercise("prefix_cache.PrefixCache.match")
def test_each_block_is_looked_up_behind_the_one_before():
    """The same tokens at another place have other keys and values."""
    cache = PrefixCache(2)
    nodes = filed_chain(cache, [1, 2, 3, 4], [10, 11])
    filed(cache, None, [3, 4], 12)
    assert cache.match([1, 2, 3, 4, 0]) == nodes, (
        "block 12 holds (3, 4) as a beginning: do you look up each block behind the last hit?"
    )


@pytest.mark.exercise("prefix_cache.PrefixCache.match")
def test_short_prompts_find_nothing():
    """One token, or none at all, fills no block."""
    cache = PrefixCache(2)
    filed_chain(cache, [1, 2], [10])
    assert cache.match([1]) == [], "one token fills no block of 2"
    error = error_of(cache.match, [])
    assert error is None, "no token at all: do you take something out of an empty list?"
    assert cache.match([]) == [], "no token, no block"


@pytest.mark.exercise("prefix_cache.PrefixCache.match")
def test_matching_changes_nothing():
    """Neither the cache nor the tokens asked for."""
    cache = PrefixCache(2)
    filed_chain(cache, [1, 2, 3, 4], [10, 11])
    token_ids = [1, 2, 3, 4, 5]
    cache.match(token_ids)
    assert token_ids == [1, 2, 3, 4, 5], "these are the request's own tokens: do you cut into them?"
    assert sorted(cache.by_block) == [10, 11], "who only asks changes nothing in the cache"


@pytest.mark.exercise("prefix_cache.PrefixCache.match")
def test_three_blocks_are_one_chain():
    """Each block comes after the one right before it."""
    cache = PrefixCache(2)
    nodes = filed_chain(cache, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert cache.match([1, 2, 3, 4, 5, 6, 0]) == nodes, (
        "three blocks are known: is the third looked up behind the second, not behind the first?"
    )


@pytest.mark.exercise("prefix_cache.PrefixCache.match")
def test_a_match_holds_the_tokens_asked_for():
    """Here every key is 7: block 10 is found for (1, 2), and for nothing else."""
    cache = PrefixCache(2, hash_function=lambda parent_key, token_ids: 7)
    first = filed(cache, None, [1, 2], 10)
    assert cache.match([1, 2, 0]) == [first]
    assert cache.match([3, 4, 0]) == [], (
        "block 10 holds (1, 2), only the key is the same: do you read `entries` without comparing?"
    )


# -- PrefixCache.forget --


@pytest.mark.exercise("prefix_cache.PrefixCache.forget")
def test_a_forgotten_block_is_not_found():
    """It gets other content: a request that finds it by the old one reads wrong keys."""
    cache = PrefixCache(2)
    first, second = filed_chain(cache, [1, 2, 3, 4], [10, 11])
    cache.forget(11)
    assert cache.lookup(first, (3, 4)) is None, (
        "block 11 is overwritten, and is still found by its old tokens: is it in `entries`?"
    )
    assert cache.lookup(None, (1, 2)) is first, "block 10 keeps its content"
    assert second.block_id == 11, "the node itself stays as it is: it is frozen"


@pytest.mark.exercise("prefix_cache.PrefixCache.forget")
def test_a_forgotten_block_holds_nothing():
    """The pool asks by number whether a block is worth keeping."""
    cache = PrefixCache(2)
    filed_chain(cache, [1, 2, 3, 4], [10, 11])
    cache.forget(11)
    assert sorted(cache.by_block) == [10], "block 11 holds nothing now: is it out of `by_block`?"
    cache.check()


@pytest.mark.exercise("prefix_cache.PrefixCache.forget")
def test_forgetting_an_unknown_block_is_fine():
    """Every block that is given away is forgotten, most of them hold nothing."""
    cache = PrefixCache(2)
    filed(cache, None, [1, 2], 10)
    error = error_of(cache.forget, 99)
    assert error is None, "block 99 holds nothing to find, which isn't an error"
    cache.forget(10)
    assert error_of(cache.forget, 10) is None, "forgotten already, and forgotten again: no error"


# -- PrefixCache.insert --


@pytest.mark.exercise("prefix_cache.PrefixCache.insert")
def test_an_inserted_block_is_found():
    """By its tokens behind its parent, and by its number."""
    cache = PrefixCache(2)
    first = cache.insert(None, [1, 2], 10)
    second = cache.insert(first, [3, 4], 11)
    assert cache.lookup(None, (1, 2)) is first, (
        "(1, 2) is known now: is the node in `entries`, with a tuple of tokens, and returned?"
    )
    assert cache.lookup(first, (3, 4)) is second, "(3, 4) is known behind it: is its parent set?"
    assert second.block_id == 11, "(3, 4) is in block 11"
    assert sorted(cache.by_block) == [10, 11], "the pool asks by number: are both in `by_block`?"


@pytest.mark.exercise("prefix_cache.PrefixCache.insert")
def test_content_known_already_keeps_its_first_block():
    """Two equal prompts computed in one step: the second one's blocks stay unknown."""
    cache = PrefixCache(2)
    first = cache.insert(None, [1, 2], 10)
    again = cache.insert(None, [1, 2], 20)
    assert again is first, "(1, 2) is known as block 10: does the second one take its place?"
    assert sorted(cache.by_block) == [10], "block 20 holds a copy: is it entered all the same?"
    assert cache.lookup(None, (1, 2)) is first, "block 10 was first, and stays the one found"


@pytest.mark.exercise("prefix_cache.PrefixCache.insert")
def test_the_chain_goes_on_behind_the_known_node():
    """A request whose first block is a copy publishes its second one behind the original."""
    cache = PrefixCache(2)
    cache.insert(None, [1, 2], 10)
    copy = cache.insert(None, [1, 2], 20)
    cache.insert(copy, [3, 4], 21)
    assert found(cache, [1, 2, 3, 4, 0]) == [10, 21], (
        "the next block's parent is the known node, not the copy: which one do you return?"
    )


@pytest.mark.exercise("prefix_cache.PrefixCache.insert")
def test_a_colliding_key_makes_the_older_content_unknown():
    """One key has room for one node: the older block must not claim to be found."""
    cache = PrefixCache(2, hash_function=lambda parent_key, token_ids: 7)
    cache.insert(None, [1, 2], 10)
    newer = cache.insert(None, [3, 4], 11)
    assert cache.lookup(None, (3, 4)) is newer, "the newer content is the one that is found"
    assert cache.lookup(None, (1, 2)) is None, "the older one had to make room"
    assert sorted(cache.by_block) == [11], (
        "block 10 can no longer be found by its tokens: do you forget it in both places?"
    )


@pytest.mark.exercise("prefix_cache.PrefixCache.insert")
def test_equal_tokens_behind_two_parents_are_two_nodes():
    """Both are known at the same time."""
    cache = PrefixCache(2)
    left, right = cache.insert(None, [1, 2], 10), cache.insert(None, [3, 4], 11)
    behind_left, behind_right = cache.insert(left, [5, 6], 12), cache.insert(right, [5, 6], 13)
    assert behind_left is not behind_right, "(5, 6) twice, behind two beginnings: two nodes"
    assert found(cache, [1, 2, 5, 6, 0]) == [10, 12], "behind (1, 2) it is block 12"
    assert found(cache, [3, 4, 5, 6, 0]) == [11, 13], "behind (3, 4) it is block 13"


@pytest.mark.exercise("prefix_cache.PrefixCache.insert")
def test_a_colliding_key_is_not_a_known_block():
    """One key, other tokens or another parent: the new block gets a node of its own."""
    cache = PrefixCache(2, hash_function=lambda parent_key, token_ids: 7)
    first = cache.insert(None, [1, 2], 10)
    second = cache.insert(first, [1, 2], 11)
    assert second is not first, (
        "the same tokens behind another parent: do you take an equal key for equal content?"
    )
    assert (second.block_id, second.parent) == (11, first), "block 11 comes after block 10"


# -- all of it together --


def test_key_of_a_block_contains_its_parents_key():
    """Without it, every system would find block [3, 4] of any prompt under one key."""
    cache = PrefixCache(2)
    first, second = publish(cache, [1, 2, 3, 4], [10, 11])
    assert second.key == hash_block(first.key, (3, 4))
    assert cache.key_of(None, (3, 4)) != second.key


def test_a_second_equal_chain_stays_unknown():
    """Block for block, the first one's nodes come back."""
    cache = PrefixCache(2)
    first = publish(cache, [1, 2, 3, 4], [10, 11])
    assert publish(cache, [1, 2, 3, 4], [20, 21]) == first
    assert not cache.holds(20)
    assert not cache.holds(21)


def test_equal_block_after_another_beginning_is_not_found():
    """The same tokens at another place have other keys and values."""
    cache = PrefixCache(2)
    publish(cache, [1, 2, 3, 4], [10, 11])
    assert found(cache, [3, 4, 1, 2, 0]) == []
    assert found(cache, [9, 9, 3, 4, 0]) == []


def test_children_of_a_forgotten_block_are_not_found():
    """A chain with a hole ends at the hole, also after the hole is filled by another node."""
    cache = PrefixCache(2)
    publish(cache, [1, 2, 3, 4], [10, 11])
    cache.forget(10)
    assert found(cache, [1, 2, 3, 4, 5]) == []
    publish(cache, [1, 2, 3, 4], [20, 21])
    assert found(cache, [1, 2, 3, 4, 5]) == [20, 21]


@pytest.mark.parametrize("colliding", [lambda parent, tokens: 7, lambda parent, tokens: parent])
def test_colliding_keys_never_serve_other_content(colliding):
    """With every key equal, a lookup still compares tokens and parent."""
    cache = PrefixCache(2, hash_function=colliding)
    publish(cache, [1, 2], [10])
    assert found(cache, [3, 4, 0]) == []
    publish(cache, [3, 4], [11])
    assert found(cache, [1, 2, 0]) == []
    assert found(cache, [3, 4, 0]) == [11]
    assert not cache.holds(10), "the older content can no longer be found and must say so"


def test_collision_of_parents_never_serves_their_children():
    """Two beginnings with one key: what follows the first is not found behind the second."""
    keys = {(1, 2): 100, (3, 4): 100}
    cache = PrefixCache(
        2, hash_function=lambda parent, tokens: keys.get(tokens, hash_block(parent, tokens))
    )
    publish(cache, [1, 2, 5, 6], [10, 11])
    parent = cache.insert(None, (3, 4), 12)
    assert found(cache, [3, 4, 5, 6, 0]) == [12], "block 11 was computed behind [1, 2]"
    cache.insert(parent, (5, 6), 13)
    cache.check()
    assert found(cache, [3, 4, 5, 6, 0]) == [12, 13]
    assert found(cache, [1, 2, 5, 6, 0]) == []


@pytest.mark.parametrize("hash_function", [hash_block, lambda parent, tokens: sum(tokens) % 3])
def test_every_block_found_holds_the_tokens_asked_for(hash_function):
    """Whatever was published before, with good keys or bad ones, a match is the true prefix."""
    for seed in range(200):
        rng = random.Random(seed)
        cache, contents = PrefixCache(2, hash_function), {}
        for _ in range(rng.randint(1, 8)):
            token_ids = rng.choices(range(3), k=rng.randint(1, 9))
            for index, entry in enumerate(cache.match(token_ids)):
                assert contents[entry.block_id] == token_ids[: 2 * (index + 1)], f"seed {seed}"
            block_ids = [len(contents) + index for index in range(len(token_ids) // 2)]
            for index, block_id in enumerate(block_ids):
                contents[block_id] = token_ids[: 2 * (index + 1)]
            publish(cache, token_ids, block_ids)
