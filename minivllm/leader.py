"""Leader and workers: one rank decides what a step computes, and all ranks compute it.

The leader has the requests, the scheduler and the sampler. Before each step it sends the workers
the chunks, the tokens of new requests, and the blocks that tables have gained. The message also
says whether a request prefills or decodes; workers never infer it. Does not send the message
itself (see `distributed.process_group`). Notebook 09.

Source: vLLM's `SchedulerOutput`, which carries each request whole once, and then its changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from minivllm.distributed.process_group import ProcessGroup
from minivllm.model_runner import ModelRunner, Pending
from minivllm.request import Chunk, Request, SamplingParams

# -- the message of a step --------------------------------------------------------------------


@dataclass
class StepMessage:
    """All that a worker needs for one step. The leader assigns each request a number.

    A worker keeps what it has received about a request until the request is `released`.
    """

    released: list[int]  # requests that no longer hold a row
    new_tokens: list[tuple[int, list[int]]]  # new requests, and all their tokens
    new_blocks: list[tuple[int, list[int]]]  # blocks that tables have gained
    # request, start, length, whether it samples, whether it decodes: see `request.Chunk`
    chunks: list[tuple[int, int, int, bool, bool]]
    is_plain: bool  # see `rows.StepPlan`
    wiped: list[int] = field(default_factory=list)  # blocks to clear first: `ModelRunner.wipe`

    def encode(self) -> bytes:
        """Return the message as JSON, which unlike a pickle can't run code."""
        return json.dumps(vars(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, message: bytes) -> StepMessage:
        """Return the message that `encode` wrote."""
        return cls(**json.loads(message))


class Directory:
    """What the workers know: which requests, and how much of their block tables.

    Invariant: once the workers have the last message, `number_of` has exactly the requests that
    hold a row on them, and `num_blocks[number]` is the length of the table they have.
    """

    def __init__(self) -> None:
        self.number_of: dict[str, int] = {}
        self.num_blocks: dict[int, int] = {}
        self.released: list[int] = []
        self.next_number = 0

    def release(self, request: Request) -> None:
        """Forget a request that no longer holds a row; the next message tells the workers."""
        number = self.number_of.pop(request.request_id, None)
        if number is not None:
            del self.num_blocks[number]
            self.released.append(number)

    def introduce(self, request: Request) -> int:
        """Assign a number to a request that is new to the workers, and return it."""
        number = self.next_number
        self.next_number += 1
        self.number_of[request.request_id] = number
        self.num_blocks[number] = 0
        return number

    def describe(self, chunks: Sequence[Chunk], is_plain: bool) -> StepMessage:
        """Return the message for a step of these chunks, and record that the workers know it.

        It has only what the workers don't know yet. A request without a number gets one
        (`introduce`). `released` moves into the message and is empty afterwards. The message's
        lists are in the order of the chunks. `new_blocks` has only tables that have grown.

        Example: request "a" (tokens [5, 6], block table [3]) is new and computes its prompt, "b",
        number 4, decodes at position 16 and has gained block 7: new_tokens [(5, [5, 6])],
        new_blocks [(5, [3]), (4, [7])], chunks [(5, 0, 2, True, False), (4, 16, 1, True, True)].
        """
        message = StepMessage(self.released, [], [], [], is_plain)
        self.released = []
        for chunk in chunks:
            request = chunk.request
            if request.request_id not in self.number_of:
                message.new_tokens.append((self.introduce(request), request.token_ids))
            number = self.number_of[request.request_id]
            # Tables grow only at their end.
            gained = request.block_table[self.num_blocks[number] :]
            if gained:
                message.new_blocks.append((number, gained))
                self.num_blocks[number] = len(request.block_table)
            flags = chunk.samples, chunk.is_decode
            message.chunks.append((number, chunk.start, chunk.length, *flags))
        return message


# -- the leader -------------------------------------------------------------------------------


class Leader:
    """The runner of rank 0; every step that it launches is computed by all ranks."""

    def __init__(self, runner: ModelRunner, group: ProcessGroup) -> None:
        self.runner = runner
        self.group = group
        self.directory = Directory()
        self.wiped: list[int] = []  # blocks that the workers clear before the next step

    @property
    def model(self) -> Any:
        """The leader's shard; its config has the vocabulary of the whole model."""
        return self.runner.model

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> Pending:
        """Start one step on all ranks; like `ModelRunner.launch`."""
        plan = self.runner.plan(chunks)
        message = self.directory.describe(chunks, plan.is_plain)
        message.wiped = self.wiped
        self.wiped = []
        with self.group.unbroken():
            self.group.send(message.encode())
            pending = self.runner.step(plan)
        if pending.copied is not None:
            pending.copied = WatchedEvent(pending.copied, self.group.check)
        return pending

    def release(self, request: Request) -> None:
        """Free the request's row on all ranks."""
        self.runner.release(request)
        self.directory.release(request)

    def wipe(self, block_ids: Sequence[int]) -> None:
        """Clear blocks on all ranks; see `ModelRunner.wipe`."""
        self.runner.wipe(block_ids)
        self.wiped += block_ids

    def close(self) -> None:
        """Release the graphs, then end the workers; no step may follow."""
        self.runner.close()
        self.group.close()


@dataclass
class WatchedEvent:
    """An event of the GPU that may never complete if a worker dies."""

    event: Any  # as `torch.cuda.Event`
    check: Callable[[], None]  # raises if a worker is gone

    def synchronize(self) -> None:
        """Wait for the event, and check the workers meanwhile."""
        while not self.event.query():
            self.check()


# -- a worker ---------------------------------------------------------------------------------


class Follower:
    """A worker: computes the steps that messages describe, with its own runner.

    Invariant: `requests`, by number, has those that hold a row, as of the last message.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.requests: dict[int, Request] = {}

    def follow(self, receive: Callable[[], bytes]) -> None:
        """Compute the steps of all messages until an empty one arrives."""
        while message := receive():
            self.compute(StepMessage.decode(message))

    @torch.inference_mode()
    def compute(self, message: StepMessage) -> None:
        """Start one step of the message's chunks, in their order; don't wait for the device.

        `hear(message)` updates `self.requests`. The runner plans a list of `Chunk`s
        (`self.runner.plan(chunks)`) and computes the plan (`self.runner.step(plan)`). The leader
        decides whether a chunk decodes and whether the step is plain (`plan.is_plain`), because a
        worker doesn't know the sampling settings.
        """
        # First, because new requests may need the rows of released ones.
        self.hear(message)
        chunks = [
            Chunk(self.requests[number], start, length, samples, is_decode)
            for number, start, length, samples, is_decode in message.chunks
        ]
        plan = self.runner.plan(chunks)
        plan.is_plain = message.is_plain
        self.runner.step(plan)

    def hear(self, message: StepMessage) -> None:
        """Update `requests`, and free the rows of released ones."""
        if message.wiped:
            self.runner.wipe(message.wiped)
        for number in message.released:
            self.runner.release(self.requests.pop(number))
        for number, token_ids in message.new_tokens:
            self.requests[number] = _known_by_number(number, token_ids)
        for number, blocks in message.new_blocks:
            self.requests[number].block_table += blocks


def _known_by_number(number: int, token_ids: list[int]) -> Request:
    """Return a request as a worker knows it, without sampling settings."""
    return Request(
        request_id=str(number),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(),
        max_num_tokens=len(token_ids),
        seed=0,
    )
