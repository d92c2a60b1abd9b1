"""Blocks: how many are needed, who owns which, what is free."""

import pytest

from minivllm.block_manager import BlockManager, BlockPool, NoPrefixes, blocks_for
from minivllm.prefix_cache import PrefixCache
from minivllm.request import Request, SamplingParams


def make_request(token_ids, request_id="r"):
    """A request with these tokens, all of them prompt."""
    return Request(
        request_id=request_id,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(),
        max_num_tokens=1000,
    )


def make_manager(num_blocks=8, block_size=4, watermark=0.0, cached=True):
    """A block manager, with a prefix cache unless told otherwise."""
    prefixes = PrefixCache(block_size) if cached else None
    return BlockManager(num_blocks, block_size, watermark, prefixes)


def run(manager, request):
    """Give the request its blocks and publish them, as if its prompt had been computed."""
    manager.reuse_prefix(request)
    assert manager.allocate(request, request.num_tokens)
    manager.publish(request, request.num_tokens)


# -- blocks_for --


def test_a_partial_block_counts_as_a_whole_one():
    """The 33rd token needs a third block of 16."""
    assert blocks_for(33, 16) == 3
    assert blocks_for(1, 16) == 1


def test_a_full_block_needs_no_extra_one():
    """32 tokens fill two blocks of 16 exactly."""
    assert blocks_for(32, 16) == 2
    assert blocks_for(0, 16) == 0


# -- BlockPool --


def test_allocate_takes_from_the_front():
    """Blocks are given away in the order of the queue, each with one owner."""
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1]
    assert pool.ref_counts == [1, 1, 0, 0]
    assert list(pool.free_ids) == [2, 3]


def test_allocate_is_all_or_nothing():
    """A request for more than is free takes nothing."""
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check()


def test_a_shared_block_is_free_only_after_its_last_owner_left():
    """Reference counts go up with each owner and down with each free."""
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    pool.share(block_ids)
    pool.free(block_ids)
    assert pool.num_free == 1
    pool.free(block_ids)
    assert pool.num_free == 2
    pool.check()


def test_sharing_a_free_block_takes_it_out_of_the_queue():
    """A hit on a block without an owner makes it owned; nobody else may be given it."""
    pool = BlockPool(3)
    pool.share([1])
    pool.check()
    assert pool.allocate(2) == [0, 2]


def test_blocks_without_content_are_used_before_cached_ones():
    """Whatever the order of freeing, content that can be reused is kept longest."""
    prefixes = PrefixCache(1)
    pool = BlockPool(3, prefixes)
    pool.allocate(3)
    prefixes.insert(None, (7,), 0)
    pool.free([0])
    pool.free([2])
    pool.free([1])
    assert list(pool.free_ids) == [1, 2, 0]


def test_the_longest_unused_content_is_given_up_first():
    """Least recently used: a block that was shared in between is young again."""
    prefixes = PrefixCache(1)
    pool = BlockPool(3, prefixes)
    pool.allocate(3)
    for block_id in range(3):
        prefixes.insert(None, (block_id,), block_id)
    pool.free([0, 1, 2])
    pool.share([0])
    pool.free([0])
    assert pool.allocate(2) == [1, 2]
    assert prefixes.holds(0)


def test_a_block_given_away_loses_its_content():
    """A later lookup must not find keys and values that are being overwritten."""
    prefixes = PrefixCache(1)
    pool = BlockPool(1, prefixes)
    prefixes.insert(None, (7,), *pool.allocate(1))
    pool.free([0])
    assert prefixes.match([7, 8])
    pool.allocate(1)
    assert not prefixes.match([7, 8])


# -- BlockManager.allocate: when a block is needed --


@pytest.mark.parametrize(("num_tokens", "blocks"), [(3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_block_is_needed_exactly_when_a_token_starts_one(num_tokens, blocks):
    """Prompts of B-1, B, B+1, 2B and 2B+1 tokens."""
    manager = make_manager()
    request = make_request(range(num_tokens))
    assert manager.allocate(request, num_tokens)
    assert len(request.block_table) == blocks


@pytest.mark.parametrize("length", [3, 4, 7, 8])
def test_the_last_slot_of_a_block_is_filled_without_a_free_block(length):
    """With nothing free, a token inside a block is fine, one that starts a block is not."""
    manager = make_manager(num_blocks=blocks_for(length, 4))
    request = make_request(range(length))
    assert manager.allocate(request, length)
    assert manager.pool.num_free == 0
    fits = length % 4 != 0
    assert manager.allocate(request, length + 1) is fits
    assert len(request.block_table) == blocks_for(length, 4), "a refusal must not change the table"


def test_a_refused_allocation_takes_nothing():
    """All or nothing: three blocks missing, two free."""
    manager = make_manager(num_blocks=2)
    request = make_request(range(12))
    assert not manager.allocate(request, 12)
    assert request.block_table == []
    assert manager.pool.num_free == 2


def test_growing_keeps_the_blocks_in_front():
    """A table only grows at its end: the keys in the older blocks stay valid."""
    manager = make_manager()
    request = make_request(range(4))
    manager.allocate(request, 4)
    before = list(request.block_table)
    manager.allocate(request, 9)
    assert request.block_table[:1] == before
    assert len(set(request.block_table)) == 3


def test_watermark_blocks_are_kept_for_those_that_run():
    """Admission leaves the reserve, growth may use it."""
    manager = make_manager(num_blocks=10, watermark=0.2)
    newcomer = make_request(range(36))
    assert not manager.allocate(newcomer, 36, keep_watermark=True), "9 of 10 would leave 1"
    assert manager.allocate(newcomer, 32, keep_watermark=True), "8 of 10 leave 2"
    assert manager.allocate(newcomer, 40), "a running request may take the last two"


def test_admission_without_new_blocks_ignores_the_watermark():
    """A request whose tokens are all covered takes nothing, so it is always welcome."""
    manager = make_manager(num_blocks=2, watermark=0.5)
    request = make_request(range(8))
    assert manager.allocate(request, 8)
    assert manager.allocate(request, 8, keep_watermark=True)


# -- BlockManager and the prefix cache --


def test_equal_prompts_share_their_full_blocks():
    """The second request owns the first one's blocks too, and only its last one alone."""
    manager = make_manager()
    first, second = make_request(range(10), "a"), make_request(range(10), "b")
    run(manager, first)
    assert manager.reuse_prefix(second) == 8
    assert manager.allocate(second, 10)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    manager.check([first, second])


def test_a_fully_cached_prompt_still_leaves_its_last_token():
    """8 tokens in blocks of 4, all known: only 4 are reused."""
    manager = make_manager()
    run(manager, make_request(range(8), "a"))
    assert manager.reuse_prefix(make_request(range(8), "b")) == 4


def test_blocks_outlive_their_request_until_they_are_needed():
    """Freed blocks with content are free and found, until somebody takes them."""
    manager = make_manager(num_blocks=3)
    first = make_request(range(9), "a")
    run(manager, first)
    manager.free(first)
    assert manager.pool.num_free == 3
    assert len(manager.cached_blocks()) == 2
    again = make_request(range(9), "b")
    assert manager.reuse_prefix(again) == 8
    manager.free(again)
    other = make_request(range(100, 112), "c")
    run(manager, other)
    manager.free(other)
    assert manager.reuse_prefix(make_request(range(9), "d")) == 0


def test_the_tail_of_a_prefix_is_given_up_before_its_head():
    """One new block costs the last block of the cached chain, not the first."""
    manager = make_manager(num_blocks=3)
    first = make_request(range(13), "a")
    run(manager, make_request([], "none"))
    assert manager.allocate(first, 12)
    manager.publish(first, 12)
    manager.free(first)
    manager.allocate(make_request([99], "b"), 1)
    assert manager.reuse_prefix(make_request(range(13), "c")) == 8


def test_two_equal_prompts_in_one_step_free_every_block_once():
    """Both computed before either was published: counts are right and all comes back."""
    manager = make_manager()
    pair = [make_request(range(9), "a"), make_request(range(9), "b")]
    for request in pair:
        assert manager.reuse_prefix(request) == 0
        assert manager.allocate(request, 9)
    for request in pair:
        manager.publish(request, 9)
    manager.check(pair)
    for request in pair:
        manager.free(request)
    manager.check([])
    assert manager.pool.num_free == 8
    assert manager.reuse_prefix(make_request(range(9), "c")) == 8


def test_only_computed_full_blocks_are_published():
    """7 of 9 tokens computed: one block of 4 can be found."""
    manager = make_manager()
    request = make_request(range(9))
    manager.allocate(request, 9)
    manager.publish(request, 7)
    assert manager.reuse_prefix(make_request(range(9), "b")) == 4


def test_publish_goes_on_where_it_stopped():
    """Chunk after chunk of one prompt becomes known as one chain."""
    manager = make_manager()
    request = make_request(range(12))
    manager.allocate(request, 12)
    for num_tokens in (3, 4, 6, 12):
        manager.publish(request, num_tokens)
    assert manager.reuse_prefix(make_request(range(13), "b")) == 12


def test_publish_goes_on_behind_reused_blocks():
    """A longer prompt reuses two blocks and publishes its third one behind them."""
    manager = make_manager()
    run(manager, make_request(range(9), "a"))
    run(manager, make_request(range(13), "b"))
    assert manager.reuse_prefix(make_request(range(13), "c")) == 12


def test_publish_after_free_does_nothing():
    """A preempted request's step may be read after its blocks are gone."""
    manager = make_manager()
    request = make_request(range(8))
    manager.allocate(request, 8)
    manager.free(request)
    manager.publish(request, 8)
    assert manager.cached_blocks() == []


def test_without_a_prefix_cache_nothing_is_reused():
    """The null object: same calls, no hits."""
    manager = make_manager(cached=False)
    run(manager, make_request(range(9), "a"))
    assert manager.reuse_prefix(make_request(range(9), "b")) == 0
    assert isinstance(manager.prefixes, NoPrefixes)
    assert manager.cached_blocks() == []


def test_max_tokens_is_the_whole_pool():
    """What one request alone could have."""
    assert make_manager(num_blocks=8, block_size=4).max_tokens == 32


def test_check_notices_a_block_owned_twice():
    """The invariant checker must fail on what it exists for."""
    manager = make_manager()
    one, two = make_request(range(4), "a"), make_request(range(4), "b")
    manager.allocate(one, 4)
    two.block_table = list(one.block_table)
    with pytest.raises(AssertionError, match="2 owners"):
        manager.check([one, two])
    with pytest.raises(AssertionError, match="0 owners"):
        manager.check([])
