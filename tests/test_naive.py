"""The naive loop's rules, with models of a few lines.

The tests with an `exercise` mark are the check of notebook 00. The message of each assert is the
hint that a learner reads. `test_measure_naive.py` compares the loop with the engine.
"""

import pytest

from minivllm.naive import generate_tokens

VOCAB_SIZE = 11


def scores_for(token_id):
    """Scores among which that of `token_id` is the highest; all are negative, as logits may be."""
    return [-0.25 if other == token_id else -3.0 - other for other in range(VOCAB_SIZE)]


def count_up(token_ids):
    """A model that follows each token with the next larger one; 0 follows 10."""
    return scores_for((token_ids[-1] + 1) % VOCAB_SIZE)


def weigh_all(token_ids):
    """A model whose answer depends on every token of the text and on its place."""
    weights = range(1, len(token_ids) + 1)
    return scores_for(sum(w * (t + 1) for w, t in zip(weights, token_ids)) % VOCAB_SIZE)


class Recorder:
    """A model that counts upwards and keeps every text that it was called with."""

    def __init__(self):
        self.texts = []

    def __call__(self, token_ids):
        self.texts.append(list(token_ids))
        return count_up(token_ids)


@pytest.mark.exercise("naive.generate_tokens")
def test_only_the_new_tokens_are_returned():
    """The prompt is known already."""
    assert generate_tokens(count_up, [3, 4], 3) == [5, 6, 7], (
        "5, 6, 7 follow 3, 4: do you return the new tokens, all of them, and nothing else?"
    )


@pytest.mark.exercise("naive.generate_tokens")
def test_the_token_with_the_highest_score_comes_next():
    """A token is a place in the list of scores; the score itself is thrown away."""
    assert generate_tokens(lambda text: [-3.0, -0.5, -2.0], [2], 1) == [1], (
        "-0.5 is the highest score and is at index 1: do you return the index of the highest?"
    )


@pytest.mark.exercise("naive.generate_tokens")
@pytest.mark.parametrize("scores", [[0.501, 0.5011], [-1000.0, -999.0], [1000.0, 1001.0]])
def test_scores_may_be_any_numbers(scores):
    """They aren't probabilities: they may be negative, large, or close to each other."""
    assert generate_tokens(lambda text: scores, [0], 1) == [1], (
        "the second score is higher: do you compare the scores as they are?"
    )


@pytest.mark.exercise("naive.generate_tokens")
def test_a_token_may_repeat():
    """A model may write a token twice in a row, or one that is in the prompt."""
    assert generate_tokens(lambda text: [0.0, 1.0], [1], 3) == [1, 1, 1], (
        "1 comes next each time: do you keep every new token, even if the text has it already?"
    )


@pytest.mark.exercise("naive.generate_tokens")
def test_the_model_sees_the_whole_text_each_time():
    """The prompt and all new tokens: it remembers nothing from the last call."""
    model = Recorder()
    generate_tokens(model, [3, 4], 3)
    assert model.texts[:3] == [[3, 4], [3, 4, 5], [3, 4, 5, 6]], (
        "the texts that the model was called with: is each the prompt and all tokens so far?"
    )


@pytest.mark.exercise("naive.generate_tokens")
def test_every_token_of_the_text_counts():
    """Also in a long text, and when a token repeats."""
    text = [7, 0, 7] * 20
    for _ in range(30):
        scores = weigh_all(text)
        text.append(scores.index(max(scores)))
    answer = generate_tokens(weigh_all, [7, 0, 7] * 20, 30)
    assert answer == text[60:], "the next token depends on all before it: does the model get them?"


@pytest.mark.exercise("naive.generate_tokens")
def test_an_answer_has_no_more_than_max_tokens():
    """None at all is allowed too."""
    assert generate_tokens(count_up, [3], 1) == [4], "max_tokens=1: how often does your loop run?"
    assert generate_tokens(count_up, [3], 0) == [], "max_tokens=0: does your loop run once?"
    model = Recorder()
    generate_tokens(model, [3], 2)
    assert len(model.texts) == 2, "2 tokens need 2 calls of the model: how often do you call it?"


@pytest.mark.exercise("naive.generate_tokens")
@pytest.mark.parametrize("stop_token_ids", [[6], (6, 9), frozenset({9, 6})])
def test_a_stop_token_ends_the_answer_and_belongs_to_it(stop_token_ids):
    """The reader of the ids can see why the answer ended."""
    assert generate_tokens(count_up, [3, 4], 5, stop_token_ids) == [5, 6], (
        "6 is a stop token: does the answer end with it, and include it?"
    )


@pytest.mark.exercise("naive.generate_tokens")
def test_the_first_and_the_last_token_may_be_stop_tokens():
    """Every new token is compared."""
    assert generate_tokens(count_up, [3, 4], 5, [5]) == [5], (
        "the first new token is a stop token: do you compare it?"
    )
    assert generate_tokens(count_up, [3, 4], 2, [6]) == [5, 6], "the last one stays in the answer"


@pytest.mark.exercise("naive.generate_tokens")
def test_the_model_is_not_called_after_a_stop_token():
    """Nothing more is needed from it."""
    model = Recorder()
    generate_tokens(model, [3, 4], 5, [6])
    assert len(model.texts) == 2, (
        "6 came second and is a stop token: how often is the model called?"
    )


@pytest.mark.exercise("naive.generate_tokens")
def test_token_0_is_a_token():
    """The first id of the vocabulary can come next, and can be a stop token."""
    assert generate_tokens(count_up, [9], 3) == [10, 0, 1], "id 0 is a token like any other"
    assert generate_tokens(count_up, [9], 3, [0]) == [10, 0], "id 0 may be a stop token"


@pytest.mark.exercise("naive.generate_tokens")
@pytest.mark.parametrize("prompt", [[6, 4], [4, 6]])
def test_a_stop_token_in_the_prompt_ends_nothing(prompt):
    """A chat's prompt contains the ends of all earlier turns."""
    assert len(generate_tokens(count_up, prompt, 2, [6])) == 2, (
        "this 6 is in the prompt: do you compare only new tokens with the stop tokens?"
    )


@pytest.mark.exercise("naive.generate_tokens")
def test_the_prompt_is_not_changed():
    """The caller may need it again; it may also be a tuple."""
    prompt = [3, 4]
    first = generate_tokens(count_up, prompt, 2)
    assert prompt == [3, 4], "the caller's prompt has grown: do you append to it, or to a copy?"
    assert generate_tokens(count_up, prompt, 2) == first, "the same call must give the same answer"
    assert generate_tokens(count_up, (3, 4), 2) == [5, 6], "a prompt may be a tuple"
