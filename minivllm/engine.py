"""The engine: every module of the package put together, and the loop that drives them.

`build_engine` shows all hand-overs on one page; `Engine.step` is one round of the loop. Leaves
out text and the user's side (`llm`). Notebook 11.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minivllm.backends import Backend, choose_backend, load_backend
from minivllm.block_manager import BlockManager, NoPrefixes, Prefixes
from minivllm.chunk_graphs import ChunkGraphs
from minivllm.config import EngineConfig, replace, set_value
from minivllm.cuda_graphs import StepGraphs
from minivllm.devices import choose_device, choose_dtype
from minivllm.generation_config import generation_defaults
from minivllm.hub import resolve_model
from minivllm.kv_sizing import fill_in
from minivllm.leader import Leader
from minivllm.logits_processors import rank_tokens
from minivllm.model import CausalLM
from minivllm.model_runner import ModelRunner, Pending, StepFunction
from minivllm.prefix_cache import PrefixCache
from minivllm.process_group import ProcessGroup
from minivllm.request import FinishReason, Request, SchedulerOutput
from minivllm.scheduler import Scheduler
from minivllm.tensor_parallel import choose_together, load_shard
from minivllm.tokenizer import load_tokenizer, read_eos_token_ids
from minivllm.trace import Trace
from minivllm.weights import load_model, read_config
from minivllm.workers import agree, assemble, closed_on_error


@dataclass
class Flight:
    """A step that was launched and not read yet."""

    output: SchedulerOutput
    started: float  # seconds of time.perf_counter
    block_tables: dict[str, tuple[int, ...]]  # of its requests, if there is a trace
    pending: Pending | None = None  # None until the runner has taken it


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

    @property
    def vocab_size(self) -> int:
        """Tokens of the model; its tokenizer may know fewer."""
        return int(self.runner.model.config.vocab_size)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether there is anything left to compute or to read."""
        return self.scheduler.has_unfinished_requests or bool(self.flights or self.failed)

    def step(self) -> list[Request]:
        """Schedule, compute and read one step; returns the requests that ended with it.

        Raises RuntimeError if requests wait and nothing can be done for any of them. After an
        error, or Ctrl-C, the requests stand where they stood before.
        """
        with self._rolled_back_on_error():
            self.launch()
            return self.read()

    def step_overlapped(self) -> list[Request]:
        """Launch the next step, then read the one before it; otherwise like `step`.

        While the host reads and schedules, the device computes. The same tokens come out, one
        step later; a request that turns out to have ended is computed once too often, and that
        token is dropped.
        """
        with self._rolled_back_on_error():
            was_launched = self.launch()
            is_first = was_launched and len(self.flights) == 1
            return [] if is_first else self.read()

    def run(self) -> Iterator[Request]:
        """Step until nothing is waiting or running; yields requests as they end."""
        while self.has_unfinished_requests:
            yield from self.step()

    def run_overlapped(self) -> Iterator[Request]:
        """`run` with its lines in another order: launch step n + 1, then read step n."""
        while self.has_unfinished_requests:
            yield from self.step_overlapped()

    def launch(self) -> bool:
        """Schedule one step and start it on the device, without waiting; whether there was one."""
        started = time.perf_counter()
        output = self.scheduler.schedule()
        self._demand_progress(output)
        for request in output.failed:
            request.metrics.finished_time = started
            self.failed.append(request)
        # Their rows may be written anew at once: the device does one step after the other.
        for request in (*output.preempted, *output.failed):
            self.runner.release(request)
        if not output.chunks:
            return False
        flight = Flight(output, started, self._block_tables(output))
        self.num_computed_tokens += sum(chunk.length for chunk in output.chunks)
        # First noted, then launched: an error on the way rolls it back.
        self.flights.append(flight)
        flight.pending = self.runner.launch(output.chunks)
        return True

    def read(self) -> list[Request]:
        """Wait for the oldest step in flight and take its tokens in; returns the requests that
        ended."""
        ended: list[Request] = []
        if self.flights:
            ended = self._take_in(self.flights[0])
        ended += self.failed
        self.failed = []
        if self.check_invariants:
            chunks = [chunk for flight in self.flights for chunk in flight.output.chunks]
            self.scheduler.check(chunk.request for chunk in chunks)
        return ended

    def _take_in(self, flight: Flight) -> list[Request]:
        assert flight.pending is not None, "a flight is read after it was launched"
        token_ids = flight.pending.wait()
        self.flights.remove(flight)
        finished = self.scheduler.update(flight.output, token_ids)
        self._keep_logprobs(flight.output, flight.pending)
        self._note_times(flight)
        for request in finished:
            self.runner.release(request)
        self._record(flight, finished + flight.output.failed)
        return finished

    def _keep_logprobs(self, output: SchedulerOutput, pending: Pending) -> None:
        """Give each request the log-probabilities of the token it has just got, if it asked."""
        if pending.ranked is None:
            return
        sampling = [chunk.request for chunk in output.chunks if chunk.samples]
        for request, logprobs in zip(sampling, pending.logprobs(), strict=True):
            # The token of a request that had ended already was dropped.
            if logprobs is not None and len(request.logprobs) < request.num_output_tokens:
                request.logprobs.append(logprobs)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> Request | None:
        """End a request early; returns it, or None if no unfinished one has this id."""
        request = self.scheduler.abort(request_id, reason)
        if request is not None:
            request.metrics.finished_time = time.perf_counter()
            self.runner.release(request)
        return request

    def close(self) -> None:
        """Send the workers home, if there are any. No step may follow."""
        if isinstance(self.runner, Leader):
            self.runner.close()

    def _demand_progress(self, output: SchedulerOutput) -> None:
        if not (output.chunks or output.failed or self.flights or self.failed):
            raise RuntimeError(
                f"{self.scheduler} cannot do anything in this step; this is a bug in the engine,"
                " not in your requests. Please report it with the settings in llm.config"
            )

    @contextmanager
    def _rolled_back_on_error(self) -> Iterator[None]:
        """If a step breaks off (an error, Ctrl-C), put the requests back to before all steps
        that were not read; what those sampled is computed again."""
        try:
            yield
        except BaseException:
            while self.flights:
                self.scheduler.rollback(self.flights.pop().output)
            raise

    def _note_times(self, flight: Flight) -> None:
        now = time.perf_counter()
        for chunk in flight.output.chunks:
            request, metrics = chunk.request, chunk.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = flight.started
            # The token of a request that had ended already was dropped.
            if len(metrics.token_times) < request.num_output_tokens:
                metrics.token_times.append(now)
            if request.is_finished and metrics.finished_time is None:
                metrics.finished_time = now

    def _block_tables(self, output: SchedulerOutput) -> dict[str, tuple[int, ...]]:
        """Who owns which blocks in this step, if anybody wants to know."""
        if self.trace is None:
            return {}
        return {c.request.request_id: tuple(c.request.block_table) for c in output.chunks}

    def _record(self, flight: Flight, finished: list[Request]) -> None:
        if self.trace is not None:
            self.trace.record(
                flight.output,
                started=flight.started,
                finished=finished,
                num_waiting=len(self.scheduler.waiting),
                block_tables=flight.block_tables,
                cached_blocks=self.memory.cached_blocks(),
            )


# -- putting an engine together ---------------------------------------------------------------


def build_engine(config: EngineConfig, *, trace: bool = False, progress: bool = True) -> Engine:
    """Load the model that `config` names and hand every part what it needs.

    Raises ValueError where the model, the settings and the memory do not go together.
    """
    path = resolve_model(config.model_path or config.model)
    group = assemble(config, path)
    with closed_on_error(group):
        config, runner = build_rank(config, path, group, progress=progress)

        memory = build_memory(config)
        vocab_size = runner.model.config.vocab_size
        return Engine(
            config=config,
            tokenizer=load_tokenizer(path),
            eos_token_ids=tuple(i for i in read_eos_token_ids(path) if i < vocab_size),
            memory=memory,
            scheduler=Scheduler(
                memory, set_value(config.max_num_seqs), set_value(config.max_num_batched_tokens)
            ),
            runner=runner if group is None else Leader(runner, group),
            generation_defaults=generation_defaults(path),
            trace=Trace(memory.pool.num_blocks, memory.block_size) if trace else None,
        )


def build_rank(
    config: EngineConfig, path: Path, group: ProcessGroup | None, *, progress: bool = True
) -> tuple[EngineConfig, ModelRunner]:
    """One rank's part of the engine, with the settings filled in: all that computes. Without a
    group it is the whole model."""
    model_config = read_config(path)
    device = choose_device(config.device)
    if group is not None:
        device = group.use(device, config.distributed_timeout_seconds)
    dtype = choose_dtype(config.dtype, model_config.dtype, device)
    max_len = config.max_model_len or model_config.max_position
    backend_name = choose_backend(
        config.attention_backend, device, config.block_size, model_config.head_dim, dtype
    )
    config = replace(config, attention_backend=backend_name)
    backend = load_backend(backend_name)
    if group is None:
        model = load_model(
            path, model_config, dtype, device, max_len, ops=backend.ops, progress=progress
        )
        config = fill_in(config, path, backend.prepare(model))
        return config, build_runner(model, backend, config)

    backend = backend._replace(sample=choose_together(backend.sample, group))
    model = load_shard(
        path, model_config, group, dtype, device, max_len, ops=backend.ops, progress=progress
    )
    backend.prepare(model)
    config = agree(fill_in(config, path, model, group.size), group)
    return config, build_runner(model, backend, config)


def build_runner(model: CausalLM, backend: Backend, config: EngineConfig) -> ModelRunner:
    """The runner, warm, and with graphs of its steps unless the settings refuse them."""
    graphs = [] if config.enforce_eager else build_graphs(backend, config)

    def wrap(step: StepFunction) -> StepFunction:
        for kind in graphs:
            step = kind.wrap(step)
        return step

    runner = ModelRunner(
        model, backend.ops, backend.sample, model.config, config, rank_tokens, wrap
    )
    if runner.device.type == "cuda":
        runner.warm_up()
    for kind in graphs:
        kind.capture_all()
    return runner


def build_graphs(backend: Backend, config: EngineConfig) -> list[StepGraphs | ChunkGraphs]:
    """Room for graphs of decode steps, and of small steps with prompts where that is possible."""
    sizes = set_value(config.max_num_seqs), set_value(config.max_model_len)
    device = torch.device(config.device)
    decodes = StepGraphs(*sizes, device)
    if not backend.captures_prompts or device.type != "cuda":
        return [decodes]
    return [ChunkGraphs(*sizes, decodes.pool, device), decodes]


def build_memory(config: EngineConfig) -> BlockManager:
    """The block manager, with a prefix cache if the settings ask for one."""
    cache: Prefixes = NoPrefixes()
    if config.enable_prefix_caching:
        cache = PrefixCache(config.block_size)
    return BlockManager(set_value(config.num_kv_blocks), config.block_size, config.watermark, cache)
