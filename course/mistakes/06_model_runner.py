"""Wrong answers that people really give, each with the words that its check must say.

Read as text, never imported: the names in the bodies are those of `minivllm/rows.py`,
`step_input.py`, `ops.py` and `model_runner.py`. Above each stands the rule of the lesson that the
answer breaks.
"""

# -- rows.Rows.write_new_blocks --


# rule 1: the whole table again, as nano-vllm's prepare_decode does
@mistake("rows.Rows.write_new_blocks", "do you write the whole table again?")
def write_new_blocks(self, requests: Sequence[Request], rows: Sequence[int]) -> None:
    entries = [
        (row, index, block)
        for request, row in zip(requests, rows)
        for index, block in enumerate(request.block_table)
        if len(request.block_table) > self.num_blocks[row]
    ]
    if not entries:
        return
    for request, row in zip(requests, rows):
        self.num_blocks[row] = len(request.block_table)
    row_ids, indices, blocks = zip(*entries)
    self.block_table[list(row_ids), list(indices)] = to_device(blocks, torch.int32, self.device)


# rule 1
@mistake("rows.Rows.write_new_blocks", "does num_blocks say how many entries are on the device")
def write_new_blocks(self, requests: Sequence[Request], rows: Sequence[int]) -> None:
    for request, row in zip(requests, rows):
        new = request.block_table[self.num_blocks[row] :]
        start = self.num_blocks[row]
        if new:
            new_blocks = to_device(new, torch.int32, self.device)
            self.block_table[row, start : start + len(new)] = new_blocks


# rule 1: right, and slow
@mistake("rows.Rows.write_new_blocks", "does each request, or each block, get a copy of its own?")
def write_new_blocks(self, requests: Sequence[Request], rows: Sequence[int]) -> None:
    for request, row in zip(requests, rows):
        start, end = self.num_blocks[row], len(request.block_table)
        if end > start:
            new = to_device(request.block_table[start:], torch.int32, self.device)
            self.block_table[row, start:end] = new
            self.num_blocks[row] = end


# rule 1
@mistake("rows.Rows.write_new_blocks", "does each table go into the request's own row?")
def write_new_blocks(self, requests: Sequence[Request], rows: Sequence[int]) -> None:
    gained = []
    for row, request in enumerate(requests):
        for index in range(self.num_blocks[row], len(request.block_table)):
            gained.append((row, index, request.block_table[index]))
        self.num_blocks[row] = len(request.block_table)
    if gained:
        numbers = [number for column in zip(*gained) for number in column]
        row_ids, indices, blocks = to_device(numbers, torch.int64, self.device).view(3, -1)
        self.block_table[row_ids, indices] = blocks.int()


# -- step_input.token_positions --


# rule 3
@mistake("step_input.token_positions", "does its count begin at its own first token")
def token_positions(starts: Tensor, lengths: Tensor, owners: Tensor) -> Tensor:
    return torch.arange(len(owners), device=owners.device) + starts[owners]


# rule 3
@mistake("step_input.token_positions", "the first token of the step is position 9 of its text")
def token_positions(starts: Tensor, lengths: Tensor, owners: Tensor) -> Tensor:
    places = torch.arange(len(owners), device=owners.device)
    return places - lengths.cumsum(0)[owners] + starts[owners]


# rule 2 (SGLang's compute_position_torch loops like this where it has no kernel)
@mistake("step_input.token_positions", "do you read a number of a tensor (int, tolist, a loop")
def token_positions(starts: Tensor, lengths: Tensor, owners: Tensor) -> Tensor:
    parts = [torch.arange(s, s + n) for s, n in zip(starts.tolist(), lengths.tolist())]
    return torch.cat(parts)


# rule 3
@mistake(
    "step_input.token_positions", "starts and lengths are the plan's: do you add to them in place?"
)
def token_positions(starts: Tensor, lengths: Tensor, owners: Tensor) -> Tensor:
    starts -= lengths.cumsum(0) - lengths
    return torch.arange(len(owners), device=owners.device) + starts[owners]


# -- ops.slot_mapping --


# rule 4
@mistake("ops.slot_mapping", "which of // and % chooses the entry of the table?")
def slot_mapping(
    block_tables: Tensor, owners: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    blocks = block_tables[owners, positions % block_size].long()
    return blocks * block_size + positions // block_size


# rule 4
@mistake("ops.slot_mapping", "does it look into that row of block_tables?")
def slot_mapping(
    block_tables: Tensor, owners: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    blocks = block_tables.flatten()[positions // block_size].long()
    return blocks * block_size + positions % block_size


# rule 4
@mistake("ops.slot_mapping", "is the product with the block size computed in 64 bits?")
def slot_mapping(
    block_tables: Tensor, owners: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    first_slots = block_tables[owners, positions // block_size] * block_size
    return first_slots.long() + positions % block_size


# -- step_input.gather --


# rule 1
@mistake("step_input.gather", "do you look the tokens up by chunk, or by row?")
def gather(rows: Rows, plan: StepPlan, block_size: int, slot_mapping: SlotMapping) -> StepInput:
    owners, positions, starts, last = token_places(plan)
    block_table = rows.block_table[plan.row_ids]
    metadata = AttentionMetadata(
        block_table=block_table,
        query_starts=starts,
        seq_lens=(plan.starts + plan.lengths).int(),
        num_decodes=plan.num_decodes,
        max_query_len=plan.max_query_len,
        max_seq_len=plan.max_seq_len,
    )
    input_ids = rows.token_ids[owners, positions]
    slots = slot_mapping(block_table, owners, positions, block_size)
    return StepInput(input_ids, positions, slots, last, metadata)


# rule 4
@mistake("step_input.gather", "which block tables do you give to slot_mapping?")
def gather(rows: Rows, plan: StepPlan, block_size: int, slot_mapping: SlotMapping) -> StepInput:
    owners, positions, starts, last = token_places(plan)
    metadata = AttentionMetadata(
        block_table=rows.block_table[plan.row_ids],
        query_starts=starts,
        seq_lens=(plan.starts + plan.lengths).int(),
        num_decodes=plan.num_decodes,
        max_query_len=plan.max_query_len,
        max_seq_len=plan.max_seq_len,
    )
    input_ids = rows.token_ids[plan.row_ids[owners], positions]
    slots = slot_mapping(rows.block_table, owners, positions, block_size)
    return StepInput(input_ids, positions, slots, last, metadata)


# rule 5
@mistake("step_input.gather", "do its keys end with the chunk?")
def gather(rows: Rows, plan: StepPlan, block_size: int, slot_mapping: SlotMapping) -> StepInput:
    owners, positions, starts, last = token_places(plan)
    block_table = rows.block_table[plan.row_ids]
    metadata = AttentionMetadata(
        block_table=block_table,
        query_starts=starts,
        seq_lens=plan.starts.int(),  # what was there before this step
        num_decodes=plan.num_decodes,
        max_query_len=plan.max_query_len,
        max_seq_len=plan.max_seq_len,
    )
    input_ids = rows.token_ids[plan.row_ids[owners], positions]
    slots = slot_mapping(block_table, owners, positions, block_size)
    return StepInput(input_ids, positions, slots, last, metadata)


# rule 2: a graph that replays it would go on from there
@mistake("step_input.gather", "the plan is only read: do you add lengths to starts in place?")
def gather(rows: Rows, plan: StepPlan, block_size: int, slot_mapping: SlotMapping) -> StepInput:
    owners, positions, starts, last = token_places(plan)
    positions = positions.clone()
    block_table = rows.block_table[plan.row_ids]
    plan.starts += plan.lengths
    metadata = AttentionMetadata(
        block_table=block_table,
        query_starts=starts,
        seq_lens=plan.starts.int(),
        num_decodes=plan.num_decodes,
        max_query_len=plan.max_query_len,
        max_seq_len=plan.max_seq_len,
    )
    input_ids = rows.token_ids[plan.row_ids[owners], positions]
    slots = slot_mapping(block_table, owners, positions, block_size)
    return StepInput(input_ids, positions, slots, last, metadata)


# -- ops.decode_attention --


# rule 6
@mistake("ops.decode_attention", "is the second slot masked?")
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
) -> Tensor:
    k = gather_blocks(k_cache, block_table, max_seq_len)
    v = gather_blocks(v_cache, block_table, max_seq_len)
    groups = q.unflatten(1, (k.shape[2], -1))
    scores = torch.einsum("nkgd,nskd->nkgs", groups, k) * scale
    return torch.einsum("nkgs,nskd->nkgd", scores.softmax(-1), v).flatten(1, 2)


# rule 6
@mistake("ops.decode_attention", "do heads 0 and 1 share the first, and 2 and 3 the second?")
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
) -> Tensor:
    k = gather_blocks(k_cache, block_table, max_seq_len)
    v = gather_blocks(v_cache, block_table, max_seq_len)
    group = q.shape[1] // k.shape[2]
    k, v = k.repeat(1, 1, group, 1), v.repeat(1, 1, group, 1)  # 0 1 0 1, not 0 0 1 1
    scores = torch.einsum("nhd,nshd->nhs", q, k) * scale
    hidden = torch.arange(max_seq_len, device=q.device) >= seq_lens[:, None]
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    return torch.einsum("nhs,nshd->nhd", scores.softmax(-1), v)


# rule 7
@mistake("ops.decode_attention", "is something multiplied by infinity where it is 0?")
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
) -> Tensor:
    k = gather_blocks(k_cache, block_table, max_seq_len)
    v = gather_blocks(v_cache, block_table, max_seq_len)
    groups = q.unflatten(1, (k.shape[2], -1))
    scores = torch.einsum("nkgd,nskd->nkgs", groups, k) * scale
    hidden = torch.arange(max_seq_len, device=q.device) >= seq_lens[:, None]
    scores = scores + hidden[:, None, None] * float("-inf")
    return torch.einsum("nkgs,nskd->nkgd", scores.softmax(-1), v).flatten(1, 2)


# rule 2
@mistake("ops.decode_attention", "do you ask for a maximum (max_seq_len is known)")
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
) -> Tensor:
    longest = int(seq_lens.max())
    k = gather_blocks(k_cache, block_table, longest)
    v = gather_blocks(v_cache, block_table, longest)
    groups = q.unflatten(1, (k.shape[2], -1))
    scores = torch.einsum("nkgd,nskd->nkgs", groups, k) * scale
    hidden = torch.arange(longest, device=q.device) >= seq_lens[:, None]
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    return torch.einsum("nkgs,nskd->nkgd", scores.softmax(-1), v).flatten(1, 2)


# rule 6
@mistake("ops.decode_attention", "q is only read: do you multiply the scale into it in place?")
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
) -> Tensor:
    k = gather_blocks(k_cache, block_table, max_seq_len)
    v = gather_blocks(v_cache, block_table, max_seq_len)
    q *= scale
    groups = q.unflatten(1, (k.shape[2], -1))
    scores = torch.einsum("nkgd,nskd->nkgs", groups, k)
    hidden = torch.arange(max_seq_len, device=q.device) >= seq_lens[:, None]
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    return torch.einsum("nkgs,nskd->nkgd", scores.softmax(-1), v).flatten(1, 2)


# -- step_input.scatter --


# rule 8
@mistake("step_input.scatter", "so the new token is position 3 of its row")
def scatter(rows: Rows, plan: StepPlan, token_ids: Tensor) -> None:
    last = (plan.starts + plan.lengths - 1)[plan.sampling]
    rows.token_ids[plan.row_ids[plan.sampling], last] = token_ids.int()


# rule 8
@mistake("step_input.scatter", "which row does chunk 1 belong to?")
def scatter(rows: Rows, plan: StepPlan, token_ids: Tensor) -> None:
    ends = (plan.starts + plan.lengths)[plan.sampling]
    rows.token_ids[plan.row_ids[: len(plan.sampling)], ends] = token_ids.int()


# rule 2: right until a graph replays it
@mistake("step_input.scatter", "do you use plan.rows or plan.ends?")
def scatter(rows: Rows, plan: StepPlan, token_ids: Tensor) -> None:
    rows.token_ids[plan.rows, plan.ends] = token_ids.int()


# rule 2
@mistake("step_input.scatter", "do you read one, or a row, on the host?")
def scatter(rows: Rows, plan: StepPlan, token_ids: Tensor) -> None:
    ends = plan.starts + plan.lengths
    for chunk, token_id in zip(plan.sampling.tolist(), token_ids.tolist()):
        rows.token_ids[plan.row_ids[chunk], ends[chunk]] = token_id


# -- model_runner.ModelRunner.forward --


# rule 6
@mistake("model_runner.ModelRunner.forward", "do you store first?")
def forward(self, plan: StepPlan) -> Tensor:
    inputs = gather(self.rows, plan, self.block_size, self.ops.slot_mapping)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self.kv_cache[layer]
        out = self.ops.attention(q, k_cache, v_cache, inputs.metadata, self.scale)
        self.ops.store_kv(k, v, k_cache, v_cache, inputs.slot_mapping)
        return out

    hidden = self.model(inputs.input_ids, inputs.positions, attend)
    return self.model.logits(hidden[inputs.last]) if plan.params else hidden[:0]


# rule 8
@mistake("model_runner.ModelRunner.forward", "are there logits for its last token alone?")
def forward(self, plan: StepPlan) -> Tensor:
    inputs = gather(self.rows, plan, self.block_size, self.ops.slot_mapping)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self.kv_cache[layer]
        self.ops.store_kv(k, v, k_cache, v_cache, inputs.slot_mapping)
        return self.ops.attention(q, k_cache, v_cache, inputs.metadata, self.scale)

    return self.model.logits(self.model(inputs.input_ids, inputs.positions, attend))


# rule 8: right for one request at a time
@mistake("model_runner.ModelRunner.forward", "whose logits are these?")
def forward(self, plan: StepPlan) -> Tensor:
    inputs = gather(self.rows, plan, self.block_size, self.ops.slot_mapping)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self.kv_cache[layer]
        self.ops.store_kv(k, v, k_cache, v_cache, inputs.slot_mapping)
        return self.ops.attention(q, k_cache, v_cache, inputs.metadata, self.scale)

    hidden = self.model(inputs.input_ids, inputs.positions, attend)
    return self.model.logits(hidden[-len(plan.params) :]) if plan.params else hidden[:0]


# rule 6
@mistake("model_runner.ModelRunner.forward", "does each use the caches of its number?")
def forward(self, plan: StepPlan) -> Tensor:
    inputs = gather(self.rows, plan, self.block_size, self.ops.slot_mapping)
    k_cache, v_cache = self.kv_cache[0]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.ops.store_kv(k, v, k_cache, v_cache, inputs.slot_mapping)
        return self.ops.attention(q, k_cache, v_cache, inputs.metadata, self.scale)

    hidden = self.model(inputs.input_ids, inputs.positions, attend)
    return self.model.logits(hidden[inputs.last]) if plan.params else hidden[:0]
