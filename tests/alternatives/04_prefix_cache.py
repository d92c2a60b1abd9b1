"""Right answers in other styles, for `test_course_alternatives`; read as text, never imported."""


@answer("prefix_cache.hash_block")
def hash_block(parent_key: int, token_ids: tuple[int, ...]) -> int:
    return hash((parent_key, *token_ids))


@answer("prefix_cache.hash_block")
def hash_block(parent_key, token_ids):
    import hashlib

    digest = hashlib.sha256(f"{parent_key}|{list(token_ids)}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


@answer("prefix_cache.PrefixCache.lookup")
def lookup(self, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> CachedBlock | None:
    key = self.key_of(parent, token_ids)
    if key in self.entries:
        entry = self.entries[key]
        if entry.parent is parent and entry.token_ids == token_ids:
            return entry
    return None


@answer("prefix_cache.PrefixCache.lookup")
def lookup(self, parent, token_ids):
    entry = self.entries.get(self.key_of(parent, token_ids), None)
    is_same = entry is not None and (entry.parent, entry.token_ids) == (parent, token_ids)
    return entry if is_same else None


@answer("prefix_cache.PrefixCache.match")
def match(self, token_ids: Sequence[int]) -> list[CachedBlock]:
    found, parent = [], None
    for block in range((len(token_ids) - 1) // self.block_size):
        start = block * self.block_size
        entry = self.lookup(parent, tuple(token_ids[start : start + self.block_size]))
        if entry is None:
            return found
        found.append(entry)
        parent = entry
    return found


@answer("prefix_cache.PrefixCache.match")
def match(self, token_ids):
    def chain(parent, blocks):
        entry = self.lookup(parent, blocks[0]) if blocks else None
        return [] if entry is None else [entry, *chain(entry, blocks[1:])]

    return chain(None, full_blocks(token_ids[: max(0, len(token_ids) - 1)], self.block_size))


@answer("prefix_cache.PrefixCache.insert")
def insert(
    self, parent: CachedBlock | None, token_ids: Sequence[int], block_id: int
) -> CachedBlock:
    entry = self.lookup(parent, tuple(token_ids))
    if entry is None:
        entry = CachedBlock(
            block_id=block_id,
            key=self.key_of(parent, tuple(token_ids)),
            token_ids=tuple(token_ids),
            parent=parent,
        )
        if (other := self.entries.get(entry.key)) is not None:
            self.forget(other.block_id)
        self.entries[entry.key] = entry
        self.by_block[entry.block_id] = entry
    return entry


@answer("prefix_cache.PrefixCache.insert")
def insert(self, parent, token_ids, block_id):
    token_ids = tuple(token_ids)
    key = self.key_of(parent, token_ids)
    old = self.entries.get(key)
    if old is not None:
        if old.token_ids == token_ids and old.parent is parent:
            return old
        self.by_block.pop(old.block_id)
    self.entries[key] = self.by_block[block_id] = CachedBlock(block_id, key, token_ids, parent)
    return self.entries[key]


@answer("prefix_cache.PrefixCache.forget")
def forget(self, block_id: int) -> None:
    if block_id in self.by_block:
        self.entries.pop(self.by_block[block_id].key)
        self.by_block.pop(block_id)


@answer("prefix_cache.PrefixCache.forget")
def forget(self, block_id):
    try:
        entry = self.by_block.pop(block_id)
    except KeyError:
        return
    self.entries = {key: other for key, other in self.entries.items() if other is not entry}


@answer("block_manager.BlockManager.publish")
def publish(self, request: Request, num_tokens: int) -> None:
    size = self.block_size
    while True:
        index = request.num_published_blocks
        if (index + 1) * size > num_tokens or index >= len(request.block_table):
            return
        request.last_published = self.prefixes.insert(
            parent=request.last_published,
            token_ids=request.token_ids[index * size : (index + 1) * size],
            block_id=request.block_table[index],
        )
        request.num_published_blocks += 1


@answer("block_manager.BlockManager.publish")
def publish(self, request, num_tokens):
    known = request.num_published_blocks
    parent = request.last_published
    full = [
        request.token_ids[end - self.block_size : end]
        for end in range(self.block_size, num_tokens + 1, self.block_size)
    ]
    pairs = list(zip(full, request.block_table))[known:]
    for tokens, block_id in pairs:
        parent = self.prefixes.insert(parent, tuple(tokens), block_id)
    request.last_published = parent
    request.num_published_blocks = known + len(pairs)


@answer("block_manager.BlockManager.free")
def free(self, request: Request) -> None:
    blocks = list(request.block_table)
    blocks.reverse()
    request.block_table.clear()
    self.pool.free(blocks)
    request.num_published_blocks, request.last_published = 0, None


@answer("block_manager.BlockManager.free")
def free(self, request):
    while request.block_table:
        self.pool.free([request.block_table.pop()])
    request.last_published = None
    request.num_published_blocks = 0
