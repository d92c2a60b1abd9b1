"""A device of paper for chapter 11: the engine's own loop on it, with a clock that only counts.

It stands where the model runner stands and computes nothing. A step takes the device 3 ms; to
launch one and to read one costs the host 1 ms each. So the pictures are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from minivllm.block_manager import BlockManager
from minivllm.config import EngineConfig
from minivllm.engine import Engine
from minivllm.request import Chunk, Request, SamplingParams
from minivllm.scheduler import Scheduler

HOST_MS = 1.0  # to launch a step; as much again to read it
DEVICE_MS = 3.0
STOP = 0  # the token that ends an answer
BLOCK_SIZE = 2


@dataclass
class Work:
    """Something that took time. Milliseconds since the beginning."""

    lane: str  # "host", "device", or "blocks of NAME"
    what: str  # "launch", "read", "compute", "owned"
    step: int
    start: float
    end: float
    is_wasted: bool = False  # a step whose requests had all ended when it was read


class ToyDevice:
    """The host's clock `now`, and the device's `busy_until`; `log` has what was done."""

    def __init__(self, answers: Mapping[str, Sequence[int]]) -> None:
        """`answers`: for each request the tokens that it is going to get."""
        self.answers = {name: iter([*tokens, STOP, STOP]) for name, tokens in answers.items()}
        self.now = self.busy_until = 0.0
        self.log: list[Work] = []
        self.num_steps = 0

    def launch(self, chunks: Sequence[Chunk]) -> Any:
        """Queue a step on the device; what comes back can be waited for."""
        number, self.num_steps = self.num_steps, self.num_steps + 1
        self._host("launch", number)
        start = max(self.now, self.busy_until)
        step = Work("device", "compute", number, start, start + DEVICE_MS)
        self.busy_until = step.end
        self.log.append(step)
        token_ids = [next(self.answers[c.request.request_id]) for c in chunks if c.samples]

        def wait() -> list[int]:
            self.now = max(self.now, step.end)
            self._host("read", number)
            step.is_wasted = all(chunk.request.is_finished for chunk in chunks)
            return token_ids

        return SimpleNamespace(wait=wait, ranked=None)

    def release(self, request: Request) -> None:
        """It has no rows."""

    def _host(self, what: str, step: int) -> None:
        self.log.append(Work("host", what, step, self.now, self.now + HOST_MS))
        self.now += HOST_MS


def toy_engine(answers: Mapping[str, Sequence[int]], num_blocks: int = 16) -> Engine:
    """An engine on the toy device, with a request of 2 prompt tokens for each answer waiting.

    An answer that ends with 0 ends by that stop token; any other by its length.
    """
    device = ToyDevice(answers)
    memory = BlockManager(num_blocks, BLOCK_SIZE)
    watch(memory, device)
    scheduler = Scheduler(memory, max_num_seqs=len(answers), max_num_batched_tokens=64)
    for name, tokens in answers.items():
        most = len(tokens) if tokens[-1] != STOP else 99
        scheduler.add_request(
            Request(name, [1, 1], 2, SamplingParams(), 2 + most, frozenset([STOP]))
        )
    runner: Any = device
    return Engine(EngineConfig(), None, (STOP,), memory, scheduler, runner)


def watch(memory: Any, device: ToyDevice) -> None:
    """Have it noted in the device's log from when to when each request owns blocks."""
    allocate, free, since = memory.allocate, memory.free, dict[str, float]()

    def watched_allocate(request: Request, *arguments: Any) -> Any:
        since.setdefault(request.request_id, device.now)
        return allocate(request, *arguments)

    def watched_free(request: Request) -> None:
        name = request.request_id
        if request.block_table:
            device.log.append(Work(f"blocks of {name}", "owned", 0, since[name], device.now))
        free(request)

    memory.allocate, memory.free = watched_allocate, watched_free
