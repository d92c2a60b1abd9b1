"""CUDA graphs of small steps with prompts in them, so that a first token comes soon.

A prompt of 500 tokens keeps a large GPU busy for two milliseconds, and launching its kernels
one by one takes the host ten times as long. A step with prompts has no shape of its own, so it
is given one: a number of tokens (the bucket) in a number of chunks. Its chunks take the first
places, one more chunk of padding takes the tokens that are left, the other places stay empty.
Leaves out large steps, which keep the GPU busy anyway, and decodes (`cuda_graphs`). Given (no
notebook builds it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minivllm.cuda_graphs import Graph, bucket_for, capture
from minivllm.model_runner import StepFunction
from minivllm.rows import StepPlan
from minivllm.step_input import padding_plan

TOKEN_BUCKETS = (64, 128, 256, 512, 1024, 2048)
NUM_CHUNKS = 16  # places; the last one is always padding's
# Decodes in such a step attend like prompts, one program for all their keys: with more keys than
# this, kernels that split them are faster, launch by launch.
MAX_KEYS = 4096


def fill(static: StepPlan, plan: StepPlan, padding_row: int) -> None:
    """Copy a step to where a graph reads it, and make padding of the rest.

    Chunks of 5 and 3 tokens in a bucket of 64: lengths [5, 3, 56, 0, 0, ...].
    """
    count = len(plan.params)
    static.row_ids[:count].copy_(plan.row_ids)
    static.starts[:count].copy_(plan.starts)
    static.lengths[:count].copy_(plan.lengths)
    static.row_ids[count:].fill_(padding_row)
    static.starts[count:].fill_(0)
    static.lengths[count:].fill_(0)
    static.lengths[count].fill_(static.num_tokens - plan.num_tokens)


class ChunkGraphs:
    """The graphs of an engine's small steps with prompts.

    Invariant: a graph reads its step from `plans[bucket]`, whose columns keep their addresses.
    """

    def __init__(self, padding_row: int, max_seq_len: int, pool: Any, device: torch.device) -> None:
        """No bucket is longer than the padding row, `max_seq_len` tokens."""
        self.padding_row, self.pool = padding_row, pool
        self.buckets = [size for size in TOKEN_BUCKETS if size <= max_seq_len]
        max_keys = min(MAX_KEYS, max_seq_len)
        empty = [0] * (NUM_CHUNKS - 1)
        self.plans = {
            size: padding_plan([size, *empty], padding_row, max_keys, device)
            for size in self.buckets
        }
        self.functions: list[ChunkFunction] = []

    def wrap(self, function: StepFunction) -> ChunkFunction:
        """`function(plan)` with graphs for the steps that can be replayed."""
        self.functions.append(ChunkFunction(self, function))
        return self.functions[-1]

    def load(self, plan: StepPlan) -> int | None:
        """Copy the step to the plan of its bucket; returns the bucket, or None for a step that
        must run without a graph."""
        num_chunks = len(plan.row_ids)
        # A chunk in the middle of a prompt samples nothing, and a graph samples everywhere.
        all_sample = num_chunks == len(plan.params)
        fits = num_chunks < NUM_CHUNKS and plan.max_seq_len <= MAX_KEYS
        if plan.is_decode or not all_sample or not fits:
            return None
        bucket = bucket_for(plan.num_tokens, self.buckets)
        if bucket is not None:
            fill(self.plans[bucket], plan, self.padding_row)
        return bucket

    @torch.inference_mode()  # as every step of the engine
    def capture_all(self) -> None:
        """Capture every function for every bucket, the largest first."""
        for function in self.functions:
            for size in reversed(self.buckets):
                function.capture(size)

    def clear(self) -> None:
        """Give all graphs back, and the functions as well: those that somebody still holds run
        without graphs."""
        for function in self.functions:
            function.captured.clear()
        self.functions.clear()


class ChunkFunction:
    """A function of a step that replays its graph where there is one for the step's bucket."""

    def __init__(self, graphs: ChunkGraphs, function: StepFunction) -> None:
        self.graphs, self.function = graphs, function
        self.captured: dict[int, tuple[Graph, Tensor]] = {}

    def __repr__(self) -> str:
        return f"ChunkFunction(captured for {sorted(self.captured)} tokens)"

    def capture(self, bucket: int) -> None:
        """Capture the function for the steps of one bucket, after a call for the compilers."""
        plan = self.graphs.plans[bucket]
        self.function(plan)
        self.captured[bucket] = capture(lambda: self.function(plan), self.graphs.pool)

    def __call__(self, plan: StepPlan) -> Tensor:
        """What `function(plan)` gives; from a graph it is valid until the next call."""
        bucket = self.graphs.load(plan)
        if bucket not in self.captured:
            return self.function(plan)
        graph, result = self.captured[bucket]
        graph.replay()
        return result[: len(plan.params)]
