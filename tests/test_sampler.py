"""sampler: the right distribution, the same tokens for a seed, and every edge of a filter.

Statistical tests use fixed seeds, so they answer the same on every run; their threshold is
what a right sampler would exceed for one choice of seeds in a million.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import filters
from minivllm import sampler as sampler_module
from minivllm.drawing import draw, invert_cdf, weigh
from minivllm.filters import (
    count_min_p,
    count_top_k,
    count_top_p,
    draw_filtered,
    filter_among,
    find_largest,
    keep_first,
    sort_candidates,
)
from minivllm.noise import hash_counter, to_uniform
from minivllm.sampler import gumbel_sample, pick_greedy, sample, sample_gumbel
from minivllm.sampling_settings import SamplingRows

INF = math.inf
NAN = math.nan
NUM_DRAWS = 20_000


def make_rows(
    num: int,
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    seed: int | list[int] | range = 0,
) -> SamplingRows:
    """Settings of `num` rows; a single number holds for all of them."""

    def column(value: float | list[int] | list[float] | range, dtype: torch.dtype) -> Tensor:
        values = [value] * num if isinstance(value, (int, float)) else list(value)
        return torch.tensor(values, dtype=dtype)

    settings = SamplingRows(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int64),
        top_p=column(top_p, torch.float64),
        min_p=column(min_p, torch.float32),
        seed=column(seed, torch.int64),
        any_random=False,
        any_filter=False,
    )
    some_filter = (settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0)
    return replace(
        settings,
        any_random=bool((settings.temperature > 0).any()),
        any_filter=bool(some_filter.any()),
    )


def logits_of(*probs: float) -> Tensor:
    """[1, V] logits of these probabilities."""
    return torch.tensor([probs]).log()


def next_token_probs(logits: Tensor, settings: SamplingRows) -> Tensor:
    """The distribution [N, V] that each row is drawn from, by looking at all of V."""
    probs = weigh(logits, settings.temperature)
    every = torch.arange(len(logits))
    ids, kept, _ = filter_among(logits, probs, settings, every, logits.shape[1])
    probs = torch.zeros_like(probs).scatter_(1, ids, kept)
    return probs / probs.sum(-1, keepdim=True)


def kept_ids(logits: Tensor, settings: SamplingRows) -> list[list[int]]:
    """The ids that each row may still draw."""
    return [row.nonzero()[:, 0].tolist() for row in next_token_probs(logits, settings)]


def draws(probs: list[float], num: int = NUM_DRAWS, **settings: float) -> Tensor:
    """Counts [V] of `num` draws from one distribution, one seed, positions 0, 1, 2, ..."""
    token_ids = sample(
        logits_of(*probs).expand(num, -1),
        make_rows(num, seed=1, **settings),  # type: ignore[arg-type]
        torch.arange(num),
    )
    return token_ids.bincount(minlength=len(probs))


def assert_fits(counts: Tensor, probs: list[float]) -> None:
    """Pearson's chi-square of counts against probs, at a level of one in a million."""
    expected = torch.tensor(probs, dtype=torch.float64) * counts.sum() / sum(probs)
    possible = expected > 0
    assert counts[~possible].sum() == 0, f"drawn though impossible: {counts.tolist()}"
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    # Wilson and Hilferty 1931: the cube root of chi-square / freedom is nearly normal.
    spread = 2 / (9 * freedom)
    limit = freedom * (1 - spread + 4.75 * math.sqrt(spread)) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} > {limit:.1f}: {counts.tolist()}"


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
    """A step in which nothing samples is no special case."""
    for temperature in (0.0, 1.0):
        settings = make_rows(0, temperature=temperature)
        settings = replace(settings, any_random=True, any_filter=True)
        assert sample(torch.empty(0, 300), settings, torch.arange(0)).tolist() == []


# -- temperature -------------------------------------------------------------------------


def test_temperature_divides_the_logits() -> None:
    """.25 : .75 becomes .1 : .9 at 0.5, since odds are squared."""
    weights = weigh(logits_of(0.25, 0.75).expand(3, 2), torch.tensor([1.0, 0.5, 100]))
    assert torch.allclose(weights[:2], torch.tensor([[1 / 3, 1.0], [1 / 9, 1.0]]))
    assert 0.98 < weights[2, 0] < 1


def test_weights_are_exact_far_below_the_largest() -> None:
    """They have the relative error of float32, at all sizes of logits and temperatures."""
    logits = 9 * torch.randn(20, 1000, generator=torch.Generator().manual_seed(0))
    for temperature in (0.3, 1.0, 7.0):
        shifted = (logits - logits.amax(-1, keepdim=True)).double() / temperature
        expected = shifted.exp()[shifted > -80]
        weights = weigh(logits, torch.full((20,), temperature))[shifted > -80]
        assert torch.allclose(weights.double(), expected, rtol=2e-5, atol=0)


def test_weights_of_a_row_are_the_same_alone_and_in_a_batch() -> None:
    """Bit for bit, in rows so short that no vector instruction takes one whole."""
    logits = torch.randn(300, 7, generator=torch.Generator().manual_seed(0))
    together = weigh(logits, torch.full((300,), 0.7))
    alone = [weigh(row, torch.full((1,), 0.7)) for row in logits.split(1)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 100.0, 3e38])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    """Tiny ones put all mass on the largest logit, huge ones spread it evenly."""
    logits = torch.tensor([[-1e4, 1e4, 0.0, -INF]])
    weights = weigh(logits, torch.tensor([temperature]))
    assert weights.isfinite().all() and weights[0, 3] == 0
    if temperature < 1:
        assert weights.tolist() == [[0, 1, 0, 0]]
    if temperature > 1e9:
        assert torch.allclose(weights[0, :3], torch.tensor(1.0))


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


# -- the filters -------------------------------------------------------------------------


def test_top_k_keeps_the_k_most_probable() -> None:
    """In their places, in their proportions, and nothing else."""
    probs = next_token_probs(logits_of(0.1, 0.3, 0.2, 0.2), make_rows(1, top_k=2))
    assert torch.allclose(probs, torch.tensor([[0, 0.6, 0.4, 0]]))


def test_top_k_0_or_larger_than_the_vocabulary_is_off() -> None:
    """Bit for bit the unfiltered distribution."""
    logits = torch.randn(4, 300)
    plain = next_token_probs(logits, make_rows(4))
    settings = make_rows(4, top_k=[0, 300, 301, 2**40])
    assert torch.equal(next_token_probs(logits, settings), plain)
    assert count_top_k(torch.tensor([0, 2, 5, 9]), 5).tolist() == [5, 2, 5, 5]


def test_top_k_1_equals_argmax() -> None:
    """Also where a high temperature makes two logits equally probable."""
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    logits[0, 7], logits[0, 9] = 8.0, math.nextafter(8.0, 9.0) + 1e-6
    settings = make_rows(64, temperature=100.0, top_k=1, seed=range(64))
    assert torch.equal(sample(logits, settings, torch.arange(64)), logits.argmax(-1))


def test_the_token_that_crosses_top_p_is_kept() -> None:
    """.5 + .3 is the first sum of at least 0.6; .5 reaches 0.5 by itself."""
    logits = logits_of(0.2, 0.5, 0.3).expand(4, 3)
    settings = make_rows(4, top_p=[0.4, 0.6, 0.79, 0.9])
    assert kept_ids(logits, settings) == [[1], [1, 2], [1, 2], [0, 1, 2]]
    assert kept_ids(torch.zeros(1, 2), make_rows(1, top_p=0.5)) == [[0]]


def test_top_p_1_is_off() -> None:
    """Even tokens far beyond the precision of the sum stay."""
    logits = torch.tensor([[0.0, -80.0, -30.0, 0.0]])
    settings = replace(make_rows(1, top_p=1.0), any_filter=True)
    assert kept_ids(logits, settings) == [[0, 1, 2, 3]]
    beside = make_rows(2, top_p=[1.0, 0.5])
    assert kept_ids(logits.expand(2, 4), beside) == [[0, 1, 2, 3], [0]]
    weights, mass = torch.tensor([[0.9, 0.2]]), torch.tensor([1.1], dtype=torch.float64)
    counts = count_top_p(weights, torch.tensor([2]), mass, torch.tensor([1.0]).double())
    assert counts.tolist() == [2]


@pytest.mark.parametrize("top_p", [1e-30, 1e-9, 0.01])
def test_tiny_top_p_keeps_exactly_the_most_probable(top_p: float) -> None:
    """One token, never none; of equal ones the lowest id."""
    assert kept_ids(logits_of(0.2, 0.3, 0.5), make_rows(1, top_p=top_p)) == [[2]]
    assert kept_ids(torch.zeros(1, 5), make_rows(1, top_p=top_p)) == [[0]]


def test_min_p_is_relative_to_the_most_probable() -> None:
    """0.5 of .4 is .2: .25 stays, .15 goes; at 1 only the largest stay."""
    logits = logits_of(0.15, 0.4, 0.2001, 0.25).expand(4, 4)
    settings = make_rows(4, min_p=[0.5, 0.6, 1.0, 0.0])
    assert kept_ids(logits, settings) == [[1, 2, 3], [1, 3], [1], [0, 1, 2, 3]]
    sorted_probs = torch.tensor([[0.5, 0.25, 0.125], [0.5, 0.5, 0.0]])
    assert count_min_p(sorted_probs, torch.tensor([0.5, 1.0])).tolist() == [2, 2]


def test_ties_at_the_boundary_keep_the_lower_ids() -> None:
    """For top-k and for top-p, beside a larger one and among equals only."""
    logits = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]])
    assert kept_ids(logits, make_rows(1, top_k=3)) == [[0, 1, 2]]
    assert kept_ids(logits, make_rows(1, top_p=0.5)) == [[0, 2]]
    assert kept_ids(torch.zeros(1, 2000), make_rows(1, top_k=300)) == [list(range(300))]
    assert kept_ids(torch.zeros(1, 2000), make_rows(1, top_p=0.1)) == [list(range(200))]


def test_all_mass_on_one_token() -> None:
    """It is drawn under every filter, and nothing becomes NaN."""
    logits = torch.full((100, 300), -200.0)
    logits[:, 123] = 200.0
    for some in ({}, {"top_k": 5}, {"top_p": 0.99}, {"min_p": 0.5}, {"top_p": 1e-9}):
        settings = make_rows(100, seed=range(100), **some)
        assert next_token_probs(logits, settings).isfinite().all()
        assert set(sample(logits, settings, torch.arange(100)).tolist()) == {123}


def test_filters_come_after_temperature() -> None:
    """.5 : .3 : .2 at temperature 0.5 is .66 : .24 : .11, so 0.6 keeps one token, not two."""
    logits = logits_of(0.5, 0.3, 0.2)
    assert kept_ids(logits, make_rows(1, top_p=0.6)) == [[0, 1]]
    assert kept_ids(logits, make_rows(1, temperature=0.5, top_p=0.6)) == [[0]]
    assert kept_ids(logits, make_rows(1, min_p=0.5)) == [[0, 1]]
    assert kept_ids(logits, make_rows(1, temperature=0.5, min_p=0.5)) == [[0]]


def test_top_p_is_a_share_of_what_top_k_and_min_p_left() -> None:
    """0.6 of .8 is .48, which .5 reaches alone; of 1 it would take two tokens."""
    logits = logits_of(0.5, 0.3, 0.2)
    assert kept_ids(logits, make_rows(1, top_p=0.6)) == [[0, 1]]
    assert kept_ids(logits, make_rows(1, top_p=0.6, top_k=2)) == [[0]]
    assert kept_ids(logits, make_rows(1, top_p=0.6, min_p=0.5)) == [[0]]


def test_keep_first_zeroes_the_rest() -> None:
    """Two of three, and all of them."""
    weights = torch.tensor([[5.0, 3.0, 2.0], [5.0, 3.0, 2.0]])
    assert keep_first(weights, torch.tensor([2, 3])).tolist() == [[5, 3, 0], [5, 3, 2]]


def test_top_p_counts_against_the_mass_that_is_there() -> None:
    """Of a mass of 10, 0.7 takes two tokens and 0.1 one; of the first two's 8, 0.6 takes one."""
    weights, masses = torch.tensor([[5.0, 3.0, 2.0]]).expand(4, 3), torch.full((4,), 10.0).double()
    limits, top_p = torch.tensor([3, 3, 2, 3]), torch.tensor([0.7, 0.1, 0.6, 1.0]).double()
    assert count_top_p(weights, limits, masses, top_p).tolist() == [2, 1, 1, 3]


def test_candidates_are_the_beginning_of_the_sorted_row() -> None:
    """Largest first, equal ones by ascending id."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0, 0.0]])
    for size in (4, 6):
        values, ids = sort_candidates(logits, size)
        assert ids.tolist()[0][:4] == [1, 3, 4, 2]
        assert torch.equal(values, logits.gather(1, ids))


@pytest.mark.parametrize("levels", [2, 5, 10_000])
@pytest.mark.parametrize("vocab_size", [640, 643, 4096])
@pytest.mark.parametrize("size", [1, 7, 20])
def test_largest_are_found_through_groups(size: int, vocab_size: int, levels: int) -> None:
    """Different ids, whose logits are those that topk finds; with ties and without."""
    g = torch.Generator().manual_seed(size)
    logits = torch.randn(levels, generator=g)[torch.randint(levels, (9, vocab_size), generator=g)]
    # All of the largest in one group, and all in different ones.
    logits[0, torch.arange(3, vocab_size, vocab_size // filters.GROUP)[: size // 2]] = 9.0
    logits[1, 5 : 5 + size // 2] = 9.0
    ids = find_largest(logits, size)
    assert all(len(set(row)) == size for row in ids.tolist())
    found = logits.gather(1, ids).sort(dim=-1, descending=True).values
    assert torch.equal(found, logits.topk(size).values)


def slow_kept(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[int]:
    """The filters in plain Python: the ids that stay."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = [i for i in order if weights[i] >= min_p]
    order = order[: top_k or None]
    total, running, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        running += weights[i] / total
        if top_p < 1 and running >= top_p:
            break
    return sorted(kept)


def random_cases(
    seed: int, *, num: int = 60, vocab_size: int = 60, levels: int
) -> tuple[Tensor, SamplingRows]:
    """Rows with random filters over logits of `levels` different values: few give many ties."""
    g = torch.Generator().manual_seed(seed)
    table = 3 * torch.randn(levels, generator=g)
    logits = table[torch.randint(levels, (num, vocab_size), generator=g)]

    def pick(choices: list[float]) -> list[float]:
        return [choices[i] for i in torch.randint(len(choices), (num,), generator=g).tolist()]

    settings = make_rows(
        num,
        temperature=pick([0.0, 0.31, 1.0, 1.7]),
        top_k=[int(k) for k in pick([0, 0, 1, 3, 4, 5, 16, 17, 59, 60, 99])],
        top_p=pick([1.0, 1.0, 0.03, 0.51, 0.87, 0.983]),
        min_p=pick([0.0, 0.0, 0.0017, 0.053, 0.71]),
        seed=range(num),
    )
    return logits, settings


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_filters_equal_plain_python(levels: int) -> None:
    """Random filters together, with and without ties, against a loop over sorted tokens."""
    for seed in range(5):
        logits, settings = random_cases(seed, levels=levels)
        probs = next_token_probs(logits, settings)
        for i, temperature in enumerate(settings.temperature.tolist()):
            if temperature == 0:
                continue
            filters = [getattr(settings, name)[i].item() for name in ("top_k", "top_p", "min_p")]
            expected = slow_kept(logits[i].tolist(), temperature, *filters)
            assert probs[i].nonzero()[:, 0].tolist() == expected, (i, temperature, filters)


@pytest.mark.parametrize("levels", [2, 5, 1000])
@pytest.mark.parametrize("candidates", [(1,), (4,), (4, 16), (59,), (60,), (2, 99)])
def test_few_candidates_give_the_bits_of_the_full_sort(
    candidates: tuple[int, ...], levels: int
) -> None:
    """Looking at the most probable tokens first changes the time and nothing else."""
    for seed in range(5):
        logits, settings = random_cases(seed, levels=levels)
        weights, num = weigh(logits, settings.temperature), len(logits)
        for draw_number in range(4):
            uniforms = to_uniform(hash_counter(torch.arange(num), torch.tensor(draw_number)))
            inputs = (torch.full((num,), -1), logits, weights, settings, uniforms)
            full = draw_filtered(*inputs, candidates=())
            assert torch.equal(draw_filtered(*inputs, candidates=candidates), full)


@pytest.mark.parametrize("size", [4, 16, 59])
def test_what_is_settled_is_what_the_full_sort_says(size: int) -> None:
    """Ids and weights, bit for bit, of the rows that say so; and there are such rows."""
    num_settled = 0
    for seed in range(5):
        logits, settings = random_cases(seed, levels=30)
        inputs = (logits, weigh(logits, settings.temperature), settings, torch.arange(60))
        ids, kept, is_settled = filter_among(*inputs, size=size)
        all_ids, all_kept, _ = filter_among(*inputs, size=60)
        stays = kept > 0
        assert torch.equal(kept[is_settled], all_kept[is_settled][:, :size])
        assert not all_kept[is_settled][:, size:].any()
        assert torch.equal((ids * stays)[is_settled], (all_ids[:, :size] * stays)[is_settled])
        num_settled += int(is_settled.sum())
    assert num_settled > 10


def test_few_candidates_suffice_for_a_peaked_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typical nucleus costs no sort of the vocabulary; a flat row is sorted alone; rows
    without filters and greedy ones cost nothing."""
    sizes = []

    def spy(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
        sizes.append((len(logits), size))
        return sort_candidates(logits, size)

    monkeypatch.setattr(filters, "sort_candidates", spy)
    peaked = -2 * torch.arange(1.0, 6001).log()
    logits = torch.stack([peaked, torch.zeros(6000), peaked, peaked, peaked])
    settings = make_rows(5, temperature=[1.0, 1.0, 1.0, 1.0, 0.0], top_p=[0.9, 0.9, 0.9, 1.0, 0.9])
    sample(logits, settings, torch.arange(5))
    assert sizes == [(3, 256), (1, 4096), (1, 6000)]
    monkeypatch.undo()
    assert [len(ids) for ids in kept_ids(logits, settings)] == [6, 5400, 6, 6000, 6]


def test_the_whole_vocabulary_is_sorted_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a GPU has all rows in one piece: sorting takes many times their memory."""
    sizes = []

    def spy(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
        sizes.append((len(logits), size))
        return sort_candidates(logits, size)

    monkeypatch.setattr(filters, "sort_candidates", spy)
    monkeypatch.setattr(filters, "CPU_LOGITS", 1500)
    logits, settings = torch.zeros(7, 500), make_rows(7, top_p=0.9)
    uniforms = torch.linspace(0, 0.99, 7).double()
    token_ids = draw_filtered(torch.zeros(7).long(), logits, logits.exp(), settings, uniforms)
    assert sizes == [(5, 256), (2, 256), (3, 500), (3, 500), (1, 500)]
    assert token_ids.tolist() == (uniforms * 450).long().tolist()


# -- drawing -----------------------------------------------------------------------------


def test_inverse_cdf_splits_0_to_1_by_mass() -> None:
    """The running sums .5, .5, 1 split at .5; what is left of the uniform is the way into
    that mass."""
    masses = torch.tensor([0.5, 0.0, 0.5]).expand(4, 3)
    uniforms = torch.tensor([0.0, 0.25, 0.5, 0.875], dtype=torch.float64)
    for scale in (1, 8):
        places, rest = invert_cdf(scale * masses, uniforms)
        assert places.tolist() == [0, 0, 2, 2]
        assert rest.tolist() == [0.0, 0.5, 0.0, 0.75]


def test_rest_of_a_uniform_stays_below_1() -> None:
    """Also where rounding puts it on the border: it is used for the next draw."""
    masses = torch.rand(5000, 7, generator=torch.Generator().manual_seed(0)) ** 20
    uniforms = masses[:, :3].double().sum(-1) / masses.double().sum(-1)
    for nudge in (1 - 2**-52, 1.0, 1 + 2**-52):
        _, rest = invert_cdf(masses, (uniforms * nudge).clamp(max=1 - 2**-53))
        assert (rest >= 0).all() and (rest < 1).all()


def test_a_token_of_probability_0_is_never_drawn() -> None:
    """For uniforms at both ends and on every border between tokens, within a block of the
    search and across blocks."""
    probs = torch.tensor([0.0, 0.25, 0.0, 0.25, 0.0]).repeat_interleave(100)
    probs[torch.arange(500) % 100 > 1] = 0  # tokens 100, 101 and 300, 301 remain
    borders = [0.0, 0.2499, 0.25, 0.4999, 0.5, 0.75, 1 - 2**-53]
    uniforms = torch.tensor(borders, dtype=torch.float64)
    token_ids = draw(probs.expand(7, 500), uniforms)
    assert token_ids.tolist() == [100, 100, 101, 101, 300, 301, 301]


def test_the_largest_uniform_never_falls_off_the_end() -> None:
    """Whatever the sum rounds to, the last token of positive mass is drawn."""
    probs = torch.rand(500, 37, generator=torch.Generator().manual_seed(0))
    probs[:, 30:] = 0
    uniforms = torch.full((500,), 1 - 2**-53, dtype=torch.float64)
    assert set(draw(probs, uniforms).tolist()) == {29}
    assert draw(torch.tensor([[0.0] * 200 + [1e-9] + [0.0] * 200]), uniforms[:1]).tolist() == [200]


def test_draw_is_the_inverse_cdf_of_the_vocabulary() -> None:
    """In two steps as in one, but for uniforms that rounding moves over a border."""
    probs = torch.randn(2000, 1003, generator=torch.Generator().manual_seed(0)).exp()
    uniforms = to_uniform(hash_counter(torch.tensor(0), torch.arange(2000)))
    cdf = probs.double().cumsum(-1)
    expected = (cdf <= uniforms[:, None] * cdf[:, -1:]).sum(-1)
    assert (draw(probs, uniforms) == expected).float().mean() > 0.99


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [0, 150, 300, 450]])
def test_small_probabilities_keep_their_share_of_the_sum(ids: list[int]) -> None:
    """Tokens of 1e-9 behind one of 1, which sums in float32 would swallow."""
    probs = torch.zeros(4, 500)
    probs[:, ids] = torch.tensor([1.0, 1e-9, 1e-9, 1e-9])
    places = torch.tensor([0.9, 1 + 0.5e-9, 1 + 1.5e-9, 1 + 2.5e-9], dtype=torch.float64)
    assert draw(probs, places / (1 + 3e-9)).tolist() == ids


PROBS = [0.05, 0.3, 0.1, 0.25, 0.2, 0.1]


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


def test_distribution_across_blocks_of_the_search() -> None:
    """64 unequal tokens, 16 in each quarter of a vocabulary of 512."""
    probs = torch.zeros(512)
    ids = torch.arange(0, 512, 8)
    probs[ids] = 0.2 + (ids * 37 % 64) / 64
    token_ids = draw(
        probs.expand(NUM_DRAWS, -1),
        to_uniform(hash_counter(torch.tensor(7), torch.arange(NUM_DRAWS))),
    )
    assert_fits(token_ids.bincount(minlength=512), probs.tolist())


def test_distribution_over_seeds_at_one_position() -> None:
    """Requests with seeds 0, 1, 2, ... do not start alike."""
    logits = logits_of(*PROBS).expand(NUM_DRAWS, -1)
    settings = make_rows(NUM_DRAWS, seed=range(NUM_DRAWS))
    token_ids = sample(logits, settings, torch.full((NUM_DRAWS,), 5))
    assert_fits(token_ids.bincount(minlength=6), PROBS)


# -- seeds -------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    """Alone, in every place of a batch, beside greedy, plain and filtered rows."""
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


FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed")


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
    """How many rows fit the cache is nobody's business."""
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
    """Beside random rows in the same batch, which it does not change."""
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
