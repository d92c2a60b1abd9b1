"""logits_processors: each penalty, bias and log-probability against its definition.

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
from sampling_cases import NUM_DRAWS, PROBS, assert_fits

from minivllm.logits_processors import (
    add_biases,
    apply_penalties,
    count_above,
    count_tokens,
    penalize_frequency,
    penalize_presence,
    penalize_repetition,
    process_logits,
    rank_tokens,
    tokens_before,
)
from minivllm.rows import Biases, Penalties, SamplingRows
from minivllm.sampler import sample

INF = math.inf


def make_rows(num: int, temperature: float = 1.0, **settings: object) -> SamplingRows:
    """`num` rows that draw without filters, or greedily at temperature 0."""
    rows = SamplingRows(
        temperature=torch.full((num,), temperature),
        top_k=torch.zeros(num, dtype=torch.int64),
        top_p=torch.ones(num, dtype=torch.float64),
        min_p=torch.zeros(num),
        seed=torch.ones(num, dtype=torch.int64),
        any_random=temperature > 0,
        any_filter=False,
    )
    return replace(rows, **settings)  # type: ignore[arg-type]


def make_biases(entries: list[tuple[int, int, float]]) -> Biases:
    """From (row, token id, value)."""
    rows, token_ids, values = (torch.tensor(column) for column in zip(*entries))
    return Biases(rows, token_ids, values.float())


def make_penalties(
    token_ids: list[list[int]],
    num_prompt_tokens: list[int],
    rows: list[int] | None = None,
    *,
    repetition: float | list[float] = 1.0,
    presence: float | list[float] = 0.0,
    frequency: float | list[float] = 0.0,
) -> Penalties:
    """Of these texts; a single number holds for all of them."""

    def column(value: float | list[float]) -> Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * len(token_ids))

    return Penalties(
        rows=torch.tensor(rows if rows is not None else list(range(len(token_ids)))),
        token_ids=torch.tensor(token_ids, dtype=torch.int32),
        num_prompt_tokens=torch.tensor(num_prompt_tokens),
        repetition=column(repetition),
        presence=column(presence),
        frequency=column(frequency),
    )


# -- biases ------------------------------------------------------------------------------------


def test_biases_are_added_in_their_row() -> None:
    """To single logits; minus infinity stays, also with another bias for the same token."""
    logits = torch.ones(3, 3)
    entries = [(0, 1, 2.0), (2, 0, -INF), (2, 2, 0.5), (2, 2, 0.25), (2, 0, 100.0)]
    biased = add_biases(logits, make_biases(entries))
    assert biased.tolist() == [[1, 3, 1], [1, 1, 1], [-INF, 1, 1.75]]
    assert torch.equal(logits, torch.ones(3, 3)), "the logits given are left as they are"


# -- penalties ---------------------------------------------------------------------------------


def test_tokens_are_counted_from_start_to_end() -> None:
    """Half-open; the id 9 behind the end is not looked at, and an empty stretch counts nothing."""
    token_ids = torch.tensor([[5, 1, 5, 5, 9], [2, 2, 2, 2, 2], [0, 1, 2, 3, 4]], dtype=torch.int32)
    counts = count_tokens(token_ids, torch.tensor([1, 0, 3]), torch.tensor([4, 5, 3]), 10)
    assert counts.tolist() == [
        [0, 1, 0, 0, 0, 2, 0, 0, 0, 0],
        [0, 0, 5, 0, 0, 0, 0, 0, 0, 0],
        [0] * 10,
    ]


def test_tokens_behind_the_end_are_the_first_one_again() -> None:
    """What a row held before is in no text."""
    token_ids = torch.tensor([[5, 1, 7, 9], [3, 4, 7, 9]], dtype=torch.int32)
    ends = torch.tensor([2, 4])
    assert tokens_before(token_ids, ends).tolist() == [[5, 1, 5, 5], [3, 4, 7, 9]]


def test_repetition_divides_above_0_and_multiplies_below() -> None:
    """Below 1 it encourages, at 1 it is off; what cannot be chosen stays so."""
    logits = torch.tensor([[2.0, -2.0, 0.0, -INF]]).expand(3, 4)
    penalized = penalize_repetition(logits, torch.tensor([2.0, 0.5, 1.0]))
    assert penalized.tolist() == [[1, -4, 0, -INF], [4, -1, 0, -INF], [2, -2, 0, -INF]]


def test_frequency_counts_and_presence_does_not() -> None:
    """Three times is three times the one and once the other; negative ones encourage."""
    logits = torch.tensor([[2.0, 2.0, -2.0]]).expand(2, 3)
    counts = torch.tensor([[0.0, 1.0, 3.0]]).expand(2, 3)
    penalty = torch.tensor([0.5, -1.0])
    assert penalize_frequency(logits, counts, penalty).tolist() == [[2, 1.5, -3.5], [2, 3, 1]]
    assert penalize_presence(logits, counts, penalty).tolist() == [[2, 1.5, -2.5], [2, 3, -1]]


@pytest.mark.exercise("logits_processors.apply_penalties")
def test_repetition_looks_at_prompt_and_answer() -> None:
    """And pushes down what is below 0, too; a token that occurs twice is penalized once."""
    text = [0, 1, 1, 2, 2, 3, 3]  # prompt 0 1, answer 1 2 2; what comes after is old
    apply_penalties = sampling_calls.apply_penalties
    assert apply_penalties([[8, 8, 8, 9, 8]], [text], [2], [5], repetition=2) == [
        [4, 4, 4, 9, 8]
    ], "tokens 0 1 of the prompt and 1 2 of the answer count, each once; 3 comes after the text"
    assert apply_penalties([[-8, 8]], [[0]], [1], [1], repetition=2) == [[-16, 8]], (
        "-8 / 2 is -4, more probable than before: what makes a negative logit smaller?"
    )


@pytest.mark.exercise("logits_processors.apply_penalties")
def test_frequency_and_presence_look_at_the_answer() -> None:
    """The answer has 1 once and 2 twice; 0 is of the prompt alone."""
    text = [0, 1, 1, 2, 2, 3, 3]  # prompt 0 1, answer 1 2 2; what comes after is old
    apply_penalties = sampling_calls.apply_penalties
    assert apply_penalties([[8, 8, 8, 8, 8]], [text], [2], [5], frequency=1.5) == [
        [8, 6.5, 5, 8, 8]
    ], "once for each time *the answer* has it: do you count the prompt too, or old tokens behind?"
    assert apply_penalties([[8, 8, 8, 8, 8]], [text], [2], [5], presence=1.5) == [
        [8, 6.5, 6.5, 8, 8]
    ], "once if the answer has it, however often"
    assert apply_penalties([[8, 8]], [[0, 1]], [2], [2], frequency=1, presence=1) == [[8, 8]], (
        "there is no answer yet: is anything of the prompt penalized?"
    )


@pytest.mark.exercise("logits_processors.apply_penalties")
def test_repetition_comes_first() -> None:
    """8 / 2 - 1 is not (8 - 1) / 2."""
    apply_penalties = sampling_calls.apply_penalties
    assert apply_penalties([[8, 8]], [[0]], [0], [1], repetition=2, presence=1) == [[3, 8]], (
        "8 / 2 - 1 is 3, (8 - 1) / 2 is 3.5: which comes first?"
    )


@pytest.mark.exercise("logits_processors.apply_penalties")
def test_rows_that_do_not_ask_keep_their_logits() -> None:
    """Rows 2 and 0 of three ask, each with its own text and position."""
    apply_penalties = sampling_calls.apply_penalties
    logits, texts = [[8, 8, 8]] * 3, [[0, 1, 1], [0, 2, 1]]
    changed = apply_penalties(logits, texts, [1, 0], [2, 9, 3], rows=[2, 0], frequency=1)
    assert changed == [[7, 8, 7], [8, 8, 8], [8, 6, 8]], (
        "the first text is row 2's: do you use `penalties.rows` for logits *and* positions?"
    )


def test_repetition_sees_prompt_and_answer_the_others_the_answer() -> None:
    """Prompt 0 1, answer 1 2 2, chosen is the token at 5; what stands there and behind is old."""
    text = [0, 1, 1, 2, 2, 3, 3]
    logits, positions = torch.full((1, 5), 8.0), torch.tensor([5])
    for penalty, expected in (
        ({"repetition": 2.0}, [4, 4, 4, 8, 8]),
        ({"presence": 1.5}, [8, 6.5, 6.5, 8, 8]),
        ({"frequency": 1.5}, [8, 6.5, 5, 8, 8]),
        ({"repetition": 2.0, "presence": 1.0, "frequency": 0.5}, [4, 2.5, 2, 8, 8]),
    ):
        penalties = make_penalties([text], [2], **penalty)  # type: ignore[arg-type]
        assert apply_penalties(logits, penalties, positions).tolist() == [expected], penalty
    first = make_penalties([text], [2], presence=1.0, frequency=1.0)
    assert torch.equal(apply_penalties(logits, first, torch.tensor([2])), logits), "no answer yet"


def test_only_rows_that_ask_are_changed() -> None:
    """Rows 2 and 0 of four, each with its own text, position and penalty."""
    logits, positions = torch.full((4, 3), 8.0), torch.tensor([2, 9, 3, 9])
    penalties = make_penalties([[0, 1, 1], [0, 2, 1]], [1, 0], [2, 0], frequency=[1.0, 2.0])
    expected = [[6, 8, 6], [8, 8, 8], [8, 6, 8], [8, 8, 8]]
    assert apply_penalties(logits, penalties, positions).tolist() == expected
    assert (logits == 8).all(), "the logits given are left as they are"


def test_biases_come_before_penalties() -> None:
    """-1 + 5 is above 0, so it is divided; a token that cannot be chosen stays so."""
    logits, positions = torch.tensor([[-1.0, 4.0]]), torch.tensor([2])
    settings = make_rows(
        1,
        biases=make_biases([(0, 0, 5.0), (0, 1, -INF)]),
        penalties=make_penalties([[0, 1]], [1], repetition=2.0, frequency=0.25),
    )
    assert process_logits(logits, settings, positions).tolist() == [[2.0, -INF]]


def test_a_step_without_biases_and_penalties_keeps_its_logits() -> None:
    """The tensor itself: nothing is copied."""
    logits = torch.randn(2, 5)
    assert process_logits(logits, make_rows(2), torch.arange(2)) is logits


def random_texts(num: int, vocab_size: int) -> tuple[list[list[int]], list[int], Tensor]:
    """Texts of different lengths, with ids that repeat, rubbish behind them: (token ids, prompt
    lengths, positions)."""
    g = torch.Generator().manual_seed(num)
    token_ids = torch.randint(vocab_size // 2, (num, 20), generator=g).tolist()
    lengths = torch.randint(6, 21, (num,), generator=g)
    return token_ids, torch.randint(1, 6, (num,), generator=g).tolist(), lengths


def test_penalties_equal_a_plain_loop() -> None:
    """Random texts and penalties, by the definitions, one logit at a time."""
    token_ids, num_prompt, positions = random_texts(12, 30)
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(12, 30, generator=g)
    repetition = (0.5 + torch.rand(12, generator=g)).tolist()
    presence, frequency = (4 * torch.rand(2, 12, generator=g) - 2).tolist()
    penalties = make_penalties(
        token_ids, num_prompt, repetition=repetition, presence=presence, frequency=frequency
    )
    got = apply_penalties(logits, penalties, positions)
    for i, end in enumerate(positions.tolist()):
        text, answer = token_ids[i][:end], token_ids[i][num_prompt[i] : end]
        for token_id in range(30):
            x = logits[i, token_id].item()
            if token_id in text:
                x = x / repetition[i] if x > 0 else x * repetition[i]
            x -= frequency[i] * answer.count(token_id) + presence[i] * (token_id in answer)
            assert got[i, token_id].item() == pytest.approx(x, abs=1e-4), (i, token_id)


def test_repetition_equals_transformers() -> None:
    """Its processor, row by row, as its batches know no lengths."""
    transformers = pytest.importorskip("transformers")
    token_ids, num_prompt, positions = random_texts(8, 30)
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(0))
    for penalty in (0.7, 1.3):
        penalties = make_penalties(token_ids, num_prompt, repetition=penalty)
        got = apply_penalties(logits, penalties, positions)
        theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        for i, end in enumerate(positions.tolist()):
            expected = theirs(torch.tensor([token_ids[i][:end]]), logits[i : i + 1].clone())
            assert torch.allclose(got[i : i + 1], expected)


def test_min_tokens_and_logit_bias_equal_transformers() -> None:
    """Its processors for a new length and for a sequence of one token."""
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(0))
    theirs = transformers.MinNewTokensLengthLogitsProcessor(4, 3, [7, 9], device="cpu")
    text = torch.arange(5)[None]  # a prompt of 4 and one token, 3 are wanted
    biases = make_biases([(0, 7, -INF), (0, 9, -INF)])
    assert torch.equal(add_biases(logits, biases), theirs(text, logits.clone()))
    theirs = transformers.SequenceBiasLogitsProcessor([[[7], 2.5], [[9], -1.0]])
    biases = make_biases([(0, 7, 2.5), (0, 9, -1.0)])
    assert torch.allclose(add_biases(logits, biases), theirs(text, logits.clone()))


# -- what is drawn then ------------------------------------------------------------------------


def draws(settings: SamplingRows) -> Tensor:
    """Counts [6] of a step of NUM_DRAWS rows, which differ in their seeds alone."""
    settings = replace(settings, seed=torch.arange(NUM_DRAWS))
    logits = torch.tensor([PROBS]).log().expand(NUM_DRAWS, -1)
    token_ids = sample(logits, settings, torch.full((NUM_DRAWS,), 5))
    return token_ids.bincount(minlength=6)


TEXT = [4, 4, 0, 1, 1]  # prompt 4 4 0, answer 1 1


@pytest.mark.parametrize(
    ("penalty", "factors"),
    [
        ({"presence": 1.0}, {1: math.exp(-1)}),
        ({"presence": -0.5}, {1: math.exp(0.5)}),
        ({"frequency": 0.75}, {1: math.exp(-1.5)}),
        ({"frequency": 0.5, "presence": 0.5}, {1: math.exp(-1.5)}),
        # ln p is negative, so times 1.5 it is p^1.5, for the tokens of the prompt too.
        ({"repetition": 1.5}, {0: 0.05**0.5, 1: 0.3**0.5, 4: 0.2**0.5}),
    ],
)
def test_distribution_under_a_penalty(penalty: dict[str, float], factors: dict[int, float]) -> None:
    """The probabilities of the tokens of TEXT, times what the penalty makes of them."""
    texts, prompts = [TEXT] * NUM_DRAWS, [3] * NUM_DRAWS
    penalties = make_penalties(texts, prompts, **penalty)  # type: ignore[arg-type]
    probs = [p * factors.get(i, 1.0) for i, p in enumerate(PROBS)]
    assert_fits(draws(make_rows(NUM_DRAWS, penalties=penalties)), probs)


def test_distribution_under_biases() -> None:
    """A bias of ln 3 makes a token three times as likely, one of -inf impossible."""
    entries = [e for i in range(NUM_DRAWS) for e in ((i, 2, math.log(3)), (i, 1, -INF))]
    settings = make_rows(NUM_DRAWS, biases=make_biases(entries))
    assert_fits(draws(settings), [0.05, 0, 0.3, 0.25, 0.2, 0.1])


def test_distribution_of_a_mixed_batch() -> None:
    """Quarters of one step: greedy, top-k, a bias with top-p, presence with min-p at 0.5."""
    kind = torch.arange(NUM_DRAWS) % 4
    settings = make_rows(
        NUM_DRAWS,
        temperature=1.0,
        biases=make_biases([(i, 5, math.log(6)) for i in range(2, NUM_DRAWS, 4)]),
        penalties=make_penalties(
            [TEXT] * (NUM_DRAWS // 4),
            [3] * (NUM_DRAWS // 4),
            list(range(3, NUM_DRAWS, 4)),
            presence=math.log(3),
        ),
        any_filter=True,
        seed=torch.arange(NUM_DRAWS),
    )
    temperature = torch.tensor([0.0, 1.0, 1.0, 0.5])[kind]
    settings = replace(
        settings,
        temperature=temperature,
        top_k=torch.tensor([0, 3, 0, 0])[kind],
        top_p=torch.tensor([1.0, 1.0, 0.5, 1.0]).double()[kind],
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.1])[kind],
    )
    logits = torch.tensor([PROBS]).log().expand(NUM_DRAWS, -1)
    token_ids = sample(logits, settings, torch.full((NUM_DRAWS,), 5))
    counts = [token_ids[kind == k].bincount(minlength=6) for k in range(4)]
    assert counts[0].tolist() == [0, NUM_DRAWS // 4, 0, 0, 0, 0]
    assert_fits(counts[1], [0, 0.3, 0, 0.25, 0.2, 0])
    # .6 of 1.5 for token 5 and .3 for token 1 reach the half: .4 alone does not.
    assert_fits(counts[2], [0, 0.3, 0, 0, 0, 0.6])
    # .1 for token 1; squared .0025, .01, .01, .0625, .04, .01, at least a tenth of .0625.
    assert_fits(counts[3], [0, 0.01, 0.01, 0.0625, 0.04, 0.01])


def test_greedy_takes_the_largest_of_the_processed_logits() -> None:
    """The favourite is banned in one row, penalized in another, left alone in the third."""
    logits = torch.tensor([[1.0, 3.0, 2.0]]).expand(3, 3)
    settings = make_rows(
        3,
        temperature=0.0,
        biases=make_biases([(0, 1, -INF)]),
        penalties=make_penalties([[1]], [0], [1], presence=1.5),
    )
    assert sample(logits, settings, torch.tensor([1, 1, 1])).tolist() == [2, 2, 1]


def test_a_row_is_processed_alike_alone_and_in_a_batch() -> None:
    """Bit for bit, for each knob, whatever its neighbours ask for and how long their texts are."""
    token_ids, num_prompt, positions = random_texts(6, 1001)
    logits = torch.randn(6, 1001, generator=torch.Generator().manual_seed(0))
    knobs = {"repetition": [1.3, 1.0, 0.8], "presence": [0.0, 1.5, -0.5], "frequency": [0, 0, 0.3]}
    knobs = {name: values * 2 for name, values in knobs.items()}
    entries = [(i, token, 0.5 * i - 1) for i in (1, 4) for token in (3, 500)] + [(2, 7, -INF)]
    together = process_logits(
        logits,
        make_rows(
            6,
            biases=make_biases(entries),
            penalties=make_penalties(token_ids, num_prompt, **knobs),  # type: ignore[arg-type]
        ),
        positions,
    )
    for i in range(6):
        own = [(0, token, value) for row, token, value in entries if row == i]
        text = token_ids[i][: int(positions[i])]  # no longer than its own text
        mine = {name: values[i : i + 1] for name, values in knobs.items()}
        settings = make_rows(
            1,
            biases=make_biases(own) if own else None,
            penalties=make_penalties([text], num_prompt[i : i + 1], **mine),  # type: ignore[arg-type]
        )
        alone = process_logits(logits[i : i + 1], settings, positions[i : i + 1])
        assert torch.equal(alone[0], together[i])


# -- log-probabilities -------------------------------------------------------------------------


def test_logprobs_are_log_softmax_with_ranks() -> None:
    """Chosen first, then the most probable; ranks by a plain count."""
    logits = 5 * torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([0, 17, 299, 5, 5, 100, 3])
    ranked = rank_tokens(logits, chosen, 20)
    assert ranked.token_ids.shape == (7, 21)
    expected = logits.double().log_softmax(-1)
    assert torch.allclose(ranked.logprobs.double(), expected.gather(1, ranked.token_ids), atol=1e-5)
    order = logits.sort(dim=-1, descending=True).indices
    assert torch.equal(ranked.token_ids[:, 0], chosen)
    assert torch.equal(ranked.token_ids[:, 1:], order[:, :20])
    assert ranked.ranks[:, 1:].tolist() == [list(range(1, 21))] * 7
    assert ranked.ranks[:, 0].tolist() == [
        row.index(c) + 1 for row, c in zip(order.tolist(), chosen)
    ]


def test_logprobs_by_eye() -> None:
    """Probabilities .5, .3, .2 and the least of them chosen."""
    ranked = rank_tokens(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([2]), 1)
    assert ranked.token_ids.tolist() == [[2, 0]]
    assert ranked.logprobs[0].exp().tolist() == pytest.approx([0.2, 0.5])
    assert ranked.ranks.tolist() == [[3, 1]]


def test_no_alternatives_give_the_chosen_token_alone() -> None:
    """logprobs=0 asks for it; more than the vocabulary gives all of it."""
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    assert rank_tokens(logits, torch.tensor([0]), 0).token_ids.tolist() == [[0]]
    assert rank_tokens(logits, torch.tensor([0]), 20).token_ids.tolist() == [[0, 2, 1, 0]]


def test_equals_share_a_rank() -> None:
    """So the chosen one has the same rank whether or not the most probable ones include it."""
    ranked = rank_tokens(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), torch.tensor([2]), 4)
    assert ranked.ranks.tolist() == [[1, 1, 1, 3, 4]]
    assert count_above(torch.tensor([[1, 3, 3, 2]]), torch.tensor([[3, 2]])).tolist() == [[0, 2]]


def test_logprobs_of_a_row_are_its_own_business() -> None:
    """Alone with one alternative, and next to rows that want twenty."""
    logits = torch.randn(5, 1001, generator=torch.Generator().manual_seed(0))
    together = rank_tokens(logits, torch.arange(5), 20)
    for i in range(5):
        alone = rank_tokens(logits[i : i + 1], torch.tensor([i]), 1)
        assert torch.equal(alone.logprobs[0], together.logprobs[i, :2])
        assert torch.equal(alone.token_ids[0], together.token_ids[i, :2])
        assert torch.equal(alone.ranks[0], together.ranks[i, :2])
