"""Wrong answers that people really give, each with the words that its check must say.

Read as text, never imported. The comment above each names the rule of the lesson it breaks.
"""

# -- generate_tokens --


# rule 1
@mistake(
    "naive.generate_tokens",
    "the texts that the model was called with: is each the prompt and all tokens so far?",
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    answer = []
    for _ in range(max_tokens):
        scores = model(answer[-1:] or list(prompt_token_ids))
        answer.append(scores.index(max(scores)))
        if answer[-1] in stop_token_ids:
            break
    return answer


# rule 1
@mistake(
    "naive.generate_tokens",
    "5, 6, 7 follow 3, 4: do you return the new tokens, all of them, and nothing else?",
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    answer = []
    for _ in range(max_tokens):
        scores = model(list(prompt_token_ids))
        answer.append(scores.index(max(scores)))
        if answer[-1] in stop_token_ids:
            break
    return answer


# rule 1
@mistake(
    "naive.generate_tokens", "the next token depends on all before it: does the model get them?"
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        scores = model(token_ids[-32:])
        token_ids.append(scores.index(max(scores)))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids[len(prompt_token_ids) :]


# rule 2
@mistake(
    "naive.generate_tokens",
    "5, 6, 7 follow 3, 4: do you return the new tokens, all of them, and nothing else?",
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        scores = model(token_ids)
        token_ids.append(max(scores))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids[len(prompt_token_ids) :]


# rule 2
@mistake(
    "naive.generate_tokens",
    "5, 6, 7 follow 3, 4: do you return the new tokens, all of them, and nothing else?",
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        best, highest = 0, 0.0
        for token_id, score in enumerate(model(token_ids)):
            if score > highest:
                best, highest = token_id, score
        token_ids.append(best)
        if best in stop_token_ids:
            break
    return token_ids[len(prompt_token_ids) :]


# rule 2
@mistake(
    "naive.generate_tokens",
    "the second score is higher: do you compare the scores as they are?",
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        scores = [int(score) for score in model(token_ids)]
        token_ids.append(scores.index(max(scores)))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids[len(prompt_token_ids) :]


# rule 3
@mistake(
    "naive.generate_tokens", "the caller's prompt has grown: do you append to it, or to a copy?"
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    num_prompt_tokens = len(prompt_token_ids)
    for _ in range(max_tokens):
        scores = model(prompt_token_ids)
        prompt_token_ids.append(scores.index(max(scores)))
        if prompt_token_ids[-1] in stop_token_ids:
            break
    return prompt_token_ids[num_prompt_tokens:]


# rule 3
@mistake(
    "naive.generate_tokens",
    "5, 6, 7 follow 3, 4: do you return the new tokens, all of them, and nothing else?",
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        scores = model(token_ids)
        token_ids.append(scores.index(max(scores)))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids


# rule 3
@mistake(
    "naive.generate_tokens",
    "5, 6, 7 follow 3, 4: do you return the new tokens, all of them, and nothing else?",
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        scores = model(token_ids)
        token_ids.append(scores.index(max(scores)))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids[-1:]


# rule 4
@mistake(
    "naive.generate_tokens",
    "5, 6, 7 follow 3, 4: do you return the new tokens, all of them, and nothing else?",
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    while len(token_ids) < max_tokens:
        scores = model(token_ids)
        token_ids.append(scores.index(max(scores)))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids[len(prompt_token_ids) :]


# rule 4
@mistake("naive.generate_tokens", "max_tokens=0: does your loop run once?")
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    while True:
        scores = model(token_ids)
        token_ids.append(scores.index(max(scores)))
        done = len(token_ids) >= len(prompt_token_ids) + max_tokens
        if done or token_ids[-1] in stop_token_ids:
            return token_ids[len(prompt_token_ids) :]


# rule 4
@mistake("naive.generate_tokens", "2 tokens need 2 calls of the model: how often do you call it?")
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    scores = model(token_ids)
    for _ in range(max_tokens):
        token_ids.append(scores.index(max(scores)))
        if token_ids[-1] in stop_token_ids:
            break
        scores = model(token_ids)
    return token_ids[len(prompt_token_ids) :]


# rule 5
@mistake("naive.generate_tokens", "6 is a stop token: does the answer end with it, and include it?")
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        scores = model(token_ids)
        token_ids.append(scores.index(max(scores)))
    return token_ids[len(prompt_token_ids) :]


# rule 5
@mistake("naive.generate_tokens", "6 is a stop token: does the answer end with it, and include it?")
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        scores = model(token_ids)
        next_id = scores.index(max(scores))
        if next_id in stop_token_ids:
            break
        token_ids.append(next_id)
    return token_ids[len(prompt_token_ids) :]


# rule 5
@mistake(
    "naive.generate_tokens", "6 came second and is a stop token: how often is the model called?"
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        scores = model(token_ids)
        token_ids.append(scores.index(max(scores)))
    answer = token_ids[len(prompt_token_ids) :]
    stops = [place for place, token_id in enumerate(answer) if token_id in stop_token_ids]
    return answer[: stops[0] + 1] if stops else answer


# rule 5
@mistake(
    "naive.generate_tokens",
    "this 6 is in the prompt: do you compare only new tokens with the stop tokens?",
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        if token_ids[-1] in stop_token_ids:
            break
        scores = model(token_ids)
        token_ids.append(scores.index(max(scores)))
    return token_ids[len(prompt_token_ids) :]


# rule 5
@mistake(
    "naive.generate_tokens",
    "this 6 is in the prompt: do you compare only new tokens with the stop tokens?",
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        scores = model(token_ids)
        token_ids.append(scores.index(max(scores)))
        if any(stop in token_ids for stop in stop_token_ids):
            break
    return token_ids[len(prompt_token_ids) :]


# rule 5
@mistake("naive.generate_tokens", "id 0 may be a stop token")
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        scores = model(token_ids)
        token_ids.append(scores.index(max(scores)))
        if token_ids[-1] and token_ids[-1] in stop_token_ids:
            break
    return token_ids[len(prompt_token_ids) :]


# rule 2
@mistake(
    "naive.generate_tokens", "the second score is higher: do you compare the scores as they are?"
)
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    from math import exp

    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        scores = [exp(score) for score in model(token_ids)]
        token_ids.append(scores.index(max(scores)))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids[len(prompt_token_ids) :]


# rule 3
@mistake("naive.generate_tokens", "do you keep every new token, even if the text has it already?")
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        scores = model(token_ids)
        token_ids.append(scores.index(max(scores)))
        if token_ids[-1] in stop_token_ids:
            break
    return [token_id for token_id in token_ids if token_id not in prompt_token_ids]


# rule 5
@mistake("naive.generate_tokens", "the first new token is a stop token: do you compare it?")
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    token_ids = list(prompt_token_ids)
    for number in range(max_tokens):
        scores = model(token_ids)
        token_ids.append(scores.index(max(scores)))
        if number and token_ids[-1] in stop_token_ids:
            break
    return token_ids[len(prompt_token_ids) :]
