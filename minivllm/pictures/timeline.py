"""What a `Trace` says of each request and each block: the facts that `figures` draws.

Does not draw, so it needs only the trace. Not built in the course.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from minivllm.trace import ChunkTrace, StepTrace, Trace

Phase = Literal["waiting", "prefill", "decode"]


@dataclass(frozen=True)
class Span:
    """A time during which one request was in one phase. Seconds since the trace began."""

    phase: Phase
    start: float
    end: float


@dataclass
class Row:
    """The life of one request: its spans follow each other without a gap."""

    label: str
    arrival: float
    spans: list[Span] = field(default_factory=list)
    cache_hits: list[tuple[float, int]] = field(default_factory=list)  # seconds, tokens saved
    preemptions: list[float] = field(default_factory=list)  # seconds
    num_tokens: int = 0  # sampled
    last_step: int | None = None  # index of the last step that worked on it; None: none yet
    next_position: int = 0  # of its next chunk, unless the cache skips some
    is_finished: bool = False

    @property
    def clock(self) -> float:
        """Seconds up to which the spans tell the story."""
        return self.spans[-1].end if self.spans else self.arrival

    def run(self, step: StepTrace, chunk: ChunkTrace) -> None:
        """Add what one step did. Steps in a row that do the same become one span."""
        if self.is_finished:  # an overlapped engine computes one step too many, and drops it
            return
        if self.last_step != step.index - 1:
            self.wait_until(step.start)
        if chunk.start > self.next_position:  # the cache had all tokens before the first chunk
            self.cache_hits.append((step.start, chunk.start))
        # Begins where the last one ended, even if the steps of an overlapped engine overlap.
        phase: Phase = "decode" if chunk.is_decode else "prefill"
        start = self.clock
        if self.spans and self.spans[-1].phase == phase:
            start = self.spans.pop().start
        self.spans.append(Span(phase, start, max(start, step.end)))
        if chunk.samples:
            self.num_tokens += 1
        self.next_position = chunk.start + chunk.length
        self.last_step = step.index

    def preempt(self, step: StepTrace) -> None:
        """The request lost its blocks: its next chunk begins at position 0 again."""
        self.preemptions.append(step.start)
        self.next_position = 0

    def finish(self, step: StepTrace) -> None:
        """The request ended in this step, or before it ever ran."""
        if self.last_step != step.index - 1:
            self.wait_until(step.start)
        self.is_finished = True

    def wait_until(self, time: float) -> None:
        """Fill the time up to `time` with waiting."""
        if time > self.clock:
            self.spans.append(Span("waiting", self.clock, time))


def request_rows(trace: Trace) -> dict[str, Row]:
    """The life of each request by its id, in the order of arrival.

    Example: arrived at 0 s, prompt computed in a step from 1 to 2 s, tokens in the steps from
    2 to 3 and 3 to 4 s: spans waiting 0-1, prefill 1-2, decode 2-4.
    The label is the request's id where it fits into a cell of the grid, else its number.
    """
    arrivals = dict(trace.arrivals)
    for step in trace.steps:
        for chunk in step.chunks:
            arrivals.setdefault(chunk.request_id, step.start)
    short = all(len(request_id) <= 3 for request_id in arrivals)
    rows = {
        request_id: Row(request_id if short else str(number), arrival)
        for number, (request_id, arrival) in enumerate(arrivals.items())
    }
    for step in trace.steps:
        for request_id in step.preempted:
            rows[request_id].preempt(step)
        for chunk in step.chunks:
            rows[chunk.request_id].run(step, chunk)
        for request_id in step.finished:
            if request_id in rows:
                rows[request_id].finish(step)
    for row in rows.values():
        if trace.steps and not row.is_finished and row.last_step != trace.steps[-1].index:
            row.wait_until(trace.steps[-1].end)
    return rows


def block_owners(
    trace: Trace, step: StepTrace, rows: dict[str, Row] | None = None
) -> dict[int, list[tuple[str, Phase]]]:
    """The blocks in use in a step: for each, the label and phase of every request that owns it.

    `rows`: the trace's `request_rows`, so that they are not made again for each of many steps.
    Example: {0: [("a", "decode"), ("b", "prefill")], 1: [("a", "decode")]}.
    """
    decoding = {chunk.request_id for chunk in step.chunks if chunk.is_decode}
    owners: dict[int, list[tuple[str, Phase]]] = {}
    for request_id, row in (rows or request_rows(trace)).items():
        for block in step.block_tables.get(request_id, ()):
            phase: Phase = "decode" if request_id in decoding else "prefill"
            owners.setdefault(block, []).append((row.label, phase))
    return owners


def num_blocks_in_use(step: StepTrace) -> int:
    """Blocks that at least one request owns, each counted once."""
    return len(set().union(*step.block_tables.values()))


def fullest_step(trace: Trace) -> StepTrace:
    """The (first) step in which the most blocks were in use. Raises ValueError without steps."""
    if not trace.steps:
        raise ValueError("the trace has 0 steps, so there is nothing to show; run a request first")
    return max(trace.steps, key=num_blocks_in_use)


def alt_text(trace: Trace) -> str:
    """Describe the demo figure in words: its alternative text."""
    rows = request_rows(trace).values()
    if not trace.steps:
        return "An empty timeline: the engine has not run a step."
    full = fullest_step(trace)
    num_tokens = sum(row.num_tokens for row in rows)
    most = max(len(step.chunks) for step in trace.steps)
    num_hits = len([row for row in rows if row.cache_hits])
    num_preemptions = sum(len(row.preemptions) for row in rows)
    return (
        f"Timeline of {count(len(rows), 'request')} over {trace.steps[-1].end:.2f} seconds"
        f" and {count(len(trace.steps), 'step')}, one row each: {count(num_tokens, 'token')} were"
        f" generated. At most {count(most, 'request')} ran at once."
        f" {count(num_hits, 'request')} began with a prefix from the cache,"
        f" {count(num_preemptions, 'preemption')} happened. Below, the grid of KV blocks in step"
        f" {full.index}: {num_blocks_in_use(full)} of {trace.num_blocks} in use,"
        f" {len(full.cached_blocks)} cached, the others free."
    )


def count(number: int, noun: str) -> str:
    """A number and its noun: count(1, "step") == "1 step", count(8, "step") == "8 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
