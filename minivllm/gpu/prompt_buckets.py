"""Buckets for CUDA graphs of small steps with prompts in them, so that a first token comes soon.

A prompt of 500 tokens keeps a large GPU busy for two milliseconds, and launching its kernels
one by one takes the host ten times as long. A step with prompts has no shape of its own, so it
is given one: a number of tokens (the bucket) in a number of chunks. Its chunks take the first
places, one chunk of padding takes the tokens that are left, and the other places stay empty.
Does not handle large steps, which keep the GPU busy anyway, or decodes (see `cuda_graphs`).
Not built in the course.
"""

from __future__ import annotations

import torch

from minivllm.cuda_graphs import Bucket, bucket_for
from minivllm.rows import StepPlan
from minivllm.step_input import padding_plan

TOKEN_BUCKETS = (64, 128, 256, 512, 1024, 2048)
NUM_CHUNKS = 16  # places; the last one is reserved for padding
# Decodes in such a step attend like prompts, one program for all their keys: with more keys than
# this, kernels that split them are faster, launch by launch.
MAX_KEYS = 4096


class PromptBuckets:
    """Steps of at most 2,048 tokens in at most 15 chunks, all of which sample."""

    def __init__(self, padding_row: int, max_seq_len: int, device: torch.device) -> None:
        """No bucket is longer than the padding row, `max_seq_len` tokens."""
        self.padding_row = padding_row
        self.sizes = [size for size in TOKEN_BUCKETS if size <= max_seq_len]
        max_keys = min(MAX_KEYS, max_seq_len)
        empty = [0] * (NUM_CHUNKS - 1)
        self.plans: dict[Bucket, StepPlan] = {
            ("tokens", size): padding_plan([size, *empty], padding_row, max_keys, device)
            for size in self.sizes
        }

    def bucket_of(self, plan: StepPlan) -> Bucket | None:
        """The number of tokens that holds the step, or None for a step that does not fit."""
        num_chunks = len(plan.row_ids)
        # A chunk in the middle of a prompt samples nothing, and a graph samples everywhere.
        all_sample = num_chunks == len(plan.params)
        fits = num_chunks < NUM_CHUNKS and plan.max_seq_len <= MAX_KEYS
        if plan.is_decode or not all_sample or not fits:
            return None
        size = bucket_for(plan.num_tokens, self.sizes)
        return None if size is None else ("tokens", size)

    def fill(self, static: StepPlan, plan: StepPlan) -> None:
        """Copy a step to where a graph reads it, and make padding of the rest.

        Chunks of 5 and 3 tokens in a bucket of 64: lengths [5, 3, 56, 0, 0, ...].
        """
        count = len(plan.params)
        static.row_ids[:count].copy_(plan.row_ids)
        static.starts[:count].copy_(plan.starts)
        static.lengths[:count].copy_(plan.lengths)
        static.row_ids[count:].fill_(self.padding_row)
        static.starts[count:].fill_(0)
        static.lengths[count:].fill_(0)
        static.lengths[count].fill_(static.num_tokens - plan.num_tokens)
