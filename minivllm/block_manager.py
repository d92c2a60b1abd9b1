"""Blocks of the KV cache: how many a request needs, who owns which, and which are free.

PagedAttention's bookkeeping (Kwon et al. 2023, section 4): memory is cut into blocks of equal
size and each request keeps a table of its own. Leaves out the keys and values themselves (the
runner's tensors) and how contents are found again (the prefix cache's). Notebook 03.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from minivllm.request import Request


class Prefixes(Protocol):
    """What the block manager asks of a prefix cache. Filled by `prefix_cache.PrefixCache`
    (Notebook 04), or by `NoPrefixes` where there is none."""

    def match(self, token_ids: Sequence[int]) -> Sequence[Any]:
        """Entries (each with a `block_id`) of the longest known prefix, last token excluded."""
        ...

    def insert(self, parent: Any, token_ids: Sequence[int], block_id: int) -> Any:
        """Make a computed block known; returns the entry to pass as the next one's parent."""
        ...

    def forget(self, block_id: int) -> None:
        """The block gets other content."""
        ...

    def holds(self, block_id: int) -> bool:
        """Whether the block's content can still be found."""
        ...


class NoPrefixes:
    """A prefix cache that knows nothing: with it, nobody has to ask whether there is one."""

    def match(self, token_ids: Sequence[int]) -> Sequence[Any]:
        """Nothing is known."""
        return ()

    def insert(self, parent: Any, token_ids: Sequence[int], block_id: int) -> None:
        """Nothing is kept."""

    def forget(self, block_id: int) -> None:
        """Nothing was kept."""

    def holds(self, block_id: int) -> bool:
        """Nothing can be found."""
        return False


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens fill, the last one perhaps in part.

    `blocks_for(33, 16) == 3`, `blocks_for(32, 16) == 2`, `blocks_for(0, 16) == 0`.
    """
    # Rounding up with whole numbers: minus the floor of the negative.
    return -(-num_tokens // block_size)


class BlockPool:
    """All blocks, by number.

    Invariant: a block is in `free_ids` exactly if its reference count is 0. The queue is
    taken from at the front: blocks without content stand there, blocks whose content can
    still be found stand behind them, the longest unused first.
    """

    def __init__(self, num_blocks: int, prefixes: Prefixes | None = None) -> None:
        self.prefixes: Prefixes = prefixes if prefixes is not None else NoPrefixes()
        self.ref_counts = [0] * num_blocks
        # An ordered dict is a queue that also lets go of an element in the middle in O(1):
        # needed when a free block with content finds a new owner.
        self.free_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def __repr__(self) -> str:
        return f"BlockPool({self.num_free} of {self.num_blocks} blocks free)"

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self.ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks without an owner, those with reusable content included."""
        return len(self.free_ids)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks from the front of the queue, each with one owner.

        Their old content is forgotten. If fewer are free, it takes nothing and raises a
        ValueError that names both numbers: "3 blocks wanted, 2 free".
        """
        # Ask before taking: a half-done allocation would leak.
        if num_blocks > self.num_free:
            raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
        block_ids = [self.free_ids.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
            self.prefixes.forget(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one owner to each block; one that had none is no longer free, content kept."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                del self.free_ids[block_id]
            self.ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Take one owner from each block; a block without owners is free again.

        With reusable content it goes to the back of the queue, else to the front.
        """
        for block_id in block_ids:
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self.free_ids[block_id] = None
                self.free_ids.move_to_end(block_id, last=self.prefixes.holds(block_id))

    def check(self) -> None:
        """Assert the invariant."""
        for block_id, count in enumerate(self.ref_counts):
            assert count >= 0, f"block {block_id} was freed more often than owned"
            assert (block_id in self.free_ids) == (count == 0), f"block {block_id}: count {count}"


class BlockManager:
    """Gives requests the blocks that their tokens need. Fills the scheduler's `Memory`.

    Invariant: a block's reference count is the number of block tables it stands in, and no
    table holds a block twice.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        watermark: float = 0.0,
        prefixes: Prefixes | None = None,
    ) -> None:
        """`block_size` in tokens; `watermark` is the share of blocks that admission leaves free."""
        self.pool = BlockPool(num_blocks, prefixes)
        self.prefixes = self.pool.prefixes
        self.block_size = block_size
        self.num_watermark_blocks = int(watermark * num_blocks)

    def __repr__(self) -> str:
        return f"BlockManager({self.pool!r}, block_size={self.block_size})"

    @property
    def max_tokens(self) -> int:
        """Tokens that fit if one request owns every block."""
        return self.pool.num_blocks * self.block_size

    def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
        """Whether `num_blocks` can be taken; with `keep_watermark`, and still leave the
        watermark's blocks free. Taking none is always possible."""
        # Running requests need a new block each now and then. Without a reserve, admission
        # takes the last one, and the next step has to throw a request out again.
        reserve = self.num_watermark_blocks if keep_watermark else 0
        return num_blocks <= 0 or num_blocks + reserve <= self.pool.num_free

    def reuse_prefix(self, request: Request) -> int:
        """Start the request's block table with the known blocks of its tokens; returns the
        tokens they hold, always fewer than the request has.

        Other requests may own these blocks too: nobody writes to them.
        """
        entries = self.prefixes.match(request.token_ids)
        request.block_table = [entry.block_id for entry in entries]
        request.num_published_blocks = len(entries)
        request.last_published = entries[-1] if entries else None
        self.pool.share(request.block_table)
        return len(entries) * self.block_size

    def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
        """Let the block table cover `num_tokens` tokens; False, and nothing taken, if the
        blocks for that are not free.

        With blocks of 16: token 16 still fits the first block, token 17 needs the second.
        """
        missing = blocks_for(num_tokens, self.block_size) - len(request.block_table)
        if not self.can_allocate(missing, keep_watermark):
            return False
        if missing > 0:
            request.block_table += self.pool.allocate(missing)
        return True

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make known the blocks that the first `num_tokens` tokens fill completely.

        `num_tokens` are computed; the request may know more. With blocks of 16 and 40 tokens
        computed, blocks 0 and 1 of its table are inserted into `prefixes`, each as the next
        one's parent. Goes on behind the `num_published_blocks` that are known already; the
        node of the last known one is `last_published` (None: there is none). Blocks that the
        table does not have (the request was freed in the meantime) are left out.
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
        """Give back every block of the request, the last one of its table first.

        Afterwards the request owns and has published nothing: its table is empty,
        `num_published_blocks` is 0, `last_published` is None. Contents can still be found.
        """
        # From the end: of a prefix that is kept, the tail is taken away before the head, and
        # a head without its tail is still of use.
        self.pool.free(reversed(request.block_table))
        request.block_table = []
        request.num_published_blocks = 0
        request.last_published = None

    def cached_blocks(self) -> list[int]:
        """Blocks without an owner whose content can still be found, the next to go first."""
        return [block_id for block_id in self.pool.free_ids if self.prefixes.holds(block_id)]

    def check(self, requests: Iterable[Request]) -> None:
        """Assert the invariant; `requests` are all that own blocks."""
        self.pool.check()
        owners: Counter[int] = Counter()
        for request in requests:
            table = request.block_table
            assert len(set(table)) == len(table), f"a block stands twice in {request.request_id}"
            owners.update(table)
        for block_id, count in enumerate(self.pool.ref_counts):
            assert count == owners[block_id], (
                f"block {block_id}: count {count}, {owners[block_id]} owners"
            )
