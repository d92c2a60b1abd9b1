"""Right answers in other styles, for `test_course_alternatives`; read as text, never imported."""


@answer("rows.Rows.write_new_blocks")
def write_new_blocks(self, requests: Sequence[Request], rows: Sequence[int]) -> None:
    row_ids, indices, blocks = [], [], []
    for request, row in zip(requests, rows):
        known, total = self.num_blocks[row], len(request.block_table)
        row_ids += [row] * (total - known)
        indices += range(known, total)
        blocks += request.block_table[known:]
        self.num_blocks[row] = total
    if blocks:
        numbers = to_device([*row_ids, *indices, *blocks], torch.int64, self.device)
        row_ids, indices, blocks = numbers.view(3, -1)
        self.block_table[row_ids, indices] = blocks.int()


@answer("rows.Rows.write_new_blocks")
def write_new_blocks(self, requests, rows):
    numbers = []
    for place in range(len(requests)):
        row, table = rows[place], requests[place].block_table
        while self.num_blocks[row] < len(table):
            index = self.num_blocks[row]
            numbers.append([row, index, table[index]])
            self.num_blocks[row] += 1
    if len(numbers) == 0:
        return
    there = to_device(numbers, torch.int64, self.device).t()
    self.block_table.index_put_((there[0], there[1]), there[2].to(self.block_table.dtype))


@answer("step_input.token_positions")
def token_positions(starts: Tensor, lengths: Tensor, owners: Tensor) -> Tensor:
    ends = torch.cumsum(lengths, dim=0)
    shift = starts - (ends - lengths)
    return torch.arange(owners.shape[0], device=starts.device) + shift.index_select(0, owners)


@answer("step_input.token_positions")
def token_positions(starts, lengths, owners):
    counts = torch.ones_like(owners).cumsum(0) - 1
    first = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return starts[owners] + counts - first[owners]


@answer("ops.slot_mapping")
def slot_mapping(
    block_tables: Tensor, owners: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    index = torch.div(positions, block_size, rounding_mode="floor")
    blocks = block_tables[owners, index].to(torch.int64)
    return blocks * block_size + torch.remainder(positions, block_size)


@answer("ops.slot_mapping")
def slot_mapping(block_tables, owners, positions, block_size):
    index = positions // block_size
    blocks = block_tables.long()[owners].gather(1, index[:, None]).squeeze(1)
    return positions + (blocks - index) * block_size


@answer("step_input.gather")
def gather(rows: Rows, plan: StepPlan, block_size: int, slot_mapping: SlotMapping) -> StepInput:
    owners, positions, query_starts, last = token_places(plan)
    table = torch.index_select(rows.block_table, 0, plan.row_ids)
    return StepInput(
        input_ids=rows.token_ids[plan.row_ids][owners, positions],
        positions=positions,
        slot_mapping=slot_mapping(table, owners, positions, block_size),
        last=last,
        metadata=AttentionMetadata(
            table,
            query_starts,
            torch.add(plan.starts, plan.lengths).int(),
            plan.num_decodes,
            plan.max_query_len,
            plan.max_seq_len,
        ),
    )


@answer("step_input.gather")
def gather(rows, plan, block_size, slot_mapping):
    owners, positions, starts, last = token_places(plan)
    row_of_token = plan.row_ids[owners]
    ends = (plan.starts + plan.lengths).type(torch.int32)
    known = {name: getattr(plan, name) for name in ("num_decodes", "max_query_len", "max_seq_len")}
    metadata = AttentionMetadata(rows.block_table[plan.row_ids], starts, ends, **known)
    slots = slot_mapping(rows.block_table, row_of_token, positions, block_size)
    return StepInput(rows.token_ids[row_of_token, positions], positions, slots, last, metadata)


@answer("ops.decode_attention")
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
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("nhd,nshd->nhs", q, k) * scale
    seen = torch.arange(max_seq_len, device=q.device)[None] < seq_lens[:, None]
    scores = torch.where(seen[:, None], scores, -torch.inf)
    return torch.einsum("nhs,nshd->nhd", torch.softmax(scores, dim=-1), v)


@answer("ops.decode_attention")
def decode_attention(q, k_cache, v_cache, block_table, seq_lens, max_seq_len, scale):
    keys, values = (gather_blocks(cache, block_table, max_seq_len) for cache in (k_cache, v_cache))
    n, heads, dim = q.shape
    grouped = q.reshape(n, keys.shape[2], heads // keys.shape[2], dim)
    scores = (grouped.unsqueeze(3) * keys.permute(0, 2, 1, 3).unsqueeze(2)).sum(-1) * scale
    places = torch.arange(max_seq_len, device=q.device).expand(n, max_seq_len)
    mask = (places >= seq_lens.unsqueeze(1)).view(n, 1, 1, -1)
    weights = scores.masked_fill(mask, float("-inf")).softmax(dim=3)
    out = (weights.unsqueeze(4) * values.permute(0, 2, 1, 3).unsqueeze(2)).sum(3)
    return out.reshape(n, heads, dim)


@answer("step_input.scatter")
def scatter(rows: Rows, plan: StepPlan, token_ids: Tensor) -> None:
    chosen = plan.sampling
    where = (plan.row_ids[chosen], plan.starts[chosen] + plan.lengths[chosen])
    rows.token_ids.index_put_(where, token_ids.to(rows.token_ids.dtype))


@answer("step_input.scatter")
def scatter(rows, plan, token_ids):
    ends = plan.starts.add(plan.lengths).index_select(0, plan.sampling)
    row_ids = plan.row_ids.index_select(0, plan.sampling)
    rows.token_ids[row_ids, ends] = token_ids.int()


@answer("model_runner.ModelRunner.forward")
def forward(self, plan: StepPlan) -> Tensor:
    step = gather(self.rows, plan, self.block_size, self.ops.slot_mapping)

    def attend(layer_index, q, k, v):
        caches = self.kv_cache[layer_index]
        self.ops.store_kv(k, v, caches[0], caches[1], step.slot_mapping)
        return self.ops.attention(q, caches[0], caches[1], step.metadata, self.scale)

    hidden = self.model(step.input_ids, step.positions, attend)
    if len(plan.params) == 0:
        return hidden[:0]
    return self.model.logits(hidden.index_select(0, step.last))
