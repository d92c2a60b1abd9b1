"""Manage the blocks of the KV cache: how many a request needs, who owns them, which are free.

PagedAttention's bookkeeping (Kwon et al. 2023, section 4): memory is cut into blocks of equal
size, and each request has its own block table. Does not store keys and values (see `kv_cache`) or
find blocks by their content (see `prefix_cache`). Notebook 03.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from minivllm.request import Request


class Prefixes(Protocol):
    """What the block manager needs from a prefix cache: `prefix_cache.PrefixCache` (Notebook 04),
    or `NoPrefixes` if prefix caching is off."""

    def match(self, token_ids: Sequence[int]) -> Sequence[Any]:
        """Return the entries (each with a `block_id`) of the longest known prefix, without the
        block of the last token."""
        ...

    def insert(self, parent: Any, token_ids: Sequence[int], block_id: int) -> Any:
        """Add a computed block; return its entry, which is the parent of the next block's."""
        ...

    def forget(self, block_id: int) -> None:
        """Remove the block's content, which is about to be overwritten."""
        ...

    def holds(self, block_id: int) -> bool:
        """Whether the block's content can still be found."""
        ...


class NoPrefixes:
    """A prefix cache that is always empty, for engines without prefix caching."""

    def match(self, token_ids: Sequence[int]) -> Sequence[Any]:
        """Return an empty prefix: no block is known."""
        return ()

    def insert(self, parent: Any, token_ids: Sequence[int], block_id: int) -> None:
        """Do nothing: blocks are not stored."""

    def forget(self, block_id: int) -> None:
        """Do nothing: there is nothing to remove."""

    def holds(self, block_id: int) -> bool:
        """Return False: no block can be found."""
        return False


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks `num_tokens` tokens need; the last one may be partly empty.

    `blocks_for(33, 16) == 3`, `blocks_for(32, 16) == 2`, `blocks_for(0, 16) == 0`.
    """
    # Integer division rounds down, so negate twice to round up.
    return -(-num_tokens // block_size)


class BlockPool:
    """The reference count of every block, and the queue of free blocks.

    Invariant: a block is in `free_ids` exactly if its reference count is 0. `free_ids` is a queue:
    blocks without reusable content are at the front and are taken first; behind them are blocks
    whose content can still be found, the least recently used first.
    """

    def __init__(self, num_blocks: int, prefixes: Prefixes | None = None) -> None:
        self.prefixes: Prefixes = prefixes if prefixes is not None else NoPrefixes()
        self.ref_counts = [0] * num_blocks
        # A free block whose content is reused leaves the queue from the middle, which an ordered
        # dict supports in O(1).
        self.free_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def __repr__(self) -> str:
        return f"BlockPool({self.num_free} of {self.num_blocks} blocks free)"

    @property
    def num_blocks(self) -> int:
        """Number of blocks, free or not."""
        return len(self.ref_counts)

    @property
    def num_free(self) -> int:
        """Number of blocks without an owner, including those with reusable content."""
        return len(self.free_ids)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks from the front of the queue; return their ids, in order.

        Each has one owner afterwards, and its old content can no longer be found. Raises ValueError
        ("3 blocks wanted, 2 free") if fewer are free, and changes nothing then.
        """
        # Check first: an allocation that fails halfway would leak blocks.
        if num_blocks > self.num_free:
            raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
        block_ids = [self.free_ids.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
            self.prefixes.forget(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one owner to each block. Their content stays; free blocks leave the queue."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                del self.free_ids[block_id]
            self.ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Remove one owner from each block. Blocks without owners are free and keep their content.

        `block_ids` can be any iterable. Blocks whose content can still be found go to the back of
        the queue, in order. All others go to the front, in any order.
        """
        for block_id in block_ids:
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self.free_ids[block_id] = None
                self.free_ids.move_to_end(block_id, last=self.prefixes.holds(block_id))

    def check(self) -> None:
        """Assert the invariant."""
        for block_id, count in enumerate(self.ref_counts):
            assert count >= 0, f"block {block_id} has {count} owners"
            assert (block_id in self.free_ids) == (count == 0), f"block {block_id}: count {count}"


class BlockManager:
    """Give requests the blocks their tokens need. Implements the scheduler's `Memory`.

    Invariant: a block's reference count is the number of block tables that contain it, and no
    table contains a block twice.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        watermark: float = 0.0,
        prefixes: Prefixes | None = None,
    ) -> None:
        """`block_size`: in tokens. `watermark`: share of blocks that admission leaves free, 0 to 1;
        the number of blocks is rounded down."""
        self.pool = BlockPool(num_blocks, prefixes)
        self.prefixes = self.pool.prefixes
        self.block_size = block_size
        self.num_watermark_blocks = int(watermark * num_blocks)

    def __repr__(self) -> str:
        return f"BlockManager({self.pool!r}, block_size={self.block_size})"

    @property
    def max_tokens(self) -> int:
        """Number of tokens that fit if one request owns all blocks."""
        return self.pool.num_blocks * self.block_size

    def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
        """Return whether `num_blocks` blocks can be taken. With `keep_watermark`, at least
        `num_watermark_blocks` must be free afterwards. Taking 0 or fewer is always possible.
        Example: 10 blocks are free and 2 reserved: 8 can be taken with the watermark, 9 can't."""
        # Running requests need a new block now and then. Without a reserve, admission takes the
        # last one, and the next step must preempt a request.
        reserve = self.num_watermark_blocks if keep_watermark else 0
        return num_blocks <= 0 or num_blocks + reserve <= self.pool.num_free

    def reuse_prefix(self, request: Request) -> int:
        """Start the request's block table with the known blocks of its tokens; return how many
        tokens these contain, always fewer than the request has.

        Other requests may own these blocks too, so they must only be read.
        """
        entries = self.prefixes.match(request.token_ids)
        request.block_table = [entry.block_id for entry in entries]
        request.num_published_blocks = len(entries)
        request.last_published = entries[-1] if entries else None
        self.pool.share(request.block_table)
        return len(entries) * self.block_size

    def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
        """Extend the request's block table to cover its first `num_tokens` tokens.

        Returns False and changes nothing if the blocks for that can't be taken. A table that
        covers more stays as it is. With blocks of 16, 16 tokens need one block and 17 need two.
        """
        missing = blocks_for(num_tokens, self.block_size) - len(request.block_table)
        if not self.can_allocate(missing, keep_watermark):
            return False
        if missing > 0:
            request.block_table += self.pool.allocate(missing)
        return True

    def publish(self, request: Request, num_tokens: int) -> None:
        """Insert the blocks that the request's first `num_tokens` tokens fill into `prefixes`.

        These tokens are computed; the request may have more. Each block is inserted once, with the
        entry of the previous block as parent. With blocks of 16 and 40 tokens computed, these are
        blocks 0 and 1 of the table; none if the request was freed in the meantime.
        """
        num_full = min(num_tokens // self.block_size, len(request.block_table))
        for index in range(request.num_published_blocks, num_full):
            start = index * self.block_size
            tokens = request.token_ids[start : start + self.block_size]
            request.last_published = self.prefixes.insert(
                request.last_published, tokens, request.block_table[index]
            )
            request.num_published_blocks = index + 1

    def free(self, request: Request) -> None:
        """Return all blocks of the request to the pool; their content can still be found.

        Afterwards the request owns no blocks and has published none. The last block of its table
        is reused first.
        """
        # A prefix without its tail is still useful; a tail without its head is not.
        self.pool.free(reversed(request.block_table))
        request.block_table = []
        request.num_published_blocks = 0
        request.last_published = None

    def cached_blocks(self) -> list[int]:
        """Return the free blocks whose content can still be found, in the order of reuse."""
        return [block_id for block_id in self.pool.free_ids if self.prefixes.holds(block_id)]

    def check(self, requests: Iterable[Request]) -> None:
        """Assert the invariant. `requests`: all requests that own blocks."""
        self.pool.check()
        owners: Counter[int] = Counter()
        for request in requests:
            table = request.block_table
            assert len(set(table)) == len(table), f"{request.request_id} has a block twice"
            owners.update(table)
        for block_id, count in enumerate(self.pool.ref_counts):
            assert count == owners[block_id], (
                f"block {block_id}: count {count}, {owners[block_id]} owners"
            )
