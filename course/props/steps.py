"""What lesson 06 brings to its experiments: requests, plans, and a count of what the host sends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minivllm import model_runner, rows
from minivllm.request import Chunk, Request, SamplingParams
from minivllm.rows import StepPlan, to_device
from minivllm.step_input import padding_plan

CPU = torch.device("cpu")


def shape(num_layers: int, num_kv_heads: int, head_dim: int) -> Any:
    """Return what the size of a KV cache depends on."""
    return SimpleNamespace(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)


SHAPES = {
    "Llama-2-7B": shape(32, 32, 128),
    "Llama-3.1-8B": shape(32, 8, 128),
    "Qwen3-0.6B": shape(28, 8, 128),
    "SmolLM2-135M": shape(30, 3, 64),
}


def make_request(name: str, token_ids: Iterable[int], block_table: Iterable[int] = ()) -> Request:
    """Return a request with these tokens and blocks."""
    tokens = list(token_ids)
    params = SamplingParams(temperature=0)
    return Request(name, tokens, len(tokens), params, 64, block_table=list(block_table))


def long_texts(num_texts: int) -> list[Request]:
    """Return requests of 1,000 to 1,036 tokens with blocks of 16."""
    lengths = [1000 + n * n % 37 for n in range(num_texts)]
    return [make_request(str(n), [1] * k, range(-(-k // 16))) for n, k in enumerate(lengths)]


def decode_one(request: Request) -> None:
    """Give a request a token more, and a block where it needs one."""
    request.token_ids.append(1)
    if len(request.token_ids) % 16 == 1:
        request.block_table.append(7)


def make_plan(
    row_ids: Sequence[int], starts: Sequence[int], lengths: Sequence[int], num_decodes: int
) -> StepPlan:
    """Return a step of these chunks, all of which sample."""
    ends = [start + length for start, length in zip(starts, lengths)]
    plan = padding_plan(list(lengths), 3, max(ends), CPU)
    plan.row_ids = torch.tensor(row_ids)
    plan.starts = torch.tensor(starts)
    plan.num_decodes = num_decodes
    return plan


@contextmanager
def counting_numbers() -> Iterator[list[int]]:
    """Count the numbers that the host sends to the device; append a 0 to start another step."""
    numbers: list[int] = []

    def counting(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
        numbers[-1] += len(values)
        return to_device(values, dtype, device)

    modules: tuple[Any, ...] = (rows, model_runner)
    for module in modules:
        module.to_device = counting
    try:
        yield numbers
    finally:
        for module in modules:
            module.to_device = to_device


@torch.inference_mode()
def logits_after(
    llm: Any, token_ids: Sequence[int], parts: Sequence[int], company: Sequence[Chunk] = ()
) -> Tensor:
    """Return the logits after a text that is computed in parts of these lengths, a step for each.

    Parts of one token are decodes. `company` joins the last step.
    """
    runner, memory = llm.engine.runner, llm.engine.memory
    request, start = make_request("one", token_ids), 0
    memory.allocate(request, len(token_ids))
    for length in parts:
        chunk = Chunk(request, start, length, samples=True, is_decode=length == 1)
        start += length
        others = company if start == len(token_ids) else ()
        chunks = sorted([chunk, *others], key=lambda chunk: not chunk.is_decode)
        logits = runner.forward(runner.plan(chunks))
    runner.release(request)
    memory.free(request)
    return logits[-1]


def chunk_costs(chunks: Sequence[int]) -> dict[str, float]:
    """Return what it costs to compute a prompt in these chunks: a step takes 5 ms for the weights,
    25 µs for each token, and 1 µs for each 40 keys that a token looks at."""
    times, keys, end = [], 0, 0
    for length in chunks:
        start, end = end, end + length
        keys += end
        times.append(5 + 0.025 * length + length * (start + end) / 2 / 40 / 1000)
    return {
        "longest step (ms)": max(times),
        "all steps (ms)": sum(times),
        "keys read (thousands)": keys / 1000,
    }
