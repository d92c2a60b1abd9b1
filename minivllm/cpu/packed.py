"""Weights laid out for a CPU: `pack` changes a loaded model so that its products are fast.

A step of a few tokens reads every weight once and multiplies it a few times: on a CPU it is as
slow as memory. Many checkpoints were 4-bit or 8-bit numbers before they became float32, and
their weights still lie on that grid: in each group of 32, weight = code * scale + minimum with
whole codes 0 to 15 or 0 to 255. Where this holds for every group of a matrix, the codes are
kept and the same weights are computed from them in registers: a fifth of the bytes. Nothing is
rounded away: a matrix that lies on no grid stays as it is. Leaves out lossy quantization.
Given (no notebook builds it).

Sources: the groups are those of llama.cpp's Q4_1; that the model is finished first and changed
then is gpt-fast's way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.cpu import ops as cpu_ops
from minivllm.cpu.ops import cpu_kernels, cpu_layers, num_threads
from minivllm.model import Attend, CausalLM, DecoderLayer, Linear
from minivllm.waiting import waiting

GROUP = 32  # weights of a row that share a scale and a minimum
# How far a weight may be off the grid, relative to the largest of its group: a few roundings
# of its type, as computing code * scale + minimum in another order leaves.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
FEW_ROWS = 64  # float32: with more rows than this, torch's product is as fast as ours
INT4_ROWS = 8  # bfloat16: with more rows than this, the matrix units are faster than 4-bit codes


def pack(model: CausalLM) -> CausalLM:
    """Replace the model's products by packed ones, in place; returns the model.

    A tied model gets an `lm_head` of its own: the packed embedding, whose table stays as it is.
    Where there is nothing to gain (another device or type, no numba, no bfloat16 units) the
    model stays as it is.
    """
    head = model.model.embed_tokens if model.lm_head is None else model.lm_head
    kind = packed_kind(head.weight)
    if kind is None:
        return model
    cpu_ops.warm_up()
    with waiting("laying out the weights for this CPU"):
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Linear):
                    setattr(module, name, kind(child.weight, child.bias))
    if kind is PackedLinear:
        fuse_layers(model)
    if model.lm_head is None:
        # Called like the Linear that stands there in a model with a head of its own.
        model.lm_head = kind(head.weight, None)  # type: ignore[assignment]
    return model


def weight_bytes(model: CausalLM) -> int:
    """Bytes of weights that a step of few tokens reads: packed ones as they are packed. Of an
    embedding that is no output layer as well it reads a row for each token: nothing, in all."""
    head: Any = model.model.embed_tokens if model.lm_head is None else model.lm_head
    parts: list[Any] = [*model.model.layers.modules(), model.model.norm, head]
    return sum(array.nbytes for part in parts for array in _weights_of(part))


def _weights_of(part: Any) -> list[Any]:
    """The arrays of a module that a step of few tokens reads."""
    if getattr(part, "grid", None) is not None:
        return [part.grid.codes, part.grid.scales]
    if getattr(part, "int4", None) is not None:
        return list(part.int4)
    return list(part.parameters(recurse=False))


def packed_kind(weight: Tensor) -> type[PackedLinear] | type[Bfloat16Linear] | None:
    """The class of product for weights like this one on this machine; None: torch's own."""
    if cpu_ops.has_kernels(weight):
        return PackedLinear
    is_bfloat16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    # Not every PyTorch that we support has this probe; without it, no is the safe answer.
    has_units = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
    return Bfloat16Linear if is_bfloat16 and has_units else None


# -- weights on a grid -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Grid:
    """A matrix `[m, n]` as whole codes: weight = code * scale + minimum of its group.

    Example: a group of -1.0, -0.75, -0.5, ..., 2.75 is codes 0, 1, 2, ..., 15, scale 0.25,
    minimum -1.0.
    """

    bits: int  # of a code, 4 or 8
    codes: np.ndarray  # uint8 [m, n * bits / 8]; their order: see `cpu.vectors`
    scales: np.ndarray  # float32 [m, n / 32, 2]: scale and minimum

    @property
    def matrix(self) -> tuple[np.ndarray, np.ndarray, int]:
        """As the kernels take it."""
        return self.codes, self.scales, self.bits

    @classmethod
    def of(cls, weight: Tensor, bits: tuple[int, ...] = (4, 8)) -> Grid | None:
        """The grid that `weight [m, n]` lies on, of the first of the code sizes that will do;
        None if it lies on no grid."""
        num_threads()
        rows = weight.float().numpy()
        found = (_to_grid(rows, b, TOLERANCE[weight.dtype]) for b in bits)
        return next((grid for grid in found if grid is not None), None)

    def dense(self) -> Tensor:
        """All weights as a float32 tensor `[m, n]`."""
        out = torch.empty(len(self.codes), self.scales.shape[1] * GROUP)
        num_threads()
        cpu_kernels.unpack(*self.matrix, out.numpy())
        return out


def _to_grid(rows: np.ndarray, bits: int, tolerance: float) -> Grid | None:
    num_rows, size = rows.shape
    if size % GROUP:
        return None
    codes = np.zeros((num_rows, size * bits // 8), np.uint8)
    scales = np.zeros((num_rows, size // GROUP, 2), np.float32)
    # A matrix that lies on no grid is found out in its first rows.
    for part in (slice(0, 4), slice(4, None)):
        if not cpu_kernels.pack(rows[part], bits, tolerance, codes[part], scales[part]):
            return None
    return Grid(bits, codes, scales)


# -- products ----------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """`x [T, in] -> [T, out]` like `model.Linear`, in float32 with numba's kernels; the weights
    are codes if they lie on a grid.

    The last bits of a row's result depend on the number of rows: for one row, a few and many,
    sums are taken in different orders.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_size, self.bias = len(weight), bias
        self.grid: Any = Grid.of(weight)
        self.weight: Any = weight if self.grid is None else None

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`."""
        if len(x) > FEW_ROWS or (self.grid is None and len(x) == 1):
            # Unpacking costs less than a hundredth of such a product.
            weight = self.weight if self.grid is None else self.grid.dense()
            return F.linear(x, weight, self.bias)
        out = torch.empty(len(x), self.out_size)
        self._few_rows(x.contiguous().numpy(), out.numpy())
        return out if self.bias is None else out.add_(self.bias)

    def _few_rows(self, x: np.ndarray, out: np.ndarray) -> None:
        grid, threads = self.grid, num_threads()
        if grid is None:
            cpu_kernels.dense_product(x, self.weight.numpy(), out, threads)
        elif len(x) == 1:
            cpu_kernels.packed_vector_product(x[0], *grid.matrix, out[0])
        else:
            cpu_kernels.packed_product(x, *grid.matrix, out, threads)


class FusedLayer(nn.Module):
    """A decoder layer that does few tokens in two calls beside the attention (`cpu.layers`);
    many tokens go through the layer that it was made from."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.layer, attention = layer, layer.self_attn
        self.layer_index, self.head_dim = attention.layer_index, attention.head_dim
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        norms: list[Any] = [layer.input_layernorm, layer.post_attention_layernorm]
        self.norms = [(norm.weight.numpy(), norm.eps) for norm in norms]
        self.matrices = [product.grid.matrix for product in products_of(layer)]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """`x [T, hidden]` -> `[T, hidden]`, as `DecoderLayer.forward`."""
        if len(x) > FEW_ROWS:
            return self.layer(x, cos, sin, attend)
        (first_norm, second_norm), threads = self.norms, num_threads()
        qkv_proj, o_proj, gate_up_proj, down_proj = self.matrices
        q, k, v, out = self.empty_results(x)
        angles = cos.numpy(), sin.numpy()
        targets = q.numpy(), k.numpy(), v.numpy()
        cpu_layers.before_attention(x.numpy(), first_norm, qkv_proj, *angles, *targets, threads)
        attended = attend(self.layer_index, q, k, v).flatten(1).numpy()
        cpu_layers.after_attention(
            x.numpy(), attended, o_proj, second_norm, gate_up_proj, down_proj, out.numpy(), threads
        )
        return out

    def empty_results(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """New tensors for queries, keys, values `[T, H or K, D]` and the result."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = (torch.empty(len(x), count, self.head_dim) for count in heads)
        return q, k, v, torch.empty_like(x)


def fuse_layers(model: CausalLM) -> None:
    """Replace the decoder layers that `cpu.layers` can do, in place."""
    layers: Any = model.model.layers
    for index, layer in enumerate(layers):
        products = products_of(layer)
        plain = all(isinstance(p, PackedLinear) and p.grid and p.bias is None for p in products)
        if plain and layer.self_attn.q_norm is None:
            layers[index] = FusedLayer(layer)


def products_of(layer: Any) -> tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear]:
    """The four products of a packed decoder layer, in order."""
    attention, mlp = layer.self_attn, layer.mlp
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


class Bfloat16Linear(nn.Module):
    """`x [T, in] -> [T, out]` like `model.Linear`, in bfloat16 with torch's own kernels for
    weights laid out beforehand; with few rows from 4-bit codes, if the weights lie on a grid.

    The operations are private ones of torch: where one is missing or refuses, `F.linear` stays.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.prepacked = prepack(weight)
        grid = Grid.of(weight, (4,)) if cpu_kernels is not None else None
        self.int4 = None if grid is None else to_int4(grid)

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`."""
        if self.int4 is not None and len(x) <= INT4_ROWS:
            codes, scales = self.int4
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), codes, GROUP, scales)
            return out if self.bias is None else out.add_(self.bias)
        if self.prepacked is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.prepacked, self.bias, "none", [], "")


def prepack(weight: Tensor) -> Tensor | None:
    """The weight in the order in which oneDNN reads it, or None where it cannot be had."""
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    except (AttributeError, RuntimeError):
        return None


def to_int4(grid: Grid) -> tuple[Tensor, Tensor]:
    """Codes and scales for torch's int4 product, whose weight is (code - 8) * scale + zero, scale
    and zero bfloat16."""
    bytes_ = torch.from_numpy(grid.codes)
    # The codes of weights 0, 8, 16, 24, then 1, 9, 17, 25, ... of each group: [m, n / 32, 8, 4].
    codes = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).view(len(bytes_), -1, 8, 4)
    codes = codes.transpose(2, 3).flatten(1)
    scale, minimum = torch.from_numpy(grid.scales).unbind(-1)
    scales = torch.stack((scale, minimum + 8 * scale), dim=-1).transpose(0, 1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return packed, scales.bfloat16().contiguous()
