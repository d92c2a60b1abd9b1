"""Tensor parallelism through NCCL: one rank on one GPU, in graphs; several where there are more."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported: for other tests

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from random_checkpoint import write_checkpoint
from tiny_checkpoint import make_checkpoint

from minivllm import LLM, SamplingParams
from minivllm.cuda_graphs import StepGraphs
from minivllm.distributed.process_group import ProcessGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PROMPTS = [[1, 2, 3], [5] * 40, list(range(30, 60)), [7, 8]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model that can be cut for 1, 2 and 4 ranks."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


def answers(path, params=GREEDY, **settings):
    """Token ids of two rounds, in float32."""
    settings = {"dtype": "float32", "num_kv_blocks": 60, "max_num_seqs": 4} | settings
    with LLM(str(path), progress=False, **settings) as llm:
        outputs = llm.generate(PROMPTS, params, False) + llm.generate(PROMPTS, params, False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def _one_rank(monkeypatch):
    """A group of one, with NCCL: every sum and message is made, by the leader alone."""

    def assemble(config, path):
        return ProcessGroup(dist.HashStore(), 0, 1, local=True)

    monkeypatch.setattr("minivllm.assembly.parts.assemble", assemble)


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_one_rank_with_nccl_gives_the_same_tokens(
    checkpoint, monkeypatch, backend, enforce_eager, overlap
):
    """The sums, the gathered logits and the leader's tokens are inside the captured step."""
    how = {"attention_backend": backend, "enforce_eager": enforce_eager, "overlap": overlap}
    given = answers(checkpoint, **how)
    monkeypatch.undo()
    assert given == answers(checkpoint, **how)


@pytest.mark.usefixtures("_one_rank")
def test_a_start_that_fails_after_its_graphs_were_captured_does_not_wait_for_nccl(
    checkpoint, monkeypatch
):
    """The traceback keeps the graphs alive, and they the connections."""
    capture_all = StepGraphs.capture_all

    def capture_and_fail(graphs):
        capture_all(graphs)
        raise RuntimeError("no memory left")

    monkeypatch.setattr(StepGraphs, "capture_all", capture_and_fail)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="no memory left") as kept:
        answers(checkpoint)
    assert time.monotonic() - started < 45  # NCCL would wait for 60 s
    assert kept.tb is not None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("size", [2, 4])
def test_several_gpus_give_the_tokens_of_one(checkpoint, size, enforce_eager, overlap):
    """A process and a GPU for each rank."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    how = {"enforce_eager": enforce_eager, "overlap": overlap}
    assert answers(checkpoint, tensor_parallel_size=size, **how) == answers(checkpoint, **how)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-8b"])
def test_a_real_shape_on_several_gpus_gives_the_tokens_of_one(shape, tmp_path):
    """Random weights in float32, as bfloat16 rounds near ties to either side."""
    path = write_checkpoint(shape, tmp_path / shape)
    settings = {"num_kv_blocks": 200, "max_model_len": 256, "max_num_seqs": 4}
    sizes = [size for size in (1, 2, 4) if size <= torch.cuda.device_count()]
    alone, *shared = [answers(path, tensor_parallel_size=size, **settings) for size in sizes]
    assert all(tokens == alone for tokens in shared)
