"""Rules of the packed weights: nothing is rounded away, and the product is that of `ops`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import ops
from minivllm.cpu import ops as cpu_ops
from minivllm.model import GROUP, MLP, CausalLM, Codes, Embedding, Linear
from minivllm.model_config import ModelConfig

pytest.importorskip("numba", reason="packing needs the kernels")

from minivllm.cpu import packed
from minivllm.cpu.packed import Bfloat16Linear, PackedLinear, PackedMLP


def random_codes(num_rows: int, num_groups: int, bits: int, seed: int = 0) -> Codes:
    """Codes with another scale and minimum in each group."""
    make = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (num_rows, num_groups, 4 * bits), generator=make).byte()
    scale = torch.rand(num_rows, num_groups, generator=make) * 0.01 + 0.001
    minimum = -scale * 2 ** (bits - 1) * 1.07
    return Codes(codes, torch.stack((scale, minimum), dim=-1))


def dense(codes: Codes) -> Tensor:
    """The weights that codes stand for, by the words of `Codes`."""
    numbers = codes.codes
    if codes.bits == 4:
        numbers = torch.cat((numbers & 15, numbers >> 4), dim=-1)
    scale, minimum = codes.scales.split(1, dim=-1)
    return (numbers * scale + minimum).flatten(1)


def random_rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def test_codes_of_a_small_group() -> None:
    """-1, -0.75, ..., 2.75, twice: codes 0 to 15, steps of 0.25 above -1; byte i holds the codes of
    weights i and 16 + i."""
    codes = Codes(
        torch.tensor([[[17 * i for i in range(16)]]], dtype=torch.uint8),
        torch.tensor([[[0.25, -1.0]]]),
    )
    weight = (torch.arange(16) * 0.25 - 1).repeat(2)[None]
    assert codes.bits == 4 and torch.equal(dense(codes), weight)
    assert torch.equal(PackedLinear(codes, None).unpacked()[:, :1], weight.T)


# -- products --

ROWS = [1, 2, 3, 4, 5, 8, 13, 32, 33]


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("bits", [4, 8])
def test_product_equals_the_plain_one(bits: int, num_rows: int) -> None:
    """One row, a few and many; outputs that fill tiles and that do not, with bias and without."""
    for out_size, groups in ((37, 3), (64, 1), (130, 2)):
        codes = random_codes(out_size, groups, bits)
        bias = random_rows(out_size) if groups == 3 else None
        linear, x = PackedLinear(codes, bias), random_rows(num_rows, groups * GROUP)
        exact = dense(codes).double()
        expected = ops.linear(x.double(), exact, None if bias is None else bias.double())
        torch.testing.assert_close(linear(x).double(), expected, atol=2e-5, rtol=1e-5)


def test_product_takes_rows_that_are_not_contiguous() -> None:
    """Every second row, and a slice of the columns, of a larger tensor."""
    for num_rows in (1, 5, 40):
        linear = PackedLinear(random_codes(16, 2, 4), None)
        x = random_rows(2 * num_rows, 100)[::2, 7:71]
        torch.testing.assert_close(linear(x), linear(x.clone()))


def test_bfloat16_product_is_as_close_as_torchs() -> None:
    """Few rows from 4-bit codes, more from the weights: errors of the size of a rounding."""
    codes = random_codes(64, 3, 4)
    weight = dense(codes).bfloat16()
    linear = Bfloat16Linear(weight, random_rows(64).bfloat16(), codes)
    assert linear.int4 is not None
    for num_rows in (1, 8, 9, 33):
        x = random_rows(num_rows, 96).bfloat16()
        exact = ops.linear(x.double(), weight.double(), linear.bias.double())
        ours = (linear(x).double() - exact).square().mean().sqrt()
        theirs = (ops.linear(x, weight, linear.bias).double() - exact).square().mean().sqrt()
        assert ours < 1.5 * theirs


def test_bfloat16_product_without_private_operations_is_the_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A torch without these operations, or one that refuses: `F.linear`, bit for bit."""

    class Nothing:
        """Stands for `torch.ops`."""

    monkeypatch.setattr(packed.torch, "ops", Nothing())
    codes = random_codes(64, 2, 4)
    linear, x = Bfloat16Linear(dense(codes).bfloat16(), None, codes), random_rows(3, 64).bfloat16()
    assert linear.int4 is None and linear.prepacked is None
    assert torch.equal(linear(x), ops.linear(x, linear.weight))


def test_codes_of_8_bits_are_not_for_the_int4_product() -> None:
    """Of torch's two products the prepacked one takes them."""
    codes = random_codes(64, 2, 8)
    linear = Bfloat16Linear(dense(codes).bfloat16(), None, codes)
    assert linear.int4 is None and linear(random_rows(2, 64).bfloat16()).shape == (2, 64)


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


def coded_model(dtype: torch.dtype = torch.float32, config: ModelConfig = TINY) -> CausalLM:
    """Random weights, all but one product and the norms from 4-bit codes."""
    torch.manual_seed(0)
    model = CausalLM(config, max_len=70, ops=cpu_ops, dtype=dtype)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    for part in model.modules():
        if isinstance(part, Linear | Embedding) and part is not model.model.layers[0].mlp.down_proj:
            codes = random_codes(len(part.weight), part.weight.shape[1] // GROUP, 4)
            part.codes = Codes(codes.codes, 20 * codes.scales)
            part.weight.copy_(dense(part.codes))
    return model


@pytest.mark.parametrize("num_tokens", [1, 6, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_model_says_the_same(
    num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, tied embedding, weights with codes and without; the embedding table stays. What
    attention gets and how its answer is used are compared as well."""
    monkeypatch.setattr(packed, "cpu_has_bfloat16", lambda: True)
    results = []
    for change in (lambda model: model, packed.pack):
        model = change(coded_model(dtype))
        ids, seen = torch.arange(num_tokens), []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, seen: Any = seen) -> Tensor:
            seen.extend((k, v, torch.tensor(layer)))
            return q + k.repeat_interleave(2, dim=1).cumsum(0)

        with torch.inference_mode():
            results.append([model.logits(model(ids, ids, attend)), *seen])
        assert model.model.embed_tokens.weight.shape == (97, 64)
    accuracy = 1e-4 if dtype == torch.float32 else 0.1
    for ours, plain in zip(*results, strict=True):
        limit = accuracy * plain.abs().max().item()
        torch.testing.assert_close(ours, plain, atol=limit, rtol=0)


def test_a_product_without_codes_stays_plain_in_float32() -> None:
    """Torch's own product is the best for it; all others are packed, the tied head too."""
    model = packed.pack(coded_model())
    assert isinstance(model.model.layers[0].mlp.down_proj, Linear)
    assert sum(isinstance(part, PackedLinear) for part in model.modules()) == 2 * 4 - 1 + 1


def test_an_mlp_of_packed_products_is_one_call() -> None:
    """Unless one of its products is plain, or has a bias that the call would forget."""
    layers = packed.pack(coded_model()).model.layers
    assert [type(layer.mlp) for layer in layers] == [MLP, PackedMLP]
    layers = packed.pack(coded_model(config=replace(TINY, mlp_bias=True))).model.layers
    assert [type(layer.mlp) for layer in layers] == [MLP, MLP]


def test_a_step_reads_packed_weights_as_they_are_packed() -> None:
    """Half a byte a weight, and eight bytes for each group of 32; norms in float32. The embedding
    table next to a packed output layer is not read."""
    config = replace(TINY, qkv_bias=False, o_bias=False, vocab_size=128, intermediate_size=64)
    plain = coded_model(config=config)
    numbers = sum(parameter.numel() for parameter in plain.parameters())
    plain_numbers = 5 * 64 + 64 * 64  # the norms, and the product without codes
    assert packed.weight_bytes(plain) == 4 * numbers
    expected = (numbers - plain_numbers) * 3 // 4 + 4 * plain_numbers
    assert packed.weight_bytes(packed.pack(plain)) == expected


def test_what_gains_nothing_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without numba, in float16, and in bfloat16 without its units, no module is replaced."""
    monkeypatch.setattr(packed, "cpu_has_bfloat16", lambda: False)
    for dtype in (torch.float16, torch.bfloat16):
        assert packed.pack(coded_model(dtype)).lm_head is None
    monkeypatch.setattr(cpu_ops, "cpu_kernels", None)
    assert packed.pack(coded_model()).lm_head is None


def test_bfloat16_units_get_the_bfloat16_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes of the CPU decide, any one of them; without probes the answer is no."""
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: False, raising=False)
    assert not packed.cpu_has_bfloat16()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert packed.cpu_has_bfloat16()
    model = packed.pack(coded_model(torch.bfloat16))
    assert isinstance(model.lm_head, Bfloat16Linear)
