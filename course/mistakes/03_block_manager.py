"""Wrong answers that people give, each with the words that its check must say.

These functions are read as text and never imported: names in their bodies belong to
`minivllm/block_manager.py`. The comment above each one names the rule of the lesson that it breaks.
"""

# -- blocks_for --


# rule 1
@mistake("block_manager.blocks_for", "the 33rd token needs a third block: do you round down?")
def blocks_for(num_tokens: int, block_size: int) -> int:
    return num_tokens // block_size


# rule 1
@mistake("block_manager.blocks_for", "32 tokens fill 2 blocks exactly: do you always add one?")
def blocks_for(num_tokens: int, block_size: int) -> int:
    return num_tokens // block_size + 1


# rule 1
@mistake("block_manager.blocks_for", "0 tokens need 0 blocks: do you start counting at 1?")
def blocks_for(num_tokens: int, block_size: int) -> int:
    return max(1, -(-num_tokens // block_size))


# rule 1
@mistake("block_manager.blocks_for", "9 tokens in blocks of 4: is a block size hard-coded?")
def blocks_for(num_tokens: int, block_size: int) -> int:
    return (num_tokens + 15) // 16


# rule 1
@mistake("block_manager.blocks_for", "the 33rd token needs a third block: do you round down?")
def blocks_for(num_tokens: int, block_size: int) -> int:
    -(-num_tokens // block_size)


# rule 1
@mistake("block_manager.blocks_for", "the 33rd token needs a third block: do you round down?")
def blocks_for(num_tokens: int, block_size: int) -> int:
    return num_tokens / block_size


# rule 1: rounds up by almost one, which is too little for large blocks and long prompts
@mistake(
    "block_manager.blocks_for",
    "257 tokens are one more than a block of 256 holds: how do you round?",
)
def blocks_for(num_tokens: int, block_size: int) -> int:
    return int(num_tokens / block_size + 0.99)


# -- BlockPool.allocate --


# rule 4
@mistake(
    "block_manager.BlockPool.allocate",
    "a refused call takes nothing: do you compare before taking?",
)
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


# rule 6
@mistake(
    "block_manager.BlockPool.allocate",
    "blocks come from the front of the queue: which end does popitem take by default?",
)
def allocate(self, num_blocks: int) -> list[int]:
    if num_blocks > self.num_free:
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    block_ids = [self.free_ids.popitem()[0] for _ in range(num_blocks)]
    for block_id in block_ids:
        self.ref_counts[block_id] = 1
        self.prefixes.forget(block_id)
    return block_ids


# rule 3
@mistake("block_manager.BlockPool.allocate", "an allocated block has one owner: did you count it?")
def allocate(self, num_blocks: int) -> list[int]:
    if num_blocks > self.num_free:
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    return [self.free_ids.popitem(last=False)[0] for _ in range(num_blocks)]


# rule 2
@mistake(
    "block_manager.BlockPool.allocate", "allocated blocks leave the queue: are they still in it?"
)
def allocate(self, num_blocks: int) -> list[int]:
    if num_blocks > self.num_free:
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    block_ids = list(self.free_ids)[:num_blocks]
    for block_id in block_ids:
        self.ref_counts[block_id] = 1
        self.prefixes.forget(block_id)
    return block_ids


# rule 6
@mistake(
    "block_manager.BlockPool.allocate",
    "the new owner overwrites blocks 0 and 1: do you tell the prefix cache to forget them?",
)
def allocate(self, num_blocks: int) -> list[int]:
    if num_blocks > self.num_free:
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    block_ids = [self.free_ids.popitem(last=False)[0] for _ in range(num_blocks)]
    for block_id in block_ids:
        self.ref_counts[block_id] = 1
    return block_ids


# rule 4
@mistake(
    "block_manager.BlockPool.allocate",
    "2 of 2 blocks are free: do you compare with >= instead of >?",
)
def allocate(self, num_blocks: int) -> list[int]:
    if num_blocks >= self.num_free:
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    block_ids = [self.free_ids.popitem(last=False)[0] for _ in range(num_blocks)]
    for block_id in block_ids:
        self.ref_counts[block_id] = 1
        self.prefixes.forget(block_id)
    return block_ids


# rule 5
@mistake(
    "block_manager.BlockPool.allocate",
    "a refused call forgot content: do you call forget before you know that it fits?",
)
def allocate(self, num_blocks: int) -> list[int]:
    block_ids = list(self.free_ids)[:num_blocks]
    for block_id in block_ids:
        self.prefixes.forget(block_id)
    if len(block_ids) < num_blocks:
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    for block_id in block_ids:
        del self.free_ids[block_id]
        self.ref_counts[block_id] = 1
    return block_ids


# rule 6: right until the queue is out of order
@mistake(
    "block_manager.BlockPool.allocate",
    "the queue is [2, 0, 3, 1]: do you sort, or choose by block number?",
)
def allocate(self, num_blocks: int) -> list[int]:
    if num_blocks > self.num_free:
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    block_ids = sorted(self.free_ids)[:num_blocks]
    for block_id in block_ids:
        del self.free_ids[block_id]
        self.ref_counts[block_id] = 1
        self.prefixes.forget(block_id)
    return block_ids


# rule 4: a refusal that puts everything back, in another order
@mistake(
    "block_manager.BlockPool.allocate",
    "a refused call keeps the queue in order: do you put blocks back?",
)
def allocate(self, num_blocks: int) -> list[int]:
    block_ids = [
        self.free_ids.popitem(last=False)[0] for _ in range(min(num_blocks, self.num_free))
    ]
    if len(block_ids) < num_blocks:
        for block_id in block_ids:
            self.free_ids[block_id] = None
            self.free_ids.move_to_end(block_id, last=False)
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    for block_id in block_ids:
        self.ref_counts[block_id] = 1
        self.prefixes.forget(block_id)
    return block_ids


# rule 4: right until some blocks are in use
@mistake(
    "block_manager.BlockPool.allocate",
    "3 blocks wanted, 2 of 4 free: do you compare with the free blocks, or with all?",
)
def allocate(self, num_blocks: int) -> list[int]:
    if num_blocks > self.num_blocks:
        raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
    block_ids = [self.free_ids.popitem(last=False)[0] for _ in range(num_blocks)]
    for block_id in block_ids:
        self.ref_counts[block_id] = 1
        self.prefixes.forget(block_id)
    return block_ids


# -- BlockPool.share --


# rule 2
@mistake(
    "block_manager.BlockPool.share",
    "block 1 has an owner now: is it still in the queue, where it could be allocated?",
)
def share(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] += 1


# rule 3
@mistake("block_manager.BlockPool.share", "each call adds one owner: do you add, or set the count?")
def share(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.free_ids.pop(block_id, None)
        self.ref_counts[block_id] = 2


# rule 2
@mistake(
    "block_manager.BlockPool.share",
    "an owned block isn't in the queue: do you remove it anyway?",
)
def share(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        del self.free_ids[block_id]
        self.ref_counts[block_id] += 1


# rule 6
@mistake("block_manager.BlockPool.share", "a shared block is only read: why forget its content?")
def share(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        if self.ref_counts[block_id] == 0:
            del self.free_ids[block_id]
            self.prefixes.forget(block_id)
        self.ref_counts[block_id] += 1


# rule 2: judges all blocks by the first
@mistake(
    "block_manager.BlockPool.share",
    "blocks 3 and 1 are free, block 0 is owned: do you look at each block?",
)
def share(self, block_ids: Iterable[int]) -> None:
    block_ids = list(block_ids)
    are_free = bool(block_ids) and self.ref_counts[block_ids[0]] == 0
    for block_id in block_ids:
        if are_free:
            del self.free_ids[block_id]
        self.ref_counts[block_id] += 1


# -- BlockPool.free --


# rule 3
@mistake("block_manager.BlockPool.free", "the other owner still reads block 0: is it free already?")
def free(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] = 0
        self.free_ids[block_id] = None
        self.free_ids.move_to_end(block_id, last=self.prefixes.holds(block_id))


# rule 2
@mistake("block_manager.BlockPool.free", "a block without owners goes back into the queue")
def free(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] -= 1


# rule 6
@mistake(
    "block_manager.BlockPool.free",
    "of blocks 0, 2 and 1, only 0 can still be found: does it go to the back of the queue?",
)
def free(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free_ids[block_id] = None


# rule 6
@mistake(
    "block_manager.BlockPool.free", "content stays until the block is allocated: why forget it?"
)
def free(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free_ids[block_id] = None
            self.free_ids.move_to_end(block_id, last=self.prefixes.holds(block_id))
            self.prefixes.forget(block_id)


# rule 3
@mistake("block_manager.BlockPool.free", "block 0 had no owner: do you hide that by stopping at 0?")
def free(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        if self.ref_counts[block_id] > 0:
            self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free_ids[block_id] = None
            self.free_ids.move_to_end(block_id, last=self.prefixes.holds(block_id))


# rule 3
@mistake(
    "block_manager.BlockPool.free",
    "reversed(...) can be read once: do you iterate over block_ids a second time?",
)
def free(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] -= 1
    for block_id in block_ids:
        if self.ref_counts[block_id] == 0:
            self.free_ids[block_id] = None
            self.free_ids.move_to_end(block_id, last=self.prefixes.holds(block_id))


# rule 3
@mistake(
    "block_manager.BlockPool.free",
    "reversed(...) has no len and no [0]: do you iterate with `for`?",
)
def free(self, block_ids: Iterable[int]) -> None:
    for place in range(len(block_ids)):
        block_id = block_ids[place]
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free_ids[block_id] = None
            self.free_ids.move_to_end(block_id, last=self.prefixes.holds(block_id))


# rule 3: stops at the first block that another request still owns
@mistake(
    "block_manager.BlockPool.free",
    "blocks 2, 1 and 0 each lose one owner: do you stop at the first shared one?",
)
def free(self, block_ids: Iterable[int]) -> None:
    freed = []
    for block_id in block_ids:
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id]:
            break
        freed.append(block_id)
    for block_id in freed:
        self.free_ids[block_id] = None
        self.free_ids.move_to_end(block_id, last=self.prefixes.holds(block_id))


# rule 2: right for one or two owners
@mistake(
    "block_manager.BlockPool.free",
    "two owners still read block 0: is it in the queue?",
)
def free(self, block_ids: Iterable[int]) -> None:
    for block_id in block_ids:
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] != 1:
            self.free_ids[block_id] = None
            self.free_ids.move_to_end(block_id, last=self.prefixes.holds(block_id))


# rule 6: in the order of the block numbers
@mistake("block_manager.BlockPool.free", "are they in the queue in the same order?")
def free(self, block_ids: Iterable[int]) -> None:
    for block_id in sorted(block_ids):
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free_ids[block_id] = None
            self.free_ids.move_to_end(block_id, last=self.prefixes.holds(block_id))


# -- BlockManager.can_allocate --


# rule 7
@mistake(
    "block_manager.BlockManager.can_allocate", "9 of 10 leave 1, the watermark is 2: is it kept?"
)
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    return num_blocks <= self.pool.num_free


# rule 7
@mistake(
    "block_manager.BlockManager.can_allocate",
    "the watermark is for running requests: do you keep it from them, too?",
)
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    return num_blocks <= 0 or num_blocks + self.num_watermark_blocks <= self.pool.num_free


# rule 7
@mistake(
    "block_manager.BlockManager.can_allocate",
    "0 blocks are wanted: does the watermark refuse them?",
)
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    reserve = self.num_watermark_blocks if keep_watermark else 0
    return num_blocks + reserve <= self.pool.num_free


# rule 7
@mistake(
    "block_manager.BlockManager.can_allocate",
    "2 of 3 blocks are free and 2 wanted: is it < or <=?",
)
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    reserve = self.num_watermark_blocks if keep_watermark else 0
    return num_blocks <= 0 or num_blocks + reserve < self.pool.num_free


# rule 6
@mistake(
    "block_manager.BlockManager.can_allocate",
    "cached blocks without an owner are free: do you subtract them?",
)
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    reserve = self.num_watermark_blocks if keep_watermark else 0
    num_free = self.pool.num_free - len(self.cached_blocks())
    return num_blocks <= 0 or num_blocks + reserve <= num_free


# rule 7
@mistake("block_manager.BlockManager.can_allocate", "do you compare with exactly 0?")
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    if num_blocks == 0:
        return True
    reserve = self.num_watermark_blocks if keep_watermark else 0
    return num_blocks <= self.pool.num_free - reserve


# rule 7: a share of the blocks that are free at the moment
@mistake(
    "block_manager.BlockManager.can_allocate",
    "5 blocks are free and 2 of them reserved: do you use num_free and num_watermark_blocks?",
)
def can_allocate(self, num_blocks: int, keep_watermark: bool) -> bool:
    free = (
        self.pool.num_blocks - self.num_watermark_blocks if keep_watermark else self.pool.num_free
    )
    return num_blocks <= 0 or num_blocks <= free


# -- BlockManager.allocate --


# rule 1
@mistake("block_manager.BlockManager.allocate", "need 1: does the table get exactly that many?")
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = num_tokens // self.block_size + 1 - len(request.block_table)
    if not self.can_allocate(missing, keep_watermark):
        return False
    if missing > 0:
        request.block_table += self.pool.allocate(missing)
    return True


# rule 1
@mistake(
    "block_manager.BlockManager.allocate",
    "the table already covers some tokens: do you take blocks for those again?",
)
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = blocks_for(num_tokens, self.block_size)
    if not self.can_allocate(missing, keep_watermark):
        return False
    request.block_table += self.pool.allocate(missing)
    return True


# rule 1
@mistake(
    "block_manager.BlockManager.allocate",
    "no block is free: does the next token still fit into the last block of the table?",
)
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = blocks_for(num_tokens, self.block_size) - len(request.block_table)
    if not self.can_allocate(max(missing, 1), keep_watermark):
        return False
    if missing > 0:
        request.block_table += self.pool.allocate(missing)
    return True


# rule 4
@mistake(
    "block_manager.BlockManager.allocate",
    "with no block free, return False: do you ask can_allocate first?",
)
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = blocks_for(num_tokens, self.block_size) - len(request.block_table)
    if missing > 0:
        request.block_table += self.pool.allocate(missing)
    return True


# rule 4
@mistake(
    "block_manager.BlockManager.allocate", "a refusal takes no block: do you ask for all at once?"
)
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    while len(request.block_table) < blocks_for(num_tokens, self.block_size):
        if not self.can_allocate(1, keep_watermark):
            return False
        request.block_table += self.pool.allocate(1)
    return True


# rule 5
@mistake(
    "block_manager.BlockManager.allocate",
    "a table grows at its end: do its first blocks keep their places?",
)
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = blocks_for(num_tokens, self.block_size) - len(request.block_table)
    if not self.can_allocate(missing, keep_watermark):
        return False
    if missing > 0:
        request.block_table = self.pool.allocate(missing) + request.block_table
    return True


# rule 7
@mistake(
    "block_manager.BlockManager.allocate",
    "9 of 10 blocks would leave 1, the watermark is 2: do you pass keep_watermark on?",
)
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = blocks_for(num_tokens, self.block_size) - len(request.block_table)
    if not self.can_allocate(missing, False):
        return False
    if missing > 0:
        request.block_table += self.pool.allocate(missing)
    return True


# rule 6
@mistake(
    "block_manager.BlockManager.allocate",
    "a refusal forgets no content: do you take before you ask?",
)
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    taken = []
    while len(request.block_table) + len(taken) < blocks_for(num_tokens, self.block_size):
        if not self.can_allocate(1, keep_watermark):
            self.pool.free(taken)
            return False
        taken += self.pool.allocate(1)
    request.block_table += taken
    return True


# rule 5: right for tables that happen to ascend
@mistake(
    "block_manager.BlockManager.allocate",
    "a table grows at its end: do its first blocks keep their places?",
)
def allocate(self, request: Request, num_tokens: int, keep_watermark: bool = False) -> bool:
    missing = blocks_for(num_tokens, self.block_size) - len(request.block_table)
    if not self.can_allocate(missing, keep_watermark):
        return False
    if missing > 0:
        request.block_table = sorted(request.block_table + self.pool.allocate(missing))
    return True
