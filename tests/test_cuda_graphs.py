"""Graphs: the buckets, padding that harms no request, replay that equals the step itself."""

import sys
from pathlib import Path

import pytest
import torch

from minivllm import SamplingParams
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
MUL, SUM, SPLIT = torch.ops.aten.mul.Tensor, torch.ops.aten.sum.default, torch.ops.aten.split.Tensor
ITEM = torch.ops.aten._local_scalar_dense.default


@pytest.fixture
def inference_mode():
    """The engine runs its steps in it, and captures them in it."""
    with torch.inference_mode():
        yield


needs_inference_mode = pytest.mark.usefixtures("inference_mode")


def error_of(function, *args):
    """What the call raises, or None."""
    try:
        function(*args)
    except Exception as error:  # whatever it is, the assert shows it
        return error
    return None


# -- buckets --


def test_buckets_cover_every_batch():
    """Also where `max_num_seqs` isn't a multiple of the step; ascending, none twice."""
    for max_num_seqs in range(1, 200):
        buckets = bucket_sizes(max_num_seqs)
        assert buckets == sorted(set(buckets)) and buckets[-1] == max_num_seqs
        for num_rows in range(1, max_num_seqs + 1):
            size = bucket_for(num_rows, buckets)
            assert size is not None and num_rows <= size < num_rows + 8
        assert bucket_for(max_num_seqs + 1, buckets) is None


@pytest.mark.exercise("cuda_graphs.bucket_sizes")
def test_the_largest_batch_has_its_graph():
    """Also where it isn't a multiple of 8."""
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20], (
        "17 to 20 requests need a graph too: does the list end with max_num_seqs, whatever it is?"
    )
    assert bucket_sizes(100)[-2:] == [96, 100], (
        "97 to 100 requests need a graph too: does the list end with max_num_seqs?"
    )


@pytest.mark.exercise("cuda_graphs.bucket_sizes")
def test_no_bucket_is_there_twice():
    """16 is a multiple of 8 and the largest batch."""
    assert bucket_sizes(16) == [1, 2, 4, 8, 16], (
        "is 16 captured twice: as a multiple and as the end?"
    )
    assert bucket_sizes(4) == [1, 2, 4], "is 4 captured twice: as a small bucket and as the end?"
    assert bucket_sizes(1) == [1], "one request at a time needs one graph"


@pytest.mark.exercise("cuda_graphs.bucket_sizes")
def test_no_bucket_is_larger_than_the_largest_batch():
    """There are no rows for it."""
    assert bucket_sizes(3) == [1, 2, 3], "4 requests never run here: is every bucket below 3, or 3?"
    assert bucket_sizes(6) == [1, 2, 4, 6], "8 requests never run here: do you go past the end?"


def test_the_smallest_bucket_that_holds_the_rows():
    """None if they are too many."""
    buckets = [1, 2, 4, 8, 16, 20]
    assert [bucket_for(n, buckets) for n in (1, 3, 9, 16, 20, 21)] == [1, 4, 16, 16, 20, None]


# -- padding --


def decode_plan(row_ids, starts):
    """A step in which these rows decode."""
    plan = padding_plan([1] * len(row_ids), 99, 64, CPU)
    plan.row_ids[:] = torch.tensor(row_ids)
    plan.starts[:] = torch.tensor(starts)
    return plan


@pytest.mark.exercise("cuda_graphs.fill")
def test_a_filled_plan_ends_in_padding():
    """Real rows first, then the padding row, at position 0."""
    static = padding_plan([1] * 4, 9, 64, CPU)
    fill(static, decode_plan([5, 3], [17, 4]), 9)
    rows, starts = static.row_ids.tolist(), static.starts.tolist()
    assert rows[:2] == [5, 3], "the graph reads rows 5 and 3 from its own plan: are they there?"
    assert starts[:2] == [17, 4], "row 5 decodes position 17: are the starts copied as well?"
    assert rows[2:] == [9, 9], "two places are left over: do they name the padding row?"
    assert starts[2:] == [0, 0], "padding is at position 0"


@pytest.mark.exercise("cuda_graphs.fill")
def test_nothing_is_left_of_a_larger_batch():
    """A row that stayed would be computed once more, and its token overwritten."""
    static = padding_plan([1] * 4, 9, 64, CPU)
    fill(static, decode_plan([5, 3, 7], [17, 4, 2]), 9)
    fill(static, decode_plan([6, 1], [30, 8]), 9)
    assert static.row_ids.tolist() == [6, 1, 9, 9], (
        "three rows, then two: what is in the third place after the smaller batch?"
    )
    assert static.starts.tolist() == [30, 8, 0, 0], (
        "three rows, then two: what start is in the third place after the smaller batch?"
    )


@pytest.mark.exercise("cuda_graphs.fill")
def test_filling_keeps_the_addresses():
    """A graph knows no others."""
    static = padding_plan([1] * 4, 9, 64, CPU)
    columns = static.row_ids, static.starts
    fill(static, decode_plan([5], [17]), 9)
    assert static.row_ids is columns[0] and static.starts is columns[1], (
        "the graph reads the old tensors: do you put new ones in their place, or write into them?"
    )
    assert columns[0].tolist() == [5, 9, 9, 9], "the graph reads these tensors: are they written?"


@pytest.mark.exercise("cuda_graphs.fill")
def test_a_full_bucket_has_no_padding():
    """As many rows as places; the step itself stays as it is."""
    static, plan = padding_plan([1] * 2, 9, 64, CPU), decode_plan([4, 0], [6, 1])
    fill(static, plan, 9)
    assert static.row_ids.tolist() == [4, 0], "two rows fill a bucket of two: is the last one kept?"
    assert static.starts.tolist() == [6, 1], "two starts fill a bucket of two"
    assert plan.row_ids.tolist() == [4, 0], "the plan belongs to the caller: do you write into it?"


def test_padding_is_a_decode_step():
    """So it can be replayed: as many tokens as rows, and every row samples."""
    plan = padding_plan([1] * 3, 9, 64, CPU)
    assert plan.is_decode and plan.max_seq_len == 64
    assert plan.row_ids.tolist() == [9, 9, 9] and plan.sampling.tolist() == [0, 1, 2]


# -- the tape: recording --


@pytest.mark.exercise("cuda_graphs.Tape.record")
def test_an_operation_is_run_while_it_is_recorded():
    """What follows needs its result."""
    tape, x = Tape(), torch.tensor([1.0, 2.0])
    out = tape.record(MUL, (x, 3.0), {})
    assert out is not None, "the next operation needs the result: do you return it?"
    assert out.tolist() == [3.0, 6.0], "the result of x * 3 comes back"
    total = tape.record(SUM, (x,), {"dtype": torch.float64})
    assert total.dtype == torch.float64, (
        "the keyword arguments belong to the call: do you pass them?"
    )


@pytest.mark.exercise("cuda_graphs.Tape.record")
def test_a_call_is_noted_with_all_that_a_replay_needs():
    """Operation, arguments, keyword arguments, results; in order."""
    tape, x = Tape(), torch.tensor([1.0, 2.0])
    tape.record(MUL, (x, 3.0), {})
    tape.record(SUM, (x,), {"dtype": torch.float64})
    assert len(tape.calls) == 2, "two operations, two calls: do you append each one?"
    first, second = tape.calls
    assert first.operation is MUL and second.operation is SUM, "in the order in which they ran"
    assert first.args[0] is x, "a replay reads x at its address: do you keep x itself?"
    assert second.kwargs == {"dtype": torch.float64}, "a replay needs the keyword arguments too"


@pytest.mark.exercise("cuda_graphs.Tape.record")
def test_results_are_kept_and_not_copied():
    """A later call reads that very memory."""
    tape, x = Tape(), torch.tensor([1.0, 2.0, 3.0])
    out = tape.record(MUL, (x, 2.0), {})
    results = tape.calls[0].results
    assert isinstance(results, list) and len(results) == 1, (
        "results is a list of tensors: do you ask tensors_in?"
    )
    assert results[0] is out, "later calls read this very tensor: do you keep a copy of it?"
    parts = tape.record(SPLIT, (x, 2), {})
    results = tape.calls[1].results
    assert len(results) == 2, "split gives two tensors: are both among the results? (tensors_in)"
    assert all(a is b for a, b in zip(results, parts)), "these very tensors, in order"


@pytest.mark.exercise("cuda_graphs.Tape.record")
def test_an_operation_that_asks_the_host_is_refused():
    """It is not run, and not noted: a graph has no host to ask."""
    tape, x = Tape(), torch.tensor(2.0)
    error = error_of(tape.record, ITEM, (x,), {})
    assert isinstance(error, CaptureError), (
        "reading a number waits for the device, in every replay: is the refusal raised?"
    )
    assert tape.calls == [], "a refused call isn't part of the tape: do you ask before you record?"


@pytest.mark.parametrize("mode", [True, False], ids=["inference mode", "otherwise"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
    ],
    ids=["a number", "an if on a number", "a mask's shape", "a number of values", "a comparison"],
)
def test_reading_on_the_host_is_refused_by_name(function, mode):
    """On a GPU the capture fails as well."""
    x = torch.tensor([1.0, -2.0])
    with (
        pytest.raises(CaptureError, match="reads a number on the host"),
        torch.inference_mode(mode),
        Tape(),
    ):
        function(x)


# -- the tape: replay --


@pytest.mark.exercise("cuda_graphs.Tape.replay")
def test_a_replay_computes_from_the_numbers_of_now():
    """The arguments are the same tensors; what is in them has changed."""
    x, tape = torch.tensor([1.0, 2.0]), Tape()
    with tape:
        out = x * 2
    x.copy_(torch.tensor([5.0, 6.0]))
    tape.replay()
    assert out.tolist() == [10.0, 12.0], (
        "x holds 5 and 6 now: do the new results go into the tensor that the caller holds?"
    )


@pytest.mark.exercise("cuda_graphs.Tape.replay")
def test_later_calls_read_what_earlier_ones_have_just_made():
    """Results in between are at their old addresses too, and the calls in their order."""
    x, tape = torch.tensor([1.0, 2.0]), Tape()
    with tape:
        out = (x * 2 + 1).square()
    for value in (3.0, 4.0):
        x.fill_(value)
        tape.replay()
        assert out.tolist() == [(2 * value + 1) ** 2] * 2, (
            "each call reads the results of those before it: are all of them put in their places,"
            " in every replay?"
        )
    assert len(tape.calls) == 3, "a replay records nothing"


@pytest.mark.exercise("cuda_graphs.Tape.replay")
def test_what_is_done_in_place_is_done_once():
    """The result of `add_` is the tensor it added to."""
    x, tape = torch.tensor([1.0, 2.0]), Tape()
    with tape:
        x.add_(10)
    tape.replay()
    assert x.tolist() == [21.0, 22.0], "recorded once and replayed once: 1 + 10 + 10"


@pytest.mark.exercise("cuda_graphs.Tape.replay")
def test_views_show_the_new_numbers():
    """They look at memory that a replay has just filled."""
    x, tape = torch.tensor([[1.0], [2.0]]), Tape()
    with tape:
        out = (x * 2).expand(2, 4) + torch.ones(2, 4)
    x.copy_(torch.tensor([[3.0], [5.0]]))
    tape.replay()
    assert out.tolist() == [[7.0] * 4, [11.0] * 4], (
        "the view looks at the first result of x * 2: is the new one copied there?"
    )


@pytest.mark.exercise("cuda_graphs.Tape.replay")
def test_all_results_of_an_operation_are_put_in_place():
    """`topk` gives values and their places."""
    x, tape = torch.tensor([1.0, 3.0, 2.0]), Tape()
    with tape:
        values, places = x.topk(1)
    x.copy_(torch.tensor([9.0, 3.0, 2.0]))
    tape.replay()
    assert (values.tolist(), places.tolist()) == ([9.0], [0]), (
        "topk gives values and places: are both copied, not the first alone?"
    )


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


# -- a function with graphs --


def read_rows(rows):
    """A "step" that gives the numbers of its rows."""
    return lambda plan: rows[plan.row_ids]


def add_one(rows):
    """A "step": the numbers of its rows, plus 1, also written back."""

    def function(plan):
        rows[plan.row_ids] += 1
        return rows[plan.row_ids].clone()

    return function


@pytest.mark.exercise("cuda_graphs.GraphedFunction.capture")
@needs_inference_mode
def test_the_first_call_is_not_captured():
    """A first call may read numbers while it sets things up; that isn't part of the step."""
    is_ready = []

    def function(plan):
        if not is_ready:
            is_ready.append(plan.starts.sum().item())  # as a compiler's trial run does
        return plan.starts + 1

    step = StepGraphs(2, 64, CPU).wrap(function)
    error = error_of(step.capture, 2)
    assert not isinstance(error, CaptureError), (
        "a first call compiles and sets up: do you call the function once before the capture?"
    )
    assert error is None and 2 in step.captured, "the graph belongs into captured[bucket]"


@pytest.mark.exercise("cuda_graphs.GraphedFunction.capture")
@needs_inference_mode
def test_all_buckets_leave_their_result_in_one_place():
    """It has a row for each of the largest bucket, and stays where it is."""
    rows = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0], [0.0, 0.0]])
    graphs = StepGraphs(4, 64, CPU)
    step = graphs.wrap(read_rows(rows))
    step.capture(2)
    result = step.result
    assert result is not None, "the result of the first capture needs a place: self.result"
    assert result.shape == (4, 2), "4 rows in the largest bucket, 2 numbers in each row"
    step.capture(4)
    assert step.result is result, (
        "the graph of bucket 2 writes into the first tensor: do you make another one each time?"
    )


@pytest.mark.exercise("cuda_graphs.GraphedFunction.capture")
@needs_inference_mode
def test_a_replay_writes_into_the_result():
    """The copy is a part of the graph, and so is the reading of the bucket's plan."""
    rows = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0])
    graphs = StepGraphs(4, 64, CPU)
    step = graphs.wrap(read_rows(rows))
    step.capture(4)
    step.capture(2)
    graphs.plans[2].row_ids.copy_(torch.tensor([3, 1]))
    step.captured[2].replay()
    assert step.result[:2].tolist() == [4.0, 2.0], (
        "rows 3 and 1 hold 4 and 2: does the graph itself copy its result into self.result?"
    )
    graphs.plans[4].row_ids.copy_(torch.tensor([0, 1, 2, 3]))
    step.captured[4].replay()
    assert step.result.tolist() == [1.0, 2.0, 3.0, 4.0], (
        "bucket 4 has four rows: does each graph read the plan of its own bucket?"
    )


@pytest.mark.exercise("cuda_graphs.GraphedFunction.capture")
@needs_inference_mode
def test_the_result_is_like_the_functions():
    """Token ids are whole numbers."""
    step = StepGraphs(3, 64, CPU).wrap(lambda plan: plan.starts * 2)
    step.capture(3)
    assert step.result.dtype == torch.int64, "ids are int64: is the result's type the function's?"
    assert step.result.shape == (3,), "one number a row"


@pytest.mark.exercise("cuda_graphs.GraphedFunction.__call__")
@needs_inference_mode
def test_padding_is_no_part_of_the_answer():
    """Three rows ride in the bucket of four."""
    rows = torch.tensor([10.0, 20.0, 30.0, 40.0, 0.0])
    graphs = StepGraphs(4, 64, CPU)
    step = graphs.wrap(read_rows(rows))
    graphs.capture_all()
    out = step(decode_plan([2, 0, 1], [0, 0, 0]))
    assert len(out) == 3, "three requests, three rows: do you return the padding as well?"
    assert out.tolist() == [30.0, 10.0, 20.0], (
        "rows 2, 0 and 1 hold these numbers: is the step loaded before the replay?"
    )


@pytest.mark.exercise("cuda_graphs.GraphedFunction.__call__")
@needs_inference_mode
def test_a_replay_does_not_ask_python():
    """It reads the new step where the graph expects it."""
    rows, calls = torch.tensor([10.0, 20.0, 30.0, 40.0, 0.0]), []
    graphs = StepGraphs(4, 64, CPU)
    step = graphs.wrap(lambda plan: calls.append(1) or rows[plan.row_ids])
    graphs.capture_all()
    num_calls = len(calls)
    assert step(decode_plan([2, 0], [0, 0])).tolist() == [30.0, 10.0]
    out = step(decode_plan([1, 3], [0, 0]))
    assert len(calls) == num_calls, "there is a graph for two rows: do you call the function?"
    assert out.tolist() == [20.0, 40.0], (
        "the second step is about rows 1 and 3: is it loaded before the replay?"
    )


@pytest.mark.exercise("cuda_graphs.GraphedFunction.__call__")
@needs_inference_mode
def test_a_chunk_of_a_prompt_runs_without_a_graph():
    """Its shapes are new in every step, and `load` gives None."""
    graphs = StepGraphs(4, 64, CPU)
    step = graphs.wrap(lambda plan: plan.lengths * 1)
    graphs.capture_all()
    plan = decode_plan([1, 2], [0, 0])
    plan.num_decodes, plan.lengths = 1, torch.tensor([1, 7])
    out = step(plan)
    assert out.tolist() == [1, 7], (
        "a step with a prompt has no bucket: does the function get the step's own plan?"
    )


@pytest.mark.exercise("cuda_graphs.GraphedFunction.__call__")
@needs_inference_mode
def test_what_was_not_captured_runs_without_a_graph():
    """Every call asks Python."""
    graphs, calls = StepGraphs(2, 64, CPU), []
    step = graphs.wrap(lambda plan: calls.append(1) or plan.starts + 1)
    assert step(decode_plan([0], [4])).tolist() == [5], "nothing is captured: call the function"
    assert step(decode_plan([0], [8])).tolist() == [9], "and again: the step may be another one"
    assert len(calls) == 2, "nothing is captured: every call is the function's"


@pytest.mark.exercise("cuda_graphs.GraphedFunction.__call__")
@needs_inference_mode
def test_every_bucket_is_replayed_and_harms_nobody():
    """Also where the step writes; the row of the padding belongs to no request."""
    rows = torch.zeros(6)
    graphs = StepGraphs(5, 64, CPU)
    step = graphs.wrap(add_one(rows))
    graphs.capture_all()
    rows[:] = torch.tensor([10.0, 20, 30, 40, 50, 0])
    assert step(decode_plan([2, 0, 1], [0, 0, 0])).tolist() == [31, 11, 21], "a bucket of 4"
    assert step(decode_plan([4], [0])).tolist() == [51], "a bucket of 1"
    assert step(decode_plan([0, 1, 2, 3, 4], [0] * 5)).tolist() == [12, 22, 32, 41, 52], "of 5"
    assert rows[:5].tolist() == [12, 22, 32, 41, 52], "each step ran once, on its own rows"


@needs_inference_mode
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


# -- in the engine --

PROMPTS = ["abcdefgh", "abcdefgh", "abcdefghij", "xyz", "the end", "q"]


def make_checkpoint(path):
    """A tiny model. Imported here, and the engine below, since the checks of the exercises need
    neither."""
    sys.path.insert(0, str(Path(__file__).parent))
    import tiny_checkpoint

    return tiny_checkpoint.make_checkpoint(path)


def answers(path, num_rounds=2, params=None, **settings):
    """Token ids of some rounds over all prompts."""
    from minivllm import LLM

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
