"""The operations of `gpu.ops`, with the attention of the library flash-attn, which reads the
paged cache in place. Not built in the course.

The library reads pages of 256 tokens and multiples, in bfloat16 and float16: `why_not` says
whether the settings suit it. Source: Dao 2023, "FlashAttention-2", arXiv 2307.08691.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.gpu.ops import (
    add_rms_norm,
    embed,
    linear,
    norm_rope,
    rms_norm,
    rope_table,
    silu_mul,
    slot_mapping,
    store_kv,
)
from minivllm.ops import AttentionMetadata

__all__ = [
    "add_rms_norm",
    "attention",
    "embed",
    "linear",
    "norm_rope",
    "rms_norm",
    "rope_table",
    "silu_mul",
    "slot_mapping",
    "store_kv",
]

PAGE = 256  # tokens; a block must be a multiple of it
MAX_HEAD_DIM = 256


def why_not(block_size: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why flash-attn cannot be used with these settings, or None if it can."""
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (pip install flash-attn, which compiles for a while)"
    if block_size % PAGE:
        return f"block_size={block_size} must be {PAGE}"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"the model's head_dim={head_dim} must be a multiple of 8 and at most {MAX_HEAD_DIM}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype={str(dtype).removeprefix('torch.')} must be bfloat16 or float16"
    return None


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """See `ops.attention`."""
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    if metadata.is_decode:
        return flash_attn_with_kvcache(
            q.unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=metadata.seq_lens,
            block_table=metadata.block_table,
            softmax_scale=scale,
            causal=True,
        ).squeeze(1)
    return flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=metadata.query_starts,
        cu_seqlens_k=F.pad(metadata.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=metadata.max_query_len,
        max_seqlen_k=metadata.max_seq_len,
        softmax_scale=scale,
        causal=True,
        block_table=metadata.block_table,
    )
