"""Which KV block already holds which prefix, so that equal prompts are computed once.

A full block of tokens is found by a hash that is chained over all blocks before it (vLLM's
automatic prefix caching; RadixAttention in SGLang keeps the same tree explicitly). Does not decide
who owns a block or when it is reused (see `block_manager`). Notebook 04.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

HashFunction = Callable[[int, tuple[int, ...]], int]


def hash_block(parent_key: int, token_ids: tuple[int, ...]) -> int:
    """Return the key of a block, an int that stands for its tokens and for all tokens before them.

    `parent_key` is the key of the block before it, 0 for the first block. The same arguments give
    the same key. Other tokens, another order of tokens or another parent give another key:
    `hash_block(0, (7, 8)) != hash_block(1, (7, 8))`.
    """
    # Hashes of ints and tuples, unlike those of strings, are the same in every process.
    return hash((parent_key, token_ids))


def full_blocks(token_ids: Sequence[int], block_size: int) -> list[tuple[int, ...]]:
    """Return the full blocks of a sequence of tokens: `full_blocks([1, 2, 3, 4, 5], 2)` is
    `[(1, 2), (3, 4)]`."""
    ends = range(block_size, len(token_ids) + 1, block_size)
    return [tuple(token_ids[end - block_size : end]) for end in ends]


@dataclass(frozen=True, eq=False)
class CachedBlock:
    """One node in the tree of prefixes: a block, its tokens and the node before it.

    Nodes are compared by identity, not by value.
    """

    block_id: int
    key: int
    token_ids: tuple[int, ...]
    parent: CachedBlock | None  # None: the block is the first of its prompt

    def __repr__(self) -> str:
        return f"CachedBlock(block {self.block_id}, tokens {list(self.token_ids)})"


class PrefixCache:
    """Find blocks by content.

    Invariant: `entries` (by key) and `by_block` (by block id) hold the same nodes.
    """

    def __init__(self, block_size: int, hash_function: HashFunction = hash_block) -> None:
        """`block_size` in tokens. Tests pass another `hash_function` to force collisions."""
        self.block_size = block_size
        self.hash_function = hash_function
        self.entries: dict[int, CachedBlock] = {}
        self.by_block: dict[int, CachedBlock] = {}

    def __repr__(self) -> str:
        return f"PrefixCache({len(self.entries)} blocks of {self.block_size} tokens)"

    def key_of(self, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> int:
        """Return the key of a block with these tokens behind `parent`."""
        return self.hash_function(0 if parent is None else parent.key, token_ids)

    def lookup(self, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> CachedBlock | None:
        """Return the node of the block with these tokens behind this very parent, or None.

        `parent` is None for the first block. Different blocks can have equal keys: if the entry
        under the key of (3, 4) is a node that holds (1, 2), the answer is None.
        """
        # A block of another prompt under the same key would give keys and values of other text.
        # Comparing the parent nodes, not their keys, compares all tokens before the block too.
        entry = self.entries.get(self.key_of(parent, token_ids))
        if entry is None or entry.parent is not parent or entry.token_ids != token_ids:
            return None
        return entry

    def match(self, token_ids: Sequence[int]) -> list[CachedBlock]:
        """Return the nodes of the known blocks that `token_ids` begins with, in order.

        The last token must always be computed, so its block is never included: with 32 tokens in
        blocks of 16 at most one block is found, with 33 at most two. Changes nothing.
        """
        # The next token is sampled from the model's output for the last token, and outputs are not
        # cached.
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
        """Make known that block `block_id` holds these tokens behind `parent`.

        Returns the node that is the parent of the next block. If a block with this content is known
        already (two equal prompts in one step), that is its node, and `block_id` stays unknown.
        A block with other content under the same key is forgotten.
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
        """Forget the block's content, which is about to be overwritten. Unknown blocks are fine."""
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
