"""Right answers in other styles, for `test_course_alternatives`; read as text, never imported."""


@answer("tensor_parallel.kv_heads_of")
def kv_heads_of(num_kv_heads: int, rank: int, size: int) -> range:
    first = rank * num_kv_heads // size
    return range(first, first + max(1, num_kv_heads // size))


@answer("tensor_parallel.kv_heads_of")
def kv_heads_of(num_kv_heads, rank, size):
    if num_kv_heads % size == 0:
        each = num_kv_heads // size
        return range(rank * each, rank * each + each)
    ranks_per_head = size // num_kv_heads
    return range(rank // ranks_per_head, rank // ranks_per_head + 1)


@answer("tensor_parallel.part_of")
def part_of(name: str, config: ModelConfig, rank: int, size: int) -> Part | None:
    *_, module, kind = name.split(".")
    found = entries_of(module, config, rank, size)
    if found is None:
        return None
    entries, whole = found
    if module not in ROW_PARALLEL:
        return Part(dim=0, start=entries.start, stop=entries.stop, whole=whole)
    if kind == "bias":
        return None
    return Part(dim=1, start=entries.start, stop=entries.stop, whole=whole)


@answer("tensor_parallel.cut")
def cut(tensor: Tensor | StoredTensor, part: Part) -> Tensor:
    if part.dim == 1:
        return tensor[:, part.start : part.stop]
    start, stop = (min(end, part.whole) for end in (part.start, part.stop))
    piece = tensor[start:stop]
    rows = piece.new_zeros((part.stop - part.start, *piece.shape[1:]))
    rows[: len(piece)] = piece
    return rows


@answer("tensor_parallel.cut")
def cut(tensor, part):
    import torch.nn.functional as functional

    ends = slice(min(part.start, part.whole), min(part.stop, part.whole))
    piece = tensor[(ends,) if part.dim == 0 else (slice(None), ends)]
    missing = part.stop - part.start - piece.shape[part.dim]
    if missing == 0:
        return piece
    return functional.pad(piece, [0, 0] * (piece.dim() - 1) + [0, missing])


@answer("tensor_parallel.RowParallelLinear.forward")
def forward(self, x: Tensor) -> Tensor:
    out = self.linear(x)
    out = self.group.all_reduce(out)
    if self.bias is not None:
        out = out + self.bias
    return out


@answer("tensor_parallel.VocabParallelEmbedding.forward")
def forward(self, input_ids: Tensor) -> Tensor:
    stop = self.start + self.num_rows
    is_mine = (input_ids >= self.start) & (input_ids < stop)
    rows = torch.where(is_mine, input_ids - self.start, 0)
    x = self.embedding(rows) * is_mine[:, None]
    return self.group.all_reduce(x)


@answer("tensor_parallel.VocabParallelEmbedding.forward")
def forward(self, input_ids):
    shifted = input_ids - self.start
    rows = shifted.clamp(0, self.num_rows - 1)
    found = self.embedding(rows)
    return self.group.all_reduce(torch.where((rows == shifted).unsqueeze(-1), found, 0.0))


@answer("tensor_parallel.VocabParallelHead.forward")
def forward(self, hidden: Tensor) -> Tensor:
    parts = self.group.all_gather(self.linear(hidden))
    return torch.cat(list(parts), dim=-1)[:, : self.vocab_size]


@answer("tensor_parallel.VocabParallelHead.forward")
def forward(self, hidden):
    parts = self.group.all_gather(self.linear(hidden))
    logits = parts.permute(1, 0, 2).reshape(len(hidden), -1)
    return logits.narrow(1, 0, self.vocab_size)


@answer("leader.Follower.compute")
def compute(self, message: StepMessage) -> None:
    from dataclasses import replace

    self.hear(message)
    chunks = []
    for number, start, length, samples, is_decode in message.chunks:
        request = self.requests[number]
        chunks.append(
            Chunk(request=request, start=start, length=length, samples=samples, is_decode=is_decode)
        )
    self.runner.step(replace(self.runner.plan(chunks), is_plain=message.is_plain))
