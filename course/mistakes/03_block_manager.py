"""Wrong answers that people really give, each with the words that its check must say.

Read as text, never imported: the names in the bodies are those of `minivllm/block_manager.py`.
The number in brackets is the invariant of the lesson that the answer breaks.
"""

# -- blocks_for --


@mistake("block_manager.blocks_for", "do you round down?")  # [1]
def blocks_for(num_tokens: int, block_size: int) -> int:
    return num_tokens // block_size


@mistake("block_manager.blocks_for", "do you always add one?")  # [1]
def blocks_for(num_tokens: int, block_size: int) -> int:
    return num_tokens // block_size + 1


@mistake("block_manager.blocks_for", "do you start counting at 1?")  # [1]
def blocks_for(num_tokens: int, block_size: int) -> int:
    return max(1, -(-num_tokens // block_size))


@mistake("block_manager.blocks_for", "is a block size written into your code?")  # [1]
def blocks_for(num_tokens: int, block_size: int) -> int:
    return (num_tokens + 15) // 16


# -- BlockPool.allocate --


@mistake("block_manager.BlockPool.allocate", "do you ask before taking?")  # [4]
def allocate(self, num_blocks: int) -> list[int]:
    block_ids = []
    for _ in range(num_blocks):
        if not self.free_ids:
            raise ValueError(f"{num_blocks} blocks wanted, {len(block_ids)} free")
        block_id, _ = self.free_ids.popitem(last=False)
        self.ref_counts[block_id] = 1
        self.prefixes.forget(block_id)
        block_ids.append(block_id)
    return block_ids


@mistake("block_manager.BlockPool.allocate", "which end does popitem take by default?")  # [6]
def allocate(self, num_blocks: int) -> list[int]:
    if num_blocks > self.num_free:
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    block_ids = [self.free_ids.popitem()[0] for _ in range(num_blocks)]
    for block_id in block_ids:
        self.ref_counts[block_id] = 1
        self.prefixes.forget(block_id)
    return block_ids


@mistake("block_manager.BlockPool.allocate", "did you count it?")  # [3]
def allocate(self, num_blocks: int) -> list[int]:
    if num_blocks > self.num_free:
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    return [self.free_ids.popitem(last=False)[0] for _ in range(num_blocks)]


@mistake("block_manager.BlockPool.allocate", "is it still in it?")  # [2]
def allocate(self, num_blocks: int) -> list[int]:
    if num_blocks > self.num_free:
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    block_ids = list(self.free_ids)[:num_blocks]
    for block_id in block_ids:
        self.ref_counts[block_id] = 1
        self.prefixes.forget(block_id)
    return block_ids


@mistake("block_manager.BlockPool.allocate", "who tells the prefix cache to forget them?")  # [6]
def allocate(self, num_blocks: int) -> list[int]:
    if num_blocks > self.num_free:
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    block_ids = [self.free_ids.popitem(last=False)[0] for _ in range(num_blocks)]
    for block_id in block_ids:
        self.ref_counts[block_id] = 1
    return block_ids


@mistake("block_manager.BlockPool.allocate", "do you compare with >= where > is meant?")  # [4]
def allocate(self, num_blocks: int) -> list[int]:
    if num_blocks >= self.num_free:
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    block_ids = [self.free_ids.popitem(last=False)[0] for _ in range(num_blocks)]
    for block_id in block_ids:
        self.ref_counts[block_id] = 1
        self.prefixes.forget(block_id)
    return block_ids


# -- BlockPool.share --


@mistake("block_manager.BlockPool.share", "is it still in the queue")  # [2]
def share(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] += 1


@mistake("block_manager.BlockPool.share", "do you add, or set?")  # [3]
def share(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.free_ids.pop(block_id, None)
        self.ref_counts[block_id] = 2


@mistake("block_manager.BlockPool.share", "do you take it out all the same?")  # [2]
def share(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        del self.free_ids[block_id]
        self.ref_counts[block_id] += 1


@mistake("block_manager.BlockPool.share", "why forget its content?")  # [6]
def share(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        if self.ref_counts[block_id] == 0:
            del self.free_ids[block_id]
            self.prefixes.forget(block_id)
        self.ref_counts[block_id] += 1


# -- BlockPool.free --


@mistake("block_manager.BlockPool.free", "is it free already?")  # [3]
def free(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] = 0
        self.free_ids[block_id] = None
        self.free_ids.move_to_end(block_id, last=self.prefixes.holds(block_id))


@mistake("block_manager.BlockPool.free", "goes back into the queue")  # [2]
def free(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] -= 1


@mistake("block_manager.BlockPool.free", "does it go to the back, to be taken last?")  # [6]
def free(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free_ids[block_id] = None


@mistake("block_manager.BlockPool.free", "the content stays until the block is given away")  # [6]
def free(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free_ids[block_id] = None
            self.free_ids.move_to_end(block_id, last=self.prefixes.holds(block_id))
            self.prefixes.forget(block_id)


# -- BlockManager.can_allocate --


@mistake("block_manager.BlockManager.can_allocate", "does the reserve of 2 count?")  # [7]
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    return num_blocks <= self.pool.num_free


@mistake("block_manager.BlockManager.can_allocate", "do you keep it from them too?")  # [7]
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    return num_blocks <= 0 or num_blocks + self.num_watermark_blocks <= self.pool.num_free


@mistake("block_manager.BlockManager.can_allocate", "does the reserve stand in the way?")  # [7]
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    reserve = self.num_watermark_blocks if keep_watermark else 0
    return num_blocks + reserve <= self.pool.num_free


@mistake("block_manager.BlockManager.can_allocate", "is it < or <=?")  # [7]
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    reserve = self.num_watermark_blocks if keep_watermark else 0
    return num_blocks <= 0 or num_blocks + reserve < self.pool.num_free


@mistake("block_manager.BlockManager.can_allocate", "content without an owner gives way")  # [6]
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    reserve = self.num_watermark_blocks if keep_watermark else 0
    num_free = self.pool.num_free - len(self.cached_blocks())
    return num_blocks <= 0 or num_blocks + reserve <= num_free


# -- BlockManager.allocate --


@mistake("block_manager.BlockManager.allocate", "does the table get exactly those?")  # [1]
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = num_tokens // self.block_size + 1 - len(request.block_table)
    if not self.can_allocate(missing, keep_watermark):
        return False
    if missing > 0:
        request.block_table += self.pool.allocate(missing)
    return True


@mistake("block_manager.BlockManager.allocate", "the table already covers some tokens")  # [1]
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = blocks_for(num_tokens, self.block_size)
    if not self.can_allocate(missing, keep_watermark):
        return False
    request.block_table += self.pool.allocate(missing)
    return True


@mistake("block_manager.BlockManager.allocate", "filling the last slot of a block is fine")  # [1]
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = blocks_for(num_tokens, self.block_size) - len(request.block_table)
    if not self.can_allocate(max(missing, 1), keep_watermark):
        return False
    if missing > 0:
        request.block_table += self.pool.allocate(missing)
    return True


@mistake("block_manager.BlockManager.allocate", "do you ask can_allocate first?")  # [4]
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = blocks_for(num_tokens, self.block_size) - len(request.block_table)
    if missing > 0:
        request.block_table += self.pool.allocate(missing)
    return True


@mistake("block_manager.BlockManager.allocate", "do you ask for all at once?")  # [4]
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    while len(request.block_table) < blocks_for(num_tokens, self.block_size):
        if not self.can_allocate(1, keep_watermark):
            return False
        request.block_table += self.pool.allocate(1)
    return True


@mistake("block_manager.BlockManager.allocate", "a table grows at its end")  # [5]
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = blocks_for(num_tokens, self.block_size) - len(request.block_table)
    if not self.can_allocate(missing, keep_watermark):
        return False
    if missing > 0:
        request.block_table = self.pool.allocate(missing) + request.block_table
    return True


@mistake("block_manager.BlockManager.allocate", "do you pass keep_watermark on?")  # [7]
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = blocks_for(num_tokens, self.block_size) - len(request.block_table)
    if not self.can_allocate(missing, False):
        return False
    if missing > 0:
        request.block_table += self.pool.allocate(missing)
    return True
