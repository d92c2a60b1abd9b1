"""drawing: weights without overflow, and draws in proportion to them.

The tests with an `exercise` mark are checks of notebook 10; what a failed assert says is the hint
a learner reads.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import sampling_calls
from sampling_cases import NUM_DRAWS, assert_fits, logits_of

from minivllm.drawing import draw, hash_counter, invert_cdf, to_uniform, weigh

INF = math.inf
LN3 = math.log(3)

# -- temperature -------------------------------------------------------------------------


@pytest.mark.exercise("drawing.weigh")
def test_the_temperature_divides_the_logits() -> None:
    """Odds of 1 : 3 are 1 : 9 at 0.5 and 1 : 1.73 at 2."""
    weigh = sampling_calls.weigh
    assert weigh([[0, LN3]], [1]) == [[0.3333, 1]], (
        "the largest weighs 1, the other a third of it: do you divide by the sum, or forget exp?"
    )
    assert weigh([[0, LN3]], [0.5]) == [[0.1111, 1]], (
        "0.5 makes the difference twice as large: do you multiply where you must divide?"
    )
    assert weigh([[0, LN3], [0, LN3]], [2, 1]) == [[0.5774, 1], [0.3333, 1]], (
        "each row has its own temperature: is it a column, [N, 1]?"
    )


@pytest.mark.exercise("drawing.weigh")
def test_large_logits_overflow_nothing() -> None:
    """exp(100) is more than float32 holds; exp(0) is not."""
    weigh = sampling_calls.weigh
    assert weigh([[100, 100 - LN3, -100]], [1]) == [[1, 0.3333, 0]], (
        "exp(100) is inf in float32: what can you take from all logits of a row beforehand?"
    )
    assert weigh([[-200, -200]], [1]) == [[1, 1]], "exp(-200) is 0 in float32, exp(0) is 1"
    assert weigh([[20, 10]], [1e-38]) == [[1, 0]], (
        "20 / 1e-38 is inf, and inf - inf is NaN: which comes first, dividing or subtracting?"
    )


@pytest.mark.exercise("drawing.weigh")
def test_temperature_0_counts_as_1() -> None:
    """Greedy rows are in the batch too; nothing of theirs may become inf or NaN."""
    weigh = sampling_calls.weigh
    assert weigh([[0, LN3]], [0]) == [[0.3333, 1]], "do you divide by a temperature of 0?"
    assert weigh([[0, LN3], [0, LN3]], [0, 0.5]) == [[0.3333, 1], [0.1111, 1]], (
        "a greedy row next to a random one: is each row's own temperature looked at?"
    )


@pytest.mark.exercise("drawing.weigh")
def test_a_row_weighs_the_same_in_any_batch() -> None:
    """A neighbour with large logits changes nothing."""
    weigh = sampling_calls.weigh
    assert weigh([[0, LN3], [500, 500]], [1, 1]) == [[0.3333, 1], [1, 1]], (
        "500 is in another row: do you take the largest of the row, or of the batch?"
    )


@pytest.mark.exercise("drawing.weigh")
def test_logits_keep_their_values() -> None:
    """Log-probabilities are computed from them later."""
    logits = torch.tensor([[1.0, 2.0]])
    weigh(logits, torch.tensor([0.5]))
    assert logits.tolist() == [[1, 2]], (
        "the logits are needed again, for logprobs: do you subtract in place?"
    )


@pytest.mark.exercise("drawing.weigh")
def test_temperatures_keep_their_values() -> None:
    """They are the rows' settings, and hold for the next step too."""
    temperature = torch.tensor([0.5, 0.0])
    weigh(torch.tensor([[1.0, 2.0]] * 2), temperature)
    assert temperature.tolist() == [0.5, 0], (
        "the temperatures are the rows' own, read again in the next step: do you write into them?"
    )


@pytest.mark.exercise("drawing.weigh")
def test_memory_that_is_handed_in_may_be_used() -> None:
    """With it and without it the weights are the same, and the logits stay."""
    logits, buffer = torch.tensor([[1.0, 2.0]]), torch.full((1, 2), 7.0)
    expected = weigh(logits, torch.tensor([0.5])).tolist()
    assert weigh(logits, torch.tensor([0.5]), out=buffer).tolist() == expected, (
        "what was in `out` before does not count"
    )
    assert logits.tolist() == [[1, 2]], "the logits are needed again: is only `out` written to?"


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


# -- drawing -----------------------------------------------------------------------------


@pytest.mark.exercise("drawing.invert_cdf")
def test_a_uniform_falls_on_the_place_whose_sum_exceeds_it() -> None:
    """Running sums .5, .75, 1."""
    invert_cdf = sampling_calls.invert_cdf
    assert invert_cdf([0.5, 0.25, 0.25], 0.25)[0] == 0
    assert invert_cdf([0.5, 0.25, 0.25], 0.6)[0] == 1, (
        "the sums are .5, .75, 1: the first above 0.6 is the second"
    )
    assert invert_cdf([2, 1, 1], 0.6)[0] == 1, "the masses sum to 4: of what is `uniforms` a share?"


@pytest.mark.exercise("drawing.invert_cdf")
def test_a_place_without_mass_is_never_drawn() -> None:
    """Neither at 0 nor on the border between two places."""
    invert_cdf = sampling_calls.invert_cdf
    assert invert_cdf([0.5, 0, 0.5], 0.5)[0] == 2, (
        "the sums are .5, .5, 1: the first *above* .5 is the third. Does your search stop at equal?"
    )
    assert invert_cdf([0, 1], 0)[0] == 1, "a uniform can be 0, and place 0 has no mass"
    assert invert_cdf([0.7, 0.1, 0.1, 0], 1 - 2**-53)[0] == 2, (
        "the largest uniform is 1 - 2**-53, and in float32 that is 1: what type do you compare in?"
    )


@pytest.mark.exercise("drawing.invert_cdf")
def test_small_masses_keep_their_share() -> None:
    """Behind 1 a mass of 1e-9 changes no sum in float32."""
    places, _ = invert_cdf(
        torch.tensor([[1, 1e-9, 1e-9]]), torch.tensor([1 / (1 + 2e-9) + 5e-10], dtype=torch.float64)
    )
    assert places.tolist() == [1], (
        "1 + 1e-9 is 1 in float32: in which type do you sum (`cumsum` has `dtype`)?"
    )


@pytest.mark.exercise("drawing.invert_cdf")
def test_what_is_left_of_the_uniform_is_uniform_again() -> None:
    """How far into the place's mass it fell."""
    invert_cdf = sampling_calls.invert_cdf
    assert invert_cdf([0.5, 0, 0.5], 0.25) == (0, 0.5), (
        "0.25 is half of the way into the first .5: is the rest a share of that place's mass?"
    )
    assert invert_cdf([0.5, 0, 0.5], 0.5) == (2, 0.0), "0.5 is where the third place begins"
    assert invert_cdf([3, 1], 0.875) == (1, 0.5), (
        "0.875 of 4 is 3.5, and place 1 reaches from 3 to 4"
    )


@pytest.mark.exercise("drawing.invert_cdf")
def test_a_row_of_nan_gets_some_place() -> None:
    """Its request is lost; those of the other rows go on."""
    assert sampling_calls.invert_cdf([math.nan, math.nan], 0.5)[0] in (0, 1), (
        "no sum of NaN exceeds anything: is a place behind the last clamped?"
    )


@pytest.mark.exercise("drawing.invert_cdf")
def test_masses_and_uniforms_are_only_read() -> None:
    """The weights serve the filters afterwards; each row has its own place."""
    masses = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    uniforms = torch.tensor([0.6, 0.25], dtype=torch.float64)
    places, rest = invert_cdf(masses, uniforms)
    assert places.tolist() == [1, 0], "0.6 and 0.25: has each row its own place?"
    assert rest.dtype == torch.float64, "the rest is used again: is it float64, like the uniforms?"
    assert masses.tolist() == [[0.5, 0.25, 0.25]] * 2, "the masses are only read"
    assert uniforms.tolist() == [0.6, 0.25], "the uniforms are only read: do you write into them?"


def test_inverse_cdf_splits_0_to_1_by_mass() -> None:
    """The running sums .5, .5, 1 split at .5; what is left of the uniform is the way into
    that mass."""
    masses = torch.tensor([0.5, 0.0, 0.5]).expand(4, 3)
    uniforms = torch.tensor([0.0, 0.25, 0.5, 0.875], dtype=torch.float64)
    for scale in (1, 8):
        places, rest = invert_cdf(scale * masses, uniforms)
        assert places.tolist() == [0, 0, 2, 2]
        assert rest.tolist() == [0.0, 0.5, 0.0, 0.75]


@pytest.mark.exercise("drawing.invert_cdf")
def test_rest_of_a_uniform_stays_below_1() -> None:
    """Also where rounding puts it on the border: it is used for the next draw."""
    masses = torch.rand(5000, 7, generator=torch.Generator().manual_seed(0)) ** 20
    uniforms = masses[:, :3].double().sum(-1) / masses.double().sum(-1)
    for nudge in (1 - 2**-52, 1.0, 1 + 2**-52):
        _, rest = invert_cdf(masses, (uniforms * nudge).clamp(max=1 - 2**-53))
        assert (rest >= 0).all() and (rest < 1).all(), (
            "the rest is a uniform again, in [0, 1): what if rounding puts it below 0, or at 1?"
        )


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
