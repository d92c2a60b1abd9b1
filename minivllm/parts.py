"""What has to be loaded before an engine can be put together: checkpoint, backend, model.

Leaves out the parts that need no files (`engine.build_engine` makes them). Given (no notebook
builds it).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from minivllm.backends import Backend, choose_backend, load_backend
from minivllm.config import EngineConfig, replace
from minivllm.devices import choose_device, choose_dtype
from minivllm.hub import resolve_model
from minivllm.kv_sizing import fill_in
from minivllm.model import CausalLM
from minivllm.tokenizer import read_eos_token_ids
from minivllm.weights import load_model, read_config


class Parts(NamedTuple):
    """A loaded model and what goes with it."""

    path: Path  # the checkpoint's directory
    config: EngineConfig  # every setting filled in
    model: CausalLM
    backend: Backend


def load_parts(config: EngineConfig, progress: bool = True) -> Parts:
    """Load the model that `config` names, on the device and the backend that suit it.

    Raises ValueError where the model, the settings and the memory do not go together.
    """
    path = resolve_model(config.model_path or config.model)
    shape = read_config(path)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, shape.dtype, device)
    max_len = config.max_model_len or shape.max_position
    name = choose_backend(
        config.attention_backend, device, config.block_size, shape.head_dim, dtype
    )
    backend = load_backend(name)
    model = load_model(path, shape, dtype, device, max_len, ops=backend.ops, progress=progress)
    backend.prepare(model)
    config = fill_in(replace(config, attention_backend=name), path, model)
    return Parts(path, config, model, backend)


def eos_token_ids_of(path: Path, vocab_size: int) -> tuple[int, ...]:
    """The ids that end an answer: those of the checkpoint that the model knows."""
    return tuple(i for i in read_eos_token_ids(path) if i < vocab_size)
