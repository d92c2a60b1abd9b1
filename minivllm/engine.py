"""The engine: every module of the package put together, and the loop that drives them.

`build_engine` shows all hand-overs on one page; `Engine.step` is one round of the loop. Does not
handle text or the user's side (see `llm`). Notebook 11.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from minivllm.assembly.parts import build_runner, eos_token_ids_of, load_parts
from minivllm.block_manager import BlockManager, NoPrefixes, Prefixes
from minivllm.config import EngineConfig, known
from minivllm.leader import Leader
from minivllm.model_runner import ModelRunner, Pending
from minivllm.prefix_cache import PrefixCache
from minivllm.request import INVALID_TOKEN, FinishReason, Request, SchedulerOutput
from minivllm.scheduler import Scheduler
from minivllm.text.generation_config import generation_defaults
from minivllm.tokenizer import load_tokenizer
from minivllm.trace import Trace


def ignore(requests: list[Request]) -> None:
    """Do nothing: the observer of an engine whose users only count tokens."""


@dataclass
class Flight:
    """A step that was launched and not read yet."""

    output: SchedulerOutput
    started: float  # seconds of time.perf_counter
    pending: Pending | None = None  # None until the runner has taken it
    # Who owns which blocks in this step: ended requests give them back. Only for a trace.
    block_tables: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # Called with the requests whose numbers overflowed, while they still own their blocks.
    on_overflow: Callable[[list[Request]], None] = ignore

    def keep_block_tables(self) -> None:
        """Copy the block tables of its requests, before any of them changes."""
        requests = [chunk.request for chunk in self.output.chunks]
        self.block_tables = {r.request_id: tuple(r.block_table) for r in requests}

    def wait(self) -> list[int]:
        """Wait for the device; the token ids of the chunks that sample, in order."""
        assert self.pending is not None, "a flight is read after it was launched"
        token_ids = self.pending.wait()
        if INVALID_TOKEN in token_ids:
            sampling = [chunk.request for chunk in self.output.chunks if chunk.samples]
            pairs = zip(sampling, token_ids, strict=True)
            self.on_overflow([request for request, i in pairs if i == INVALID_TOKEN])
        return token_ids

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
            request = chunk.request
            metrics = request.metrics
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


class Interrupts:
    """Holds Ctrl-C back to where the engine's state is whole: between two steps.

    Invariant: `noted` counts the interrupts that came since the last one was delivered; outside
    of `held` it is 0.
    """

    def __init__(self) -> None:
        self.noted = 0
        self._depth = 0
        self._handler: Any = None  # what a Ctrl-C would have called

    @contextmanager
    def held(self) -> Iterator[None]:
        """Only note a Ctrl-C, and deliver it at the end of the outermost `held`."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread is ever interrupted
            return
        if self._depth == 0:
            self._handler = signal.signal(signal.SIGINT, self._note)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                signal.signal(signal.SIGINT, self._handler)
                self.deliver()

    def deliver(self) -> None:
        """Handle a Ctrl-C that was noted, as if it came now: usually raise KeyboardInterrupt."""
        if self.noted and threading.current_thread() is threading.main_thread():
            self.noted = 0
            if callable(self._handler):
                self._handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted += 1


@dataclass
class Engine:
    """The parts of a running engine.

    Invariant between two steps: every unfinished request is in one of the scheduler's queues,
    and only running ones, and those of steps in flight, hold a row or blocks.
    """

    config: EngineConfig
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    memory: BlockManager
    scheduler: Scheduler
    runner: ModelRunner | Leader
    trace: Trace | None = None
    # Assert every module's invariant after each step. For tests: it costs more than the step.
    check_invariants: bool = False
    # Sampling settings that the checkpoint recommends, by their names in SamplingParams.
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    # Steps launched and not read, oldest first: at most two, between two calls at most one.
    flights: list[Flight] = field(default_factory=list)
    # Tokens of all steps so far: those of preempted requests count again.
    num_computed_tokens: int = 0
    # Requests that ended without a step of their own, to be reported by the next read.
    failed: list[Request] = field(default_factory=list)
    # Called with the requests that ended in a step once its tokens are known, and with those
    # that failed. `LLM` hands in what turns tokens into text.
    observe: Callable[[list[Request]], None] = ignore
    interrupts: Interrupts = field(default_factory=Interrupts)

    @property
    def vocab_size(self) -> int:
        """Tokens of the model; its tokenizer may know fewer."""
        return int(self.runner.model.config.vocab_size)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether there is anything left to compute or to read."""
        return self.scheduler.has_unfinished_requests or bool(self.flights or self.failed)

    # -- one step in two halves ------------------------------------------------------------

    def launch(self) -> bool:
        """Ask the scheduler for a step and start it on the device; return whether there was one.

        Never waits for the device. The step becomes the last of `flights`, with what
        `runner.launch(chunks)` returned as its `pending`, and its tokens count into
        `num_computed_tokens`. A step without chunks starts nothing. Requests that were preempted
        or failed give their rows back (`_vacate(output, started)`). If `runner.launch` raises,
        the step is in `flights` all the same, so that it can be rolled back. Times are
        `time.perf_counter`'s; `started` is the time before the scheduler was asked.

        Raises RuntimeError if nothing can ever be done (`_demand_progress(output)`).

        Example: two requests decode; the scheduler preempts the second to make room for the
        first. The second gives its row back, a flight with one chunk is launched: True.
        """
        started = time.perf_counter()
        output = self.scheduler.schedule()
        self._demand_progress(output)
        # Their rows may be written anew at once: the device does one step after the other.
        self._vacate(output, started)
        if not output.chunks:
            return False
        flight = self._new_flight(output, started)
        self.num_computed_tokens += output.num_tokens
        # First noted, then launched: an error on the way rolls it back.
        self.flights.append(flight)
        flight.pending = self.runner.launch(output.chunks)
        return True

    def read(self) -> list[Request]:
        """Wait for the oldest flight, if there is one, and take its tokens in; return the
        requests that ended with it, then those of `failed`, which is empty afterwards.

        A wait that breaks off leaves its flight in `flights`, to be rolled back.
        `scheduler.update(flight.output, token_ids)` returns the requests that ended, and frees
        blocks once no step in flight writes to them; rows are freed here
        (`runner.release`). `_note(flight, ended)` keeps times, logprobs and trace once the
        scheduler has taken the tokens in; `_check()` comes last.

        Example: steps 6 and 7 are in flight. It waits for step 6 alone; a request that ended with
        it is returned, its row is free, and its blocks stay its own until step 7 is read.
        """
        ended: list[Request] = []
        if self.flights:
            flight = self.flights[0]
            token_ids = flight.wait()
            self.flights.remove(flight)
            ended = self.scheduler.update(flight.output, token_ids)
            self._note(flight, ended)
            for request in ended:
                self.runner.release(request)
        ended = ended + self.failed
        self.failed = []
        self._check()
        return ended

    # -- the two loops ---------------------------------------------------------------------

    def step(self) -> list[Request]:
        """Launch one step and read it; return the requests that ended with it.

        Also reads if there was nothing to launch: requests may have failed. After an error the
        requests are back where they were before (`_rolled_back_on_error`, a context manager).
        Raises RuntimeError if requests wait and nothing can be done for any of them.

        Example: a prompt of 5 tokens with `max_tokens=2` needs two calls: [], then [request].
        """
        with self._rolled_back_on_error():
            self.launch()
            return self.read()

    def run(self) -> Iterator[Request]:
        """Step until there is nothing left to compute or to read (`has_unfinished_requests`);
        yield requests as they end, not all at the end.

        Example: answers of 1 and 30 tokens: the first is yielded after one step.
        """
        while self.has_unfinished_requests:
            yield from self.step()

    def step_overlapped(self) -> list[Request]:
        """Launch the next step, then read the one before it; otherwise like `step`.

        While the host reads and schedules, the device computes. The first call has no step
        before it and reads nothing; afterwards one flight is left after each call, until there is
        nothing to launch: then the last one is read. The same tokens come out, one call later; a
        request that has ended meanwhile is computed once too often, and that token is dropped.

        Example, 3 tokens: launch 0 | launch 1, read 0 | launch 2, read 1 | read 2.
        """
        with self._rolled_back_on_error():
            was_launched = self.launch()
            is_first = was_launched and len(self.flights) == 1
            return [] if is_first else self.read()

    def run_overlapped(self) -> Iterator[Request]:
        """Like `run`, one step ahead: step n + 1 is launched before step n is read.

        Goes on until every step is read, also if no request waits or runs any more.
        """
        while self.has_unfinished_requests:
            yield from self.step_overlapped()

    # -- what they need --------------------------------------------------------------------

    def abort(self, request_id: str, reason: FinishReason = "abort") -> Request | None:
        """End a request early; return it, or None if no unfinished one has this id."""
        request = self.scheduler.abort(request_id, reason)
        if request is not None:
            request.metrics.finished_time = time.perf_counter()
            self.runner.release(request)
        return request

    def stop(self, request_id: str) -> None:
        """End a request whose text has come to a stop string; the next read reports it."""
        request = self.abort(request_id, "stop")
        if request is not None:
            self.failed.append(request)

    def close(self) -> None:
        """Release the device's memory, and end the workers if there are any. No step may
        follow."""
        self.runner.close()
        self.observe = ignore

    def _new_flight(self, output: SchedulerOutput, started: float) -> Flight:
        """A step that is about to be launched, with what the trace wants to know of it."""
        flight = Flight(output, started, on_overflow=self._wipe)
        if self.trace is not None:
            flight.keep_block_tables()
        return flight

    def _demand_progress(self, output: SchedulerOutput) -> None:
        """Raise RuntimeError for a step that does nothing and cannot be waited for."""
        if not (output.chunks or output.failed or self.flights or self.failed):
            raise RuntimeError(
                f"{self.scheduler} cannot do anything in this step; this is a bug in the engine,"
                " not in your requests. Please report it with the settings in llm.config"
            )

    def _wipe(self, requests: list[Request]) -> None:
        """Forget and clear the blocks of requests whose numbers overflowed. Attention multiplies
        masked entries by 0, and 0 times NaN would reach whichever request gets the block next."""
        pool = self.memory.pool
        for request in requests:
            blocks = [block for block in request.block_table if pool.ref_counts[block] == 1]
            for block in blocks:
                pool.prefixes.forget(block)
            self.runner.wipe(blocks)

    def _vacate(self, output: SchedulerOutput, now: float) -> None:
        """Free the rows of requests that no longer run; the next read reports the failed ones."""
        for request in (*output.preempted, *output.failed):
            self.runner.release(request)
        for request in output.failed:
            request.metrics.finished_time = now
        self.failed += output.failed
        if output.failed:
            self.observe(output.failed)

    @contextmanager
    def _rolled_back_on_error(self) -> Iterator[None]:
        """If a step breaks off with an error, put the requests back to before all steps that
        were not read; what those sampled is computed again. Ctrl-C takes effect before the step
        or after it."""
        self.interrupts.deliver()
        with self.interrupts.held():
            try:
                yield
            except BaseException:
                while self.flights:
                    self.scheduler.rollback(self.flights.pop().output)
                raise

    def _note(self, flight: Flight, ended: list[Request]) -> None:
        """Keep what is known of a step once the scheduler has taken its tokens in."""
        flight.keep_logprobs()
        flight.note_times()
        if self.trace is not None:
            flight.record(self.trace, ended, len(self.scheduler.waiting), self.memory)
        self.observe(ended)

    def _check(self) -> None:
        """Assert every module's invariant, if `check_invariants` asks for it."""
        if self.check_invariants:
            chunks = [chunk for flight in self.flights for chunk in flight.output.chunks]
            self.scheduler.check(chunk.request for chunk in chunks)


# -- putting an engine together ---------------------------------------------------------------


def build_engine(config: EngineConfig, *, trace: bool = False, progress: bool = True) -> Engine:
    """Build an engine for the model that `config` names; with `trace`, it records its steps.

    `load_parts(config, progress)` returns the loaded `model`, the `path` of the checkpoint's
    directory and a `config` in which every None has been replaced (`known(x)` tells type
    checkers so). `build_memory`, `Scheduler` and `build_runner(parts)` make the parts at work;
    `load_tokenizer`, `eos_token_ids_of` and `generation_defaults` read the directory. A `Trace`
    is made for the memory's number of blocks (`memory.pool.num_blocks`) and block size
    (`memory.block_size`).

    Raises ValueError where the model, the settings and the memory do not go together.
    """
    parts = load_parts(config, progress)
    config = parts.config
    # One memory: the scheduler allocates in it, and the engine shows it to its trace.
    memory = build_memory(config)
    max_num_seqs = known(config.max_num_seqs)
    max_num_batched_tokens = known(config.max_num_batched_tokens)
    return Engine(
        config=config,
        tokenizer=load_tokenizer(parts.path),
        eos_token_ids=eos_token_ids_of(parts.path, parts.model.config.vocab_size),
        memory=memory,
        scheduler=Scheduler(memory, max_num_seqs, max_num_batched_tokens),
        runner=build_runner(parts),
        generation_defaults=generation_defaults(parts.path),
        trace=Trace(memory.pool.num_blocks, memory.block_size) if trace else None,
    )


def build_memory(config: EngineConfig) -> BlockManager:
    """The block manager, with a prefix cache if the settings ask for one."""
    cache: Prefixes = NoPrefixes()
    if config.enable_prefix_caching:
        cache = PrefixCache(config.block_size)
    return BlockManager(known(config.num_kv_blocks), config.block_size, config.watermark, cache)
