"""Which KV block already holds which prefix, so that equal prompts are computed once.

A full block of tokens is found by a hash that is chained over all blocks before it (vLLM's
automatic prefix caching; RadixAttention in SGLang keeps the same tree explicitly). Leaves out
who owns a block and when it is taken away: that is the block manager's. Notebook 04.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

HashFunction = Callable[[int, tuple[int, ...]], int]


def hash_block(parent_key: int, token_ids: tuple[int, ...]) -> int:
    """The key of a block, an int: a hash of its tokens and of the key of the block before it.

    Equal tokens behind different beginnings get different keys:
    `hash_block(0, (7, 8)) != hash_block(1, (7, 8))`. So do the same tokens, and the same
    blocks, in another order. The first block's parent key is 0.
    """
    # Whole tuples of ints: the same in every process, and no string is built.
    return hash((parent_key, token_ids))


def full_blocks(token_ids: Sequence[int], block_size: int) -> list[tuple[int, ...]]:
    """Cut tokens into whole blocks and drop the rest: `full_blocks([1, 2, 3, 4, 5], 2)` is
    `[(1, 2), (3, 4)]`."""
    ends = range(block_size, len(token_ids) + 1, block_size)
    return [tuple(token_ids[end - block_size : end]) for end in ends]


@dataclass(frozen=True, eq=False)
class CachedBlock:
    """One node in the tree of prefixes: a block, its tokens and the node before it.

    Two nodes are the same only if they are one object.
    """

    block_id: int
    key: int
    token_ids: tuple[int, ...]
    parent: CachedBlock | None  # None: the block is the first of its prompt

    def __repr__(self) -> str:
        return f"CachedBlock(block {self.block_id}, tokens {list(self.token_ids)})"


class PrefixCache:
    """Finds blocks by content.

    Invariant: `entries` (by key) and `by_block` (by block id) hold the same nodes; a block
    holds one content at most.
    """

    def __init__(self, block_size: int, hash_function: HashFunction = hash_block) -> None:
        """`block_size` in tokens. Another `hash_function` serves tests that force collisions."""
        self.block_size = block_size
        self.hash_function = hash_function
        self.entries: dict[int, CachedBlock] = {}
        self.by_block: dict[int, CachedBlock] = {}

    def __repr__(self) -> str:
        return f"PrefixCache({len(self.entries)} blocks of {self.block_size} tokens)"

    def key_of(self, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> int:
        """The key of a block with these tokens behind `parent`."""
        return self.hash_function(0 if parent is None else parent.key, token_ids)

    def lookup(self, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> CachedBlock | None:
        """The node with exactly these tokens behind exactly this parent, or None.

        `parent` is the node of the block before, the same object (None: there is none). An
        equal key is not enough: if the entry under the key of (3, 4) is a node that holds
        (1, 2), the answer is None.
        """
        # Two contents can share a key, and serving the other one's keys and values would
        # answer another user's prompt. Comparing nodes, not their keys, covers all before it.
        entry = self.entries.get(self.key_of(parent, token_ids))
        if entry is None or entry.parent is not parent or entry.token_ids != token_ids:
            return None
        return entry

    def match(self, token_ids: Sequence[int]) -> list[CachedBlock]:
        """The nodes of the longest chain of known blocks that `token_ids` begins with, in order.

        The chain ends at the first block that is not known. It never covers the last token:
        with 32 tokens in blocks of 16 at most one block is found, with 33 at most two, with
        none at all none. Changes nothing.
        """
        # The next token is sampled from the last token's output, and outputs are not cached:
        # so the last token is always computed, even if its block is known.
        matched: list[CachedBlock] = []
        for tokens in full_blocks(token_ids[:-1], self.block_size):
            entry = self.lookup(matched[-1] if matched else None, tokens)
            if entry is None:
                break
            matched.append(entry)
        return matched

    def insert(
        self, parent: CachedBlock | None, token_ids: Sequence[int], block_id: int
    ) -> CachedBlock:
        """Make known that `block_id` holds these tokens behind `parent`, computed.

        Returns the node to use as parent of the next block: a new one in `entries` and
        `by_block`. If the content is known already (two equal prompts computed in one step),
        it is the older block's node, and `block_id` stays unknown. Another content that stands
        under the same key is forgotten first.
        """
        tokens = tuple(token_ids)
        known = self.lookup(parent, tokens)
        if known is not None:
            return known
        key = self.key_of(parent, tokens)
        if key in self.entries:
            self.forget(self.entries[key].block_id)
        entry = CachedBlock(block_id, key, tokens, parent)
        self.entries[key] = entry
        self.by_block[block_id] = entry
        return entry

    def forget(self, block_id: int) -> None:
        """The block gets other content: its node leaves `by_block` and `entries`.

        Nothing happens for a block that holds nothing to find.
        """
        entry = self.by_block.pop(block_id, None)
        if entry is not None:
            del self.entries[entry.key]

    def holds(self, block_id: int) -> bool:
        """Whether the block's content can still be found."""
        return block_id in self.by_block

    def check(self) -> None:
        """Assert the invariant."""
        for key, entry in self.entries.items():
            assert entry.key == key, f"{entry} is filed under another key"
            assert self.by_block.get(entry.block_id) is entry, f"{entry} is not filed by block"
        assert len(self.by_block) == len(self.entries), "a block is filed without a key"
