"""Small steps with prompts in a shape of their own: which ones fit, and what padding does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from row_makers import make_plan, make_request

from minivllm import ops
from minivllm.cuda_graphs import StepGraphs
from minivllm.gpu.prompt_buckets import MAX_KEYS, NUM_CHUNKS, PromptBuckets
from minivllm.request import SamplingParams
from minivllm.rows import Rows
from minivllm.step_input import gather, padding_plan

CPU = torch.device("cpu")
BLOCK_SIZE, PADDING_BLOCK = 4, 30


@pytest.fixture
def graphs() -> StepGraphs:
    """Buckets of 8 and 16 tokens for rows of 40, four of them, next to those of decodes."""
    prompts = PromptBuckets(4, 40, CPU)
    prompts.sizes = [8, 16]
    empty = [0] * (NUM_CHUNKS - 1)
    prompts.plans = {tokens(n): padding_plan([n, *empty], 4, 40, CPU) for n in prompts.sizes}
    return StepGraphs(4, 40, CPU, prompts)


def tokens(size):
    """The bucket of a step with prompts."""
    return ("tokens", size)


def plan_of(*lengths, starts=None, sampling=None):
    """Chunks of these lengths in rows 0, 1, ..., all of which sample unless told otherwise."""
    numbers = list(range(len(lengths)))
    sampling = numbers if sampling is None else sampling
    params = [SamplingParams()] * len(sampling)
    return make_plan(numbers, list(starts or [0] * len(lengths)), list(lengths), sampling, params)


def test_the_smallest_bucket_that_holds_the_tokens(graphs):
    """Up to 16 tokens; more run without a graph."""
    expected = [tokens(8), tokens(8), tokens(16), tokens(16), None]
    totals = ((2, 3), (8,), (8, 1), (9, 7), (17,))
    assert [graphs.load(plan_of(*lengths)) for lengths in totals] == expected


def test_what_a_graph_cannot_do_runs_without(graphs):
    """A chunk that does not sample, keys beyond the limit, decodes alone, too many chunks."""
    assert graphs.load(plan_of(5, 3, sampling=[1])) is None
    assert graphs.load(plan_of(3, starts=[MAX_KEYS - 3])) == tokens(8)
    assert graphs.load(plan_of(3, starts=[MAX_KEYS - 2])) is None
    decodes = plan_of(1, 1)
    decodes.num_decodes = 2
    assert graphs.load(decodes) == 2, "a bucket of decodes"
    assert graphs.load(plan_of(*[1] * (NUM_CHUNKS - 2), 2)) == tokens(16)
    assert graphs.load(plan_of(*[1] * (NUM_CHUNKS - 1), 1)) is None


def test_padding_takes_the_tokens_that_are_left(graphs):
    """Behind 2 and 3 tokens a chunk of 3; nothing is left of the step before; addresses stay."""
    static = graphs.plans[tokens(8)]
    addresses = [c.data_ptr() for c in (static.row_ids, static.starts, static.lengths)]
    graphs.load(plan_of(1, 1, 2, 4, starts=[7, 7, 7, 7]))
    assert static.lengths.tolist() == [1, 1, 2, 4] + [0] * (NUM_CHUNKS - 4)
    graphs.load(plan_of(2, 3, starts=[0, 6]))
    assert static.row_ids.tolist() == [0, 1] + [4] * (NUM_CHUNKS - 2)
    assert static.starts.tolist() == [0, 6] + [0] * (NUM_CHUNKS - 2)
    assert static.lengths.tolist() == [2, 3, 3] + [0] * (NUM_CHUNKS - 3)
    assert addresses == [c.data_ptr() for c in (static.row_ids, static.starts, static.lengths)]


def test_the_real_tokens_of_a_padded_step_are_those_of_the_step(graphs):
    """Input, positions, slots and last tokens; padding writes to its own block alone."""
    rows = Rows(4, 40, 10, CPU, PADDING_BLOCK)
    requests = [make_request("a", [5, 6, 7], [3]), make_request("b", range(20, 29), [8, 2, 9])]
    assert rows.update(requests) == [0, 1]
    plan = plan_of(3, 4, starts=[0, 5])
    bucket = graphs.load(plan)
    plain = gather(rows, plan, BLOCK_SIZE, ops.slot_mapping)
    padded = gather(rows, graphs.plans[bucket], BLOCK_SIZE, ops.slot_mapping)
    assert bucket == tokens(len(padded.input_ids)) == tokens(8)
    for name in ("input_ids", "positions", "slot_mapping"):
        assert torch.equal(getattr(padded, name)[:7], getattr(plain, name)), name
    assert torch.equal(padded.last[:2], plain.last)
    assert (padded.slot_mapping[7:] // BLOCK_SIZE).tolist() == [PADDING_BLOCK]
    meta, expected = padded.metadata, plain.metadata
    assert meta.query_starts.tolist() == [0, 3, 7, 8] + [8] * (NUM_CHUNKS - 3)
    assert torch.equal(meta.seq_lens[:2], expected.seq_lens)
    assert torch.equal(meta.block_table[:2], expected.block_table)
    assert (meta.num_decodes, meta.max_query_len) == (0, 8)


def test_a_captured_bucket_is_replayed_and_others_are_not(graphs):
    """The answer has a row for each chunk of the step, without the padding."""
    calls = []

    def ends(plan):
        calls.append(plan)
        return plan.starts + plan.lengths

    function = graphs.wrap(ends)
    assert function(plan_of(2, 3)).tolist() == [2, 3]
    function.capture(tokens(8))
    assert len(calls) == 3
    assert function(plan_of(2, 3, starts=[4, 1])).tolist() == [6, 4]
    assert function(plan_of(5)).tolist() == [5]
    assert len(calls) == 3, "replayed"
    assert function(plan_of(9)).tolist() == [9]
    assert len(calls) == 4, "its bucket was not captured"
