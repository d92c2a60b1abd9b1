"""The engine: every module of the package put together, and the loop that drives them.

`build_engine` shows all hand-overs on one page; `Engine.step` is one round of the loop. Leaves
out text and the user's side (`llm`). Notebook 11.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from minivllm import ops, sampler
from minivllm.block_manager import BlockManager, NoPrefixes, Prefixes, blocks_for
from minivllm.config import EngineConfig, replace, set_value
from minivllm.hub import resolve_model
from minivllm.model import CausalLM
from minivllm.model_runner import (
    CPU_MEMORY_CAP,
    CPU_MEMORY_SHARE,
    GPU_MEMORY_SHARE,
    ModelRunner,
    activation_bytes,
    kv_block_bytes,
    longest_request,
    memory_sentence,
    num_blocks_that_fit,
)
from minivllm.prefix_cache import PrefixCache
from minivllm.request import Request, SchedulerOutput
from minivllm.scheduler import Scheduler
from minivllm.tokenizer import load_tokenizer, read_eos_token_ids
from minivllm.trace import Trace
from minivllm.weights import load_model, read_config


@dataclass
class Engine:
    """The parts of a running engine.

    Invariant between two steps: every unfinished request is in one of the scheduler's queues,
    and exactly the running ones may hold a row and blocks.
    """

    config: EngineConfig
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    memory: BlockManager
    scheduler: Scheduler
    runner: ModelRunner
    trace: Trace | None = None
    # Assert every module's invariant after each step. For tests: it costs more than the step.
    check_invariants: bool = False

    def step(self) -> list[Request]:
        """Schedule, compute and read one step; returns the requests that ended with it.

        Raises RuntimeError if requests wait and nothing can be done for any of them.
        """
        started = time.perf_counter()
        output = self.scheduler.schedule()
        self._demand_progress(output)
        for request in (*output.preempted, *output.failed):
            self.runner.release(request)
        with self._rolled_back_on_error(output):
            token_ids = self.runner.launch(output.chunks).wait()
        tables = self._block_tables(output)
        finished = self.scheduler.update(output, token_ids)
        self._note_times(output, started)
        for request in finished:
            self.runner.release(request)
        finished += output.failed
        self._observe(output, started, finished, tables)
        return finished

    def run(self) -> Iterator[Request]:
        """Step until nothing is waiting or running; yields requests as they end."""
        while self.scheduler.has_unfinished_requests:
            yield from self.step()

    def abort(self, request_id: str) -> Request | None:
        """End a request early; returns it, or None if no unfinished one has this id."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self.runner.release(request)
        return request

    def _demand_progress(self, output: SchedulerOutput) -> None:
        if not output.chunks and not output.failed:
            raise RuntimeError(
                f"{self.scheduler} cannot do anything in this step; this is a bug in the engine,"
                " not in your requests. Please report it with the settings in llm.config"
            )

    @contextmanager
    def _rolled_back_on_error(self, output: SchedulerOutput) -> Iterator[None]:
        """If the step breaks off (an error, Ctrl-C), put its requests back to before it."""
        try:
            yield
        except BaseException:
            self.scheduler.rollback(output)
            raise

    def _note_times(self, output: SchedulerOutput, started: float) -> None:
        now = time.perf_counter()
        for chunk in output.chunks:
            metrics = chunk.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = started
            if chunk.samples:
                metrics.token_times.append(now)
            if chunk.request.is_finished:
                metrics.finished_time = now
        for request in output.failed:
            request.metrics.finished_time = now

    def _block_tables(self, output: SchedulerOutput) -> dict[str, tuple[int, ...]]:
        """Who owns which blocks in this step, if anybody wants to know."""
        if self.trace is None:
            return {}
        return {c.request.request_id: tuple(c.request.block_table) for c in output.chunks}

    def _observe(
        self,
        output: SchedulerOutput,
        started: float,
        finished: list[Request],
        tables: dict[str, tuple[int, ...]],
    ) -> None:
        if self.trace is not None:
            self.trace.record(
                output,
                started=started,
                finished=finished,
                num_waiting=len(self.scheduler.waiting),
                block_tables=tables,
                cached_blocks=self.memory.cached_blocks(),
            )
        if self.check_invariants:
            self.scheduler.check()


# -- putting an engine together ---------------------------------------------------------------


def build_engine(config: EngineConfig, *, trace: bool = False, progress: bool = True) -> Engine:
    """Load the model that `config` names and hand every part what it needs.

    Raises ValueError where the model, the settings and the memory do not go together.
    """
    path = resolve_model(config.model_path or config.model)
    model_config = read_config(path)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, model_config.dtype, device)
    max_len = config.max_model_len or model_config.max_position
    model = load_model(path, model_config, dtype, device, max_len, ops=ops, progress=progress)
    config = fill_in(config, path, model)

    memory = build_memory(config)
    return Engine(
        config=config,
        tokenizer=load_tokenizer(path),
        eos_token_ids=read_eos_token_ids(path),
        memory=memory,
        scheduler=Scheduler(
            memory, set_value(config.max_num_seqs), set_value(config.max_num_batched_tokens)
        ),
        runner=ModelRunner(model, ops, sampler.sample, model_config, config),
        trace=Trace(memory.pool.num_blocks, memory.block_size) if trace else None,
    )


def build_memory(config: EngineConfig) -> BlockManager:
    """The block manager, with a prefix cache if the settings ask for one."""
    cache: Prefixes = NoPrefixes()
    if config.enable_prefix_caching:
        cache = PrefixCache(config.block_size)
    return BlockManager(set_value(config.num_kv_blocks), config.block_size, config.watermark, cache)


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" is a GPU where there is one. Raises ValueError for one
    that does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is no device; try 'auto', 'cpu' or 'cuda'") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device={name!r}: PyTorch sees {count} GPUs here; try device='auto'")
    return device


def choose_dtype(name: str, declared: str, device: torch.device) -> torch.dtype:
    """The type to compute in. "auto" is what the checkpoint declares, where the device is fast
    at it; else float32 on a CPU, float16 on a GPU (with a warning)."""
    wanted = declared if name == "auto" else name
    if device.type == "cuda":
        if wanted == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            warnings.warn("this GPU has no bfloat16; computing in float16", stacklevel=2)
            wanted = "float16"
        elif name == "auto" and wanted == "float32":
            wanted = "float16"
    elif name == "auto" and not (wanted == "bfloat16" and cpu_has_bfloat16()):
        wanted = "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted]


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AVX-512 BF16 or AMX)."""
    # Not every PyTorch that we support has these probes; without them, no is the safe answer.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)


def fill_in(config: EngineConfig, path: Path, model: CausalLM) -> EngineConfig:
    """The settings with every None replaced by the value that is used, now that the weights
    are loaded and the memory that is left is known."""
    weight = next(model.parameters())
    is_cpu = weight.device.type == "cpu"
    num_seqs = config.max_num_seqs or (32 if is_cpu else 256)
    num_tokens = config.max_num_batched_tokens or max(512 if is_cpu else 8192, num_seqs)
    config = replace(
        config,
        model_path=str(path),
        dtype=str(weight.dtype).removeprefix("torch."),
        device=str(weight.device),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
    )
    num_blocks, max_len = size_kv_cache(config, model)
    share = CPU_MEMORY_SHARE if is_cpu else GPU_MEMORY_SHARE
    return replace(
        config,
        num_kv_blocks=num_blocks,
        max_model_len=max_len,
        memory_utilization=config.memory_utilization or share,
    )


def size_kv_cache(config: EngineConfig, model: CausalLM) -> tuple[int, int]:
    """Number of blocks, and the `max_model_len` (tokens) that goes with them."""
    weight, shape = next(model.parameters()), model.config
    block_bytes = kv_block_bytes(shape, config.block_size, weight.dtype)
    num_seqs = set_value(config.max_num_seqs)
    activations = activation_bytes(
        shape, set_value(config.max_num_batched_tokens), num_seqs, weight.dtype
    )
    budget = kv_budget(config.memory_utilization, weight.device) - activations
    # More than this is never used: every row filled to the longest length.
    wanted_len = config.max_model_len or shape.max_position
    useful = num_seqs * blocks_for(wanted_len, config.block_size)
    num_blocks = config.num_kv_blocks or num_blocks_that_fit(budget, block_bytes, useful)
    weights = sum(p.numel() * p.itemsize for p in model.parameters())
    max_len = longest_request(
        num_blocks,
        config.block_size,
        config.max_model_len,
        shape.max_position,
        memory_sentence(weights, activations, budget, block_bytes),
    )
    return num_blocks, max_len


def kv_budget(share: float | None, device: torch.device) -> int:
    """Bytes that the KV cache and a step's activations may take, weights being loaded."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - (share or GPU_MEMORY_SHARE)) * total)
    available = psutil.virtual_memory().available
    if share is None:
        return min(int(available * CPU_MEMORY_SHARE), CPU_MEMORY_CAP)
    return int(available * share)
