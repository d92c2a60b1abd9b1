"""Rules of the packed weights: nothing is rounded away, and the product is that of `ops`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import ops
from minivllm.cpu import ops as cpu_ops
from minivllm.model import CausalLM
from minivllm.model_config import ModelConfig

pytest.importorskip("numba", reason="packing needs the kernels")

from minivllm.cpu import packed
from minivllm.cpu.packed import GROUP, Bfloat16Linear, Grid, PackedLinear


def on_grid(num_rows: int, num_groups: int, bits: int, seed: int = 0) -> Tensor:
    """A random float32 matrix made of codes, with another scale and minimum in each group."""
    make = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (num_rows, num_groups, GROUP), generator=make).float()
    scale = torch.rand(num_rows, num_groups, 1, generator=make) * 0.01 + 0.001
    minimum = -scale * 2 ** (bits - 1) * 1.07
    return (codes * scale + minimum).flatten(1)


def random_rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


# -- the grid --


def test_codes_scale_and_minimum_of_a_small_group() -> None:
    """-1, -0.75, ..., 2.75, twice: codes 0 to 15, steps of 0.25 above -1; bytes 2i and 2i + 1 hold
    the codes of weights i, 8 + i and 16 + i, 24 + i."""
    weight = (torch.arange(16) * 0.25 - 1).repeat(2)[None]
    grid = Grid.of(weight)
    assert grid is not None and grid.bits == 4
    assert grid.scales.tolist() == [[[0.25, -1.0]]]
    assert grid.codes.tolist() == [[16 * (8 + i) + i for i in range(8) for _ in range(2)]]
    assert torch.equal(grid.dense(), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_come_back_to_the_last_bits(bits: int) -> None:
    """Off by a few roundings of the group's largest weight at most, and found with these bits."""
    weight = on_grid(37, 3, bits)
    grid = Grid.of(weight)
    assert grid is not None and grid.bits == bits
    largest = weight.view(37, 3, GROUP).abs().amax(-1, keepdim=True)
    errors = (grid.dense() - weight).view(37, 3, GROUP).abs() / largest
    assert errors.max() <= 2**-21


@pytest.mark.parametrize("place", [(0, 0), (20, 40), (36, 95)], ids=str)
def test_one_weight_off_the_grid_is_enough_to_refuse(place: tuple[int, int]) -> None:
    """A tenth of a step in one group of one row, at the start, within, at the end."""
    weight = on_grid(37, 3, 8)
    weight[place] += 0.1 * (weight[0, :GROUP].max() - weight[0, :GROUP].min()) / 255
    assert Grid.of(weight) is None


def test_groups_of_one_value_are_on_a_grid() -> None:
    """All zeros, or all the same number: any scale will do."""
    weight = torch.cat((torch.zeros(2, GROUP), torch.full((2, GROUP), -0.3)))
    grid = Grid.of(weight)
    assert grid is not None and torch.equal(grid.dense(), weight)


def test_ordinary_weights_lie_on_no_grid() -> None:
    """Random numbers, in float32 and rounded to bfloat16; and rows that are no whole groups."""
    assert Grid.of(random_rows(8, 64)) is None
    assert Grid.of(random_rows(8, 64).bfloat16()) is None
    assert Grid.of(torch.zeros(4, 40)) is None


def test_bfloat16_weights_still_show_their_4_bit_grid() -> None:
    """Rounding to 8 bits moves a weight by a few hundredths of a step of 15."""
    weight = on_grid(16, 2, 4)
    grid = Grid.of(weight.bfloat16(), (4,))
    assert grid is not None
    torch.testing.assert_close(grid.dense(), weight, atol=2**-7 * weight.abs().max(), rtol=0)


# -- products --

ROWS = [1, 2, 3, 4, 5, 8, 13, 24, 25, 64, 65]


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("kind", ["4 bits", "8 bits", "no grid"])
def test_product_equals_the_plain_one(kind: str, num_rows: int) -> None:
    """One row, a few and many; 37 and 8 outputs, with bias and without."""
    for out_size, groups in ((37, 3), (8, 1), (1, 2)):
        weight = random_rows(out_size, groups * GROUP)
        if kind != "no grid":
            weight = on_grid(out_size, groups, int(kind[0]))
        bias = random_rows(out_size) if groups == 3 else None
        linear, x = PackedLinear(weight, bias), random_rows(num_rows, groups * GROUP)
        assert (linear.grid is None) == (kind == "no grid")
        expected = ops.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(linear(x).double(), expected, atol=1e-5, rtol=1e-5)


def test_product_takes_rows_that_are_not_contiguous() -> None:
    """Every second row, and a slice of the columns, of a larger tensor."""
    linear, x = PackedLinear(on_grid(16, 2, 4), None), random_rows(10, 100)[::2, 7:71]
    torch.testing.assert_close(linear(x), linear(x.clone()))


def test_bfloat16_product_is_as_close_as_torchs() -> None:
    """Few rows from 4-bit codes, more from the weights: errors of the size of a rounding."""
    weight = on_grid(64, 3, 4).bfloat16()
    linear = Bfloat16Linear(weight, random_rows(64).bfloat16())
    assert linear.int4 is not None
    for num_rows in (1, 8, 9, 33):
        x = random_rows(num_rows, 96).bfloat16()
        exact = ops.linear(x.double(), weight.double(), linear.bias.double())
        ours = (linear(x).double() - exact).square().mean().sqrt()
        theirs = (ops.linear(x, weight, linear.bias).double() - exact).square().mean().sqrt()
        assert ours < 1.5 * theirs


def test_bfloat16_product_without_private_operations_is_the_plain_one() -> None:
    """Weights on no grid and nothing prepacked: `F.linear`, bit for bit."""
    linear = Bfloat16Linear(random_rows(64, 64).bfloat16(), None)
    linear.prepacked, x = None, random_rows(3, 64).bfloat16()
    assert linear.int4 is None and torch.equal(linear(x), ops.linear(x, linear.weight))


# -- a whole model --

TINY = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "attention_bias": True,
    }
)


def tiny_model(
    dtype: torch.dtype = torch.float32, config: ModelConfig = TINY, grid: bool = False
) -> CausalLM:
    """Random weights; those of the first layer's MLP, or all matrices, lie on a grid."""
    torch.manual_seed(0)
    model = CausalLM(config, max_len=70, ops=cpu_ops, dtype=dtype)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
        if grid and parameter.ndim == 2:
            parameter.copy_(20 * on_grid(len(parameter), parameter.shape[1] // GROUP, 4))
    model.model.layers[0].mlp.gate_up_proj.weight.copy_(on_grid(192, 2, 4))
    return model


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 65])
def test_fused_layers_say_the_same(num_tokens: int) -> None:
    """All weights on a grid, no biases: one token, a few, and more than the fused kernels take;
    what attention gets and how its answer is used are compared as well."""
    config = replace(TINY, qkv_bias=False, o_bias=False, head_dim=8)
    results = []
    for change in (lambda model: model, packed.pack):
        model = change(tiny_model(config=config, grid=True))
        assert isinstance(model.model.layers[1], packed.FusedLayer) == (change is packed.pack)
        ids, seen = torch.arange(num_tokens), []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, seen: Any = seen) -> Tensor:
            seen.extend((k, v, torch.tensor(layer)))
            return q + k.repeat_interleave(2, dim=1).cumsum(0)

        with torch.inference_mode():
            results.append([model.logits(model(ids, ids, attend)), *seen])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 6])
def test_packed_model_says_the_same(num_tokens: int) -> None:
    """Biases, tied embedding, weights on a grid and not; the embedding table stays."""
    model, changed = tiny_model(), packed.pack(tiny_model())
    grids = [m.grid for m in changed.modules() if isinstance(m, PackedLinear)]
    assert len(grids) == 2 * 4 + 1 and sum(grid is not None for grid in grids) == 1
    ids, positions = torch.arange(num_tokens), torch.arange(num_tokens)

    def logits(model: CausalLM) -> Tensor:
        with torch.inference_mode():
            return model.logits(model(ids, positions, lambda _, q, k, v: q))

    torch.testing.assert_close(logits(changed), logits(model), atol=1e-4, rtol=1e-4)
    assert changed.model.embed_tokens.weight.shape == (97, 64)


def test_a_step_reads_packed_weights_as_they_are_packed() -> None:
    """Half a byte a weight, and eight bytes for each group of 32; norms in float32. The embedding
    table beside a packed output layer is not read."""
    config = replace(TINY, qkv_bias=False, o_bias=False)
    plain = tiny_model(config=config, grid=True)
    numbers = sum(parameter.numel() for parameter in plain.parameters())
    norms = 5 * 64
    assert packed.weight_bytes(plain) == 4 * numbers
    assert packed.weight_bytes(packed.pack(plain)) == (numbers - norms) * 3 // 4 + 4 * norms


def test_what_gains_nothing_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without numba, in float16, and in bfloat16 without its units, no module is replaced."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    for dtype in (torch.float16, torch.bfloat16):
        model = packed.pack(tiny_model(dtype))
        assert model.lm_head is None
    monkeypatch.setattr(cpu_ops, "cpu_kernels", None)
    assert packed.pack(tiny_model()).lm_head is None


def test_bfloat16_units_get_the_bfloat16_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe of the CPU decides."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    model = packed.pack(tiny_model(torch.bfloat16))
    assert isinstance(model.lm_head, Bfloat16Linear)
