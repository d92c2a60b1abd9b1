"""Weights laid out for a CPU: `pack` changes a loaded model so that its products are fast.

A step of a few tokens reads every weight once and multiplies it a few times: on a CPU it is as
slow as memory. Many checkpoints were 4-bit or 8-bit numbers before they became float32, and
their weights still lie on that grid: in each group of 32, weight = code * scale + minimum with
whole codes 0 to 15 or 0 to 255. Where this holds for every group of a matrix, the codes are
kept and the same weights are computed from them in registers: a fifth of the bytes. Nothing is
rounded away: a matrix that lies on no grid stays as it is. Leaves out lossy quantization.
Given (no notebook builds it).

Source of the group format: llama.cpp's Q4_1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm import cpu_ops
from minivllm.cpu_ops import cpu_kernels, num_threads
from minivllm.model import CausalLM, Linear

GROUP = 32  # weights of a row that share a scale and a minimum
# How far a weight may be off the grid, relative to the largest of its group: a few roundings
# of float32, as computing code * scale + minimum in another order leaves.
TOLERANCE = 1e-6
FEW_ROWS = 64  # with more rows than this, torch's product is as fast as ours


def pack(model: CausalLM) -> CausalLM:
    """Replace the model's products by packed ones, in place; returns the model.

    A tied model gets an `lm_head` of its own: the packed embedding, whose table stays as it is.
    Without numba, or in another type than float32, the whole model stays as it is.
    """
    head = model.model.embed_tokens if model.lm_head is None else model.lm_head
    if not cpu_ops.has_kernels(head.weight):
        return model
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                setattr(module, name, PackedLinear(child.weight, child.bias))
    model.lm_head = PackedLinear(head.weight, None)
    return model


@dataclass(frozen=True, eq=False)
class Grid:
    """A matrix `[m, n]` as whole codes: weight = code * scale + minimum of its group.

    Example: a group of 0.5, -1.0, 0.5, 2.0 (and so on) is codes 1, 0, 1, 2, scale 1.5,
    minimum -1.0.
    """

    bits: int  # of a code, 4 or 8
    codes: np.ndarray  # uint8 [m, n * bits / 8]; byte i of a 4-bit group holds i and i + 16
    scales: np.ndarray  # float32 [m, n / 32, 2]: scale and minimum

    @classmethod
    def of(cls, weight: Tensor) -> Grid | None:
        """The grid that the float32 `weight [m, n]` lies on, or None."""
        num_rows, size = weight.shape
        if size % GROUP:
            return None
        rows = weight.numpy()
        for bits in (4, 8):
            codes = np.zeros((num_rows, size * bits // 8), np.uint8)
            scales = np.zeros((num_rows, size // GROUP, 2), np.float32)
            # Most matrices that lie on no grid are found out in their first rows.
            first = slice(min(num_rows, 4))
            if all(
                cpu_kernels.pack(rows[part], bits, TOLERANCE, codes[part], scales[part])
                for part in (first, slice(first.stop, None))
            ):
                return cls(bits, codes, scales)
        return None

    def dense(self) -> Tensor:
        """All weights as a float32 tensor `[m, n]`."""
        out = torch.empty(len(self.codes), self.scales.shape[1] * GROUP)
        num_threads()
        cpu_kernels.unpack(self.codes, self.scales, self.bits, out.numpy())
        return out


class PackedLinear(nn.Module):
    """`x [T, in] -> [T, out]` like `model.Linear`, with the weights on a grid if they lie on one.

    The result of a row may differ in its last bits with the number of rows: with one row, with
    a few and with many, sums are taken in different orders.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_size, self.bias = len(weight), bias
        self.grid = Grid.of(weight)
        self.weight = weight if self.grid is None else None

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`."""
        if len(x) > FEW_ROWS or (self.grid is None and len(x) == 1):
            return F.linear(x, self.dense_weight(), self.bias)
        out = self._few_rows(x.contiguous().numpy())
        return out if self.bias is None else out.add_(self.bias)

    def dense_weight(self) -> Tensor:
        """The weight as a float32 tensor `[out, in]`."""
        return self.weight if self.grid is None else self.grid.dense()

    def _few_rows(self, x: np.ndarray) -> Tensor:
        out = torch.empty(len(x), self.out_size)
        if self.grid is None:
            cpu_kernels.dense_product(x, self.weight.numpy(), out.numpy(), num_threads())
        elif len(x) == 1:
            grid, num = self.grid, num_threads()
            cpu_kernels.packed_vector_product(x[0], grid.codes, grid.scales, grid.bits, out[0].numpy())
        else:
            grid = self.grid
            cpu_kernels.packed_product(
                x, grid.codes, grid.scales, grid.bits, out.numpy(), num_threads()
            )
        return out
