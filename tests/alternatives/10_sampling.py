"""Right answers in other styles, for `test_course_alternatives`; read as text, never imported."""


@answer("drawing.weigh")
def weigh(logits: Tensor, temperature: Tensor, out: Tensor | None = None) -> Tensor:
    divisor = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
    largest = logits.max(dim=-1, keepdim=True).values
    return torch.exp((logits - largest) / divisor.unsqueeze(-1))


@answer("drawing.weigh")
def weigh(logits, temperature, out=None):
    result = torch.empty_like(logits) if out is None else out
    for row in range(len(logits)):
        divisor = temperature[row] if temperature[row] > 0 else 1.0
        result[row] = ((logits[row] - logits[row].max()) / divisor).exp()
    return result


@answer("filters.count_top_p")
def count_top_p(sorted_weights: Tensor, limits: Tensor, masses: Tensor, top_p: Tensor) -> Tensor:
    num_candidates = sorted_weights.shape[1]
    sums = sorted_weights.double().cumsum(dim=1)
    of_limits = torch.take_along_dim(sums, (limits - 1).unsqueeze(1), dim=1).squeeze(1)
    mass = torch.where(limits == num_candidates, masses, of_limits)
    below = sums < (mass * top_p).unsqueeze(1)
    counts = (below.sum(dim=1) + 1).clamp(max=num_candidates)
    return counts.masked_fill(top_p >= 1, num_candidates)


@answer("filters.count_top_p")
def count_top_p(sorted_weights, limits, masses, top_p):
    counts = []
    size = sorted_weights.shape[1]
    for row, limit, whole, share in zip(
        sorted_weights.double().tolist(), limits.tolist(), masses.tolist(), top_p.tolist()
    ):
        mass = whole if limit == size else sum(row[:limit])
        count, total = 1, row[0]
        while count < size and (share == 1 or total < share * mass):
            total += row[count]
            count += 1
        counts.append(count)
    return torch.tensor(counts, dtype=torch.int64, device=sorted_weights.device)


@answer("drawing.invert_cdf")
def invert_cdf(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    sums = masses.double().cumsum(dim=-1)
    target = uniforms * sums[:, -1]
    places = (sums <= target[:, None]).sum(dim=-1).clamp(max=masses.shape[-1] - 1)
    rows = torch.arange(len(masses), device=masses.device)
    mass = masses.double()[rows, places]
    before = sums[rows, places] - mass
    return places, ((target - before) / mass).clamp(min=0, max=1 - 2**-53)


@answer("sampler.choose")
def choose(logits: Tensor, settings: SamplingRows, uniforms: Tensor, buffer: Tensor) -> Tensor:
    weights = weigh(logits, settings.temperature)
    token_ids = draw(weights=weights, uniforms=uniforms)
    if settings.any_filter:
        token_ids = draw_filtered(token_ids, logits, weights, settings, uniforms)
    is_greedy = settings.temperature == 0
    token_ids[is_greedy] = logits[is_greedy].argmax(dim=-1)
    return token_ids


@answer("sampler.choose")
def choose(logits, settings, uniforms, buffer):
    greedy = pick_greedy(logits)
    if not settings.any_random:
        return greedy
    out = buffer[: logits.shape[0]]
    weights = weigh(logits, temperature=settings.temperature, out=out)
    drawn = draw(weights, uniforms)
    if settings.any_filter:
        drawn = draw_filtered(
            token_ids=drawn, logits=logits, weights=weights, settings=settings, uniforms=uniforms
        )
    return greedy.where(settings.temperature == 0, drawn)


@answer("logits_processors.apply_penalties")
def apply_penalties(logits: Tensor, penalties: Penalties, positions: Tensor) -> Tensor:
    out = logits.clone()
    size = logits.shape[1]
    for index, row in enumerate(penalties.rows.tolist()):
        end, start = int(positions[row]), int(penalties.num_prompt_tokens[index])
        text = penalties.token_ids[index, :end].long()
        seen = torch.bincount(text, minlength=size) > 0
        counts = torch.bincount(text[start:], minlength=size)
        repetition = penalties.repetition[index]
        scores = out[row]
        divided = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen, divided, scores)
        scores = scores - penalties.frequency[index] * counts
        out[row] = scores - penalties.presence[index] * (counts > 0)
    return out


@answer("logits_processors.apply_penalties")
def apply_penalties(logits, penalties, positions):
    ends = positions[penalties.rows]
    starts = torch.zeros_like(ends)
    vocab_size = logits.shape[-1]
    seen = count_tokens(penalties.token_ids, starts, ends, vocab_size) > 0
    counts = count_tokens(penalties.token_ids, penalties.num_prompt_tokens, ends, vocab_size)
    rows = logits[penalties.rows]
    rows = torch.where(seen, penalize_repetition(rows, penalties.repetition), rows)
    rows = penalize_frequency(rows, counts, penalties.frequency)
    rows = penalize_presence(rows, counts, penalties.presence)
    return logits.index_copy(0, penalties.rows, rows)


@answer("sampler.gumbel_sample")
def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    token_ids = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0)
    bits = hash_counter(hash_counter(seeds, positions).unsqueeze(1), token_ids)
    scores = logits.double()
    column = temperature.double().unsqueeze(1)
    noisy = scores / column.masked_fill(column == 0, 1.0) + gumbel_noise(bits)
    return torch.where(column > 0, noisy, scores).argmax(dim=1)


@answer("sampler.gumbel_sample")
def gumbel_sample(logits, temperature, seeds, positions):
    chosen = logits.argmax(-1)
    vocabulary = torch.arange(logits.shape[1], device=logits.device)
    for row in range(len(logits)):
        if temperature[row] > 0:
            bits = hash_counter(hash_counter(seeds[row], positions[row]), vocabulary)
            scores = logits[row].double() / temperature[row].double()
            chosen[row] = (scores + gumbel_noise(bits)).argmax()
    return chosen
