"""What chapter 09 runs on: ranks as threads, a tiny model, and the record of a step."""

import pytest
import torch

from course.props import ranks
from minivllm import LLM, SamplingParams
from minivllm.checkpoint.weights import read_config


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
