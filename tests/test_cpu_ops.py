"""Every operation for a CPU against its twin in `ops`, on random shapes."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import ops
from minivllm.cpu import ops as cpu_ops
from minivllm.model import Ops
from minivllm.model_config import RopeConfig
from minivllm.model_runner import RunnerOps

needs_kernels = pytest.mark.skipif(cpu_ops.cpu_kernels is None, reason="numba is not installed")
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_as_good(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """float32: equal up to rounding; else no further from the exact values than torch is."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        return
    errors = [(x.double() - exact).square().mean().sqrt() for x in (ours, theirs)]
    assert errors[0] <= 1.2 * errors[1]


def check(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """Run both twins on the float tensors in `dtype`, and the oracle in float64."""

    def cast(kind: torch.dtype) -> list[Any]:
        return [a.to(kind) if isinstance(a, Tensor) else a for a in arguments]

    twins = [getattr(module, name)(*cast(dtype)) for module in (cpu_ops, ops)]
    exact = getattr(ops, name)(*[a.double() for a in cast(dtype) if isinstance(a, Tensor)],
                               *[a for a in arguments if not isinstance(a, Tensor)])  # fmt: skip
    assert_as_good(*twins, exact)


# -- layers --


def test_the_module_offers_every_operation_of_a_step() -> None:
    """What the model and the runner ask for, with the parameters of `ops` under the same names."""
    names = {name for name in vars(Ops) if not name.startswith("_")} | {*RunnerOps.__annotations__}
    assert names == {*cpu_ops.__all__}
    for name in names:
        given, plain = (inspect.signature(getattr(m, name)).parameters for m in (cpu_ops, ops))
        assert [*given] == [*plain], name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (7, 33), (5, 3, 64), (2, 1)], ids=str)
def test_rms_norm_is_the_plain_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Odd sizes, one row, and each head by itself."""
    check("rms_norm", dtype, random(*shape), random(shape[-1], seed=1), 1e-5)


def test_rms_norm_adds_eps_inside_the_root() -> None:
    """With eps 3 and a mean square of 1 the divisor is 2."""
    assert cpu_ops.rms_norm(torch.tensor([[1.0, -1.0]]), torch.ones(2), 3.0).tolist() == [
        [0.5, -0.5]
    ]


def test_rms_norm_takes_heads_that_are_a_view() -> None:
    """The keys within a merged row of queries, keys and values."""
    heads = random(5, 9, 16)[:, 6:8]
    torch.testing.assert_close(
        cpu_ops.rms_norm(heads, torch.ones(16), 1e-6), ops.rms_norm(heads, torch.ones(16), 1e-6)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3072), (7, 62), (33, 2)], ids=str)
def test_silu_mul_is_the_plain_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Odd sizes and one row; values to about 20 either way."""
    check("silu_mul", dtype, random(*shape) * 5)


def test_silu_mul_is_right_at_both_ends() -> None:
    """Gates far below zero let nothing through, far above everything; nothing overflows."""
    gates = torch.tensor([-1e30, -200.0, -88.5, -20.0, -1e-8, 0.0, 20.0, 88.5, 200.0, 1e30])
    gate_up = torch.cat((gates, torch.full((10,), 0.5)))[None]
    expected = ops.silu_mul(gate_up)
    torch.testing.assert_close(cpu_ops.silu_mul(gate_up), expected, atol=1e-7, rtol=1e-6)


def test_add_rms_norm_is_the_plain_one() -> None:
    """The sum, rounded once, and the norm of the rounded sum."""
    for dtype in DTYPES:
        x, y, weight = (random(*shape, seed=7).to(dtype) for shape in ((7, 33), (7, 33), (33,)))
        ours, plain = (module.add_rms_norm(x, y, weight, 1e-5) for module in (cpu_ops, ops))
        assert torch.equal(ours[0], plain[0])
        exact = ops.rms_norm(plain[0].double(), weight.double(), 1e-5)
        assert_as_good(ours[1], plain[1], exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 9, 64), (5, 1, 96), (3, 2, 6)], ids=str)
def test_norm_rope_is_the_plain_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Contiguous heads, heads that are a view into merged rows; with norms and without."""
    cos, sin = (table[5 : 5 + shape[0]] for table in ops.rope_table(RopeConfig(), shape[2], 10))
    wide = random(shape[0], shape[1] + 3, shape[2]).to(dtype)
    weights = random(2, shape[2], seed=1).to(dtype)
    for norms in ((None, None), tuple(weights)):
        for q in (wide[:, : shape[1]], wide[:, : shape[1]].contiguous()):
            rest = (*norms, cos, sin, 1e-5)
            k = wide[:, -2:]
            exact = [None if norm is None else norm.double() for norm in norms]
            expected = ops.norm_rope(q.double(), k.double(), *exact, cos, sin, 1e-5)
            ours, plain = (module.norm_rope(q, k, *rest) for module in (cpu_ops, ops))
            for triple in zip(ours, plain, expected, strict=True):
                assert_as_good(*triple)


# -- paged cache and attention --


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_kv_writes_the_same_slots(dtype: torch.dtype) -> None:
    """Keys contiguous, values a view, slots in any order; both caches, bit for bit."""
    k, v = random(5, 3, 8).to(dtype), random(5, 7, 8, seed=1)[:, 2:5].to(dtype)
    slots = torch.tensor([17, 0, 5, 16, 31])
    caches = [torch.zeros(2, 2, 16, 3, 8, dtype=dtype) for _ in range(2)]
    for module, cache in zip((cpu_ops, ops), caches, strict=True):
        module.store_kv(k, v, cache[0], cache[1], slots)
    assert torch.equal(*caches) and caches[0].any()


def paged(lens: list[int], kv_heads: int, head_dim: int, block_size: int) -> tuple[Tensor, ...]:
    """Random caches and scrambled block tables for requests of these lengths."""
    width = max(lens) // block_size + 2
    order = torch.randperm(len(lens) * width, generator=torch.Generator().manual_seed(2))
    shape = (len(order), block_size, kv_heads, head_dim)
    return random(*shape, seed=3), random(*shape, seed=4), order.view(len(lens), width).int()


SHAPES = [  # query heads, key/value heads, head size, block size
    (9, 3, 64, 16),
    (3, 3, 96, 32),
    (8, 1, 128, 64),
    (10, 2, 16, 1),
    (6, 2, 48, 2),
    (4, 2, 20, 16),  # no multiple of a vector
]
MIXES = {  # key lengths, query lengths, number of decodes
    "decodes": ([1, 15, 16, 17, 70, 3], [1] * 6, 6),
    "whole prompts": ([1, 16, 130, 5], [1, 16, 130, 5], 0),
    "chunks of prompts": ([40, 300, 33], [7, 140, 1], 0),
    "decodes and chunks": ([5, 33, 50, 16], [1, 1, 20, 16], 2),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_the_plain_one(
    shape: tuple[int, int, int, int], mix: str, dtype: torch.dtype
) -> None:
    """All group sizes, block sizes and mixtures; prompts longer than one portion of queries."""
    lens, query_lens, num_decodes = MIXES[mix]
    k_cache, v_cache, table = paged(lens, *shape[1:])
    q = random(sum(query_lens), shape[0], shape[2], seed=5)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    rest = (ops.AttentionMetadata(table, starts, seq_lens, num_decodes, 1, max(lens)), 0.3)
    tensors = [x.to(dtype) for x in (q, k_cache, v_cache)]
    exact = ops.attention(*(x.double() for x in tensors), *rest)
    assert_as_good(cpu_ops.attention(*tensors, *rest), ops.attention(*tensors, *rest), exact)


def test_attention_reads_nothing_past_the_length() -> None:
    """Slots after a request's last token, and unused blocks, may hold any number."""
    lens = torch.tensor([5, 16, 1], dtype=torch.int32)
    k_cache, v_cache, table = paged([5, 16, 1], 2, 16, 4)
    read = torch.zeros(k_cache.shape[:2], dtype=torch.bool)
    for n, length in enumerate(lens.tolist()):
        for position in range(length):
            read[table[n, position // 4], position % 4] = True
    q = random(3, 4, 16)
    before = cpu_ops.decode_attention(q, k_cache, v_cache, table, lens, 16, 0.5)
    k_cache[~read], v_cache[~read] = 1e4, float("nan")
    assert torch.equal(cpu_ops.decode_attention(q, k_cache, v_cache, table, lens, 16, 0.5), before)


def test_attention_survives_large_scores() -> None:
    """Scores of some hundreds: the largest is subtracted before the exponential."""
    k_cache, v_cache, table = paged([9, 4], 1, 16, 4)
    lens, q = torch.tensor([9, 4], dtype=torch.int32), 100 * random(2, 3, 16)
    arguments = (q, k_cache, v_cache, table, lens, 9, 1.0)
    torch.testing.assert_close(
        cpu_ops.decode_attention(*arguments), ops.decode_attention(*arguments), atol=1e-4, rtol=1e-4
    )


# -- the choice --


def test_without_numba_every_operation_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as `ops`: nothing of the kernels is touched."""
    monkeypatch.setattr(cpu_ops, "cpu_kernels", None)
    x, cos = random(3, 2, 16), random(3, 8)
    assert torch.equal(cpu_ops.rms_norm(x, x[0, 0], 1e-5), ops.rms_norm(x, x[0, 0], 1e-5))
    assert torch.equal(cpu_ops.silu_mul(x[0]), ops.silu_mul(x[0]))
    arguments = (x, x, None, None, cos, cos, 1e-5)
    assert torch.equal(cpu_ops.norm_rope(*arguments)[0], ops.norm_rope(*arguments)[0])


@needs_kernels
def test_kernels_use_as_many_threads_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's setting is carried over, up to what numba was started with."""
    import numba

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cpu_ops.num_threads() == 1 == numba.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10**6)
    assert cpu_ops.num_threads() == numba.config.NUMBA_NUM_THREADS


@needs_kernels
@pytest.mark.long
def test_starting_numbas_threads_leaves_torchs_alone() -> None:
    """In a process that was told to use one: numba's share OpenMP with torch's."""
    code = (
        "import torch; from minivllm.cpu import ops as cpu_ops;"
        "print([cpu_ops.num_threads(), cpu_ops.num_threads(), torch.get_num_threads()])"
    )
    assert printed_by(code, omp=1, numba=2) == "[1, 1, 1]"


@needs_kernels
@pytest.mark.long
def test_two_threads_share_a_product() -> None:
    """A run of all tests gives each process one thread a core, so here are two."""
    code = (
        "import torch; from minivllm.cpu import ops, packed; from minivllm.model import Codes;"
        "print(ops.num_threads(), end=' ');"
        "codes = Codes(torch.arange(192)[:, None, None].repeat(1, 1, 32).byte(),"
        " torch.ones(192, 1, 2)); x = torch.rand(5, 32);"
        "expected = x.sum(1)[:, None] * (torch.arange(192) + 1);"
        "print(torch.allclose(packed.PackedLinear(codes, None)(x), expected))"
    )
    assert printed_by(code, omp=2, numba=2) == "2 True"


def printed_by(code: str, omp: int, numba: int) -> str:
    """What Python prints that starts with these numbers of threads."""
    environment = os.environ | {"OMP_NUM_THREADS": str(omp), "NUMBA_NUM_THREADS": str(numba)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@needs_kernels
def test_warm_up_compiles_everything_that_a_step_calls(tmp_path: Path) -> None:
    """Nothing is compiled in a step of one, two or many tokens, with 4-bit and 8-bit codes."""
    from minivllm.cpu import packed
    from tests.test_cpu_packed import coded_model

    for dtype in DTYPES:
        model = packed.pack(coded_model(dtype))
        kernels = [f for f in vars(cpu_ops.cpu_kernels).values() if hasattr(f, "signatures")]
        before = [len(kernel.signatures) for kernel in kernels]
        cache = torch.zeros(2, 16, 16, 2, 16, dtype=dtype)
        for num_tokens in (1, 2, 40):
            for num_decodes in (0, num_tokens):
                run_step(model, cache, num_tokens, num_decodes)
        grown = [k for k, n in zip(kernels, before) if len(k.signatures) > n]
        assert not grown, [kernel.py_func.__name__ for kernel in grown]


def run_step(model: Any, cache: Tensor, num_tokens: int, num_decodes: int) -> Tensor:
    """A step of one prompt, or of as many decodes, at position 0 and on."""
    count = num_decodes or 1
    starts = torch.tensor([0, *([1] * count if num_decodes else [num_tokens])]).cumsum(0).int()
    lens = torch.ones(count).int() if num_decodes else torch.tensor([num_tokens]).int()
    table = torch.arange(16).int()[None].repeat(count, 1)
    metadata = ops.AttentionMetadata(table, starts, lens, num_decodes, num_tokens, int(lens.max()))

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cpu_ops.store_kv(k, v, cache[0], cache[1], torch.arange(num_tokens))
        return cpu_ops.attention(q, cache[0], cache[1], metadata, 0.25)

    with torch.inference_mode():
        ids = torch.arange(num_tokens)
        return model.logits(model(ids, ids, attend))


@needs_kernels
@pytest.mark.long
def test_kernels_run_where_nothing_can_be_written(tmp_path: Path) -> None:
    """A read-only install without a home: compiled at every start, with one line that says so."""
    package = Path(cpu_ops.__file__).parents[1]
    copy = tmp_path / "site" / "minivllm"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "cpu" / "__pycache__").write_text("a file: no directory can be made here")
    code = (
        "import torch; from minivllm import LLM; from minivllm.cpu import ops;"
        "ops.warm_up(torch.float32); print(ops.__file__)"
    )
    nowhere = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null/x", "PYTHONPATH": str(copy.parent)}
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | nowhere
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True,
        cwd=tmp_path,
    )  # fmt: skip
    assert str(copy) in done.stdout
    assert done.stderr.count("\n") == 1 and "NUMBA_CACHE_DIR" in done.stderr


# -- the real model --


@needs_kernels
@pytest.mark.model
def test_smollm2_is_the_same_with_and_without_kernels() -> None:
    """Prompts at once, then eight tokens one by one: logits within 1e-4 of the largest, and the
    same greedy tokens; every product comes from codes."""
    from minivllm.checkpoint.hub import resolve_model
    from minivllm.checkpoint.weights import load_model, read_config
    from minivllm.cpu import packed
    from tests.test_model import Paged, random_prompts

    path = resolve_model("smollm2-135m")
    config, results = read_config(path), []
    for module in (ops, cpu_ops):
        model = load_model(path, config, torch.float32, "cpu", 64, ops=module, progress=False)
        if module is cpu_ops:
            packed.pack(model)
            kinds = [m for m in model.modules() if isinstance(m, packed.PackedLinear)]
            widths = [linear.codes.shape[2] for linear in kinds]
            assert widths.count(16 * 64) == 4 * config.num_layers and widths.count(32 * 64) == 1
        cache, prompts = Paged(model, 2), random_prompts(config.vocab_size, [19, 16])
        steps = [cache.step(list(enumerate(prompts)), 0)]
        for _ in range(8):
            token = steps[-1].argmax(-1)
            tokens = [token[18 if len(token) == 35 else 0], token[-1]]
            steps.append(cache.step([(n, [int(t)]) for n, t in enumerate(tokens)], 2))
        results.append(torch.cat(steps))
    difference = (results[1] - results[0]).abs().max() / results[0].abs().max()
    assert difference < 1e-4
    assert torch.equal(results[0].argmax(-1), results[1].argmax(-1))


@needs_kernels
def test_wide_vectors_leave_the_users_features_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """NUMBA_CPU_FEATURES decides where it is set; else AVX-512 loses its preference, once."""
    kernels = cpu_ops.cpu_kernels
    monkeypatch.setattr(kernels.config, "CPU_FEATURES", "+sse2")
    kernels.use_wide_vectors()
    assert kernels.config.CPU_FEATURES == "+sse2"
    monkeypatch.setattr(kernels.config, "CPU_FEATURES", None)
    kernels.use_wide_vectors()
    has_avx512 = kernels.llvmlite.binding.get_host_cpu_features().get("avx512f", False)
    assert (kernels.config.CPU_FEATURES is not None) == has_avx512
