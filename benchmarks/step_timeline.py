"""What host and device do in a few decode steps, recorded with PyTorch's profiler.

Used by `ladder.py`. A span is `[start, duration]` in microseconds from the beginning of the first
recorded step. Does not draw (see `course.figures.ladder`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import common
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from minivllm import LLM, SamplingParams
from minivllm.measure import workloads as bench

NUM_STEPS = 3
WARM_STEPS = 4  # the first ones with a profiler are slow
WINDOW = 3000.0  # microseconds that are kept, span by span
MAX_SPANS = 400  # in each lane
MERGE = 1.5  # microseconds: spans with a smaller gap become one
STEP = "minivllm: step"
# The driver's and the runtime's calls that put work into the device's queue.
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")

Span = tuple[float, float]  # start, end


def record(llm: LLM, workload: bench.Workload) -> dict[str, Any]:
    """Decode the workload's requests for a few steps with the profiler on, then drop them."""
    room = NUM_STEPS + WARM_STEPS + 8
    params = SamplingParams(temperature=workload.temperature, max_tokens=room, ignore_eos=True)
    # Shorter by what they get here: no longer than the engine's longest request.
    ids = [llm.add_request([*prompt[:-room], 1], params) for prompt in workload.prompts]
    common.compute_prompts(llm)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for number in range(WARM_STEPS + NUM_STEPS):
            if torch.cuda.is_available() and number == WARM_STEPS and not llm.config.overlap:
                torch.cuda.synchronize()
            with record_function(STEP if number >= WARM_STEPS else "minivllm: warm-up"):
                llm.step()
    for request_id in ids:
        llm.abort(request_id)
    while llm.has_unfinished_requests():  # a step in flight
        llm.step()
    return summarise(profiler.events() or ())


def summarise(events: Iterable[Any]) -> dict[str, Any]:
    """The lanes of a timeline, from the profiler's events: steps, launches and kernels, and how
    many there were in all. On a CPU, operations
    take the place of launches, and there are no kernels."""
    events = list(events)
    steps = sorted(_span(e) for e in events if e.name == STEP and not _on_device(e))
    begin = steps[0][0]
    end = steps[-1][1]
    inside = [e for e in events if begin <= e.time_range.start < end]
    kernels = [_span(e) for e in inside if _on_device(e) and not e.name.startswith("minivllm")]
    launches = [_span(e) for e in inside if e.name.startswith(LAUNCHES) and not _on_device(e)]
    if not kernels:
        launches = [_span(e) for e in inside if _is_operation(e)]
    return {
        "num_steps": len(steps),
        "num_launches": len(launches),
        "num_kernels": len(kernels),
        "seconds": (end - begin) * 1e-6,
        "busy_seconds": sum(b - a for a, b in merge(kernels, 0.0)) * 1e-6,
        "window_us": WINDOW,
        "steps": _trim(steps, begin),
        "launches": _trim(merge(launches, MERGE), begin),
        "kernels": _trim(merge(kernels, MERGE), begin),
    }


def merge(spans: Sequence[Span], gap: float) -> list[Span]:
    """Spans in order of time, those less than `gap` apart put together: (0, 2), (3, 4), (9, 10)
    with a gap of 2 are (0, 4), (9, 10)."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _trim(spans: Sequence[Span], begin: float) -> list[list[float]]:
    """What begins in the window, as start and duration in tenths of a microsecond."""
    kept = [(a - begin, b - a) for a, b in spans if a - begin < WINDOW]
    return [[round(start, 1), round(length, 1)] for start, length in kept[:MAX_SPANS]]


def _span(event: Any) -> Span:
    return float(event.time_range.start), float(event.time_range.end)


def _on_device(event: Any) -> bool:
    return bool(event.device_type != torch.autograd.DeviceType.CPU)


def _is_operation(event: Any) -> bool:
    """Whether it is an operation that no other operation has called."""
    parent = event.cpu_parent
    return event.name.startswith("aten::") and (
        parent is None or not parent.name.startswith("aten::")
    )
