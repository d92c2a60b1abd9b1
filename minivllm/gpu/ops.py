"""The operations of `ops` for a GPU: the same names and signatures, with Triton's kernels, and
PyTorch's products (the vendor's library is hard to beat). Not built in the course.

Tensor letters as in `ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.decode_attention import Plan, decode_attention
from minivllm.gpu.prefill_attention import prefill_attention
from minivllm.kernels import (
    add_rms_norm,
    norm_rope,
    rms_norm,
    silu_mul,
    slot_mapping,
    store_kv,
)
from minivllm.ops import AttentionMetadata, embed, linear, rope_table

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


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """See `ops.attention`."""
    num_decodes, table, seq_lens = metadata.num_decodes, metadata.block_table, metadata.seq_lens
    decodes = slice(num_decodes)
    if num_decodes > 0:
        plan = metadata.split
        if not isinstance(plan, Plan):
            plan = metadata.split = Plan(seq_lens[decodes])
        decoded = decode_attention(
            q[decodes], k_cache, v_cache, table[decodes], seq_lens[decodes],
            metadata.max_seq_len, scale, plan,
        )  # fmt: skip
        if metadata.is_decode:
            return decoded
    out = torch.empty_like(q)
    prefill_attention(
        q, k_cache, v_cache, table, metadata.query_starts, seq_lens, metadata.max_query_len,
        scale, out, first_request=num_decodes,
    )  # fmt: skip
    if num_decodes > 0:
        out[decodes] = decoded
    return out
