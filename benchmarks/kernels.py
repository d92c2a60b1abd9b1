"""Time each Triton kernel by itself on a GPU, compared with plain torch and with what
torch.compile does with them.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --only rms_norm decode_attention --no-compile

The shapes are those of Qwen3-0.6B in bfloat16 with blocks of 16 tokens, in decode steps and in a
prompt. Timed are replays of a CUDA graph with many calls in a row, as in the engine's steps, so
the gap between two launches is part of every time. The calls of a graph have different
arguments, 256 MiB of them or 128 sets: what is larger than the device's cache comes from its
memory. GB/s counts what must move, each number once; torch moves more, which is the point.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import common
import torch
from torch import Tensor

from minivllm import ops, sampler
from minivllm.measure import results as bench_results
from minivllm.model_config import RopeConfig

MANY_BYTES = 2**28  # some times the cache of any device
MAX_SETS = 128  # of arguments
MIN_CALLS = 8  # in a graph
NUM_REPLAYS = 20
WIDTHS = (52, 10, 10, 10, 9, 9)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and where its tensors lie."""

    hidden: int = 1024
    mlp: int = 3072
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151_936
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def random(self, *size: int, seed: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, others for each seed."""
        make = torch.Generator(self.device).manual_seed(seed)
        numbers = torch.randn(size, generator=make, device=self.device)
        return numbers.to(dtype or self.dtype)

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize


@dataclass(frozen=True)
class Case:
    """A kernel, its twin, and arguments for both."""

    kernel: str
    size: str
    num_tokens: int
    num_bytes: int  # read and written, each number once
    arguments: Callable[[int], tuple[Any, ...]]  # of a seed
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    flops: int = 0
    compiled: bool = False  # whether torch.compile is tried on the twin


# -- the cases ---------------------------------------------------------------------------------


def layer_cases(shape: Shape, num_tokens: int) -> Iterator[Case]:
    """What a layer does to each token, attention and products aside."""
    from minivllm import kernels

    n = num_tokens
    s = shape
    rows = f"{num_tokens:,} x "
    heads = s.num_heads * s.head_dim
    kv = s.num_kv_heads * s.head_dim
    cos, sin = (t.to(s.device) for t in ops.rope_table(RopeConfig(), s.head_dim, n))
    many = n > 1  # a single token is not worth the time to compile for

    def case(name: str, size: str, num_bytes: int, arguments: Callable[[int], Any]) -> Case:
        twins = getattr(kernels, name), getattr(ops, name)
        return Case(name, size, n, num_bytes, arguments, *twins, compiled=many)

    def norm_arguments(seed: int) -> tuple[Any, ...]:
        return s.random(n, s.hidden, seed=seed), s.random(s.hidden, seed=0), 1e-6

    def add_arguments(seed: int) -> tuple[Any, ...]:
        return (s.random(n, s.hidden, seed=1000 + seed), *norm_arguments(seed))

    def rope_arguments(seed: int) -> tuple[Any, ...]:
        merged = s.random(n, s.num_heads + 2 * s.num_kv_heads, s.head_dim, seed=seed)
        q, k, _ = merged.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=1)
        weight = s.random(s.head_dim, seed=0)
        return q, k, weight, weight, cos, sin, 1e-6

    def mlp_arguments(seed: int) -> tuple[Any, ...]:
        return (s.random(n, 2 * s.mlp, seed=seed),)

    norm = 2 * n * s.hidden * s.item + s.hidden * s.item
    yield case("rms_norm", f"{rows}{s.hidden:,}", norm, norm_arguments)
    yield case("add_rms_norm", f"{rows}{s.hidden:,}", 2 * norm - s.hidden * s.item, add_arguments)
    angles = n * s.head_dim * 4
    rope = 2 * n * (heads + kv) * s.item + angles + 2 * s.head_dim * s.item
    size = f"{rows}({s.num_heads} + {s.num_kv_heads}) x {s.head_dim}"
    yield case("norm_rope", size, rope, rope_arguments)
    yield case("silu_mul", f"{rows}2 x {s.mlp:,}", 3 * n * s.mlp * s.item, mlp_arguments)


def cache_cases(shape: Shape, num_tokens: int) -> Iterator[Case]:
    """Finding the slots of a step's tokens, and storing their keys and values."""
    from minivllm import kernels

    n = num_tokens
    s = shape
    width = s.num_kv_heads * s.head_dim

    def mapping_arguments(_: int) -> tuple[Any, ...]:
        # A decode step has a token of each request; a prompt, all tokens of one.
        num_owners, num_blocks = (n, 64) if n <= 256 else (1, n // s.block_size)
        tables = torch.randint(2**20, (num_owners, num_blocks), dtype=torch.int32).to(s.device)
        tokens = torch.arange(n, device=s.device)
        owners, positions = (tokens, tokens % 64 * 16) if n <= 256 else (0 * tokens, tokens)
        return tables, owners, positions, s.block_size

    def store_arguments(seed: int) -> tuple[Any, ...]:
        merged = s.random(n, s.num_heads + 2 * s.num_kv_heads, s.head_dim, seed=seed)
        _, k, v = merged.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=1)
        blocks = n // s.block_size + 1
        caches = s.random(2, blocks, s.block_size, s.num_kv_heads, s.head_dim, seed=0)
        slots = torch.randperm(blocks * s.block_size, device=s.device)[:n]
        return k.contiguous(), v, caches[0], caches[1], slots

    # An owner and a position, an entry of the table, a slot.
    yield Case(
        "slot_mapping", f"{n:,} tokens", n, n * (8 + 8 + 4 + 8), mapping_arguments,
        kernels.slot_mapping, ops.slot_mapping, compiled=n > 1,
    )  # fmt: skip
    size = f"{n:,} x 2 x {s.num_kv_heads} x {s.head_dim}"
    num_bytes = n * (4 * width * s.item + 8)
    yield Case(
        "store_kv", size, n, num_bytes, store_arguments, kernels.store_kv, ops.store_kv,
        compiled=n > 1,
    )  # fmt: skip


def paged(shape: Shape, lens: Sequence[int], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, block table and lengths of requests in scrambled blocks."""
    s = shape
    needed = [-(-length // shape.block_size) for length in lens]
    make = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(needed), generator=make, dtype=torch.int64).int()
    table = torch.zeros(len(lens), -(-max(needed) // 16) * 16, dtype=torch.int32)
    for row, ids in zip(table, order.split(needed), strict=True):
        row[: len(ids)] = ids
    size = (sum(needed), s.block_size, s.num_kv_heads, s.head_dim)
    k, v = (s.random(*size, seed=2 * seed + i) for i in range(2))
    return k, v, table.to(s.device), torch.tensor(lens, dtype=torch.int32, device=s.device)


def decode_case(shape: Shape, lens: Sequence[int], size: str) -> Case:
    """One new token for each request; how the keys are split is planned before, as in a step."""
    from minivllm.decode_attention import Plan, decode_attention

    s = shape
    scale = shape.head_dim**-0.5

    def arguments(seed: int) -> tuple[Any, ...]:
        cache = paged(s, lens, seed)
        q = s.random(len(lens), s.num_heads, s.head_dim, seed=seed)
        return q, *cache, max(lens), scale, Plan(cache[-1])

    def plain(*given: Any) -> Tensor:
        return ops.decode_attention(*given[:-1])

    kv = 2 * sum(lens) * s.num_kv_heads * s.head_dim * s.item
    queries = 2 * len(lens) * s.num_heads * s.head_dim * s.item
    flops = 4 * sum(lens) * s.num_heads * s.head_dim
    return Case(
        "decode_attention", size, len(lens), kv + queries, arguments, decode_attention, plain, flops
    )


def prefill_case(shape: Shape, lens: Sequence[int], size: str) -> Case:
    """Whole prompts: each token sees those before it and itself."""
    from minivllm.gpu.prefill_attention import prefill_attention

    s = shape
    scale = shape.head_dim**-0.5
    starts = [sum(lens[:n]) for n in range(len(lens) + 1)]

    def arguments(seed: int) -> tuple[Any, ...]:
        k, v, table, seq_lens = paged(s, lens, seed)
        q = s.random(sum(lens), s.num_heads, s.head_dim, seed=seed)
        where = torch.tensor(starts, dtype=torch.int32, device=s.device)
        return q, k, v, table, where, seq_lens

    def ours(q: Tensor, *rest: Tensor) -> Tensor:
        out = torch.empty_like(q)
        prefill_attention(q, *rest, max(lens), scale, out)
        return out

    def plain(q: Tensor, k: Tensor, v: Tensor, table: Tensor, *_: Tensor) -> Tensor:
        parts = []
        for row, start, length in zip(range(len(lens)), starts, lens):
            keys, values = (ops.gather_blocks(x, table[row, None], length)[0] for x in (k, v))
            queries = q[start : start + length]
            parts.append(ops.prefill_attention(queries, keys, values, scale))
        return torch.cat(parts)

    heads = 2 * s.num_heads + 2 * s.num_kv_heads
    num_bytes = sum(lens) * heads * s.head_dim * s.item
    flops = 4 * s.num_heads * s.head_dim * sum(n * (n + 1) // 2 for n in lens)
    return Case("prefill_attention", size, sum(lens), num_bytes, arguments, ours, plain, flops)


def plan_case(shape: Shape, num_requests: int) -> Case:
    """How a step's keys are split: once for all layers. Torch has no such thing."""
    from minivllm.decode_attention import Plan

    def arguments(seed: int) -> tuple[Any, ...]:
        return (torch.full((num_requests,), 1000, dtype=torch.int32, device=shape.device),)

    plan = Plan(*arguments(0))
    num_bytes = 4 * (2 * num_requests + len(plan.item_request) + 1)
    size = f"{num_requests} requests"
    return Case("plan", size, num_requests, num_bytes, arguments, Plan, Plan)


def sampling_case(shape: Shape, num_rows: int) -> Case:
    """A token for each row of logits."""
    from minivllm.gpu.sampling_kernels import gumbel_sample

    def arguments(seed: int) -> tuple[Any, ...]:
        logits = shape.random(num_rows, shape.vocab, seed=seed)
        rows = torch.arange(num_rows, device=shape.device)
        return logits, torch.full((num_rows,), 0.6, device=shape.device), rows, rows + seed

    num_bytes = num_rows * (shape.vocab * shape.item + 4 + 3 * 8)
    return Case(
        "gumbel_sample", f"{num_rows} x {shape.vocab:,}", num_rows, num_bytes, arguments,
        gumbel_sample, sampler.gumbel_sample, compiled=num_rows > 1,
    )  # fmt: skip


def all_cases(shape: Shape) -> Iterator[Case]:
    """Decode steps of 1 to 256 requests, and a prompt of 8,192 tokens."""
    for num_tokens in (1, 256, 8192):
        yield from cache_cases(shape, num_tokens)
        yield from layer_cases(shape, num_tokens)
    yield plan_case(shape, 256)
    for count, context in ((1, 1024), (8, 1024), (64, 1024), (256, 768), (1, 32_768)):
        yield decode_case(shape, [context] * count, f"{count} x {context:,} keys")
    make = torch.Generator().manual_seed(0)
    mixed = torch.randint(100, 2001, (131,), generator=make).tolist()
    yield decode_case(shape, mixed, "131 x 100 to 2,000 keys")
    yield decode_case(shape, [32_768] + [640] * 63, "1 x 32,768 + 63 x 640 keys")
    for count, length in ((32, 256), (8, 1024), (1, 8192)):
        yield prefill_case(shape, [length] * count, f"{count} x {length:,} tokens")
    for num_rows in (1, 64, 256):
        yield sampling_case(shape, num_rows)


# -- timing ------------------------------------------------------------------------------------


def argument_sets(case: Case) -> list[tuple[Any, ...]]:
    """As many sets as leave the cache no chance, and each of them at least so often as to make
    MIN_CALLS calls."""
    count = min(MAX_SETS, -(-MANY_BYTES // case.num_bytes))
    sets = [case.arguments(seed) for seed in range(count)]
    return sets * -(-MIN_CALLS // count)


def microseconds(call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> float:
    """Of one call: the median over replays of a graph with a call for each of `arguments`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(*arguments[0])  # compiles what is not compiled yet
        call(*arguments[-1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(*one) for one in arguments]  # kept: each writes to memory of its own
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPLAYS + 1)]
    for _ in range(3):
        graph.replay()
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    del kept
    times = [first.elapsed_time(second) for first, second in zip(marks, marks[1:])]
    return statistics.median(times) * 1e3 / len(arguments)


def negate(source: Tensor, target: Tensor) -> None:
    """Read every number, and write every number."""
    torch.neg(source, out=target)


def limits(shape: Shape) -> dict[str, float]:
    """What the device can do at best, measured: moving bytes, multiplying, launching."""
    source = torch.zeros(2**28, device=shape.device)
    # By a kernel: a plain copy goes through the copy engine, which is slower.
    copy = microseconds(negate, [(source, torch.empty_like(source))] * 4)
    a, b = (shape.random(8192, 8192, seed=seed) for seed in range(2))
    product = microseconds(torch.mm, [(a, b)] * 4)
    one = torch.zeros(1, device=shape.device)
    return {
        "limit_gb_per_s": 2 * 2**30 / copy / 1e3,
        "limit_tflop_per_s": 2 * 8192**3 / product / 1e6,
        "launch_microseconds": microseconds(torch.Tensor.add_, [(one, 1.0)] * 200),
    }


def time_compiled(case: Case, sets: Sequence[tuple[Any, ...]]) -> float | None:
    """The twin as torch.compile has it, or None where it cannot compile it."""
    try:
        return microseconds(torch.compile(case.plain, dynamic=False), sets)
    except Exception as error:  # whatever goes wrong inside the compiler
        print(f"{case.kernel}: torch.compile: {str(error).splitlines()[0]}")
        return None


def measure(case: Case, compiles: bool) -> dict[str, Any]:
    """The times of one case, and what they come to."""
    sets = argument_sets(case)
    ours = microseconds(case.ours, sets)
    plain = None if case.plain is case.ours else microseconds(case.plain, sets)
    compiled = None
    if compiles and case.compiled:
        compiled = time_compiled(case, sets)
    return {
        "workload": f"{case.kernel}, {case.size}",
        "kernel": case.kernel,
        "size": case.size,
        "num_tokens": case.num_tokens,
        "num_bytes": case.num_bytes,
        "flops": case.flops,
        "microseconds": ours,
        "torch_microseconds": plain,
        "compiled_microseconds": compiled,
        "gb_per_s": case.num_bytes / ours / 1e3,
        "tflop_per_s": case.flops / ours / 1e6,
        "seconds": ours / 1e6,
        "output_tokens_per_s": case.num_tokens * 1e6 / ours,  # of this kernel in one layer
        "prompt_tokens_per_s": 0.0,
    }


def cells(result: dict[str, Any]) -> list[str]:
    """A line of the table."""
    times = (result[f"{who}microseconds"] for who in ("", "torch_", "compiled_"))
    shown = ["-" if t is None else f"{t:.2f}" if t < 100 else f"{t:,.0f}" for t in times]
    flops = f"{result['tflop_per_s']:.1f}" if result["flops"] else "-"
    return [result["workload"], *shown, f"{result['gb_per_s']:,.0f}", flops]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="KERNEL", help="these kernels alone")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile: quicker")
    common.add_files(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise ValueError("an NVIDIA GPU is needed; chapter 07 draws a recorded run")
    shape = Shape()
    about = {"dtype": "bfloat16", "device": "cuda", **limits(shape)}
    about |= {"machine": bench_results.describe_device("cuda"), **bench_results.provenance()}
    print(
        f"{about['machine']}: copies {about['limit_gb_per_s']:,.0f} GB/s, multiplies"
        f" {about['limit_tflop_per_s']:.0f} TFLOP/s, a launch {about['launch_microseconds']:.2f} us"
    )
    header = ("microseconds", "Triton", "torch", "compiled", "GB/s", "TFLOP/s")
    common.print_row(header, WIDTHS)
    results = []
    for case in all_cases(shape):
        if arguments.only and case.kernel not in arguments.only:
            continue
        results.append({**about, **measure(case, not arguments.no_compile)})
        common.print_row(cells(results[-1]), WIDTHS)
    if not results:
        raise ValueError(f"--only {' '.join(arguments.only)}: no kernel has such a name")
    common.save(arguments, results, "h200-kernels" if "H200" in about["machine"] else "kernels")


if __name__ == "__main__":
    common.run(main)
