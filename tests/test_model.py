"""The decoder against transformers, on tiny random checkpoints of every supported kind.

The tests with an `exercise` mark are checks of notebook 05, which need no transformers: its
numbers are stored in data/tiny_llama.json. What a failed assert says is the hint a learner reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from minivllm import ops
from minivllm.checkpoint.weights import load_model, read_config
from minivllm.cpu import ops as cpu_ops
from minivllm.model import CausalLM, DecoderLayer, RMSNorm, Stream
from minivllm.model_config import ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, attention and MLP biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, as many key heads as query heads": ("Llama", {"num_key_value_heads": 6}),
    "llama, one key head": ("Llama", {"num_key_value_heads": 1}),
    "llama, head size from the config": ("Llama", {"head_dim": 20}),
    "llama, odd vocabulary": ("Llama", {"vocab_size": 97}),
    "llama, llama3 RoPE": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear RoPE": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "mistral": ("Mistral", {"sliding_window": None, "rms_norm_eps": 1e-2}),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "qwen3, tied, biases, one key head": (
        "Qwen3",
        {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1},
    ),
}
# Two requests, step by step: (request, number of new tokens). Blocks hold four tokens, so
# lengths 3, 4, 5 and 8 occur, as ends of prompts, of chunks and in decodes.
WHOLE_PROMPTS = [[(0, 19), (1, 16)]]
CHUNKS_AND_DECODES = [
    [(0, 4), (1, 3)],
    [(0, 1), (1, 2)],
    [(0, 1), (1, 3)],
    [(1, 1), (0, 7)],
    *[[(0, 1), (1, 1)]] * 6,
]
ONE_BY_ONE = [[(0, 1), (1, 1)]] * 10


def the_oracle() -> Any:
    """The library transformers; imported late, because that takes seconds."""
    return pytest.importorskip("transformers", reason="the oracle of this test")


def make_oracle(family: str, changes: dict[str, Any]) -> Any:
    """A random model of transformers whose logits differ clearly between positions."""
    transformers = the_oracle()
    kind = transformers.AutoConfig.for_model(family.lower(), **(SIZES | changes))
    torch.manual_seed(0)
    oracle = getattr(transformers, f"{family}ForCausalLM")(kind).eval()
    for name, parameter in oracle.named_parameters():
        parameter.data.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3)
    return oracle


def load(path: Path, dtype: torch.dtype = torch.float32, ops: Any = ops) -> CausalLM:
    """The checkpoint in `path` as our model, for 64 positions."""
    config = read_config(path)
    return load_model(path, config, dtype, "cpu", 64, ops=ops, progress=False)


class Paged:
    """The smallest runner: requests in scrambled blocks, `ops.attention` over a paged cache."""

    def __init__(self, model: CausalLM, num_requests: int, num_blocks: int = 16) -> None:
        self.model, self.block_size, config = model, 4, model.config
        order = torch.randperm(
            num_requests * num_blocks, generator=torch.Generator().manual_seed(3)
        )
        self.table = order.view(num_requests, num_blocks).int()
        shape = (
            config.num_layers,
            len(order),
            self.block_size,
            config.num_kv_heads,
            config.head_dim,
        )
        dtype = model.model.norm.weight.dtype
        self.k_cache, self.v_cache = (
            torch.zeros(shape, dtype=dtype),
            torch.zeros(shape, dtype=dtype),
        )
        self.lens = [0] * num_requests

    def step(self, chunks: list[tuple[int, list[int]]], num_decodes: int) -> Tensor:
        """Run the new tokens of each (request, tokens); logits of all of them, flat."""
        rows = [row for row, _ in chunks]
        counts = torch.tensor([len(tokens) for _, tokens in chunks])
        starts = torch.tensor([self.lens[row] for row in rows])
        positions = torch.cat(
            [torch.arange(s, s + c) for s, c in zip(starts.tolist(), counts.tolist(), strict=True)]
        )
        owners = torch.tensor(rows).repeat_interleave(counts)
        slots = ops.slot_mapping(self.table, owners, positions, self.block_size)
        query_starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
        table, seq_lens = self.table[rows], (starts + counts).int()
        scale = self.model.config.head_dim**-0.5

        metadata = ops.AttentionMetadata(
            table, query_starts, seq_lens, num_decodes, int(counts.max()), int(seq_lens.max())
        )

        def attend(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache = self.k_cache[layer_index], self.v_cache[layer_index]
            ops.store_kv(k, v, *cache, slots)
            return ops.attention(q, *cache, metadata, scale)

        for row, tokens in chunks:
            self.lens[row] += len(tokens)
        input_ids = torch.tensor([token for _, tokens in chunks for token in tokens])
        with torch.inference_mode():
            return self.model.logits(self.model(input_ids, positions, attend))


def run_steps(
    model: CausalLM, prompts: list[list[int]], steps: list[list[tuple[int, int]]]
) -> list[Tensor]:
    """Feed `prompts` in the portions of `steps`; logits of each prompt at each position."""
    paged = Paged(model, len(prompts))
    seen: list[list[Tensor]] = [[] for _ in prompts]
    for step in steps:
        chunks = [(row, prompts[row][paged.lens[row] :][:count]) for row, count in step]
        # Decodes come first: one token each, after at least one other.
        leading = [len(tokens) == 1 and paged.lens[row] > 0 for row, tokens in chunks] + [False]
        num_decodes = leading.index(False)
        logits = paged.step(chunks, num_decodes)
        parts = logits.split([len(tokens) for _, tokens in chunks])
        for (row, _), part in zip(chunks, parts, strict=True):
            seen[row].append(part)
    return [torch.cat(parts) for parts in seen]


def random_prompts(vocab_size: int, lens: list[int]) -> list[list[int]]:
    """The last id of the vocabulary is among them."""
    pick = torch.Generator().manual_seed(5)
    prompts = [torch.randint(vocab_size, (n,), generator=pick).tolist() for n in lens]
    prompts[0][1] = vocab_size - 1
    return prompts


def oracle_logits(oracle: Any, prompts: list[list[int]]) -> list[Tensor]:
    """What transformers says at every position, each prompt by itself."""
    with torch.inference_mode():
        return [oracle(torch.tensor([prompt])).logits[0] for prompt in prompts]


# -- parity --


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_however_the_tokens_are_fed(variant: str, tmp_path: Path) -> None:
    """Whole prompts, chunks mixed with decodes, and token by token: the same logits."""
    oracle = make_oracle(*VARIANTS[variant])
    oracle.save_pretrained(tmp_path)
    model = load(tmp_path)
    prompts = random_prompts(oracle.config.vocab_size, [19, 16])
    expected = oracle_logits(oracle, prompts)
    assert min(x.std(0).mean() for x in expected) > 0.3, "logits hardly differ by position"
    for steps in (WHOLE_PROMPTS, CHUNKS_AND_DECODES, ONE_BY_ONE):
        for ours, theirs in zip(run_steps(model, prompts, steps), expected, strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, theirs[: len(ours)], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_operations_of_a_cpu_compute_the_same(variant: str, tmp_path: Path) -> None:
    """Every family, with numba's kernels in the place of torch's operations."""
    family, changes = VARIANTS[variant]
    make_oracle(family, changes).save_pretrained(tmp_path)
    prompts = random_prompts(96, [19, 16])
    plain = run_steps(load(tmp_path), prompts, CHUNKS_AND_DECODES)
    fast = run_steps(load(tmp_path, ops=cpu_ops), prompts, CHUNKS_AND_DECODES)
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("rope", [LINEAR_ROPE, LLAMA3_ROPE], ids=lambda rope: rope["rope_type"])
def test_rope_is_read_in_the_old_and_in_the_new_form(rope: dict[str, Any], tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` with "type", or the one dict that transformers 5 writes."""
    make_oracle("Llama", {"rope_parameters": rope}).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw.pop("rope_parameters", None)
    new = raw | {"rope_parameters": rope}
    old_rope = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    old = raw | {"rope_theta": old_rope.pop("rope_theta"), "rope_scaling": old_rope}
    assert ModelConfig.from_dict(old).rope == ModelConfig.from_dict(new).rope
    assert ModelConfig.from_dict(new).rope.kind == rope["rope_type"]
    assert ModelConfig.from_dict(old).rope.theta == rope["rope_theta"]
    assert ModelConfig.from_dict(old).rope.factor == rope["factor"]


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", "su"])
def test_unsupported_rope_scaling_is_refused_by_name(kind: str) -> None:
    """In both forms; nothing is served with wrong angles."""
    raw = SIZES | {"architectures": ["LlamaForCausalLM"]}
    for form in ({"rope_scaling": {"type": kind}}, {"rope_parameters": {"rope_type": kind}}):
        with pytest.raises(ValueError, match=f"RoPE scaling '{kind}' is not supported"):
            ModelConfig.from_dict(raw | form)


def test_rope_scaling_without_its_numbers_is_refused() -> None:
    """A missing factor isn't a factor of 1."""
    raw = SIZES | {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "llama3"}}
    with pytest.raises(ValueError, match="lacks factor, low_freq_factor, high_freq_factor"):
        ModelConfig.from_dict(raw)


def test_unsupported_architecture_is_refused_with_the_supported_ones() -> None:
    """The message names what was found and what would work."""
    with pytest.raises(ValueError, match="GPT2LMHeadModel is not supported.*Qwen3ForCausalLM"):
        ModelConfig.from_dict(SIZES | {"architectures": ["GPT2LMHeadModel"]})


def test_bfloat16_is_as_close_to_float32_as_transformers_is(tmp_path: Path) -> None:
    """The error of rounding, root mean square over all logits: not above 1.3 times theirs."""
    oracle = make_oracle("Llama", {})
    oracle.save_pretrained(tmp_path)
    prompts = random_prompts(96, [19, 16])
    exact = torch.cat(oracle_logits(oracle, prompts))
    theirs = torch.cat(oracle_logits(oracle.bfloat16(), prompts)).float() - exact
    ours = torch.cat(run_steps(load(tmp_path, torch.bfloat16), prompts, WHOLE_PROMPTS)) - exact
    assert 0 < ours.square().mean().sqrt() < 1.3 * theirs.square().mean().sqrt()


# -- parts --

TINY = ModelConfig.from_dict(SIZES | {"architectures": ["Qwen3ForCausalLM"]})


def random_model(config: ModelConfig = TINY, dtype: torch.dtype = torch.float32) -> CausalLM:
    """A model with random weights for 64 positions."""
    torch.manual_seed(0)
    model = CausalLM(config, max_len=64, dtype=dtype)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    return model


def test_attend_is_called_once_per_layer_with_flat_heads() -> None:
    """Layers 0 and 1 in order; q has 6 heads, k and v have 2; what it returns is used."""
    calls = []

    def attend(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append((layer_index, q.shape, k.shape, v.shape))
        return torch.zeros_like(q)

    model = random_model()
    hidden = model(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 0]), attend)
    assert hidden.shape == (3, 48)
    shapes = ((3, 6, 8), (3, 2, 8), (3, 2, 8))
    assert calls == [(0, *shapes), (1, *shapes)]
    other = model(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 0]), lambda _, q, k, v: q)
    assert not torch.allclose(hidden, other)


def test_values_do_not_turn_with_the_position() -> None:
    """The same token at positions 0 and 7 has the same values, but not the same keys."""
    seen = []

    def attend(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((k, v))
        return torch.zeros_like(q)

    random_model()(torch.tensor([5, 5]), torch.tensor([0, 7]), attend)
    keys, values = seen[0]
    torch.testing.assert_close(values[0], values[1])
    assert not torch.allclose(keys[0], keys[1])


def test_requests_side_by_side_do_not_mix() -> None:
    """A request's logits are the same alone and next to another."""
    prompts = random_prompts(96, [19, 16])
    together = run_steps(random_model(), prompts, WHOLE_PROMPTS)
    alone = run_steps(random_model(), prompts[1:], [[(0, 16)]])
    torch.testing.assert_close(together[1], alone[0], atol=1e-5, rtol=1e-5)


def test_parameters_follow_the_checkpoint_and_ask_for_no_gradient() -> None:
    """Checkpoint names but for the two merged products; a tied model has no head of its own."""
    names = {name for name, _ in random_model().named_parameters()}
    layer = "model.layers.1."
    parts = ("self_attn.qkv_proj", "self_attn.q_norm", "self_attn.o_proj", "mlp.gate_up_proj")
    assert {f"{layer}{part}.weight" for part in parts} | {"lm_head.weight"} <= names
    assert len(names) == 1 + 2 * 8 + 1 + 1 and not any("bias" in name for name in names)
    assert not any(p.requires_grad for p in random_model().parameters())
    tied = ModelConfig.from_dict(
        SIZES | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    )
    assert "lm_head.weight" not in dict(random_model(tied).named_parameters())


def test_the_rope_table_of_a_bfloat16_model_is_float32() -> None:
    """An angle of position 4000 would be off by whole turns; logits keep the model's dtype."""
    model = random_model(dtype=torch.bfloat16)
    assert model.logits(torch.randn(3, 48).bfloat16()).dtype == torch.bfloat16
    assert model.cos.dtype == torch.float32 and model.cos.shape == (64, 4)


class CountedOps:
    """`minivllm.ops` with a count of the calls of each operation."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        self.calls[name] = self.calls.get(name, 0) + 1
        return getattr(ops, name)


def test_all_arithmetic_goes_through_the_ops_that_were_handed_in() -> None:
    """Per layer: 4 products, 2 norms, 1 rotation with the heads' norms, 1 gate; once: embedding,
    norm, head. Every norm but the first is of a sum, and no sum is made by itself."""
    counted = CountedOps()
    model = CausalLM(TINY, max_len=8, ops=counted)
    hidden = model(torch.tensor([1]), torch.tensor([0]), lambda _, q, k, v: q)
    model.logits(hidden)
    expected = {"embed": 1, "linear": 9, "add_rms_norm": 4, "rms_norm": 1, "norm_rope": 2}
    assert counted.calls == expected | {"silu_mul": 2, "rope_table": 1}


def test_a_stream_acts_like_the_tensor_that_it_stands_for() -> None:
    """Whatever a layer does with it: sums on either side, methods, functions, norms."""
    x, y = torch.randn(2, 3, 4)
    weight, norm = torch.ones(4), RMSNorm(4, 1e-5, ops)
    norm.weight.copy_(weight)
    stream = Stream(x) + y
    assert torch.equal((stream + x).tensor(), x + y + x)
    for given in (y + Stream(x), torch.add(Stream(x), y), Stream(x).add(y), Stream(x) + y):
        assert torch.equal(given + 0 if isinstance(given, Tensor) else given.tensor(), x + y)
    assert torch.equal(norm(Stream(x) + y), norm(x + y)) and torch.equal(norm(Stream(x)), norm(x))
    assert stream.shape == x.shape and torch.equal(stream.clone(), x + y)
    assert len(stream) == 3 and torch.equal(stream[-1], (x + y)[-1])
    assert torch.equal(stream - y, x + y - y) and torch.equal(stream * 2, 2 * (x + y))


def test_an_answer_from_before_the_stream_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three lines that chapter 05 used to suggest: the same logits, bit for bit."""

    def forward(self: Any, x: Any, cos: Tensor, sin: Tensor, attend: Any) -> Any:
        attended = self.self_attn(self.input_layernorm(x), cos, sin, attend)
        x, normed = self.post_attention_layernorm.after_add(x, attended)
        return x + self.mlp(normed)

    prompts = random_prompts(96, [19, 16])
    expected = run_steps(random_model(), prompts, WHOLE_PROMPTS)
    monkeypatch.setattr(DecoderLayer, "forward", forward)
    given = run_steps(random_model(), prompts, WHOLE_PROMPTS)
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


# -- one layer --


class Part(nn.Module):
    """Stands for attention or the MLP: answers what `answer` makes of its input."""

    def __init__(self, answer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.answer = answer

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        attend: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        return self.answer(x)


def small_config(**changes: Any) -> ModelConfig:
    """Two numbers to a vector, no eps to speak of."""
    sizes = {"hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    sizes |= {"vocab_size": 2, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-9}
    return ModelConfig.from_dict(SIZES | sizes | changes)


def layer(
    stream: list[float],
    attention: Callable[[Tensor], Tensor],
    mlp: Callable[[Tensor], Tensor],
    weights: tuple[float, float] = (1.0, 1.0),
) -> list[float]:
    """One token through a `DecoderLayer` of these parts and norms of these weights."""
    built = DecoderLayer(small_config(), 0, ops)
    built.self_attn, built.mlp = Part(attention), Part(mlp)
    for norm, weight in zip((built.input_layernorm, built.post_attention_layernorm), weights):
        norm.weight.fill_(weight)
    angles = torch.ones(1, 1), torch.zeros(1, 1)
    out = built.forward(torch.tensor([stream]).float(), *angles, lambda _, q, k, v: q)
    return [round(value, 3) for value in out[0].tolist()]


def always(value: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.full_like(x, value)


def same(x: Tensor) -> Tensor:
    return x


def doubled(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.exercise("model.DecoderLayer.forward")
def test_each_part_is_added_to_the_stream_once() -> None:
    """5, and 1 from attention, and 10 from the MLP: 16."""
    assert layer([5, 5], always(1), always(10)) == [16, 16], (
        "5 + 1 + 10: is each part added to the stream, and once?"
    )


@pytest.mark.exercise("model.DecoderLayer.forward")
def test_attention_reads_a_normalised_copy() -> None:
    """[3, 4] normalised is [0.849, 1.131]; twice that comes on top of [3, 4] itself."""
    assert layer([3, 4], doubled, always(0)) == [4.697, 6.263], (
        "[3, 4] + 2 * [0.849, 1.131]: is the norm before attention, and not after it?"
    )


@pytest.mark.exercise("model.DecoderLayer.forward")
def test_the_mlp_reads_what_attention_has_written() -> None:
    """Attention makes [3, 4] into [13, 14], whose norm is [0.962, 1.036]."""
    assert layer([3, 4], always(10), doubled) == [14.925, 16.073], (
        "the MLP comes after attention: does it read the stream with attention in it, normalised?"
    )


@pytest.mark.exercise("model.DecoderLayer.forward")
def test_each_norm_has_its_own_weight() -> None:
    """Attention's norm has the weight 10, the MLP's 1."""
    assert layer([3, -3], always(0), same, weights=(10, 1)) == [4, -4], (
        "the MLP's norm is post_attention_layernorm: which one do you call?"
    )
    assert layer([3, -3], same, always(0), weights=(1, 10)) == [4, -4], (
        "attention's norm is input_layernorm: which one do you call?"
    )


@pytest.mark.exercise("model.DecoderLayer.forward")
def test_the_layer_leaves_its_input_alone() -> None:
    """What came in is still there: others may read it."""
    stream = torch.tensor([[5.0, 5.0]])
    built = DecoderLayer(small_config(), 0, ops)
    built.self_attn, built.mlp = Part(always(1)), Part(always(10))
    for norm in (built.input_layernorm, built.post_attention_layernorm):
        norm.weight.fill_(1.0)
    built.forward(stream, torch.ones(1, 1), torch.zeros(1, 1), lambda _, q, k, v: q)
    assert stream.tolist() == [[5, 5]], "x is not yours to change: do you write x += ...?"


# -- the numbers of transformers --

STORED = json.loads((Path(__file__).parent / "data/tiny_llama.json").read_text("utf-8"))


def attend_alone(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One request from its first token on, without a cache."""
    return ops.prefill_attention(q, k, v, q.shape[-1] ** -0.5)


def stored_model(path: Path) -> CausalLM:
    """The model of tiny_llama.json, read from a checkpoint in `path`."""
    weights = {name: torch.tensor(values) for name, values in STORED["weights"].items()}
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(STORED["config"]))
    return load(path)


def distance(found: Tensor, stage: str) -> float:
    """How far the numbers of a stage are from those of transformers, at most."""
    expected = torch.tensor(STORED["stages"][stage])
    assert found.shape == expected.shape, f"{stage} has another shape"
    return (found - expected).abs().max().item()


@pytest.mark.exercise("model.DecoderLayer.forward")
def test_two_layers_give_what_transformers_computed(tmp_path: Path) -> None:
    """Six tokens through two layers and the final norm, to four digits."""
    model, input_ids = stored_model(tmp_path), torch.tensor(STORED["input_ids"])
    hidden = model(input_ids, torch.arange(len(input_ids)), attend_alone)
    assert distance(hidden, "final norm") < 1e-4, "transformers' numbers, in tiny_llama.json"


@pytest.mark.exercise("model.DecoderLayer.forward")
def test_a_layer_keeps_the_dtype_of_the_stream() -> None:
    """bfloat16 in, bfloat16 out."""
    built = DecoderLayer(small_config(), 0, ops).bfloat16()
    built.self_attn, built.mlp = Part(always(1)), Part(always(10))
    angles = torch.ones(1, 1), torch.zeros(1, 1)
    out = built.forward(torch.ones(1, 2).bfloat16(), *angles, lambda _, q, k, v: q)
    assert out.dtype == torch.bfloat16, "the stream is bfloat16: where does it become float32?"


def test_the_stored_numbers_are_those_of_transformers(tmp_path: Path) -> None:
    """The installed transformers computes from that checkpoint what the file says."""
    transformers, model = the_oracle(), stored_model(tmp_path)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found = oracle_logits(oracle, [STORED["input_ids"]])[0]
    torch.testing.assert_close(found, torch.tensor(STORED["stages"]["logits"]), atol=1e-5, rtol=0)
    assert model.lm_head is None, "the checkpoint is a tied one"


# -- logits --


def scores(hidden: list[float], *, head: list[list[float]] | None = None) -> list[float]:
    """Scores of one vector under embedding rows [1, 0] and [2, 1], with a head or tied."""
    model = CausalLM(small_config(tie_word_embeddings=head is None), max_len=4)
    for parameter in model.parameters():
        parameter.fill_(1.0)
    model.model.embed_tokens.weight.copy_(torch.tensor([[1.0, 0.0], [2.0, 1.0]]))
    if head is not None:
        model.lm_head.weight.copy_(torch.tensor(head))
    return [round(value, 3) for value in model.logits(torch.tensor([hidden]).float())[0].tolist()]


@pytest.mark.exercise("model.CausalLM.logits")
def test_a_tied_model_scores_by_the_rows_of_its_embedding() -> None:
    """[3, 4] with [1, 0] is 3, with [2, 1] is 10."""
    assert scores([3, 4]) == [3, 10], (
        "one row of the embedding per token, as it is: scores, of rows and not of columns?"
    )


@pytest.mark.exercise("model.CausalLM.logits")
def test_a_model_with_a_head_uses_it() -> None:
    """Rows [0, 1] and [1, 1] of the head, whatever the embedding holds."""
    assert scores([3, 4], head=[[0, 1], [1, 1]]) == [4, 7], (
        "this checkpoint has an lm_head: do you ask whether it is there?"
    )


@pytest.mark.exercise("model.CausalLM.logits")
def test_the_final_norm_is_not_repeated() -> None:
    """Ten times the vector, ten times the scores: a norm would take that away."""
    expected = [10 * score for score in scores([1, 1])]
    assert scores([10, 10]) == expected, (
        "hidden comes from after the final norm: do you normalise it again?"
    )


@pytest.mark.exercise("model.CausalLM.logits")
def test_logits_keep_the_dtype_of_the_model() -> None:
    """49,152 scores a row: in float32 they would take twice the memory."""
    model = CausalLM(small_config(tie_word_embeddings=True), max_len=4, dtype=torch.bfloat16)
    assert model.logits(torch.ones(3, 2).bfloat16()).dtype == torch.bfloat16, (
        "logits are in the model's dtype: who needs float32 converts, do you already?"
    )


@pytest.mark.exercise("model.CausalLM.logits")
def test_logits_are_those_that_transformers_computed(tmp_path: Path) -> None:
    """Of its own hidden vectors, so that nothing else is tested."""
    hidden = torch.tensor(STORED["stages"]["final norm"])
    found = stored_model(tmp_path).logits(hidden)
    assert distance(found, "logits") < 1e-4, "transformers' numbers, in tiny_llama.json"


@pytest.mark.exercise("model.CausalLM.logits")
def test_hidden_is_only_read() -> None:
    """It may be needed again."""
    model = CausalLM(small_config(tie_word_embeddings=True), max_len=4)
    hidden = torch.ones(3, 2)
    assert model.logits(hidden).shape == (3, 2), "one row for each vector, one score for each token"
    assert hidden.tolist() == [[1, 1]] * 3, "hidden is only read: do you write into it?"


# -- the real model --


@pytest.mark.model
def test_smollm2_logits_equal_transformers() -> None:
    """The built-in model in float32, in one prefill and in chunks with decodes."""
    from minivllm.checkpoint.hub import resolve_model

    path = resolve_model("smollm2-135m")
    oracle = the_oracle().AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = random_prompts(oracle.config.vocab_size, [19, 16])
    expected = oracle_logits(oracle, prompts)
    for steps in (WHOLE_PROMPTS, CHUNKS_AND_DECODES):
        for ours, theirs in zip(run_steps(load(path), prompts, steps), expected, strict=True):
            theirs = theirs[: len(ours)]
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)
            assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
