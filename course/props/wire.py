"""The messages of a simulated run and the bytes they take: the open problem of chapter 09."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Protocol

from course.props import simulation as sim
from minivllm.block_manager import BlockManager
from minivllm.leader import Directory, StepMessage
from minivllm.request import Request, SchedulerOutput
from minivllm.scheduler import Scheduler

NUM_TOKENS = 49152  # in the vocabulary


class Wire(Protocol):
    """One end of a connection; may remember the messages that have passed."""

    def pack(self, message: StepMessage) -> bytes:
        """Return the bytes to send for a message."""

    def unpack(self, data: bytes) -> StepMessage:
        """Return the message that the other end packed."""


class Json:
    """The engine's own messages."""

    def pack(self, message: StepMessage) -> bytes:
        """Return JSON with the names of the fields."""
        return message.encode()

    def unpack(self, data: bytes) -> StepMessage:
        """Return the message that the JSON contains."""
        return StepMessage.decode(data)


class Zipped(Json):
    """The engine's own messages, each compressed by itself."""

    def pack(self, message: StepMessage) -> bytes:
        """Return compressed JSON."""
        return zlib.compress(super().pack(message), 9)

    def unpack(self, data: bytes) -> StepMessage:
        """Return the message that the compressed JSON contains."""
        return super().unpack(zlib.decompress(data))


class _Recorded(Scheduler):
    """A scheduler that records the message of each step."""

    def __init__(self, memory: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        super().__init__(memory, max_num_seqs, max_num_batched_tokens)
        self.directory = Directory()
        self.messages: list[bytes] = []

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        for request in output.preempted:
            self.directory.release(request)
        self.messages.append(self.directory.describe(output.chunks, True).encode())
        return output

    def update(self, output: SchedulerOutput, token_ids: list[int]) -> list[Request]:
        finished = super().update(output, token_ids)
        for request in finished:
            self.directory.release(request)
        return finished


def messages() -> list[StepMessage]:
    """Return the messages of a run of 24 requests on 64 blocks, the same each time.

    Prompts are random tokens. As after a journey, lists contain lists and no tuples.
    """
    rng = random.Random(0)
    requests = sim.mixed_load()
    for request in requests:
        request.token_ids = [rng.randrange(NUM_TOKENS) for _ in request.token_ids]
    memory = BlockManager(64, 16, 0)
    run = sim.serve(requests, budget=256, memory=memory, kind=_Recorded)
    assert isinstance(run.scheduler, _Recorded)
    return [StepMessage.decode(message) for message in run.scheduler.messages]


def sent(sequence: Sequence[StepMessage], kind: type[Wire]) -> dict[str, float]:
    """Return the bytes of all messages, of the median and of the longest one, and how many arrived
    changed. One `kind()` packs, another unpacks."""
    leader, worker = kind(), kind()
    packed = [leader.pack(message) for message in sequence]
    arrived = [worker.unpack(data) for data in packed]
    sizes = sorted(map(len, packed))
    return {
        "bytes": sum(sizes),
        "median message": sizes[len(sizes) // 2],
        "longest message": sizes[-1],
        "changed": sum(a != b for a, b in zip(sequence, arrived, strict=True)),
    }
