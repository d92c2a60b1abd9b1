"""The real scheduler on a simulated device, for chapters 02 and 03.

A cost model says how long a step takes, so results are the same on every machine. Times are whole
microseconds. Does not import torch.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from minivllm.block_manager import BlockManager
from minivllm.pictures.timeline import num_blocks_in_use
from minivllm.request import Chunk, Request, SamplingParams, SchedulerOutput
from minivllm.scheduler import Memory, Scheduler, TokenCounter
from minivllm.trace import Trace

PLENTY = 1_000_000  # tokens of memory: no request is ever preempted


def step_time(chunks: Iterable[Chunk]) -> int:
    """Return the microseconds of one step: reading the weights takes 5,000, each token 25, and
    each 40 tokens that attention looks back at 1. Example: one token at position 199 takes 5,030.
    """
    return 5000 + sum(25 * chunk.length + chunk.end // 40 for chunk in chunks)


def make_request(name: str, num_prompt: int, num_new: int, arrival: int = 0) -> Request:
    """Return a request that ends after `num_new` tokens."""
    request = Request(
        request_id=name,
        token_ids=[1] * num_prompt,
        num_prompt_tokens=num_prompt,
        sampling_params=SamplingParams(),
        max_num_tokens=num_prompt + num_new,
    )
    request.metrics.arrival_time = arrival
    return request


def load(gap: int, num_requests: int = 48) -> list[Request]:
    """Return requests of random size that arrive `gap` microseconds apart on average."""
    rng = random.Random(1)
    now = 0
    requests = []
    for number in range(num_requests):
        now += rng.randint(0, 2 * gap)
        requests.append(make_request(str(number), rng.randint(50, 200), rng.randint(10, 100), now))
    return requests


def rush(gap: int, num_requests: int = 40) -> list[Request]:
    """Return a `load` in which every fifth request has a prompt of 4,000 tokens."""
    requests = load(gap, num_requests)
    for number in range(4, num_requests, 5):
        arrival = int(requests[number].metrics.arrival_time)
        requests[number] = make_request(str(number), 4000, 60, arrival)
    return requests


def mixed_load(seed: int = 0, num_requests: int = 24) -> list[Request]:
    """Return requests that arrive at once: prompts of 16 to 128 tokens, answers of 32 to 128."""
    rng = random.Random(seed)
    sizes = [(rng.randint(16, 128), rng.randint(32, 128)) for _ in range(num_requests)]
    return [make_request(str(number), *size) for number, size in enumerate(sizes)]


# -- running -----------------------------------------------------------------------------------


class Clocked(Scheduler):
    """A scheduler that knows the time. Subclass it to try a policy for the queue."""

    now = 0  # microseconds; the simulation sets it before each step


class Informed(BlockManager):
    """A block manager that knows the running requests. Subclass it to try a policy for memory."""

    running: Sequence[Request] = ()  # in order of admission; the simulation sets it


@dataclass
class Run:
    """A simulation in progress, and what has been recorded of it."""

    scheduler: Scheduler
    trace: Trace
    requests: Sequence[Request]
    now: int = 0
    held: list[dict[str, int]] = field(default_factory=list)  # tokens in a counter, after each step

    def step(self) -> SchedulerOutput:
        """Schedule a step, let its time pass, and sample the token 1 where a chunk samples.

        Asserts the invariants of scheduler and memory afterwards.
        """
        scheduler = self.scheduler
        memory = scheduler.memory
        if isinstance(scheduler, Clocked):
            scheduler.now = self.now
        if isinstance(memory, Informed):
            memory.running = scheduler.running
        output = scheduler.schedule()
        is_empty = not (output.chunks or output.failed)
        assert not (is_empty and scheduler.has_unfinished_requests), (
            "the step is empty, but requests are waiting"
        )
        tables = {r.request_id: tuple(r.block_table) for r in scheduler.running if r.block_table}
        end = self.now + step_time(output.chunks)
        finished = scheduler.update(output, [1 for chunk in output.chunks if chunk.samples])
        scheduler.check()
        for chunk in output.chunks:
            chunk.request.metrics.token_times += [end] * chunk.samples
        self._record(output, finished, tables, end)
        return output

    def _record(
        self,
        output: SchedulerOutput,
        finished: list[Request],
        tables: dict[str, tuple[int, ...]],
        end: int,
    ) -> None:
        memory = self.scheduler.memory
        self.trace.record(
            output,
            started=self.now / 1e6,
            finished=finished,
            num_waiting=len(self.scheduler.waiting),
            block_tables=tables,
            cached_blocks=memory.cached_blocks() if isinstance(memory, BlockManager) else (),
        )
        self.trace.steps[-1] = replace(self.trace.steps[-1], end=end / 1e6)
        self.held.append(dict(memory.tokens_of) if isinstance(memory, TokenCounter) else {})
        self.now = end

    def enqueue(self, coming: deque[Request], batch: int | None) -> None:
        """Queue the requests that have arrived. With `batch`, wait until the last batch is done
        and the next `batch` requests have arrived."""
        if not self.scheduler.has_unfinished_requests:
            size = min(batch or 1, len(coming))
            self.now = max(self.now, int(coming[size - 1].metrics.arrival_time))
            for _ in range(size):
                self.scheduler.add_request(coming.popleft())
        while batch is None and coming and coming[0].metrics.arrival_time <= self.now:
            self.scheduler.add_request(coming.popleft())


def serve(
    requests: Sequence[Request],
    seats: int = 16,
    budget: int = 8192,
    batch: int | None = None,
    kind: type[Scheduler] = Scheduler,
    memory: Memory | None = None,
) -> Run:
    """Answer all requests and return the finished run.

    At most `seats` requests run at once. `batch`: static batches of this size. `kind`: the class
    of the scheduler. `memory`: a counter with plenty of room if None.
    """
    memory = memory or TokenCounter(PLENTY)
    shape = (
        (memory.pool.num_blocks, memory.block_size) if isinstance(memory, BlockManager) else (0, 1)
    )
    run = Run(kind(memory, seats, budget), Trace(*shape, began=0.0), requests)
    coming = deque(requests)
    for request in requests:
        run.trace.arrivals[request.request_id] = request.metrics.arrival_time / 1e6
    while coming or run.scheduler.has_unfinished_requests:
        if coming:
            run.enqueue(coming, batch)
        run.step()
    return run


def play(guesses: Sequence[str], requests: Mapping[str, tuple[int, int]], budget: int) -> str:
    """Compare guesses such as "a5 b3", one for each step, with what the scheduler does.

    `requests`: name -> (tokens of prompt, tokens of answer). Two of them run at once. Wrong
    guesses are marked; the right ones are not given away.
    """
    queue = [make_request(name, *sizes) for name, sizes in requests.items()]
    run = Run(Scheduler(TokenCounter(PLENTY), 2, budget), Trace(0, 1, began=0.0), queue)
    for request in queue:
        run.scheduler.add_request(request)
    lines = []
    for number, guess in enumerate(guesses, start=1):
        step = sorted(f"{c.request.request_id}{c.length}" for c in run.step().chunks)
        sign = "✓" if sorted(guess.split()) == step else "✗"
        lines.append(f"step {number}: {f'{guess} {sign}' if guess else 'your turn'}")
    return "\n".join(lines)


# -- measuring ---------------------------------------------------------------------------------


def waits(request: Request) -> list[tuple[float, float]]:
    """Return (arrival in seconds, wait in milliseconds) of each token but the first."""
    times = request.metrics.token_times
    return [(later / 1e6, (later - earlier) / 1000) for earlier, later in zip(times, times[1:])]


def first_token_times(run: Run) -> list[float]:
    """Return the seconds that each request waited for its first token (TTFT), sorted."""
    metrics = [request.metrics for request in run.requests]
    return sorted((m.token_times[0] - m.arrival_time) / 1e6 for m in metrics)


def speed_and_wait(run: Run) -> tuple[float, float]:
    """Return (tokens per second, mean milliseconds per token from arrival to end)."""
    num_tokens = [request.num_output_tokens for request in run.requests]
    times = [r.metrics.token_times[-1] - r.metrics.arrival_time for r in run.requests]
    each = [time / n / 1000 for time, n in zip(times, num_tokens)]
    return sum(num_tokens) * 1e6 / run.now, sum(each) / len(each)


def preemptions(run: Run) -> list[tuple[int, str]]:
    """Return (step, request) for each preemption."""
    return [(step.index, name) for step in run.trace.steps for name in step.preempted]


def computed_twice(run: Run) -> int:
    """Return the number of tokens computed again after preemptions."""
    computed = sum(chunk.length for step in run.trace.steps for chunk in step.chunks)
    return computed - sum(request.num_tokens - 1 for request in run.requests)


def utilisation(run: Run) -> float:
    """Return the mean share of blocks in use, 0 to 1."""
    used = [num_blocks_in_use(step) for step in run.trace.steps]
    return sum(used) / len(used) / run.trace.num_blocks
