"""Wrong answers that people really give, each with words that its check must print.

Read as text, never imported: the names in the bodies are those of `minivllm/tensor_parallel.py`
and `leader.py`. Above each is the rule of the lesson that it breaks.
"""

# -- tensor_parallel.kv_heads_of --


# rule 2: nano-vllm refuses this; a plain division leaves some ranks without a head
@mistake(
    "tensor_parallel.kv_heads_of",
    "does every rank have one head?",
)
def kv_heads_of(num_kv_heads: int, rank: int, size: int) -> range:
    start, stop = rank * num_kv_heads // size, (rank + 1) * num_kv_heads // size
    return range(start, stop)


# rule 2
@mistake(
    "tensor_parallel.kv_heads_of",
    "the first half of the query heads, on ranks 0 and 1, reads head 0: do both hold it?",
)
def kv_heads_of(num_kv_heads: int, rank: int, size: int) -> range:
    if num_kv_heads >= size:
        return share_of(num_kv_heads, rank, size)
    head = rank % num_kv_heads
    return range(head, head + 1)


# -- tensor_parallel.part_of --


# rule 1: everything by its outputs
@mistake(
    "tensor_parallel.part_of",
    "o_proj reads them: are its columns of these heads on rank 1 (dimension 1)?",
)
def part_of(name: str, config: ModelConfig, rank: int, size: int) -> Part | None:
    entries = entries_of(name.split(".")[-2], config, rank, size)
    if entries is None:
        return None
    mine, whole = entries
    return Part(0, mine.start, mine.stop, whole)


# rule 1: rows and columns the other way round, as in the formula x @ W
@mistake(
    "tensor_parallel.part_of",
    "a weight is [out, in], and q_proj outputs heads: does rank 1 have rows 192-383?",
)
def part_of(name: str, config: ModelConfig, rank: int, size: int) -> Part | None:
    module, kind = name.split(".")[-2:]
    entries = entries_of(module, config, rank, size)
    is_row_parallel = module in ROW_PARALLEL
    if entries is None or (is_row_parallel and kind == "bias"):
        return None
    mine, whole = entries
    dim = 0 if kind == "bias" or is_row_parallel else 1
    return Part(dim, mine.start, mine.stop, whole)


# rule 4
@mistake(
    "tensor_parallel.part_of",
    "o_proj and down_proj are summed over all ranks: does each rank hold the whole bias?",
)
def part_of(name: str, config: ModelConfig, rank: int, size: int) -> Part | None:
    module, kind = name.split(".")[-2:]
    entries = entries_of(module, config, rank, size)
    if entries is None:
        return None
    mine, whole = entries
    dim = 1 if module in ROW_PARALLEL and kind == "weight" else 0
    return Part(dim, mine.start, mine.stop, whole)


# rule 4: no bias is ever cut
@mistake(
    "tensor_parallel.part_of",
    "rank 1 computes outputs 192-383 of q_proj: does it hold their biases?",
)
def part_of(name: str, config: ModelConfig, rank: int, size: int) -> Part | None:
    module, kind = name.split(".")[-2:]
    entries = entries_of(module, config, rank, size)
    if entries is None or kind == "bias":
        return None
    mine, whole = entries
    return Part(int(module in ROW_PARALLEL), mine.start, mine.stop, whole)


# rule 2: right until ranks share a head
@mistake(
    "tensor_parallel.part_of",
    "do ranks 0 and 1 hold head 0, and ranks 2 and 3 head 1?",
)
def part_of(name: str, config: ModelConfig, rank: int, size: int) -> Part | None:
    module, kind = name.split(".")[-2:]
    entries = entries_of(module, config, rank, size)
    is_row_parallel = module in ROW_PARALLEL
    if entries is None or (is_row_parallel and kind == "bias"):
        return None
    mine, whole = entries
    return Part(int(is_row_parallel), rank * len(mine), (rank + 1) * len(mine), whole)


# -- tensor_parallel.cut --


# rule 3
@mistake("tensor_parallel.cut", "do you read the whole tensor and then cut it?")
def cut(tensor: Tensor | StoredTensor, part: Part) -> Tensor:
    everything = tensor[:]
    length = max(min(part.stop, part.whole) - part.start, 0)
    start = min(part.start, part.whole)
    piece = everything.narrow(part.dim, start, length)
    missing = part.stop - part.start - length
    return torch.cat((piece, piece.new_zeros(missing, *piece.shape[1:]))) if missing else piece


# rule 5
@mistake("tensor_parallel.cut", "rows 3 to 5 of a file with 5: is a row of zeros added?")
def cut(tensor: Tensor | StoredTensor, part: Part) -> Tensor:
    entries = slice(min(part.start, part.whole), min(part.stop, part.whole))
    return tensor[entries] if part.dim == 0 else tensor[:, entries]


# rule 5: right until a rank has nothing but padding
@mistake(
    "tensor_parallel.cut",
    "rows 6 to 8 of 5 are all padding: are there three rows of zeros?",
)
def cut(tensor: Tensor | StoredTensor, part: Part) -> Tensor:
    stop = min(part.stop, part.whole)
    if part.dim == 1:
        return tensor[:, part.start : stop]
    piece = tensor[part.start : stop] if part.start < stop else tensor[:0]
    missing = part.stop - stop
    return torch.cat((piece, piece.new_zeros(missing, *piece.shape[1:]))) if missing else piece


# rule 5
@mistake("tensor_parallel.cut", "the tensor is bfloat16: which dtype do your zeros have?")
def cut(tensor: Tensor | StoredTensor, part: Part) -> Tensor:
    entries = slice(min(part.start, part.whole), min(part.stop, part.whole))
    piece = tensor[entries] if part.dim == 0 else tensor[:, entries]
    missing = (part.stop - part.start) - piece.shape[part.dim]
    return torch.cat((piece, torch.zeros(missing, *piece.shape[1:]))) if missing else piece


# -- tensor_parallel.RowParallelLinear.forward --


# rule 4
@mistake(
    "tensor_parallel.RowParallelLinear.forward", "is it in the result once, not once for each rank?"
)
def forward(self, x: Tensor) -> Tensor:
    part = self.linear(x)
    if self.bias is not None:
        part = part + self.bias
    return self.group.all_reduce(part)


# rule 1
@mistake("tensor_parallel.RowParallelLinear.forward", "are the parts of all ranks added up?")
def forward(self, x: Tensor) -> Tensor:
    part = self.linear(x)
    return part if self.bias is None else part + self.bias


# rule 8: the leader alone
@mistake(
    "tensor_parallel.RowParallelLinear.forward",
    "every rank waits for the others: does each of them call all_reduce?",
)
def forward(self, x: Tensor) -> Tensor:
    total = self.linear(x)
    if self.group.rank == 0:
        total = self.group.all_reduce(total)
    return total if self.bias is None else total + self.bias


# rule 4: what should come before the sum, after it
@mistake(
    "tensor_parallel.RowParallelLinear.forward", "does rank 1 have the bias in its result too?"
)
def forward(self, x: Tensor) -> Tensor:
    total = self.group.all_reduce(self.linear(x))
    return total + self.bias if self.bias is not None and self.group.rank == 0 else total


# -- tensor_parallel.VocabParallelEmbedding.forward --


# rule 5
@mistake(
    "tensor_parallel.VocabParallelEmbedding.forward",
    "Does a rank add one of its rows for another rank's token?",
)
def forward(self, input_ids: Tensor) -> Tensor:
    rows = (input_ids - self.start).clamp(0, self.num_rows - 1)
    return self.group.all_reduce(self.embedding(rows))


# rule 8
@mistake(
    "tensor_parallel.VocabParallelEmbedding.forward",
    "none of the tokens is rank 0's: does it still call all_reduce?",
)
def forward(self, input_ids: Tensor) -> Tensor:
    rows = input_ids - self.start
    is_mine = (rows >= 0) & (rows < self.num_rows)
    x = self.embedding(rows * is_mine) * is_mine.unsqueeze(1)
    if not is_mine.any():
        return x
    return self.group.all_reduce(x)


# chapter 08: right, and no graph can hold it
@mistake(
    "tensor_parallel.VocabParallelEmbedding.forward",
    "do you read a tensor's value on the host (if, any, x[mask])",
)
def forward(self, input_ids: Tensor) -> Tensor:
    rows = input_ids - self.start
    is_mine = (rows >= 0) & (rows < self.num_rows)
    x = self.embedding.weight.new_zeros(len(rows), self.embedding.weight.shape[1])
    x[is_mine] = self.embedding(rows[is_mine])
    return self.group.all_reduce(x)


# -- tensor_parallel.VocabParallelHead.forward --


# rule 5: right for one request
@mistake(
    "tensor_parallel.VocabParallelHead.forward",
    "Which of R and N must come first before you flatten?",
)
def forward(self, hidden: Tensor) -> Tensor:
    parts = self.group.all_gather(self.linear(hidden))
    return parts.reshape(len(hidden), -1)[:, : self.vocab_size]


# rule 5
@mistake("tensor_parallel.VocabParallelHead.forward", "do you return the padding's logit too?")
def forward(self, hidden: Tensor) -> Tensor:
    return torch.cat(list(self.group.all_gather(self.linear(hidden))), dim=1)


# -- leader.Directory.describe --


# rule 7
@mistake(
    "leader.Directory.describe",
    "the table grew from [3] to [3, 8, 2]: do you send only the new blocks?",
)
def describe(self, chunks: Sequence[Chunk], is_plain: bool) -> StepMessage:
    message = StepMessage(self.released, [], [], [], is_plain)
    self.released = []
    for chunk in chunks:
        request = chunk.request
        if request.request_id not in self.number_of:
            message.new_tokens.append((self.introduce(request), request.token_ids))
        number = self.number_of[request.request_id]
        if len(request.block_table) > self.num_blocks[number]:
            message.new_blocks.append((number, request.block_table))
            self.num_blocks[number] = len(request.block_table)
        flags = chunk.samples, chunk.is_decode
        message.chunks.append((number, chunk.start, chunk.length, *flags))
    return message


# rule 7
@mistake("leader.Directory.describe", "blocks 8 and 2 were sent a step ago: do you record it?")
def describe(self, chunks: Sequence[Chunk], is_plain: bool) -> StepMessage:
    message = StepMessage(self.released, [], [], [], is_plain)
    self.released = []
    for chunk in chunks:
        request = chunk.request
        if request.request_id not in self.number_of:
            number = self.introduce(request)
            message.new_tokens.append((number, request.token_ids))
            message.new_blocks.append((number, request.block_table))
            self.num_blocks[number] = len(request.block_table)
        else:
            number = self.number_of[request.request_id]
            gained = request.block_table[self.num_blocks[number] :]
            if gained:
                message.new_blocks.append((number, gained))
        flags = chunk.samples, chunk.is_decode
        message.chunks.append((number, chunk.start, chunk.length, *flags))
    return message


# rule 7
@mistake("leader.Directory.describe", "the workers received it a step ago: is the list emptied?")
def describe(self, chunks: Sequence[Chunk], is_plain: bool) -> StepMessage:
    message = StepMessage(list(self.released), [], [], [], is_plain)
    for chunk in chunks:
        request = chunk.request
        if request.request_id not in self.number_of:
            message.new_tokens.append((self.introduce(request), request.token_ids))
        number = self.number_of[request.request_id]
        gained = request.block_table[self.num_blocks[number] :]
        if gained:
            message.new_blocks.append((number, gained))
            self.num_blocks[number] = len(request.block_table)
        flags = chunk.samples, chunk.is_decode
        message.chunks.append((number, chunk.start, chunk.length, *flags))
    return message


# rule 6 (nano-vllm's issue 144)
@mistake("leader.Directory.describe", "is is_decode the chunk's own, or guessed from the length?")
def describe(self, chunks: Sequence[Chunk], is_plain: bool) -> StepMessage:
    message = StepMessage(self.released, [], [], [], is_plain)
    self.released = []
    for chunk in chunks:
        request = chunk.request
        if request.request_id not in self.number_of:
            message.new_tokens.append((self.introduce(request), request.token_ids))
        number = self.number_of[request.request_id]
        gained = request.block_table[self.num_blocks[number] :]
        if gained:
            message.new_blocks.append((number, gained))
            self.num_blocks[number] = len(request.block_table)
        entry = (number, chunk.start, chunk.length, chunk.samples, chunk.length == 1)
        message.chunks.append(entry)
    return message


# -- leader.Follower.compute --


# rule 6
@mistake(
    "leader.Follower.compute", "is is_decode the message's, or do you infer it from the length?"
)
def compute(self, message: StepMessage) -> None:
    self.hear(message)
    chunks = [
        Chunk(self.requests[number], start, length, samples, length == 1)
        for number, start, length, samples, _ in message.chunks
    ]
    plan = self.runner.plan(chunks)
    plan.is_plain = message.is_plain
    self.runner.step(plan)


# rule 6
@mistake(
    "leader.Follower.compute",
    "the worker's own plan always says plain: do you take is_plain from the message?",
)
def compute(self, message: StepMessage) -> None:
    self.hear(message)
    chunks = [
        Chunk(self.requests[number], start, length, samples, is_decode)
        for number, start, length, samples, is_decode in message.chunks
    ]
    self.runner.step(self.runner.plan(chunks))


# rule 7: the step before the news
@mistake(
    "leader.Follower.compute",
    "the first message: do you call hear before you look up its requests?",
)
def compute(self, message: StepMessage) -> None:
    chunks = [
        Chunk(self.requests[number], start, length, samples, is_decode)
        for number, start, length, samples, is_decode in message.chunks
    ]
    self.hear(message)
    plan = self.runner.plan(chunks)
    plan.is_plain = message.is_plain
    self.runner.step(plan)


# rule 6: the leader's order is part of the plan
@mistake("leader.Follower.compute", "request 5 is first in the message: is it first in the plan?")
def compute(self, message: StepMessage) -> None:
    self.hear(message)
    chunks = [
        Chunk(self.requests[number], start, length, samples, is_decode)
        for number, start, length, samples, is_decode in sorted(message.chunks)
    ]
    plan = self.runner.plan(chunks)
    plan.is_plain = message.is_plain
    self.runner.step(plan)
