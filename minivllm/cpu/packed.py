"""Weights laid out for a CPU: `pack` changes a loaded model so that its products are fast.

A step of a few tokens is as slow as memory. Where the checkpoint brings a weight as 4-bit or 8-bit
codes (`model.Codes`), the weights are computed from them: a fifth of the bytes, and nothing is
rounded. Does not quantize. Not built in the course. Sources: the groups are those of llama.cpp's
Q4_1; that the model is finished first and changed then is gpt-fast's way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.cpu.ops import (  # type: ignore[attr-defined] # `cpu_kernels` is None without numba
    cpu_kernels,
    has_kernels,
    num_threads,
    warm_up,
)
from minivllm.model import GROUP, MLP, CausalLM, Codes, Embedding, Linear

FEW_ROWS = 32  # float32: with more rows than this, torch's product of unpacked weights is faster
INT4_ROWS = 8  # bfloat16: with more rows than this, the matrix units are faster than 4-bit codes


def pack(model: CausalLM) -> CausalLM:
    """Replace the model's products by packed ones, in place; returns the model.

    A tied model gets an `lm_head` of its own: the packed embedding, whose table stays as it is.
    A product that would not get faster (another device or type, no codes, no bfloat16 units) is
    left alone.
    """
    embedding = model.model.embed_tokens
    if not has_kernels(embedding.weight):
        return model
    warm_up(embedding.weight.dtype)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                setattr(module, name, packed(child, child.bias) or child)
    layers: Any = model.model.layers
    for layer in layers:
        products = (layer.mlp.gate_up_proj, layer.mlp.down_proj)
        if all(isinstance(part, PackedLinear) and part.bias is None for part in products):
            layer.mlp = PackedMLP(layer.mlp)
    if model.lm_head is None:
        # Called like the Linear of a model with a head of its own.
        model.lm_head = packed(embedding, None)  # type: ignore[assignment]
    return model


def packed(part: Linear | Embedding, bias: Tensor | None) -> nn.Module | None:
    """The product by the weight of `part` that is fastest here; None: the plain one."""
    if part.weight.dtype == torch.bfloat16:
        return Bfloat16Linear(part.weight, bias, part.codes) if cpu_has_bfloat16() else None
    return None if part.codes is None else PackedLinear(part.codes, bias)


def weight_bytes(model: CausalLM) -> int:
    """Return the bytes of weights that a step of few tokens reads, packed ones at their packed
    size. An embedding that isn't also the output layer counts as 0: each token reads one row."""
    head: Any = model.model.embed_tokens if model.lm_head is None else model.lm_head
    parts: list[Any] = [*model.model.layers.modules(), model.model.norm, head]
    return sum(x.nbytes for part in parts for x in getattr(part, "few", part.parameters(False)))


class PackedLinear(nn.Module):
    """`x [T, in] -> [T, out]` like `model.Linear`, in float32 with numba's kernels.

    The last bits of a row's result depend on the number of rows: for one row, a few and many,
    sums are taken in different orders.
    """

    def __init__(self, codes: Codes, bias: Tensor | None) -> None:
        super().__init__()
        self.out_size = len(codes.codes)
        self.bias = bias
        self.codes = lay_out(codes.codes)
        self.scales = lay_out(codes.scales)
        self.few = [self.codes, self.scales]  # what a product of few rows reads
        self.arrays = (self.codes.numpy(), self.scales.numpy())

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`."""
        num_rows = x.shape[0]
        if num_rows > FEW_ROWS:
            # Unpacking costs less than a hundredth of such a product.
            out = torch.mm(x, self.unpacked())[:, : self.out_size]
        else:
            out = torch.empty(num_rows, self.out_size)
            one_row = num_rows == 1
            kernel = cpu_kernels.packed_vector_product if one_row else cpu_kernels.packed_product
            kernel(x.contiguous().numpy(), *self.arrays, out.numpy(), num_threads())
        return out if self.bias is None else out.add_(self.bias)

    def unpacked(self) -> Tensor:
        """All weights, transposed: float32 `[in, out]`, with more columns of zeros behind it."""
        num_tiles, num_groups = self.codes.shape[:2]
        weight = torch.empty(num_groups * GROUP, num_tiles * cpu_kernels.LANES)
        num_threads()
        cpu_kernels.unpack(*self.arrays, weight.view(-1).numpy())
        return weight


class PackedMLP(nn.Module):
    """`model.MLP` with packed products and no bias: for few rows one call instead of three."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.mlp = mlp
        products: Any = (mlp.gate_up_proj, mlp.down_proj)
        self.arrays = [array for product in products for array in product.arrays]

    def forward(self, x: Tensor) -> Tensor:
        """`x [T, hidden] -> [T, hidden]`."""
        if x.shape[0] > FEW_ROWS:
            return self.mlp.forward(x)
        out = torch.empty_like(x)
        cpu_kernels.packed_mlp(x.numpy(), *self.arrays, out.numpy(), num_threads())
        return out


def lay_out(rows: Tensor) -> Tensor:
    """Rows of codes or scales `[m, groups, k]` in tiles of LANES rows, side by side:
    `[tiles, groups, k * LANES]`; rows of zeros behind the last."""
    lanes = cpu_kernels.LANES
    rows = F.pad(rows, (0, 0, 0, 0, 0, -len(rows) % lanes))
    return rows.unflatten(0, (-1, lanes)).permute(0, 2, 3, 1).flatten(2)


class Bfloat16Linear(nn.Module):
    """`x [T, in] -> [T, out]` like `model.Linear`, in bfloat16 with torch's own kernels for
    weights laid out beforehand; with few rows from 4-bit codes, where there are some.

    The operations are private ones of torch: where one is missing or refuses, `F.linear` stays.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, codes: Codes | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.prepacked = prepack(weight)
        self.int4 = None if codes is None else to_int4(codes)
        self.few = [weight] if self.int4 is None else list(self.int4)  # as in `PackedLinear`

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`."""
        if self.int4 is not None and x.shape[0] <= INT4_ROWS:
            codes, scales = self.int4
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), codes, GROUP, scales)
            return out if self.bias is None else out.add_(self.bias)
        if self.prepacked is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.prepacked, self.bias, "none", [], "")


# -- torch's private parts ---------------------------------------------------------------------


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AVX-512 BF16 or AMX)."""
    # Not every PyTorch that we support has these probes; without them, no is the safe answer.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)


def prepack(weight: Tensor) -> Tensor | None:
    """The weight in the order in which oneDNN reads it, or None where torch cannot do that."""
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    except (AttributeError, RuntimeError):
        return None


def to_int4(codes: Codes) -> tuple[Tensor, Tensor] | None:
    """Codes and scales for torch's int4 product, whose weight is (code - 8) * scale + zero, scale
    and zero bfloat16; None for codes of 8 bits, and where torch has no such product."""
    if codes.bits != 4:
        return None
    numbers = torch.cat((codes.codes & 15, codes.codes >> 4), dim=-1).flatten(1).int()
    scale, minimum = codes.scales.unbind(-1)
    scales = torch.stack((scale, minimum + 8 * scale), dim=-1).transpose(0, 1)
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    except (AttributeError, RuntimeError):
        return None
    return packed, scales.bfloat16().contiguous()
