"""sampler: the right distribution, and the same tokens for a seed.

The tests with an `exercise` mark are checks of notebook 10; what a failed assert says is the hint
a learner reads.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import sampling_calls
from sampling_cases import FIELDS, NUM_DRAWS, PROBS, assert_fits, draws, logits_of, make_rows

from minivllm import sampler as sampler_module
from minivllm.drawing import weigh
from minivllm.sampler import choose, gumbel_sample, pick_greedy, sample, sample_gumbel

INF = math.inf
NAN = math.nan
LN2, LN3, LN5 = math.log(2), math.log(3), math.log(5)
GUMBEL_IDS = [53, 879]  # of 1,000 even tokens: seed 0 at position 0, seed 1 at 5

# -- one step of a batch -----------------------------------------------------------------


@pytest.mark.exercise("sampler.choose")
def test_a_token_is_drawn_by_weight() -> None:
    """Weights 1 : 3, and at 0.5 1 : 9."""
    choose = sampling_calls.choose
    assert choose([[0, LN3]] * 2, [0.2, 0.3]) == [0, 1], (
        "token 0 has a quarter: 0.2 falls on it, 0.3 does not. Is anything drawn at all?"
    )
    assert choose([[0, LN3]], [0.2], temperature=0.5) == [1], (
        "at 0.5 token 0 has a tenth: do the weights know the temperature?"
    )


@pytest.mark.exercise("sampler.choose")
def test_temperature_0_is_the_largest_logit_exactly() -> None:
    """Next to random rows too, and where no weight shows the difference."""
    choose = sampling_calls.choose
    assert choose([[0, LN3]] * 2, [0.2, 0.2], temperature=[0, 1]) == [1, 0], (
        "row 0 is greedy and row 1 is not: is it decided row by row?"
    )
    assert choose([[1e-9, 2e-9, 0], [0, 0, 0]], [0.1, 0.9], temperature=[0, 1]) == [1, 2], (
        "exp(1e-9) and exp(2e-9) are both 1 in float32: do you look for the largest *logit*?"
    )


@pytest.mark.exercise("sampler.choose")
def test_filters_are_applied_to_the_weights_at_the_temperature() -> None:
    """.5 : .3 : .2; at temperature 0.5 .66 : .24 : .11, so 0.6 keeps one token."""
    choose = sampling_calls.choose
    assert choose([[LN5, LN3, LN2]], [0.9]) == [2]
    assert choose([[LN5, LN3, LN2]], [0.9], top_k=2) == [1], (
        "top_k 2 removes token 2: is a row that filters drawn again, among what is left?"
    )
    assert choose([[LN5, LN3, LN2]] * 2, [0.9, 0.9], top_k=[2, 0]) == [1, 2], (
        "row 1 filters nothing"
    )
    assert choose([[LN5, LN3, LN2]], [0.9], temperature=0.5, top_p=0.6) == [0], (
        "0.6 is a share of the weights *at this temperature*: which weights do the filters get?"
    )


@pytest.mark.exercise("sampler.choose")
def test_logits_stay_for_the_logprobs() -> None:
    """The buffer is there to be written to, the logits are not."""
    logits = torch.tensor([[1.0, 2.0]])
    numbers = torch.tensor([0.5], dtype=torch.float64)
    choose(logits, make_rows(1), numbers, torch.empty(1, 2))
    assert logits.tolist() == [[1, 2]], "the logits are needed again: what do you write into them?"


@pytest.mark.exercise("sampler.choose")
def test_a_step_without_filters_does_not_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """`any_filter` is known on the host; looking at every row costs time and changes nothing."""
    calls = []

    def draw_filtered(
        token_ids: Tensor,
        logits: Tensor,
        weights: Tensor,
        settings: Any,
        uniforms: Tensor,
        candidates: Any = (),
    ) -> Tensor:
        calls.append(len(token_ids))
        return token_ids

    monkeypatch.setattr(sampler_module, "draw_filtered", draw_filtered)
    sampling_calls.choose([[0, LN3]], [0.2])
    assert calls == [], "no row filters, and `any_filter` says so: do you filter all the same?"
    sampling_calls.choose([[0, LN3]], [0.2], top_k=1)
    assert calls, "a row filters: is draw_filtered called?"


# -- greedy ------------------------------------------------------------------------------


def test_greedy_is_argmax() -> None:
    """Whatever the size of the vocabulary, and with ties, as torch's own argmax."""
    for vocab_size in (1, 5, 255, 256, 257, 1000):
        logits = torch.randint(-9, 9, (7, vocab_size)).float()
        assert torch.equal(pick_greedy(logits), logits.argmax(-1))


def test_ties_give_the_lowest_id() -> None:
    """Within a block of the search and across blocks."""
    logits = torch.zeros(2, 600)
    logits[0, [3, 4]] = 1.0
    logits[1, [270, 590]] = 1.0
    assert pick_greedy(logits).tolist() == [3, 270]


def test_temperature_0_is_exact_argmax_beside_random_rows() -> None:
    """Greedy rows are argmax, whatever their filters say, and random rows are random."""
    logits = torch.randn(600, 50, generator=torch.Generator().manual_seed(0))
    logits[0] -= 9
    logits[0, [7, 9]] = torch.tensor([1e-9, 2e-9])  # a difference that no softmax shows
    temperature = [0.0, 1.0, 0.0] * 200
    settings = make_rows(600, temperature=temperature, top_k=3, top_p=0.8, seed=range(600))
    token_ids = sample(logits, settings, torch.arange(600))
    is_argmax = token_ids == logits.argmax(-1)
    assert is_argmax[0::3].all() and is_argmax[2::3].all()
    assert 40 < is_argmax[1::3].sum() < 160


def test_logits_and_settings_are_not_changed() -> None:
    """The caller may use its logits again."""
    logits = torch.randn(4, 300)
    before = logits.clone()
    sample(logits, make_rows(4, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1), torch.arange(4))
    assert torch.equal(logits, before)


def test_no_rows_give_no_tokens() -> None:
    """A step in which nothing samples isn't a special case."""
    for temperature in (0.0, 1.0):
        settings = make_rows(0, temperature=temperature)
        settings = replace(settings, any_random=True, any_filter=True)
        assert sample(torch.empty(0, 300), settings, torch.arange(0)).tolist() == []


# -- logits that are not numbers ---------------------------------------------------------


def test_logits_of_minus_inf_are_never_drawn() -> None:
    """They have probability 0, in every combination of filters."""
    logits = torch.tensor([[-INF, 1.0, -INF, 1.0, -INF]]).expand(200, 5)
    for some in ({}, {"top_k": 4}, {"top_p": 0.999}, {"min_p": 0.01}):
        token_ids = sample(logits, make_rows(200, seed=range(200), **some), torch.arange(200))
        assert set(token_ids.tolist()) == {1, 3}


def test_a_row_of_nan_breaks_no_other_row() -> None:
    """Its own token is a valid id, the others get what they get without it."""
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    for some in ({}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}):
        settings = make_rows(3, seed=[1, 2, 3], **some)
        expected = sample(logits, settings, torch.arange(3)).tolist()
        broken = logits.clone()
        broken[1] = NAN
        token_ids = sample(broken, settings, torch.arange(3)).tolist()
        assert token_ids[0] == expected[0] and token_ids[2] == expected[2]
        assert 0 <= token_ids[1] < 300


# -- distributions -----------------------------------------------------------------------


def test_distribution_of_plain_temperature() -> None:
    """Odds are squared at temperature 0.5."""
    assert_fits(draws(PROBS), PROBS)
    assert_fits(draws(PROBS, temperature=0.5), [p * p for p in PROBS])
    assert_fits(draws(PROBS, temperature=2.0), [math.sqrt(p) for p in PROBS])


def test_distribution_of_top_k() -> None:
    """The three most probable, renormalised."""
    assert_fits(draws(PROBS, top_k=3), [0, 0.3, 0, 0.25, 0.2, 0])


def test_distribution_of_top_p() -> None:
    """.3 + .25 + .2 + .1 reaches 0.8; of the two tokens of .1 the lower id."""
    assert_fits(draws(PROBS, top_p=0.8), [0, 0.3, 0.1, 0.25, 0.2, 0])


def test_distribution_of_min_p() -> None:
    """All of at least 0.3 * .3 = .09."""
    assert_fits(draws(PROBS, min_p=0.3), [0, 0.3, 0.1, 0.25, 0.2, 0.1])


def test_distribution_over_seeds_at_one_position() -> None:
    """Requests with seeds 0, 1, 2, ... do not start alike."""
    logits = logits_of(*PROBS).expand(NUM_DRAWS, -1)
    settings = make_rows(NUM_DRAWS, seed=range(NUM_DRAWS))
    token_ids = sample(logits, settings, torch.full((NUM_DRAWS,), 5))
    assert_fits(token_ids.bincount(minlength=6), PROBS)


# -- seeds -------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    """Alone, in every place of a batch, next to greedy, plain and filtered rows."""
    vocab_size = 50_001  # odd, so that no row starts where vector instructions would like
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0))
    settings = make_rows(
        9,
        temperature=[1.0, 0.0, 0.7, 1.3, 1.0, 0.9, 1.0, 2.0, 1.0],
        top_k=[0, 0, 40, 0, 0, 300, 0, 0, 1],
        top_p=[1.0, 0.5, 1.0, 1.0, 0.9, 0.7, 1.0, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0],
        seed=range(9),
    )
    positions = torch.arange(9)
    together = sample(logits, settings, positions)
    weights = weigh(logits, settings.temperature)
    for i in range(9):
        alone = slice(i, i + 1)
        own = make_rows(1, **{n: getattr(settings, n)[alone].tolist() for n in FIELDS})
        assert sample(logits[alone], own, positions[alone]).item() == together[i]
        assert torch.equal(weigh(logits[alone], own.temperature), weights[alone])
    order = torch.tensor([8, 3, 1, 4, 0, 7, 5, 2, 6])
    assert torch.equal(sample(logits[order], settings[order], positions[order]), together[order])


def test_the_flags_change_no_token() -> None:
    """Plain and greedy rows get the same bits on the paths that they do not need."""
    logits = torch.randn(40, 3001, generator=torch.Generator().manual_seed(0))
    plain = make_rows(40, seed=range(40))
    filtering = replace(plain, any_filter=True)
    positions = torch.arange(40)
    assert torch.equal(sample(logits, filtering, positions), sample(logits, plain, positions))
    greedy = replace(make_rows(40, temperature=0.0), any_random=True, any_filter=True)
    assert torch.equal(sample(logits, greedy, positions), logits.argmax(-1))


def test_a_step_in_slices_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows that fit the cache changes no token."""
    logits = torch.randn(20, 1000, generator=torch.Generator().manual_seed(0))
    settings = make_rows(20, top_p=0.9, seed=range(20))
    whole = sample(logits, settings, torch.arange(20))
    for limit in (1, 3000, 7000):
        monkeypatch.setattr(sampler_module, "CPU_LOGITS", limit)
        assert torch.equal(sample(logits, settings, torch.arange(20)), whole)


def test_tokens_depend_on_seed_and_position() -> None:
    """Another seed or another position is another draw; the same is the same."""
    logits = torch.zeros(1, 10_000)

    def token(seed: int, position: int) -> int:
        return int(sample(logits, make_rows(1, seed=seed), torch.tensor([position])).item())

    assert token(3, 4) == token(3, 4)
    assert len({token(3, 4), token(4, 3), token(3, 5), token(4, 4)}) == 4
    assert 0 <= token(2**63 - 1, 2**31) < 10_000


@pytest.mark.parametrize("form", [sample, sample_gumbel])
def test_logits_of_another_type_are_made_float32_first(form: Any) -> None:
    """bfloat16 logits give what the same numbers give in float32, filters and all."""
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    settings = make_rows(6, temperature=[0, 1, 1, 1, 0.5, 2], top_p=[1, 1, 0.9, 1, 1, 1], seed=3)
    positions = torch.arange(6)
    expected = form(logits.float(), settings, positions)
    assert torch.equal(form(logits, settings, positions), expected)


# -- the Gumbel form ---------------------------------------------------------------------


@pytest.mark.exercise("sampler.gumbel_sample")
def test_the_noise_draws_in_proportion() -> None:
    """4,000 positions of one seed, odds of 1 : 3, and 1 : 9 at temperature 0.5."""
    logits, line, seeds = [[0, LN3]] * 4000, list(range(4000)), [5] * 4000
    gumbel_sample = sampling_calls.gumbel_sample
    share = gumbel_sample(logits, [1] * 4000, seeds, line).count(0) / 4000
    assert share > 0.22, (
        "token 0 is hardly drawn: has each token noise of its own, and is there any?"
    )
    assert share < 0.28, (
        "token 0 should be drawn a quarter of the time: has each token noise of its own?"
    )
    share = gumbel_sample(logits, [0.5] * 4000, seeds, line).count(0) / 4000
    assert share < 0.12, (
        "at 0.5 it is a tenth of the time: do you divide the logits alone, and then add the noise?"
    )


@pytest.mark.exercise("sampler.gumbel_sample")
def test_at_temperature_0_there_is_no_noise() -> None:
    """The argmax, in the middle of random rows."""
    gumbel_sample = sampling_calls.gumbel_sample
    logits, line = [[0, 1e-3, 0]] * 30, list(range(30))
    ids = gumbel_sample(logits, [0, 1, 0] * 10, line, line)
    assert ids[0::3] + ids[2::3] == [1] * 20, (
        "temperature 0 is the argmax: is there noise, or a division by 0?"
    )
    assert len(set(ids[1::3])) > 1, "rows at temperature 1 are random next to greedy ones"


@pytest.mark.exercise("sampler.gumbel_sample")
def test_a_seed_holds_in_any_batch() -> None:
    """Row 2 of three draws what it draws alone, and what it draws again."""
    gumbel_sample = sampling_calls.gumbel_sample
    flat = [[0.0] * 50]
    together = gumbel_sample(flat * 3, [1, 1, 1], [7, 8, 9], [3, 3, 3])
    assert gumbel_sample(flat * 3, [1, 1, 1], [7, 8, 9], [3, 3, 3]) == together, (
        "the same call twice: is there a generator whose state goes on?"
    )
    assert gumbel_sample(flat, [1], [9], [3]) == together[2:], (
        "alone, a row is row 0: does its noise know in which row it stands?"
    )
    assert len(set(gumbel_sample(flat * 9, [1] * 9, [9] * 9, list(range(9))))) > 4, (
        "nine positions of one seed draw much the same: is the position part of the noise?"
    )
    assert len(set(gumbel_sample(flat * 9, [1] * 9, list(range(9)), [3] * 9))) > 4, (
        "nine seeds draw much the same: is the seed part of the noise?"
    )


@pytest.mark.exercise("sampler.gumbel_sample")
def test_no_two_of_seed_position_and_token_share_their_noise() -> None:
    """A position further is not the same noise, one token further."""
    gumbel_sample = sampling_calls.gumbel_sample
    ids = gumbel_sample([[0.0] * 200] * 40, [1] * 40, [7] * 40, list(range(40)))
    steps = [after - before for before, after in zip(ids, ids[1:])]
    assert steps.count(-1) < 4, (
        "the choice moves down by one at each step: do you add position and token id?"
    )
    seeds = list(range(40))
    ids = gumbel_sample([[0.0] * 200] * 40, [1] * 40, seeds, seeds[::-1])
    assert len(set(ids)) > 20, (
        "seed 3 at position 4 draws what seed 4 draws at 3: do you add seed and position?"
    )


@pytest.mark.exercise("sampler.gumbel_sample")
def test_the_noise_is_that_of_the_kernel() -> None:
    """Bits of the row from seed and position, bits of the token from those and its id."""
    gumbel_sample = sampling_calls.gumbel_sample
    assert gumbel_sample([[0.0] * 1000] * 2, [1, 1], [0, 1], [0, 5]) == GUMBEL_IDS, (
        "a row's bits are hash_counter(seed, position), a token's hash_counter(those, its id)"
    )


@pytest.mark.exercise("sampler.gumbel_sample")
def test_the_gumbel_form_only_reads_its_arguments() -> None:
    """Logits of any type, -inf where a token cannot be."""
    logits, temperature = torch.tensor([[1.0, -INF]] * 2), torch.tensor([0.0, 0.5])
    seeds = positions = torch.tensor([0, 1])
    assert gumbel_sample(logits.bfloat16(), temperature, seeds, positions).tolist() == [0, 0], (
        "token 1 cannot be: does -inf stay the smallest?"
    )
    gumbel_sample(logits, temperature, seeds, positions)
    assert logits.tolist() == [[1, -INF]] * 2, (
        "the logits are only read: do you add noise in place?"
    )
    assert temperature.tolist() == [0, 0.5], "temperatures are the rows' own: do you change them?"


def test_distribution_of_the_gumbel_form() -> None:
    """The same distribution as the inverse CDF, along positions and along seeds."""
    logits, line = logits_of(*PROBS, 0.0).expand(NUM_DRAWS, -1), torch.arange(NUM_DRAWS)
    fixed, ones = torch.full((NUM_DRAWS,), 3), torch.ones(NUM_DRAWS)
    for seeds, positions in ((fixed, line), (line, fixed)):
        token_ids = gumbel_sample(logits, ones, seeds, positions)
        assert_fits(token_ids.bincount(minlength=7), [*PROBS, 0.0])


def test_distribution_of_the_gumbel_form_at_a_temperature() -> None:
    """At 0.5 every probability counts squared."""
    logits, line = logits_of(*PROBS).expand(NUM_DRAWS, -1), torch.arange(NUM_DRAWS)
    token_ids = gumbel_sample(logits, torch.full((NUM_DRAWS,), 0.5), line, line)
    squares = [p * p for p in PROBS]
    assert_fits(token_ids.bincount(minlength=6), [s / sum(squares) for s in squares])


def test_gumbel_form_of_one_row_is_its_own_business() -> None:
    """The same token alone and in a batch; all mass on one token gives that token."""
    logits = torch.randn(8, 1001, generator=torch.Generator().manual_seed(0))
    seeds, positions, ones = torch.arange(8), torch.arange(8) + 5, torch.ones(8)
    together = gumbel_sample(logits, ones, seeds, positions)
    for i in range(8):
        row = slice(i, i + 1)
        alone = gumbel_sample(logits[row], ones[row], seeds[row], positions[row])
        assert alone.item() == together[i]
    assert len(set(together.tolist())) > 4
    one = torch.full((8, 50), -INF)
    one[:, 33] = -1000.0
    assert gumbel_sample(one, ones, seeds, positions).tolist() == [33] * 8


def test_gumbel_form_at_temperature_0_is_the_argmax() -> None:
    """Next to random rows in the same batch, which it does not change."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    settings = make_rows(4, temperature=[0.0, 1.0, 0.0, 1.0], seed=range(4))
    positions = torch.arange(4)
    token_ids = sample_gumbel(logits, settings, positions)
    assert token_ids[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    random = gumbel_sample(logits, torch.ones(4), torch.arange(4), positions)
    assert token_ids[[1, 3]].tolist() == random[[1, 3]].tolist()


def test_filters_of_the_gpu_form_leave_the_other_rows_alone() -> None:
    """A row with top_k draws among its candidates; its neighbour draws as if it were alone."""
    logits = logits_of(*PROBS).expand(NUM_DRAWS, -1)
    line = torch.arange(NUM_DRAWS)
    settings = make_rows(NUM_DRAWS, top_k=[2, 0] * (NUM_DRAWS // 2), seed=7)
    token_ids = sample_gumbel(logits, settings, line)
    plain = gumbel_sample(logits, torch.ones(NUM_DRAWS), settings.seed, line)
    assert torch.equal(token_ids[1::2], plain[1::2])
    counts = token_ids[::2].bincount(minlength=6)
    top = sorted(PROBS, reverse=True)[:2]
    kept = [p / sum(top) if p in top else 0.0 for p in PROBS]
    assert_fits(counts, kept)
