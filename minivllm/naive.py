"""The first loop you would write: for each new token, run the model on the whole text.

Correct and slow: the baseline that the course measures every module against. Has no KV cache and
no batch, and knows nothing of the model it runs (`measure.naive` hands over a real one).
Notebook 00.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Model = Callable[[list[int]], list[float]]  # a whole text -> a score for each possible next token


def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    """Continue a prompt, and return the new tokens: at most `max_tokens`, without the prompt.

    `model(token_ids)` computes a whole text and returns one score (a logit) for each token id of
    the vocabulary. The id with the highest score comes next. An id in `stop_token_ids` ends the
    answer and is its last token. `prompt_token_ids` isn't changed.

    Example: for [3, 4] and 3 new tokens, a model that counts upwards is called with [3, 4], with
    [3, 4, 5] and with [3, 4, 5, 6], and the result is [5, 6, 7]. If 6 is a stop token, the model
    is called twice and the result is [5, 6].
    """
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        scores = model(token_ids)
        token_ids.append(scores.index(max(scores)))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids[len(prompt_token_ids) :]
