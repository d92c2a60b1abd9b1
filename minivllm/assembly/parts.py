"""The parts of an engine that compute: checkpoint, backend, model, and the runner around them.

With several ranks, each rank has these parts. Does not make the parts that decide (see
`engine.build_engine`). Not built in the course.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from minivllm.assembly.backends import Backend, choose_backend, load_backend
from minivllm.assembly.devices import choose_device, choose_dtype
from minivllm.assembly.ranks import agree, assemble, closed_on_error
from minivllm.assembly.sizing import fill_in, require_trained_length
from minivllm.checkpoint.hub import resolve_model
from minivllm.checkpoint.weights import load_model, read_config
from minivllm.config import EngineConfig, known, replace
from minivllm.cuda_graphs import StepGraphs
from minivllm.distributed.process_group import ProcessGroup
from minivllm.gpu.prompt_buckets import PromptBuckets
from minivllm.leader import Leader
from minivllm.logits_processors import rank_tokens
from minivllm.model import CausalLM
from minivllm.model_runner import ModelRunner
from minivllm.tensor_parallel import choose_together, load_shard
from minivllm.tokenizer import read_eos_token_ids


class Parts(NamedTuple):
    """A loaded model with its checkpoint, settings and backend."""

    path: Path  # the checkpoint's directory
    config: EngineConfig  # every setting filled in
    model: CausalLM
    backend: Backend
    group: ProcessGroup | None = None  # the ranks that share the model; None: there is one


def load_parts(config: EngineConfig, progress: bool = True) -> Parts:
    """Load the model that `config` names, on the device and the backend that suit it; with
    `tensor_parallel_size`, start the workers as well.

    Raises ValueError where the model, the settings and the memory do not go together.
    """
    path = resolve_model(config.model_path or config.model)
    group = assemble(config, path)
    with closed_on_error(group):
        return load_rank(config, path, group, progress)


def load_rank(
    config: EngineConfig, path: Path, group: ProcessGroup | None, progress: bool
) -> Parts:
    """One rank's parts: its shard of the model in the directory `path`, or all of it."""
    shape = read_config(path)
    device = choose_device(config.device)
    if group is not None:
        device = group.use(device, config.distributed_timeout_seconds)
    dtype = choose_dtype(config.dtype, shape.dtype, device)
    name = choose_backend(
        config.attention_backend, device, config.block_size, shape.head_dim, dtype
    )
    backend = load_backend(name)
    config = replace(config, attention_backend=name)
    max_len = require_trained_length(config, shape.max_position)
    load = (path, shape, dtype, device, max_len)
    if group is None:
        model = load_model(*load, ops=backend.ops, progress=progress)
        config = fill_in(config, path, backend.prepare(model))
        return Parts(path, config, model, backend)

    model = load_shard(group, *load, ops=backend.ops, progress=progress)
    config = fill_in(config, path, backend.prepare(model), num_sharing=group.size)
    backend = backend._replace(sample=choose_together(backend.sample, group))
    return Parts(path, agree(config, group), model, backend, group)


def eos_token_ids_of(path: Path, vocab_size: int) -> tuple[int, ...]:
    """The ids that end an answer: those of the checkpoint that the model knows."""
    return tuple(i for i in read_eos_token_ids(path) if i < vocab_size)


# -- the runner -------------------------------------------------------------------------------


def build_runner(parts: Parts) -> ModelRunner | Leader:
    """The engine's runner; with several ranks, one that takes the workers along."""
    with closed_on_error(parts.group):
        runner = build_rank_runner(parts)
    return runner if parts.group is None else Leader(runner, parts.group)


def build_rank_runner(parts: Parts) -> ModelRunner:
    """This rank's runner, warm, and with graphs of its steps unless the settings refuse them."""
    backend = parts.backend
    runner = ModelRunner(
        parts.model,
        backend.ops,
        backend.sample,
        parts.model.config,
        parts.config,
        rank_tokens,
        None if parts.config.enforce_eager else build_graphs(backend, parts.config),
    )
    try:
        runner.warm_up()
    except BaseException:
        # Graphs hold the ranks' connections, which could not be closed before them.
        runner.close()
        raise
    return runner


def build_graphs(backend: Backend, config: EngineConfig) -> StepGraphs:
    """Room for graphs of decode steps, and of small steps with prompts where that is possible."""
    max_num_seqs = known(config.max_num_seqs)
    max_seq_len = known(config.max_model_len)
    device = torch.device(config.device)
    if not backend.captures_prompts or device.type != "cuda":
        return StepGraphs(max_num_seqs, max_seq_len, device)
    prompts = PromptBuckets(max_num_seqs, max_seq_len, device)
    return StepGraphs(max_num_seqs, max_seq_len, device, prompts)
