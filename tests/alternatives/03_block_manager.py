"""Right answers in other styles, read as text by `test_course_alternatives`, never imported."""


@answer("block_manager.blocks_for")
def blocks_for(num_tokens: int, block_size: int) -> int:
    full, rest = divmod(num_tokens, block_size)
    return full + 1 if rest else full


@answer("block_manager.blocks_for")
def blocks_for(num_tokens, block_size):
    import math

    return math.ceil(num_tokens / block_size)


@answer("block_manager.blocks_for")
def blocks_for(num_tokens, block_size):
    return (num_tokens + block_size - 1) // block_size


@answer("block_manager.BlockPool.allocate")
def allocate(self, num_blocks: int) -> list[int]:
    if self.num_free < num_blocks:
        raise ValueError(f"{num_blocks} blocks are wanted and only {self.num_free} are free")
    taken = []
    while len(taken) < num_blocks:
        block_id = next(iter(self.free_ids))
        del self.free_ids[block_id]
        self.prefixes.forget(block_id)
        self.ref_counts[block_id] += 1
        taken.append(block_id)
    return taken


@answer("block_manager.BlockPool.allocate")
def allocate(self, num_blocks):
    taken = list(self.free_ids)[:num_blocks]
    if len(taken) != num_blocks:
        raise ValueError(f"{num_blocks} wanted, {len(taken)} free")
    for block_id in taken:
        self.free_ids.pop(block_id)
        self.ref_counts[block_id] = 1
    for block_id in taken:
        self.prefixes.forget(block_id)
    return taken


@answer("block_manager.BlockPool.share")
def share(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] += 1
        if self.ref_counts[block_id] == 1:
            self.free_ids.pop(block_id)


@answer("block_manager.BlockPool.share")
def share(self, block_ids):
    for block_id in list(block_ids):
        self.free_ids.pop(block_id, None)
        self.ref_counts[block_id] = self.ref_counts[block_id] + 1


@answer("block_manager.BlockPool.free")
def free(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id]:
            continue
        self.free_ids[block_id] = None
        if not self.prefixes.holds(block_id):
            self.free_ids.move_to_end(block_id, last=False)


@answer("block_manager.BlockPool.free")
def free(self, block_ids):
    block_ids = list(block_ids)
    for block_id in block_ids:
        assert self.ref_counts[block_id] > 0, f"block {block_id} is free already"
        self.ref_counts[block_id] -= 1
    for block_id in block_ids:
        if self.ref_counts[block_id] == 0:
            self.free_ids[block_id] = None
            self.free_ids.move_to_end(block_id, self.prefixes.holds(block_id))


@answer("block_manager.BlockManager.can_allocate")
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    if num_blocks < 1:
        return True
    left = len(self.pool.free_ids) - num_blocks
    return left >= (self.num_watermark_blocks if keep_watermark else 0)


@answer("block_manager.BlockManager.can_allocate")
def can_allocate(self, num_blocks, keep_watermark):
    available = self.pool.num_free
    if keep_watermark:
        available -= self.num_watermark_blocks
    return num_blocks <= max(0, available)


@answer("block_manager.BlockManager.allocate")
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = max(0, blocks_for(num_tokens, self.block_size) - len(request.block_table))
    if self.can_allocate(num_blocks=missing, keep_watermark=keep_watermark):
        request.block_table.extend(self.pool.allocate(missing))
        return True
    return False


@answer("block_manager.BlockManager.allocate")
def allocate(self, request, num_tokens, keep_watermark=False):
    covered = len(request.block_table) * self.block_size
    if num_tokens <= covered:
        return True
    missing = blocks_for(num_tokens - covered, self.block_size)
    if not self.can_allocate(missing, keep_watermark):
        return False
    request.block_table = [*request.block_table, *self.pool.allocate(missing)]
    return True


@answer("block_manager.blocks_for")
def blocks_for(num_tokens: int, block_size: int) -> int:
    index_of_last = (num_tokens - 1) // block_size
    return index_of_last + 1


@answer("block_manager.blocks_for")
def blocks_for(num_tokens, block_size):
    return len(range(0, num_tokens, block_size))


@answer("block_manager.BlockPool.allocate")
def allocate(self, num_blocks):
    from itertools import islice

    available = len(self.free_ids)
    if available < num_blocks:
        raise ValueError(f"{num_blocks} blocks wanted, {available} free")
    taken = list(islice(self.free_ids, num_blocks))
    for block_id in taken:
        self.prefixes.forget(block_id)
        self.free_ids.pop(block_id)
        self.ref_counts[block_id] += 1
    return taken


@answer("block_manager.BlockPool.share")
def share(self, block_ids):
    shared = [*block_ids]
    revived = dict.fromkeys(block_id for block_id in shared if block_id in self.free_ids)
    for block_id in revived:
        del self.free_ids[block_id]
    for block_id in shared:
        self.ref_counts[block_id] += 1


@answer("block_manager.BlockPool.free")
def free(self, block_ids):
    useless = []
    for block_id in block_ids:
        owners = self.ref_counts[block_id] - 1
        self.ref_counts[block_id] = owners
        if owners > 0:
            continue
        if self.prefixes.holds(block_id):
            self.free_ids.update({block_id: None})
        else:
            useless.append(block_id)
    for block_id in reversed(useless):
        self.free_ids[block_id] = None
        self.free_ids.move_to_end(block_id, last=False)


@answer("block_manager.BlockManager.can_allocate")
def can_allocate(self, num_blocks, keep_watermark):
    left = self.pool.num_free - num_blocks
    return not (num_blocks > 0 and left < self.num_watermark_blocks * int(bool(keep_watermark)))


@answer("block_manager.BlockManager.allocate")
def allocate(self, request, num_tokens, keep_watermark=False):
    uncovered = num_tokens - self.block_size * len(request.block_table)
    if uncovered <= 0:
        return True
    missing = blocks_for(num_tokens=uncovered, block_size=self.block_size)
    if self.can_allocate(num_blocks=missing, keep_watermark=keep_watermark):
        request.block_table = [*request.block_table, *self.pool.allocate(num_blocks=missing)]
        return True
    return False
