"""The exercises of notebook 10, called like functions of plain numbers: lists in, lists out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sampling_cases import make_rows
from torch import Tensor

from minivllm import drawing, filters, logits_processors, sampler
from minivllm.rows import Penalties

DIGITS = 4  # of what comes back
Rows = Sequence[Sequence[float]]


def rounded(values: Any) -> Any:
    """Lists of numbers with a few digits, for comparing and for reading."""
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, (list, tuple)):
        return [rounded(value) for value in values]
    return round(values, DIGITS) if isinstance(values, float) else values


def weigh(logits: Rows, temperature: Sequence[float]) -> Any:
    """[N, V] and [N] -> [N, V]."""
    return rounded(drawing.weigh(torch.tensor(logits).float(), torch.tensor(temperature).float()))


def invert_cdf(masses: Sequence[float], uniform: float) -> tuple[int, float]:
    """Of one row: its place, and the rest of the uniform."""
    places, rest = drawing.invert_cdf(
        torch.tensor([masses]).float(), torch.tensor([uniform], dtype=torch.float64)
    )
    return places.tolist()[0], rounded(rest)[0]


def count_top_p(
    weights: Sequence[float], top_p: float, *, limit: int | None = None, mass: float | None = None
) -> int:
    """Of one row; without a limit nothing else limits it, and `mass` is that of all tokens."""
    row = torch.tensor([weights]).float()
    masses = torch.tensor([sum(weights) if mass is None else mass], dtype=torch.float64)
    limits = torch.tensor([len(weights) if limit is None else limit])
    counts = filters.count_top_p(row, limits, masses, torch.tensor([top_p], dtype=torch.float64))
    return int(counts[0])


def apply_penalties(
    logits: Rows,
    texts: Sequence[Sequence[int]],
    num_prompt_tokens: Sequence[int],
    positions: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    **penalties: float,
) -> Any:
    """[N, V], and a text for each of `rows` (all): [N, V]."""

    def column(name: str, off: float) -> Tensor:
        return torch.full((len(texts),), penalties.get(name, off))

    step = Penalties(
        rows=torch.tensor(range(len(texts)) if rows is None else rows),
        token_ids=torch.tensor(texts, dtype=torch.int32),
        num_prompt_tokens=torch.tensor(num_prompt_tokens),
        repetition=column("repetition", 1.0),
        presence=column("presence", 0.0),
        frequency=column("frequency", 0.0),
    )
    given = torch.tensor(logits).float()
    before = given.clone()
    penalized = logits_processors.apply_penalties(given, step, torch.tensor(positions))
    assert torch.equal(given, before), "the logits given are left as they are: did you copy?"
    return rounded(penalized)


def choose(logits: Rows, uniforms: Sequence[float], **settings: Any) -> list[int]:
    """[N, V], [N] and `make_rows`' settings -> [N]."""
    given = torch.tensor(logits).float()
    rows = make_rows(len(given), **settings)
    numbers = torch.tensor(uniforms, dtype=torch.float64)
    return sampler.choose(given, rows, numbers, torch.empty_like(given)).tolist()


def gumbel_sample(
    logits: Rows, temperature: Sequence[float], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """[N, V] and three lists of N -> [N]."""
    given, rows = torch.tensor(logits).float(), (torch.tensor(seeds), torch.tensor(positions))
    return sampler.gumbel_sample(given, torch.tensor(temperature).float(), *rows).tolist()
