"""Right answers in other styles, for `test_course_alternatives`; read as text, never imported."""


@answer("naive.generate_tokens")
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    answer: list[int] = []
    while len(answer) < max_tokens:
        scores = model([*prompt_token_ids, *answer])
        best = max(range(len(scores)), key=scores.__getitem__)
        answer.append(best)
        if best in stop_token_ids:
            return answer
    return answer


@answer("naive.generate_tokens")
def generate_tokens(model, prompt_token_ids, max_tokens, stop_token_ids=()):
    if max_tokens <= 0:
        return []
    scores = model(list(prompt_token_ids))
    best = max(enumerate(scores), key=lambda pair: pair[1])[0]
    if best in stop_token_ids:
        return [best]
    text = (*prompt_token_ids, best)
    return [best, *generate_tokens(model, text, max_tokens - 1, stop_token_ids)]


@answer("naive.generate_tokens")
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    import torch

    text = torch.tensor(list(prompt_token_ids))
    for _ in range(max_tokens):
        scores = torch.tensor(model(text.tolist()))
        text = torch.cat([text, scores.argmax(dim=-1, keepdim=True)])
        if int(text[-1]) in set(stop_token_ids):
            break
    return text.tolist()[len(prompt_token_ids) :]


@answer("naive.generate_tokens")
def generate_tokens(
    model: Model,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    def new_tokens():
        text = list(prompt_token_ids)
        for _ in range(max_tokens):
            scores = model(text)
            text.append(sorted(range(len(scores)), key=lambda i: scores[i])[-1])
            yield text[-1]
            if text[-1] in stop_token_ids:
                return

    return list(new_tokens())
