"""Ranks of tensor parallelism as threads of this process, for chapter 09: real collectives over
gloo, without the seconds that processes need to start; a model of a few kilobytes for them; and a
record of who waited for what."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minivllm.assembly import ranks
from minivllm.assembly.worker import work
from minivllm.checkpoint.weights import places
from minivllm.distributed.process_group import GroupError, ProcessGroup
from minivllm.model import CausalLM
from minivllm.model_config import ModelConfig
from minivllm.tokenizer import byte_alphabet

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
