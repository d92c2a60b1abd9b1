"""Paged attention of prompts, chunks of prompts and prefix hits against float64: on a GPU if there
is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
if find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton; Linux only)", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
from paged_batch import PagedBatch, exact_attention, far_memory

from minivllm.gpu.prefill_attention import prefill_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(
    batch: PagedBatch, q: Tensor, query_lens: list[int], scale: float, first_request: int = 0
) -> Tensor:
    """The kernel over all requests from `first_request` on; rows of the others hold 7."""
    merged = torch.full((len(q), q.shape[1] + 3, q.shape[2]), 1e4, device=DEVICE)
    merged[:, : q.shape[1]] = q.to(DEVICE)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(DEVICE)
    out = torch.full(q.shape, 7.0, device=DEVICE)
    prefill_attention(
        merged[:, : q.shape[1]], batch.k_cache.to(DEVICE), batch.v_cache.to(DEVICE),
        batch.table.to(DEVICE), starts, batch.seq_lens.to(DEVICE), max(query_lens), scale, out,
        first_request,
    )  # fmt: skip
    return out.cpu()


def check(batch: PagedBatch, query_lens: list[int], num_heads: int) -> None:
    """All requests of the batch against float64."""
    q, scale = batch.queries(sum(query_lens), num_heads), batch.head_dim**-0.5
    expected = batch.expected(q, query_lens, scale)
    given = run(batch, q, query_lens, scale)
    torch.testing.assert_close(given.double(), expected, atol=2e-5, rtol=0)


SHAPES = [  # query heads, key/value heads, head size, block size
    (2, 2, 64, 16),
    (9, 3, 64, 64),  # 21 tokens of 3 heads in a tile of 64 rows
    (3, 1, 96, 16),
    (4, 2, 128, 32),
    (8, 1, 256, 16),
    (6, 2, 80, 16),
    (71, 1, 16, 1),  # one group is larger than a tile
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_attention_is_exact(shape: tuple[int, int, int, int]) -> None:
    """A prompt with a token over a block, a chunk behind a tile of keys, one token of a prompt:
    all group sizes, head sizes and block sizes."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    batch = PagedBatch([block_size + 1, 70, 19], num_kv_heads, head_dim, block_size)
    check(batch, [block_size + 1, 5, 1], num_heads)


MIXES = {  # key lengths, query lengths
    "whole prompts around a block": ([1, 15, 16, 17], [1, 15, 16, 17]),
    "whole prompts around a tile": ([31, 32, 33, 65], [31, 32, 33, 65]),
    "chunks around a tile of keys": ([63, 64, 65, 128, 129], [2, 3, 4, 5, 6]),
    "all but a prefix found in the cache": ([48, 100], [16, 4]),
    "the last token of a prompt that is in the cache": ([64, 5], [1, 1]),
}


@pytest.mark.parametrize("mix", MIXES)
def test_prefill_attention_is_exact_at_every_border(mix: str) -> None:
    """Two heads share a key: 32 tokens in a tile of queries, 64 in a tile of keys."""
    lens, query_lens = MIXES[mix]
    check(PagedBatch(lens, 1, 16), query_lens, 2)


def test_a_query_sees_nothing_behind_it() -> None:
    """Equal scores: token p gets the mean of the values 0 to p, p / 2."""
    k_cache = torch.zeros(6, 16, 1, 16, device=DEVICE)
    v_cache = torch.arange(96.0, device=DEVICE).view(6, 16, 1, 1).expand(6, 16, 1, 16).contiguous()
    table = torch.arange(6).int()[None].to(DEVICE)
    starts, lens = torch.tensor([0, 90]).int().to(DEVICE), torch.tensor([90]).int().to(DEVICE)
    q, out = torch.ones(90, 1, 16, device=DEVICE), torch.zeros(90, 1, 16, device=DEVICE)
    prefill_attention(q, k_cache, v_cache, table, starts, lens, 90, 1.0, out)
    expected = (torch.arange(90.0) / 2)[:, None, None].expand(90, 1, 16)
    torch.testing.assert_close(out.cpu(), expected, atol=1e-4, rtol=0)


def test_rows_of_earlier_requests_are_left_alone() -> None:
    """Decodes come first, and have a kernel of their own."""
    query_lens = [1, 1, 6, 3]
    batch = PagedBatch([5, 33, 6, 20], 1, 16)
    q = batch.queries(11, 2)
    given = run(batch, q, query_lens, 0.25, first_request=2)
    assert torch.equal(given[:2], torch.full((2, 2, 16), 7.0))
    expected = batch.expected(q, query_lens, 0.25)[2:]
    torch.testing.assert_close(given[2:].double(), expected, atol=2e-5, rtol=0)


def test_what_was_not_written_changes_no_bit() -> None:
    """Slots past a request's length, and blocks without an owner, may hold any finite number."""
    batch = PagedBatch([5, 70, 16], 1, 64)
    q = batch.queries(25, 2)
    before = run(batch, q, [5, 4, 16], 0.125)
    batch.spoil()
    assert torch.equal(run(batch, q, [5, 4, 16], 0.125), before) and before.any()


def test_large_scores_do_not_overflow() -> None:
    """Scores of some hundreds, whose exponentials are beyond float32."""
    batch = PagedBatch([70, 4], 1, 16)
    q = 100 * batch.queries(74, 2)
    expected = batch.expected(q, [70, 4], 1.0)
    given = run(batch, q, [70, 4], 1.0)
    torch.testing.assert_close(given.double(), expected, atol=1e-3, rtol=0)


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu has it, with real memory")
def test_keys_past_two_to_the_31_numbers_are_found(tmp_path: Path) -> None:
    """Heads of 64 numbers in blocks of 16: block 2^21 + 1 lies behind number 2^31."""
    (k_near, k_far), (v_near, v_far) = (
        far_memory(tmp_path / name, 3 * 1024, torch.float32) for name in "kv"
    )
    make = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(n, 1, 64, generator=make) for n in (20, 20, 6))
    # Positions 0 to 15 in block 2^21 + 1, the others in block 1.
    for near, far, values in ((k_near, k_far, k), (v_near, v_far, v)):
        far[1024:2048], near[1024 : 1024 + 4 * 64] = values[:16].flatten(), values[16:].flatten()
    caches = (near.view(3, 16, 1, 64) for near in (k_near, v_near))
    table = torch.tensor([[2**21 + 1, 1]], dtype=torch.int32)
    starts, lens = torch.tensor([[0, 6]]).int()[0], torch.tensor([20]).int()
    out = torch.empty_like(q)
    prefill_attention(q, *caches, table, starts, lens, 6, 0.125, out)
    torch.testing.assert_close(out.double(), exact_attention(q, k, v, 0.125), atol=2e-5, rtol=0)
