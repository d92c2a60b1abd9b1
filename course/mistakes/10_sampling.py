"""Wrong answers that people really give, each with the words that its check must say.

Read as text, never imported: the names in the bodies are those of the modules `drawing`,
`filters`, `logits_processors` and `sampler`. Above each stands the rule of the lesson that the
answer breaks.
"""

# -- weigh --


# rule 2
@mistake(
    "drawing.weigh",
    "exp(100) is inf in float32: what can you take from all logits of a row beforehand?",
)
def weigh(logits: Tensor, temperature: Tensor, out: Tensor | None = None) -> Tensor:
    temperature = torch.where(temperature > 0, temperature, 1.0)[:, None]
    weights = torch.exp(logits / temperature)
    return weights / weights.amax(-1, keepdim=True)


# rule 2
@mistake(
    "drawing.weigh",
    "20 / 1e-38 is inf, and inf - inf is NaN: which comes first, dividing or subtracting?",
)
def weigh(logits: Tensor, temperature: Tensor, out: Tensor | None = None) -> Tensor:
    temperature = torch.where(temperature > 0, temperature, 1.0)[:, None]
    divided = logits / temperature
    return torch.exp(divided - divided.amax(-1, keepdim=True))


# rule 1
@mistake("drawing.weigh", "do you divide by a temperature of 0?")
def weigh(logits: Tensor, temperature: Tensor, out: Tensor | None = None) -> Tensor:
    shifted = logits - logits.amax(-1, keepdim=True)
    return torch.exp(shifted / temperature[:, None])


# rule 2
@mistake(
    "drawing.weigh",
    "the largest weighs 1, the other a third of it: do you divide by the sum, or forget exp?",
)
def weigh(logits: Tensor, temperature: Tensor, out: Tensor | None = None) -> Tensor:
    temperature = torch.where(temperature > 0, temperature, 1.0)[:, None]
    return torch.softmax(logits / temperature, dim=-1)


# rule 1: greedy rows are random from then on
@mistake("drawing.weigh", "read again in the next step: do you write into them?")
def weigh(logits: Tensor, temperature: Tensor, out: Tensor | None = None) -> Tensor:
    temperature[temperature == 0] = 1.0
    shifted = logits - logits.amax(-1, keepdim=True)
    return (shifted / temperature[:, None]).exp()


# -- count_top_p --


# rule 3
@mistake(
    "filters.count_top_p",
    "5 is less than 7 and 8 is not: does the token that crosses the border stay?",
)
def count_top_p(sorted_weights: Tensor, limits: Tensor, masses: Tensor, top_p: Tensor) -> Tensor:
    size = sorted_weights.shape[1]
    cdf = sorted_weights.cumsum(-1, dtype=torch.float64)
    masses = torch.where(limits < size, cdf.gather(1, limits[:, None] - 1)[:, 0], masses)
    counts = (cdf <= (top_p * masses)[:, None]).sum(-1).clamp(min=1)
    return torch.where(top_p < 1, counts, size)


# rule 3
@mistake(
    "filters.count_top_p",
    "half of 16 is 8: is the mass that of all tokens, not of these three alone?",
)
def count_top_p(sorted_weights: Tensor, limits: Tensor, masses: Tensor, top_p: Tensor) -> Tensor:
    size = sorted_weights.shape[1]
    cdf = sorted_weights.cumsum(-1, dtype=torch.float64)
    masses = cdf.gather(1, limits[:, None] - 1)[:, 0]
    counts = (cdf < (top_p * masses)[:, None]).sum(-1) + 1
    return torch.where(top_p < 1, counts, size).clamp(max=size)


# rule 3
@mistake(
    "filters.count_top_p",
    "top_k left two tokens, a mass of 8, and 0.6 of that is 4.8: do you look at `limits`?",
)
def count_top_p(sorted_weights: Tensor, limits: Tensor, masses: Tensor, top_p: Tensor) -> Tensor:
    size = sorted_weights.shape[1]
    cdf = sorted_weights.cumsum(-1, dtype=torch.float64)
    counts = (cdf < (top_p * masses)[:, None]).sum(-1) + 1
    return torch.where(top_p < 1, counts, size).clamp(max=size)


# rule 3
@mistake(
    "filters.count_top_p",
    "1 + 1e-30 is 1, so the share is reached at once: is 1 a case of its own?",
)
def count_top_p(sorted_weights: Tensor, limits: Tensor, masses: Tensor, top_p: Tensor) -> Tensor:
    size = sorted_weights.shape[1]
    cdf = sorted_weights.cumsum(-1, dtype=torch.float64)
    masses = torch.where(limits < size, cdf.gather(1, limits[:, None] - 1)[:, 0], masses)
    return ((cdf < (top_p * masses)[:, None]).sum(-1) + 1).clamp(max=size)


# rule 4: the sum of one token too few
@mistake("filters.count_top_p", "0.9 of 8 is 7.2: is the mass 5 + 3?")
def count_top_p(sorted_weights: Tensor, limits: Tensor, masses: Tensor, top_p: Tensor) -> Tensor:
    size = sorted_weights.shape[1]
    cdf = sorted_weights.cumsum(-1, dtype=torch.float64)
    before = cdf.gather(1, (limits[:, None] - 2).clamp(min=0))[:, 0]
    masses = torch.where(limits < size, before, masses)
    counts = torch.searchsorted(cdf, (top_p * masses)[:, None])[:, 0] + 1
    return torch.where(top_p < 1, counts, size).clamp(max=size)


# -- invert_cdf --


# rule 4
@mistake(
    "drawing.invert_cdf",
    "the sums are .5, .5, 1: the first *above* .5 is the third. Does your search stop at equal?",
)
def invert_cdf(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    cdf = masses.cumsum(-1, dtype=torch.float64)
    targets = uniforms[:, None] * cdf[:, -1:]
    places = torch.searchsorted(cdf, targets).clamp(max=masses.shape[1] - 1)
    mass = masses.gather(1, places).double()
    rest = (targets - (cdf.gather(1, places) - mass)) / mass
    return places[:, 0], rest[:, 0].clamp(0.0, 1 - 2**-53)


# rule 4
@mistake(
    "drawing.invert_cdf",
    "the largest uniform is 1 - 2**-53, and in float32 that is 1: what type do you compare in?",
)
def invert_cdf(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    cdf = masses.cumsum(-1)
    targets = uniforms.float()[:, None] * cdf[:, -1:]
    places = torch.searchsorted(cdf, targets, right=True).clamp(max=masses.shape[1] - 1)
    mass = masses.gather(1, places)
    rest = (targets - (cdf.gather(1, places) - mass)) / mass
    return places[:, 0], rest[:, 0].double().clamp(0.0, 1 - 2**-53)


# rule 4
@mistake(
    "drawing.invert_cdf",
    "0.25 is half of the way into the first .5: is the rest a share of that place's mass?",
)
def invert_cdf(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    cdf = masses.cumsum(-1, dtype=torch.float64)
    targets = uniforms[:, None] * cdf[:, -1:]
    places = torch.searchsorted(cdf, targets, right=True).clamp(max=masses.shape[1] - 1)
    rest = targets - (cdf.gather(1, places) - masses.gather(1, places))
    return places[:, 0], rest[:, 0]


# rule 2
@mistake("drawing.invert_cdf", "the rest is used again: is it float64, like the uniforms?")
def invert_cdf(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    cdf = masses.cumsum(-1, dtype=torch.float64)
    targets = uniforms[:, None] * cdf[:, -1:]
    places = torch.searchsorted(cdf, targets, right=True).clamp(max=masses.shape[1] - 1)
    mass = masses.gather(1, places)
    rest = (targets - (cdf.gather(1, places) - mass)) / mass
    return places[:, 0], rest[:, 0].clamp(0.0, 1 - 2**-53).float()


# rule 2
@mistake("drawing.invert_cdf", "what if rounding puts it below 0, or at 1?")
def invert_cdf(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    cdf = masses.cumsum(-1, dtype=torch.float64)
    targets = uniforms[:, None] * cdf[:, -1:]
    places = torch.searchsorted(cdf, targets, right=True).clamp(max=masses.shape[1] - 1)
    mass = masses.gather(1, places).double()
    rest = (targets - (cdf.gather(1, places) - mass)) / mass
    return places[:, 0], rest[:, 0]


# -- choose --


# rule 1
@mistake("sampler.choose", "row 0 is greedy and row 1 is not: is it decided row by row?")
def choose(logits: Tensor, settings: SamplingRows, uniforms: Tensor, buffer: Tensor) -> Tensor:
    weights = weigh(logits, settings.temperature)
    drawn = draw(weights, uniforms)
    if settings.any_filter:
        drawn = draw_filtered(drawn, logits, weights, settings, uniforms)
    return drawn if settings.any_random else pick_greedy(logits)


# rule 1
@mistake(
    "sampler.choose",
    "exp(1e-9) and exp(2e-9) are both 1 in float32: do you look for the largest *logit*?",
)
def choose(logits: Tensor, settings: SamplingRows, uniforms: Tensor, buffer: Tensor) -> Tensor:
    weights = weigh(logits, settings.temperature)
    drawn = draw(weights, uniforms)
    if settings.any_filter:
        drawn = draw_filtered(drawn, logits, weights, settings, uniforms)
    return torch.where(settings.temperature > 0, drawn, pick_greedy(weights))


# rule 3
@mistake(
    "sampler.choose",
    "0.6 is a share of the weights *at this temperature*: which weights do the filters get?",
)
def choose(logits: Tensor, settings: SamplingRows, uniforms: Tensor, buffer: Tensor) -> Tensor:
    drawn = draw(weigh(logits, settings.temperature), uniforms)
    if settings.any_filter:
        plain = weigh(logits, torch.ones_like(settings.temperature))
        drawn = draw_filtered(drawn, logits, plain, settings, uniforms)
    return torch.where(settings.temperature > 0, drawn, pick_greedy(logits))


# right, and slow in every step that needs no filter
@mistake("sampler.choose", "no row filters, and `any_filter` says so: do you filter all the same?")
def choose(logits: Tensor, settings: SamplingRows, uniforms: Tensor, buffer: Tensor) -> Tensor:
    weights = weigh(logits, settings.temperature, out=buffer[: len(logits)])
    drawn = draw_filtered(draw(weights, uniforms), logits, weights, settings, uniforms)
    return torch.where(settings.temperature > 0, drawn, pick_greedy(logits))


# -- apply_penalties --


# rule 5
@mistake(
    "logits_processors.apply_penalties",
    "-8 / 2 is -4, more probable than before: what makes a negative logit smaller?",
)
def apply_penalties(logits: Tensor, penalties: Penalties, positions: Tensor) -> Tensor:
    ends, vocab_size = positions[penalties.rows], logits.shape[1]
    start = torch.zeros_like(ends)
    in_text = count_tokens(penalties.token_ids, start, ends, vocab_size)
    counts = count_tokens(penalties.token_ids, penalties.num_prompt_tokens, ends, vocab_size)
    rows = logits[penalties.rows]
    rows = torch.where(in_text > 0, rows / penalties.repetition[:, None], rows)
    rows = penalize_frequency(rows, counts, penalties.frequency)
    logits = logits.clone()
    logits[penalties.rows] = penalize_presence(rows, counts, penalties.presence)
    return logits


# rule 5
@mistake(
    "logits_processors.apply_penalties",
    "once for each time *the answer* has it: do you count the prompt too, or old tokens behind?",
)
def apply_penalties(logits: Tensor, penalties: Penalties, positions: Tensor) -> Tensor:
    ends, vocab_size = positions[penalties.rows], logits.shape[1]
    counts = count_tokens(penalties.token_ids, torch.zeros_like(ends), ends, vocab_size)
    rows = logits[penalties.rows]
    rows = torch.where(counts > 0, penalize_repetition(rows, penalties.repetition), rows)
    rows = penalize_frequency(rows, counts, penalties.frequency)
    logits = logits.clone()
    logits[penalties.rows] = penalize_presence(rows, counts, penalties.presence)
    return logits


# rule 6
@mistake(
    "logits_processors.apply_penalties",
    "the first text is row 2's: do you use `penalties.rows` for logits *and* positions?",
)
def apply_penalties(logits: Tensor, penalties: Penalties, positions: Tensor) -> Tensor:
    ends, vocab_size = positions[: len(penalties.rows)], logits.shape[1]
    token_ids = tokens_before(penalties.token_ids, ends)
    counts = count_tokens(penalties.token_ids, penalties.num_prompt_tokens, ends, vocab_size)
    counts = counts.gather(1, token_ids)
    where = (penalties.rows[:, None], token_ids)
    seen = penalize_repetition(logits[where], penalties.repetition)
    seen = penalize_frequency(seen, counts, penalties.frequency)
    return logits.index_put(where, penalize_presence(seen, counts, penalties.presence))


# rule 7
@mistake(
    "logits_processors.apply_penalties", "the logits given are left as they are: did you copy?"
)
def apply_penalties(logits: Tensor, penalties: Penalties, positions: Tensor) -> Tensor:
    ends, vocab_size = positions[penalties.rows], logits.shape[1]
    token_ids = tokens_before(penalties.token_ids, ends)
    counts = count_tokens(penalties.token_ids, penalties.num_prompt_tokens, ends, vocab_size)
    counts = counts.gather(1, token_ids)
    where = (penalties.rows[:, None], token_ids)
    seen = penalize_repetition(logits[where], penalties.repetition)
    seen = penalize_frequency(seen, counts, penalties.frequency)
    logits[where] = penalize_presence(seen, counts, penalties.presence)
    return logits


# -- gumbel_sample --


# rule 6
@mistake("sampler.gumbel_sample", "token 0 should be drawn a quarter of the time")
def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    token_ids = torch.arange(logits.shape[1])
    noise = gumbel_noise(hash_counter(seeds[:, None], token_ids))
    is_random = (temperature > 0)[:, None]
    divided = logits.double() / torch.where(is_random, temperature[:, None].double(), 1.0)
    return (divided + torch.where(is_random, noise, 0.0)).argmax(-1)


# rule 6
@mistake("sampler.gumbel_sample", "the same call twice: is there a generator whose state goes on?")
def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    noise = -torch.log(-torch.log(torch.rand(logits.shape, dtype=torch.float64)))
    is_random = (temperature > 0)[:, None]
    divided = logits.double() / torch.where(is_random, temperature[:, None].double(), 1.0)
    return (divided + torch.where(is_random, noise, 0.0)).argmax(-1)


# rule 2
@mistake(
    "sampler.gumbel_sample",
    "at 0.5 it is a tenth of the time: do you divide the logits alone, and then add the noise?",
)
def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    row_bits = hash_counter(seeds, positions)[:, None]
    noise = gumbel_noise(hash_counter(row_bits, torch.arange(logits.shape[1])))
    is_random = (temperature > 0)[:, None]
    noisy = logits.double() + torch.where(is_random, noise, 0.0)
    return (noisy / torch.where(is_random, temperature[:, None].double(), 1.0)).argmax(-1)


# rule 1
@mistake(
    "sampler.gumbel_sample",
    "temperature 0 is the argmax: is there noise, or a division by 0?",
)
def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    row_bits = hash_counter(seeds, positions)[:, None]
    noise = gumbel_noise(hash_counter(row_bits, torch.arange(logits.shape[1])))
    heat = torch.where(temperature > 0, temperature, 1.0).double()[:, None]
    return (logits.double() / heat + noise).argmax(-1)


# rule 7
@mistake("sampler.gumbel_sample", "the logits are only read: do you add noise in place?")
def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    row_bits = hash_counter(seeds, positions)[:, None]
    noise = gumbel_noise(hash_counter(row_bits, torch.arange(logits.shape[1])))
    logits += noise * temperature[:, None]
    return logits.argmax(-1)
