"""Ranks of tensor parallelism as threads of this process, for chapter 09: real collectives over
gloo, without the seconds that processes need to start; a model of a few kilobytes for them; and a
record of who waited for what."""

from __future__ import annotations

import json
import math
import threading
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minivllm import LLM, SamplingParams, ops
from minivllm.assembly import ranks
from minivllm.assembly.worker import work
from minivllm.checkpoint.weights import places
from minivllm.distributed.process_group import GroupError, ProcessGroup
from minivllm.model import CausalLM, Linear
from minivllm.model_config import ModelConfig
from minivllm.tensor_parallel import Part
from minivllm.tokenizer import byte_alphabet

# Of every engine in the chapter: small, and comparable token by token.
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch",
    "progress": False,
    "num_kv_blocks": 16,
    "max_num_seqs": 4,
    "distributed_timeout_seconds": 20,
}

# What a rank did: the call, and when it began and ended (seconds of time.perf_counter).
Marks = list[tuple[str, float, float]]
CALLS = ("send", "receive", "all_reduce", "all_gather", "broadcast")


def on_ranks(size: int, function: Callable[[ProcessGroup], Any], timeout: float = 20) -> list[Any]:
    """`function(group)` on each of `size` ranks at the same time; returns the results, by rank."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        group = ProcessGroup(store, rank, size, local=True)
        group.use(torch.device("cpu"), timeout)
        return function(group)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def watch(group: ProcessGroup) -> Marks:
    """From here on note each call of this rank's end of a group; returns the list that grows."""
    marks: Marks = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                marks.append((name, began, time.perf_counter()))

        return timed

    for name in CALLS:
        setattr(group, name, noted(name, getattr(group, name)))
    return marks


def answers(
    llm: LLM, prompts: Sequence[str | list[int]] = ([1, 2, 3], [9] * 20)
) -> list[list[int]]:
    """Return the token ids of eight greedy tokens for each prompt."""
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(list(prompts), greedy, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def timed(llm: LLM, prompts: Sequence[str]) -> tuple[list[list[int]], float]:
    """Return `answers` and generated tokens per second, after a first call that is not timed."""
    answers(llm, prompts[:1])
    began = time.perf_counter()
    found = answers(llm, prompts)
    return found, sum(map(len, found)) / (time.perf_counter() - began)


def numbers_held(
    shapes: Mapping[str, Sequence[int]], part_of: Callable[[str], Part | None]
) -> tuple[int, int]:
    """Return how many numbers of these tensors a rank holds, and how many there are in all."""
    held = 0
    total = 0
    for name, shape in shapes.items():
        part = part_of(name)
        count = math.prod(shape)
        total += count
        held += count if part is None else count * (part.stop - part.start) // part.whole
    return held, total


def _sum_of_ones(group: ProcessGroup, x: Tensor) -> None:
    group.all_reduce(x.fill_(1.0))


def time_sums(group: ProcessGroup, sizes: Sequence[int], tries: int = 30) -> dict[int, float]:
    """Return the microseconds of an all-reduce for each size in bytes, the fastest of `tries`."""
    found: dict[int, float] = {}
    for size in sizes:
        x = torch.ones(size // 4)
        again = partial(_sum_of_ones, group, x)
        seconds = timeit.repeat(again, number=1, repeat=tries)
        found[size] = 1e6 * min(seconds)
    return found


def linear(weight: Tensor, bias: Sequence[float] | None = None) -> Linear:
    """Return a product with this weight `[out, in]` and bias `[out]`, in memory of its own."""
    product = Linear(weight.shape[1], weight.shape[0], bias is not None, ops)
    product.weight.data = weight.clone()
    if product.bias is not None:
        product.bias.data = torch.tensor(bias)
    return product


def quickest(marks: Mapping[int, Marks], numbers: Iterable[int]) -> dict[int, Marks]:
    """Return `step_marks` of the step, among `numbers`, that took the leader the least time."""
    return min((step_marks(marks, n) for n in numbers), key=lambda step: step[0][-1][2])


def step_marks(marks: Mapping[int, Marks], number: int) -> dict[int, Marks]:
    """What each rank did in one step, the one that the leader's message `number` (from 0) began;
    times are seconds since then. A step ends where the next message begins."""
    sends = [began for name, began, _ in marks[0] if name == "send"]
    start, stop = sends[number], sends[number + 1]

    def within(calls: Marks) -> Marks:
        found = [call for call in calls if call[2] > start and call[1] < stop]
        if found and found[-1][0] == "receive" and found[-1][2] > stop:
            found.pop()  # it waits for the next message already
        # A worker waits for its message before the leader begins to send it.
        return [(name, max(a, start) - start, b - start) for name, a, b in found]

    return {rank: within(calls) for rank, calls in sorted(marks.items())}


class ThreadTeam(ProcessGroup):
    """Takes the place of `workers.Team`: the other ranks are threads. `marks` has what each rank
    did, by rank."""

    def __init__(self, size: int, module: str) -> None:
        store = dist.HashStore()
        self.marks: dict[int, Marks] = {}
        self.threads = [
            threading.Thread(target=self._work, args=(store, rank, size), daemon=True)
            for rank in range(1, size)
        ]
        for thread in self.threads:
            thread.start()
        super().__init__(store, 0, size, local=True)
        self.marks[0] = watch(self)

    def _work(self, store: Any, rank: int, size: int) -> None:
        with suppress(GroupError):  # if the leader breaks off, the others are of no use
            group = ProcessGroup(store, rank, size, local=True)
            self.marks[rank] = watch(group)
            work(group)

    def close(self) -> None:
        """Send the workers home and wait for them."""
        super().close()
        for thread in self.threads:
            thread.join(30)


@contextmanager
def ranks_as_threads() -> Iterator[None]:
    """Inside, an engine of several ranks has threads in the place of processes."""
    process_team = ranks.Team
    ranks.Team = ThreadTeam  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        ranks.Team = process_team  # type: ignore[misc]


def on_threads(path: str) -> tuple[list[list[int]], dict[int, Marks]]:
    """Return the `answers` of two ranks that are threads, and what each rank did."""
    with ranks_as_threads(), LLM(path, tensor_parallel_size=2, **SETTINGS) as llm:
        runner: Any = llm.engine.runner
        return answers(llm), runner.group.marks


# -- a model of a few kilobytes ----------------------------------------------------------------

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 259,  # a multiple of none of 2, 3 and 4
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "eos_token_id": 257,
}


# The shape of SmolLM2-135M.
SMOLLM2 = TINY | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a checkpoint of this model, without using memory."""
    model = CausalLM(config, 1, dtype=torch.bfloat16, device="meta")
    return {name: tuple(place.shape) for name, place in places(model, config).items()}


def make_tiny_checkpoint(folder: Path, **changes: Any) -> Path:
    """Write a Llama with random weights, the same each time, into `folder`; returns it.

    Its 259 tokens have no text: prompts are token ids.
    """
    from safetensors.torch import save_file

    settings = TINY | changes
    config = ModelConfig.from_dict(settings)
    model = CausalLM(config, 1, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data.copy_(torch.ones_like(values) if name.endswith("norm.weight") else values)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: place.clone() for name, place in places(model, config).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()), "utf-8")
    return folder


def _tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"trim_offsets": True},
        "post_processor": None,
        "decoder": byte_level | {"trim_offsets": True},
        "model": {
            "type": "BPE",
            "vocab": {char: byte for byte, char in enumerate(byte_alphabet())},
            "merges": [],
        },
    }
