"""The operations of a GPU put together, against their twins: on a GPU if there is one, else in
Triton's interpreter."""

from __future__ import annotations

import inspect
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
if find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton; Linux only)", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
from paged_batch import PagedBatch

from minivllm import ops
from minivllm.gpu import ops as gpu_ops
from minivllm.model import Ops
from minivllm.model_runner import RunnerOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_the_module_offers_every_operation_of_a_step() -> None:
    """What the model and the runner call, with the parameters of `ops` under the same names."""
    names = {name for name in vars(Ops) if not name.startswith("_")} | {*RunnerOps.__annotations__}
    assert sorted(names) == sorted(gpu_ops.__all__)
    for name in names:
        given, plain = (inspect.signature(getattr(m, name)).parameters for m in (gpu_ops, ops))
        assert [*given] == [*plain], name


MIXES = {  # key lengths, query lengths, number of decodes
    "decodes": ([15, 16, 17, 1], [1] * 4, 4),
    "whole prompts": ([15, 16, 17, 1], [15, 16, 17, 1], 0),
    "chunks and prefix hits": ([40, 70, 33], [7, 6, 1], 0),
    "decodes, a prompt, a chunk, a last token": (
        [5, 70, 9, 50, 16],
        [1, 1, 9, 5, 1],
        2,
    ),
}


@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 1, 20)], ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_attention_of_any_mixture_is_exact(mix: str, heads: tuple[int, int, int]) -> None:
    """Two layers of one step: how the keys are split is found out once and kept."""
    lens, query_lens, num_decodes = MIXES[mix]
    num_heads, num_kv_heads, head_dim = heads
    metadata, splits = None, []
    for layer in range(2):
        batch = PagedBatch(lens, num_kv_heads, head_dim, seed=layer)
        q, table = batch.queries(sum(query_lens), num_heads), batch.table
        metadata = metadata or on_device(batch, query_lens, num_decodes)
        metadata.block_table.copy_(table)
        caches = batch.k_cache.to(DEVICE), batch.v_cache.to(DEVICE)
        given = gpu_ops.attention(q.to(DEVICE), *caches, metadata, 0.2)
        expected = batch.expected(q, query_lens, 0.2)
        torch.testing.assert_close(given.cpu().double(), expected, atol=2e-5, rtol=0)
        splits.append(metadata.split)
    assert splits[0] is splits[1] and (splits[0] is not None) == (num_decodes > 0)


def on_device(batch: PagedBatch, query_lens: list[int], num_decodes: int) -> ops.AttentionMetadata:
    """The metadata with its tensors on the device."""
    metadata = batch.metadata(query_lens, num_decodes)
    return ops.AttentionMetadata(
        metadata.block_table.to(DEVICE),
        metadata.query_starts.to(DEVICE),
        metadata.seq_lens.to(DEVICE),
        num_decodes,
        metadata.max_query_len,
        metadata.max_seq_len,
    )


def test_the_lengths_known_on_the_host_may_be_larger() -> None:
    """As in a captured step, which is made for the longest: the same bits."""
    batch = PagedBatch([5, 40, 33], 1, 16)
    for query_lens, num_decodes in (([1, 1, 1], 3), ([1, 4, 33], 1)):
        q = batch.queries(sum(query_lens), 2).to(DEVICE)
        metadata = on_device(batch, query_lens, num_decodes)
        caches = batch.k_cache.to(DEVICE), batch.v_cache.to(DEVICE)
        expected = gpu_ops.attention(q, *caches, metadata, 0.3)
        metadata.max_query_len, metadata.max_seq_len = 100, 128
        assert torch.equal(gpu_ops.attention(q, *caches, metadata, 0.3), expected)
        assert expected.any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="only the interpreter is wrong")
def test_the_interpreter_refuses_bfloat16() -> None:
    """Every launcher that computes; storing keys and values moves bits and is right."""
    x, angles = torch.ones(2, 1, 16, dtype=torch.bfloat16), torch.ones(2, 8)
    row, batch = x[:, 0], PagedBatch([1, 2], 1, 16)
    caches = (batch.k_cache.bfloat16(), batch.v_cache.bfloat16())
    calls = (
        lambda: gpu_ops.rms_norm(row, row[0], 1e-5),
        lambda: gpu_ops.add_rms_norm(row, row, row[0], 1e-5),
        lambda: gpu_ops.silu_mul(row),
        lambda: gpu_ops.norm_rope(x, x, None, None, angles, angles, 1e-5),
        lambda: gpu_ops.attention(x, *caches, on_device(batch, [1, 1], 2), 0.3),
        lambda: gpu_ops.attention(x, *caches, on_device(batch, [1, 1], 0), 0.3),
    )
    for call in calls:
        with pytest.raises(ValueError, match="computes bfloat16 wrongly; use float32"):
            call()
