"""Wrong answers that people really give, each with the words that its check must say.

Read as text, never imported: the names in the bodies are those of `minivllm/prefix_cache.py` and
`minivllm/block_manager.py`. Above each stands the rule of the lesson that the answer breaks.
"""

# -- hash_block --


# rule 1
@mistake(
    "prefix_cache.hash_block",
    "the same tokens behind two different parents: does parent_key go into the hash?",
)
def hash_block(parent_key: int, token_ids: tuple[int, ...]) -> int:
    return hash(token_ids)


# rule 1
@mistake(
    "prefix_cache.hash_block",
    "blocks [1, 2] [3, 4] and [3, 4] [1, 2] are two prefixes: do you add or xor the parent?",
)
def hash_block(parent_key: int, token_ids: tuple[int, ...]) -> int:
    return parent_key ^ hash(token_ids)


# rule 1
@mistake(
    "prefix_cache.hash_block",
    "the order of the tokens counts: do you add them up, or sort them?",
)
def hash_block(parent_key: int, token_ids: tuple[int, ...]) -> int:
    return hash((parent_key, sum(token_ids)))


# rule 1
@mistake(
    "prefix_cache.hash_block",
    "1, 23 and 12, 3 are the same digits: do you join the tokens to one text?",
)
def hash_block(parent_key: int, token_ids: tuple[int, ...]) -> int:
    return hash(str(parent_key) + "".join(str(token_id) for token_id in token_ids))


# rule 1
@mistake(
    "prefix_cache.hash_block",
    "only the middle differs: do you look at the first and the last token alone?",
)
def hash_block(parent_key: int, token_ids: tuple[int, ...]) -> int:
    return hash((parent_key, token_ids[0], token_ids[-1]))


# -- PrefixCache.lookup --


# rule 2
@mistake(
    "prefix_cache.PrefixCache.lookup",
    "block 10 holds (1, 2), only the key is the same: do you compare the tokens?",
)
def lookup(self, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> CachedBlock | None:
    return self.entries.get(self.key_of(parent, token_ids))


# rule 2: nano-vllm compares the tokens of the block, not what came before
@mistake(
    "prefix_cache.PrefixCache.lookup",
    "block 11 was computed behind block 10, not as a beginning: do you compare the parent?",
)
def lookup(self, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> CachedBlock | None:
    entry = self.entries.get(self.key_of(parent, token_ids))
    if entry is None or entry.token_ids != token_ids:
        return None
    return entry


# rule 2
@mistake(
    "prefix_cache.PrefixCache.lookup",
    "block 11 was computed behind block 10: do you compare the parents' keys, or the nodes?",
)
def lookup(self, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> CachedBlock | None:
    entry = self.entries.get(self.key_of(parent, token_ids))
    if entry is None or entry.token_ids != token_ids:
        return None
    known = 0 if entry.parent is None else entry.parent.key
    wanted = 0 if parent is None else parent.key
    return entry if known == wanted else None


# -- PrefixCache.match --


# rule 4
@mistake(
    "prefix_cache.PrefixCache.match",
    "4 tokens, all of them known: which of them gives the model something to sample from?",
)
def match(self, token_ids: Sequence[int]) -> list[CachedBlock]:
    matched: list[CachedBlock] = []
    for tokens in full_blocks(token_ids, self.block_size):
        entry = self.lookup(matched[-1] if matched else None, tokens)
        if entry is None:
            break
        matched.append(entry)
    return matched


# rule 4
@mistake(
    "prefix_cache.PrefixCache.match",
    "the 5th token is the last one, both blocks are free to reuse: do you drop one always?",
)
def match(self, token_ids: Sequence[int]) -> list[CachedBlock]:
    matched: list[CachedBlock] = []
    for tokens in full_blocks(token_ids, self.block_size)[:-1]:
        entry = self.lookup(matched[-1] if matched else None, tokens)
        if entry is None:
            break
        matched.append(entry)
    return matched


# rule 3
@mistake(
    "prefix_cache.PrefixCache.match",
    "[9, 9] is unknown, so all behind it is too: do you go on after a miss?",
)
def match(self, token_ids: Sequence[int]) -> list[CachedBlock]:
    matched: list[CachedBlock] = []
    for tokens in full_blocks(token_ids[:-1], self.block_size):
        entry = self.lookup(matched[-1] if matched else None, tokens)
        if entry is not None:
            matched.append(entry)
    return matched


# rule 3
@mistake(
    "prefix_cache.PrefixCache.match",
    "two blocks of this prompt are known: are these the nodes you return, in order?",
)
def match(self, token_ids: Sequence[int]) -> list[CachedBlock]:
    matched: list[CachedBlock] = []
    for tokens in full_blocks(token_ids[:-1], self.block_size):
        entry = self.lookup(None, tokens)
        if entry is None:
            break
        matched.append(entry)
    return matched


# rule 2
@mistake(
    "prefix_cache.PrefixCache.match",
    "is the third looked up behind the second, not behind the first?",
)
def match(self, token_ids: Sequence[int]) -> list[CachedBlock]:
    matched = []
    for tokens in full_blocks(token_ids[:-1], self.block_size):
        entry = self.lookup(matched[0] if matched else None, tokens)
        if entry is None:
            break
        matched.append(entry)
    return matched


# rule 3
@mistake("prefix_cache.PrefixCache.match", "do you read `entries` without comparing?")
def match(self, token_ids: Sequence[int]) -> list[CachedBlock]:
    matched = []
    for tokens in full_blocks(token_ids[:-1], self.block_size):
        entry = self.entries.get(self.key_of(matched[-1] if matched else None, tokens))
        if entry is None:
            break
        matched.append(entry)
    return matched


# -- PrefixCache.forget --


# rule 5: nano-vllm's issue 163
@mistake(
    "prefix_cache.PrefixCache.forget",
    "block 11 is overwritten, and is still found by its old tokens: is it in `entries`?",
)
def forget(self, block_id: int) -> None:
    self.by_block.pop(block_id, None)


# rule 5
@mistake(
    "prefix_cache.PrefixCache.forget",
    "block 99 holds nothing to find, which isn't an error",
)
def forget(self, block_id: int) -> None:
    entry = self.by_block.pop(block_id)
    del self.entries[entry.key]


# -- PrefixCache.insert --


# rule 5: nano-vllm's issue 219
@mistake(
    "prefix_cache.PrefixCache.insert",
    "(1, 2) is known as block 10: does the second one take its place?",
)
def insert(
    self, parent: CachedBlock | None, token_ids: Sequence[int], block_id: int
) -> CachedBlock:
    tokens = tuple(token_ids)
    key = self.key_of(parent, tokens)
    if key in self.entries:
        self.forget(self.entries[key].block_id)
    entry = CachedBlock(block_id, key, tokens, parent)
    self.entries[key] = entry
    self.by_block[block_id] = entry
    return entry


# rule 5
@mistake(
    "prefix_cache.PrefixCache.insert",
    "block 10 can no longer be found by its tokens: do you forget it in both places?",
)
def insert(
    self, parent: CachedBlock | None, token_ids: Sequence[int], block_id: int
) -> CachedBlock:
    tokens = tuple(token_ids)
    known = self.lookup(parent, tokens)
    if known is not None:
        return known
    entry = CachedBlock(block_id, self.key_of(parent, tokens), tokens, parent)
    self.entries[entry.key] = entry
    self.by_block[block_id] = entry
    return entry


# rule 3
@mistake("prefix_cache.PrefixCache.insert", "do you take an equal key for equal content?")
def insert(
    self, parent: CachedBlock | None, token_ids: Sequence[int], block_id: int
) -> CachedBlock:
    tokens = tuple(token_ids)
    key = self.key_of(parent, tokens)
    known = self.entries.get(key)
    if known is not None and known.token_ids == tokens:
        return known
    if known is not None:
        self.forget(known.block_id)
    self.entries[key] = self.by_block[block_id] = CachedBlock(block_id, key, tokens, parent)
    return self.entries[key]


# -- BlockManager.publish --


# rule 6
@mistake(
    "block_manager.BlockManager.publish",
    "8 tokens fill blocks 7 and 3: are their tokens right",
)
def publish(self, request: Request, num_tokens: int) -> None:
    num_full = min(request.num_tokens // self.block_size, len(request.block_table))
    for index in range(request.num_published_blocks, num_full):
        start = index * self.block_size
        tokens = request.token_ids[start : start + self.block_size]
        request.last_published = self.prefixes.insert(
            request.last_published, tokens, request.block_table[index]
        )
        request.num_published_blocks = index + 1


# rule 6
@mistake(
    "block_manager.BlockManager.publish",
    "7 tokens fill one block of 4 and start another: do you round up?",
)
def publish(self, request: Request, num_tokens: int) -> None:
    num_full = min(blocks_for(num_tokens, self.block_size), len(request.block_table))
    for index in range(request.num_published_blocks, num_full):
        start = index * self.block_size
        tokens = request.token_ids[start : start + self.block_size]
        request.last_published = self.prefixes.insert(
            request.last_published, tokens, request.block_table[index]
        )
        request.num_published_blocks = index + 1


# rule 1
@mistake(
    "block_manager.BlockManager.publish",
    "are their tokens right, and does each follow the last node?",
)
def publish(self, request: Request, num_tokens: int) -> None:
    num_full = min(num_tokens // self.block_size, len(request.block_table))
    for index in range(request.num_published_blocks, num_full):
        start = index * self.block_size
        tokens = request.token_ids[start : start + self.block_size]
        self.prefixes.insert(request.last_published, tokens, request.block_table[index])
        request.num_published_blocks = index + 1


# rule 6
@mistake(
    "block_manager.BlockManager.publish",
    "its blocks are gone: do you ask for more of them than the table has?",
)
def publish(self, request: Request, num_tokens: int) -> None:
    for index in range(request.num_published_blocks, num_tokens // self.block_size):
        start = index * self.block_size
        tokens = request.token_ids[start : start + self.block_size]
        request.last_published = self.prefixes.insert(
            request.last_published, tokens, request.block_table[index]
        )
        request.num_published_blocks = index + 1


# -- BlockManager.free --


# rule 7
@mistake(
    "block_manager.BlockManager.free",
    "does the head of the chain go first?",
)
def free(self, request: Request) -> None:
    self.pool.free(request.block_table)
    request.block_table = []
    request.num_published_blocks = 0
    request.last_published = None


# rule 7
@mistake("block_manager.BlockManager.free", "the next one is given blocks from the front")
def free(self, request: Request) -> None:
    for block_id in reversed(request.block_table):
        self.prefixes.forget(block_id)
    self.pool.free(reversed(request.block_table))
    request.block_table = []
    request.num_published_blocks = 0
    request.last_published = None


# rule 6: a preempted request comes back and publishes from the wrong place
@mistake(
    "block_manager.BlockManager.free",
    "none of its next blocks is published: is it 0?",
)
def free(self, request: Request) -> None:
    self.pool.free(reversed(request.block_table))
    request.block_table = []


# rule 5
@mistake(
    "block_manager.BlockManager.free",
    "block 1 is the last of the table [2, 0, 1]: do you go by the blocks' numbers?",
)
def free(self, request: Request) -> None:
    self.pool.free(sorted(request.block_table, reverse=True))
    request.block_table = []
    request.num_published_blocks = 0
    request.last_published = None
