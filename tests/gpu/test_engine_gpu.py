"""The engine on a GPU, through the plain PyTorch operations: same tokens as on the CPU."""

import gc
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_checkpoint import make_checkpoint

from minivllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PROMPTS = ["abcdefgh", "abcdefgh", "abcdefghij", "xyz", "the end", "q"]


def answers(path, device, **settings):
    """Token ids of two rounds over all prompts, and the preemptions there were."""
    defaults = {"dtype": "float32", "num_kv_blocks": 40, "block_size": 4, "max_num_seqs": 4}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(str(path), device=device, progress=False, **(defaults | settings)) as llm:
        llm.engine.check_invariants = True
        outputs = llm.generate(PROMPTS, params, False) + llm.generate(PROMPTS, params, False)
    return [o.outputs[0].token_ids for o in outputs], sum(o.num_preemptions for o in outputs)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 4},
        {"num_kv_blocks": 9, "max_model_len": 36},
        {"enable_prefix_caching": False},
    ],
)
def test_float32_tokens_equal_those_of_the_cpu(tmp_path, settings):
    """Batched, in chunks, preempted, with and without the prefix cache."""
    path = make_checkpoint(tmp_path / "tiny")
    expected, _ = answers(path, "cpu", max_num_seqs=1, enable_prefix_caching=False)
    given, num_preemptions = answers(path, "cuda", **settings)
    assert given == expected
    assert (num_preemptions > 0) == ("max_model_len" in settings)


def test_a_seed_repeats_its_tokens(tmp_path):
    """Random sampling runs there too, and repeats."""
    path = make_checkpoint(tmp_path / "tiny")
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, max_tokens=12, seed=3)

    def run():
        with LLM(str(path), device="cuda", num_kv_blocks=40, progress=False) as llm:
            return llm.generate("abc", params, False)[0].outputs[0].token_ids

    assert run() == run()


def test_close_gives_the_memory_back(tmp_path):
    """Weights, rows and KV cache: all of it, without a restart of the process."""
    path = make_checkpoint(tmp_path / "tiny")
    gc.collect()
    before = torch.cuda.memory_allocated()
    llm = LLM(str(path), device="cuda", num_kv_blocks=4000, progress=False)
    assert torch.cuda.memory_allocated() > before + 2**20
    llm.close()
    gc.collect()
    assert torch.cuda.memory_allocated() == before
