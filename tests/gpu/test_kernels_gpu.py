"""The kernels on a GPU against float64, in the shapes and sizes that the interpreter is too slow
for: every head size, group and block size, long contexts, large batches and caches."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported: for other tests
if find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton; Linux only)", allow_module_level=True)

import triton

sys.path.insert(0, str(Path(__file__).parents[1]))
from paged_batch import PagedBatch

from minivllm import drawing, kernels, ops, sampler
from minivllm.decode_attention import decode_attention, num_items
from minivllm.gpu import ops as gpu_ops
from minivllm.gpu.prefill_attention import prefill_attention
from minivllm.gpu.sampling_kernels import gumbel_sample
from minivllm.model_config import RopeConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE = "cuda"
# Queries and keys are normal, scores divided by sqrt(D), values between -1 and 1. In bfloat16 the
# answer is rounded by 2^-9 at most, and so is the weight of each value.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    make = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=make, device=DEVICE).to(dtype)


def random_lens(count: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths from 1 to `longest`, both of them included."""
    make = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, longest + 1, (count,), generator=make).tolist()
    return [longest, 1, *lens][:count]


def assert_exact(given: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert given.dtype == dtype and expected.any()
    torch.testing.assert_close(given.double(), expected, atol=TOLERANCE[dtype], rtol=0)


# -- decode attention --

FULL_GRID = [  # head size, group, block size
    (head_dim, group, (16, 32, 64, 128, 256)[(4 * d + g) % 5])
    for d, head_dim in enumerate((64, 96, 128, 256))
    for g, group in enumerate((1, 2, 3, 8))
]
BLOCK_SIZES = [(128, 2, block_size) for block_size in (16, 32, 64, 128, 256)]
# Products in float32 without tensor cores take long to compile: a part of the grid.
FLOAT32_GRID = [(64, 1, 16), (64, 3, 256), (96, 2, 64), (128, 8, 16), (128, 1, 32), (256, 2, 16)]
DECODES = [torch.bfloat16] * len(FULL_GRID + BLOCK_SIZES) + [torch.float32] * len(FLOAT32_GRID)
BATCHES = [[4096], random_lens(8, 4096), random_lens(48, 1000), random_lens(49, 300, 1)]


def check_decode(
    lens: list[int], shape: tuple[int, int, int], num_kv_heads: int, dtype: torch.dtype
) -> None:
    """The newest token of every request."""
    head_dim, group, block_size = shape
    batch = PagedBatch(lens, num_kv_heads, head_dim, block_size, dtype, DEVICE)
    q, scale = batch.queries(len(lens), num_kv_heads * group), head_dim**-0.5
    rest = (batch.k_cache, batch.v_cache, batch.table, batch.seq_lens)
    given = decode_attention(q, *rest, max(lens), scale)
    assert_exact(given, batch.expected(q, [1] * len(lens), scale), dtype)
    assert torch.equal(decode_attention(q, *rest, max(lens), scale), given), "not the same again"


@pytest.mark.parametrize(
    ("shape", "dtype"), [*zip(FULL_GRID + BLOCK_SIZES + FLOAT32_GRID, DECODES)], ids=str
)
def test_decode_attention_is_exact(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """One request and many, contexts to 4096; the same bits when it runs again."""
    for lens in BATCHES:
        check_decode(lens, shape, 2, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decode_attention_of_256_requests_is_exact(dtype: torch.dtype) -> None:
    """With contexts to 4096, and with 3 key/value heads of 64: a width of 192."""
    check_decode(random_lens(256, 4096), (128, 2, 16), 4, dtype)
    check_decode(random_lens(256, 300), (64, 3, 16), 3, dtype)


def test_one_request_of_32k_beside_63_short_ones_is_exact() -> None:
    """The long one is split over the device."""
    check_decode([32768, *random_lens(63, 640)], (128, 2, 16), 8, torch.bfloat16)


# -- prefill attention --

PROMPTS = [  # key lengths, query lengths
    ([1, 2, 63, 64, 65, 700], [1, 2, 63, 64, 65, 700]),
    ([4096, 17], [4096, 17]),
    ([4096, 1500, 300, 129], [512, 3, 299, 1]),
    (random_lens(64, 200), random_lens(64, 200)),
]
PREFILLS_FLOAT32 = [(64, 3, 16), (96, 2, 64), (128, 1, 32)]
PREFILLS = [torch.bfloat16] * len(FULL_GRID + BLOCK_SIZES) + [torch.float32] * 3


def check_prefill(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Whole prompts, chunks, prefix hits."""
    head_dim, group, block_size = shape
    for lens, query_lens in PROMPTS:
        batch = PagedBatch(lens, 2, head_dim, block_size, dtype, DEVICE)
        q, scale = batch.queries(sum(query_lens), 2 * group), head_dim**-0.5
        starts = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
        out = torch.full(q.shape, torch.nan, dtype=dtype, device=DEVICE)
        prefill_attention(
            q, batch.k_cache, batch.v_cache, batch.table, starts, batch.seq_lens,
            max(query_lens), scale, out,
        )  # fmt: skip
        assert_exact(out, batch.expected(q, query_lens, scale), dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"), [*zip(FULL_GRID + BLOCK_SIZES + PREFILLS_FLOAT32, PREFILLS)], ids=str
)
def test_prefill_attention_is_exact(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Prompts to 4096 tokens, around every border of a tile."""
    check_prefill(shape, dtype)


@pytest.mark.slow
def test_prefill_attention_with_heads_of_256_in_float32_is_exact() -> None:
    """It takes a minute or two to compile."""
    check_prefill((256, 2, 16), torch.float32)


@pytest.mark.parametrize("num_decodes", [0, 3, 48])
def test_attention_of_a_mixed_step_is_exact(num_decodes: int) -> None:
    """Decodes first, then prompts and chunks, in one step of Qwen3-0.6B's shape."""
    lens = random_lens(num_decodes, 2000) + [700, 1500, 64]
    query_lens = [1] * num_decodes + [700, 12, 1]
    batch = PagedBatch(lens, 8, 128, 16, torch.bfloat16, DEVICE)
    q, metadata = batch.queries(sum(query_lens), 16), batch.metadata(query_lens, num_decodes)
    given = gpu_ops.attention(q, batch.k_cache, batch.v_cache, metadata, 0.1)
    assert_exact(given, batch.expected(q, query_lens, 0.1), torch.bfloat16)


def test_what_was_not_written_changes_no_bit() -> None:
    """Slots past a request's length, and blocks without an owner, may hold any finite number."""
    lens, query_lens = [500, 70, 16, 130, 300], [1, 1, 1, 100, 7]
    batch = PagedBatch(lens, 2, 128, 16, torch.bfloat16, DEVICE)
    q = batch.queries(sum(query_lens), 4)

    def run() -> Tensor:
        metadata = batch.metadata(query_lens, 3)
        return gpu_ops.attention(q, batch.k_cache, batch.v_cache, metadata, 0.1)

    before = run()
    batch.spoil()
    assert torch.equal(run(), before) and before.any()


def test_a_captured_attention_reads_the_lengths_of_the_day() -> None:
    """Captured with one key each and replayed with thousands: the launches are the same."""
    lens = random_lens(20, 3000)
    batch = PagedBatch(lens, 2, 128, 16, torch.bfloat16, DEVICE)
    q, seq_lens = batch.queries(20, 4), torch.ones(20, dtype=torch.int32, device=DEVICE)
    table = torch.zeros_like(batch.table)

    def run() -> Tensor:
        starts = torch.arange(21, dtype=torch.int32, device=DEVICE)
        metadata = ops.AttentionMetadata(table, starts, seq_lens, 20, 1, 4096)
        return gpu_ops.attention(q, batch.k_cache, batch.v_cache, metadata, 0.1)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        seq_lens.copy_(batch.seq_lens)
        table.copy_(batch.table)
        out.fill_(torch.nan)
        graph.replay()
        assert_exact(out, batch.expected(q, [1] * 20, 0.1), torch.bfloat16)


# -- a cache of more than 2^31 numbers --


@pytest.fixture(scope="module")
def large_caches() -> tuple[Tensor, Tensor]:
    """Keys and values `[blocks, 16, 8, 128]` in which block 2^17 begins at number 2^31. What lies
    before them is ours, too: an offset that wraps around reads zeros and breaks nothing."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free memory")
    shape, block = (2**17 + 400, 16, 8, 128), 16 * 8 * 128
    whole = [
        torch.zeros(2**31 + shape[0] * block, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)
    ]
    k_cache, v_cache = (x[2**31 :].view(shape) for x in whole)
    return k_cache, v_cache


def test_keys_past_two_to_the_31_numbers_are_stored_and_found(
    large_caches: tuple[Tensor, Tensor],
) -> None:
    """Some blocks before that number, some behind it; keys written by the kernel, read by both
    kinds of attention."""
    lens, query_lens = [700, 30, 200, 5, 450], [1, 1, 200, 3, 17]
    small = PagedBatch(lens, 8, 128, 16, torch.bfloat16, DEVICE)
    table = torch.where(small.table % 2 == 0, small.table, small.table + 2**17)
    k_cache, v_cache = large_caches
    for n, length in enumerate(lens):
        owners = torch.zeros(length, dtype=torch.int64, device=DEVICE)
        positions = torch.arange(length, device=DEVICE)
        slots = kernels.slot_mapping(table[n : n + 1], owners, positions, 16)
        assert torch.equal(slots, ops.slot_mapping(table[n : n + 1], owners, positions, 16))
        kernels.store_kv(small.k[n], small.v[n], k_cache, v_cache, slots)
        blocks, offsets = table[n, positions // 16].long(), positions % 16
        assert torch.equal(k_cache[blocks, offsets], small.k[n])
        assert torch.equal(v_cache[blocks, offsets], small.v[n])
    q, metadata = small.queries(sum(query_lens), 16), small.metadata(query_lens, 2)
    metadata.block_table = table
    given = gpu_ops.attention(q, k_cache, v_cache, metadata, 0.1)
    assert_exact(given, small.expected(q, query_lens, 0.1), torch.bfloat16)


# -- layers --


def check_layer(name: str, *arguments: Any) -> None:
    """In bfloat16: no further from float64 than plain torch is; in float32: equal."""
    for dtype in (torch.bfloat16, torch.float32):
        cast = [a.to(dtype) if isinstance(a, Tensor) else a for a in arguments]
        # The tables of angles stay float32, as in the model.
        cast = [a if i not in (4, 5) or name != "norm_rope" else arguments[i]
                for i, a in enumerate(cast)]  # fmt: skip
        exact = as_tuple(getattr(ops, name)(*(to_double(a) for a in cast)))
        ours = as_tuple(getattr(kernels, name)(*cast))
        theirs = as_tuple(getattr(ops, name)(*cast))
        for x, y, z in zip(ours, theirs, exact, strict=True):
            assert x.dtype == dtype and x.shape == y.shape and z.any()
            errors = [(part.double() - z).square().mean().sqrt() for part in (x, y)]
            assert errors[0] <= 1.2 * errors[1] + 1e-6


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def to_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize("size", [576, 1024, 4096])
def test_norms_and_gates_are_as_good_as_torch(size: int, num_tokens: int) -> None:
    """Hidden sizes of SmolLM2, Qwen3-0.6B and Llama-8B."""
    x, y = random(num_tokens, size), random(num_tokens, size, seed=1)
    check_layer("rms_norm", x, random(size, seed=2), 1e-6)
    check_layer("add_rms_norm", x, y, random(size, seed=2), 1e-6)
    check_layer("silu_mul", 3 * random(num_tokens, 2 * size))


@pytest.mark.parametrize("shape", [(9, 3, 64), (16, 8, 128), (32, 8, 96), (8, 1, 256), (3, 1, 80)])
@pytest.mark.parametrize("has_norm", [False, True], ids=["llama", "qwen3"])
def test_norm_rope_is_as_good_as_torch(has_norm: bool, shape: tuple[int, int, int]) -> None:
    """All tokens of a prompt at once."""
    num_heads, num_kv_heads, head_dim = shape
    cos, sin = (t.to(DEVICE) for t in ops.rope_table(RopeConfig(), head_dim, 300))
    weights = [random(head_dim, seed=seed) if has_norm else None for seed in (1, 2)]
    q, k = random(300, num_heads, head_dim), random(300, num_kv_heads, head_dim, seed=3)
    check_layer("norm_rope", q, k, *weights, cos, sin, 1e-6)


def test_store_kv_is_the_plain_one() -> None:
    """A step of 3,000 tokens, values as a view; bit for bit."""
    merged = random(3000, 32, 128, dtype=torch.bfloat16)
    k, v = merged[:, 16:24].contiguous(), merged[:, 24:]
    slots = torch.randperm(3200, generator=torch.Generator().manual_seed(0))[:3000].to(DEVICE)
    ours, theirs = torch.zeros(2, 2, 200, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    kernels.store_kv(k, v, *ours, slots)
    ops.store_kv(k, v, *theirs, slots)
    assert theirs.any() and torch.equal(ours, theirs)


# -- sampling --


def test_the_distribution_of_20000_draws() -> None:
    """Pearson's chi-square, along seeds and along positions, at temperatures 1 and 0.5: with 5
    degrees of freedom it is over 36 once in a million times."""
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01], device=DEVICE)
    logits = torch.full((20_000, 3 * 4096), -torch.inf, device=DEVICE)
    places = torch.tensor([0, 5, 4095, 4096, 9000, 3 * 4096 - 1], device=DEVICE)
    logits[:, places] = probs.log()
    line, fixed = torch.arange(20_000, device=DEVICE), torch.full((20_000,), 3, device=DEVICE)
    for seeds, positions in ((line, fixed), (fixed, line)):
        for temperature in (1.0, 0.5):
            heat = torch.full((20_000,), temperature, device=DEVICE)
            drawn = gumbel_sample(logits, heat, seeds, positions)
            counts = (drawn[:, None] == places).sum(0).double()
            assert counts.sum() == 20_000, "a token was drawn that cannot be"
            sharp = probs.double() ** (1 / temperature)
            expected = 20_000 * sharp / sharp.sum()
            assert ((counts - expected).square() / expected).sum() < 36


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tokens_are_those_of_the_oracle_but_for_ties(dtype: torch.dtype) -> None:
    """Qwen3's vocabulary; where the tokens differ, their scores are all but equal."""
    rows = 128
    logits = random(rows, 151_936, dtype=dtype)
    heat = torch.tensor([1.0, 0.6, 0.0, 3.0], device=DEVICE).repeat(rows // 4)
    seeds, positions = (torch.arange(rows, device=DEVICE) + start for start in (0, 1000))
    given = gumbel_sample(logits, heat, seeds, positions)
    expected = sampler.gumbel_sample(logits, heat, seeds, positions)
    assert (given == expected).double().mean() > 0.98
    bits = drawing.hash_counter(
        drawing.hash_counter(seeds, positions)[:, None], torch.arange(151_936, device=DEVICE)
    )
    hot = (heat > 0)[:, None]
    scores = logits.double() / torch.where(hot, heat[:, None].double(), 1.0)
    scores += torch.where(hot, drawing.gumbel_noise(bits), 0.0)
    lost = scores.gather(1, expected[:, None]) - scores.gather(1, given[:, None])
    assert lost.max() < 2e-3
    greedy = heat == 0
    assert torch.equal(given[greedy], logits[greedy].float().argmax(-1))


def test_a_sure_token_is_always_drawn() -> None:
    """One logit is 30 above 151,935 others, which have a chance of 1e-8 together. 600 million
    numbers are drawn: if noise were infinite for one of 2^24, some dozen rows would go astray."""
    logits = torch.zeros(4000, 151_936, dtype=torch.bfloat16, device=DEVICE)
    logits[:, 777] = 30
    line = torch.arange(4000, device=DEVICE)
    drawn = gumbel_sample(logits, torch.ones(4000, device=DEVICE), line, line)
    assert (drawn == 777).all()


def test_equal_tokens_are_drawn_equally_often() -> None:
    """1,500 draws among 151,936 equal tokens: all over the vocabulary (the mean is 0.5, its
    standard deviation 0.0075), and hardly one of them twice."""
    logits = torch.zeros(1500, 151_936, dtype=torch.bfloat16, device=DEVICE)
    line = torch.arange(1500, device=DEVICE)
    drawn = gumbel_sample(logits, torch.ones(1500, device=DEVICE), line, line)
    assert abs(drawn.double().mean() / 151_936 - 0.5) < 5 * 0.0075
    assert len(drawn.unique()) > 1450


# -- compilation --


def test_nothing_is_compiled_after_the_buckets_over_all_batch_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels of a decode step run for each bucket; then for every batch size from 1 to 256,
    with other lengths and addresses: Triton compiles nothing any more."""
    from minivllm.cuda_graphs import bucket_sizes

    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_post_compile_hook",
        lambda **about: compiled.append(about["repr"]),
    )
    for size in bucket_sizes(256):
        decode_step(size, longest=40)
    assert compiled, "the hook has heard of nothing: this test cannot fail"
    compiled.clear()
    for size in range(1, 257):
        decode_step(size, longest=size % 90 + 1)
    assert compiled == []
    assert num_items(256) > num_items(1)


def decode_step(size: int, longest: int) -> None:
    """All kernels of a decode step, in float16, which no other test here has compiled."""
    heads, kv_heads, head_dim, dtype = 4, 2, 64, torch.float16
    batch = PagedBatch(random_lens(size, longest), kv_heads, head_dim, 16, dtype, DEVICE)
    table = torch.zeros(size, 16, dtype=torch.int32, device=DEVICE)
    table[:, : batch.table.shape[1]] = batch.table
    metadata = batch.metadata([1] * size, size)
    metadata.block_table = table
    hidden, weight = batch.randn(size, heads * head_dim), batch.randn(heads * head_dim)
    hidden, normed = kernels.add_rms_norm(hidden, hidden, weight, 1e-6)
    normed = kernels.rms_norm(normed, weight, 1e-6)
    q, k, v = batch.randn(size, heads + 2 * kv_heads, head_dim).split([heads, 2, 2], dim=1)
    angles = torch.zeros(size, head_dim // 2, device=DEVICE)
    q, k = kernels.norm_rope(q, k, weight[:head_dim], weight[:head_dim], angles, angles, 1e-6)
    owners = torch.arange(size, device=DEVICE)
    slots = kernels.slot_mapping(table, owners, metadata.seq_lens.long() - 1, 16)
    kernels.store_kv(k, v, batch.k_cache, batch.v_cache, slots)
    gpu_ops.attention(q, batch.k_cache, batch.v_cache, metadata, 0.1)
    kernels.silu_mul(normed)
    logits = batch.randn(size, 300)
    gumbel_sample(logits, torch.ones(size, device=DEVICE), owners, owners)
