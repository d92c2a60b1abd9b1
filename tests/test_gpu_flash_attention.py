"""What is handed to flash-attn, with a stand-in that computes attention from its arguments; and
when the library can be used."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from paged_batch import PagedBatch, exact_attention

from minivllm import ops
from minivllm.gpu import flash_attention
from minivllm.gpu.flash_attention import PAGE, why_not

# -- a stand-in for the library --


def check_cache(k: Tensor, v: Tensor, block_table: Tensor) -> None:
    """What the library demands of a paged cache."""
    assert k.dim() == 4 and k.shape == v.shape and k.shape[1] % 256 == 0
    assert block_table.dtype == torch.int32 and block_table.is_contiguous()
    assert k.stride(-1) == v.stride(-1) == block_table.stride(-1) == 1


def one_request(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor, num_keys: int, scale: float
) -> Tensor:
    """Causal attention, aligned at the last query and the last key."""
    assert num_keys <= len(row) * k.shape[1]
    k, v = (x[row.long()].flatten(0, 1)[:num_keys] for x in (k, v))
    return exact_attention(q, k, v, scale).to(q.dtype)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """`q [N, L, H, D]`, all requests with as many new tokens; `cache_seqlens [N]` count them."""
    check_cache(k_cache, v_cache, block_table)
    assert k is None and v is None, "the keys are in the cache already"
    assert causal and cache_seqlens.dtype == torch.int32 and len(cache_seqlens) == len(q)
    rows = zip(q, block_table, cache_seqlens.tolist(), strict=True)
    return torch.stack(
        [one_request(x, k_cache, v_cache, row, n, softmax_scale) for x, row, n in rows]
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    block_table: Tensor,
) -> Tensor:
    """`q [T, H, D]` of all requests one after the other; where they begin, and their keys."""
    check_cache(k, v, block_table)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert dropout_p == 0 and causal and softmax_scale is not None
    query_lens, key_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0 and cu_seqlens_q[-1] == len(q)
    assert isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int)
    assert max(query_lens) <= max_seqlen_q and max(key_lens) <= max_seqlen_k
    rows = zip(q.split(query_lens), block_table, key_lens, strict=True)
    return torch.cat([one_request(x, k, v, row, n, softmax_scale) for x, row, n in rows])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of that name, whether or not it is installed."""
    module: Any = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", loader=None)
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)


# -- the arguments --

MIXES = {  # key lengths, query lengths, number of decodes
    "decodes": ([255, 256, 257, 1], [1, 1, 1, 1], 4),
    "whole prompts": ([3, 257], [3, 257], 0),
    "chunks and prefix hits": ([300, 513, 20], [7, 1, 19], 0),
    "decodes and prompts": ([5, 256, 40, 300], [1, 1, 40, 44], 2),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.usefixtures("stand_in")
def test_the_arguments_describe_the_same_attention(mix: str) -> None:
    """Whatever the step is made of: the stand-in's answer is that of `ops.attention`."""
    lens, query_lens, num_decodes = MIXES[mix]
    batch = PagedBatch(lens, 2, 16, block_size=PAGE)
    q, metadata = batch.queries(sum(query_lens), 6), batch.metadata(query_lens, num_decodes)
    expected = ops.attention(q, batch.k_cache, batch.v_cache, metadata, 0.3)
    given = flash_attention.attention(q, batch.k_cache, batch.v_cache, metadata, 0.3)
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("stand_in")
def test_the_lengths_known_on_the_host_may_be_larger() -> None:
    """As in a captured step, which is made for the longest."""
    batch = PagedBatch([5, 7], 1, 16, block_size=PAGE)
    for query_lens, num_decodes in (([1, 1], 2), ([2, 3], 0)):
        q, metadata = batch.queries(sum(query_lens), 2), batch.metadata(query_lens, num_decodes)
        expected = flash_attention.attention(q, batch.k_cache, batch.v_cache, metadata, 0.3)
        metadata.max_query_len, metadata.max_seq_len = 9, 400
        given = flash_attention.attention(q, batch.k_cache, batch.v_cache, metadata, 0.3)
        assert torch.equal(given, expected)


# -- when it can be used --


@pytest.mark.usefixtures("stand_in")
def test_nothing_speaks_against_what_the_library_can_do() -> None:
    """Pages of 256, heads up to 256, bfloat16 and float16."""
    assert why_not(256, 128, torch.bfloat16) is None
    assert why_not(256, 256, torch.float16) is None
    assert why_not(256, 8, torch.bfloat16) is None


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((16, 128, torch.bfloat16), "block_size=16 must be 256"),
        ((256, 20, torch.bfloat16), "head_dim=20 must be a multiple of 8 and at most 256"),
        ((256, 264, torch.bfloat16), "head_dim=264 must be a multiple of 8 and at most 256"),
        ((256, 128, torch.float32), "dtype=float32 must be bfloat16 or float16"),
    ],
)
def test_the_reason_names_the_value_and_the_limit(
    settings: tuple[int, int, torch.dtype], message: str
) -> None:
    """One sentence that says what to change."""
    assert message in str(why_not(*settings))


def test_without_the_library_the_reason_is_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the settings are."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install flash-attn" in str(why_not(256, 128, torch.bfloat16))
