"""A step on its way: launched, not read yet; and what is noted of it once it has been read.

Leaves out launching and reading (`engine`). Given (no notebook builds it).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from minivllm.block_manager import BlockManager
from minivllm.model_runner import Pending
from minivllm.request import Request, SchedulerOutput
from minivllm.trace import Trace


@dataclass
class Flight:
    """A step that was launched and not read yet."""

    output: SchedulerOutput
    started: float  # seconds of time.perf_counter
    pending: Pending | None = None  # None until the runner has taken it
    # Who owns which blocks in this step: ended requests give them back. Only for a trace.
    block_tables: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def keep_block_tables(self) -> None:
        """Copy the block tables of its requests, before any of them changes."""
        requests = [chunk.request for chunk in self.output.chunks]
        self.block_tables = {r.request_id: tuple(r.block_table) for r in requests}

    def wait(self) -> list[int]:
        """Wait for the device; the token ids of the chunks that sample, in order."""
        assert self.pending is not None, "a flight is read after it was launched"
        return self.pending.wait()

    def keep_logprobs(self) -> None:
        """Give each request the log-probabilities of the token it has just got, if it asked."""
        if self.pending is None or self.pending.ranked is None:
            return
        sampling = [chunk.request for chunk in self.output.chunks if chunk.samples]
        for request, logprobs in zip(sampling, self.pending.logprobs(), strict=True):
            # The token of a request that had ended already was dropped.
            if logprobs is not None and len(request.logprobs) < request.num_output_tokens:
                request.logprobs.append(logprobs)

    def note_times(self) -> None:
        """Note when its requests began, got a token, and ended."""
        now = time.perf_counter()
        for chunk in self.output.chunks:
            request, metrics = chunk.request, chunk.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = self.started
            # The token of a request that had ended already was dropped.
            if len(metrics.token_times) < request.num_output_tokens:
                metrics.token_times.append(now)
            if request.is_finished and metrics.finished_time is None:
                metrics.finished_time = now

    def record(
        self, trace: Trace, ended: Sequence[Request], num_waiting: int, memory: BlockManager
    ) -> None:
        """Enter it into a trace; `ended` are the requests that ended with it."""
        trace.record(
            self.output,
            started=self.started,
            finished=[*ended, *self.output.failed],
            num_waiting=num_waiting,
            block_tables=self.block_tables,
            cached_blocks=memory.cached_blocks(),
        )
