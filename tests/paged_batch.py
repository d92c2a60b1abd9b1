"""Requests in a paged cache with known keys and values, and their attention in float64."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minivllm.ops import AttentionMetadata

# What unwritten slots hold: a result that read one is far off.
GARBAGE = 1e4


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The newest `len(q)` tokens of one request over all its tokens so far, in float64.

    `q [L, H, D]`, `k, v [S, K, D]` -> `[L, H, D]`; query i is position S - L + i.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("lhd,shd->hls", q, k) * scale
    positions = torch.arange(len(k), device=k.device)
    hidden = positions > positions[len(k) - len(q) :, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hls,shd->lhd", weights, v)


class PagedBatch:
    """Requests of given lengths in scrambled blocks; garbage in every other slot.

    `k[n], v[n] [lens[n], K, D]` are what the caches hold of request n. Keys are normal, values
    uniform in [-1, 1]: so is every right answer.
    """

    def __init__(
        self,
        lens: list[int],
        num_kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        make = torch.Generator(device).manual_seed(seed)
        self.lens, self.num_kv_heads, self.head_dim, self.make = lens, num_kv_heads, head_dim, make
        width = max(lens) // block_size + 2
        needed = [-(-length // block_size) for length in lens]
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks, generator=make, device=device).int()
        # Entries behind the needed ones are valid ids of other requests' blocks.
        self.table = torch.randint(
            num_blocks, (len(lens), width), generator=make, device=device, dtype=torch.int32
        )
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.k_cache = torch.full(shape, GARBAGE, dtype=dtype, device=device)
        self.v_cache = -self.k_cache
        self.written = torch.zeros(shape[:2], dtype=torch.bool, device=device)
        self.k, self.v = [], []
        for n, length in enumerate(lens):
            self.table[n, : needed[n]], order = order[: needed[n]], order[needed[n] :]
            self.k.append(self.randn(length, num_kv_heads, head_dim))
            self.v.append(self.rand(length, num_kv_heads, head_dim))
            self._write(n, block_size)

    def _write(self, n: int, block_size: int) -> None:
        places = torch.arange(self.lens[n], device=self.table.device)
        blocks, offsets = self.table[n, places // block_size].long(), places % block_size
        self.k_cache[blocks, offsets], self.v_cache[blocks, offsets] = self.k[n], self.v[n]
        self.written[blocks, offsets] = True

    def randn(self, *shape: int) -> Tensor:
        """Normal numbers in the dtype of the caches."""
        cache = self.k_cache
        return torch.randn(shape, generator=self.make, device=cache.device).to(cache.dtype)

    def rand(self, *shape: int) -> Tensor:
        """Numbers from -1 to 1 in the dtype of the caches."""
        cache = self.k_cache
        return (2 * torch.rand(shape, generator=self.make, device=cache.device) - 1).to(cache.dtype)

    def queries(self, num_tokens: int, num_heads: int) -> Tensor:
        """`[T, H, D]` as the model has them: a view into merged rows of queries, keys, values."""
        merged = self.randn(num_tokens, num_heads + 2 * self.num_kv_heads, self.head_dim)
        return merged[:, :num_heads]

    @property
    def seq_lens(self) -> Tensor:
        """`lens` as the kernels read them."""
        return torch.tensor(self.lens, dtype=torch.int32, device=self.table.device)

    def metadata(self, query_lens: list[int], num_decodes: int) -> AttentionMetadata:
        """A step with the newest `query_lens[n]` tokens of each request."""
        starts = torch.tensor([0, *query_lens], device=self.table.device).cumsum(0).int()
        return AttentionMetadata(
            self.table, starts, self.seq_lens, num_decodes, max(query_lens), max(self.lens)
        )

    def expected(self, q: Tensor, query_lens: list[int], scale: float) -> Tensor:
        """Attention of each request by itself, in float64."""
        parts = q.split(query_lens)
        rows = zip(parts, self.k, self.v, strict=True)
        return torch.cat([exact_attention(part, k, v, scale) for part, k, v in rows])

    def spoil(self) -> None:
        """Put other garbage into every slot that was not written."""
        self.k_cache[~self.written], self.v_cache[~self.written] = -GARBAGE, 3 * GARBAGE


def far_memory(path: Path, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Zeros around number 2^31 of a tensor that no machine has to hold: `near`, `far`.

    `near` is where a cache begins; `far`, `count` numbers, is what a kernel finds 2^31 numbers
    behind it. They are in a file with holes, which takes no room where nothing was written. What
    lies 2^31 numbers before `near` belongs to the file as well: a kernel whose 32-bit offset wraps
    around is wrong there, and does no harm.
    """
    size = dtype.itemsize * 2**31
    try:
        with path.open("w+b") as file:
            file.truncate(2 * size + count * dtype.itemsize)
            memory = mmap.mmap(file.fileno(), 0)
    except OSError as error:
        pytest.skip(f"this file system holds no large file with holes: {error}")
    finally:
        path.unlink(missing_ok=True)
    near = torch.frombuffer(memory, dtype=dtype, count=count, offset=size)
    return near, torch.frombuffer(memory, dtype=dtype, count=count, offset=2 * size)
