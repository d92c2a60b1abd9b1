"""filters: every edge of top_k, top_p and min_p, and the same tokens whatever is looked at first.

The tests with an `exercise` mark are checks of notebook 10; what a failed assert says is the hint
a learner reads.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import sampling_calls
from sampling_cases import kept_ids, logits_of, make_rows, next_token_probs, random_cases, slow_kept

from minivllm import filters
from minivllm.drawing import hash_counter, to_uniform, weigh
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
from minivllm.sampler import sample


@pytest.mark.exercise("filters.count_top_p")
def test_the_token_that_reaches_the_share_counts() -> None:
    """Running sums 5, 8, 10 of 10."""
    count_top_p = sampling_calls.count_top_p
    assert count_top_p([5, 3, 2], 0.7) == 2, (
        "5 is less than 7 and 8 is not: does the token that crosses the border stay?"
    )
    assert count_top_p([5, 3, 2], 0.5) == 1, (
        "5 of 10 reaches 0.5 by itself: is it `<` or `<=` that you search with?"
    )
    assert count_top_p([5, 3, 2], 0.1) == 1, "the most probable token stays, always"


@pytest.mark.exercise("filters.count_top_p")
def test_the_share_is_of_the_mass_that_is_there() -> None:
    """Weights are no probabilities; and the candidates may be a part of the vocabulary."""
    count_top_p = sampling_calls.count_top_p
    assert count_top_p([0.5, 0.3, 0.2], 0.7) == 2
    assert count_top_p([5, 3, 2], 0.7, mass=10) == 2, (
        "the mass is 10, so the share is 7: do you take top_p itself for it?"
    )
    assert count_top_p([5, 3, 2], 0.5, mass=16) == 2, (
        "half of 16 is 8: is the mass that of all tokens, not of these three alone?"
    )


@pytest.mark.exercise("filters.count_top_p")
def test_top_p_is_a_share_of_what_the_others_left() -> None:
    """A limit of 2 leaves 5 + 3 = 8."""
    count_top_p = sampling_calls.count_top_p
    assert count_top_p([5, 3, 2], 0.6) == 2
    assert count_top_p([5, 3, 2], 0.6, limit=2) == 1, (
        "top_k left two tokens, a mass of 8, and 0.6 of that is 4.8: do you look at `limits`?"
    )
    assert count_top_p([5, 3, 2], 0.9, limit=2) == 2, "0.9 of 8 is 7.2: is the mass 5 + 3?"


@pytest.mark.exercise("filters.count_top_p")
def test_top_p_1_removes_nothing() -> None:
    """Not even a token so small that the sum does not move."""
    count_top_p = sampling_calls.count_top_p
    assert count_top_p([1, 1e-30, 1e-40], 1.0) == 3, (
        "1 + 1e-30 is 1, so the share is reached at once: is 1 a case of its own?"
    )
    assert count_top_p([5, 3, 2], 0.9999, mass=20) == 3, "never more than there are candidates"


@pytest.mark.exercise("filters.count_top_p")
def test_counting_changes_no_weights() -> None:
    """The candidates are drawn from afterwards; each row has its own count."""
    weights = torch.tensor([[5.0, 3, 2], [5, 3, 2]])
    masses, top_p = torch.full((2,), 10.0).double(), torch.tensor([0.7, 0.1]).double()
    counts = filters.count_top_p(weights, torch.tensor([3, 3]), masses, top_p)
    assert counts.tolist() == [2, 1], "0.7 and 0.1 of 10: has each row its own share?"
    assert weights.tolist() == [[5, 3, 2]] * 2, "the weights are drawn from later: do they change?"
    assert masses.tolist() == [10, 10], "the masses are only read"


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
    mixed = make_rows(2, top_p=[1.0, 0.5])
    assert kept_ids(logits.expand(2, 4), mixed) == [[0, 1, 2, 3], [0]]
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
    """For top-k and for top-p, next to a larger one and among equals only."""
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
