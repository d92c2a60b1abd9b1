"""The prefix cache finds a block exactly by its content and by everything before it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.prefix_cache import PrefixCache, full_blocks, hash_block


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


def test_key_depends_on_tokens_and_on_all_that_came_before():
    """Equal tokens after another beginning are another block."""
    assert hash_block(0, (7, 8)) == hash_block(0, (7, 8))
    assert hash_block(0, (7, 8)) != hash_block(0, (8, 7))
    assert hash_block(0, (7, 8)) != hash_block(1, (7, 8))


def test_only_whole_blocks_are_cut():
    """A block that is not full yet gets more tokens later, so it has no content to find."""
    assert full_blocks([1, 2, 3, 4, 5], 2) == [(1, 2), (3, 4)]
    assert full_blocks([1], 2) == []
    assert full_blocks([1, 2], 2) == [(1, 2)]


def test_longest_known_prefix_is_found():
    """Blocks are found up to the first that differs."""
    cache = PrefixCache(2)
    publish(cache, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert found(cache, [1, 2, 3, 4, 9, 9, 9]) == [10, 11]
    assert found(cache, [9, 2, 3, 4]) == []


def test_last_token_is_always_computed():
    """A prompt whose blocks are all known still leaves its last token to compute."""
    cache = PrefixCache(2)
    publish(cache, [1, 2, 3, 4], [10, 11])
    assert found(cache, [1, 2, 3, 4]) == [10], "the block with the last token must not be reused"
    assert found(cache, [1, 2, 3, 4, 5]) == [10, 11]
    assert found(cache, [1, 2]) == []
    assert found(cache, [1]) == []


def test_equal_block_after_another_beginning_is_not_found():
    """The same tokens at another place have other keys and values."""
    cache = PrefixCache(2)
    publish(cache, [1, 2, 3, 4], [10, 11])
    assert found(cache, [3, 4, 1, 2, 0]) == []
    assert found(cache, [9, 9, 3, 4, 0]) == []


def test_content_known_already_keeps_its_first_block():
    """Two equal prompts computed in one step: the second one's blocks stay unknown."""
    cache = PrefixCache(2)
    first = publish(cache, [1, 2, 3, 4], [10, 11])
    second = publish(cache, [1, 2, 3, 4], [20, 21])
    assert second[1] is first[1]
    assert not cache.holds(20)
    assert not cache.holds(21)
    assert found(cache, [1, 2, 3, 4, 5]) == [10, 11]


def test_chain_goes_on_behind_a_block_of_somebody_else():
    """A request whose first block was known already publishes its second one behind it."""
    cache = PrefixCache(2)
    publish(cache, [1, 2], [10])
    publish(cache, [1, 2, 3, 4], [20, 21])
    assert found(cache, [1, 2, 3, 4, 5]) == [10, 21]


def test_key_of_a_block_contains_its_parents_key():
    """Without it, every system would find block [3, 4] of any prompt under one key."""
    cache = PrefixCache(2)
    first, second = publish(cache, [1, 2, 3, 4], [10, 11])
    assert second.key == hash_block(first.key, (3, 4))
    assert cache.key_of(None, (3, 4)) != second.key


def test_forgotten_block_is_not_found():
    """A block that gets other content loses its old one."""
    cache = PrefixCache(2)
    publish(cache, [1, 2, 3, 4], [10, 11])
    cache.forget(11)
    cache.check()
    assert found(cache, [1, 2, 3, 4, 5]) == [10]
    assert not cache.holds(11)
    cache.forget(11)
    cache.forget(99)


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


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


@given(PROMPTS, st.sampled_from([hash_block, lambda parent, tokens: sum(tokens) % 3]))
def test_every_block_found_holds_the_tokens_asked_for(prompts, hash_function):
    """Whatever was published before, with good keys or bad ones, a match is the true prefix."""
    cache = PrefixCache(2, hash_function)
    contents = {}
    next_id = 0
    for token_ids in prompts:
        for index, entry in enumerate(cache.match(token_ids)):
            assert contents[entry.block_id] == token_ids[: 2 * (index + 1)]
        count = len(full_blocks(token_ids, 2))
        block_ids = range(next_id, next_id + count)
        next_id += count
        for index, block_id in enumerate(block_ids):
            contents[block_id] = token_ids[: 2 * (index + 1)]
        publish(cache, token_ids, block_ids)
