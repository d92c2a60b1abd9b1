"""A record of what the engine did in each step, for figures and analysis.

Off by default: the engine then holds None instead of a Trace, at no cost. Does not draw (see
`pictures.figures`). Not built in the course.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from minivllm.request import Request, SchedulerOutput


@dataclass(frozen=True)
class ChunkTrace:
    """One request's part of one step."""

    request_id: str
    start: int  # position of the first token
    length: int  # tokens
    is_decode: bool
    samples: bool


@dataclass(frozen=True)
class StepTrace:
    """One step. Times are seconds since the trace began."""

    index: int
    start: float
    end: float
    chunks: tuple[ChunkTrace, ...]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]
    num_waiting: int
    block_tables: dict[str, tuple[int, ...]]  # of the requests that ran in this step
    cached_blocks: frozenset[int]  # free blocks whose content can be reused


@dataclass
class Trace:
    """The steps since the trace began, and when each request arrived."""

    num_blocks: int
    block_size: int  # tokens
    began: float = field(default_factory=time.perf_counter)  # seconds of time.perf_counter
    steps: list[StepTrace] = field(default_factory=list)
    arrivals: dict[str, float] = field(default_factory=dict)  # request id -> seconds since then

    def arrived(self, request: Request) -> None:
        """Record when a request was added."""
        self.arrivals[request.request_id] = request.metrics.arrival_time - self.began

    def record(
        self,
        output: SchedulerOutput,
        *,
        started: float,
        finished: Iterable[Request],
        num_waiting: int,
        block_tables: dict[str, tuple[int, ...]],
        cached_blocks: Iterable[int],
    ) -> None:
        """Add a step that began at `started` (`time.perf_counter`) and ends now.

        `block_tables` are those from before the blocks of finished requests were freed.
        """
        self.steps.append(
            StepTrace(
                index=len(self.steps),
                start=started - self.began,
                end=time.perf_counter() - self.began,
                chunks=tuple(
                    ChunkTrace(
                        chunk.request.request_id,
                        chunk.start,
                        chunk.length,
                        chunk.is_decode,
                        chunk.samples,
                    )
                    for chunk in output.chunks
                ),
                preempted=tuple(request.request_id for request in output.preempted),
                finished=tuple(request.request_id for request in finished),
                num_waiting=num_waiting,
                block_tables=block_tables,
                cached_blocks=frozenset(cached_blocks),
            )
        )
