"""What lesson 08 brings to its experiments: steps of padding, the settings of a sampler, what a
launch costs here, and the steps of a server's day."""

from __future__ import annotations

import random
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minivllm.rows import SamplingRows, StepPlan
from minivllm.step_input import padding_plan

CPU = torch.device("cpu")
PADDING_ROW = 9


def decode_step(row_ids: Sequence[int], starts: Sequence[int]) -> StepPlan:
    """Return a plan in which these rows decode at these positions."""
    plan = padding_plan([1] * len(row_ids), PADDING_ROW, 64, CPU)
    plan.row_ids.copy_(torch.tensor(row_ids))
    plan.starts.copy_(torch.tensor(starts))
    return plan


def two_steps(fill: Callable[[StepPlan, StepPlan, int], None]) -> dict[str, Any]:
    """Return what is in the four places of a bucket after each of two steps."""
    static = padding_plan([1] * 4, PADDING_ROW, 64, CPU)
    shown = {}
    for rows, starts in (([5, 3, 7], [17, 4, 2]), ([6, 1], [30, 8])):
        fill(static, decode_step(rows, starts), PADDING_ROW)
        shown[f"{len(rows)} requests"] = static.row_ids.tolist(), static.starts.tolist(), len(rows)
    return shown


def settings_of_four(any_random: bool, any_filter: bool) -> SamplingRows:
    """Return settings of four rows; the flags are what the host says of them."""
    zeros, temperature = torch.zeros(4), torch.zeros(4)
    top_k, top_p = torch.full((4,), 2), torch.ones(4, dtype=torch.float64)
    return SamplingRows(temperature, top_k, top_p, zeros, torch.arange(4), any_random, any_filter)


def launch_seconds() -> float:
    """Return what it costs to launch one operation: adding 1 to a tensor of one number."""
    one = torch.ones(1)
    return min(timeit.repeat(lambda: one.add_(1), number=2000, repeat=5)) / 2000


def bytes_per_second() -> float:
    """Return the speed of memory, by a copy of 128 MiB."""
    source = torch.ones(2**25)
    target = torch.empty_like(source)
    seconds = min(timeit.repeat(lambda: target.copy_(source), number=1, repeat=5))
    return 2 * source.nbytes / seconds


def a_day() -> list[int]:
    """Return the number of decoding requests of each step: a quiet night, then a busy noon."""
    rng = random.Random(0)
    night = [min(128, 1 + int(rng.expovariate(1 / 6))) for _ in range(6000)]
    return night + [min(128, max(1, int(rng.gauss(90, 20)))) for _ in range(4000)]
