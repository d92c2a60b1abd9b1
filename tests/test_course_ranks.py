"""What chapter 09 runs on: ranks as threads, a tiny model, and the record of a step."""

import pytest
import torch

from course.props import ranks
from minivllm import LLM, SamplingParams
from minivllm.checkpoint.weights import read_config
from minivllm.tensor_parallel import Part


def test_every_rank_gets_the_sum():
    """Results come in the order of the ranks."""
    found = ranks.on_ranks(3, lambda group: (group.rank, group.all_reduce(torch.ones(1)).item()))
    assert found == [(0, 3.0), (1, 3.0), (2, 3.0)]


def test_the_tiny_model_takes_the_changes(tmp_path):
    """Its vocabulary divides evenly for no number of ranks; biases where they are asked for."""
    path = ranks.make_tiny_checkpoint(tmp_path, attention_bias=True)
    config = read_config(path)
    assert config.o_bias and config.vocab_size % 2 and config.vocab_size % 3


def test_ranks_as_threads_leave_a_record(tmp_path):
    """The same tokens as on one rank, and what each rank did in a step."""
    path = str(ranks.make_tiny_checkpoint(tmp_path))
    settings = {"attention_backend": "torch", "device": "cpu", "progress": False}
    settings |= {"num_kv_blocks": 8, "max_num_seqs": 2}
    params, found = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), []
    for size in (1, 2):
        with ranks.ranks_as_threads(), LLM(path, tensor_parallel_size=size, **settings) as llm:
            output = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]
            marks = llm.engine.runner.group.marks if size == 2 else None
        found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]
    step = ranks.step_marks(marks, 1)
    calls = [[name for name, _, _ in step[rank]] for rank in (0, 1)]
    assert calls[0] == ["send", *["all_reduce"] * 5, "all_gather", "broadcast"]
    assert calls[1] == ["receive", *calls[0][1:]]


def test_a_record_notes_failures_too():
    """When the call ended, however it ended."""

    class Group:
        def send(self, message):
            raise RuntimeError("gone")

        receive = all_reduce = all_gather = broadcast = send

    group = Group()
    marks = ranks.watch(group)
    with pytest.raises(RuntimeError, match="gone"):
        group.send(b"x")
    assert [name for name, _, _ in marks] == ["send"]


def test_numbers_held_are_counted_by_parts():
    """A tensor without a part counts whole."""
    parts = {"a": Part(0, 2, 4, 6), "b": None}
    assert ranks.numbers_held({"a": (6, 5), "b": (7,)}, parts.get) == (10 + 7, 37)


def test_the_quickest_step_is_the_leaders():
    """The second step takes 2 ms, the first one 3."""
    marks = {0: [("send", 0.0, 0.001), ("all_reduce", 0.001, 0.003)]}
    marks[0] += [("send", 1.0, 1.001), ("all_reduce", 1.001, 1.002), ("send", 2.0, 2.1)]
    step = ranks.quickest(marks, range(2))
    assert step[0][-1] == ("all_reduce", pytest.approx(0.001), pytest.approx(0.002))


def test_sums_are_timed_by_size():
    """Every rank measures each size."""
    found = ranks.on_ranks(2, lambda group: ranks.time_sums(group, [256, 1024], tries=2))
    assert [list(times) for times in found] == [[256, 1024]] * 2
    assert all(time > 0 for times in found for time in times.values())


def test_two_threads_answer_as_one_rank(tmp_path):
    """The helpers of the lesson agree with each other."""
    path = str(ranks.make_tiny_checkpoint(tmp_path))
    with LLM(path, **ranks.SETTINGS) as llm:
        expected = ranks.answers(llm)
    found, marks = ranks.on_threads(path)
    assert found == expected
    assert sorted(marks) == [0, 1]
