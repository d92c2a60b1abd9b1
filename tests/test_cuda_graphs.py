"""Graphs: the buckets, padding that harms nobody, replay that equals the step itself."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import make_checkpoint

from minivllm import LLM, SamplingParams
from minivllm.cuda_graphs import (
    CaptureError,
    StepGraphs,
    Tape,
    bucket_for,
    bucket_sizes,
    capture,
    fill,
)
from minivllm.step_input import padding_plan

CPU = torch.device("cpu")

# -- buckets --


@given(st.integers(1, 600))
def test_buckets_cover_every_batch(max_num_seqs):
    """Also where `max_num_seqs` is no multiple of the step; ascending, none twice."""
    buckets = bucket_sizes(max_num_seqs)
    assert buckets == sorted(set(buckets)) and buckets[-1] == max_num_seqs
    for num_rows in range(1, max_num_seqs + 1):
        size = bucket_for(num_rows, buckets)
        assert size is not None and num_rows <= size < num_rows + 8
    assert bucket_for(max_num_seqs + 1, buckets) is None


def test_bucket_sizes_by_example():
    """100 is no multiple of 8, and has its graph."""
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert bucket_sizes(4) == [1, 2, 4]
    assert bucket_sizes(3) == [1, 2, 3]
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(100)[-2:] == [96, 100]


# -- padding --


def decode_plan(row_ids, starts):
    """A step in which these rows decode."""
    plan = padding_plan([1] * len(row_ids), 99, 64, CPU)
    plan.row_ids[:] = torch.tensor(row_ids)
    plan.starts[:] = torch.tensor(starts)
    return plan


def test_a_filled_plan_ends_in_padding():
    """After a larger batch nothing of it is left."""
    static = padding_plan([1] * 4, 9, 64, CPU)
    fill(static, decode_plan([5, 3, 7], [17, 4, 2]), 9)
    fill(static, decode_plan([6, 1], [30, 8]), 9)
    assert static.row_ids.tolist() == [6, 1, 9, 9]
    assert static.starts.tolist() == [30, 8, 0, 0]
    assert static.lengths.tolist() == [1, 1, 1, 1]


def test_filling_keeps_the_addresses():
    """A graph knows no others."""
    static = padding_plan([1] * 4, 9, 64, CPU)
    before = static.row_ids.data_ptr(), static.starts.data_ptr()
    fill(static, decode_plan([5], [17]), 9)
    assert (static.row_ids.data_ptr(), static.starts.data_ptr()) == before


def test_padding_is_a_decode_step():
    """So it can be replayed: as many tokens as rows, and every row samples."""
    plan = padding_plan([1] * 3, 9, 64, CPU)
    assert plan.is_decode and plan.max_seq_len == 64
    assert plan.row_ids.tolist() == [9, 9, 9] and plan.sampling.tolist() == [0, 1, 2]


# -- the tape --


def test_a_tape_computes_anew_from_new_numbers():
    """In the same storages: views, operations in place and results in between included."""
    x, out = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)

    def step():
        doubled = x * 2
        doubled[1:].add_(10)
        return out.copy_(doubled)

    graph, result = capture(step, None)
    assert result.tolist() == [2, 14, 16] and result.data_ptr() == out.data_ptr()
    x.copy_(torch.tensor([5.0, 6.0, 7.0]))
    graph.replay()
    assert out.tolist() == [10, 22, 24]


def test_an_if_goes_the_way_it_went():
    """Python is not asked again: that is what a graph saves, and what it cannot do."""
    x, flag = torch.tensor([1.0]), [True]
    graph, result = capture(lambda: x + 1 if flag[0] else x - 1, None)
    flag[0] = False
    x.fill_(4.0)
    graph.replay()
    assert result.tolist() == [5]


@pytest.mark.parametrize(
    "function",
    [lambda x: x.sum().item(), lambda x: x if x.sum() > 0 else -x, lambda x: x[x > 0]],
    ids=["a number", "an if on a number", "a shape that depends on numbers"],
)
def test_reading_on_the_host_is_refused_by_name(function):
    """On a GPU the capture fails as well."""
    x = torch.tensor([1.0, -2.0])
    with pytest.raises(CaptureError, match="reads a number on the host"), Tape():
        function(x)


# -- graphs of a step --


def add_one(rows):
    """A "step": the numbers of its rows, plus 1, also written back."""

    def function(plan):
        rows[plan.row_ids] += 1
        return rows[plan.row_ids].clone()

    return function


def test_every_bucket_is_replayed_and_a_larger_batch_is_not():
    """Three rows ride in the bucket of four; the result has three."""
    rows = torch.zeros(6)
    graphs = StepGraphs(5, 64, CPU)
    calls = []

    def counted(plan):
        calls.append(len(plan.row_ids))
        return add_one(rows)(plan)

    step = graphs.wrap(counted)
    graphs.capture_all()
    num_captured, rows[:] = len(calls), torch.tensor([10.0, 20, 30, 40, 50, 0])
    assert step(decode_plan([2, 0, 1], [0, 0, 0])).tolist() == [31, 11, 21]
    assert step(decode_plan([4], [0])).tolist() == [51]
    assert step(decode_plan([0, 1, 2, 3, 4], [0] * 5)).tolist() == [12, 22, 32, 41, 52]
    assert len(calls) == num_captured, "replayed: Python was not asked"
    assert rows[:5].tolist() == [12, 22, 32, 41, 52], "padding has touched nobody's row"


def test_a_chunk_of_a_prompt_runs_without_a_graph():
    """Its shapes are new in every step."""
    graphs = StepGraphs(4, 64, CPU)
    step = graphs.wrap(lambda plan: plan.lengths * 1)
    graphs.capture_all()
    plan = decode_plan([1, 2], [0, 0])
    plan.num_decodes, plan.lengths = 1, torch.tensor([1, 7])
    assert step(plan).tolist() == [1, 7]


def test_functions_share_the_plan_and_not_the_results():
    """A step is copied once, whichever function reads it; each has its own result."""
    rows = torch.tensor([1.0, 2.0, 3.0, 0.0])
    graphs = StepGraphs(3, 64, CPU)
    first = graphs.wrap(lambda plan: rows[plan.row_ids])
    second = graphs.wrap(lambda plan: rows[plan.row_ids] * 10)
    graphs.capture_all()
    for row_ids, expected in (([2], [3]), ([0, 1, 2], [1, 2, 3]), ([1, 0], [2, 1])):
        plan = decode_plan(row_ids, [0] * len(row_ids))
        once, tenfold = first(plan), second(plan)
        assert graphs.loaded is plan
        assert once.tolist() == expected
        assert tenfold.tolist() == [10 * value for value in expected]


def test_what_was_not_captured_runs_without_a_graph():
    """Every call asks Python."""
    graphs, calls = StepGraphs(2, 64, CPU), []
    step = graphs.wrap(lambda plan: calls.append(1) or plan.starts + 1)
    assert step(decode_plan([0], [4])).tolist() == [5]
    assert step(decode_plan([0], [8])).tolist() == [9]
    assert len(calls) == 2


# -- in the engine --

PROMPTS = ["abcdefgh", "abcdefgh", "abcdefghij", "xyz", "the end", "q"]


def answers(path, num_rounds=2, params=None, **settings):
    """Token ids of some rounds over all prompts."""
    params = params or SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    defaults = {"device": "cpu", "attention_backend": "torch", "num_kv_blocks": 40}
    defaults |= {"block_size": 4, "max_num_seqs": 5, "max_model_len": 36}
    with LLM(str(path), progress=False, **(defaults | settings)) as llm:
        llm.engine.check_invariants = True
        outputs = [o for _ in range(num_rounds) for o in llm.generate(PROMPTS, params, False)]
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"num_kv_blocks": 9}])
def test_the_engine_gives_the_same_tokens_with_graphs(tmp_path, settings):
    """Batches of all sizes up to five, preempted, one step ahead."""
    path = make_checkpoint(tmp_path / "tiny")
    expected = answers(path, enforce_eager=True)
    assert answers(path, enforce_eager=False, **settings) == expected


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"top_k": 5}, {"presence_penalty": 1.0}, {"logprobs": 2}]
)
def test_rows_that_ask_for_more_get_it_with_graphs(tmp_path, params):
    """Filters and penalties are applied after the graph, to its logits."""
    path = make_checkpoint(tmp_path / "tiny")
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=3, **params)
    expected = answers(path, params=params, enforce_eager=True)
    assert answers(path, params=params, enforce_eager=False) == expected


def test_kernels_that_a_tape_cannot_see_are_refused(tmp_path):
    """numba's: the message names the backend that can be taped."""
    with pytest.raises(ValueError, match="enforce_eager=False.*attention_backend='torch'"):
        answers(make_checkpoint(tmp_path / "tiny"), attention_backend="cpu", enforce_eager=False)
