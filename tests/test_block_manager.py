"""Blocks: how many are needed, who owns them, which are free.

Tests with an `exercise` mark are the checks of notebook 03 and, for `publish` and
`BlockManager.free`, of notebook 04. They use nothing that a later exercise builds, so each can
pass before the next one is started. Learners read the message of a failed assert as a hint.
"""

import pytest

from minivllm.block_manager import BlockManager, BlockPool, NoPrefixes, blocks_for
from minivllm.prefix_cache import PrefixCache
from minivllm.request import Request, SamplingParams


class Contents(NoPrefixes):
    """A stand-in for a prefix cache: the given blocks hold content that can be found."""

    def __init__(self, *block_ids):
        self.block_ids = set(block_ids)

    def holds(self, block_id):
        return block_id in self.block_ids

    def forget(self, block_id):
        self.block_ids.discard(block_id)


class Recorder(NoPrefixes):
    """A prefix cache that only records what is inserted."""

    def __init__(self):
        self.inserts = []

    def insert(self, parent, token_ids, block_id):
        self.inserts.append((parent, list(token_ids), block_id))
        return f"node {block_id}"


def error_of(function, *args):
    """The exception that a call raises, or None."""
    try:
        function(*args)
    except Exception as error:
        return error
    return None


def make_request(token_ids, request_id="r"):
    """A request with these tokens, all of them prompt."""
    return Request(
        request_id=request_id,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(),
        max_num_tokens=1000,
    )


def make_manager(num_blocks=8, block_size=4, watermark=0.0, cached=False):
    """A block manager, by default without a prefix cache."""
    prefixes = PrefixCache(block_size) if cached else None
    return BlockManager(num_blocks, block_size, watermark, prefixes)


def run(manager, request):
    """Give the request its blocks and publish them, as if its prompt had been computed."""
    manager.reuse_prefix(request)
    assert manager.allocate(request, request.num_tokens)
    manager.publish(request, request.num_tokens)


# -- blocks_for --


@pytest.mark.exercise("block_manager.blocks_for")
def test_a_partial_block_counts_as_a_whole_one():
    """The 33rd token needs a third block of 16."""
    assert blocks_for(33, 16) == 3, "the 33rd token needs a third block: do you round down?"
    assert blocks_for(1, 16) == 1, "one token needs a block too: do you round to the nearest?"


@pytest.mark.exercise("block_manager.blocks_for")
def test_full_blocks_need_no_extra_one():
    """32 tokens fill two blocks of 16 exactly."""
    assert blocks_for(32, 16) == 2, "32 tokens fill 2 blocks exactly: do you always add one?"
    assert blocks_for(16, 16) == 1, "16 tokens fill 1 block exactly: do you always add one?"


@pytest.mark.exercise("block_manager.blocks_for")
def test_no_tokens_need_no_block():
    """A request without computed tokens owns nothing."""
    assert blocks_for(0, 16) == 0, "0 tokens need 0 blocks: do you start counting at 1?"


@pytest.mark.exercise("block_manager.blocks_for")
def test_any_block_size_works():
    """Not every engine has blocks of 16, and a count is a whole number."""
    assert blocks_for(9, 4) == 3, "9 tokens in blocks of 4: is a block size hard-coded?"
    assert blocks_for(257, 256) == 2, (
        "257 tokens are one more than a block of 256 holds: how do you round?"
    )
    number = blocks_for(33, 16)
    assert isinstance(number, int), f"{number!r} is not an int: do you divide with / somewhere?"
    for block_size in (1, 2, 3, 7, 256):
        for num_tokens in range(3 * block_size + 1):
            number = blocks_for(num_tokens, block_size)
            assert (number - 1) * block_size < num_tokens <= number * block_size, (
                "all tokens must fit, and one block fewer must be too few: for which sizes?"
            )


# -- BlockPool.allocate --


@pytest.mark.exercise("block_manager.BlockPool.allocate")
def test_allocate_takes_from_the_front():
    """Blocks are allocated in the order of the queue, each with one owner."""
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1], (
        "blocks come from the front of the queue: which end does popitem take by default?"
    )
    assert list(pool.free_ids) == [2, 3], "allocated blocks leave the queue: are they still in it?"
    assert pool.ref_counts == [1, 1, 0, 0], "an allocated block has one owner: did you count it?"
    assert pool.allocate(1) == [2], "the next call continues where the last one stopped"


@pytest.mark.exercise("block_manager.BlockPool.allocate")
def test_the_order_is_that_of_the_queue():
    """After some use, the queue is not in the order of the block numbers."""
    pool = BlockPool(4)
    for block_id in (0, 3, 1):
        pool.free_ids.move_to_end(block_id)
    assert pool.allocate(3) == [2, 0, 3], (
        "the queue is [2, 0, 3, 1]: do you sort, or choose by block number?"
    )
    assert list(pool.free_ids) == [1], "blocks 2, 0 and 3 are allocated: what is left in the queue?"


@pytest.mark.exercise("block_manager.BlockPool.allocate")
def test_allocate_is_all_or_nothing():
    """A request for more blocks than are free takes none."""
    pool = BlockPool(2)
    error = error_of(pool.allocate, 3)
    assert isinstance(error, ValueError), "3 blocks wanted, 2 free: do you raise a ValueError?"
    assert pool.num_free == 2, "a refused call takes nothing: do you compare before taking?"
    assert pool.ref_counts == [0, 0], "a refused call changes no count: do you compare first?"
    assert list(pool.free_ids) == [0, 1], (
        "a refused call keeps the queue in order: do you put blocks back?"
    )
    pool = BlockPool(4)
    pool.allocate(2)
    error = error_of(pool.allocate, 3)
    assert isinstance(error, ValueError), (
        "3 blocks wanted, 2 of 4 free: do you compare with the free blocks, or with all?"
    )
    assert list(pool.free_ids) == [2, 3], "a refused call takes nothing: do you compare first?"


@pytest.mark.exercise("block_manager.BlockPool.allocate")
def test_the_last_block_can_be_taken():
    """Every block can be in use; taking none is fine too."""
    pool = BlockPool(2)
    assert pool.allocate(0) == [], "0 blocks are wanted: what do you return?"
    error = error_of(pool.allocate, 2)
    assert error is None, "2 of 2 blocks are free: do you compare with >= instead of >?"
    assert pool.num_free == 0, "both blocks are allocated now"


@pytest.mark.exercise("block_manager.BlockPool.allocate")
def test_an_allocated_block_loses_its_content():
    """A later lookup must not find keys and values that are being overwritten."""
    contents = Contents(0, 1, 2)
    BlockPool(3, contents).allocate(2)
    assert contents.block_ids == {2}, (
        "the new owner overwrites blocks 0 and 1: do you tell the prefix cache to forget them?"
    )


@pytest.mark.exercise("block_manager.BlockPool.allocate")
def test_a_refusal_names_both_numbers():
    """The message says how many were wanted and how many are free."""
    pool = BlockPool(4)
    pool.allocate(2)
    error = str(error_of(pool.allocate, 3))
    assert "3" in error, "3 blocks were wanted: is that in the text of your ValueError?"
    assert "2" in error, "2 of 4 blocks were free: is that in the text of your ValueError?"


@pytest.mark.exercise("block_manager.BlockPool.allocate")
def test_a_refusal_forgets_no_content():
    """Two blocks with content, three wanted."""
    contents = Contents(0, 1)
    error_of(BlockPool(2, contents).allocate, 3)
    assert contents.block_ids == {0, 1}, (
        "a refused call forgot content: do you call forget before you know that it fits?"
    )


# -- BlockPool.share --


@pytest.mark.exercise("block_manager.BlockPool.share")
def test_sharing_adds_an_owner():
    """The count of each block goes up by one with each call."""
    pool = BlockPool(3)
    pool.allocate(2)
    error = error_of(pool.share, [0, 1])
    assert error is None, "an owned block isn't in the queue: do you remove it anyway?"
    pool.share([1])
    assert pool.ref_counts == [2, 3, 0], "each call adds one owner: do you add, or set the count?"
    assert list(pool.free_ids) == [2], "block 2 wasn't shared: is it still free?"


@pytest.mark.exercise("block_manager.BlockPool.share")
def test_sharing_a_free_block_removes_it_from_the_queue():
    """It has an owner now, so it can't be allocated."""
    pool = BlockPool(3)
    pool.share([1])
    assert list(pool.free_ids) == [0, 2], (
        "block 1 has an owner now: is it still in the queue, where it could be allocated?"
    )
    assert pool.ref_counts == [0, 1, 0], "block 1 had no owner: how many does it have now?"


@pytest.mark.exercise("block_manager.BlockPool.share")
def test_owned_and_free_blocks_can_be_shared_in_one_call():
    """Block 0 is owned, blocks 3 and 1 are free; they come as an iterator."""
    pool = BlockPool(4)
    pool.allocate(1)
    error = error_of(pool.share, iter([3, 0, 1]))
    assert error is None, "blocks 3 and 1 are free, block 0 is owned: do you look at each block?"
    assert pool.ref_counts == [2, 1, 0, 1], "each of 3, 0 and 1 gets one more owner"
    assert list(pool.free_ids) == [2], "only block 2 is still free: do you look at each block?"


@pytest.mark.exercise("block_manager.BlockPool.share")
def test_sharing_keeps_the_content():
    """The content is the reason for sharing."""
    contents = Contents(0, 1)
    BlockPool(2, contents).share([0])
    assert contents.block_ids == {0, 1}, "a shared block is only read: why forget its content?"


# -- BlockPool.free --


@pytest.mark.exercise("block_manager.BlockPool.free")
def test_a_block_without_owners_is_free():
    """Allocated blocks return to the queue."""
    pool = BlockPool(3)
    pool.free(pool.allocate(2))
    assert pool.ref_counts == [0, 0, 0], "each block loses one owner: do you count down?"
    assert sorted(pool.free_ids) == [0, 1, 2], "a block without owners goes back into the queue"


@pytest.mark.exercise("block_manager.BlockPool.free")
def test_a_shared_block_is_free_after_its_last_owner_left():
    """Reference counts go up with each owner and down with each free."""
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    pool.share(block_ids)
    pool.free(block_ids)
    assert pool.num_free == 1, "the other owner still reads block 0: is it free already?"
    assert pool.ref_counts == [1, 0], "one of two owners left: do you subtract one, or all?"
    pool.free(block_ids)
    assert pool.num_free == 2, "the last owner has left: is block 0 free?"
    pool.check()


@pytest.mark.exercise("block_manager.BlockPool.free")
def test_a_block_with_several_owners_left_is_not_free():
    """Three owners, and one of them leaves."""
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    pool.share(block_ids * 2)
    pool.free(block_ids)
    assert pool.ref_counts == [2, 0], "one of three owners left: do you subtract one?"
    assert list(pool.free_ids) == [1], "two owners still read block 0: is it in the queue?"


@pytest.mark.exercise("block_manager.BlockPool.free")
def test_blocks_without_content_are_used_before_cached_ones():
    """Content that can be reused is kept longest, whatever the order of freeing."""
    contents = Contents()
    pool = BlockPool(3, contents)
    pool.allocate(3)
    contents.block_ids.add(0)  # computed meanwhile, and published
    pool.free([0, 2, 1])
    assert list(pool.free_ids)[-1] == 0, (
        "of blocks 0, 2 and 1, only 0 can still be found: does it go to the back of the queue?"
    )
    pool.free(pool.allocate(1))
    assert list(pool.free_ids)[-1] == 0, (
        "a block without content was freed: does it go to the front, before cached block 0?"
    )


@pytest.mark.exercise("block_manager.BlockPool.free")
def test_freeing_too_often_is_noticed():
    """Freeing a block without an owner is a bug: an error, or a count that shows it."""
    pool = BlockPool(2)
    error = error_of(pool.free, [0]) or error_of(pool.check)
    assert error is not None, "block 0 had no owner: do you hide that by stopping at 0?"


@pytest.mark.exercise("block_manager.BlockPool.free")
def test_freeing_keeps_the_content():
    """A free block can be found until it is allocated."""
    contents = Contents()
    pool = BlockPool(2, contents)
    block_ids = pool.allocate(2)
    contents.block_ids.update(block_ids)
    pool.free(block_ids)
    assert contents.block_ids == {0, 1}, (
        "content stays until the block is allocated: why forget it?"
    )


@pytest.mark.exercise("block_manager.BlockPool.free")
def test_the_least_recently_used_content_is_given_up_first():
    """A block that was shared in between was used more recently."""
    contents = Contents()
    pool = BlockPool(3, contents)
    contents.block_ids.update(pool.allocate(3))
    pool.free([1, 2, 0])
    assert list(pool.free_ids) == [1, 2, 0], (
        "blocks 1, 2 and 0 are freed in this order: are they in the queue in the same order?"
    )
    pool.share([1])
    pool.free([1])
    assert list(pool.free_ids) == [2, 0, 1], (
        "block 1 was used last: is it at the back of the queue?"
    )


@pytest.mark.exercise("block_manager.BlockPool.free")
def test_blocks_can_be_any_iterable():
    """`BlockManager.free` passes an iterator, and that can be read once."""
    pool = BlockPool(3)
    block_ids = pool.allocate(3)
    error = error_of(pool.free, reversed(block_ids))
    assert error is None, "reversed(...) has no len and no [0]: do you iterate with `for`?"
    assert pool.ref_counts == [0, 0, 0], "each block loses one owner: do you count down?"
    assert sorted(pool.free_ids) == [0, 1, 2], (
        "reversed(...) can be read once: do you iterate over block_ids a second time?"
    )


@pytest.mark.exercise("block_manager.BlockPool.free")
def test_each_block_is_judged_by_its_own_count():
    """Blocks 0 and 2 are shared, block 1 isn't."""
    pool = BlockPool(3)
    pool.allocate(3)
    pool.share([0, 2])
    pool.free([2, 1, 0])
    assert pool.ref_counts == [1, 0, 1], (
        "blocks 2, 1 and 0 each lose one owner: do you stop at the first shared one?"
    )
    assert list(pool.free_ids) == [1], (
        "only block 1 lost its last owner: do you look at each count?"
    )


# -- BlockManager.can_allocate --


@pytest.mark.exercise("block_manager.BlockManager.can_allocate")
def test_every_free_block_can_be_taken():
    """Without a watermark, all free blocks can be taken."""
    manager = make_manager(num_blocks=3)
    manager.pool.allocate(1)
    assert manager.can_allocate(2, False), "2 of 3 blocks are free and 2 wanted: is it < or <=?"
    assert not manager.can_allocate(3, False), "2 blocks are free: do you count owned blocks too?"
    assert manager.pool.num_free == 2, "this method only answers: does it take blocks?"


@pytest.mark.exercise("block_manager.BlockManager.can_allocate")
def test_admission_leaves_the_watermark_free():
    """10 blocks, a fifth of them reserved: a new request gets 8 at most."""
    manager = make_manager(num_blocks=10, watermark=0.2)
    assert not manager.can_allocate(9, True), "9 of 10 leave 1, the watermark is 2: is it kept?"
    assert manager.can_allocate(8, True), "8 of 10 leave exactly the watermark: is it < or <=?"


@pytest.mark.exercise("block_manager.BlockManager.can_allocate")
def test_the_watermark_counts_among_the_free_blocks():
    """10 blocks, 5 of them owned, 2 reserved: a new request gets 3 at most."""
    manager = make_manager(num_blocks=10, watermark=0.2)
    manager.pool.allocate(5)
    assert not manager.can_allocate(4, True), (
        "5 blocks are free and 2 of them reserved: do you use num_free and num_watermark_blocks?"
    )
    assert manager.can_allocate(3, True), "3 of 5 free blocks leave the watermark of 2"


@pytest.mark.exercise("block_manager.BlockManager.can_allocate")
def test_growth_may_use_the_watermark():
    """It is there for running requests."""
    manager = make_manager(num_blocks=10, watermark=0.2)
    assert manager.can_allocate(10, False), (
        "the watermark is for running requests: do you keep it from them, too?"
    )


@pytest.mark.exercise("block_manager.BlockManager.can_allocate")
def test_taking_nothing_is_always_possible():
    """Neither an empty pool nor the watermark refuses a request that needs no block."""
    manager = make_manager(num_blocks=4, watermark=0.5)
    manager.pool.allocate(4)
    assert manager.can_allocate(0, False), "0 blocks are wanted: what could be missing?"
    assert not manager.can_allocate(1, False), "1 block is wanted and none is free"
    assert manager.can_allocate(0, True), "0 blocks are wanted: does the watermark refuse them?"
    assert manager.can_allocate(-1, True), (
        "a table longer than needed wants fewer than 0 blocks: do you compare with exactly 0?"
    )


@pytest.mark.exercise("block_manager.BlockManager.can_allocate")
def test_cached_blocks_without_an_owner_are_free():
    """Content that could be reused is not a reason to refuse a request."""
    manager = BlockManager(2, 4, prefixes=Contents(0, 1))
    assert manager.can_allocate(2, False), (
        "cached blocks without an owner are free: do you subtract them?"
    )


# -- BlockManager.allocate: when a block is needed --


@pytest.mark.exercise("block_manager.BlockManager.allocate")
@pytest.mark.parametrize(("num_tokens", "blocks"), [(3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_block_is_needed_exactly_when_a_token_starts_one(num_tokens, blocks):
    """Prompts of B-1, B, B+1, 2B and 2B+1 tokens."""
    manager = make_manager()
    request = make_request(range(num_tokens))
    assert manager.allocate(request, num_tokens), "8 blocks of 4 are free: does this fit?"
    assert len(request.block_table) == blocks, (
        f"{num_tokens} tokens in blocks of 4 need {blocks}: does the table get exactly that many?"
    )


@pytest.mark.exercise("block_manager.BlockManager.allocate")
def test_a_growing_request_gets_a_block_at_each_boundary():
    """Token by token, as in decode: tokens 1, 5 and 9 start a block of 4, the others don't."""
    manager = make_manager()
    request = make_request([])
    lengths = []
    for num_tokens in range(1, 10):
        manager.allocate(request, num_tokens)
        lengths.append(len(request.block_table))
    assert lengths == [1, 1, 1, 1, 2, 2, 2, 2, 3], (
        "the table already covers some tokens: do you take blocks for those again?"
    )


@pytest.mark.exercise("block_manager.BlockManager.allocate")
@pytest.mark.parametrize("length", [3, 4, 7, 8])
def test_the_last_slot_of_a_block_is_filled_without_a_free_block(length):
    """With no block free, a token inside a block fits, and one that starts a block doesn't."""
    manager = make_manager(num_blocks=blocks_for(length, 4))
    request = make_request(range(length))
    assert manager.allocate(request, length), f"{length} tokens fit this pool exactly"
    assert manager.pool.num_free == 0, f"{length} tokens use all blocks of this pool"
    fits = length % 4 != 0
    error = error_of(manager.allocate, request, length + 1)
    assert error is None, "with no block free, return False: do you ask can_allocate first?"
    assert manager.allocate(request, length + 1) is fits, (
        "no block is free: does the next token still fit into the last block of the table?"
    )
    assert len(request.block_table) == blocks_for(length, 4), "a refusal must not change the table"


@pytest.mark.exercise("block_manager.BlockManager.allocate")
def test_a_refused_allocation_takes_nothing():
    """All or nothing: three blocks missing, two free."""
    manager = make_manager(num_blocks=2)
    request = make_request(range(12))
    error = error_of(manager.allocate, request, 12)
    assert error is None, "3 blocks are missing, 2 free: do you return False instead of raising?"
    assert manager.allocate(request, 12) is False, "3 blocks are missing, 2 free: is it False?"
    assert request.block_table == [], "a refusal takes no block: do you ask for all at once?"
    assert list(manager.pool.free_ids) == [0, 1], "a refusal must leave the pool as it was"


@pytest.mark.exercise("block_manager.BlockManager.allocate")
def test_growing_keeps_the_blocks_in_front():
    """A table only grows at its end: the keys in the older blocks stay valid."""
    manager = make_manager()
    request = make_request(range(8))
    request.block_table = [7, 3]
    manager.pool.share([7, 3])
    manager.allocate(request, 16)
    assert request.block_table[:2] == [7, 3], (
        "a table grows at its end: do its first blocks keep their places?"
    )
    assert request.block_table[2:] == [0, 1], "16 tokens in blocks of 4: are there two new blocks?"
    assert manager.pool.ref_counts == [1, 1, 0, 1, 0, 0, 0, 1], (
        "each block of the table has one owner: do you allocate only the missing ones?"
    )


@pytest.mark.exercise("block_manager.BlockManager.allocate")
def test_fewer_tokens_than_the_table_covers_change_nothing():
    """Asking again takes nothing and returns nothing."""
    manager = make_manager()
    request = make_request(range(12))
    request.block_table = manager.pool.allocate(3)
    assert manager.allocate(request, 5), "5 tokens are covered by the 3 blocks of the table"
    assert request.block_table == [0, 1, 2], "the table covers more than 5 tokens: do you cut it?"
    assert manager.pool.num_free == 5, "3 of 8 blocks were in use: has that changed?"


@pytest.mark.exercise("block_manager.BlockManager.allocate")
def test_the_watermark_is_kept_for_running_requests():
    """Admission leaves it free, growth may use it."""
    manager = make_manager(num_blocks=10, watermark=0.2)
    request = make_request(range(36))
    assert not manager.allocate(request, 36, keep_watermark=True), (
        "9 of 10 blocks would leave 1, the watermark is 2: do you pass keep_watermark on?"
    )
    assert manager.allocate(request, 32, keep_watermark=True), "8 of 10 leave the watermark of 2"
    assert manager.allocate(request, 40), "a running request may take the last two blocks"


@pytest.mark.exercise("block_manager.BlockManager.allocate")
def test_admission_without_new_blocks_ignores_the_watermark():
    """A request whose tokens are covered takes nothing."""
    manager = make_manager(num_blocks=2, watermark=0.5)
    request = make_request(range(8))
    assert manager.allocate(request, 8), "2 blocks of 4 are free: do 8 tokens fit?"
    assert manager.allocate(request, 8, keep_watermark=True), (
        "the table covers all 8 tokens: does the watermark refuse them?"
    )


@pytest.mark.exercise("block_manager.BlockManager.allocate")
def test_a_refused_allocation_changes_nothing_else():
    """A table that covers some tokens, and content that can be found."""
    contents = Contents(1)
    manager = BlockManager(2, 4, prefixes=contents)
    request = make_request(range(12))
    request.block_table = [0]
    manager.pool.share([0])
    assert manager.allocate(request, 12) is False, "2 blocks are missing, 1 is free: is it False?"
    assert request.block_table == [0], "a refusal must leave the table as it was"
    assert contents.block_ids == {1}, "a refusal forgets no content: do you take before you ask?"
    assert manager.pool.ref_counts == [1, 0], "a refusal must leave the pool as it was"


# -- BlockManager.publish --


def make_recorded(token_ids, block_table):
    """A block manager (blocks of 4) with a recorder, the recorder, and a request with blocks."""
    recorder = Recorder()
    request = make_request(token_ids)
    request.block_table = block_table
    return BlockManager(10, 4, prefixes=recorder), recorder, request


@pytest.mark.exercise("block_manager.BlockManager.publish")
def test_full_blocks_become_known_as_one_chain():
    """Tokens, block and the node before, block after block."""
    manager, recorder, request = make_recorded(range(12), [7, 3, 5])
    manager.publish(request, 8)
    assert recorder.inserts == [(None, [0, 1, 2, 3], 7), ("node 7", [4, 5, 6, 7], 3)], (
        "8 tokens fill blocks 7 and 3: are their tokens right, and does each follow the last node?"
    )


@pytest.mark.exercise("block_manager.BlockManager.publish")
def test_a_block_that_is_not_full_is_not_published():
    """7 tokens computed: only the first block of 4 is complete."""
    manager, recorder, request = make_recorded(range(12), [7, 3, 5])
    manager.publish(request, 7)
    assert [block_id for _, _, block_id in recorder.inserts] == [7], (
        "7 tokens fill one block of 4 and start another: do you round up?"
    )


@pytest.mark.exercise("block_manager.BlockManager.publish")
def test_only_computed_tokens_count():
    """A token that was sampled last is known, its keys and values are not computed yet."""
    manager, recorder, request = make_recorded(range(8), [7, 3])
    manager.publish(request, 7)
    assert [block_id for _, _, block_id in recorder.inserts] == [7], (
        "the request knows 8 tokens, 7 are computed: do you publish what is not written yet?"
    )


@pytest.mark.exercise("block_manager.BlockManager.publish")
def test_publishing_goes_on_where_it_stopped():
    """Each block once: what is done in a step must not grow with the length of the text."""
    manager, recorder, request = make_recorded(range(12), [7, 3, 5])
    for num_tokens in (3, 4, 6, 8, 12):
        manager.publish(request, num_tokens)
    assert [block_id for _, _, block_id in recorder.inserts] == [7, 3, 5], (
        "each block is published once: do you begin behind the num_published_blocks, and count on?"
    )
    assert [parent for parent, _, _ in recorder.inserts] == [None, "node 7", "node 3"], (
        "a later call goes on behind the last node: is it kept in last_published?"
    )


@pytest.mark.exercise("block_manager.BlockManager.publish")
def test_reused_blocks_are_known_already():
    """Two blocks came out of the cache: the third follows the last of their nodes."""
    manager, recorder, request = make_recorded(range(12), [7, 3, 5])
    request.num_published_blocks, request.last_published = 2, "node of another request"
    manager.publish(request, 12)
    assert recorder.inserts == [("node of another request", [8, 9, 10, 11], 5)], (
        "two blocks were reused, one is new: does it follow last_published?"
    )


@pytest.mark.exercise("block_manager.BlockManager.publish")
def test_a_request_without_blocks_publishes_nothing():
    """It was preempted while its step was computed: its blocks belong to another one now."""
    manager, recorder, request = make_recorded(range(8), [])
    error = error_of(manager.publish, request, 8)
    assert error is None, "its blocks are gone: do you ask for more of them than the table has?"
    assert recorder.inserts == [], "whose blocks should these be?"


@pytest.mark.exercise("block_manager.BlockManager.publish")
def test_blocks_are_those_of_the_table_in_its_order():
    """Three blocks in no order, each behind the one before it."""
    manager, recorder, request = make_recorded(range(12), [7, 3, 5])
    manager.publish(request, 12)
    assert [block_id for _, _, block_id in recorder.inserts] == [7, 3, 5], (
        "the table is [7, 3, 5]: do its blocks keep their order?"
    )
    assert [parent for parent, _, _ in recorder.inserts] == [None, "node 7", "node 3"], (
        "the third block follows the node of the second: which parent do you pass?"
    )
    assert request.block_table == [7, 3, 5], "publishing leaves the table as it is"


# -- BlockManager.free --


@pytest.mark.exercise("block_manager.BlockManager.free")
def test_all_blocks_come_back():
    """What the request owned is free."""
    manager = make_manager(num_blocks=4)
    request = make_request(range(10))
    manager.allocate(request, 10)
    manager.free(request)
    assert manager.pool.num_free == 4, "all three blocks are free again: do you free each?"
    assert manager.pool.ref_counts == [0, 0, 0, 0], "it was the only owner: they have none now"


@pytest.mark.exercise("block_manager.BlockManager.free")
def test_the_tail_is_given_away_before_the_head():
    """A prefix is found from its head on: without the tail, the head is still of use."""
    manager = BlockManager(4, 4, prefixes=Contents(0, 1, 2))
    request = make_request(range(12))
    request.block_table = [0, 1, 2]
    manager.pool.share([0, 1, 2])
    manager.free(request)
    assert list(manager.pool.free_ids) == [3, 2, 1, 0], (
        "the next one is given blocks from the front: does the head of the chain go first?"
    )


@pytest.mark.exercise("block_manager.BlockManager.free")
def test_the_request_owns_nothing_afterwards():
    """It may come back, after a preemption, and begins from nothing."""
    manager = make_manager()
    request = make_request(range(8))
    manager.allocate(request, 8)
    request.num_published_blocks, request.last_published = 2, "node 1"
    manager.free(request)
    assert request.block_table == [], "it owns no block any more: is the table still full?"
    assert request.num_published_blocks == 0, "none of its next blocks is published: is it 0?"
    assert request.last_published is None, "its next block has no node before it: is it None?"


@pytest.mark.exercise("block_manager.BlockManager.free")
def test_freeing_twice_gives_back_once():
    """A request without blocks has none to give."""
    manager = make_manager(num_blocks=4)
    request = make_request(range(8))
    manager.allocate(request, 8)
    manager.free(request)
    error = error_of(manager.free, request)
    assert error is None, "the table is empty, so there is nothing to do"
    assert manager.pool.ref_counts == [0, 0, 0, 0], (
        "freed once more than owned: is the table emptied?"
    )


@pytest.mark.exercise("block_manager.BlockManager.free")
def test_contents_survive_their_request():
    """That is what makes it a cache."""
    contents = Contents(0, 1)
    manager = BlockManager(4, 4, prefixes=contents)
    request = make_request(range(8))
    request.block_table = [0, 1]
    manager.pool.share([0, 1])
    manager.free(request)
    assert contents.block_ids == {0, 1}, (
        "the next request may begin with the same tokens: why forget the blocks now?"
    )


@pytest.mark.exercise("block_manager.BlockManager.free")
def test_the_order_is_that_of_the_table():
    """Block numbers say nothing: the table is [2, 0, 1]."""
    manager = BlockManager(4, 4, prefixes=Contents(0, 1, 2))
    request = make_request(range(12))
    request.block_table = [2, 0, 1]
    manager.pool.share([2, 0, 1])
    manager.free(request)
    assert list(manager.pool.free_ids) == [3, 1, 0, 2], (
        "block 1 is the last of the table [2, 0, 1]: do you go by the blocks' numbers?"
    )


# -- the pool and the prefix cache --


def test_content_is_gone_once_its_block_is_allocated():
    """With the real prefix cache."""
    prefixes = PrefixCache(1)
    pool = BlockPool(1, prefixes)
    prefixes.insert(None, (7,), *pool.allocate(1))
    pool.free([0])
    assert prefixes.match([7, 8])
    pool.allocate(1)
    assert not prefixes.match([7, 8])


def test_content_is_kept_longest_and_the_oldest_goes_first():
    """Blocks without content are taken first, then content in the order of its last use."""
    prefixes = PrefixCache(1)
    pool = BlockPool(4, prefixes)
    pool.allocate(4)
    for block_id in range(3):
        prefixes.insert(None, (block_id,), block_id)
    pool.free([0, 1, 3, 2])
    pool.share([0])
    pool.free([0])
    assert pool.allocate(3) == [3, 1, 2]
    assert prefixes.holds(0)


# -- BlockManager and the prefix cache --


def test_equal_prompts_share_their_full_blocks():
    """The second request owns the first one's blocks too; only its last block is its own."""
    manager = make_manager(cached=True)
    first, second = make_request(range(10), "a"), make_request(range(10), "b")
    run(manager, first)
    assert manager.reuse_prefix(second) == 8
    assert manager.allocate(second, 10)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    manager.check([first, second])


def test_a_fully_cached_prompt_still_leaves_its_last_token():
    """8 tokens in blocks of 4, all known: only 4 are reused."""
    manager = make_manager(cached=True)
    run(manager, make_request(range(8), "a"))
    assert manager.reuse_prefix(make_request(range(8), "b")) == 4


def test_blocks_outlive_their_request_until_they_are_needed():
    """Freed blocks with content are free and found, until they are taken."""
    manager = make_manager(num_blocks=3, cached=True)
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
    manager = make_manager(num_blocks=3, cached=True)
    first = make_request(range(13), "a")
    run(manager, make_request([], "none"))
    assert manager.allocate(first, 12)
    manager.publish(first, 12)
    manager.free(first)
    manager.allocate(make_request([99], "b"), 1)
    assert manager.reuse_prefix(make_request(range(13), "c")) == 8


def test_two_equal_prompts_in_one_step_free_every_block_once():
    """Both computed before either was published: counts are right and all comes back."""
    manager = make_manager(cached=True)
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
    manager = make_manager(cached=True)
    request = make_request(range(9))
    manager.allocate(request, 9)
    manager.publish(request, 7)
    assert manager.reuse_prefix(make_request(range(9), "b")) == 4


def test_publish_goes_on_where_it_stopped():
    """Chunk after chunk of one prompt becomes known as one chain."""
    manager = make_manager(cached=True)
    request = make_request(range(12))
    manager.allocate(request, 12)
    for num_tokens in (3, 4, 6, 12):
        manager.publish(request, num_tokens)
    assert manager.reuse_prefix(make_request(range(13), "b")) == 12


def test_publish_goes_on_behind_reused_blocks():
    """A longer prompt reuses two blocks and publishes its third one behind them."""
    manager = make_manager(cached=True)
    run(manager, make_request(range(9), "a"))
    run(manager, make_request(range(13), "b"))
    assert manager.reuse_prefix(make_request(range(13), "c")) == 12


def test_publish_after_free_does_nothing():
    """A preempted request's step may be read after its blocks are gone."""
    manager = make_manager(cached=True)
    request = make_request(range(8))
    manager.allocate(request, 8)
    manager.free(request)
    manager.publish(request, 8)
    assert manager.cached_blocks() == []


def test_without_a_prefix_cache_nothing_is_reused():
    """Same calls, no hits."""
    manager = make_manager()
    run(manager, make_request(range(9), "a"))
    assert manager.reuse_prefix(make_request(range(9), "b")) == 0
    assert isinstance(manager.prefixes, NoPrefixes)
    assert manager.cached_blocks() == []


def test_max_tokens_is_the_whole_pool():
    """As many as one request could use alone."""
    assert make_manager(num_blocks=8, block_size=4).max_tokens == 32


def test_check_notices_a_block_owned_twice():
    """The checker must fail on a broken invariant."""
    manager = make_manager(cached=True)
    one, two = make_request(range(4), "a"), make_request(range(4), "b")
    manager.allocate(one, 4)
    two.block_table = list(one.block_table)
    with pytest.raises(AssertionError, match="2 owners"):
        manager.check([one, two])
    with pytest.raises(AssertionError, match="0 owners"):
        manager.check([])
