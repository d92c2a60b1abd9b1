"""Rows, logits and statistics for the tests of the sampler's modules.

Statistical tests use fixed seeds, so they answer the same on every run; their threshold is
what a right sampler would exceed for one choice of seeds in a million.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from minivllm.drawing import weigh
from minivllm.filters import filter_among
from minivllm.rows import SamplingRows
from minivllm.sampler import sample

NUM_DRAWS = 20_000
PROBS = [0.05, 0.3, 0.1, 0.25, 0.2, 0.1]
FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed")


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
