"""The library flash-attn itself behind our adapter; without it, these are skipped.

pytest tests/gpu/test_flash_attention_gpu.py
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported: for other tests

sys.path.insert(0, str(Path(__file__).parents[1]))
from paged_batch import PagedBatch
from tiny_checkpoint import make_checkpoint

from minivllm import LLM, SamplingParams
from minivllm.gpu import flash_attention
from minivllm.gpu.flash_attention import PAGE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(find_spec("flash_attn") is None, reason="flash-attn is not installed"),
]

MIXES = {  # key lengths, query lengths, number of decodes
    "decodes": ([255, 256, 257, 1, 3000], [1, 1, 1, 1, 1], 5),
    "whole prompts": ([3, 257, 900], [3, 257, 900], 0),
    "chunks and prefix hits": ([300, 513, 20], [7, 1, 19], 0),
    "decodes and prompts": ([5, 256, 40, 300], [1, 1, 40, 44], 2),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (16, 8), (4, 4)])
def test_it_gives_the_attention_of_the_paged_cache(mix, head_dim, num_heads, num_kv_heads):
    """In bfloat16, compared with the exact answer."""
    lens, query_lens, num_decodes = MIXES[mix]
    kind = {"block_size": PAGE, "dtype": torch.bfloat16, "device": "cuda"}
    batch = PagedBatch(lens, num_kv_heads, head_dim, **kind)
    q, scale = batch.queries(sum(query_lens), num_heads), head_dim**-0.5
    metadata = batch.metadata(query_lens, num_decodes)
    given = flash_attention.attention(q, batch.k_cache, batch.v_cache, metadata, scale)
    expected = batch.expected(q, query_lens, scale)
    torch.testing.assert_close(given.double(), expected, atol=2e-2, rtol=0)


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_an_engine_runs_on_it(tmp_path, enforce_eager):
    """It is chosen by itself where it fits; the log-probabilities of each first token are those
    of our own kernels within bfloat16, and so are most tokens."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
    path = make_checkpoint(tmp_path, **sizes, max_position_embeddings=1024)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    prompts = [[1, 2, 3], [5] * 300, list(range(200)), [9] * 40]
    found = {}
    for backend in ("auto", "triton"):
        settings = {"attention_backend": backend, "enforce_eager": enforce_eager}
        sizes = {"block_size": PAGE, "num_kv_blocks": 16, "max_num_seqs": 4}
        with LLM(str(path), dtype="bfloat16", progress=False, **settings, **sizes) as llm:
            assert llm.config.attention_backend == (
                "triton" if backend == "triton" else "flash_attn"
            )
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found[backend] = [output.outputs[0] for output in outputs]
    for ours, theirs in zip(found["triton"], found["auto"], strict=True):
        assert ours.token_ids[0] == theirs.token_ids[0]
        (a,), (b,) = ours.logprobs[0].values(), theirs.logprobs[0].values()
        assert abs(a.logprob - b.logprob) < 0.1
