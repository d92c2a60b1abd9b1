"""The tensor operations of a decoder in plain PyTorch: they run everywhere, and they are the
oracle that the faster kernels of the same names and signatures are tested against.

Does not handle fusion or anything that only one kind of device can do (see `cpu` and `gpu`).
Notebook 05 builds `rms_norm`, `silu_mul`, `apply_rope` and `prefill_attention`, notebook 06
`slot_mapping` and `decode_attention`. Notebook 07 writes kernels to the signatures.

Tensor letters: T tokens, N requests, H query heads, K key/value heads, G = H // K query heads
per key/value head, D head dimension, I MLP width, B block size, S key positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.model_config import RopeConfig

# -- layers --


def embed(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Look up one row of `weight [V, hidden]` for each id of `input_ids [T]`."""
    return F.embedding(input_ids, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [T, in] @ weight[out, in].T + bias[out]` -> `[T, out]`."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / sqrt(mean(x²) + eps), for each vector along the last axis.

    `x [..., n]`, `weight [n]` -> the shape and dtype of `x`, which is unchanged. Normalised in
    float32, then rounded to the dtype of `x`, then multiplied by `weight`, as in Llama.
    Example with weight 1 and eps 0: [3, 4] -> [0.85, 1.13].
    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum `x + y` `[T, n]`, and its `rms_norm`: two results that a kernel has at once."""
    total = x + y
    return total, rms_norm(total, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, the gate of SwiGLU, where silu(g) = g / (1 + e^-g).

    `gate_up [T, 2I]`, unchanged: the gates are the first half of each row, the ups the second ->
    `[T, I]` in the same dtype. Finite for any gate. Example: [[0, 2, 5, 3]] -> [[0, 5.28]].
    Source: Shazeer 2020, arXiv 2002.05202.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


# -- rotary position embedding --


def rope_table(rope: RopeConfig, head_dim: int, max_len: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle for positions 0 .. max_len-1: two float32 `[max_len, D/2]`.

    Pair i of a head turns by `position * frequency[i]`. Example for head_dim 4, theta 10000:
    frequencies [1, 0.01], so position 3 has the angles [3, 0.03].
    """
    angles = torch.outer(torch.arange(max_len).float(), rope_frequencies(rope, head_dim))
    return angles.cos(), angles.sin()


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """How far each pair turns per position, in radians: float32 `[D/2]`, with the scaling.

    "default" is theta^(-2i/D); "linear" divides all by `factor`; "llama3" divides slow pairs
    only. Source: Su et al. 2021, arXiv 2104.09864; Chen et al. 2023, arXiv 2306.15595.
    """
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _stretch_slow_pairs(frequencies, rope)
    raise ValueError(f"rope.kind={rope.kind!r} must be one of default, linear, llama3")


def _stretch_slow_pairs(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    # Llama 3.1: pairs that turn `high_freq_factor` times or more within the original context
    # know all their angles and stay; those with `low_freq_factor` turns or fewer are slowed
    # down by `factor`; those between are a mixture of both.
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads `x [T, H, D]` by the angles of their tokens, `cos, sin [T, D/2]` float32.

    Elements i and i + D/2 of a head (not 2i and 2i + 1) are a pair; angle i rotates (a, b) to
    (a cos - b sin, b cos + a sin). Computed in float32; returns the shape and dtype of `x`, which
    is unchanged. Example: D 4, angles 90 and 0 degrees: [1, 2, 3, 4] -> [-3, 2, 1, 4].
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, D/2]: the same for every head
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of each head where there are weights `[D]` (Qwen3), then `apply_rope`.

    `q [T, H, D]`, `k [T, K, D]`, `cos, sin [T, D/2]` -> both turned, in the same shapes.
    """
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin)


# -- paged key/value cache --


def slot_mapping(
    block_tables: Tensor, owners: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    """Return the slot in the cache for each token's key and value: int64 `[T]`.

    Token t is position `positions[t]` of the request in row `owners[t]` of `block_tables
    [N, max_blocks]` (int32 block ids; the other two int64 `[T]`). The slots of block b start at
    b * `block_size`; they may exceed int32. The host reads nothing.
    Example: block size 16, row [7, 3]: position 17 is in block 3, slot 49.
    """
    blocks = block_tables[owners, positions // block_size].long()
    return blocks * block_size + positions % block_size


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `k, v [T, K, D]` into the slots `slot_mapping [T]` of the caches, in place.

    The caches are `[num_blocks, B, K, D]`; slots are distinct and none is negative.
    """
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


# -- attention over the paged cache --


@dataclass
class AttentionMetadata:
    """Whose queries and keys are where, for the T tokens of N requests in one step.

    Request n's queries are tokens `query_starts[n]` to `query_starts[n + 1]`; its keys, those
    of the new tokens included, are the first `seq_lens[n]` positions of the blocks in
    `block_table[n]`, whose further entries may be any valid id.
    """

    block_table: Tensor  # [N, max_blocks] int32
    query_starts: Tensor  # [N + 1] int32
    seq_lens: Tensor  # [N] int32
    num_decodes: int  # the first requests, with one token each
    # Known on the host, so that no kernel waits for the device; both may be larger than needed.
    max_query_len: int
    max_seq_len: int
    # How the decodes' keys are split, for kernels that plan it: made in the first layer that needs
    # it (`gpu.ops.attention`), then the same in all.
    split: object | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every request has one new token."""
        return self.num_decodes == len(self.seq_lens)


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """Each query attends to the keys of its own request up to its own position.

    `q [T, H, D]` holds the new tokens of all requests one after the other; the caches
    `[num_blocks, B, K, D]` hold their keys and values already. Scores are multiplied by
    `scale`. Returns `[T, H, D]`. Source: Kwon et al. 2023, arXiv 2309.06180.
    """
    return attend_with(decode_attention, prefill_attention, q, k_cache, v_cache, metadata, scale)


def attend_with(
    decode: Callable[..., Tensor],
    prefill: Callable[..., Tensor],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> Tensor:
    """`attention`: all requests with one token by one call of `decode`, the others one by one by
    `prefill`, functions like `decode_attention` and `prefill_attention`."""
    num_decodes, table, seq_lens = metadata.num_decodes, metadata.block_table, metadata.seq_lens
    longest = metadata.max_seq_len
    if metadata.is_decode:
        return decode(q, k_cache, v_cache, table, seq_lens, longest, scale)
    out = torch.empty_like(q)
    if num_decodes > 0:
        first = slice(num_decodes)
        out[first] = decode(
            q[first], k_cache, v_cache, table[first], seq_lens[first], longest, scale
        )
    starts = metadata.query_starts.tolist()
    lens = seq_lens.tolist()
    for n in range(num_decodes, len(lens)):
        rows = slice(starts[n], starts[n + 1])
        k = gather_blocks(k_cache, table[n : n + 1], lens[n])[0]
        v = gather_blocks(v_cache, table[n : n + 1], lens[n])[0]
        out[rows] = prefill(q[rows], k, v, scale)
    return out


def gather_blocks(cache: Tensor, block_table: Tensor, num_tokens: int) -> Tensor:
    """The first `num_tokens` positions of each request, in order: `[N, num_tokens, K, D]`.

    `cache [num_blocks, B, K, D]`, `block_table [N, max_blocks]`. Example: block size 2, row
    [5, 1], 3 tokens: both slots of block 5, then the first of block 1.
    """
    block_size, num_heads, head_dim = cache.shape[1:]
    num_blocks = -(-num_tokens // block_size)
    block_ids = block_table[:, :num_blocks].flatten()
    # Whole blocks are long rows of memory: much faster than picking single slots.
    blocks = cache.index_select(0, block_ids)
    return blocks.view(-1, num_blocks * block_size, num_heads, head_dim)[:, :num_tokens]


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
) -> Tensor:
    """Compute attention of one query per request: `q [N, H, D]` -> `[N, H, D]`, in its dtype.

    The caches are `[num_blocks, B, K, D]`. Request n sees the first `seq_lens[n]` positions of the
    blocks `block_table[n]`; slots behind them hold any finite numbers. `max_seq_len` is at least
    the largest of `seq_lens [N]`. Heads and scores as in `prefill_attention`. The host reads
    nothing. Example: D 1, scale 1, query [1], keys 0 and ln 3, values 8 and 4 -> [5]; with sequence
    length 1 -> [8]. Source: Kwon et al. 2023, arXiv 2309.06180.
    """
    k = gather_blocks(k_cache, block_table, max_seq_len).transpose(1, 2)  # [N, K, S, D]
    v = gather_blocks(v_cache, block_table, max_seq_len).transpose(1, 2)
    seen = torch.arange(max_seq_len, device=q.device) < seq_lens[:, None]  # [N, S]
    # The G query heads of a group share their keys: as if they were G queries of one head.
    grouped = q.unflatten(1, (k.shape[1], -1))  # [N, K, G, D]
    out = F.scaled_dot_product_attention(grouped, k, v, seen[:, None, None], scale=scale)
    return out.flatten(1, 2)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute attention of the newest L tokens of a request to all its S tokens: `[L, H, D]`.

    `q [L, H, D]`, `k, v [S, K, D]`, L <= S, all unchanged. Query i is position S - L + i and sees
    no later positions. Query head h reads key/value head h // (H / K). The weights of the values
    are the softmax of query . key * `scale`. The dtype of `q` is returned.
    Example: one query, two keys with equal scores, values 2 and 4 -> 3.
    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.
    """
    num_queries, num_keys = len(q), len(k)
    positions = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    seen = torch.arange(num_keys, device=q.device) <= positions[:, None]  # [L, S]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # heads first: [1, H, L, D]
    out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
